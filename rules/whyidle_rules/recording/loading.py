"""What those did who load a trainer's data: its DataLoader's workers, or the trainer itself.

Whoever sleeps may wait for the network or have nothing to do, and the kernel's name for where it
sleeps tells only some of that apart: a worker polls for its next task, and for a socket with a
timeout too. So one that receives bytes is taken to poll for those, and one that is not known to
receive any, for nothing that is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.columns import Table
from whyidle_rules.recording.known import Known
from whyidle_rules.recording.phases import Told
from whyidle_rules.recording.processes import Proc
from whyidle_rules.recording.series import Columns, Floats, Truths
from whyidle_rules.recording.threads import (
    HALF_NS,
    Emptiness,
    Shares,
    computing,
    grown,
    shares,
    shares_of,
)
from whyidle_rules.recording.windows import Gpu

# Without a counter page: workers that are this busy have no finished batch to wait with; at the
# lower bound nothing is inferred, at the upper one all of the wait. A worker of a loader that keeps
# up sleeps for the rest of its time.
SATURATED_RATIOS = (0.7, 0.9)
# Workers that are fed by the network sleep as idle ones do. Only of a thread that polls for most of
# the time in which the GPU is empty, next to a GPU that is empty in nearly every window, it is
# inferred that it waits for them: requests of its own come now and then, and its steps fill the GPU
# between them.
POLLING_RATIOS = (0.5, 0.8)
STARVED_HALF_NS = 3 * NS_PER_S
FULL_RATIO = 0.98
FULL_SHARES = (0.1, 0.05)
# Without a DataLoader: threads of the trainer that are this busy may be what loads its data, if it
# reads more than it writes, and more than logs and code.
OWN_BUSY_RATIO = 0.25
OWN_READS_BYTES_PER_S = 64 << 10
# They are found so long after they began: looked for once a second, and twice to see that they run.
OWN_FOUND_NS = 3 * NS_PER_S
# Received by a process: more than what keeps connections alive, or asks for the time.
RECEIVES_BYTES_PER_S = 16 << 10


def _of_workers(
    workers: Sequence[Proc], known: Known, centres: Ints, emptiness: Emptiness
) -> tuple[Shares, Floats]:
    """Return what workers did, and which share of their time they waited for the network.

    A worker whose main thread waits for others of its threads computes when they do.
    """
    found = shares(workers, centres, emptiness, launches=False)
    others = np.maximum(0.0, computing(workers, centres) - found.run)
    helped = np.fmin(np.nan_to_num(found.in_lock), np.nan_to_num(others))
    found = found.with_run(np.minimum(1.0, found.run + helped))
    return found, network_share(found, known, workers, centres)


def network_share(did: Shares, known: Known, procs: Sequence[Proc], centres: Ints) -> Floats:
    """Return which share of their time processes waited for the network; NaN if not known."""
    received = known.around.network.bytes_per_s(procs, centres)
    some = received >= RECEIVES_BYTES_PER_S
    waits = did.in_socket + np.where(some, did.in_poll, 0.0)
    return np.asarray(np.where(np.isnan(received) | (len(procs) == 0), np.nan, waits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Who loads data, and what they did.

    `network`: share of their time that they waited for it. `own`: where they are threads of the
    trainer.
    """

    did: Shares
    network: Floats
    own: Truths


def loader_of(
    known: Known, proc: Proc, told: Told | None, centres: Ints, emptiness: Emptiness
) -> Loader:
    """Return the loader of a trainer: its DataLoader's workers, or else threads of its own."""
    processes = known.node.workers(proc)
    threads = known.node.threads.get(proc.identity, [])
    if not processes and threads and (told is None or told.loaders == 0):
        did, some = _busy_threads(threads, centres)
        reads = _reads_more(proc, centres)
        own = some & reads
        did = did.where(own)
        return Loader(did=did, network=np.full(len(centres), np.nan), own=own)
    did, network = _of_workers(processes, known, centres, emptiness)
    return Loader(did=did, network=network, own=np.zeros(len(centres), dtype=bool))


