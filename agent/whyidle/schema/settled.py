"""Tables of the ledger that the keeper settles while it records. They lie in a ledger of their own.

Live counters cannot be taken back: a second is charged once, from what was known then, and these
rows are what the counters were made of. Intervals are those of the monotonic clock; a GPU window
belongs to the interval that holds its end. Causes and subcauses are those of `whyidle.causes`.
"""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import counter, gauge, key, label, table


@table
class Settlement:
    """An evaluation of the rules on an interval: done once, whether or not there was a GPU."""

    TABLE: ClassVar[str] = "settlement"

    mono_ns: int = key("End of the interval.", unit="ns")
    begin_ns: int = gauge("Begin of the interval: the end of the one before.", unit="ns")
    settled_ns: int = gauge("When it was settled.", unit="ns")
    wall_ns: int = gauge("Wall time of the end of the interval, as known then.", unit="ns")
    took_ns: int = gauge("How long it took.", unit="ns")
    cpu_ns: int = gauge("CPU time that it took.", unit="ns")
    windows: int | None = gauge("GPU windows that ended in it; NULL if the evaluation failed.")
    skipped_ns: int = gauge(
        "Time before the interval that was never settled: too old when the keeper came back.",
        unit="ns",
    )
    failure: str | None = label("Why nothing could be charged in it; NULL if all went well.")


@table
class SettledGpu:
    """What a settled interval was for a GPU: working + empty + spinning is what was seen of it."""

    TABLE: ClassVar[str] = "settled_gpu"

    mono_ns: int = key("End of the interval.", unit="ns")
    uuid: str = key("NVML UUID of the GPU.")
    gpu: int | None = label("Index of the GPU on its node.")
    job: str | None = label("Job that had the GPU last in the interval, as in process_info.")
    windows: int = gauge("GPU windows that ended in the interval.")
    working_ns: int = gauge("Kernels computed.", unit="ns")
    empty_ns: int = gauge("No kernel was resident.", unit="ns")
    spinning_ns: int = gauge("Kernels were resident and none computed.", unit="ns")
    underfilled_ns: int | None = gauge(
        "Part of working that may have been spinning; NULL where it cannot be told.", unit="ns"
    )
    compute_fill_ratio: float | None = gauge(
        "SMs that its kernels kept busy at their best in the minute before (s1): what spinning is "
        "told by, unless a peer that does the same work kept more.",
        unit="ratio",
    )
    comm_fill_ratio: float | None = gauge(
        "SMs that communication kernels keep busy at least (s0), by which spinning is told.",
        unit="ratio",
    )


@table
class Settled:
    """Idle time of a GPU in a settled interval, by cause; only what is more than nothing."""

    TABLE: ClassVar[str] = "settled"

    mono_ns: int = key("End of the interval.", unit="ns")
    uuid: str = key("NVML UUID of the GPU.")
    pool: str = key("empty or spinning.")
    cause: str = key("Cause.")
    subcause: str = key("Subcause.")
    grade: str | None = key("measured, observed or inferred; NULL for unattributed.")
    gpu: int | None = label("Index of the GPU on its node.")
    job: str | None = label("As in settled_gpu.")
    idle_ns: int = gauge("Idle time that was charged.", unit="ns")


@table
class LedgerMinute:
    """A minute of a GPU's ledger, for questions to a fleet: one row for each part of it."""

    TABLE: ClassVar[str] = "ledger_minute"

    mono_ns: int = key("End of the last interval in the minute.", unit="ns")
    uuid: str = key("NVML UUID of the GPU.")
    pool: str = key("working, empty or spinning.")
    cause: str | None = key("Cause; NULL of working.")
    subcause: str | None = key("Subcause; NULL of working.")
    job: str | None = key("As in settled_gpu.")
    gpu: int | None = label("Index of the GPU on its node.")
    wall_ns: int = gauge("Wall time of mono_ns, as known then.", unit="ns")
    part_ns: int = gauge("How long.", unit="ns")


@table
class LedgerTotal:
    """What the counters stood at when a piece of the ledger began; a restart goes on from there."""

    TABLE: ClassVar[str] = "ledger_total"

    mono_ns: int = key("End of the last interval that is in it.", unit="ns")
    uuid: str = key("NVML UUID of the GPU.")
    pool: str = key("working, empty or spinning.")
    cause: str | None = key("Cause; NULL of working.")
    subcause: str | None = key("Subcause; NULL of working.")
    job: str | None = key("As in settled_gpu.")
    gpu: int | None = label("Index of the GPU on its node.")
    begin_ns: int = gauge("Begin of the first interval that is in it.", unit="ns")
    total_ns: int = counter("All that was charged since this boot was first settled.", unit="ns")
