"""Figures that still add up after rounding: largest remainders, one unit for a whole table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from whyidle_rules.diagnosis import Totals

# Tables show one digit more than sentences do: what the sum moves a part by stays out of sight.
_PERCENT_DECIMALS = 1
_ALL = 100 * 10**_PERCENT_DECIMALS
_TIME_DIGITS = 4

_UNITS: tuple[tuple[str, float, float], ...] = (
    ("ms", 1e-3, 1.0),
    ("s", 1.0, 600.0),
    ("min", 60.0, 7200.0),
    ("h", 3600.0, math.inf),
)


def apportion(values: Sequence[float], total: int) -> list[int]:
    """Share out `total` whole units in proportion to `values`, by largest remainder.

    The result sums to `total` exactly, unless nothing is positive: then it is all 0.
    """
    parts = [value if math.isfinite(value) and value > 0 else 0.0 for value in values]
    whole = math.fsum(parts)
    # A sum of denormals is not a basis for shares.
    if not math.isfinite(whole) or whole < 1e-300 or total <= 0:
        return [0] * len(parts)
    exact = [part / whole * total for part in parts]
    units = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (units[i] - exact[i], i))
    for index in by_remainder[: total - sum(units)]:
        units[index] += 1
    return units


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A part of the idle time in print: its time, and its share of all GPU time."""

    time: str
    share: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How one report rounds: shares of all GPU time, and idle times in one unit.

    `working`, `empty` and `spinning` are whole tenths of a percent and sum to 100 %; `idle_times`
    is the idle total in whole units of 10^-time_decimals `time_unit`.
    """

    totals: Totals
    working: int
    empty: int
    spinning: int
    time_unit: str
    time_decimals: int
    idle_times: int

    def share(self, units: int, seconds: float) -> str:
        """Write a share; a part that rounds to nothing or to everything says so."""
        if units == 0 and seconds > 0:
            return f"<{self._percent(1)}"
        if units == _ALL and self.totals.gpu_s - seconds > 1e-9 * self.totals.gpu_s:
            return f">{self._percent(_ALL - 1)}"
        return self._percent(units)

    def parts(self, seconds: Sequence[float], *, keep: int | None = None) -> list[Figure]:
        """Write parts of the idle time so that both columns add up to the idle total.

        With `keep` the parts after the first `keep` become one more figure, their sum. Rounding
        comes before that, so a part reads the same in a short list and in a long one.
        """
        rows = list(
            zip(
                apportion(seconds, self.idle_times),
                apportion(seconds, self.empty + self.spinning),
                seconds,
                strict=True,
            )
        )
        if keep is not None and len(rows) > keep:
            times, shares, rest = zip(*rows[keep:], strict=True)
            rows[keep:] = [(sum(times), sum(shares), math.fsum(rest))]
        return [
            Figure(time=self._time(time, part), share=self.share(share, part))
            for time, share, part in rows
        ]

    def idle(self) -> Figure:
        """Write the idle total itself."""
        return Figure(
            time=self._time(self.idle_times, self.totals.idle_s),
            share=self.share(self.empty + self.spinning, self.totals.idle_s),
        )

    def _percent(self, units: int) -> str:
        return f"{units / 10**_PERCENT_DECIMALS:.{_PERCENT_DECIMALS}f} %"

    def _time(self, units: int, seconds: float) -> str:
        text = f"{max(units, 1) / 10**self.time_decimals:,.{self.time_decimals}f}"
        if units == 0:
            return f"<{text} {self.time_unit}" if seconds > 0 else f"0 {self.time_unit}"
        return f"{text} {self.time_unit}"


def figures(totals: Totals) -> Figures:
    """Choose the roundings of a report from its totals; `totals.gpu_s` must be above 0."""
    parts = (totals.working_s, totals.empty_s, totals.spinning_s)
    working, empty, spinning = apportion(parts, _ALL)
    # The unit is chosen after rounding, so that 0.9997 s does not read 1000 ms.
    rounded = float(f"{totals.idle_s:.3g}")
    unit, unit_s, _ = next((row for row in _UNITS if rounded < row[2]), _UNITS[-1])
    time_decimals = _decimals(rounded / unit_s)
    return Figures(
        totals=totals,
        working=working,
        empty=empty,
        spinning=spinning,
        time_unit=unit,
        time_decimals=time_decimals,
        idle_times=round(totals.idle_s / unit_s * 10**time_decimals),
    )


def _decimals(value: float) -> int:
    """Digits after the point that give the total four significant ones, at least one."""
    if value <= 0:
        return 1
    return min(max(_TIME_DIGITS - 1 - math.floor(math.log10(value)), 1), _TIME_DIGITS - 1)
