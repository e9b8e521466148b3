"""Watches torch.utils.data.DataLoader: how long the trainer waits, and what it finds in the queue.

Source: torch/utils/data/dataloader.py, 1.10 to 2.13: both kinds of iterators inherit `__next__`.
Names that a version lacks leave their values unknown.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from time import monotonic_ns
from types import ModuleType
from typing import Any

from whyidle_probe import layout as at
from whyidle_probe.guard import OURS
from whyidle_probe.loader_block import BACKGROUND, OUTSIDE, STEP, LoaderBlock
from whyidle_probe.recorder import Recorder

_WATCH = "_whyidle_watch"


class _Watch:
    """What is known of one iterator. `size` counts batches that have come, None without a queue."""

    __slots__ = ("block", "free", "iterable", "limit", "size", "unpinned")

    def __init__(self, block: LoaderBlock, iterator: Any) -> None:
        self.block = block
        found = getattr(iterator, "_data_queue", None)
        self.size = None if found is None else _size(found)
        # A semaphore of `limit` counts what is free in a queue between processes.
        self.limit, self.free = _semaphore(found)
        self.unpinned: Callable[[], int] | None = None
        results = getattr(iterator, "_worker_result_queue", None)
        if found is not results and results is not None:
            self.unpinned = _size(results)
        self.iterable = _is_iterable(iterator)

    def arrive(self, iterator: Any, now_ns: int) -> None:
        if self.size is None:
            self.block.arrive_unqueued(now_ns)
            return
        # Batches that came out of order wait in the iterator itself.
        ready: int = len(iterator._task_info) - iterator._tasks_outstanding
        if ready and self.iterable:
            # Tasks of workers that have run dry are still listed.
            ready = sum(1 for task in iterator._task_info.values() if len(task) == 2)
        unpinned = -1 if self.unpinned is None else self.unpinned()
        ready += self.size() if self.free is None else self.limit - self.free()
        self.block.arrive(now_ns, ready, unpinned)


def _is_iterable(iterator: Any) -> bool:
    # torch.utils.data.dataloader._DatasetKind: Map is 0, Iterable is 1.
    return bool(getattr(iterator, "_dataset_kind", 0) == 1)


def _size(found: Any) -> Callable[[], int]:
    """Return a function that counts what is in a queue, without taking a lock."""
    if isinstance(found, queue.Queue):
        waiting = found.queue
        return lambda: len(waiting)
    count: Callable[[], int] = found.qsize
    return count


def _semaphore(found: Any) -> tuple[int, Callable[[], int] | None]:
    """Return what multiprocessing.Queue.qsize subtracts: half its cost is finding it each time."""
    try:
        limit: int = found._maxsize
        free: Callable[[], int] = found._sem._semlock._get_value
        limit - free()
    except OURS:
        return 0, None
    return limit, free


def hook(module: ModuleType, recorder: Recorder) -> None:
    """Hook the iterators of torch.utils.data.dataloader."""
    base: Any = module._BaseDataLoaderIter
    for name in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
        kind: Any = getattr(module, name)
        kind.__init__ = _init(kind.__init__, recorder)
    many: Any = module._MultiProcessingDataLoaderIter
    many._reset = _reset(many._reset, recorder)
    base.__next__ = _next(base.__next__, recorder)


def _init(original: Callable[..., None], recorder: Recorder) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, loader: Any, *rest: Any, **more: Any) -> None:
        began = monotonic_ns()
        original(self, loader, *rest, **more)
        try:
            block = recorder.block_of(loader)
            if block is not None:
                _describe(block, loader, self)
                block.iterator = weakref.ref(self)
                now = monotonic_ns()
                block.iterator_made(now - began)
                recorder.set_up(began, now)
                setattr(self, _WATCH, _Watch(block, self))
        except OURS:
            recorder.failed()

    return __init__


def _reset(original: Callable[..., None], recorder: Recorder) -> Callable[..., None]:
    """Persistent workers keep their iterator: an epoch begins by resetting it."""

    @functools.wraps(original)
    def _reset(self: Any, *rest: Any, **more: Any) -> None:
        began = monotonic_ns()
        original(self, *rest, **more)
        try:
            watch = self.__dict__.get(_WATCH)
            if watch is not None:  # not on the first reset, which __init__ makes
                now = monotonic_ns()
                watch.block.iterator_made(now - began)
                recorder.set_up(began, now)
        except OURS:
            recorder.failed()

    return _reset


def _describe(block: LoaderBlock, loader: Any, iterator: Any) -> None:
    workers = int(getattr(loader, "num_workers", 0))
    ahead = getattr(loader, "prefetch_factor", None)
    flags = at.FLAG_WORKERS if workers else 0
    if _is_iterable(iterator):
        flags |= at.FLAG_ITERABLE
    if getattr(iterator, "_pin_memory", False):
        flags |= at.FLAG_PIN_MEMORY
    if getattr(loader, "persistent_workers", False):
        flags |= at.FLAG_PERSISTENT
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    block.describe(
        flags,
        workers,
        workers * ahead if workers and isinstance(ahead, int) else None,
        size if isinstance(size, int) else None,
    )


def _ended(watch: _Watch, error: BaseException, began_ns: int, recorder: Recorder) -> None:
    try:
        # Torch's own count keeps what it asked of iterable workers that ran dry.
        drained = watch.size is not None and isinstance(error, StopIteration)
        outstanding = 0 if drained else at.UNKNOWN
        now = monotonic_ns()
        watch.block.ended(now - began_ns, outstanding)
        recorder.set_up(began_ns, now)
    except OURS:
        recorder.failed()


def _next(original: Callable[[Any], Any], recorder: Recorder) -> Callable[[Any], Any]:
    # Called while torch is being imported, but after its C part was.
    grad_enabled: Callable[[], bool] = sys.modules["torch"].is_grad_enabled
    get_ident = threading.get_ident

    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        try:
            watch = self._whyidle_watch
        except AttributeError:
            return original(self)
        began = monotonic_ns()
        try:
            watch.arrive(self, began)
        except OURS:
            recorder.failed()
        try:
            data = original(self)
        except BaseException as error:
            _ended(watch, error, began, recorder)
            raise
        try:
            wait_ns = monotonic_ns() - began
            outstanding = at.UNKNOWN if watch.size is None else self._tasks_outstanding
            if get_ident() != recorder.main_thread:
                watch.block.took(BACKGROUND, wait_ns, outstanding)
            elif recorder.phases or not grad_enabled():
                watch.block.took(OUTSIDE, wait_ns, outstanding)
                recorder.waited(began, began + wait_ns)
            else:
                watch.block.took(STEP, wait_ns, outstanding)
                recorder.step_batches += 1
                recorder.step_wait_ns += wait_ns
                recorder.waited(began, began + wait_ns)
        except OURS:
            recorder.failed()
        return data

    return __next__
