"""What a recorded run is to be charged with: the GPU's own timeline against the counterfactual.

The counterfactual is the same job without the injection, run just before. What its GPU idles at a
step is the job's own; what the recorded run idles beyond that is the stall.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stalls.scenario import Scenario
from vgpu.device.truth import Truth

Spans = npt.NDArray[np.int64]  # shape (n, 2): begin, end, in order, not overlapping
# The first steps pay for caches that are cold and workers that start.
WARM_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A rank that ran: its GPU's account and the trainer's own stopwatches."""

    truth: Truth
    marks: dict[str, Any]
    rank: int
    ranks: int

    @property
    def training(self) -> tuple[int, int]:
        """From the first launch of a warm step to the end of the last kernel, ns."""
        launches = self.marks["launches"]
        if len(launches) <= 2 * WARM_STEPS:
            raise RuntimeError(f"only {len(launches)} steps in all: too few for a truth")
        return int(launches[WARM_STEPS]), int(self.truth.computing(self.rank)[:, 1].max())

    def steps(self, begin_ns: int, end_ns: int) -> int:
        """Steps that began inside."""
        launches = np.array(self.marks["launches"])
        return int(((launches >= begin_ns) & (launches < end_ns)).sum())

    @property
    def begin_ns(self) -> int:
        """When it began to use its GPU."""
        return min(who.begin_ns for who in self.truth.processes if who.gpu == self.rank)

    @property
    def injected(self) -> bool:
        """Whether the stall is injected into this rank: of several, it is the last one."""
        return self.rank == self.ranks - 1

    def idle(self, begin_ns: int, end_ns: int) -> Spans:
        """When the GPU ran no kernel that computes."""
        return idle_spans(self.truth.computing(self.rank), begin_ns, end_ns)

    def idle_in_phases(self, begin_ns: int, end_ns: int) -> dict[str, float]:
        """Idle seconds by what the main thread was at, by its own stopwatch; "" for the rest."""
        idle = self.idle(begin_ns, end_ns)
        phases: dict[str, list[tuple[int, int]]] = {}
        for name, begin, end in self.marks["phases"]:
            phases.setdefault(name, []).append((begin, end))
        inside = {name: overlap_s(idle, spans) for name, spans in phases.items()}
        return {**inside, "": length_s(idle) - sum(inside.values())}


def idle_spans(busy: Spans, begin_ns: int, end_ns: int) -> Spans:
    """What of a stretch no span covers; `busy` in the order of its beginnings."""
    idle, at = [], begin_ns
    for begin, end in busy.tolist():
        if begin >= end_ns:
            break
        if begin > at:
            idle.append((at, begin))
        at = max(at, end)
    if at < end_ns:
        idle.append((at, end_ns))
    return np.array(idle, dtype=np.int64).reshape(-1, 2)


def length_s(spans: Spans) -> float:
    """Seconds in all."""
    return float((spans[:, 1] - spans[:, 0]).sum()) / 1e9


def overlap_s(spans: Spans, others: Iterable[tuple[int, int]]) -> float:
    """Seconds that are in both; `others` do not overlap each other."""
    if not len(spans):
        return 0.0
    total = 0
    for begin, end in others:
        clipped = np.minimum(spans[:, 1], end) - np.maximum(spans[:, 0], begin)
        total += int(clipped[clipped > 0].sum())
    return total / 1e9


def windows(scenario: Scenario, run: Run, half_ns: int | None) -> dict[str, tuple[int, int]]:
    """The stretches that are scored, by name: their edges in ns."""
    begin_ns, end_ns = run.training
    if scenario.window == "before":
        return {"before": (run.begin_ns, int(run.marks["launches"][0]))}
    if scenario.window == "halves":
        assert half_ns is not None
        # What lies in queues still feeds some steps: a second between them belongs to neither.
        return {"calm": (begin_ns, half_ns), "stalled": (half_ns + 1_000_000_000, end_ns)}
    return {"training": (begin_ns, end_ns)}


def account(
    scenario: Scenario, run: Run, name: str, edges: tuple[int, int], own_s: float
) -> dict[str, Any]:
    """One stretch: seconds of wall, idle and stall, and the causes that the stall is due to.

    `own_s`: what the counterfactual idles at a step.
    """
    begin_ns, end_ns = edges
    steps = run.steps(begin_ns, end_ns)
    idle_s = length_s(run.idle(begin_ns, end_ns))
    host_s = run.idle_in_phases(begin_ns, end_ns)
    causes: dict[str, float] = {}
    if scenario.by_phases:
        other = scenario.by_phases[""]
        for phase, seconds in host_s.items():
            cause = scenario.by_phases.get(phase, other)
            causes[cause] = causes.get(cause, 0.0) + seconds
    elif scenario.by_waiting is not None:
        causes = {scenario.by_waiting: _split(run, begin_ns, end_ns)["waiting"]}
    elif scenario.baseline is not None and name != "calm":
        stall_s = max(0.0, idle_s - steps * own_s)
        causes = {cause: stall_s * share for cause, share in _shares(scenario, run).items()}
    return {
        "name": name,
        "begin_ns": begin_ns,
        "end_ns": end_ns,
        "wall_s": (end_ns - begin_ns) / 1e9,
        "steps": steps,
        "idle_s": idle_s,
        "stall_s": sum(causes.values()),
        "causes": causes,
        "host_s": host_s,
        "split_s": _split(run, begin_ns, end_ns),
    }


def _split(run: Run, begin_ns: int, end_ns: int) -> dict[str, float]:
    """The GPU's own parts: what only its timeline knows."""
    parts = run.truth.split(gpu=run.rank, begin_ns=begin_ns, end_ns=end_ns)
    return {
        "working": parts.working_ns / 1e9,
        "transferring": parts.transferring_ns / 1e9,
        "waiting": parts.waiting_ns / 1e9,
        "copying": parts.copying_ns / 1e9,
        "nothing": parts.nothing_ns / 1e9,
    }


def _shares(scenario: Scenario, run: Run) -> dict[str, float]:
    """Of a mixture by what the workers' stopwatches say, if so asked."""
    if not run.injected:
        return dict(scenario.victims)
    if not scenario.by_workers:
        return dict(scenario.causes)
    read_s, decode_s = (run.marks["workers"][name] for name in ("read_s", "decode_s"))
    both = read_s + decode_s
    return {"storage": read_s / both, "cpu_preprocessing": decode_s / both}


def load_run(folder: Path, rank: int, ranks: int) -> Run:
    """What a node and a trainer left in a folder."""
    marks = json.loads((folder / f"marks-{rank}.json").read_text(encoding="utf-8"))
    return Run(truth=Truth.load(folder / "truth"), marks=marks, rank=rank, ranks=ranks)
