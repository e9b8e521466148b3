"""The evidence of one GPU: every column of the view, window by window.

Empty time is given out once. First to what the launching thread told or what is certain of its
process; where that is longer than the GPU was empty, each has its share. What is left is told by
what the thread did meanwhile: it ran, was ready without a CPU, was blocked in I/O, or slept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from whyidle_rules.intervals import Ints
from whyidle_rules.recording import lifecycle, loading, phases, spin, writing
from whyidle_rules.recording.columns import Columns, Table
from whyidle_rules.recording.exposure import exposed
from whyidle_rules.recording.known import Known
from whyidle_rules.recording.layout import layout
from whyidle_rules.recording.phases import Told
from whyidle_rules.recording.processes import Proc
from whyidle_rules.recording.series import Floats, Truths
from whyidle_rules.recording.threads import HALF_NS, Shares, shares
from whyidle_rules.recording.windows import Gpu


def outline(gpu: Gpu, known: Known, fill: float | None) -> Table:
    """Return what is told of a GPU's windows without the readings of its processes.

    `fill` is the share of SMs that computing holds at its best (spin.fills).
    """
    table = Table(len(gpu.t0))
    every = slice(0, len(gpu.t0))
    length = gpu.length / 1e9
    empty = length * (1.0 - gpu.busy)
    table.put("t0_ns", every, gpu.t0)
    table.put("t1_ns", every, gpu.t1)
    table.put("d_s", every, length)
    table.put("empty_s", every, empty)
    _spinning(table, gpu, known, fill)
    table.put("gap_s", every, lifecycle.gaps(gpu))
    table.put("node", every, gpu.node)
    table.put("uuid", every, gpu.uuid)
    if gpu.index is not None:
        table.put("gpu", every, float(gpu.index))
    if gpu.uuid in known.ranks:
        own = known.ranks[gpu.uuid]
        table.put("rank", every, np.nan if own.rank is None else float(own.rank))
        world = own.world_size
        table.put("world_size", every, np.nan if world is None else float(world))
    for name, values in lifecycle.columns(gpu, known, empty).items():
        table.put(name, every, values)
    for rows, proc in known.stints(gpu):
        told = known.told.get(proc.identity)
        _identity(table, gpu, rows, proc, told)
        if told is not None and told.peers_known:
            _peers(table, gpu, rows, told)
    return table


def _peers(table: Table, gpu: Gpu, rows: slice, told: Told) -> None:
    """Fill in how long the launching thread waited for other ranks, at most as it was empty.

    What else it did in a window may take its share later.
    """
    t0, t1 = gpu.t0[rows], gpu.t1[rows]
    left = table.columns["empty_s"][rows]
    for name in ("startup_s", "shutdown_s"):
        left = left - np.nan_to_num(table.columns[name][rows])
    for name, waited in told.inside(t0, t1, phases.PEERS).items():
        seconds = np.clip(waited / 1e9, 0.0, np.maximum(left, 0.0))
        table.put(name, rows, np.where(told.covers(t0, t1), seconds, np.nan))


def gpu_evidence(gpu: Gpu, known: Known, fill: float | None) -> Columns:
    """Return the columns of a GPU's windows; NaN and None are unknown.

    `known` holds the readings of its processes.
    """
    table = outline(gpu, known, fill)
    for rows, proc in known.stints(gpu):
        _of_process(table, gpu, known, proc, rows)
    _collectives(table, gpu, known)
    return table.columns


def _spinning(table: Table, gpu: Gpu, known: Known, fill: float | None) -> None:
    every = slice(0, len(gpu.t0))
    length = gpu.length / 1e9
    least, most = spin.spinning(gpu.busy, gpu.sm, fill)
    if known.job_of(gpu) < 0:
        least, most = np.zeros(len(least)), np.zeros(len(most))
    table.put("spinning_s", every, length * least)
    table.put("working_s", every, length * (gpu.busy - least))
    if not np.isnan(gpu.sm).all():
        table.put("underfilled_s", every, length * (most - least))
        table.put("comm_s", every, length * least)


def _collectives(table: Table, gpu: Gpu, known: Known) -> None:
    """Make communication collectives where a page, or a trace, would tell of a pipeline."""
    every = slice(0, len(gpu.t0))
    comm = table.columns["comm_s"][every]
    traced = gpu.uuid in known.ranks and known.ranks[gpu.uuid].communicates
    told = (table.columns["probed"][every] > 0) | traced
    table.put("coll_s", every, np.where(told, comm, 0.0 * comm))
    table.put("comm_s", every, np.where(told, 0.0 * comm, comm))


def _of_process(table: Table, gpu: Gpu, known: Known, proc: Proc, rows: slice) -> None:
    """Fill in what the launching process of some windows and its loader did."""
    t0, t1 = gpu.t0[rows], gpu.t1[rows]
    centres = (t0 + t1) // 2
    told = known.told.get(proc.identity)
    main = shares([proc], centres, gpu.emptiness)
    loader = loading.loader_of(known, proc, told, centres, gpu.emptiness)
    if told is not None:
        inside = told.inside(t0, t1)
        covered = told.covers(t0, t1)
        self_loading = told.workers == 0
    else:
        inside = {name: np.zeros(len(t0)) for name in phases.COLUMNS}
        covered = np.zeros(len(t0), dtype=bool)
        self_loading = False
    inferred = loading.inferred_wait(gpu, rows, main, loader) * 1e9
    inside[phases.WAIT] = np.where(loader.own | (told is None), inferred, inside[phases.WAIT])
    if self_loading:
        wait = inside[phases.WAIT] / np.maximum(t1 - t0, 1)
        alone = not known.job_of(gpu) >= 0  # else it receives from other ranks
        network = loading.network_share(main, known, [proc] if alone else [], centres)
        loading.own_loading(table, rows, main, network, wait)
        sources: Sequence[Proc] = [proc]
    else:
        loading.workers(table, rows, main, loader, told)
        sources = known.node.workers(proc) or [proc]
    if told is not None:
        table.put("data_ready_ratio", rows, told.ready(centres))
    loading.reads(table, known, sources, rows, centres)
    loading.cpus(table, known, sources, rows, centres)
    certain = dict(inside)
    # Before the first kernel a wait for data is one, and after the last a checkpoint; everything
    # else is start-up, or the end: ranks that meet are starting, all of them.
    busy_with = sum(
        v for k, v in inside.items() if k not in ("startup_s", "evaluation_s", *phases.PEERS)
    )
    going = 1.0 - _stopped_share(main)
    for name in phases.PEERS:
        certain[name] = certain[name] * going
    for name in ("startup_s", "shutdown_s"):
        own = np.nan_to_num(table.columns[name][rows]) * 1e9
        for peers in phases.PEERS:
            certain[peers] = np.maximum(0.0, certain[peers] - own)
        if told is not None:
            own = np.maximum(0.0, own - busy_with)
        certain[name] = certain.get(name, 0.0) + own
    _share_out(table, gpu, rows, certain, covered, loader.own, told is not None)
    if told is None or not told.peers_known:
        for name in phases.PEERS:
            table.put(name, rows, np.nan)
    # Who publishes a page and was not read may have waited: what is left is nobody's.
    certain_rest = covered if told is not None else ~covered
    maybe = _maybe_data(proc, main, loader.own)
    _rest(table, gpu, proc, rows, main, certain_rest, maybe)
    if told is None:
        _start(table, proc, rows, centres)


def _start(table: Table, proc: Proc, rows: slice, centres: Ints) -> None:
    """Take from a process's start-up what it was blocked in bulk reads for."""
    starts = table.columns["startup_s"][rows]
    reading = 0.0 * starts
    if (starts > 0).any():
        reading = starts * np.where(starts > 0, lifecycle.blocked_reading(proc, centres), 0.0)
    table.put("startup_read_s", rows, reading)
    table.put("startup_s", rows, starts - np.nan_to_num(reading))


