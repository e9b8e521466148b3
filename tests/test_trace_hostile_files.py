"""Hostile files and places: pipes, loops, bombs, closed doors, and names that are no text."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hostile import DIAGNOSE, STEP_S, deadline, process, refused, run, small_text
from trace_run import check_one_sentence, diagnose

# Loading the libraries takes about 150 MB; the bombs would take 500 MB to 2 GB.
PEAK_KB = 450_000


@pytest.fixture(scope="module")
def text() -> str:
    return small_text()


def test_two_files_of_one_rank_are_not_taken_for_two_ranks(text: str, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(text)
    outcome = run(tmp_path)
    sentence = outcome.stderr if outcome.code == 2 else json.dumps(outcome.found()["not_seen"])
    assert "a.json" in sentence or "b.json" in sentence


def test_the_same_file_named_twice_counts_once(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    path.write_text(text)
    once, twice = run(path), run(path, path)
    if twice.code != 2:
        assert twice.found()["totals"] == once.found()["totals"]


def test_places_with_nothing_in_them(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty" in refused(empty)
    useless = tmp_path / "useless"
    useless.mkdir()
    (useless / "notes.txt").write_text("nothing")
    (useless / "package.json").write_text('{"name": "x"}')
    (useless / "deeper").mkdir()
    assert "useless" in refused(useless)


def test_a_missing_path_suggests_the_one_beside_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    sentence = refused(tmp_path / "rank-O.json")
    assert "rank-O.json" in sentence
    assert "rank-0.json" in sentence
    assert "nowhere" in refused(tmp_path / "nowhere" / "at" / "all")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_things_that_are_no_files(text: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    assert "pipe.json" in refused(pipe)
    for device in ("/dev/zero", "/dev/null"):
        assert device in refused(Path(device))
    folder = tmp_path / "mixed"
    folder.mkdir()
    os.mkfifo(folder / "pipe.json")
    (folder / "zero.json").symlink_to("/dev/zero")
    (folder / "rank-0.json").write_text(text)
    assert len(run(folder).found()["gpus"]) == 1


def test_links_that_lead_round(text: str, tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    assert "loop.json" in refused(tmp_path / "loop.json")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "again").symlink_to(folder)
    (folder / "gone.json").symlink_to(tmp_path / "nowhere")
    (folder / "loop.json").symlink_to(folder / "loop.json")
    (folder / "rank-0.json").write_text(text)
    assert len(run(folder).found()["gpus"]) == 1


def test_a_trace_without_a_gpu(text: str, tmp_path: Path) -> None:
    trace = json.loads(text)
    trace["traceEvents"] = [
        event
        for event in trace["traceEvents"]
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    path = tmp_path / "cpu-only.json"
    path.write_text(json.dumps(trace))
    assert "cpu-only.json" in refused(path)


def test_an_option_that_is_none() -> None:
    with deadline():
        outcome = diagnose("--josn", "x")
    assert outcome.code == 2
    assert "Traceback" not in outcome.stderr


def _bomb(path: Path, head: bytes, filling: bytes, tail: bytes, megabytes: int) -> None:
    """Write a gzip of members that unfolds to `megabytes` of one filling."""
    unit = 32 << 20
    member = gzip.compress(filling * (unit // len(filling)), compresslevel=1, mtime=0)
    with path.open("wb") as out:
        out.write(gzip.compress(head))
        for _ in range(megabytes // 32):
            out.write(member)
        out.write(gzip.compress(tail))


BOMBS: dict[str, tuple[bytes, bytes, bytes]] = {
    "spaces_first": (b"", b" ", b"{}"),
    "spaces_between": (b'{"traceEvents": [', b" ", b"]}"),
    "one_text": (b'{"traceEvents": [{"ph": "X", "name": "', b"k", b'"}]}'),
    "one_number": (b'{"traceEvents": [{"ph": "X", "ts": ', b"1", b"}]}"),
    "nested": (b'{"traceEvents": [', b"[", b"]}"),
    "objects": (b'{"traceEvents": [', b"{},", b"{}]}"),
    "no_events": (b'{"a": "', b"k", b'"}'),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_stays_small_in_memory(kind: str, tmp_path: Path) -> None:
    head, filling, tail = BOMBS[kind]
    path = tmp_path / "bomb.json.gz"
    megabytes = {"spaces_first": 2048, "objects": 32}.get(kind, 256)
    _bomb(path, head, filling, tail, megabytes)
    outcome, peak_kb = process(tmp_path, "--json", path)
    check_one_sentence(outcome)
    assert "bomb.json.gz" in outcome.stderr
    assert peak_kb < PEAK_KB, f"{peak_kb} kB"


@pytest.fixture
def someone_else() -> tuple[str, ...]:
    """Return what runs a command as a user whom file modes bind; skips where that is not to be."""
    if os.geteuid() != 0:
        return ()
    prefix = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    if shutil.which("setpriv") is None:
        pytest.skip("root reads everything, and there is no setpriv to become someone else")
    if subprocess.run([*prefix, sys.executable, "-c", "import whyidle_rules"]).returncode:
        pytest.skip("an unprivileged user cannot reach this interpreter")
    return prefix


def test_a_file_that_may_not_be_read(
    text: str, tmp_path: Path, someone_else: tuple[str, ...]
) -> None:
    with tempfile.TemporaryDirectory() as open_to_all:
        folder = Path(open_to_all)
        folder.chmod(0o755)
        path = folder / "rank-0.json"
        path.write_text(text)
        path.chmod(0)
        closed = folder / "closed"
        closed.mkdir(mode=0)
        for source in (path, folder, closed):
            outcome, _ = process(tmp_path, "--json", source, prefix=someone_else)
            check_one_sentence(outcome)
            assert (source if source == closed else path).name in outcome.stderr
            assert "permi" in outcome.stderr.lower()


def test_names_that_are_no_text_are_printed_all_the_same(text: str, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/rank-\xff-\xc3(.json"
    with open(name, "wb") as out:  # noqa: PTH123
        out.write(text.encode()[:-5000])
    for locale, form in (("C", ["--json"]), ("C", []), ("C.UTF-8", [])):
        more = {"LC_ALL": locale, "PYTHONIOENCODING": "", "PYTHONUTF8": "0"}
        outcome, _ = process(tmp_path, *form, name, environment=more)
        assert outcome.code in (0, 1), outcome.stderr
        assert "Traceback" not in outcome.stderr


def test_names_in_a_trace_cannot_drive_the_terminal(text: str, tmp_path: Path) -> None:
    evil = "\\u001b]0;owned\\u0007\\u001b[2J"
    path = tmp_path / "rank-0.json"
    path.write_text(text.replace("ProfilerStep#", f"{evil}ProfilerStep#").replace("A100", evil))
    outcome, _ = process(tmp_path, path)
    assert outcome.code in (0, 1), outcome.stderr
    assert "\x1b" not in outcome.stdout + outcome.stderr
    assert "\x07" not in outcome.stdout + outcome.stderr


def test_a_reader_that_leaves_early_is_no_failure(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    path.write_text(text)
    command = f"{shlex.join([*DIAGNOSE, '--json', str(path)])} | head -c 10"
    done = subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, timeout=STEP_S, check=False
    )
    assert b"Traceback" not in done.stderr, done.stderr
