"""record, agent, replay, export, tables: exit codes, signals, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from whyidle.layout import JOURNAL, SEGMENT
from whyidle.schema import VERSION
from whyidle.store import Recording

CLI = [sys.executable, str(Path(__file__).with_name("agent_cli.py"))]


def run(*arguments: str, folder: Path, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts commands, in a process group of their own as a shell does, and ends them all."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*CLI, *arguments], cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def wait_for(done: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if done():
            return
        time.sleep(0.02)
    raise AssertionError(f"still not so after {seconds} s")


def processes_of(recording: Path) -> dict[str, int]:
    """Return the pids of the sampler and keeper that work on a recording, by module."""
    found: dict[str, int] = {}
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except (OSError, NotADirectoryError):
            continue
        if "-m" in words and str(recording) in words:
            found[words[words.index("-m") + 1]] = int(folder.name)
    return found


def ticks(recording: Path) -> int:
    with Recording([recording]) as opened:
        assert opened.damaged == []
        found = opened.con.execute("SELECT count(*) FROM tick").fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("import time; time.sleep(2.5)", 0),
        ("import sys; sys.exit(7)", 7),
        ("import os; os.kill(os.getpid(), 15)", 128 + 15),
    ],
)
def test_record_passes_the_commands_exit_code_on(tmp_path: Path, script: str, status: int) -> None:
    done = run(
        "record", "-o", "r", "--node", "n1", "--", sys.executable, "-c", script, folder=tmp_path
    )
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("whyidle record: recorded ")
    assert last.endswith("in r; now run: diagnose r")
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert manifest["format"] == "whyidle.recording/1"
    assert manifest["schema_version"] == VERSION
    assert processes_of(tmp_path / "r") == {}
    assert list((tmp_path / "r").rglob("*.wsp")) == []
    if status == 0:
        assert ticks(tmp_path / "r") > 30
        with Recording([tmp_path / "r"]) as recording:
            assert recording.nodes == ["n1"]
            # The command itself is watched, with no GPU on the machine.
            commands = recording.con.execute("SELECT command FROM process_info").fetchall()
        assert any("time.sleep(2.5)" in (command or "") for (command,) in commands)


def test_the_command_has_the_terminal_to_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CLI, "record", "-o", "r", "--", "cat"],
        cwd=tmp_path,
        input="through",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "through")


def test_record_names_its_folder_by_the_time(tmp_path: Path) -> None:
    assert run("record", "--", "true", folder=tmp_path).returncode == 0
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("whyidle-20")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["record", "-o", "r"], "there is no command to record: write whyidle record -- CMD ..."),
        (["record", "-o", "r", "--", "no-such-program"], "cannot run no-such-program: there is no"),
        (["record", "-o", "file/r", "--", "true"], "cannot record into file/r: Not a directory"),
        (["record", "--node", "a/b", "--", "true"], "'a/b' cannot name a node"),
        (["replay", "file", "-o", "r"], "file is not a journal of whyidle"),
        (["export", "nowhere", "-o", "r"], "there is no nowhere"),
        (["tables", "gpu_stat"], "there is no table gpu_stat; did you mean gpu_state?"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "file").write_text("x")
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"whyidle: {said}")
    assert done.stdout == ""


def test_a_second_record_on_a_node_runs_its_command_all_the_same(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    first = started("record", "-o", "r", "--", "sleep", "30")
    wait_for(lambda: len(processes_of(tmp_path / "r")) == 2)
    second = run("record", "-o", "r", "--", sys.executable, "-c", "print(7)", folder=tmp_path)
    assert (second.returncode, second.stdout) == (0, "7\n")
    assert "another agent of this node records into r already" in second.stderr
    agent = run("agent", "-o", "r", folder=tmp_path)
    assert agent.returncode == 2
    assert "another agent of this node is recording into r" in agent.stderr
    first.send_signal(signal.SIGTERM)  # is passed on to the command
    assert first.wait(30) == 128 + signal.SIGTERM


def test_ctrl_c_ends_the_command_and_keeps_the_recording(tmp_path: Path) -> None:
    """On a terminal of its own: the command gets the signal once, from the terminal."""
    script = (
        "import signal, time\n"
        "def caught(*_): print('caught', flush=True)\n"
        "signal.signal(signal.SIGINT, caught)\n"
        "print('ready', flush=True)\n"
        "end = time.time() + 2.5\n"
        "while time.time() < end: time.sleep(0.05)\n"
        "raise SystemExit(5)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(CLI[0], [*CLI, "record", "-o", "r", "--", sys.executable, "-c", script])
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 4096)
    wait_for(lambda: len(processes_of(tmp_path / "r")) == 2)
    time.sleep(0.7)
    os.write(terminal, b"\x03")
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:
            break
        if not chunk:
            break
        said += chunk
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 5
    assert said.count(b"caught") == 1
    assert b"Traceback" not in said
    assert b"recorded " in said
    assert ticks(tmp_path / "r") > 5


def test_what_is_killed_is_started_again_and_little_is_lost(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    recording = tmp_path / "r"
    agent = started("agent", "-o", str(recording), "--node", "n1")
    wait_for(lambda: list(recording.rglob("*.wsp")))
    before = processes_of(recording)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(processes_of(recording)) == 2)
    wait_for(lambda: len(list(recording.rglob("*.wsp"))) >= 1)
    wait_for(lambda: set(processes_of(recording).values()).isdisjoint(before.values()))
    time.sleep(2)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) == 0
    assert agent.stderr is not None
    said = agent.stderr.read().decode()
    assert "whyidle.sampler_process ended with status -9; started again in 1 s" in said
    assert "whyidle.keeper_process ended with status -9" in said
    assert processes_of(recording) == {}
    with Recording([recording]) as opened:
        gap = opened.con.execute(
            "SELECT max(mono_ns - before) FROM (SELECT mono_ns, lag(mono_ns) OVER "
            "(ORDER BY mono_ns) AS before FROM clock)"
        ).fetchone()
    assert gap is not None
    assert gap[0] < 6e9  # a second to notice, one of pause, the start, the row lost


def test_nothing_is_left_running_when_the_agent_itself_is_killed(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    recording = tmp_path / "r"
    agent = started("agent", "-o", str(recording))
    wait_for(lambda: list(recording.rglob("*.wsp")))
    agent.kill()
    wait_for(lambda: processes_of(recording) == {})
    assert ticks(recording) > 0
    # The next agent takes the folder over at once.
    again = started("agent", "-o", str(recording))
    wait_for(lambda: len(processes_of(recording)) == 2)
    again.send_signal(signal.SIGINT)
    assert again.wait(60) == 0


def test_a_journal_is_replayed_into_a_recording(tmp_path: Path) -> None:
    live = run("record", "-o", "r", "--journal", "--", "sleep", "2.5", folder=tmp_path)
    assert live.returncode == 0
    (journal,) = (tmp_path / "r").rglob(f"*{JOURNAL}")
    done = run("replay", str(journal), "-o", "again", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "replayed " in done.stderr
    (_,) = (tmp_path / "again").rglob(f"*{SEGMENT}")
    tables = ("cpu", "vmstat", "block_device", "net_link", "process", "clock", "pressure")
    with Recording([tmp_path / "r"]) as first, Recording([tmp_path / "again"]) as second:
        for table in tables:
            query = f"SELECT * FROM {table} ORDER BY ALL"
            wanted = first.con.execute(query).fetchall()
            assert second.con.execute(query).fetchall() == wanted, table
            assert wanted or table in ("net_link", "pressure", "block_device")


def test_a_recording_is_exported_and_read_back(tmp_path: Path) -> None:
    assert run("record", "-o", "r", "--", "sleep", "1.5", folder=tmp_path).returncode == 0
    done = run("export", "r", "-o", "parquet", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ticks(tmp_path / "parquet") == ticks(tmp_path / "r") > 0


def test_tables_are_listed_with_their_units(tmp_path: Path) -> None:
    done = run("tables", "gpu_activity", "pressure", folder=tmp_path)
    assert done.returncode == 0
    assert "gpu_activity: What a GPU did" in done.stdout
    assert "counter [ns]" in done.stdout
    assert "vmstat" not in done.stdout
    assert run("tables", folder=tmp_path).stdout.count("\n\n") > 10
