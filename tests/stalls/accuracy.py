"""The published accuracy: what diagnose says of the recorded stalls, as a table and as figures.

python -m stalls.accuracy ../fixtures/stalls --json accuracy.json        (make accuracy)
python -m stalls.accuracy ../fixtures/stalls --write       (docs/accuracy.md and missed.json)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stalls import bars
from stalls.root_score import RootScore
from stalls.score import Score, fixtures, score_fixture, score_roots_of
from whyidle_rules.rule_load import load_rules

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"


def misses(rows: Sequence[Score | RootScore]) -> dict[str, float]:
    """The bars that are missed, by stretch, each with its figure."""
    told = {}
    for row in rows:
        for bar in row.bars:
            figure, met = row.against(bar)
            if not met:
                told[row.name(bar)] = figure
    return told


_HEAD = (
    f"{'kind':22}{'strength':10}{'stretch':10}{'probe':6}{'wall':>6}{'idle':>7}{'seen':>7}"
    f"{'stall':>7}{'right':>8}{'wrong':>8}{'nobody':>8}{'blamed':>8}"
)


def line(row: Score) -> str:
    """One row of the table; `wrong` is of the stall or, without one, of the idle time."""
    wrong = row.wrong_of_idle_share if row.wrong_share is None else row.wrong_share
    shares = (row.right_share, wrong, row.unattributed_share, row.blamed_share)
    return (
        f"{row.kind:22}{row.strength:10}{row.window:10}{'yes' if row.probe else 'no':6}"
        f"{row.wall_s:6.1f}{row.idle_s:7.2f}{row.seen_idle_s:7.2f}{row.stall_s:7.2f}"
        + "".join("       -" if share is None else f"{share:8.1%}" for share in shares)
    )


def looked_at(folder: Path) -> frozenset[str]:
    """Kinds on which a rule or a threshold was changed after its recordings had been looked at."""
    path = folder / "looked_at.json"
    return (
        frozenset(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else frozenset()
    )


def summary(rows: Sequence[Score], tuned: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Shares over all stalls together, by seconds; the worst control; with and without the probe.

    Kinds are weighed alike by their mean, so that a kind with many strengths is not worth more.
    `tuned`: kinds that are left out of the mean of those on which nothing was tuned.
    """
    told: dict[str, Any] = {}
    for probe in (True, False):
        mine = [row for row in rows if row.probe == probe]
        stalls = [row for row in mine if row.right_share is not None]
        if not stalls:
            continue
        total_s = sum(row.stall_s for row in stalls)
        kinds: dict[str, list[float]] = {}
        for row in stalls:
            kinds.setdefault(row.kind, []).append(row.right_share or 0.0)
        controls = [row.blamed_share for row in mine if row.role == "control"]
        confusers = [r.wrong_of_idle_share for r in mine if r.role == "confuser" and not r.stall_s]
        told["with probe" if probe else "without probe"] = {
            "stall_s": total_s,
            "right_share": sum((r.right_share or 0.0) * r.stall_s for r in stalls) / total_s,
            "kinds": len(kinds),
            "right_share_mean_of_kinds": _mean(kinds.values()),
            "kinds_not_tuned_on": len(set(kinds) - tuned),
            "right_share_mean_of_those": _mean(v for k, v in kinds.items() if k not in tuned),
            "wrong_share": sum(r.wrong_s for r in stalls) / total_s,
            "unattributed_share": sum(r.unattributed_share * r.seen_idle_s for r in stalls)
            / max(sum(r.seen_idle_s for r in stalls), 1e-9),
            "worst_control_blamed_share": max(controls, default=None),
            "worst_confuser_wrong_share": max(confusers, default=None),
        }
    return told


def _mean(groups: Iterable[Sequence[float]]) -> float | None:
    means = [sum(group) / len(group) for group in groups]
    return sum(means) / len(means) if means else None


