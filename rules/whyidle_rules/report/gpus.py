"""GPUs side by side: one line each; of many, the extremes, the middle and the culprits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from whyidle_rules.diagnosis import Diagnosis, GpuLedger
from whyidle_rules.report.pen import STYLE_DIM, STYLE_TITLE, Pen, grid
from whyidle_rules.report.places import Cluster, cluster
from whyidle_rules.report.words import (
    duration,
    gpu_time,
    percent,
    plural,
    title_inside,
)

# What fits beside everything else on a screen of 50 lines.
_MAX_LINES = 16
_EXTREMES = 5
_MIDDLE = 2
_CULPRITS = 2
_NODE_CELLS = 20
# Waiting under this share of a GPU's wall time is not worth a word.
_WORTH_RATIO = 0.01
_SAYS_IT_RATIO = 0.8


def side_by_side(pen: Pen, d: Diagnosis) -> Iterable[RenderableType]:
    """One line for each GPU: its bar, its biggest cause, whom it waited for."""
    # Of a single GPU the totals have said all.
    if not d.gpus or (len(d.gpus) == 1 and not pen.verbose):
        return
    late = _waited_on(d.gpus)
    known = cluster(d.gpus)
    chosen, hidden = _choose(d.gpus, late, pen.verbose)
    title = Text("GPUs side by side", style=STYLE_TITLE)
    if hidden:
        title.append(f" (most idle first; {plural(hidden, 'GPU')} not shown)", style=STYLE_DIM)
    yield title
    lines: list[tuple[str, GpuLedger | None]] = []
    position = 0
    names = _names(pen, [gpu for _, gpu in chosen], known)
    for (place, gpu), name in zip(chosen, names, strict=True):
        if place > position:
            lines.append((f"{pen.glyphs.ellipsis} {place - position:,} more", None))
        lines.append((name, gpu))
        position = place + 1
    cells = min(max(pen.columns // 5, 10), 32)
    table = grid(
        ("left", max(cell_len(name) for name, _ in lines)),
        ("left", cells),
        ("right", max(len(_idle(gpu)) for _, gpu in chosen)),
        ("left", None),
    )
    for name, one in lines:
        if one is None:
            table.add_row("", Text(name, STYLE_DIM))
        else:
            bar = pen.split((one.working_s, one.empty_s, one.spinning_s), cells)
            table.add_row("", name, bar, _idle(one), _words(pen, one, late))
    yield table


def _choose(
    gpus: Sequence[GpuLedger], late: dict[int, float], verbose: bool
) -> tuple[list[tuple[int, GpuLedger]], int]:
    """Return (position, GPU) of the lines to show, and how many GPUs are left out."""
    if verbose or len(gpus) <= _MAX_LINES:
        ordered = sorted(gpus, key=_order)
        return list(enumerate(ordered)), 0
    ordered = sorted(gpus, key=lambda gpu: (-_idle_ratio(gpu), _order(gpu)))
    last = len(ordered) - 1
    kept = {*range(_EXTREMES), *range(last - _EXTREMES + 1, last + 1)}
    kept |= {len(ordered) // 2 + offset for offset in range(_MIDDLE)}
    culprits = sorted(late, key=lambda rank: (-late[rank], rank))[:_CULPRITS]
    kept |= {place for place, gpu in enumerate(ordered) if gpu.rank in culprits}
    return [(place, ordered[place]) for place in sorted(kept)], len(ordered) - len(kept)


def _order(gpu: GpuLedger) -> tuple[float, str, float, str]:
    rank = math.inf if gpu.rank is None else gpu.rank
    index = math.inf if gpu.gpu is None else gpu.gpu
    return (rank, gpu.node or "", index, gpu.uuid or "")


def _waited_on(gpus: Sequence[GpuLedger]) -> dict[int, float]:
    """Seconds that all others waited for each rank, worth a word only."""
    sums: dict[int, float] = {}
    for gpu in gpus:
        for rank, seconds in gpu.waited_for.items():
            if rank.isascii() and rank.isdigit():
                sums[int(rank)] = sums.get(int(rank), 0.0) + seconds
    floor = _WORTH_RATIO * math.fsum(gpu.wall_s for gpu in gpus)
    return {rank: seconds for rank, seconds in sums.items() if seconds > floor}


def _names(pen: Pen, gpus: Sequence[GpuLedger], known: Cluster) -> list[str]:
    """Name each GPU; where two would read the same, by the file that it came from."""
    names = [_name(pen, gpu, known) for gpu in gpus]
    counts = Counter(names)
    return [
        f"{name} {pen.short(gpu.source.rpartition('/')[2], _NODE_CELLS)}"
        if gpu.source and counts[name] > 1
        else name
        for name, gpu in zip(names, gpus, strict=True)
    ]


def _name(pen: Pen, gpu: GpuLedger, known: Cluster) -> str:
    several = gpu.node is not None and len(known.nodes) > 1
    node = pen.short(known.node(gpu.node or ""), _NODE_CELLS) if several else ""
    if gpu.rank is not None:
        return f"rank {gpu.rank} {node}".rstrip()
    if gpu.gpu is not None:
        return f"{node} GPU {gpu.gpu}".lstrip()
    return f"{node} {pen.short(gpu.uuid or 'GPU', _NODE_CELLS)}".lstrip()


def _idle_ratio(gpu: GpuLedger) -> float:
    return (gpu.empty_s + gpu.spinning_s) / gpu.wall_s if gpu.wall_s > 0 else 0.0


def _idle(gpu: GpuLedger) -> str:
    return percent(_idle_ratio(gpu)) if gpu.wall_s > 0 else "-"


def _words(pen: Pen, gpu: GpuLedger, late: dict[int, float]) -> Text:
    """The biggest cause as felt here, whom it waited for, and who waited for it."""
    most = None if pen.verbose else 1
    causes = _biggest(gpu.causes, gpu.wall_s, most)
    waits = _biggest(gpu.waited_for, gpu.wall_s, most)
    # Waiting that makes up most of the cause says it better than the cause's name.
    if not pen.verbose and causes and waits and waits[0][1] >= _SAYS_IT_RATIO * causes[0][1]:
        causes = []
    words = [f"{title_inside(cause)} {percent(s / gpu.wall_s)}" for cause, s in causes]
    words += [
        f"waited {duration(s)} ({percent(s / gpu.wall_s)}) for rank {pen.short(rank, 12)}"
        for rank, s in waits
    ]
    if gpu.rank is not None and gpu.rank in late:
        words.append(f"others waited {gpu_time(late[gpu.rank])} for it")
    return pen.prose("; ".join(words))


def _biggest(seconds: dict[str, float], wall_s: float, most: int | None) -> list[tuple[str, float]]:
    floor = _WORTH_RATIO * wall_s
    ordered = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
    return [(name, value) for name, value in ordered if value > floor][:most]
