"""What one process publishes of its process groups: calls, and waits of the main thread.

Whether GPUs wait for each other the host cannot see; but a rank that comes late to a call is late,
and a thread that waits in gloo leaves its GPU empty.
"""

from __future__ import annotations

import os
import sys
import weakref
import zlib
from threading import get_ident, main_thread
from time import monotonic_ns, thread_time_ns
from typing import Any
from weakref import ref

from whyidle_probe import layout as at
from whyidle_probe.group_block import WAIT_RECORD_NS, GroupBlock
from whyidle_probe.guard import OURS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from whyidle_probe.recorder import Recorder

# Calls that have been made and not waited for: more are forgotten, those of dead works first.
_PENDING_MOST = 512
# A call that returns later than this has waited in itself, as the first one of a group does.
_CALL_WAIT_NS = 1_000_000

# The work, its group's block, operation, number, when it was called, ns waited so far, bytes.
if TYPE_CHECKING:
    Call = tuple[Any, GroupBlock, int, int, int, int, int]
_WAITING = at.GROUP_WAITING_SINCE_NS


class Collectives:
    """The groups of one process; hooks are bound to it, so that a fork only clears it."""

    __slots__ = (
        "_blocks",
        "_by_group",
        "_delay_fd",
        "_main_thread",
        "_pending",
        "_recorder",
        "_waited_ns",
        "modules",
    )

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._delay_fd: int | None = None
        self.clear()

    def clear(self) -> None:
        """Begin anew, as the child of a fork does."""
        self._by_group: dict[int, tuple[Any, GroupBlock]] = {}
        self._blocks: list[GroupBlock] = []
        self._pending: dict[int, Call] = {}
        self._main_thread = main_thread().ident
        self._waited_ns = 0  # of the main thread, for all groups
        # DDP modules whose gradients are reduced inside of backward(), on CPUs.
        self.modules: weakref.WeakSet[Any] = weakref.WeakSet()

    def let_go(self, dead: memoryview) -> None:
        """Point every block into slots that nobody reads, in the child of a fork."""
        for block in self._blocks:
            block.slots = dead[: at.GROUP_SLOTS]
        fd, self._delay_fd = self._delay_fd, None
        if fd is not None and fd >= 0:
            os.close(fd)

    # --- calls ----------------------------------------------------------------------------------

    # Written out at length: each call into another function costs a twentieth of what is allowed.

    def called(self, group: Any, operation: int, began_ns: int, args: Any, work: Any) -> None:
        """Count a call that has returned; `work` is None where nothing is left to wait for."""
        found = self._by_group.get(id(group))
        block = found[1] if found is not None and found[0]() is group else self.block_of(group)
        if block is None:
            return
        item = args[0] if args else None
        while type(item) is list and item:
            item = item[0]
        size = getattr(item, "nbytes", 0)
        number = block.called(operation, began_ns, size)
        now = monotonic_ns()
        waited = now - began_ns
        if waited < _CALL_WAIT_NS:
            waited = 0
        if work is None:
            self._ended(block, operation, number, began_ns, waited, size, now)
            return
        pending = self._pending
        if len(pending) >= _PENDING_MOST:
            pending = self._forget()
        pending[id(work)] = (ref(work), block, operation, number, began_ns, waited, size)

    def _forget(self) -> dict[int, Call]:
        """Forget calls that nobody will wait for any more, or else all."""
        living = {k: v for k, v in self._pending.items() if v[0]() is not None}
        self._pending = living if len(living) < _PENDING_MOST else {}
        return self._pending

    def waits(self, work: Any, began_ns: int) -> Call | None:
        """Say that a thread begins to wait for a work; return the call that it came from."""
        found = self._pending.pop(id(work), None)
        if found is None or found[0]() is not work:
            return None
        if get_ident() == self._main_thread:
            found[1].slots[_WAITING] = began_ns
        return found

    def waited(self, call: Call, began_ns: int) -> None:
        """Say that it has ended, well or not."""
        now = monotonic_ns()
        _, block, operation, number, called_ns, before, size = call
        waited = before + now - began_ns
        if get_ident() == self._main_thread:
            block.waited(operation, waited)
            self._waited_ns += waited
        if waited >= WAIT_RECORD_NS or not number & block.mask:
            self._record(block, operation, number, called_ns, waited, size, now)

    def _ended(
        self,
        block: GroupBlock,
        operation: int,
        number: int,
        called_ns: int,
        waited: int,
        size: int,
        now: int,
    ) -> None:
        """Count what has been waited for in the call itself."""
        if get_ident() == self._main_thread:
            block.waited(operation, waited)
            self._waited_ns += waited
        self._record(block, operation, number, called_ns, waited, size, now)

    def _record(
        self,
        block: GroupBlock,
        operation: int,
        number: int,
        called_ns: int,
        waited: int,
        size: int,
        now: int,
    ) -> None:
        page = self._recorder.page
        if page is not None and block.records(number, now, waited):
            main = get_ident() == self._main_thread
            kind = operation | block.serial << 8 | (0 if main else at.CALL_BACKGROUND)
            page.record_call(kind, called_ns, now, number, waited, int(size))

    # --- gradients ------------------------------------------------------------------------------

    def backward_begins(self) -> tuple[int, int, int] | None:
        """Return times at the begin of a backward pass of the main thread, None if none reduces."""
        if get_ident() != self._main_thread:
            return None
        if not any(module.require_backward_grad_sync for module in self.modules):
            return None
        for module in self.modules:
            block = self.block_of(module.process_group)
            if block is not None:
                block.slots[_WAITING] = monotonic_ns()
        # What is waited for inside, as for synchronised batch norms, is told by itself.
        return monotonic_ns(), thread_time_ns() + self._waited_ns, self._delay_ns()

    def backward_ended(self, began: tuple[int, int, int]) -> None:
        """Tell what of a backward pass the thread neither computed nor lacked a CPU for.

        On CPUs it runs in the thread that called it, and all that it waits for there is others.
        """
        now = monotonic_ns()
        used = thread_time_ns() + self._waited_ns - began[1] + self._delay_ns() - began[2]
        waited = max(0, now - began[0] - used)
        groups = {id(m.process_group): m for m in self.modules if m.require_backward_grad_sync}
        for module in groups.values():
            block = self.block_of(module.process_group)
            if block is None:
                continue
            number = block.backward()
            # Of several groups the first has it: it is one wait.
            self._ended(block, at.OPERATION_BACKWARD, number, began[0], waited, 0, now)
            waited = 0

    def _delay_ns(self) -> int:
        """Return how long the main thread was ready to run without a CPU; 0 where not told.

        Source: /proc/PID/schedstat, whose second number is brought up to date at each switch.
        """
        if self._delay_fd is None:
            try:
                self._delay_fd = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._delay_fd = -1
        if self._delay_fd < 0:
            return 0
        try:
            return int(os.pread(self._delay_fd, 64, 0).split()[1])
        except (OSError, *OURS):
            return 0

    # --- groups ---------------------------------------------------------------------------------

    def block_of(self, group: Any) -> GroupBlock | None:
        """Return the block of a process group; None without a page."""
        found = self._by_group.get(id(group))
        if found is not None and found[0]() is group:
            return found[1]
        page = self._recorder.open()
        if page is None:
            return None
        if not self._blocks:
            self._recorder.learn_ranks()
        if len(self._blocks) < at.GROUPS:
            first = at.GROUPS_AT + len(self._blocks) * at.GROUP_SLOTS
            slots = self._recorder.slots[first : first + at.GROUP_SLOTS]
            block = GroupBlock(slots, len(self._blocks) + 1)
            self._blocks.append(block)
            _describe(block, group)
        else:
            block = self._blocks[-1]
            block.share()
        self._by_group[id(group)] = (ref(group), block)
        return block


def _describe(block: GroupBlock, group: Any) -> None:
    distributed = sys.modules["torch.distributed"]
    name = str(getattr(group, "group_name", ""))
    try:
        ranks = distributed.get_process_group_ranks(group)
    except (KeyError, RuntimeError, *OURS):
        ranks = []
    try:
        backend = str(distributed.get_backend(group))
    except (RuntimeError, *OURS):
        backend = "other"
    # A name alone is not enough: groups that are made by some ranks only may be called alike, and
    # two jobs meet at different places.
    place = [os.environ.get(word, "") for word in ("MASTER_ADDR", "MASTER_PORT")]
    key = zlib.crc32("/".join([name, ",".join(map(str, ranks)), *place]).encode())
    block.describe(key, int(group.size()), int(group.rank()), backend)
