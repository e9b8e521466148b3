"""The block of a process group in the page: what was called on it, and what was waited for."""

from __future__ import annotations

from whyidle_probe import layout as at

# What the main thread waits for as long is recorded one by one, a hundred times a second at most.
WAIT_RECORD_NS = 1_000_000
_WAITS_APART_NS = 10_000_000
# Recorded calls of a group lie about as far apart as the agent reads; see `aligned`.
_CALLS_APART_NS = (50_000_000, 400_000_000)
_MASK_MOST = (1 << 12) - 1

# Names of the module's own are found at half the cost of another module's.
_FIRST_MESSAGE, _LAST_MESSAGE = at.OPERATION_MESSAGES
_ARRIVED, _OPERATION, _CALLS = at.GROUP_ARRIVED_NS, at.GROUP_OPERATION, at.GROUP_CALLS
_MOVED, _WAITING = at.GROUP_MOVED_BYTES, at.GROUP_WAITING_SINCE_NS
_WAIT, _WAITS = at.GROUP_WAIT_NS, at.GROUP_WAITS


class GroupBlock:
    """Counts of one group; Python numbers beside the slots, which only this process writes."""

    __slots__ = (
        "_aligned_ns",
        "_long_ns",
        "backwards",
        "calls",
        "mask",
        "message_wait_ns",
        "messages",
        "moved_bytes",
        "serial",
        "slots",
        "wait_ns",
        "waits",
    )

    def __init__(self, slots: memoryview, serial: int) -> None:
        self.slots = slots
        self.serial = serial
        self.calls = self.messages = self.backwards = 0
        self.moved_bytes = self.waits = self.wait_ns = self.message_wait_ns = 0
        self.mask = 0  # of the numbers that have their turn, no bit is set in it
        self._aligned_ns = self._long_ns = 0

    def describe(self, key: int, size: int, rank: int, backend: str) -> None:
        """Say which group this is; the serial comes last, and makes the block one in use."""
        slots = self.slots
        slots[at.GROUP_KEY], slots[at.GROUP_SIZE], slots[at.GROUP_RANK] = key, size, rank
        known = backend if backend in at.BACKENDS else at.BACKENDS[-1]
        slots[at.GROUP_BACKEND] = at.BACKENDS.index(known)
        slots[at.GROUP_SERIAL] = self.serial

    def share(self) -> None:
        """Say that several groups count here: numbers of calls name nothing any more."""
        self.slots[at.GROUP_KEY] = at.UNKNOWN

    def called(self, operation: int, now_ns: int, size_bytes: int) -> int:
        """Count a call; return its number in the group."""
        slots = self.slots
        self.moved_bytes = slots[_MOVED] = self.moved_bytes + size_bytes
        if _FIRST_MESSAGE <= operation <= _LAST_MESSAGE:
            self.messages = slots[at.GROUP_MESSAGES] = number = self.messages + 1
            return number
        slots[_ARRIVED] = now_ns
        slots[_OPERATION] = operation
        self.calls = slots[_CALLS] = number = self.calls + 1
        return number

    def waited(self, operation: int, waited_ns: int) -> None:
        """Count a wait of the main thread that has ended."""
        slots = self.slots
        slots[_WAITING] = 0
        if _FIRST_MESSAGE <= operation <= _LAST_MESSAGE:
            self.message_wait_ns = slots[at.GROUP_MESSAGE_WAIT_NS] = (
                self.message_wait_ns + waited_ns
            )
        else:
            self.wait_ns = slots[_WAIT] = self.wait_ns + waited_ns
        self.waits = slots[_WAITS] = self.waits + 1

    def backward(self) -> int:
        """Count a backward pass that reduced gradients; return its number in the group."""
        self.backwards += 1
        self.slots[at.GROUP_BACKWARDS] = self.backwards
        return self.backwards

    def records(self, number: int, now_ns: int, waited_ns: int) -> bool:
        """Say whether a call is recorded: it was waited for long, or its turn has come.

        Turns are multiples of a power of two, so that ranks which call more often than others
        still record some of the same calls.
        """
        recorded = False
        if not number & self.mask:
            since = now_ns - self._aligned_ns
            self._aligned_ns = now_ns
            if since < _CALLS_APART_NS[0] and self.mask < _MASK_MOST:
                self.mask = self.mask << 1 | 1
            elif since > _CALLS_APART_NS[1]:
                self.mask >>= 1
            recorded = True
        if waited_ns >= WAIT_RECORD_NS and now_ns - self._long_ns >= _WAITS_APART_NS:
            self._long_ns = now_ns
            recorded = True
        return recorded
