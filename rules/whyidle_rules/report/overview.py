"""The top and the bottom of the report: what was diagnosed, how busy it was, what was not seen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from whyidle_rules.diagnosis import Diagnosis, NotSeen, Quality, Run
from whyidle_rules.report.pen import (
    GLUE,
    STYLE_DIM,
    STYLE_EMPTY,
    STYLE_SPINNING,
    STYLE_TITLE,
    STYLE_WORKING,
    Pen,
    grid,
)
from whyidle_rules.report.rounding import figures
from whyidle_rules.report.words import (
    duration,
    gpu_time,
    percent,
    plural,
    rank_list,
)

_MAX_NAMES = 2
_NAME_CELLS = 48
_MAX_JOB_FIELDS = 6
# Rules named for one gap in the evidence; the full list needs --verbose.
_MAX_BLIND = 4
_MAX_NOT_SEEN = 8


def heading(pen: Pen, d: Diagnosis) -> Iterable[RenderableType]:
    """The headline and one line on what was diagnosed."""
    yield pen.prose(d.headline, STYLE_TITLE)
    yield Text()
    yield pen.prose(_run_line(pen, d), STYLE_DIM)
    sources = _names(pen, d.run.source, keep="end")
    if sources:
        yield pen.prose(f"From {sources}.", STYLE_DIM)


def _run_line(pen: Pen, d: Diagnosis) -> str:
    run = d.run
    words = "Trace" if run.kind == "trace" else "Recording"
    words += f" of {plural(len(d.gpus), 'GPU')}" if d.gpus else " without GPU activity"
    ranks = [gpu.rank for gpu in d.gpus if gpu.rank is not None]
    if ranks:
        words += f" ({rank_list(ranks)})"
    if run.nodes:
        word = "node" if len(run.nodes) == 1 else f"{len(run.nodes):,} nodes:"
        words += f" on {word} {_names(pen, run.nodes)}"
    wall_s = _wall_s(d)
    if wall_s is not None:
        words += f", {duration(wall_s)} long"
    return words + _job(pen, run) + "."


def _wall_s(d: Diagnosis) -> float | None:
    if d.run.begin_ns is not None and d.run.end_ns is not None:
        return (d.run.end_ns - d.run.begin_ns) / 1e9
    return max((gpu.wall_s for gpu in d.gpus), default=None)


def _job(pen: Pen, run: Run) -> str:
    fields = [
        f"{pen.short(str(key), 24)} {pen.short(str(value), _NAME_CELLS)}"
        for key, value in (run.job or {}).items()
        if isinstance(value, (str, int, float)) and value != ""
    ]
    return f", job: {', '.join(fields[:_MAX_JOB_FIELDS])}" if fields else ""


def _names(pen: Pen, names: list[str], *, keep: Literal["middle", "end"] = "middle") -> str:
    cells = min(_NAME_CELLS, pen.columns - 12)
    kept = names if pen.verbose else names[:_MAX_NAMES]
    text = ", ".join(pen.short(name, cells, keep=keep) for name in kept)
    more = len(names) - len(kept)
    return f"{text} and {more:,} more" if more else text


def totals_bar(pen: Pen, d: Diagnosis) -> Iterable[RenderableType]:
    """All GPU time as one bar, with its legend."""
    totals = d.totals
    digits = figures(totals)
    glyphs = pen.glyphs
    parts = (totals.working_s, totals.empty_s, totals.spinning_s)
    yield Padding(pen.split(parts, min(pen.columns - 4, 100)), (0, 0, 0, 2))
    legend = Text(pen.unbroken(gpu_time(totals.gpu_s)) + ":")
    for glyph, style, units, seconds, word, meaning in (
        (glyphs.working, STYLE_WORKING, digits.working, parts[0], "working", ","),
        (glyphs.empty, STYLE_EMPTY, digits.empty, parts[1], "empty", " (no kernel on it),"),
        (glyphs.spinning, STYLE_SPINNING, digits.spinning, parts[2], "spinning", " (only waiting)"),
    ):
        legend.append(" ").append(glyph, style=style).append(GLUE)
        legend.append(pen.unbroken(f"{word} {digits.share(units, seconds)}") + meaning)
    yield Padding(legend, (0, 0, 0, 2))
    filled = [gpu.underfilled_s for gpu in d.gpus if gpu.underfilled_s is not None]
    underfilled_s = math.fsum(filled)
    if underfilled_s > 0:
        text = (
            f"Part of working, not counted as idle: {gpu_time(underfilled_s)} "
            f"({percent(underfilled_s / totals.gpu_s)}) in kernels that fill little of the chip."
        )
        yield Padding(pen.prose(text, STYLE_DIM), (0, 0, 0, 2))


def not_seen(pen: Pen, rows: list[NotSeen]) -> Iterable[RenderableType]:
    """What the run does not hold, and which rules could say nothing for want of it."""
    if not rows:
        return
    yield Text("Not seen", style=STYLE_TITLE)
    kept = rows if pen.verbose else rows[:_MAX_NOT_SEEN]
    table = grid(("left", 1), ("left", None))
    for row in kept:
        blind = f"(blind: {_blind(pen, row.rules)})" if row.rules else ""
        text = pen.phrase((f"{row.what}: {row.why}", None), (blind, STYLE_DIM))
        table.add_row("", pen.glyphs.bullet, text)
    if len(rows) > len(kept):
        table.add_row("", "", f"{len(rows) - len(kept):,} more with --verbose")
    yield table


def _blind(pen: Pen, rules: list[str]) -> str:
    kept = rules if pen.verbose else rules[:_MAX_BLIND]
    more = f" and {len(rules) - len(kept)} more" if len(rules) > len(kept) else ""
    return ", ".join(pen.short(rule, 40) for rule in kept) + more


def quality_line(pen: Pen, quality: Quality) -> Iterable[RenderableType]:
    """How far the source can be trusted, as far as that is known."""
    parts: list[str] = []
    if quality.missed_ticks is not None:
        parts.append(plural(quality.missed_ticks, "missed sample"))
    if quality.gaps_s is not None:
        parts.append(f"gaps of {duration(quality.gaps_s)} in all" if quality.gaps_s else "no gaps")
    if quality.clock_error_ns is not None:
        parts.append(f"clocks within {duration(quality.clock_error_ns / 1e9)}")
    if quality.agent_cpu_ratio is not None:
        parts.append(f"the agent used {percent(quality.agent_cpu_ratio)} of a core")
    if parts:
        yield pen.prose(f"Quality: {', '.join(parts)}.", STYLE_DIM)
