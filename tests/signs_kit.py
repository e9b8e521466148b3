"""Stories of hardware that go the whole way: a machine's own files and NVML, sampled by the real
collectors into a recording, then diagnosed with the built-in rules.

A story is what the machine shows as time passes. Everything in it is made up, in the formats of the
kernel and of NVML; names, units and paths are those of the synthetic node of fabric_make.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fabric_make
from fabric_kit import lay
from job import LAUNCHER, RANK0, Proc, put
from probe_pages import page_of, put_record
from recording_kit import sample
from trees import BEGIN_NS, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect import ALL
from whyidle.collect.collector import Collector
from whyidle.host import Answer, Argument, LiveHost, NvmlError
from whyidle.layout import Identity
from whyidle.store import Recording
from whyidle_probe import layout as at
from whyidle_rules.diagnosis import Diagnosis
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule_load import load_rules

PCI = "0000:19:00.0"
PORT = "/infiniband/mlx5_0/ports/1/"
START_TICKS = 5_000
BOOTS = ("4f2a91c3-0c5e-4a5d-9e0b-2f6d1c7a8b90", "5f2a91c3-0c5e-4a5d-9e0b-2f6d1c7a8b91")
MIB = 1 << 20
Now = Callable[[float], Any]

COMPUTES = (100.0, 95.0)  # percent: kernels resident, SMs with a warp
POLLS = (100.0, 10.0)
EMPTY = (0.0, 0.0)


@dataclass(slots=True, kw_only=True)
class Story:
    """What a node shows, as functions of the seconds since its beginning.

    `gpu` gives the percent of time with kernels, and of SMs; `pcie` what comes from the host, in
    bytes a second. `files` replaces files by the end of their paths; `state` what NVML answers by
    name of the question, and by number of the field; `gone` says that the GPU is lost. `events` are
    lines of the kernel log with their second.
    """

    gpu: Now = lambda now: COMPUTES
    pcie: Now = lambda now: 0.0
    files: Mapping[str, Now] = field(default_factory=dict)
    state: Mapping[str | int, Now] = field(default_factory=dict)
    gone: Now = lambda now: False
    log: tuple[tuple[float, str], ...] = ()
    without: tuple[str, ...] = ()


class Chip:
    """The node's one GPU as whyidle.nvml answers for it."""

    def __init__(self, story: Story, clock: VirtualClock, uuid: str) -> None:
        self._story, self._clock, self._uuid = story, clock, uuid
        self._sampled_ns: int | None = None

    def answer(self, call: str, *args: Argument) -> Answer:
        """Answer, or fail as NVML does for a GPU that is gone."""
        now = (self._clock.mono_ns() - BEGIN_NS) / NS_PER_S
        if call in ("gpus", "DriverVersion", "NVMLVersion", "xids"):
            whole: dict[str, Answer] = {"gpus": ((self._uuid, 0, None),), "xids": ()}
            return whole.get(call, "570.86.10")
        if self._story.gone(now):
            raise NvmlError(15, call, "GPU is lost")
        if call == "gpm":
            return self._gpm(now)
        if call == "FieldValues":
            return tuple(self._field(int(number), now) for number in args[1:])
        told = self._story.state.get(call)
        if told is not None:
            found: Answer = told(now)
            return found
        answers: dict[str, Answer] = {
            "gpm_worked": True,
            "gpm_pipes": None,
            "UtilizationRates": (round(self._story.gpu(now)[0]), 10),
            "CudaComputeCapability": (9, 0),
            "Name": "NVIDIA H100 80GB HBM3",
            "PciBusId": "00000000:19:00.0",
            "Processes": ((RANK0, 1 << 30),) if args[1:2] == ("compute",) else (),
            "MemoryInfo": (80 << 30, 1 << 30, 30 << 30, 49 << 30),
            "ProcessUtilization": (),
            "CurrPcieLinkGeneration": 4,
            "MaxPcieLinkGeneration": 4,
            "CurrPcieLinkWidth": 16,
            "MaxPcieLinkWidth": 16,
            "ClockInfo": 1980,
            "MaxClockInfo": 1980,
            "PowerUsage": 400_000,
        }
        if call not in answers:
            raise NvmlError(3, call, "Not Supported")
        return answers[call]

    def _field(self, number: int, now: float) -> Answer:
        told = self._story.state.get(number)
        found: Answer = None if told is None else told(now)
        return found

    def _gpm(self, now: float) -> Answer:
        before, self._sampled_ns = self._sampled_ns, self._clock.mono_ns()
        if before is None:
            return None
        middle = ((before + self._sampled_ns) / 2 - BEGIN_NS) / NS_PER_S
        gr, sm = self._story.gpu(middle)
        received = self._story.pcie(middle) / MIB
        shares = [gr, sm, sm / 2, sm / 2, gr / 3, sm / 4]
        rates = [0.0, received, 0.0, 0.0]
        return (before, self._sampled_ns, (*shares, *rates, *([0.0] * 7), None, None))

    def close(self) -> None:
        """Hold nothing."""


class Log:
    """The kernel log of a story."""

    def __init__(self, story: Story, clock: VirtualClock) -> None:
        self._story, self._clock, self._told = story, clock, 0

    def read(self) -> list[str]:
        """Return what was logged since."""
        now = self._clock.mono_ns()
        found = []
        while self._told < len(self._story.log):
            second, text = self._story.log[self._told]
            when = BEGIN_NS + round(second * NS_PER_S)
            if when > now:
                break
            self._told += 1
            found.append(f"3,{100 + self._told},{when // 1000},-;{text}")
        return found

    def close(self) -> None:
        """Hold nothing."""


