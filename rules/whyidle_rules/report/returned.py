"""What fixing each root cause returns, where the price of a GPU-hour is known."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from whyidle_rules.diagnosis import Diagnosis
from whyidle_rules.report.pen import STYLE_DIM, STYLE_TITLE, Pen
from whyidle_rules.report.places import cluster
from whyidle_rules.report.roots import RootGroup, group_roots
from whyidle_rules.report.words import clause, gpu_time, money, plural, title

_MAX_ROWS = 5
_UNATTRIBUTED = "unattributed"
S_PER_HOUR = 3600.0


def returned(pen: Pen, d: Diagnosis) -> Iterable[RenderableType]:
    """GPU-hours and money by root cause, at most five unless everything is asked for."""
    price = d.gpu_hour_cost
    groups = [g for g in group_roots(d.root_causes, d.ledger) if g.cause != _UNATTRIBUTED]
    if price is None or not groups:
        return
    kept = groups if pen.verbose else groups[:_MAX_ROWS]
    yield Text("What fixing returns, at most", style=STYLE_TITLE)
    known = cluster(d.gpus)
    for group in kept:
        where = known.place(group)
        worth = f"{gpu_time(group.idle_s)}, {money(group.idle_s / S_PER_HOUR * price)}:"
        what = f"{title(group.cause)}, {clause(group.cause, group.subcause)}"
        told = pen.phrase((worth, STYLE_TITLE), (what, None), (f"({where})" if where else "", None))
        yield Padding(told, (0, 0, 0, 2))
    rest = _rest(groups[len(kept) :])
    tail = f"At {money(price)} a GPU-hour{rest}."
    yield Padding(pen.prose(tail, STYLE_DIM), (0, 0, 0, 2))


def _rest(groups: list[RootGroup]) -> str:
    if not groups:
        return ""
    together = gpu_time(math.fsum(group.idle_s for group in groups))
    return f"; {plural(len(groups), 'smaller one')} together: {together}"
