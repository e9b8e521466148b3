"""What a diagnosis is: the values behind `diagnose --json`, schema `whyidle.diagnosis/1`.

Fields are added, never renamed. Seconds are floats; unknown is None, never 0. The report renders
these values and asks nothing else; everything that computes them ends here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = "whyidle.diagnosis/1"

Grade = Literal["measured", "observed", "inferred"]
Severity = Literal["info", "warning", "critical"]
Where = Literal["self", "rank", "outside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was diagnosed; times are nanoseconds of the clock of the source."""

    source: list[str]
    kind: Literal["recording", "trace"]
    begin_ns: int | None
    end_ns: int | None
    nodes: list[str]
    job: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """GPU-seconds over all GPUs: working + empty + spinning = gpu, idle = empty + spinning."""

    gpu_s: float
    working_s: float
    empty_s: float
    spinning_s: float
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Where a cause arose: on the rank that felt it, on another one, or outside what was seen."""

    where: Where
    node: str | None
    rank: int | None
    cause: str
    subcause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """Idle seconds felt as one cause and arisen from one root; the rows sum to the idle total."""

    cause: str
    subcause: str
    grade: Grade | None
    idle_s: float
    empty_s: float
    spinning_s: float
    share: float
    root: Root


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """Idle seconds of all GPUs by where they arose; the rows sum to the idle total as well.

    `what_if`: what fixing it returns at most, as GPU-seconds, GPU-hours and, with a price, money.
    """

    cause: str
    subcause: str
    node: str | None
    rank: int | None
    idle_s: float
    share: float
    what_if: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePartition:
    """Exact parts of a trace's window: compute + exposed_comm + exposed_copy + idle = window."""

    window_s: float
    compute_s: float
    exposed_comm_s: float
    exposed_copy_s: float
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPartition:
    """The same parts inside one annotated step of the trainer."""

    step: str
    begin_ns: int
    parts: TracePartition


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLedger:
    """One GPU of the run; `waited_for` holds exposed waiting only, seconds by late rank."""

    node: str | None
    gpu: int | None
    uuid: str | None
    rank: int | None
    wall_s: float
    working_s: float
    empty_s: float
    spinning_s: float
    underfilled_s: float | None
    causes: dict[str, float]
    waited_for: dict[str, float]
    trace: TracePartition | None
    source: str | None = None
    name: str | None = None
    steps: list[StepPartition] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one rule has to say over the whole run; `idle_s` are the seconds granted to it.

    A rule beside the ledger, as of slow work, has `beside_s` instead, and no idle seconds.
    """

    rule: str
    title: str
    severity: Severity
    cause: str
    subcause: str
    owner: str
    idle_s: float
    says: str
    evidence: dict[str, Any]
    advice: str
    what_if: dict[str, Any] | None
    why: str = ""
    grade: Grade | None = None
    ranks: list[int] = field(default_factory=list)
    beside_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotSeen:
    """Something that the run does not hold, why, and which rules were blind for it."""

    what: str
    why: str
    rules: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightHang:
    """A collective that some ranks wait in, by dumps of PyTorch's flight recorder.

    `missing` ranks have not called it, and `last` is the number of what they called last; of
    `unknown` ones there is no dump, or only one from before. Several `operations`: ranks do not
    call the same one.
    """

    group: str
    number: int
    operations: list[str]
    waiting: list[int]
    missing: list[int]
    unknown: list[int]
    last: dict[int, int]
    since_wall_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How far the source can be trusted; None where the source has no such thing."""

    missed_ticks: int | None
    gaps_s: float | None
    clock_error_ns: int | None
    agent_cpu_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that a diagnosis says."""

    run: Run
    totals: Totals
    ledger: list[LedgerRow]
    root_causes: list[RootCause]
    gpus: list[GpuLedger]
    findings: list[Finding]
    not_seen: list[NotSeen]
    quality: Quality
    headline: str
    gpu_hour_cost: float | None = None
    flight_recorder: list[FlightHang] = field(default_factory=list)
    schema: str = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Return the JSON contract as plain values, `schema` first."""
        values = asdict(self)
        return {"schema": values.pop("schema"), **values}