def page(rows: Sequence[Score], roots: Sequence[RootScore], tuned: frozenset[str]) -> str:
    """The page of documentation: a row a stretch, shares in whole per cent."""
    told = summary(rows, tuned)
    parts = [_INTRODUCTION]
    for name, figures in told.items():
        parts.append(
            f"- {name}: {figures['right_share']:.0%} of {figures['stall_s']:.0f} s of stall on the "
            f"right cause, {figures['wrong_share']:.1%} on a wrong one; mean of "
            f"{figures['kinds']} kinds {figures['right_share_mean_of_kinds']:.0%}, "
            f"{_per_cent(figures['right_share_mean_of_those'])} of the "
            f"{figures['kinds_not_tuned_on']} that nothing was tuned on; "
            f"{figures['unattributed_share']:.0%} of their idle time is charged to nobody. The "
            f"worst healthy control has {_per_cent(figures['worst_control_blamed_share'], 1)} of "
            "its wall time blamed on somebody.\n"
        )
    parts.append("\n" + _COLUMNS + "|---" * (_COLUMNS.count("|") - 1) + "|\n")
    parts += [
        _row(row) for row in sorted(rows, key=lambda r: (r.role != "stall", r.role, r.name("")))
    ]
    return "".join(parts) + roots_page(roots, tuned)


def roots_page(roots: Sequence[RootScore], tuned: frozenset[str]) -> str:
    """The part of the page about ranks that wait for each other."""
    told = [("with probe", True), ("without probe", False)]
    parts = [_ROOTS, *(f"- {name}: {root_summary(roots, probe)}\n" for name, probe in told)]
    untuned = [row for row in roots if row.kind not in tuned]
    parts.append(
        f"- with probe, of the {len({row.kind for row in untuned})} kinds that nothing was tuned "
        f"on: {root_summary(untuned, True)}\n"
    )
    parts.append("\n" + _ROOT_COLUMNS + "|---" * (_ROOT_COLUMNS.count("|") - 1) + "|\n")
    for row in sorted(roots, key=lambda r: (r.role == "control", r.name(""))):
        cells = (
            *(row.kind, row.strength, row.role, "yes" if row.probe else "no"),
            *(f"{row.waited_s:.1f}", f"{row.booked_s:.1f}", _per_cent(row.rank_share)),
            *(_per_cent(row.cause_share), _per_cent(row.wrong_cause_share)),
            _per_cent(row.accused_s / row.wall_s, 1),
        )
        parts.append("| " + " | ".join(cells) + " |\n")
    return "".join(parts)


def root_summary(roots: Sequence[RootScore], probe: bool) -> str:
    """One sentence: shares by seconds, means of kinds, the worst accusation."""
    mine = [row for row in roots if row.probe == probe]
    due = [row for row in mine if row.rank_share is not None and "root_rank" in row.bars]
    booked_s = sum(row.booked_s for row in due)
    worst = max((row.accused_s / row.wall_s for row in mine), default=None)
    ranks = _kinds((row.kind, row.rank_share) for row in due)
    causes = _kinds((row.kind, row.cause_share) for row in due)
    return (
        f"of {sum(row.waited_s for row in due):.0f} s that ranks waited, {booked_s:.0f} s are "
        f"booked; {_share(due, booked_s, 'rank_share')} of those on the right rank (mean of "
        f"{len({row.kind for row in due})} kinds {_per_cent(_mean(ranks))}), "
        f"{_share(due, booked_s, 'cause_share')} on the right cause there (mean "
        f"{_per_cent(_mean(causes))}), {_share(due, booked_s, 'wrong_cause_share')} on a wrong "
        f"one. At most {_per_cent(worst, 1)} of a run's wall time accuses a rank that nobody "
        "waited for."
    )


def _share(rows: Sequence[RootScore], booked_s: float, name: str) -> str:
    if not booked_s:
        return "-"
    return _per_cent(sum((getattr(row, name) or 0.0) * row.booked_s for row in rows) / booked_s)


def _kinds(shares: Iterable[tuple[str, float | None]]) -> list[list[float]]:
    kinds: dict[str, list[float]] = {}
    for kind, share in shares:
        kinds.setdefault(kind, []).append(share or 0.0)
    return list(kinds.values())


