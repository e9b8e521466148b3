"""What the kernel does to a job: throttled devices, late file systems, quotas, busy neighbours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fuse_fs import SlowFs, privileged, slow_fs
from fuse_fs import usable as fuse_usable
from stalls import network
from stalls.scenario import Setup

_CGROUPS = Path("/sys/fs/cgroup")
_IMAGE_BYTES = 512 << 20
_PERIOD_US = 100_000
_BURN = "x = 0\nwhile True:\n    x += 1\n"
# Reads of 4 KiB, one after the other, past the page cache: a disk that is never idle, and fast.
_READ = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
room, size = mmap.mmap(-1, 4096), os.fstat(file).st_size
while True:
    for offset in range(0, size - 4096, 4096):
        os.preadv(file, [room], offset)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Where a job runs. `command`: the words before its own; `change`: what half-time does."""

    data: Path
    out: Path
    command: tuple[str, ...]
    change: Callable[[], None]


def problem(setup: Setup) -> str | None:
    """None if this machine can inject it, else why not."""
    if not privileged():
        return "injecting stalls needs root and CAP_SYS_ADMIN"
    if setup.link_bytes_per_s and (why := network.problem()):
        return why
    setup = setup.of_rank(setup.late_one)
    if "fuse" in setup.places and (why := fuse_usable()):
        return why
    if _limits(setup) and not os.access(_controller("blkio", "io"), os.W_OK):
        return "no cgroup controller for block I/O that we may use"
    if "device" in setup.places and not Path("/dev/loop-control").exists():
        return "no loop devices"
    if setup.quota_cpus and not os.access(_controller("cpu", "cpu"), os.W_OK):
        return "no cgroup controller for CPU time that we may use"
    if setup.affinity and not set(setup.affinity) <= os.sched_getaffinity(0):
        return f"CPUs {setup.affinity} are not ours to use"
    return None


@contextmanager
def ground(setup: Setup, folder: Path) -> Iterator[Ground]:
    """Sets everything up, and takes it down again; `folder` is on an ordinary disk."""
    with ExitStack() as stack:
        enter = stack.enter_context
        places, procs = {"cached": folder / "cached"}, []
        places["cached"].mkdir(parents=True)
        fs: SlowFs | None = None
        if "fuse" in setup.places:
            _fill(folder / "behind", setup)
            fs = enter(slow_fs(folder / "fuse", folder / "behind", {}, kind=setup.fuse_kind))
            places["fuse"] = fs.mountpoint
        if "device" in setup.places:
            places["device"], number = enter(_device(folder))
            _fill(places["device"], setup)
            _forget(places["device"])
            if limits := _limits(setup):
                procs.append(enter(_throttled(number, limits)))
        _fill(places["cached"], setup)
        if setup.quota_cpus:
            procs.append(enter(_quota(setup.quota_cpus)))
        for _ in range(setup.burners):
            words = ["nice", "-n", str(setup.burners_nice), sys.executable, "-c", _BURN]
            enter(_neighbour(words))
        for _ in range(setup.readers):
            enter(_neighbour([sys.executable, "-c", _READ, str(places["device"] / "0.bin")]))
        if setup.reader == "http" or setup.request_every:
            enter(_served(places[setup.data], setup.delays.get("get", 0.0)))
        elif fs is not None:
            fs.delay(**setup.delays)
        yield Ground(
            data=places[setup.data],
            out=places[setup.out],
            command=_command(procs, setup.affinity),
            change=lambda: fs.delay(**setup.half) if fs is not None and setup.half else None,
        )


def _command(procs: list[Path], cpus: tuple[int, ...]) -> tuple[str, ...]:
    words = [sys.executable, "-m", "stalls.enter"]
    for path in procs:
        words += ["--procs", str(path)]
    if cpus:
        words += ["--cpus", ",".join(map(str, cpus))]
    return (*words, "--")


