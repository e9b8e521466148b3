"""The top and the bottom of the report: what was diagnosed, how busy it was, what was not seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from whyidle_rules.report.places import cluster
from whyidle_rules.report.rounding import figures
from whyidle_rules.report.words import (
    as_number,
    duration,
    gpu_time,
    percent,
    plural,
    rank_list,
)

_MAX_NAMES = 2
_NAME_CELLS = 48
# Ranks start and stop a little apart; files of several runs lie much further apart.
_ONE_RUN_RATIO = 2.0
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
    known = cluster(d.gpus)
    words = "Trace" if run.kind == "trace" else "Recording"
    words += f" of {plural(len(d.gpus), 'GPU')}" if d.gpus else " without GPU activity"
    if known.ranks:
        words += f" ({rank_list(known.ranks)}{_of_more(run, len(known.ranks))})"
    if run.nodes:
        word = "node" if len(run.nodes) == 1 else f"{len(run.nodes):,} nodes:"
        words += f" on {word} {_names(pen, [known.node(node) for node in run.nodes])}"
    return words + _length(d) + _job(pen, run) + "."


def _of_more(run: Run, ranks: int) -> str:
    """Say that the job had more ranks than were seen."""
    world_size = as_number((run.job or {}).get("world_size"))
    return f" of {world_size:,.0f}" if world_size is not None and world_size > ranks else ""


def _length(d: Diagnosis) -> str:
    longest_s = max((gpu.wall_s for gpu in d.gpus), default=0.0)
    if d.run.begin_ns is not None and d.run.end_ns is not None:
        span_s = (d.run.end_ns - d.run.begin_ns) / 1e9
        # Files of different days are not one run that lasted for days.
        if span_s <= _ONE_RUN_RATIO * longest_s:
            return f", {duration(span_s)} long"
    each = "each up to " if len(d.gpus) > 1 else ""
    return f", {each}{duration(longest_s)} long" if d.gpus else ""


def _job(pen: Pen, run: Run) -> str:
    fields = [
        f"{pen.short(str(key), 24)} {pen.short(str(value), _NAME_CELLS)}"
        for key, value in (run.job or {}).items()
        if isinstance(value, (str, int, float)) and value != "" and key != "world_size"
    ]
    return f", job: {', '.join(fields[:_MAX_JOB_FIELDS])}" if fields else ""


def _names(pen: Pen, names: Sequence[str], *, keep: Literal["middle", "end"] = "middle") -> str:
    kept = names if pen.verbose else names[:_MAX_NAMES]
    # A name alone may take a line, two share it.
    cells = pen.columns - 10 if len(kept) == 1 else max(pen.columns // 2 - 8, 24)
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