def _busy_threads(threads: Sequence[Columns], centres: Ints) -> tuple[Shares, Truths]:
    """Return what those of some threads did that are busy around each time, and where any is."""
    each = [shares_of([rows], _since_found(rows, centres)) for rows in threads]
    busy = np.array([np.nan_to_num(one.run + one.ready + one.io) for one in each])
    weight = (busy >= OWN_BUSY_RATIO).astype(np.float64)
    count = weight.sum(axis=0)

    def mean(name: str) -> Floats:
        values = np.array([getattr(one, name) for one in each])
        total = np.where(weight > 0, values, 0.0).sum(axis=0)
        return np.asarray(total / np.where(count > 0, count, np.nan))

    names = [part.name for part in dataclasses.fields(Shares)]
    return Shares(**{name: mean(name) for name in names} | {"count": count}), count > 0


def _since_found(rows: Columns, centres: Ints) -> Ints:
    """Return times, and for those just before a thread was found that from which it is known."""
    known = int(rows["mono_ns"][0]) + HALF_NS
    before = (centres < known) & (centres >= known - HALF_NS - OWN_FOUND_NS)
    return np.asarray(np.where(before, known, centres))


def _reads_more(proc: Proc, centres: Ints) -> Truths:
    asked, given, mapped = (
        grown([proc], name, centres, 2 * HALF_NS)
        for name in ("rchar_bytes", "wchar_bytes", "read_bytes")
    )
    reads = np.fmax(asked, mapped)
    return np.asarray((reads >= OWN_READS_BYTES_PER_S) & (reads > given))


def inferred_wait(gpu: Gpu, rows: slice, main: Shares, loader: Loader) -> Floats:
    """Return seconds in which the launching thread must have waited for saturated workers."""
    length = gpu.length[rows] / 1e9
    empty = length * (1.0 - gpu.busy[rows])
    busy = loader.did.run + loader.did.ready + loader.did.io
    # For its own threads it waits in a lock or at a pipe; anywhere else it does not wait for them.
    waits = np.where(loader.own, np.nan_to_num(main.waits_wide), main.asleep)
    sure = np.minimum(empty, length * waits) * _ramp(busy, SATURATED_RATIOS)
    off = np.maximum(main.asleep, 1e-9)
    polls = np.nan_to_num(_ramp(main.in_poll / off, POLLING_RATIOS))
    fed = _ramp(busy + np.nan_to_num(loader.network), SATURATED_RATIOS)
    fed = fed * _ramp(-_full_share(gpu, rows), (-FULL_SHARES[0], -FULL_SHARES[1]))
    asked = np.minimum(empty, length * main.in_poll) * polls * fed
    return np.asarray(np.fmax(sure, asked))


def _full_share(gpu: Gpu, rows: slice) -> Floats:
    """Return which share of the windows around each one the GPU was busy for all of."""
    centres = (gpu.t0 + gpu.t1) // 2
    total = np.concatenate(([0.0], np.cumsum(gpu.busy >= FULL_RATIO)))
    low = np.searchsorted(centres, centres[rows] - STARVED_HALF_NS)
    high = np.searchsorted(centres, centres[rows] + STARVED_HALF_NS, side="right")
    return np.asarray((total[high] - total[low]) / np.maximum(high - low, 1))


def _ramp(values: Floats, ratios: tuple[float, float]) -> Floats:
    low, high = ratios
    return np.asarray(np.clip((values - low) / (high - low), 0.0, 1.0))


