"""Tables about the recording itself: its clocks, its own runs, failures and cost."""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import counter, gauge, key, label, table


@table
class ClockReading:
    """The node's clocks, read together: what turns monotonic time into wall time, and how well."""

    TABLE: ClassVar[str] = "clock"

    mono_ns: int = key("CLOCK_MONOTONIC, half way between two readings around wall_ns.", unit="ns")
    boot_ns: int = gauge("CLOCK_BOOTTIME: monotonic time plus time suspended.", unit="ns")
    wall_ns: int = gauge("CLOCK_REALTIME, since 1970 in UTC.", unit="ns")
    bracket_ns: int = gauge("Time between the two readings: the pairing's own error.", unit="ns")
    wall_error_ns: int | None = gauge("Kernel's bound of the wall error (maxerror).", unit="ns")
    wall_estimate_ns: int | None = gauge("Kernel's estimate of it (esterror).", unit="ns")
    synchronised: bool | None = gauge("Whether a time service disciplines the clock (no UNSYNC).")


@table
class Tick:
    """A run of a collector. Runs that began, missed and rested together are all that were due."""

    TABLE: ClassVar[str] = "tick"

    mono_ns: int = key("When the run was accounted for.", unit="ns")
    lane: str = label("fast, normal or slow.")
    collector: str = key("Name of the collector.")
    due_ns: int = gauge("When it was due.", unit="ns")
    began_ns: int | None = gauge("When it began; NULL in a row that only counts misses.", unit="ns")
    took_ns: int | None = gauge("How long it took.", unit="ns")
    cpu_ns: int | None = gauge("CPU time of its thread for it.", unit="ns")
    rows: int | None = gauge("Rows it returned; NULL if it failed.")
    missed: int = gauge("Due runs before this one that never began.")
    rested: int = gauge("Due runs before this one left out, as the source was not there.")


@table
class CollectorError:
    """A failure of a collector, or its word that the source is not there. Repeats are summed up."""

    TABLE: ClassVar[str] = "collector_error"

    mono_ns: int = key("When it happened.", unit="ns")
    collector: str = key("Name of the collector.")
    kind: str = key(
        "no_data: not on this machine; failed: could not be read; late: past its deadline; "
        "refused: returned a row that does not fit its table; not_recorded: the journal lacks it."
    )
    subject: str = key("Device, process or file that it is about; empty for the whole source.")
    message: str = label("What was said.")
    repeats: int = counter("Times that this was said since the sampler began.")


@table
class AgentSelf:
    """What the agent itself costs."""

    TABLE: ClassVar[str] = "agent_self"

    mono_ns: int = key("When it was read.", unit="ns")
    part: str = key("sampler or keeper.")
    pid: int = key("Process id.")
    cpu_ns: int = counter("CPU time of all its threads.", unit="ns")
    rss_bytes: int | None = gauge("Resident memory.", unit="bytes")
    written_bytes: int = counter("Bytes that it wrote to the recording.", unit="bytes")
    rows_lost: int = counter("Rows that could not be written, as when the disk was full.")