def _identity(table: Table, gpu: Gpu, rows: slice, proc: Proc, told: Told | None) -> None:
    info = {**proc.info, **{k: v for k, v in (told.info if told else {}).items() if v is not None}}
    rank, world = info.get("rank"), info.get("world_size")
    kinds = (info.get("thread_kinds") or "").split(",")
    if world is None and not {"nccl", "gloo"} & set(kinds):
        world = 1  # no launcher, no process group, none of its threads
    # A run may have said so already (run_info), where a process does not.
    for name, value in (("rank", rank), ("world_size", world)):
        if value is not None and (name == "rank" or np.isnan(table.columns[name][rows]).all()):
            table.put(name, rows, float(value))
    table.put("probed", rows, float(told is not None))
    if told is not None:
        table.put("loaders", rows, float(told.loaders))
        table.put("steps", rows, told.stepped.between(gpu.t0[rows], gpu.t1[rows]))
        for name in ("pipeline_stage", "pipeline_stages", "pipeline_batches", "pipeline_virtual"):
            value = told.info.get(name)
            table.put(name, rows, np.nan if value is None else float(value))
        table.put("pipeline_schedule", rows, told.info.get("pipeline_schedule"))
    own = table.columns
    if np.isnan(own["pipeline_stages"][rows]).all():
        world = own["world_size"][rows]
        size = int(world[0]) if len(world) and world[0] > 0 else None
        found = layout(info.get("parallel_options"), None if rank is None else int(rank), size)
        if found is not None:
            table.put("pipeline_stage", rows, float(found.stage))
            table.put("pipeline_stages", rows, float(found.stages))
            table.put("pipeline_batches", rows, float(found.batches))
            table.put("pipeline_virtual", rows, float(found.virtual))
            table.put("pipeline_schedule", rows, "interleaved" if found.virtual > 1 else "1f1b")