def workers(table: Table, rows: slice, main: Shares, loader: Loader, told: Told | None) -> None:
    """Fill in what DataLoader workers, or threads in their place, did."""
    did = loader.did
    # Where the launching process was seen and no worker of it, it had none.
    count = np.where(main.count > 0, did.count, np.nan)
    if told is not None and told.workers is not None:
        count = np.full(len(count), float(told.workers))
    table.put("loader_workers", rows, count)
    # Who is waited for is not idle: what few readings leave unknown of workers that are busy for
    # nearly all of their time is like the rest of it.
    busy = did.run + did.ready + did.io + np.nan_to_num(loader.network)
    rest = _ramp(busy, SATURATED_RATIOS) * np.maximum(0.0, 1.0 / np.maximum(busy, 1e-9) - 1.0)
    rest = np.nan_to_num(rest)  # of what is not known, nothing is like the rest
    table.put("loader_cpu_ratio", rows, did.run * (1.0 + rest))
    table.put("loader_runq_ratio", rows, did.ready * (1.0 + rest))
    table.put("loader_io_ratio", rows, did.io * (1.0 + rest))
    table.put("loader_network_ratio", rows, loader.network * (1.0 + rest))
    table.put("data_wait_inferred", rows, loader.own | (told is None))


def own_loading(
    table: Table, rows: slice, main: Shares, network: Floats, wait_ratio: Floats
) -> None:
    """Tell what a thread that loads its data itself did while it did so.

    I/O is taken to be all for data; its CPU time is not, so computing gets what is left of the
    wait, at most the CPU time that the thread had.
    """
    kernel = np.ones(min(17, max(1, len(wait_ratio))))  # two seconds of windows of an eighth
    smooth = np.convolve(wait_ratio, kernel, mode="same")
    smooth /= np.convolve(np.ones(len(wait_ratio)), kernel, mode="same")
    whole = np.where(smooth > 0, smooth, np.nan)
    io = np.clip(main.io / whole, 0.0, 1.0)
    ready = np.clip(main.ready, 0.0, 1.0 - io)
    table.put("loader_workers", rows, 0.0)
    table.put("loader_io_ratio", rows, io)
    table.put("loader_runq_ratio", rows, ready)
    computes = np.clip(main.run / whole, 0.0, 1.0 - io - ready)
    table.put("loader_cpu_ratio", rows, computes)
    waits = np.clip(network / whole, 0.0, 1.0 - io - ready - computes)
    table.put("loader_network_ratio", rows, waits)
    table.put("data_wait_inferred", rows, 0.0)


def reads(table: Table, known: Known, sources: Sequence[Proc], rows: slice, centres: Ints) -> None:
    """Fill in where data is read from."""
    found = known.around.reads(sources, centres)
    length = table.columns["d_s"][rows]
    table.put("read_fs", rows, found.kind)
    table.put("read_mount", rows, found.mount)
    table.put("loader_read_bytes", rows, found.device_per_s * length)
    table.put("loader_asked_bytes", rows, found.asked_per_s * length)
    # What has to be read again for want of memory is not the file system's.
    thrash = known.around.thrashing(found.device_per_s, centres)
    io = table.columns["loader_io_ratio"][rows]
    table.put("loader_thrash_ratio", rows, io * thrash)
    table.put("loader_io_ratio", rows, io * (1.0 - np.nan_to_num(thrash)))


def cpus(table: Table, known: Known, procs: Sequence[Proc], rows: slice, centres: Ints) -> None:
    """Fill in what limits the CPUs of some processes: all of it, or nothing."""
    allowed = [proc.info.get("cpus_allowed_count") for proc in procs]
    least = min((int(count) for count in allowed if count is not None), default=None)
    cgroup = next((proc.info["cgroup"] for proc in procs if proc.info.get("cgroup")), None)
    throttled = known.around.throttled(cgroup, centres)
    busy = known.around.cpu_busy(centres)
    sure = ~np.isnan(throttled) & ~np.isnan(busy)
    if least is None or known.around.cpus is None:
        return
    table.put("cpus_allowed", rows, np.where(sure, float(least), np.nan))
    table.put("cgroup_throttled_ratio", rows, np.where(sure, throttled, np.nan))
    table.put("node_cpus", rows, np.where(sure, float(known.around.cpus), np.nan))
    table.put("node_cpu_busy_ratio", rows, np.where(sure, busy, np.nan))
