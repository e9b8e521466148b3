"""Compares what diagnose says of the recorded stalls with the truth.

Per stretch of each recording, with the probe's tables and without them: idle seconds, the share of
the stall that is charged to its cause, the share charged to a cause that it is not due to, the
share of the idle time that nobody is charged with. The job's own idle time, by the counterfactual,
may be charged to anybody; of controls and confusers everything that is named is wrong but what the
scenario allows, or the trainer's own stopwatches tell.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalls.bars import bars, limit
from stalls.root_score import RootScore, diagnosis, load_truth, score_roots
from whyidle.store import Recording
from whyidle_rules.recording.engine import evaluate
from whyidle_rules.rule import Rule

UNATTRIBUTED = "unattributed"
PROBE_TABLES = (
    *("probe", "probe_event", "probe_info", "probe_loader"),
    *("probe_call", "probe_group"),
)
# The engine's windows are 125 ms: at the edges of a stretch half of one is the other's.
EDGE_S = 0.13


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One stretch of one recording, seconds and shares.

    `right_share` and `wrong_share` are of the stall; NULL where there is none. `blamed_share`:
    what is named and not allowed, of wall; for controls and confusers `wrong_s` is the same in
    seconds. `points`: how far the worst cause of a mixture is off, as a share of the stall.
    """

    fixture: str
    kind: str
    strength: str
    window: str
    role: str
    probe: bool
    wall_s: float
    idle_s: float
    stall_s: float
    seen_idle_s: float
    most_idle_s: float
    right_share: float | None
    right_subcause_share: float | None
    wrong_s: float
    wrong_share: float | None
    wrong_of_idle_share: float
    blamed_share: float
    unattributed_share: float
    points: float | None
    charged_s: dict[str, float]
    foreign_cpu_s: float
    bars: tuple[str, ...]

    def name(self, bar: str) -> str:
        """What a bar of this stretch is called in lists."""
        return f"{self.fixture}:{self.window}:{'' if self.probe else 'no-'}probe:{bar}"

    def against(self, bar: str) -> tuple[float, bool]:
        """The figure that a bar is about, and whether it is met."""
        # What is booked is the least that spinning can be; the most of it is told beside the ledger
        # as underfilled, and the truth has to lie between the two.
        beyond_s = max(self.seen_idle_s - self.idle_s, self.idle_s - self.most_idle_s)
        figures = {
            "seen": max(0.0, beyond_s - EDGE_S) / self.wall_s,
            "right": self.right_share,
            "wrong": self.wrong_share,
            "blamed": self.blamed_share,
            "confused": self.wrong_of_idle_share,
            "mixture": self.points,
        }
        figure, most = figures[bar], limit(bar, probe=self.probe)
        if figure is None:
            raise ValueError(f"{self.kind}: {bar} is not known of {self.window}")
        return figure, figure >= most if bar == "right" else figure <= most


def score(
    truth: Mapping[str, Any],
    window: Mapping[str, Any],
    charged: Mapping[tuple[str, str], float],
    underfilled_s: float = 0.0,
    *,
    probe: bool,
) -> Score:
    """Seconds by (cause, subcause), unattributed among them, against the truth of a stretch.

    `underfilled_s` is what more may have been spinning, by diagnose's own word.
    """
    by_cause: dict[str, float] = {}
    for (cause, _), seconds in charged.items():
        by_cause[cause] = by_cause.get(cause, 0.0) + seconds
    nobody_s = by_cause.get(UNATTRIBUTED, 0.0)
    named = {cause: s for cause, s in by_cause.items() if cause != UNATTRIBUTED}
    told: Mapping[str, float] = window["causes"]
    control = truth["role"] == "control" or window["name"] == "calm"
    due = {} if control else told
    stall_s, idle_s = (0.0 if control else window["stall_s"]), window["idle_s"]
    beyond = {
        cause: max(0.0, seconds - told.get(cause, 0.0))
        for cause, seconds in named.items()
        if cause not in truth["allowed"]
    }
    # The job's own idle time may be charged to anybody, and edges are blurred.
    own_s = idle_s - stall_s if due else _own_s(truth, window)
    slack_s = own_s + EDGE_S if due or truth["baseline"] else 0.0
    wrong_s = max(0.0, sum(beyond.values()) - slack_s)
    right_s = sum(min(named.get(cause, 0.0), seconds) for cause, seconds in due.items())
    subcause = truth["subcause"]
    exact_s = sum(s for (cause, sub), s in charged.items() if cause in due and sub == subcause)
    seen_s = sum(by_cause.values())
    return Score(
        fixture=f"{truth['kind']}-{truth['strength']}" + ("" if truth["probe"] else "-no-probe"),
        kind=truth["kind"],
        strength=truth["strength"],
        window=stretch(window),
        role="control" if control else truth["role"],
        probe=probe,
        wall_s=window["wall_s"],
        idle_s=idle_s,
        stall_s=stall_s,
        seen_idle_s=seen_s,
        most_idle_s=seen_s + underfilled_s,
        right_share=right_s / stall_s if due else None,
        right_subcause_share=min(1.0, exact_s / stall_s) if due and subcause else None,
        wrong_s=wrong_s,
        wrong_share=wrong_s / stall_s if due else None,
        wrong_of_idle_share=wrong_s / seen_s if seen_s > 0 else 0.0,
        blamed_share=sum(beyond.values()) / window["wall_s"] if not due else 0.0,
        unattributed_share=nobody_s / seen_s if seen_s > 0 else 0.0,
        points=_points(named, due, stall_s) if truth["role"] == "mixture" and due else None,
        charged_s={"/".join(pair): s for pair, s in sorted(charged.items())},
        foreign_cpu_s=truth["foreign_cpu_s"],
        bars=bars(truth, window),
    )