def _fill(folder: Path, setup: Setup) -> None:
    """The data set, and a checkpoint to begin from."""
    folder.mkdir(exist_ok=True)
    block = os.urandom(1 << 16)
    body = (block * (setup.file_bytes // len(block) + 1))[: setup.file_bytes]
    for index in range(setup.files):
        (folder / f"{index}.bin").write_bytes(body)
    if setup.load_bytes:
        code = "import sys, torch; torch.save(torch.zeros(int(sys.argv[2]) // 4), sys.argv[1])"
        words = [sys.executable, "-c", code, str(folder / "begin.pt"), str(setup.load_bytes)]
        subprocess.run(words, check=True, timeout=60)
    os.sync()


def _forget(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


@contextmanager
def _device(folder: Path) -> Iterator[tuple[Path, str]]:
    """A block device with a file system on it: where it is mounted, and its number."""
    image, mounted = folder / "image", folder / "device"
    mounted.mkdir()
    with image.open("wb") as out:
        out.truncate(_IMAGE_BYTES)
    _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
    name = _run("losetup", "--find", "--show", str(image)).strip()
    try:
        _run("mount", name, str(mounted))
        try:
            number = Path(f"/sys/block/{Path(name).name}/dev").read_text(encoding="ascii").strip()
            yield mounted, number
        finally:
            _run("umount", "--lazy", str(mounted))
    finally:
        _run("losetup", "--detach", name)
        image.unlink()


def _limits(setup: Setup) -> dict[tuple[str, str], int]:
    """By the names of cgroup v1 and v2."""
    given = {
        ("blkio.throttle.read_bps_device", "rbps"): setup.read_bytes_per_s,
        ("blkio.throttle.read_iops_device", "riops"): setup.reads_per_s,
        ("blkio.throttle.write_bps_device", "wbps"): setup.write_bytes_per_s,
    }
    return {names: value for names, value in given.items() if value}


def _controller(v1: str, v2: str) -> Path:
    """The root of a controller: v1's own hierarchy, or v2 if the controller is there."""
    if (_CGROUPS / v1).is_dir():
        return _CGROUPS / v1
    listed = _CGROUPS / "cgroup.controllers"
    there = listed.is_file() and v2 in listed.read_text(encoding="ascii").split()
    return _CGROUPS if there else _CGROUPS / v1


@contextmanager
def _cgroup(v1: str, v2: str) -> Iterator[tuple[Path, bool]]:
    """A cgroup of our own, and whether it is v2; whoever is still in it goes back to the root."""
    root = _controller(v1, v2)
    is_v2 = root == _CGROUPS
    if is_v2:
        (root / "cgroup.subtree_control").write_text(f"+{v2}", encoding="ascii")
    folder = Path(tempfile.mkdtemp(prefix="stall-", dir=root))
    try:
        yield folder, is_v2
    finally:
        for pid in (folder / "cgroup.procs").read_text(encoding="ascii").split():
            (root / "cgroup.procs").write_text(pid, encoding="ascii")
        folder.rmdir()


@contextmanager
def _throttled(device: str, limits: dict[tuple[str, str], int]) -> Iterator[Path]:
    with _cgroup("blkio", "io") as (folder, is_v2):
        for (v1, v2), value in limits.items():
            name, text = (
                ("io.max", f"{device} {v2}={value}") if is_v2 else (v1, f"{device} {value}")
            )
            (folder / name).write_text(text, encoding="ascii")
        yield folder / "cgroup.procs"


@contextmanager
def _quota(cpus: float) -> Iterator[Path]:
    with _cgroup("cpu", "cpu") as (folder, is_v2):
        quota = round(cpus * _PERIOD_US)
        if is_v2:
            (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}", encoding="ascii")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US), encoding="ascii")
            (folder / "cpu.cfs_quota_us").write_text(str(quota), encoding="ascii")
        yield folder / "cgroup.procs"


@contextmanager
def _served(folder: Path, delay_s: float) -> Iterator[None]:
    """An object server for a folder; its port is in a file of that."""
    port = folder / "port"
    with _neighbour([sys.executable, "-m", "stalls.objects", str(folder), str(delay_s)]):
        end = time.monotonic() + 10
        while not port.exists() and time.monotonic() < end:
            time.sleep(0.02)
        yield


@contextmanager
def _neighbour(words: list[str]) -> Iterator[None]:
    process = subprocess.Popen(words)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _run(*words: str) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{shutil.which(words[0]) or words[0]}: {done.stderr.strip()}")
    return done.stdout


def busy_cpu_s() -> float:
    """CPU time that all of the machine has used so far (/proc/stat: all but idle and iowait)."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    ticks = [int(value) for value in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def wait_for(path: Path, timeout_s: float, process: subprocess.Popen[bytes]) -> None:
    """Waits for a file; raises RuntimeError if the process ends or the time is up before."""
    end = time.monotonic() + timeout_s
    while not path.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the job ended before it began: exit code {process.returncode}")
        if time.monotonic() > end:
            raise RuntimeError(f"the job did not begin within {timeout_s:g} s")
        time.sleep(0.02)