_INTRODUCTION = f"""# Accuracy on recorded stalls

What `diagnose` says of real runs into which the kernel injected a stall, against what the GPU's own
timeline says; `fixtures/stalls/README.md` tells how they were made. Right: share of the stall that
is charged to its cause. Wrong: share that is charged to a cause that it is not due to; where there
is no stall, of the idle time. Nobody: share of the idle time that is unattributed. Blamed: of a run
that is healthy, share of wall time that is charged to anybody. Bars: right at least
{bars.RIGHT_WITH_PROBE:.0%} with the probe and {bars.RIGHT_WITHOUT_PROBE:.0%} without, healthy runs
blamed for at most {bars.CONTROL:.0%} of wall. This page is generated.

"""
_ROOTS = f"""
## Ranks that wait for each other

Where that waiting arose: the rank that was late, and what held it up. Waited: seconds in which the
GPUs' timelines say that ranks polled for another one. Booked: seconds that diagnose charges as
such; it books what is certain, so that is less. Root rank: share of the booked seconds that are
charged to a rank that was really waited for so long (bar: {bars.ROOT_RANK:.0%}). Root cause: share
charged to that rank's own cause too (bar, with the probe: {bars.ROOT_CAUSE:.0%}). Wrong: share
charged to a cause that it was not. Accused: share of wall time charged to ranks that nobody waited
for so long (bar where no rank is late: {bars.ACCUSED:.0%}).

"""
_ROOT_COLUMNS = (
    "| kind | strength | role | probe | waited s | booked s | root rank | root cause | wrong "
    "| accused |\n"
)
_COLUMNS = (
    "| kind | strength | stretch | role | probe | idle s | stall s | right | wrong | nobody "
    "| blamed |\n"
)


def _row(row: Score) -> str:
    wrong = row.wrong_of_idle_share if row.wrong_share is None else row.wrong_share
    cells = (
        *(row.kind, row.strength, row.window, row.role, "yes" if row.probe else "no"),
        *(f"{row.idle_s:.1f}", f"{row.stall_s:.1f}", _per_cent(row.right_share)),
        *(_per_cent(wrong), _per_cent(row.unattributed_share), _per_cent(row.blamed_share)),
    )
    return "| " + " | ".join(cells) + " |\n"


def _per_cent(share: float | None, digits: int = 0) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def main() -> int:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--write", action="store_true", help="write the page and what is missed")
    parser.add_argument("--detail", action="store_true", help="say what was charged to whom")
    args = parser.parse_args()
    rules = load_rules((), site=args.folder / "no-site")
    rows: list[Score] = []
    roots: list[RootScore] = []
    sys.stdout.write(_HEAD + "\n")
    for fixture in fixtures(args.folder):
        for row in score_fixture(fixture, rules):
            rows.append(row)
            sys.stdout.write(line(row) + "\n")
            if args.detail:
                words = ", ".join(f"{k} {s:.2f}" for k, s in row.charged_s.items() if s > 0.005)
                sys.stdout.write(f"    {words}\n")
        for root in score_roots_of(fixture, rules):
            roots.append(root)
            if args.detail:
                sys.stdout.write(f"    {root}\n")
    tuned = looked_at(args.folder)
    told, missed = summary(rows, tuned), misses([*rows, *roots])
    sys.stdout.write(roots_page(roots, tuned))
    for name, figures in told.items():
        words = ", ".join(
            f"{key} {'-' if value is None else format(value, '.4g')}"
            for key, value in figures.items()
        )
        sys.stdout.write(f"{name}: {words}\n")
    for name, figure in missed.items():
        sys.stdout.write(f"missed: {name} {figure:.4f}\n")
    if args.write:
        short = {name: round(figure, 4) for name, figure in missed.items()}
        text = json.dumps(short, indent=1) + "\n"
        (args.folder / "missed.json").write_text(text, encoding="utf-8")
        PAGE.write_text(page(rows, roots, tuned), encoding="utf-8")
    if args.json:
        full = {
            "summary": told,
            "stretches": [asdict(row) for row in rows],
            "roots": [asdict(row) for row in roots],
        }
        args.json.write_text(json.dumps(full, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