def _own_s(truth: Mapping[str, Any], window: Mapping[str, Any]) -> float:
    """What the job idles by itself in so many steps, by the counterfactual; seconds."""
    if not truth["baseline"]:
        return 0.0
    calm = truth["baseline"][window["rank"]]
    own = float(window["steps"]) * float(calm["idle_s"]) / float(calm["steps"])
    return min(float(window["idle_s"]), own)


def stretch(window: Mapping[str, Any]) -> str:
    """A stretch's name: that of the window, and of the rank but for the first."""
    name, rank = str(window["name"]), int(window["rank"])
    return f"{name}-{rank}" if rank else name


def _points(named: Mapping[str, float], due: Mapping[str, float], stall_s: float) -> float:
    return max(abs(named.get(cause, 0.0) - seconds) / stall_s for cause, seconds in due.items())


def charge(
    folder: Path, rules: Sequence[Rule], stretches: Sequence[Mapping[str, Any]]
) -> list[tuple[dict[tuple[str, str], float], float]]:
    """Idle seconds by (cause, subcause) that diagnose finds, inside each stretch of a recording.

    With them, what more may have been idle as spinning. The whole recording is evaluated, as a user
    does. A window belongs to a stretch by its middle.
    """
    with Recording([folder]) as recording:
        if recording.damaged:
            raise RuntimeError(f"{folder}: damaged: {recording.damaged[0]}")
        evaluate(recording.con, rules)
        key = _key(recording)
        charged, underfilled = _CHARGED.format(key=key), _UNDERFILLED.format(key=key)
        found = []
        for stretch in stretches:
            place = [stretch[name] for name in ("rank", "begin_ns", "end_ns")]
            rows = recording.con.execute(charged, place).fetchall()
            (most,) = recording.con.execute(underfilled, place).fetchall()
            found.append(({(cause, sub): ns / 1e9 for cause, sub, ns in rows}, most[0]))
        return found


def _key(recording: Recording) -> str:
    """What tells GPUs apart: their number on the node; of several nodes, the rank."""
    row = recording.con.execute("SELECT count(DISTINCT node) FROM gpu_activity").fetchone()
    return "rank" if row and row[0] > 1 else "gpu"


_INSIDE = "{key} = $1 AND (t0_ns + t1_ns) // 2 >= $2 AND (t0_ns + t1_ns) // 2 < $3"
_UNDERFILLED = f"SELECT coalesce(sum(underfilled_s), 0) FROM evidence WHERE {_INSIDE}"
_CHARGED = f"""
    SELECT cause, subcause, sum(ns)::BIGINT FROM (
        SELECT window_id, cause, subcause, ns FROM grants
        UNION ALL SELECT window_id, '{UNATTRIBUTED}', subcause, ns FROM leftovers
    ) JOIN evidence USING (window_id)
    WHERE {{key}} = $1 AND (t0_ns + t1_ns) // 2 >= $2 AND (t0_ns + t1_ns) // 2 < $3
    GROUP BY ALL
"""


@contextmanager
def without_probe(recording: Path) -> Iterator[Path]:
    """The same recording without what the probe told: as if it had not been on."""
    with tempfile.TemporaryDirectory(prefix="no-probe-") as name:
        copy = Path(name) / "recording"
        shutil.copytree(recording, copy, ignore=shutil.ignore_patterns(*PROBE_TABLES))
        yield copy


def score_fixture(fixture: Path, rules: Sequence[Rule]) -> list[Score]:
    """All stretches of a fixture, with the probe (if it was on) and without."""
    truth = json.loads((fixture / "truth.json").read_text(encoding="utf-8"))
    recording = fixture / "recording"
    windows = truth["windows"]
    scores = []
    if truth["probe"]:
        for window, told in zip(windows, charge(recording, rules, windows), strict=True):
            scores.append(score(truth, window, *told, probe=True))
    with without_probe(recording) as copy:
        for window, told in zip(windows, charge(copy, rules, windows), strict=True):
            scores.append(score(truth, window, *told, probe=False))
    return scores


def fixtures(folder: Path) -> list[Path]:
    """All fixtures of a folder, by name."""
    return sorted(path.parent for path in folder.glob("*/truth.json"))


def score_roots_of(fixture: Path, rules: Sequence[Rule]) -> list[RootScore]:
    """Where the waiting of a fixture's ranks arose, with the probe (if it was on) and without."""
    truth = load_truth(fixture)
    if not truth.get("roots"):
        return []
    recording, scores = fixture / "recording", []
    if truth["probe"]:
        scores.append(score_roots(truth, diagnosis(recording, rules, truth), probe=True))
    with without_probe(recording) as copy:
        scores.append(score_roots(truth, diagnosis(copy, rules, truth), probe=False))
    return scores
