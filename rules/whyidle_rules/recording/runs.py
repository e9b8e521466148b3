"""Which GPU was which rank of which job, and when: a job may be started anew, or shared out anew.

Ranks are a job's where they are of the same size and nothing says that they differ: the meeting
place that their probes saw, or the job that their launcher named. What cannot be told apart, or is
not all there, makes no job, with the reason.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.known import Known
from whyidle_rules.recording.series import Array
from whyidle_rules.recording.windows import Gpu

# A pod has a name of its own on each node: two of them may be one job.
_POD_UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")

Who = tuple[str, str, int, int]  # node, boot id, pid, start


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A GPU as one rank of a job in the windows `own`.

    `label` names the job where something does; `identities` are the processes that were that rank,
    `parents` (node, boot id, pid) those that started them.
    """

    gpu: int
    rank: int
    world: int
    label: str | None
    own: slice
    identities: frozenset[Who]
    parents: frozenset[tuple[str, str, int]] = frozenset()


def mode(values: Array) -> int | None:
    """Return the most frequent whole number, None where there is none that is not negative."""
    # What does not fit the column is no rank; false for NaN.
    known = values[np.abs(values) < 1 << 31].astype(np.int64)
    if len(known) == 0 or known.min() < 0:
        return None
    if known.min() == known.max():
        return int(known[0])
    each, count = np.unique(known, return_counts=True)
    return int(each[count.argmax()])


def runs(number: int, gpu: Gpu, known: Known, columns: Columns) -> list[Run]:
    """Return what ranks a GPU was, in order; windows between two of them are the earlier one's."""
    size = len(gpu.t0)
    pieces: list[tuple[int, str | None, frozenset[Who]]] = []
    parents: dict[Who, int] = {}
    for part, proc in known.stints(gpu):
        told = known.told.get(proc.identity)
        key = told.info.get("world_key") if told else None
        job = proc.info.get("job")
        label = f"key {int(key)}" if key is not None else None
        if label is None and job and not _POD_UID.fullmatch(str(job)):
            label = f"job {job}"
        who = (*gpu.machine, *proc.identity)
        if proc.parent_pid is not None:
            parents[who] = proc.parent_pid
        pieces.append((part.start, label, frozenset([who])))
    if not pieces:
        pieces = [(0, None, frozenset())]
    edges = [0, *(start for start, _, _ in pieces[1:]), size]
    found: list[Run] = []
    for place, (_, label, those) in enumerate(pieces):
        own = slice(edges[place], edges[place + 1])
        seen = any(
            name in columns and not np.isnan(columns[name][own]).all()
            for name in ("comm_s", "host_coll_s")
        )
        rank, world = (
            mode(columns[name][own]) if name in columns else None for name in ("rank", "world_size")
        )
        if not seen or rank is None or world is None or world <= 1:
            continue
        run = Run(
            gpu=number,
            rank=rank,
            world=world,
            label=label,
            own=own,
            identities=those,
            parents=frozenset((*gpu.machine, parents[one]) for one in those if one in parents),
        )
        if found and _same(found[-1], run):
            run = _joined(found.pop(), run)
        found.append(run)
    return found


def _same(before: Run, after: Run) -> bool:
    """Say whether two stretches are of the same rank of the same job, as after a restart."""
    names = (before.rank, before.world, before.label) == (after.rank, after.world, after.label)
    return names and before.own.stop == after.own.start


def _joined(before: Run, after: Run) -> Run:
    return Run(
        gpu=before.gpu,
        rank=before.rank,
        world=before.world,
        label=before.label,
        own=slice(before.own.start, after.own.stop),
        identities=before.identities | after.identities,
        parents=before.parents | after.parents,
    )


def group(found: Sequence[Run], gpus: Sequence[Gpu]) -> tuple[list[list[Run]], list[str]]:
    """Return the ranks of each job that is all there, in order, and why others are none."""
    labelled: dict[tuple[int, str | None], list[Run]] = defaultdict(list)
    for run in found:
        labelled[run.world, run.label].append(run)
    jobs: list[list[Run]] = []
    clashes: list[str] = []
    for world in dict.fromkeys(run.world for run in found):
        parts = {label: own for (size, label), own in labelled.items() if size == world}
        # Who does not say whose it is belongs to the only job that there is.
        if len(parts) == 2 and None in parts:
            parts = {
                next(label for label in parts if label): [r for p in parts.values() for r in p]
            }
        for own in parts.values():
            whole, why = _jobs_of(own, world, gpus)
            jobs += whole
            if why is not None:
                clashes.append(why)
    return jobs, list(dict.fromkeys(clashes))


def _jobs_of(
    own: Sequence[Run], world: int, gpus: Sequence[Gpu]
) -> tuple[list[list[Run]], str | None]:
    ordered = sorted(own, key=lambda run: (run.rank, run.gpu))
    ranks = [run.rank for run in ordered]
    if len(set(ranks)) == len(ranks):
        if len(ranks) == world:
            return [ordered], None
        return [], missing(world, ranks)
    for parted in (_by_machine(ordered, gpus), _by_launcher(ordered), _by_attempt(ordered)):
        if parted and all(
            sorted(run.rank for run in members) == list(range(world)) for members in parted
        ):
            return parted, None
    return [], f"several GPUs say that they are the same rank of {world}"


def _by_machine(own: Sequence[Run], gpus: Sequence[Gpu]) -> list[list[Run]]:
    """Return the ranks of each machine: each may run a job of its own."""
    parted: Mapping[tuple[str, str], list[Run]] = defaultdict(list)
    for run in own:
        parted[gpus[run.gpu].machine].append(run)
    return list(parted.values())


def _by_launcher(own: Sequence[Run]) -> list[list[Run]]:
    """Return the ranks that one process started, as torchrun does, where all have one such."""
    parted: Mapping[frozenset[tuple[str, str, int]], list[Run]] = defaultdict(list)
    for run in own:
        if len(run.parents) != 1:
            return []
        parted[run.parents].append(run)
    return list(parted.values())


def _by_attempt(own: Sequence[Run]) -> list[list[Run]]:
    """Return the first ranks of all GPUs, then the second ones: a restart gives them anew."""
    by_gpu: dict[int, list[Run]] = defaultdict(list)
    for run in own:
        by_gpu[run.gpu].append(run)
    counts = {len(each) for each in by_gpu.values()}
    if len(counts) != 1:
        return []
    for each in by_gpu.values():
        each.sort(key=lambda run: run.own.start)
    (count,) = counts
    return [
        sorted((each[place] for each in by_gpu.values()), key=lambda run: run.rank)
        for place in range(count)
    ]


def missing(world: int, ranks: Sequence[int]) -> str:
    """Return which ranks of a job are not there, in words."""
    absent = sorted(set(range(world)) - set(ranks))
    spans: list[list[int]] = []
    for rank in absent:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    told = [f"{a}-{b}" if b > a else f"{a}" for a, b in spans[:8]]
    more = ", ..." if len(spans) > 8 else ""
    word = "ranks" if len(absent) != 1 else "rank"
    verb = "are" if len(absent) != 1 else "is"
    return f"{word} {', '.join(told)}{more} of {world} {verb} not in these recordings"
