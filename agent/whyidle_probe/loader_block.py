"""The block of a DataLoader in the page, and what one pass of next() writes into it.

This is the hot path: a batch may cost 2 us in all, so totals are kept as Python numbers and only
stored, a store of a slot being about 30 ns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whyidle_probe import layout as at

_BEFORE_SLOTS = (
    at.LOADER_CAPACITY,
    at.LOADER_BATCH_SIZE,
    at.LOADER_READY,
    at.LOADER_OUTSTANDING,
    at.LOADER_UNPINNED,
    at.LOADER_ARRIVED_NS,
)
# What a batch was fetched for; index of the tuples below.
STEP, OUTSIDE, BACKGROUND = 0, 1, 2
_BATCHES = (at.LOADER_BATCHES, at.LOADER_OUTSIDE_BATCHES, at.LOADER_BACKGROUND_BATCHES)
_WAIT_NS = (at.LOADER_WAIT_NS, at.LOADER_OUTSIDE_WAIT_NS, at.LOADER_BACKGROUND_WAIT_NS)
_WAITING, _READY, _ARRIVED = at.LOADER_WAITING_SINCE_NS, at.LOADER_READY, at.LOADER_ARRIVED_NS
_OUTSTANDING, _UNPINNED = at.LOADER_OUTSTANDING, at.LOADER_UNPINNED
_EMPTY, _SUM = at.LOADER_EMPTY_ARRIVALS, at.LOADER_READY_SUM


def _none() -> None:
    return None


class LoaderBlock:
    """Totals of the DataLoaders that have had this block, one after the other."""

    __slots__ = ("_batches", "_empty", "_ready_sum", "_wait_ns", "iterator", "shared", "slots")

    def __init__(self, slots: memoryview) -> None:
        self.slots = slots
        self.shared = False
        self.iterator: Callable[[], Any] = _none
        self._batches = [0, 0, 0]
        self._wait_ns = [0, 0, 0]
        self._empty = 0
        self._ready_sum = 0

    def begin(self, serial: int) -> None:
        """Give the block to a DataLoader."""
        for slot in _BEFORE_SLOTS:
            self.slots[slot] = at.UNKNOWN
        self.slots[at.LOADER_SERIAL] = serial

    def describe(
        self, flags: int, workers: int, capacity: int | None, batch_size: int | None
    ) -> None:
        """Say what the DataLoader is like."""
        slots = self.slots
        slots[at.LOADER_FLAGS] = flags | (at.FLAG_SHARED if self.shared else 0)
        slots[at.LOADER_WORKERS] = workers
        slots[at.LOADER_CAPACITY] = at.UNKNOWN if capacity is None else capacity
        slots[at.LOADER_BATCH_SIZE] = at.UNKNOWN if batch_size is None else batch_size

    def iterator_made(self, took_ns: int) -> None:
        """Count an epoch begun, and the time that it took to begin."""
        self.slots[at.LOADER_ITERATORS] += 1
        self.slots[at.LOADER_SETUP_NS] += took_ns

    def arrive(self, now_ns: int, ready: int, unpinned: int) -> None:
        """The trainer comes for a batch and finds `ready` of them."""
        slots = self.slots
        slots[_ARRIVED] = slots[_WAITING] = now_ns
        slots[_READY] = ready
        if ready > 0:
            self._ready_sum += ready
            slots[_SUM] = self._ready_sum
        else:
            self._empty += 1
            slots[_EMPTY] = self._empty
        if unpinned >= 0:
            slots[_UNPINNED] = unpinned

    def arrive_unqueued(self, now_ns: int) -> None:
        """The trainer comes for a batch that it loads itself: there is no queue."""
        self.slots[_ARRIVED] = self.slots[_WAITING] = now_ns

    def took(self, kind: int, wait_ns: int, outstanding: int) -> None:
        """It got one after `wait_ns`."""
        slots = self.slots
        self._batches[kind] += 1
        self._wait_ns[kind] += wait_ns
        slots[_WAIT_NS[kind]] = self._wait_ns[kind]
        slots[_BATCHES[kind]] = self._batches[kind]
        slots[_OUTSTANDING] = outstanding
        slots[_WAITING] = 0

    def ended(self, took_ns: int, outstanding: int) -> None:
        """It got none: the epoch has ended, or the loader failed."""
        slots = self.slots
        slots[at.LOADER_END_NS] += took_ns
        slots[at.LOADER_ENDS] += 1
        slots[_OUTSTANDING] = outstanding
        slots[_WAITING] = 0
