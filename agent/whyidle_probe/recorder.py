"""What one process publishes: steps, phases, pauses of the garbage collector, its loaders.

A page is made when something is worth publishing, not before: launchers, compilers and data workers
import torch too. Nothing here raises into the trainer, waits for a lock, or starts anything.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import weakref
from collections import deque
from time import monotonic_ns
from typing import Any

from whyidle_probe import layout as at
from whyidle_probe.collectives import Collectives
from whyidle_probe.guard import OURS
from whyidle_probe.identity import Identity
from whyidle_probe.loader_block import LoaderBlock
from whyidle_probe.page import Page, sweep

SERVICE_FOLDER = "/run/whyidle/probe"
# A folder that cannot be used is tried again after this long.
_RETRY_NS = 60_000_000_000
# Steps that follow each other faster share a record, which bounds what the agent reads.
_RECORD_EVERY_NS = 10_000_000
# Shorter pauses and waits are only summed up.
_GC_RECORD_NS = 1_000_000
_WAIT_RECORD_NS = 1_000_000


class Recorder:
    """The probe of this process. After a fork the child's is empty, and has no page."""

    __slots__ = (
        "_background",
        "_background_lock",
        "_blocks",
        "_by_loader",
        "_gc_began_ns",
        "_kinds",
        "_lead",
        "_made_ns",
        "_optimizer_steps",
        "_retry_ns",
        "_since_ns",
        "_step_began_ns",
        "_step_recorded",
        "collectives",
        "folder",
        "main_thread",
        "page",
        "phases",
        "slots",
        "step_batches",
        "step_wait_ns",
        "steps",
        "told_steps",
        "workers",
    )

    def __init__(self, folder: str, *, workers: bool = False) -> None:
        self.folder = folder
        self.workers = workers  # data workers publish pages too
        self.collectives = Collectives(self)
        self._clear()

    def _clear(self) -> None:
        self.page: Page | None = None
        self.slots = memoryview(bytearray(at.PAGE_BYTES)).cast("q")
        self.main_thread = threading.main_thread().ident
        self._retry_ns = 0
        self._blocks: list[LoaderBlock] = []
        self._by_loader: dict[int, tuple[Any, LoaderBlock]] = {}
        self._kinds: dict[str, int] = {n: k for k, n in enumerate(at.PHASES) if n}
        self.phases: list[int] = []  # that the main thread is in, the innermost last
        self._since_ns = 0
        self._background: deque[tuple[int, int]] = deque(maxlen=64)
        self._background_lock = threading.Lock()
        self._gc_began_ns = 0
        self._lead: Any = None
        self._optimizer_steps = 0
        self.told_steps = False
        self.steps = 0
        self.step_batches = 0
        self.step_wait_ns = 0
        self._made_ns = self._step_began_ns = monotonic_ns()
        self._step_recorded: tuple[int, int, int] = (0, 0, 0)

    def after_fork(self) -> None:
        """Let go of the parent's page, in the child, and of all that points into it."""
        page, blocks = self.page, self._blocks
        if page is not None:
            dead = page.let_go()
            for block in blocks:
                block.slots = dead[: at.LOADER_SLOTS]
            self.collectives.let_go(dead)
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)
        self.collectives.clear()
        self._clear()

    # --- the page -------------------------------------------------------------------------------

    def open(self) -> Page | None:
        """Return the page, made if need be; None where that is not possible or not wanted."""
        if self.page is not None:
            return self.page
        now = monotonic_ns()
        if now < self._retry_ns or (not self.workers and in_data_worker()):
            return None
        self._retry_ns = now + _RETRY_NS
        torch = sys.modules.get("torch")
        version = str(getattr(torch, "__version__", ""))
        try:
            sweep(self.folder)
            page = Page(self.folder, Identity(), version)
        except (OSError, *OURS):
            return None  # missing, read-only, full: the agent says so, the trainer goes on
        self.slots = page.slots
        gc.callbacks.append(self._on_gc)
        self.page = page
        return page

    def close(self) -> None:
        """Say that the process ends; called when Python exits in good order."""
        page, self.page = self.page, None
        if page is None:
            return
        try:
            gc.callbacks.remove(self._on_gc)
            page.close()
        except (OSError, ValueError):
            return

    def failed(self) -> None:
        """Count a failure of ours."""
        self.slots[at.HOOK_ERRORS] += 1

    # --- loaders --------------------------------------------------------------------------------

    def block_of(self, loader: Any) -> LoaderBlock | None:
        """Return the block of a DataLoader, the same at every epoch; None without a page."""
        if self.open() is None:
            return None
        found = self._by_loader.get(id(loader))
        if found is not None and found[0]() is loader:
            return found[1]
        self.slots[at.LOADERS_SEEN] += 1
        block = self._free_block()
        block.begin(self.slots[at.LOADERS_SEEN])
        self._by_loader[id(loader)] = (weakref.ref(loader), block)
        return block

    def _free_block(self) -> LoaderBlock:
        """Return a block of no living loader; its totals go on, so that sums never fall."""
        if len(self._blocks) < at.LOADERS:
            first = at.LOADERS_AT + len(self._blocks) * at.LOADER_SLOTS
            self._blocks.append(LoaderBlock(self.slots[first : first + at.LOADER_SLOTS]))
            return self._blocks[-1]
        # An iterator does not keep its loader alive, nor the other way round.
        self._by_loader = {k: v for k, v in self._by_loader.items() if v[0]() is not None}
        living = {id(block) for _, block in self._by_loader.values()}
        for block in self._blocks:
            if id(block) not in living and block.iterator() is None and not block.shared:
                return block
        self._blocks[-1].shared = True
        return self._blocks[-1]

    def waited(self, began: int, now: int) -> None:
        """Tell when the main thread waited for a DataLoader; short waits are only summed up."""
        if now - began >= _WAIT_RECORD_NS and self.page is not None:
            self.page.record(at.EVENT_WAIT, began, now, self.steps, 0, 0)

    def set_up(self, began: int, now: int) -> None:
        """Tell when the main thread began or ended an epoch, workers and all."""
        long = now - began >= _WAIT_RECORD_NS
        if long and self.page is not None and threading.get_ident() == self.main_thread:
            self.page.record(at.EVENT_SETUP, began, now, self.steps, 0, 0)

    # --- steps ----------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any) -> None:
        """Count a step of an optimizer; that of the first one, after a batch, ends a step."""
        if threading.get_ident() != self.main_thread or self.open() is None:
            return
        self._optimizer_steps += 1
        self.slots[at.OPTIMIZER_STEPS] = self._optimizer_steps
        lead = None if self._lead is None else self._lead()
        if lead is None:
            lead = optimizer
            self._lead = weakref.ref(optimizer)
        # Sharded optimizers step their base once per group; a run without loaders has no batches.
        if lead is optimizer and not self.told_steps and (self.step_batches or not self._blocks):
            self.step()

    def tell_step(self) -> None:
        """End a step on the trainer's own word; optimizers are not asked any more."""
        self.told_steps = True
        self.step()

    def step(self) -> None:
        """End a step now."""
        if self.open() is None:
            return
        now = monotonic_ns()
        if self.steps == 0:
            self.learn_ranks()
        self.steps += 1
        self.slots[at.LAST_STEP_NS] = now
        self.slots[at.STEPS] = self.steps
        before, wait_ns, batches = self._step_recorded
        wait_ns, batches = wait_ns + self.step_wait_ns, batches + self.step_batches
        self.step_wait_ns = self.step_batches = 0
        if now - self._step_began_ns < _RECORD_EVERY_NS:
            self._step_recorded = (before, wait_ns, batches)
            return
        if self.page is not None:
            began = self._step_began_ns
            self.page.record(at.EVENT_STEP, began, now, self.steps, wait_ns, batches)
        self._step_recorded = (self.steps, 0, 0)
        self._step_began_ns = now

    def learn_ranks(self) -> None:
        """Take the rank from torch.distributed: not every launcher sets variables."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or self.page is None:
            return
        try:
            if distributed.is_available() and distributed.is_initialized():
                self.page.learn_ranks(distributed.get_rank(), distributed.get_world_size())
        except (RuntimeError, *OURS):
            self.failed()

    # --- phases ---------------------------------------------------------------------------------

    def kind_of(self, name: str) -> int:
        """Return the kind of a phase; a new name gets a kind of its own while there are some."""
        kind = self._kinds.get(name)
        if kind is None:
            kind = at.PHASE_TOLD + sum(1 for k in self._kinds.values() if k >= at.PHASE_TOLD)
            if kind >= at.PHASE_KINDS:
                return at.PHASE_OTHER
            self._kinds[name] = kind
            if self.page is not None:
                self.page.name_phase(kind, name)
        return kind

    def enter(self, name: str) -> tuple[int, int, bool] | None:
        """Begin a phase; return what `leave` wants."""
        if self.open() is None:
            return None
        kind = self.kind_of(name)
        now = monotonic_ns()
        main = threading.get_ident() == self.main_thread
        if main:
            self._charge(now)
            self.phases.append(kind)
            self.slots[at.PHASE_COUNT + kind] += 1
            self._show(now)
        return kind, now, main

    def leave(self, entered: tuple[int, int, bool]) -> None:
        """End a phase: time goes to the innermost one, other threads' is kept apart."""
        kind, began, main = entered
        if began < self._made_ns:
            return  # entered by the parent, before a fork
        now = monotonic_ns()
        if main:
            self._charge(now)
            if self.phases:
                self.phases.pop()
            self._show(now)
        else:
            self._add_background(kind, now - began)
        if self.page is not None:
            event = kind if main else kind | at.EVENT_BACKGROUND
            self.page.record(event, began, now, self.steps, 0, 0)

    def _charge(self, now: int) -> None:
        if self.phases:
            self.slots[at.PHASE_NS + self.phases[-1]] += now - self._since_ns

    def _show(self, now: int) -> None:
        # One store tells kind and time: the low bits of the time are given up for the kind.
        self._since_ns = now = now >> at.PHASE_BITS << at.PHASE_BITS
        self.slots[at.PHASE] = now | self.phases[-1] if self.phases else 0

    def _add_background(self, kind: int, ns: int) -> None:
        self._background.append((kind, ns))
        # Who finds it locked leaves its part to the next one.
        if self._background_lock.acquire(blocking=False):
            try:
                while self._background:
                    done, took = self._background.popleft()
                    self.slots[at.PHASE_BACKGROUND_NS + done] += took
            finally:
                self._background_lock.release()

    # --- pipeline ------------------------------------------------------------------------------

    def pipeline(
        self, stage: int, stages: int, batches: int, schedule: str, virtual: int = 1
    ) -> None:
        """Tell which stage of a pipeline this process runs; of several (virtual), the first."""
        if self.open() is None:
            return
        known = schedule if schedule in at.SCHEDULES else at.SCHEDULES[-1]
        slots = self.slots
        slots[at.PIPELINE_STAGE], slots[at.PIPELINE_BATCHES] = stage, batches
        slots[at.PIPELINE_SCHEDULE] = at.SCHEDULES.index(known)
        slots[at.PIPELINE_VIRTUAL] = virtual
        slots[at.PIPELINE_STAGES] = stages

    # --- garbage collector ----------------------------------------------------------------------

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        """Sum up pauses; the collector never runs twice at once, whichever thread it runs in."""
        now = monotonic_ns()
        if phase == "start":
            self._gc_began_ns = now
            return
        began, self._gc_began_ns = self._gc_began_ns, 0
        if not began:
            return
        generation = info.get("generation", -1)
        slots = self.slots
        slots[at.GC_NS] += now - began
        slots[at.GC_COUNT] += 1
        if generation == 2:
            slots[at.GC_FULL_COUNT] += 1
        if now - began >= _GC_RECORD_NS and self.page is not None:
            self.page.record(at.EVENT_GC, began, now, generation, info.get("collected", -1), 0)


def in_data_worker() -> bool:
    """Say whether this process is a worker of a DataLoader."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


def make(folder: str | None) -> Recorder:
    """Return the recorder of this process, tied to its forks and its end."""
    workers = os.environ.get("WHYIDLE_PROBE_WORKERS") == "1"
    chosen = folder or os.environ.get("WHYIDLE_PROBE_DIR") or SERVICE_FOLDER
    recorder = Recorder(chosen, workers=workers)
    os.register_at_fork(after_in_child=recorder.after_fork)
    atexit.register(recorder.close)
    return recorder
