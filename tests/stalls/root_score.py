"""Compares where diagnose says that waiting arose with the truth: the rank, and its cause.

Of the seconds that ranks are said to have waited for another one, `rank_share` are charged to a
rank that was waited for so long in truth, and `cause_share` to the cause of that rank's lateness
as well. What is waiting by itself, as the counterfactual has it, may have any cause. `accused_s`
are seconds of waiting charged to ranks that nobody waited for so long.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalls.bars import root_bars, root_limit
from whyidle.store import Recording
from whyidle_rules.diagnosis import Diagnosis
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule import Rule

# What waiting for another rank is felt as.
FELT = ("late_rank", "hang", "late_upstream", "stage_imbalance")


@dataclass(frozen=True, slots=True, kw_only=True)
class RootScore:
    """The waiting of all ranks of a recording, seconds and shares.

    `waited_s`: in truth; `booked_s`: what diagnose says. Shares are of `booked_s`, None where
    nothing is booked or nothing is due to be.
    """

    fixture: str
    kind: str
    strength: str
    role: str
    probe: bool
    wall_s: float
    waited_s: float
    due_s: float
    booked_s: float
    rank_share: float | None
    cause_share: float | None
    wrong_cause_share: float | None
    accused_s: float
    charged_s: dict[str, float]
    bars: tuple[str, ...]

    def name(self, bar: str) -> str:
        """What a bar is called in lists."""
        return f"{self.fixture}:roots:{'' if self.probe else 'no-'}probe:{bar}"

    def against(self, bar: str) -> tuple[float, bool]:
        """The figure that a bar is about, and whether it is met."""
        if bar == "accused":
            figure = self.accused_s / self.wall_s
            return figure, figure <= root_limit(bar)
        share = self.rank_share if bar == "root_rank" else self.cause_share
        return share or 0.0, (share or 0.0) >= root_limit(bar)


def score_roots(truth: Mapping[str, Any], found: Diagnosis, *, probe: bool) -> RootScore:
    """A diagnosis of the stretch that is scored, against the truth."""
    roots = truth["roots"]
    place = {gpu: (job, rank) for job, gpus in enumerate(roots["jobs"]) for rank, gpu in _of(gpus)}
    waited: dict[tuple[int, int], float] = defaultdict(float)  # (job, rank) that was waited for
    for _, whom, seconds in roots["waits"]:
        waited[place[whom]] += seconds
    due = {place[gpu]: seconds for gpu, seconds in roots["due"]}
    booked = _booked(roots, place, found)
    booked_s = sum(booked.values())
    by_rank: dict[tuple[int, int], float] = defaultdict(float)
    for (job, rank, _), seconds in booked.items():
        by_rank[job, rank] += seconds
    right_s = sum(min(seconds, waited[who]) for who, seconds in by_rank.items())
    cause_s = wrong_s = 0.0
    for who, seconds in by_rank.items():
        mine = {cause: s for (job, rank, cause), s in booked.items() if (job, rank) == who}
        meant_s = sum(mine.get(cause, 0.0) for cause in roots["causes"])
        natural_s = max(0.0, waited[who] - due.get(who, 0.0))
        if who in due:
            ok_s = min(meant_s, waited[who])
            ok_s += min(seconds - meant_s, natural_s, waited[who] - ok_s)
        else:
            ok_s = min(seconds, natural_s)
        cause_s += ok_s
        wrong_s += max(0.0, seconds - mine.get("unattributed", 0.0) - ok_s)
    accused = (max(0.0, seconds - waited[who]) for who, seconds in by_rank.items() if who[1] >= 0)
    wall_s = sum(window["wall_s"] for window in truth["windows"])
    due_s = sum(due.values())
    any_due = bool(due) and booked_s > 0
    return RootScore(
        fixture=f"{truth['kind']}-{truth['strength']}" + ("" if truth["probe"] else "-no-probe"),
        kind=truth["kind"],
        strength=truth["strength"],
        role=truth["role"],
        probe=probe,
        wall_s=wall_s,
        waited_s=sum(waited.values()),
        due_s=due_s,
        booked_s=booked_s,
        rank_share=right_s / booked_s if any_due else None,
        cause_share=cause_s / booked_s if any_due else None,
        wrong_cause_share=wrong_s / booked_s if any_due else None,
        accused_s=sum(accused),
        charged_s={
            f"{job}:{rank}:{cause}": seconds for (job, rank, cause), seconds in booked.items()
        },
        bars=root_bars(due_s / wall_s, probe=probe),
    )


def _of(gpus: Sequence[int]) -> list[tuple[int, int]]:
    return list(enumerate(gpus))


def _booked(
    roots: Mapping[str, Any], place: Mapping[int, tuple[int, int]], found: Diagnosis
) -> dict[tuple[int, int, str], float]:
    """Seconds of waiting by job, rank and cause that they are charged to; rank -1 for nobody.

    The ledger names ranks, and so not whose: of several jobs the waiting of their GPUs tells.
    """
    causes: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in found.ledger:
        if row.subcause in FELT:
            rank = row.root.rank if row.root.where == "rank" and row.root.rank is not None else -1
            causes[rank][row.root.cause] += row.idle_s
    if len(roots["jobs"]) == 1:
        return {(0, rank, c): s for rank, told in causes.items() for c, s in told.items()}
    booked: dict[tuple[int, int, str], float] = defaultdict(float)
    for gpu in found.gpus:
        if gpu.gpu is None:
            continue
        job, _ = place[gpu.gpu]
        for word, seconds in gpu.waited_for.items():
            told = causes[int(word)]
            whole = sum(told.values()) or 1.0
            for cause, s in told.items():
                booked[job, int(word), cause] += seconds * s / whole
    return dict(booked)


def diagnosis(folder: Path, rules: Sequence[Rule], truth: Mapping[str, Any]) -> Diagnosis:
    """What diagnose says of the stretch that is scored."""
    begin_ns = min(window["begin_ns"] for window in truth["windows"])
    end_ns = max(window["end_ns"] for window in truth["windows"])
    with Recording([folder]) as recording:
        cut = {
            machine: (max(begin_ns, begin), min(end_ns, end))
            for machine, (begin, end) in spans(recording.con, None, None).items()
        }
        return diagnose(recording.con, [folder.name], rules, cut)


def load_truth(fixture: Path) -> dict[str, Any]:
    """The truth of a fixture."""
    told: dict[str, Any] = json.loads((fixture / "truth.json").read_text(encoding="utf-8"))
    return told
