"""The live host: whole files, kept descriptors that never answer for another, errors by name."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from whyidle import host as host_module
from whyidle.ask import askers
from whyidle.clock import SystemClock, VirtualClock
from whyidle.host import LiveHost, NvmlUnavailableError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("proc/self", "sys/class/net/eth0", "sys/devices/pci/net"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/stat").write_bytes(b"cpu 1 2\n")
    (tmp_path / "sys/class/net/eth0/speed").write_bytes(b"100\n")
    return tmp_path


def live(tree: Path) -> LiveHost:
    return LiveHost(str(tree), VirtualClock())


def test_files_are_read_whole_whatever_their_size(tree: Path) -> None:
    host = live(tree)
    for size in (0, 1, 255, 256, 257, 4095, 4096, 4097, 100_000, 3, 70_000):
        data = os.urandom(size)
        (tree / "proc/stat").write_bytes(data)
        (tree / "sys/class/net/eth0/speed").write_bytes(data[:4000])
        assert host.read_bytes("proc/stat") == data
        assert host.read_bytes("sys/class/net/eth0/speed") == data[:4000]
    host.close()


def test_a_file_too_big_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "FILE_LIMIT_BYTES", 10_000)
    (tree / "proc/stat").write_bytes(bytes(20_000))
    host = live(tree)
    with pytest.raises(OSError, match="is larger than"):
        host.read("proc/stat")
    (tree / "proc/stat").write_bytes(b"x")
    assert host.read("proc/stat") == "x"
    host.close()


def test_text_that_is_no_utf8_is_still_an_answer(tree: Path) -> None:
    (tree / "proc/stat").write_bytes(b"a\xffb")
    host = live(tree)
    assert host.read("proc/stat").encode("utf-8", "surrogateescape") == b"a\xffb"
    host.close()


def test_what_is_missing_is_named_without_the_root(tree: Path) -> None:
    host = live(tree)
    with pytest.raises(FileNotFoundError):
        host.read("proc/nothing")
    with pytest.raises(FileNotFoundError):
        host.names("sys/nothing")
    with pytest.raises(FileNotFoundError):
        host.stat("proc/nothing")
    host.close()


def test_a_fifo_does_not_block(tree: Path) -> None:
    os.mkfifo(tree / "proc/pipe")
    host = live(tree)
    begin = time.monotonic()
    with pytest.raises(OSError, match="Illegal seek"):
        host.read("proc/pipe")
    assert time.monotonic() - begin < 5
    host.close()


def test_names_are_sorted_and_links_are_resolved_inside_the_tree(tree: Path) -> None:
    host = live(tree)
    (tree / "sys/class/net/eth1").symlink_to("../../devices/pci/net")
    (tree / "sys/class/net/out").symlink_to("/etc")
    assert host.names("sys/class/net") == ("eth0", "eth1", "out")
    assert host.link("sys/class/net/eth1") == "sys/devices/pci/net"
    with pytest.raises(FileNotFoundError):
        host.link("sys/class/net/out")
    stat = host.stat("proc/stat")
    assert stat.is_file
    assert stat.size_bytes == 8
    assert not host.stat("sys/class/net/eth1").is_file
    host.close()


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_are_kept_bounded_and_let_go(tree: Path) -> None:
    before = _open_files()
    host = LiveHost(str(tree), VirtualClock(), descriptor_limit=8)
    for number in range(30):
        (tree / f"proc/f{number}").write_bytes(b"%d" % number)
    for _ in range(2):
        for number in range(30):
            assert host.read(f"proc/f{number}") == str(number)
            assert host.read_bytes(f"proc/f{number}", keep=False) == b"%d" % number
    assert _open_files() == before + 8
    host.forget("proc/f2")
    assert _open_files() < before + 8
    assert host.read("proc/f29") == "29"
    host.close()
    assert _open_files() == before


def test_files_that_were_not_to_be_kept_are_not(tree: Path) -> None:
    host = live(tree)
    before = _open_files()
    host.read_bytes("proc/stat", keep=False)
    assert _open_files() == before
    with pytest.raises(IsADirectoryError):
        host.read_bytes("proc/self", keep=False)
    assert _open_files() == before
    host.close()


def test_a_process_that_ended_never_answers_for_another() -> None:
    host = LiveHost("/", SystemClock())
    process = subprocess.Popen(["sleep", "60"])
    try:
        path = f"proc/{process.pid}/stat"
        assert host.read(path).startswith(f"{process.pid} (")
        process.kill()
        process.wait()
        with pytest.raises(ProcessLookupError) as told:
            host.read(path)
        assert told.value.filename == path
        with pytest.raises(FileNotFoundError):
            host.read(path)
    finally:
        host.close()


def test_a_host_without_nvml_says_so(tree: Path) -> None:
    host = live(tree)
    with pytest.raises(NvmlUnavailableError, match="has no NVML"):
        host.nvml("gpus")
    with pytest.raises(KeyError):
        host.ask("clock")
    with pytest.raises(FileNotFoundError):
        host.events("kmsg")
    host.close()


def test_the_clocks_are_read_together() -> None:
    clock = SystemClock()
    host = LiveHost("/", clock, askers=askers(clock))
    answer = host.ask("clock")
    assert isinstance(answer, tuple)
    mono, boot, wall, bracket, error, estimate, synchronised = answer
    assert isinstance(mono, int)
    assert isinstance(boot, int)
    assert isinstance(wall, int)
    assert 0 <= clock.mono_ns() - mono < 10**9
    assert boot >= mono
    assert abs(clock.wall_ns() - wall) < 10**9
    assert isinstance(bracket, int)
    assert 0 <= bracket < 10**8
    assert (error is None) == (estimate is None) == (synchronised is None)
    host.close()