def _share_out(
    table: Table,
    gpu: Gpu,
    rows: slice,
    certain: Mapping[str, Floats],
    covered: Truths,
    inferred: Truths,
    probed: bool,
) -> None:
    """Give the empty time of each window to what the launching thread is known to have done.

    `inferred`: where its wait for data was told from the empty time itself.
    """
    length = gpu.length[rows] / 1e9
    empty = length * (1.0 - gpu.busy[rows])
    if probed:
        others = [values for name, values in certain.items() if name != phases.WAIT]
        left = empty - np.add.reduce([np.nan_to_num(values) for values in others]) / 1e9
        wait = exposed(certain[phases.WAIT] / 1e9, np.maximum(left, 0.0), length, gpu.t0[rows])
        wait = np.where(
            inferred, np.minimum(certain[phases.WAIT] / 1e9, np.maximum(left, 0.0)), wait
        )
        certain = {**certain, phases.WAIT: wait * 1e9}
    # A wait that is not known takes nothing from what is.
    total = np.add.reduce([np.nan_to_num(values) for values in certain.values()]) / 1e9
    scale = np.minimum(1.0, empty / np.maximum(total, 1e-12))
    for name, values in certain.items():
        seconds = values / 1e9 * scale
        if name in ("startup_s", "shutdown_s"):
            table.put(name, rows, seconds)
        elif probed:
            table.put(name, rows, np.where(covered, seconds, np.nan))
        elif name == phases.WAIT:
            # Without workers nothing tells of a wait: unknown, not none.
            workers = table.columns["loader_workers"][rows]
            table.put(name, rows, np.where(workers > 0, seconds, np.nan))


