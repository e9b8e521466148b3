"""`whyidle run` and `record` with the probe: the command is itself, and is seen."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from whyidle import run_command
from whyidle.run_command import default_folder, probe_environment, site_folder
from whyidle.store import Recording

CLI = [sys.executable, str(Path(__file__).with_name("agent_cli.py"))]


def cli(
    *arguments: str, folder: Path, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments],
        cwd=folder,
        env={**os.environ, **(more or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_takes_the_place_of_ours(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getpid(), os.environ['WHYIDLE_PROBE_DIR']); sys.exit(7)"
    process = subprocess.Popen(
        [*CLI, "run", "--probe-dir", "pages", "--", sys.executable, "-c", code],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=60)
    assert out.split() == [str(process.pid), str(tmp_path / "pages")]
    assert process.returncode == 7


def test_a_signal_ends_the_command_itself(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            *CLI,
            "run",
            "--",
            sys.executable,
            "-c",
            "import time; print(1, flush=True); time.sleep(60)",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"1\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


def test_what_cannot_be_run_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    (tmp_path / "plain").chmod(0o755)
    for words, said in (
        ([], "there is no command to run: write whyidle run -- CMD ..."),
        (["--"], "there is no command to run"),
        (["--", "no-such-program"], "cannot run no-such-program: there is no such program"),
        (["--", "./plain"], "cannot run ./plain: Exec format error"),
    ):
        done = cli("run", *words, folder=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_made_costs_the_probe_and_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    code = "import os; print(os.environ.get('WHYIDLE_PROBE'))"
    for command in (["run"], ["record", "-o", "recording"]):
        done = cli(
            *command, "--probe-dir", "file", "--", sys.executable, "-c", code, folder=tmp_path
        )
        assert (done.returncode, done.stdout) == (0, "None\n")
        assert "the probe is off: cannot use the folder" in done.stderr
        assert "name another one with --probe-dir" in done.stderr


def test_the_environment_keeps_what_is_in_it(tmp_path: Path) -> None:
    site = str(site_folder())
    environ = {"PYTHONPATH": f"/a{os.pathsep}{os.pathsep}/b", "HOME": "/home/x"}
    assert probe_environment(environ, tmp_path / "pages") == tmp_path / "pages"
    assert environ["PYTHONPATH"] == os.pathsep.join((site, "/a", "", "/b"))
    assert environ["HOME"] == "/home/x"
    # Once more changes nothing, and the folder is that of the environment.
    again = dict(environ)
    assert probe_environment(again, None) == tmp_path / "pages"
    assert again == environ
    assert (tmp_path / "pages").is_dir()
    assert sorted(path.name for path in Path(site).glob("*.py")) == ["sitecustomize.py"]


def test_the_folder_in_shared_memory_is_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(run_command, "SHARED_MEMORY", str(memory))
    monkeypatch.setattr(run_command, "SERVICE_FOLDER", str(tmp_path / "service"))
    mine = memory / f"whyidle-probe-{os.geteuid()}"
    assert default_folder() == mine
    assert stat.S_IMODE(mine.stat().st_mode) & 0o022 == 0
    mine.rmdir()
    # Somebody has laid a link where it would be.
    mine.symlink_to(tmp_path)
    other = default_folder()
    assert other.parent == memory
    assert other != mine
    assert other.name.startswith("whyidle-probe-")
    assert stat.S_IMODE(other.stat().st_mode) == 0o755
    (tmp_path / "service").mkdir()
    assert default_folder() == tmp_path / "service"


TRAINER = """
import time, whyidle_probe
for _ in range(30):
    time.sleep(0.05)
    whyidle_probe.step()
with whyidle_probe.phase("checkpoint_save"):
    time.sleep(0.3)
time.sleep(3)  # under load the sampler may begin two seconds late
"""


def test_a_recording_has_what_the_trainer_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    words = ["--probe-dir", "pages", "--", sys.executable, "train.py"]
    done = cli("record", "-o", "with", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    with Recording([tmp_path / "with"]) as recording:
        rows = recording.con.execute(
            "SELECT max(steps), max(checkpoint_save_ns), count(*) FROM probe"
        ).fetchone()
        events = recording.con.execute(
            "SELECT kind, max(step), sum(end_ns - begin_ns) FROM probe_event "
            "WHERE kind <> 'gc' GROUP BY ALL ORDER BY ALL"
        ).fetchall()
        who = recording.con.execute("SELECT DISTINCT page, rank FROM probe_info").fetchall()
        bad = recording.con.execute(
            "SELECT * FROM collector_error WHERE collector = 'probe'"
        ).fetchall()
    assert rows is not None
    assert rows[0] == 30
    assert 300_000_000 <= rows[1] < 2_000_000_000
    assert rows[2] >= 4
    assert [event[:2] for event in events] == [("checkpoint_save", 30), ("step", 30)]
    assert events[0][2] >= 300_000_000
    # The first step begins where the probe was loaded: in its own call.
    assert events[1][2] >= 29 * 50_000_000
    assert len(who) == 1
    assert who[0][0].startswith(str(tmp_path / "pages"))
    assert bad == []


def test_a_recording_without_the_probe_leaves_the_command_alone(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ.get('WHYIDLE_PROBE'), 'whyidle_probe' in sys.modules)"
    words = ["--no-probe", "--", sys.executable, "-c", code]
    began = time.monotonic()
    done = cli("record", "-o", "without", *words, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "None False\n"), done.stderr
    assert time.monotonic() - began < 60
