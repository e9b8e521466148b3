"""The ledger in two views that both sum to the idle time: where it arose, and where it was felt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from whyidle_rules.diagnosis import Diagnosis, LedgerRow
from whyidle_rules.report.pen import STYLE_DIM, STYLE_TITLE, Pen, colour, grid
from whyidle_rules.report.places import Cluster, cluster
from whyidle_rules.report.roots import RootGroup, group_roots, is_sure, weakest
from whyidle_rules.report.rounding import Figure, figures
from whyidle_rules.report.words import clause, percent, title, title_inside

_MAX_ROWS = 8
# Rows under this share of the idle time are summed up.
_WORTH_RATIO = 0.005
_MAX_ORIGINS = 2
# A root of less than this share of a felt cause is left to --verbose.
_NOISE_RATIO = 0.05


def ledger(pen: Pen, d: Diagnosis) -> Iterable[RenderableType]:
    """Both views; one of them where every cause was felt just where it arose."""
    if d.totals.idle_s <= 0:
        return
    groups = group_roots(d.root_causes, d.ledger)
    known = cluster(d.gpus)
    if groups:
        yield _title("Where the idle time arose", "GPU time, share of all GPU time")
        texts = [_arose(pen, group, known, d.totals.gpu_s) for group in groups]
        yield _table(pen, d, texts, [group.idle_s for group in groups], groups)
    felt = _by_felt(d.ledger)
    is_same = all(row.root.where == "self" for row in d.ledger)
    if felt and not (is_same and groups):
        if groups:
            yield Text()
        yield _title("Where the same time was felt", "what each GPU itself was doing")
        texts = [_felt(pen, rows, known) for rows in felt]
        yield _table(pen, d, texts, [_sum(rows) for rows in felt], [rows[0] for rows in felt])


def _title(title_: str, unit: str) -> Text:
    return Text.assemble((title_, STYLE_TITLE), (f" ({unit})", STYLE_DIM))


def _table(
    pen: Pen,
    d: Diagnosis,
    texts: Sequence[Text],
    seconds: Sequence[float],
    causes: Sequence[RootGroup] | Sequence[LedgerRow],
) -> Table:
    """Rows of time, share, bar and words, the biggest first, and the total they add up to."""
    digits = figures(d.totals)
    keep = None if pen.verbose else _keep(seconds, d.totals.idle_s)
    rows = digits.parts(seconds, keep=keep)
    total = digits.idle()
    cells = min(max(pen.columns // 6, 8), 24)
    table = grid(
        ("right", _widest([*(row.time for row in rows), total.time])),
        ("right", _widest([*(row.share for row in rows), total.share])),
        ("left", cells),
        ("left", None),
    )
    for index, row in enumerate(rows):
        if keep is not None and index == keep:
            words = Text(f"{len(texts) - keep:,} smaller causes", style=STYLE_DIM)
            table.add_row("", row.time, row.share, "", words)
            continue
        bar = pen.bar(seconds[index] / d.totals.idle_s, cells, colour(causes[index].cause))
        table.add_row("", row.time, row.share, bar, texts[index])
    _add_total(table, total, len(rows))
    return table


def _keep(seconds: Sequence[float], idle_s: float) -> int | None:
    """Return how many rows to show before the rest becomes one; None for all of them."""
    worth = sum(one >= _WORTH_RATIO * idle_s for one in seconds)
    keep = min(max(worth, 1), _MAX_ROWS)
    # One row left over is shown itself: a line saying so would be as long.
    return keep if len(seconds) > keep + 1 else None


def _add_total(table: Table, total: Figure, rows: int) -> None:
    if rows > 1:
        text = Text("idle in all", style=STYLE_DIM)
        table.add_row("", total.time, total.share, "", text)


def _widest(texts: Sequence[str]) -> int:
    return max(len(text) for text in texts)


def _arose(pen: Pen, group: RootGroup, known: Cluster, gpu_s: float) -> Text:
    where = known.place(group)
    if where:
        where = f"on {where}" if group.is_only_there else f"mostly on {where}"
    is_doubtful = group.cause != "unattributed" and not is_sure(group.grade)
    origins = ""
    if pen.verbose and len(group.origins) > 1:
        shares = [
            f"{known.origin(row.node, row.rank)} {percent(row.idle_s / gpu_s)}"
            for row in group.origins
        ]
        origins = f"[{', '.join(shares)}]"
    return pen.phrase(
        (title(group.cause), colour(group.cause) + STYLE_TITLE),
        (where, STYLE_TITLE),
        (f": {clause(group.cause, group.subcause)}", None),
        ("(probably)" if is_doubtful else "", STYLE_DIM),
        (origins, STYLE_DIM),
    )


def _by_felt(rows: Sequence[LedgerRow]) -> list[list[LedgerRow]]:
    """Gather ledger rows by (cause, subcause), biggest first."""
    by_pair: dict[tuple[str, str], list[LedgerRow]] = {}
    for row in rows:
        if row.idle_s > 0:
            by_pair.setdefault((row.cause, row.subcause), []).append(row)
    return sorted(by_pair.values(), key=lambda rows: (-_sum(rows), rows[0].cause, rows[0].subcause))


def _felt(pen: Pen, rows: Sequence[LedgerRow], known: Cluster) -> Text:
    first = rows[0]
    notes = [note for note in (weakest(rows), _from(pen, rows, known)) if note]
    return pen.phrase(
        (title(first.cause), colour(first.cause) + STYLE_TITLE),
        (f": {clause(first.cause, first.subcause)}", None),
        (f"({'; '.join(notes)})" if notes else "", STYLE_DIM),
    )


def _from(pen: Pen, rows: Sequence[LedgerRow], known: Cluster) -> str:
    """Name the roots of a felt cause, where they lie elsewhere: "from host pause on rank 2"."""
    by_key: dict[tuple[str, str | None, int | None, str], list[LedgerRow]] = {}
    for row in rows:
        root = row.root
        by_key.setdefault((root.where, root.node, root.rank, root.cause), []).append(row)
    by_root: dict[str, float] = {}
    for same in by_key.values():
        name = _root_name(same[0], known)
        by_root[name] = by_root.get(name, 0.0) + _sum(same)
    ordered = sorted(by_root.items(), key=lambda item: (-item[1], item[0]))
    total = _sum(rows)
    if len(ordered) == 1:
        return "" if not ordered[0][0] else f"from {ordered[0][0]}"
    kept = ordered
    if not pen.verbose:
        kept = [item for item in ordered[:_MAX_ORIGINS] if item[1] >= _NOISE_RATIO * total]
    names = [
        f"{percent(s / total)} of it {f'from {name}' if name else 'itself'}" for name, s in kept
    ]
    return ", ".join(names)


def _root_name(row: LedgerRow, known: Cluster) -> str:
    root = row.root
    if root.where == "self":
        return ""
    if root.where == "outside":
        return "outside of what was recorded"
    return f"{title_inside(root.cause)} on {known.origin(root.node, root.rank)}"


def _sum(rows: Sequence[LedgerRow]) -> float:
    return math.fsum(row.idle_s for row in rows)
