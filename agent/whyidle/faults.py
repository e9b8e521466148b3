"""Seeded faults between a collector and its host, for simulation and tests.

What machines do: files vanish between being listed and being read, counters reset and wrap, GPUs
fall off the bus, drivers hang, text comes short or as garbage. The same seed gives the same faults.
"""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from whyidle.clock import Clock
from whyidle.host import Answer, Argument, Event, Host, NvmlError, Stat

_NUMBER = re.compile(r"\d+")
# nvmlReturn_t that are seen in the field: not supported, no permission, unknown, lost, reset.
_NVML_CODES = (3, 4, 6, 15, 16, 999)
_LOST = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How likely each fault is, per question."""

    missing: float = 0.0
    io_error: float = 0.0
    again: float = 0.0
    denied: float = 0.0
    garbage: float = 0.0
    short: float = 0.0
    vanished: float = 0.0  # of /proc/PID: everything of that process, from then on
    reset: float = 0.0  # counters begin anew, from then on
    wrap: float = 0.0  # counters are cut to 32 bits, once
    nvml_error: float = 0.0
    lost_gpu: float = 0.0  # every call for that GPU, from then on
    shuffle: float = 0.0  # lists of GPUs come in another order
    hang: float = 0.0
    hang_ns: int = 5_000_000_000
    clock_step: float = 0.0


# Every kind at once, each rare enough that most runs get through.
ALL_FAULTS = Faults(
    missing=0.01,
    io_error=0.01,
    again=0.01,
    denied=0.005,
    garbage=0.01,
    short=0.01,
    vanished=0.005,
    reset=0.003,
    wrap=0.01,
    nvml_error=0.02,
    lost_gpu=0.0003,  # it is for good
    shuffle=0.02,
    hang=0.002,
    clock_step=0.002,
)


class FaultHost:
    """A host that fails as `faults` say. `hang` is called with ns; `step` with ns of wall time."""

    __slots__ = ("_base", "_faults", "_gone", "_hang", "_inner", "_random", "_step", "injected")

    def __init__(
        self,
        inner: Host,
        faults: Faults,
        seed: int,
        *,
        hang: Callable[[int], None],
        step: Callable[[int], None],
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._random = random.Random(seed)
        self._hang = hang
        self._step = step
        self._gone: set[str] = set()
        self._base: dict[str, list[int]] = {}
        self.injected: dict[str, int] = {}

    @property
    def clock(self) -> Clock:
        """The inner clock."""
        return self._inner.clock

    def read(self, path: str) -> str:
        """Ask, and perhaps fail or answer wrongly."""
        self._fail(path)
        return self._spoil(path, self._inner.read(path))

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        """Ask, and perhaps fail or answer wrongly."""
        self._fail(path)
        data = self._inner.read_bytes(path, keep=keep)
        text = data.decode("utf-8", "surrogateescape")
        return self._spoil(path, text).encode("utf-8", "surrogateescape")

    def names(self, path: str) -> tuple[str, ...]:
        """Ask, and perhaps fail."""
        self._fail(path)
        return self._inner.names(path)

    def link(self, path: str) -> str:
        """Ask, and perhaps fail."""
        self._fail(path)
        return self._inner.link(path)

    def stat(self, path: str) -> Stat:
        """Ask, and perhaps fail."""
        self._fail(path)
        return self._inner.stat(path)

    def nvml(self, call: str, *args: Argument) -> Answer:
        """Ask, and perhaps fail, lose the GPU or shuffle the list."""
        self._maybe_hang()
        gpu = f"gpu {args[0]}" if args else ""
        if gpu and self._hit("lost_gpu", self._faults.lost_gpu):
            self._gone.add(gpu)
        if gpu in self._gone:
            raise NvmlError(_LOST, call, "GPU is lost")
        if self._hit("nvml_error", self._faults.nvml_error):
            raise NvmlError(self._random.choice(_NVML_CODES), call, "injected")
        answer = self._inner.nvml(call, *args)
        if isinstance(answer, tuple) and self._hit("shuffle", self._shuffling(answer)):
            return tuple(self._random.sample(answer, len(answer)))
        return answer

    def ask(self, question: str, *args: Argument) -> Answer:
        """Ask, and perhaps fail; the wall clock may step first."""
        if self._hit("clock_step", self._faults.clock_step):
            self._step(self._random.randrange(-3_600_000_000_000, 3_600_000_000_000))
        self._fail(question)
        return self._inner.ask(question, *args)

    def events(self, source: str) -> tuple[Event, ...]:
        """Ask, and perhaps fail."""
        self._fail(source)
        return self._inner.events(source)

    def forget(self, prefix: str) -> None:
        """Pass it on."""
        self._inner.forget(prefix)

    def close(self) -> None:
        """Close the inner host."""
        self._inner.close()

    def _shuffling(self, answer: tuple[Answer, ...]) -> float:
        """Only lists of things have an order to lose; a tuple of numbers has places."""
        listed = len(answer) > 1 and all(isinstance(item, dict | tuple) for item in answer)
        return self._faults.shuffle if listed else 0.0

    def _hit(self, kind: str, chance: float) -> bool:
        if chance <= 0.0 or self._random.random() >= chance:
            return False
        self.injected[kind] = self.injected.get(kind, 0) + 1
        return True

    def _maybe_hang(self) -> None:
        if self._hit("hang", self._faults.hang):
            self._hang(self._random.randrange(1, 2 * self._faults.hang_ns))

    def _fail(self, path: str) -> None:
        self._maybe_hang()
        process = re.match(r"proc/\d+(?=/|$)", path)
        if process:
            if self._hit("vanished", self._faults.vanished):
                self._gone.add(process[0])
            if process[0] in self._gone:
                raise ProcessLookupError(errno.ESRCH, "No such process", path)
        for kind, chance, code in (
            ("missing", self._faults.missing, errno.ENOENT),
            ("io_error", self._faults.io_error, errno.EIO),
            ("again", self._faults.again, errno.EAGAIN),
            ("denied", self._faults.denied, errno.EACCES),
        ):
            if self._hit(kind, chance):
                raise OSError(code, errno.errorcode[code], path)

    def _spoil(self, path: str, text: str) -> str:
        if self._hit("garbage", self._faults.garbage):
            return self._random.randbytes(len(text)).decode("utf-8", "surrogateescape")
        if self._hit("short", self._faults.short):
            return text[: self._random.randrange(len(text) + 1)]
        if self._hit("wrap", self._faults.wrap):
            return _NUMBER.sub(lambda number: str(int(number[0]) % (1 << 32)), text)
        if self._hit("reset", self._faults.reset):
            self._base[path] = [int(number) for number in _NUMBER.findall(text)]
        base = self._base.get(path)
        if base is None:
            return text
        numbers = iter(base)
        return _NUMBER.sub(lambda n: str(max(0, int(n[0]) - next(numbers, 0))), text)
