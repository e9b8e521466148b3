"""What a scenario says: the job, what is injected into it, and whose fault the stall is then.

A scenario is `stalls/<kind>/scenario.yaml`. `setup` describes the job as it is recorded, each of
`strengths` changes some of it, and `baseline` says what the counterfactual takes back: the same job
without the injection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

FOLDER = Path(__file__).parent
Place = Literal["cached", "device", "fuse"]
Sync = Literal["step", "lag", "free"]
Style = Literal["ddp", "overlapped", "fsdp", "pipeline", "gloo"]
Schedule = Literal["gpipe", "1f1b"]
Hang = Literal["stuck", "ended"]
Loader = Literal["torch", "threads"]
Reader = Literal["read", "mapped", "http"]
Role = Literal["stall", "mixture", "confuser", "control"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A job and its surroundings.

    `loader`: torch's DataLoader, or threads of the trainer's own, as many as `workers`.
    `sync`: the host waits for each step, for the step before, or runs up to four ahead. Places:
    `cached` is an ordinary disk with its page cache warm, `device` a block device of its own, read
    past the cache, `fuse` a file system that answers after `delays`. `reader`: read(), pages of a
    mapping, or an object server that answers after `delays["get"]`. `decode_threads` share the
    decoding of a sample, while their process's main thread waits for them.
    Styles: collectives at the end of a step (ddp), or beside the backward pass in as many buckets
    as `kernels` (overlapped), or around each layer's parameters (fsdp); or one stage a rank
    (pipeline).
    """

    loader: Loader = "torch"
    reader: Reader = "read"
    workers: int = 2
    samples: int = 4
    prefetch: int = 2
    iterable: bool = False
    epoch_batches: int = 100_000
    persistent: bool = False
    sync: Sync = "lag"
    step_ms: float = 40.0
    kernels: int = 8
    kernel: str = "gemm"  # see vgpu.device.kinds
    mixed_ms: float = 0.0  # of a matrix product, beside `kernels` of that kind
    decode_ms: float = 0.0  # CPU per sample, in the worker
    decode_threads: int = 0
    collate_ms: float = 0.0  # CPU per batch, where the batch is put together
    checkpoint_every: int = 0
    checkpoint_bytes: int = 0
    gc_every: int = 0
    gc_objects: int = 0
    sleep_every: int = 0
    sleep_ms: float = 0.0
    request_every: int = 0  # the trainer asks the object server for something, and waits
    request_ms: float = 0.0
    log_every: int = 0
    log_bytes: int = 0
    list_files: int = 0  # looked at before the first step
    load_bytes: int = 0  # a checkpoint that the job begins from

    data: Place = "cached"
    out: Place = "cached"
    files: int = 64
    file_bytes: int = 131_072
    delays: Mapping[str, float] = field(default_factory=dict)
    fuse_kind: str = "slow"
    read_bytes_per_s: int = 0
    reads_per_s: int = 0
    write_bytes_per_s: int = 0

    quota_cpus: float = 0.0
    affinity: tuple[int, ...] = ()
    burners: int = 0  # processes of somebody else that compute
    burners_nice: int = 0
    readers: int = 0  # processes of somebody else that read `device`
    half: Mapping[str, float] = field(default_factory=dict)  # delays from half of the time on

    ranks: int = 1
    style: Style = "ddp"
    comm_ms: float = 0.0  # of each collective, send or receive
    link_bytes_per_s: int = 0  # each rank has a link of its own, and collectives go over it
    comm_bytes: int = 0  # of each collective over links
    batches: int = 4  # micro-batches of a pipeline's step
    schedule: Schedule = "gpipe"
    late: Mapping[str, Any] = field(default_factory=dict)  # what is different for one rank
    late_rank: int = -1  # which one that is; the last
    turns_every: int = 0  # ranks have `turns_ms` more kernels, in turns of so many steps
    turns_ms: float = 0.0
    evaluate_every: int = 0  # steps between evaluations of `evaluate_ms` without the others
    evaluate_ms: float = 0.0
    hang_after_s: float = 0.0  # then it comes to no collective any more; the job is ended after
    hang_s: float = 0.0  # so long
    hang: Hang = "stuck"
    nodes: bool = False  # each rank is on a node of its own, with a recorder of its own
    beside: Mapping[str, Any] = field(default_factory=dict)  # another job on the node: its setup
    stop_every_s: float = 0.0  # SIGSTOP for `stop_s`, then SIGCONT
    stop_s: float = 0.0

    def of_rank(self, rank: int) -> Setup:
        """The setup of one rank."""
        if self.ranks == 1 or rank != self.late_one:
            return self
        return dataclasses.replace(self, **self.late)

    @property
    def late_one(self) -> int:
        """The rank that the stall is injected into."""
        return self.late_rank % self.ranks

    @property
    def jobs(self) -> tuple[Setup, ...]:
        """The setups of all jobs on the node, this one first."""
        if not self.beside:
            return (self,)
        return (self, dataclasses.replace(self, beside={}, late={}, **self.beside))

    @property
    def gpus(self) -> int:
        """The GPUs that all jobs together have: one a rank."""
        return sum(job.ranks for job in self.jobs)

    @property
    def places(self) -> frozenset[Place]:
        """Where the job reads and writes."""
        busy: set[Place] = {"device"} if self.readers else set()
        return frozenset({self.data, self.out} | busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A kind at one strength.

    `causes`: what the stall is to be charged to, with shares for a mixture of known parts; empty
    where nobody is to be blamed. `victims`: the same for the ranks that wait for the injected one.
    `root`: the cause that their waiting arose from, by default the one of `causes`; `root_of_all`:
    whichever rank they wait for. `by_workers`: the shares are what the workers' own stopwatches
    say. `by_phases`: causes by what the main thread was at, by its own stopwatch, "" for anything
    else; for stretches that have no counterfactual. `by_waiting`: the cause of the seconds in which
    only kernels ran that polled a peer; `by_spinning`: the same where they may have moved data too.
    Both go with `causes`, which are then of what the GPU stood empty for. `allowed`: causes that
    are not wrong either, such as a pause that is truly one.
    """

    kind: str
    strength: str
    title: str
    role: Role
    causes: Mapping[str, float]
    subcause: str | None
    victims: Mapping[str, float]
    by_workers: bool
    by_phases: Mapping[str, str]
    by_waiting: str | None
    by_spinning: str | None
    root: tuple[str, ...]
    root_of_all: bool
    window: Literal["training", "before", "halves"]
    allowed: tuple[str, ...]
    seconds: float
    setup: Setup
    baseline: Setup | None


def kinds() -> list[str]:
    """All kinds, by name."""
    return sorted(path.parent.name for path in FOLDER.glob("*/scenario.yaml"))


def strengths(kind: str) -> list[str]:
    """The strengths of a kind, in the order in which the file names them."""
    return list(_read(kind)["strengths"])


def load(kind: str, strength: str) -> Scenario:
    """A scenario; raises ValueError with the file's name for anything that it cannot mean."""
    text = _read(kind)
    if strength not in text["strengths"]:
        raise ValueError(f"{kind}: no strength {strength}; it has {', '.join(text['strengths'])}")
    setup = _setup(kind, {**text.get("setup", {}), **(text["strengths"][strength] or {})})
    baseline = text.get("baseline")
    causes = text.get("causes", {})
    unknown = set(text) - _KEYS
    if unknown:
        raise ValueError(f"{kind}: unknown {', '.join(sorted(unknown))}")
    return Scenario(
        kind=kind,
        strength=strength,
        title=str(text["title"]),
        role=_one_of(kind, text["role"], get_args(Role)),
        causes={str(cause): float(share) for cause, share in causes.items()},
        subcause=text.get("subcause"),
        victims=text.get("victims", {}),
        by_workers=bool(text.get("by_workers", False)),
        by_phases=text.get("by_phases", {}),
        by_waiting=text.get("by_waiting"),
        by_spinning=text.get("by_spinning"),
        root=tuple(text.get("root", [str(cause) for cause in causes])),
        root_of_all=bool(text.get("root_of_all", False)),
        window=_one_of(kind, text.get("window", "training"), ("training", "before", "halves")),
        allowed=tuple(text.get("allowed", ())),
        seconds=float(text.get("seconds", 15.0)),
        setup=setup,
        baseline=None if baseline is None else dataclasses.replace(setup, **baseline),
    )


_KEYS = {
    "title",
    "role",
    "causes",
    "subcause",
    "by_workers",
    "victims",
    "by_phases",
    "by_waiting",
    "by_spinning",
    "root",
    "root_of_all",
    "window",
    "allowed",
    "seconds",
    "setup",
    "baseline",
    "strengths",
}


def _read(kind: str) -> dict[str, Any]:
    path = FOLDER / kind / "scenario.yaml"
    if not path.is_file():
        raise ValueError(f"there is no kind {kind}; there are {', '.join(kinds())}")
    text = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(text, dict)
    return text


def _setup(kind: str, values: dict[str, Any]) -> Setup:
    names = {part.name for part in dataclasses.fields(Setup)}
    if unknown := set(values) - names:
        raise ValueError(f"{kind}: a setup has no {', '.join(sorted(unknown))}")
    if "affinity" in values:
        values = {**values, "affinity": tuple(values["affinity"])}
    return Setup(**values)


def _one_of(kind: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"{kind}: {value} is none of {', '.join(choices)}")
    return value