class StoryHost(LiveHost):
    """The folder of the node, with some of its files as the story tells them."""

    def __init__(self, root: Path, story: Story, clock: VirtualClock, uuid: str) -> None:
        self._story, self._virtual = story, clock
        super().__init__(
            str(root),
            clock,
            nvml=Chip(story, clock, uuid),
            askers={
                "clock": lambda: (clock.mono_ns(), clock.boot_ns(), clock.wall_ns(), 1, 2, 3, True),
                "watched": lambda: {"gpu": (RANK0,), "commands": (LAUNCHER,)},
                "open_files": lambda pid: (),
                "gpm_works": lambda: (uuid,),
                "connections": lambda: (),
                "socket_inodes": lambda pid: (),
                "ethtool_names": lambda name: (),
            },
            sources={"kmsg": Log(story, clock)},
        )

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        """Read, as the story tells it."""
        for end, told in self._story.files.items():
            if path.endswith(end):
                said = told((self._virtual.mono_ns() - BEGIN_NS) / NS_PER_S)
                return said if isinstance(said, bytes) else f"{said}\n".encode()
        return super().read_bytes(path, keep=keep)


def node(root: Path, rank: int, world: int, without: tuple[str, ...]) -> Path:
    """Lay out a node with one GPU, one InfiniBand port and a rank of a job."""
    found: dict[str, Any] = dict(fabric_make.pci())
    found |= fabric_make.rdma(
        "mlx5_0", "0000:1a:00.0", "mlx5_core", layer="InfiniBand", counters=dict.fromkeys(
            fabric_make.PMA, 0
        ), hardware=dict.fromkeys(fabric_make.MLX5, 0), interface="ib0",
    )  # fmt: skip
    whole = fabric_make.machine()
    for name in ("proc/cpuinfo", "proc/driver/nvidia/version"):
        found[name] = whole[name]
    for module in ("nvidia", "nvidia_peermem", "ib_core"):
        found[f"sys/module/{module}/initstate"] = "live\n"
    lay(root, {name: entry for name, entry in found.items() if not name.startswith(without or "-")})
    environ = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
    trainer = Proc(
        pid=RANK0,
        parent=LAUNCHER,
        comm="python3",
        start=START_TICKS,
        environ=environ,
        threads=("pt_autograd_0", "pt_nccl_watchdg", "NCCL Progress 1"),
    )
    launcher = Proc(pid=LAUNCHER, parent=1, comm="pt_elastic", command="torchrun train.py")
    put(root, [Proc(pid=1, parent=0, comm="systemd", command="init"), launcher, trainer])
    status = root / f"proc/{RANK0}/status"
    status.write_text(status.read_text().replace("1000\t1001", f"{os.geteuid()}\t{os.geteuid()}"))
    write(
        root,
        {
            "proc/sys/kernel/hostname": f"n{rank}\n",
            "proc/stat": "cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\nprocs_running 1\n",
            "proc/net/dev": "Inter-|\n face |\n",
            "run/whyidle/probe/a.page": page(rank, world, 0.0),
            f"proc/driver/nvidia/gpus/{PCI}/information": (
                f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 42\nGPU UUID: \t GPU-{rank}\n"
            ),
            "proc/vmstat": "pgmajfault 5\n",
        },
    )
    return root


def page(rank: int, world: int, now: float) -> bytes:
    """Return the page of the trainer: ten steps a second, no DataLoader."""
    made = page_of(
        pid=RANK0,
        start_ns=START_TICKS * NS_PER_S // 100,
        opened_ns=BEGIN_NS - 50 * NS_PER_S,
        process={
            at.STEPS: round(now * 10) + 1,
            at.OPTIMIZER_STEPS: round(now * 10) + 1,
            at.LAST_STEP_NS: BEGIN_NS + round(now * NS_PER_S),
            at.HEADER_RANK: rank,
            at.HEADER_WORLD_SIZE: world,
        },
    )
    put_record(made, 1, at.EVENT_STEP, BEGIN_NS - 9, BEGIN_NS, 1, 5, 1)
    return bytes(made)


def record(folder: Path, stories: list[Story], seconds: float = 30.0) -> Path:
    """Sample a node for each story, of one job, into one recording."""
    recording = folder / "recording"
    for rank, story in enumerate(stories):
        world = len(stories)
        root = node(folder / f"n{rank}", rank, world, story.without)
        files = {"whyidle/probe/a.page": lambda now, r=rank, w=world: page(r, w, now)}
        clock = VirtualClock(BEGIN_NS)
        told = Story(
            gpu=story.gpu, pcie=story.pcie, files={**files, **story.files}, state=story.state,
            gone=story.gone, log=story.log,
        )  # fmt: skip
        host = StoryHost(root, told, clock, f"GPU-{rank}")
        try:
            sample(
                recording,
                ALL,
                partial(_always, host),
                host,
                clock,
                seconds,
                identity=Identity(node=f"n{rank}", boot_id=BOOTS[rank]),
            )
        finally:
            host.close()
    return recording


def _always(host: StoryHost, collector: Collector) -> StoryHost:
    return host


def told(folder: Path, stories: list[Story], seconds: float = 30.0) -> Diagnosis:
    """Record the stories and diagnose the recording."""
    with Recording([record(folder, stories, seconds)]) as recording:
        assert recording.damaged == []
        con = recording.con
        return diagnose(con, ["x"], load_rules(), spans(con, None, None))


def charged(found: Diagnosis) -> dict[str, float]:
    """Return seconds of all GPUs by cause and subcause as they are felt."""
    sums: dict[str, float] = {}
    for row in found.ledger:
        name = f"{row.cause}/{row.subcause}"
        sums[name] = sums.get(name, 0.0) + row.idle_s
    return sums