def _rest(
    table: Table,
    gpu: Gpu,
    proc: Proc,
    rows: slice,
    main: Shares,
    certain: Truths,
    maybe_data: Floats,
) -> None:
    """Give out what is left of the empty time by what the launching thread did meanwhile.

    While the GPU is busy the thread may sleep, as it waits for the GPU; so what ran or was blocked
    is taken to have done so while the GPU was empty, and only the rest has slept; more of it ran if
    readings found it running then. Waiting for a CPU may come at any time, and would be charged to
    others: it counts as much as its share.
    """
    length = gpu.length[rows] / 1e9
    empty = length * (1.0 - gpu.busy[rows])
    left = empty
    for name in (*phases.COLUMNS, "no_process_s", "shutdown_s"):
        left = left - np.nan_to_num(table.columns[name][rows])
    left = np.maximum(left, 0.0)
    ready = left * np.minimum(1.0, main.ready * length / np.maximum(length - (empty - left), 1e-9))
    awake = main.run + main.io
    used = np.minimum(left - ready, length * awake)
    per = np.where(awake > 0, used / np.where(awake > 0, awake, 1.0), 0.0)
    found = left * np.nan_to_num(np.minimum(main.run_when_empty, _most_run(gpu, rows, main)))
    more = np.clip(found - per * main.run, 0.0, left - ready - used)
    saves = writing.in_bulk(gpu, proc, rows, main)
    unknown = np.isnan(awake + ready) | ~certain
    if not (table.columns["probed"][rows] > 0).any():
        # Without a page a checkpoint shows in what is written alone.
        unknown |= np.isnan(saves)
    parts = {
        "main_run_s": per * main.run + more,
        "main_ready_s": ready,
        "main_blocked_s": per * main.io,
        "main_asleep_s": left - ready - used - more,
    }
    parts["main_stopped_s"] = parts["main_asleep_s"] * _stopped_share(main)
    parts["main_asleep_s"] = parts["main_asleep_s"] - parts["main_stopped_s"]
    parts["main_maybe_data_s"] = parts["main_asleep_s"] * maybe_data
    # Who writes in bulk and sleeps meanwhile waits for what it writes.
    bulk = parts["main_run_s"] + parts["main_blocked_s"] + parts["main_asleep_s"]
    parts["writing_s"] = np.where(saves > 0, bulk, 0.0)
    for name in ("main_run_s", "main_blocked_s", "main_asleep_s", "main_maybe_data_s"):
        parts[name] = np.where(saves > 0, 0.0, parts[name])
    # Where kernels ran too, only what it was blocked for is sure to have been a write.
    partly = (saves <= 0) & writing.alone(proc, (gpu.t0[rows] + gpu.t1[rows]) // 2)
    parts["writing_s"] = np.where(partly, parts["main_blocked_s"], parts["writing_s"])
    parts["main_blocked_s"] = np.where(partly, 0.0, parts["main_blocked_s"])
    for name, values in parts.items():
        table.put(name, rows, np.where(unknown, np.nan, values))


def _stopped_share(main: Shares) -> Floats:
    """Return which share of the time off the CPU and not in I/O a thread was stopped."""
    still = np.nan_to_num(main.stopped)
    return np.asarray(np.clip(still / np.maximum(np.nan_to_num(main.asleep) + still, 1e-9), 0, 1))


def _most_run(gpu: Gpu, rows: slice, main: Shares) -> Floats:
    """Return which share of the empty time a thread can have run for, by all the time it ran."""
    centres = (gpu.t0 + gpu.t1) // 2
    total = np.concatenate(([0.0], np.cumsum(1.0 - gpu.busy)))
    low = np.searchsorted(centres, centres[rows] - HALF_NS)
    high = np.searchsorted(centres, centres[rows] + HALF_NS, side="right")
    empty = (total[high] - total[low]) / np.maximum(high - low, 1)
    return np.asarray(np.minimum(1.0, main.run / np.maximum(empty, 1e-9)))


def _maybe_data(proc: Proc, main: Shares, own: Truths) -> Floats:
    """Return which share of its sleep a thread may have waited for its DataLoader; NaN if unknown.

    It polls the pipe that workers write to or, where a thread pins batches or threads of its own
    load them, waits for those.
    """
    kinds = proc.info.get("thread_kinds")
    pins = own | (kinds is None or "data_pin" in kinds.split(","))
    where = main.in_poll + np.where(pins, main.in_lock, 0.0)
    return np.asarray(np.clip(where / np.maximum(main.asleep, 1e-9), 0.0, 1.0))
