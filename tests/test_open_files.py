"""Paths behind descriptors, of real processes: what is skipped, and never for long."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from whyidle.open_files import _SKIPS, OpenFiles


def paths(files: OpenFiles, pid: int) -> dict[int, str]:
    answer = files(pid)
    assert isinstance(answer, tuple)
    return dict(answer)  # type: ignore[arg-type]


def test_files_and_no_pipes_or_devices(tmp_path: Path) -> None:
    ends = os.pipe()
    files = OpenFiles("/")
    with (tmp_path / "a").open("wb") as file, open("/dev/null", "rb") as null:  # noqa: PTH123
        for _ in range(3 * _SKIPS):
            found = paths(files, os.getpid())
            assert found[file.fileno()] == str(tmp_path / "a")
            assert not {*ends, null.fileno()} & found.keys()
    for end in ends:
        os.close(end)


def test_a_number_that_was_a_pipe_and_is_a_file_shows_after_some_looks(tmp_path: Path) -> None:
    files = OpenFiles("/")
    end, other = os.pipe()
    assert end not in paths(files, os.getpid())
    with (tmp_path / "a").open("wb") as file:
        os.dup2(file.fileno(), end)
        seen = [end in paths(files, os.getpid()) for _ in range(_SKIPS + 1)]
    assert seen[-1], "at the latest when all is read again"
    os.close(end)
    os.close(other)


class Child:
    """A process that does what it is told: its descriptors are nobody else's."""

    def __init__(self) -> None:
        code = "import os, sys\nfor line in sys.stdin:\n exec(line)\n print('done', flush=True)"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def do(self, line: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.end()


def test_a_number_that_was_closed_at_a_look_is_read_again_at_once(
    tmp_path: Path, child: Child
) -> None:
    files = OpenFiles("/")
    child.do("a, b = os.pipe(); os.dup2(a, 99)")
    assert 99 not in paths(files, child.pid)
    child.do("os.close(99)")
    assert 99 not in paths(files, child.pid)
    child.do(f"f = open({str(tmp_path / 'a')!r}, 'wb'); os.dup2(f.fileno(), 99)")
    assert paths(files, child.pid)[99] == str(tmp_path / "a")


def test_a_process_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        OpenFiles("/")(2**22 + 1)
