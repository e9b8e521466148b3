"""Tables of a training run that traces can tell of too."""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import gauge, key, label, table


@table
class RunInfo:
    """A rank of the run and the GPU that it used."""

    TABLE: ClassVar[str] = "run_info"

    mono_ns: int = key("When it was learned; for a trace, start of its window.", unit="ns")
    rank: int | None = key("Global rank; NULL where the source does not say.")
    world_size: int | None = label("Ranks of the job.")
    local_rank: int | None = label("Rank on its node.")
    gpu: int | None = label("Index of the GPU on its node.")
    uuid: str | None = label("Identity of the GPU.")
    gpu_name: str | None = label("Product name of the GPU.")
    pid: int | None = label("Process id of the rank.")
    communicates: bool | None = label("Whether it ran collectives, or sent and received.")
    source: str | None = label("File that a trace was read from.")
    t0_ns: int | None = gauge("First GPU event, clock of the trace.", unit="ns")
    t1_ns: int | None = gauge("End of the last GPU event.", unit="ns")


@table
class TraceStep:
    """The exact parts of an annotated step; compute + comm + copy + idle = its length."""

    TABLE: ClassVar[str] = "trace_step"

    mono_ns: int = key("Start of the step, clock of the trace.", unit="ns")
    rank: int | None = key("Global rank.")
    step: str = key("Name of the step.")
    t1_ns: int = gauge("End of the step.", unit="ns")
    compute_ns: int = gauge("Some kernel computed.", unit="ns")
    exposed_comm_ns: int = gauge("Only communication kernels ran.", unit="ns")
    exposed_copy_ns: int = gauge("Only copies or sets ran.", unit="ns")
    idle_ns: int = gauge("Nothing ran.", unit="ns")
