"""Who waited for whom, and why, in a recorded run: from the virtual GPU's timeline alone.

A collective's kernel polls from its own arrival until the last member's: the last one is who is
waited for, however often that changes, and only seconds in which the waiting GPU computes nothing
count. Sends and receives have no last one: in a pipeline the injected stage is who all waiting
beyond the counterfactual's is due to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from stalls.scenario import Scenario
from stalls.truth import Own, Run, idle_spans, overlap_s
from vgpu.device.kinds import COLLECTIVES, WHATS

Matrix = dict[tuple[int, int], float]  # (waiting GPU, GPU waited for): seconds
_COMMON = [WHATS.index(name) for name in COLLECTIVES if name not in ("send", "recv")]


def waits(run: Run, edges: tuple[int, int]) -> Matrix:
    """Seconds that each GPU of a job waited in collectives for each other one."""
    begin_ns, end_ns = edges
    rows = run.truth.rows
    rows = rows[np.isin(rows["what"], _COMMON) & np.isin(rows["gpu"], run.gpus)]
    rows = rows[(rows["end_ns"] > begin_ns) & (rows["begin_ns"] < end_ns)]
    spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    keys = np.stack([rows["group"], rows["sequence"]], axis=1).astype(np.int64)
    _, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.ravel()
    order = np.argsort(which, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
        if not len(members):
            continue
        met = rows[members]
        late = _late(met, run.gpus)
        for row in met:
            gpu = int(row["gpu"])
            until = int(row["ready_ns"]) if row["ready_ns"] >= 0 else int(row["end_ns"])
            if gpu != late and until > row["begin_ns"]:
                spans[gpu, late].append((int(row["begin_ns"]), until))
    found: Matrix = {}
    for (gpu, late), polled in spans.items():
        idle = idle_spans(run.truth.computing(gpu), begin_ns, end_ns)
        found[gpu, late] = overlap_s(idle, polled)
    return found


def _late(met: Any, gpus: Sequence[int]) -> int:
    """The member that came last, or the first of those that never came."""
    missing = [gpu for gpu in gpus if gpu not in met["gpu"]]
    return missing[0] if missing else int(met["gpu"][met["begin_ns"].argmax()])


def roots(
    scenario: Scenario, runs: Sequence[Run], owns: Sequence[Own], edges: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """What the waiting of all ranks is due to; `edges`: of the stretch that each one is scored in.

    `waits`: seconds by waiting GPU and GPU waited for. `due`: of each GPU waited for, the seconds
    that are the injection's, for each of the causes that are right for those: any of them.
    """
    matrix: Matrix = {}
    own_s = 0.0
    for gpu, run in enumerate(runs):
        if gpu != run.gpus[0]:
            continue
        common = min(edges[one][0] for one in run.gpus), max(edges[one][1] for one in run.gpus)
        matrix |= waits(run, common)
    first = [gpu for gpu, run in enumerate(runs) if not run.aside]
    (late,) = {run.late for run in runs if not run.aside}
    assert late is not None
    for gpu in first:
        own_s += owns[gpu].waiting_s * runs[gpu].steps(*edges[gpu])
        if scenario.setup.style == "pipeline" and gpu != late and scenario.root:
            run = runs[gpu]
            parts = run.truth.split(gpu=gpu, begin_ns=edges[gpu][0], end_ns=edges[gpu][1])
            calm_s = owns[gpu].waiting_s * run.steps(*edges[gpu])
            matrix[gpu, late] = max(0.0, parts.waiting_ns / 1e9 - calm_s)
    due = {}
    for gpu in first if scenario.root_of_all else [late]:
        if scenario.root:
            waited_s = sum(s for (_, whom), s in matrix.items() if whom == gpu)
            natural_s = 0.0 if scenario.setup.style == "pipeline" else own_s
            due[gpu] = max(0.0, waited_s - natural_s)
    return {
        "jobs": [list(run.gpus) for gpu, run in enumerate(runs) if gpu == run.gpus[0]],
        "waits": [[gpu, whom, seconds] for (gpu, whom), seconds in sorted(matrix.items())],
        "due": [[gpu, seconds] for gpu, seconds in due.items()],
        "causes": list(scenario.root),
    }
