"""A node to measure the agent on: stand-in GPUs, real processes, made-up disks and ports.

The tree below `root` mixes both: /proc/PID of the 72 processes, /proc/stat and the like are links
to the machine's own, so that reading them costs what it costs; /proc/diskstats and /proc/net/dev
are files that are written anew once a second. With `everything`, the fabric and the storage of the
other two benches are in it too, RDMA ports and remote file systems count on, and trainers have the
probe's pages.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench import bench_fabric, bench_storage
from fabric_kit import lay
from vgpu import Process, Standin, standin

GPUS = 8
PORTS = 8
DISKS = 16
# Processes that have nothing to do with the job, as a node has by the hundred.
BYSTANDERS = 500
_REAL = ("stat", "loadavg", "vmstat", "pressure", "self", "sys", "mounts")
_BYSTANDER = "{pid} (bystander) S 1 " + " ".join(["0"] * 48) + "\n"
_PARTS = ("", "p1", "p2", "p3")
_HERE = Path(__file__).parent


def _columns(numbers: list[int]) -> str:
    return "".join(f" {number:19}" for number in numbers)


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counters of disks and ports, which grow by chance as on a busy node."""

    luck: random.Random = field(default_factory=lambda: random.Random(1))
    names: tuple[str, ...] = tuple(f"nvme{index}n1" for index in range(DISKS))
    disks: list[list[int]] = field(default_factory=lambda: [[0] * 17 for _ in range(DISKS)])
    ports: list[list[int]] = field(default_factory=lambda: [[0] * 16 for _ in range(PORTS)])

    def advance(self) -> None:
        """Pass a second."""
        for disk in self.disks:
            reads, writes = self.luck.randrange(20_000), self.luck.randrange(2_000)
            steps = (reads, 0, reads * 256, reads // 2, writes, 0, writes * 512, writes)
            for index, step in enumerate(steps):
                disk[index] += step
            disk[8] = self.luck.randrange(64)
            disk[9] += self.luck.randrange(1000)
            disk[10] += self.luck.randrange(20_000)
        for port in self.ports:
            for first in (0, 8):
                packets = self.luck.randrange(3_000_000)
                port[first] += packets * 4096
                port[first + 1] += packets

    def diskstats(self) -> str:
        """The text of /proc/diskstats: a disk and three partitions each."""
        lines = []
        for index, (name, disk) in enumerate(zip(self.names, self.disks, strict=True)):
            numbers = _columns(disk)
            lines += [f" 259 {index:7} {name}{part}{numbers}\n" for part in _PARTS]
        return "".join(lines)

    def net_dev(self) -> str:
        """The text of /proc/net/dev."""
        lines = ["Inter-|   Receive |  Transmit\n", " face |bytes packets\n"]
        lines += [f"  eth{index}: {_columns(port)}\n" for index, port in enumerate(self.ports)]
        return "".join(lines)

    def rdma(self) -> list[str]:
        """The texts of received and sent words of each RDMA port, in turn."""
        return [f"{port[first] // 4:20}\n" for port in self.ports for first in (0, 8)]


class _File:
    """A file that is rewritten in place: whoever holds it open sees the new text."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def put(self, text: str) -> None:
        """Replace the text by one of the same length: nobody reads the rest of an old one."""
        os.pwrite(self._fd, text.encode(), 0)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The node: its tree, its stand-in GPUs, and the pids of its job."""

    root: Path
    gpus: Standin
    trainers: tuple[int, ...]
    workers: tuple[int, ...]


def _everything(root: Path) -> Counters:
    """Lay out what the benches of fabric and storage have; return counters of those disks."""
    drives = "sys/class/nvme/"
    lay(root, {k: v for k, v in bench_fabric.entries().items() if not k.startswith(drives)})
    storage = bench_storage.tree()
    del storage.files["proc/diskstats"]
    storage.put(root)
    for name in ("auxv", "statm", "stat", "mounts", "ns"):
        (root / "proc/self" / name).symlink_to(f"/proc/self/{name}")
    return Counters(names=bench_storage.DISKS)


def _tree(root: Path, pids: list[int], *, everything: bool) -> Counters:
    proc = root / "proc"
    proc.mkdir(parents=True)
    counters = _everything(root) if everything else Counters()
    for name in (*_REAL, *map(str, pids)):
        if not (proc / name).exists():
            (proc / name).symlink_to(f"/proc/{name}")
    for pid in range(1_000_000, 1_000_000 + BYSTANDERS):
        (proc / str(pid)).mkdir()
        (proc / str(pid) / "stat").write_text(_BYSTANDER.format(pid=pid))
    (root / "sys/fs").mkdir(parents=True, exist_ok=True)
    (root / "sys/fs/cgroup").symlink_to("/sys/fs/cgroup")
    for name in () if everything else counters.names:
        (root / "sys/block" / name).mkdir(parents=True)
    for index in range(PORTS):
        port = root / f"sys/class/net/eth{index}"
        (port / "device").mkdir(parents=True)
        (port / "operstate").write_text("up\n")
        (port / "speed").write_text("400000\n")
    return counters


def _churn(
    node: Standin, counters: Counters, files: Sequence[_File], stop: threading.Event
) -> None:
    luck = random.Random(2)
    while not stop.is_set():
        for gpu in node.state.gpus:
            gr = luck.random()
            gpu.run(
                gr=gr,
                sm=gr * luck.random(),
                tensor=gr * luck.random() / 2,
                dram=gr * luck.random(),
                mem=gr / 2,
                pcie_tx=luck.random() * 2e10,
                pcie_rx=luck.random() * 2e10,
                nvlink_tx=luck.random() * 1e10,
                nvlink_rx=luck.random() * 1e10,
                throttle_power=luck.random() / 10,
            )
            gpu.set(
                power_mw=luck.randrange(100_000, 700_000),
                temperature_celsius=float(luck.randrange(40, 80)),
                memory_used_bytes=luck.randrange(1 << 36),
            )
        counters.advance()
        files[0].put(counters.diskstats())
        files[1].put(counters.net_dev())
        for file, text in zip(files[2:], counters.rdma(), strict=False):
            file.put(text)
        stop.wait(1.0)


@contextmanager
def busy_node(folder: Path, *, everything: bool = False) -> Iterator[Node]:
    """Set the node up below `folder` and keep it busy."""
    root = folder / "root"
    pages = root / "run/whyidle/probe"
    if everything:
        pages.mkdir(parents=True)
    data = folder / "data"
    data.write_bytes(os.urandom(1 << 16))
    job = subprocess.Popen(
        [
            sys.executable,
            str(_HERE / "busy_processes.py"),
            str(data),
            *([str(pages)] if everything else []),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stop = threading.Event()
    try:
        assert job.stdin is not None and job.stdout is not None
        trainers, workers = json.loads(job.stdout.readline())
        counters = _tree(root, [*trainers, *workers], everything=everything)
        written = [root / "proc/diskstats", root / "proc/net/dev"]
        if everything:
            written += [
                root / f"sys/class/infiniband/mlx5_{port}/ports/1/counters/port_{way}_data"
                for port in range(PORTS)
                for way in ("rcv", "xmit")
            ]
        files = [_File(path) for path in written]
        with standin(folder, gpus=GPUS) as gpus:
            for gpu, pid in zip(gpus.state.gpus, trainers, strict=True):
                gpu.processes([Process(pid=pid, used_bytes=60 << 30, sm_percent=80)])
            churn = threading.Thread(target=_churn, args=(gpus, counters, files, stop))
            churn.start()
            try:
                yield Node(root=root, gpus=gpus, trainers=tuple(trainers), workers=tuple(workers))
            finally:
                stop.set()
                churn.join()
                for file in files:
                    file.close()
    finally:
        assert job.stdin is not None and job.stdout is not None
        job.stdin.close()
        job.wait(timeout=30)
        job.stdout.close()
