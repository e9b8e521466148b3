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
# The first steps pay for caches that are cold and workers that start: so many, or fewer long ones.
WARM_STEPS, WARM_NS = 5, 1_000_000_000
# Less polling than this share of a stretch is no stall: jitter.
LITTLE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A rank that ran: its GPU's account and the trainer's own stopwatches.

    `gpus`: those of its job, by rank; `late`: the one whose rank a stall is injected into, None in
    a job that none is injected into.
    """

    truth: Truth
    marks: dict[str, Any]
    gpu: int
    gpus: tuple[int, ...]
    late: int | None

    @property
    def training(self) -> tuple[int, int]:
        """From the first launch of a warm step to the end of the last kernel, ns."""
        launches = self.marks["launches"]
        early = sum(one < launches[0] + WARM_NS for one in launches)
        warm = min(WARM_STEPS, max(1, early))
        if len(launches) <= 2 * warm:
            raise RuntimeError(f"only {len(launches)} steps in all: too few for a truth")
        return int(launches[warm]), int(self.truth.computing(self.gpu)[:, 1].max())

    def steps(self, begin_ns: int, end_ns: int) -> int:
        """Steps that began inside."""
        launches = np.array(self.marks["launches"])
        return int(((launches >= begin_ns) & (launches < end_ns)).sum())

    @property
    def begin_ns(self) -> int:
        """When it began to use its GPU."""
        return min(who.begin_ns for who in self.truth.processes if who.gpu == self.gpu)

    @property
    def injected(self) -> bool:
        """Whether the stall is injected into this rank."""
        return self.gpu == self.late

    @property
    def aside(self) -> bool:
        """Whether it is of another job than the one with the stall."""
        return self.late is None

    @property
    def hung_ns(self) -> int:
        """When ranks that waited in vain for the injected one were ended."""
        waiting = [who for who in self.truth.processes if who.gpu in self.gpus]
        ends = [who.end_ns for who in waiting if who.gpu != self.late]
        return min(end or self.truth.horizon_ns for end in ends)

    def idle(self, begin_ns: int, end_ns: int) -> Spans:
        """When the GPU ran no kernel that computes."""
        return idle_spans(self.truth.computing(self.gpu), begin_ns, end_ns)

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
    if scenario.setup.of_rank(scenario.setup.late_one).hang_after_s:
        return {"training": (begin_ns, run.hung_ns)}
    return {"training": (begin_ns, end_ns)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What a rank of the counterfactual has of it by itself, seconds a step.

    `idle_s` in all, `empty_s` without any kernel, `waiting_s` for a rank of its job.
    """

    idle_s: float = 0.0
    empty_s: float = 0.0
    waiting_s: float = 0.0


def own(calm: Run, waited_s: float) -> Own:
    """What a rank of the counterfactual has; `waited_s`: in all, for others of its job."""
    edges = calm.training
    steps = calm.steps(*edges)
    split = _split(calm, *edges)
    return Own(
        idle_s=length_s(calm.idle(*edges)) / steps,
        empty_s=(split["nothing"] + split["copying"]) / steps,
        waiting_s=waited_s / steps,
    )


def account(
    scenario: Scenario, run: Run, name: str, edges: tuple[int, int], own: Own
) -> dict[str, Any]:
    """One stretch: seconds of wall, idle and stall, and the causes that the stall is due to."""
    begin_ns, end_ns = edges
    steps = run.steps(begin_ns, end_ns)
    idle_s = length_s(run.idle(begin_ns, end_ns))
    host_s = run.idle_in_phases(begin_ns, end_ns)
    split = _split(run, begin_ns, end_ns)
    causes: dict[str, float] = {}
    if run.aside:
        pass  # whatever happens to the job beside it, this one is well
    elif scenario.by_phases:
        other = scenario.by_phases[""]
        for phase, seconds in host_s.items():
            cause = scenario.by_phases.get(phase, other)
            causes[cause] = causes.get(cause, 0.0) + seconds
    elif felt := scenario.by_waiting or scenario.by_spinning:
        moved_s = split["transferring"] if scenario.by_spinning else 0.0
        spun_s = split["waiting"] + moved_s
        causes = {felt: spun_s} if spun_s > LITTLE * (end_ns - begin_ns) / 1e9 else {}
        if run.injected and scenario.causes:
            empty_s = max(0.0, split["nothing"] + split["copying"] - steps * own.empty_s)
            causes |= {cause: empty_s * share for cause, share in scenario.causes.items()}
    elif scenario.baseline is not None and name != "calm":
        stall_s = max(0.0, idle_s - steps * own.idle_s)
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
        "split_s": split,
    }


def _split(run: Run, begin_ns: int, end_ns: int) -> dict[str, float]:
    """The GPU's own parts: what only its timeline knows."""
    parts = run.truth.split(gpu=run.gpu, begin_ns=begin_ns, end_ns=end_ns)
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


def load_run(folder: Path, gpu: int, gpus: tuple[int, ...], late: int | None) -> Run:
    """What a node and a trainer left in a folder."""
    marks = json.loads((folder / f"marks-{gpu}.json").read_text(encoding="utf-8"))
    truth = Truth.load(folder / "truth")
    return Run(truth=truth, marks=marks, gpu=gpu, gpus=gpus, late=late)
