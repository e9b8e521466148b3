"""The report for a terminal: one string out of one diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

from rich.console import Console, RenderableType
from rich.text import Text

from whyidle_rules.diagnosis import Diagnosis
from whyidle_rules.report.findings import findings
from whyidle_rules.report.flight import flight_recorder
from whyidle_rules.report.gpus import side_by_side
from whyidle_rules.report.overview import heading, not_seen, quality_line, totals_bar
from whyidle_rules.report.pen import GLUE, MAX_COLUMNS, MAX_PROSE_COLUMNS, MIN_COLUMNS, Pen
from whyidle_rules.report.returned import returned
from whyidle_rules.report.tables import ledger


def render_text(
    d: Diagnosis, *, width: int, colour: bool, verbose: bool, ascii_only: bool = False
) -> str:
    """Return the whole report, with a newline at the end.

    `width` is in terminal cells; below 40 it counts as 40. Without `colour` there is no escape
    character in it; with `colour` only colours are. `ascii_only` keeps it to ASCII
    (`pen.needs_ascii` tells from an encoding). Strings of the diagnosis are never trusted.
    """
    columns = min(max(width, MIN_COLUMNS), MAX_COLUMNS)
    pen = Pen(columns=columns, verbose=verbose, ascii_only=ascii_only)
    out = StringIO()
    console = Console(
        file=out,
        width=columns,
        height=100,
        color_system="256" if colour else None,
        force_terminal=colour,
        force_jupyter=False,
        no_color=not colour,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    for number, section in enumerate(_sections(pen, d)):
        if number:
            console.print()
        for part in section:
            narrow = isinstance(part, Text)
            console.print(part, width=min(columns, MAX_PROSE_COLUMNS) if narrow else None)
    lines = out.getvalue().replace(GLUE, " ").split("\n")
    return "\n".join(line if colour else line.rstrip() for line in lines)


def _sections(pen: Pen, d: Diagnosis) -> Iterable[list[RenderableType]]:
    """The parts of the report that have something to say, in the order of reading."""
    has_time = bool(d.gpus) and d.totals.gpu_s > 0
    sections: list[Iterable[RenderableType]] = [heading(pen, d)]
    if has_time:
        sections += [totals_bar(pen, d), ledger(pen, d), side_by_side(pen, d)]
        sections.append(returned(pen, d))
    sections += [findings(pen, d), flight_recorder(pen, d.flight_recorder)]
    sections += [not_seen(pen, d.not_seen), quality_line(pen, d.quality)]
    return (section for section in map(list, sections) if section)
