"""What dumps of PyTorch's flight recorder say: who waits in which collective, and for whom."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone

from rich.console import RenderableType
from rich.text import Text

from whyidle_rules.diagnosis import FlightHang
from whyidle_rules.report.pen import STYLE_TITLE, Pen, grid
from whyidle_rules.report.words import listing, rank_list


def flight_recorder(pen: Pen, hangs: list[FlightHang]) -> Iterable[RenderableType]:
    """Which ranks have not come to what the others wait in."""
    if not hangs:
        return
    yield Text("By PyTorch's flight recorder", style=STYLE_TITLE)
    table = grid(("left", 1), ("left", None))
    for hang in hangs:
        table.add_row("", pen.glyphs.bullet, pen.phrase((sentence(hang), None)))
    yield table


def sentence(hang: FlightHang) -> str:
    """Say who waits since when, who has not come, and of whom nothing is known."""
    at = datetime.fromtimestamp(hang.since_wall_ns / 1e9, tz=timezone.utc)
    what = listing(hang.operations)
    said = [
        f"Since {at:%Y-%m-%d %H:%M:%S} UTC {rank_list(hang.waiting)} "
        f"{'waits' if len(hang.waiting) == 1 else 'wait'} in {what}, call {hang.number:,} of group "
        f"{hang.group}"
    ]
    if len(hang.operations) > 1:
        said.append("ranks do not call the same collective")
    if hang.missing:
        last = sorted(set(hang.last.values()))
        calls = f"call {last[0]:,}" if len(last) == 1 else f"calls {last[0]:,} to {last[-1]:,}"
        have = "has" if len(hang.missing) == 1 else "have"
        said.append(f"{rank_list(hang.missing)} {have} not come, and had called {calls} last")
    if hang.unknown:
        said.append(f"of {rank_list(hang.unknown)} there is no dump from then on")
    return "; ".join(said) + "."
