"""Which part of a recording is asked for: `--since` and `--until`, on the clocks of its nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import duckdb

from whyidle.clock import NS_PER_S
from whyidle.errors import UserError
from whyidle_rules.recording.windows import LOST

Machine = tuple[str, str]  # node, boot id
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_FORMS = "take 90s, 10m, 2h after the start of the run, or a time such as 2026-11-29T18:00:00Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point of a run: nanoseconds after its start, before its end, or of wall time since 1970."""

    after_start_ns: int | None = None
    before_end_ns: int | None = None
    wall_ns: int | None = None


LAST_TEN_MINUTES = Moment(before_end_ns=600 * NS_PER_S)


def moment(text: str) -> Moment:
    """Parse one; a time without an offset is local time. Raises UserError."""
    matches = list(_NUMBER.finditer(text))
    try:
        if matches and "".join(match.group() for match in matches) == text:
            seconds = sum(float(match[1]) * _UNITS_S[match[2]] for match in matches)
            return Moment(after_start_ns=round(seconds * NS_PER_S))
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return Moment(wall_ns=round(when.timestamp() * NS_PER_S))
    except (ValueError, OverflowError, OSError):
        raise UserError(f"{text!r} is no time of a run: {_FORMS}.") from None


def spans(
    con: duckdb.DuckDBPyConnection, since: Moment | None, until: Moment | None
) -> Mapping[Machine, tuple[int, int]]:
    """Return the monotonic range of each machine that is asked for.

    The run starts with the first GPU sample of any machine. Raises UserError where nothing is left.
    """
    offsets = wall_offsets(con)
    held: dict[Machine, tuple[int, int]] = {
        (node, boot): (first, last)
        for node, boot, first, last in con.execute(
            "SELECT node, boot_id, min(coalesce(t0_ns, mono_ns)), max(coalesce(t1_ns, mono_ns))"
            " FROM (SELECT node, boot_id, mono_ns, t0_ns, t1_ns FROM gpu_activity UNION ALL"
            # A GPU that is lost has no samples: its time counts as long as the driver says so.
            "  SELECT node, boot_id, mono_ns, NULL, NULL FROM gpu_state"
            f"  WHERE nvml_return IN {LOST}"
            "  AND (node, boot_id) IN (SELECT (node, boot_id) FROM gpu_activity))"
            " WHERE mono_ns IS NOT NULL GROUP BY ALL"
        ).fetchall()
    }
    if since is None and until is None:
        return {machine: (first - 1, last) for machine, (first, last) in held.items()}
    begin_wall = min((held[m][0] + offsets[m] for m in held if m in offsets), default=0)
    end_wall = max((held[m][1] + offsets[m] for m in held if m in offsets), default=0)

    def at(point: Moment | None, machine: Machine, otherwise: int) -> int:
        if point is None:
            return otherwise
        # Where no clock was read, the run begins and ends with the machine's own first and last.
        offset, (begin, end) = offsets.get(machine), held[machine]
        if offset is not None:
            begin, end = begin_wall - offset, end_wall - offset
        elif point.wall_ns is not None:
            raise UserError(
                f"no clock was read on {machine[0]}, so its time of day is not known; take 90s, "
                "10m, 2h after the start of the run."
            )
        if point.wall_ns is not None:
            return point.wall_ns - (offset or 0)
        if point.before_end_ns is not None:
            return end - point.before_end_ns
        return begin + (point.after_start_ns or 0)

    found = {
        machine: (at(since, machine, first - 1), at(until, machine, last))
        for machine, (first, last) in held.items()
    }
    left = {
        machine: (max(low, held[machine][0] - 1), min(high, held[machine][1]))
        for machine, (low, high) in found.items()
    }
    left = {machine: (low, high) for machine, (low, high) in left.items() if low < high}
    if held and not left:
        length = max(last - first for first, last in held.values()) / NS_PER_S
        raise UserError(
            f"nothing was recorded between --since and --until: the recording is {length:.0f} s "
            f"long; {_FORMS}."
        )
    return left


def wall_offsets(con: duckdb.DuckDBPyConnection) -> dict[Machine, int]:
    """Return wall minus monotonic time of each machine, the median of what was read."""
    return {
        (node, boot): int(offset)
        for node, boot, offset in con.execute(
            "SELECT node, boot_id, median(wall_ns::HUGEINT - mono_ns)::DOUBLE FROM clock"
            " WHERE wall_ns IS NOT NULL AND mono_ns IS NOT NULL GROUP BY ALL"
        ).fetchall()
    }
