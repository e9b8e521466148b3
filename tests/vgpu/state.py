"""Writer of the stand-in library's shared state: what the GPUs do, and what goes wrong with them.

    state = StateFile.create(path, [h100(0), h100(1)])
    state.gpus[0].run(gr=0.6, sm=0.5, pcie_rx=2e9)     # 60 % busy from now on, by itself
    state.gpus[1].lose()
    state.hang("nvmlDeviceGetPowerUsage", seconds=5)

Several processes may write: each change holds an exclusive lock of the file; readers never wait.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vgpu.gpu import Gpu
from vgpu.layout import (
    ABSENT,
    ANY_GPU,
    EVENTS,
    FAULTS,
    FOREVER,
    GPUS,
    MAGIC,
    VERSION,
    State,
)
from vgpu.profiles import GpuSpec

ENVIRONMENT = "WHYIDLE_STANDIN_NVML"
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAKE = 1
_EVERYBODY = 0x7FFFFFFF


class StateFile:
    """The shared state of one stand-in machine.

    `gpus` are in slot order, which nothing changes; NVML enumerates them in the order of `order`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._threads = threading.RLock()
        self._depth = 0
        if os.fstat(self._file).st_size < ctypes.sizeof(State):
            self.close()
            raise ValueError(f"{path} is no stand-in state of version {VERSION}")
        self._map = mmap.mmap(self._file, ctypes.sizeof(State))
        self._state = State.from_buffer(self._map)
        if self._state.magic != MAGIC or self._state.version != VERSION:
            self.close()
            raise ValueError(f"{path} is no stand-in state of version {VERSION}")
        self.gpus: tuple[Gpu, ...] = tuple(
            Gpu(self, self._state.gpus[slot], slot) for slot in range(self._state.gpu_count)
        )

    @classmethod
    def create(
        cls,
        path: Path,
        specs: Sequence[GpuSpec],
        *,
        refresh_s: float = 0.1,
        sample_period_s: float = 1 / 6,
    ) -> StateFile:
        """Writes a new file with GPUs at rest.

        `refresh_s` is the age up to which the library repeats gauges and GPM samples (100 ms on
        data-centre parts), `sample_period_s` the window of utilization (1/6 s to 1 s by product).
        """
        if len(specs) > GPUS:
            raise ValueError(f"at most {GPUS} GPUs, not {len(specs)}")
        draft = path.with_name(path.name + ".part")
        with draft.open("wb") as out:
            out.truncate(ctypes.sizeof(State))
            state = State()
            state.magic, state.version, state.size = MAGIC, VERSION, ctypes.sizeof(State)
            state.gpu_count = state.order_count = len(specs)
            state.order[: len(specs)] = list(range(len(specs)))
            state.epoch_offset_ns = time.time_ns() - time.monotonic_ns()
            state.refresh_ns = round(refresh_s * 1e9)
            state.sample_period_ns = round(sample_period_s * 1e9)
            state.driver_version = b"595.45.04"
            state.nvml_version = b"13.595.45.04"
            state.cuda_version = 13_020
            out.write(bytes(state))
        draft.rename(path)
        made = cls(path)
        for gpu, spec in zip(made.gpus, specs, strict=True):
            gpu.initialise(spec)
        return made

    def close(self) -> None:
        """Lets go of the lock's descriptor. The mapping lives as long as somebody uses it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @contextmanager
    def exclusive(self) -> Iterator[State]:
        """Keeps other writers out, in this process and others."""
        with self._threads:
            if self._depth == 0:  # the file's lock does not count, so we do
                fcntl.flock(self._file, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield self._state
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def sample_period_ns(self) -> int:
        """The window of utilization in ns."""
        return int(self._state.sample_period_ns)

    def order(self, slots: Sequence[int]) -> None:
        """The enumeration order from the next first nvmlInit on; a slot left out is not seen."""
        with self.exclusive() as state:
            state.order[: len(slots)] = list(slots)
            state.order_count = len(slots)

    def fail(
        self, function: str, code: int, *, gpu: int | None = None, times: int | None = None
    ) -> int:
        """Makes a function return an nvmlReturn_t; "" is every function that asks the driver.

        `gpu` is a slot, `times` how many calls to hit. Returns a number for `clear`.
        """
        return self._arm(function, code, 0, gpu, times)

    def hang(
        self,
        function: str,
        *,
        seconds: float | None = None,
        code: int = 0,
        gpu: int | None = None,
        times: int | None = None,
    ) -> int:
        """Makes a function block for a while, or until cleared; then it answers or fails."""
        block_ns = FOREVER if seconds is None else round(seconds * 1e9)
        return self._arm(function, code, block_ns, gpu, times)

    def _arm(
        self, function: str, code: int, block_ns: int, gpu: int | None, times: int | None
    ) -> int:
        with self.exclusive() as state:
            number = next(i for i in range(FAULTS) if not state.faults[i].active)
            fault = state.faults[number]
            fault.function = function.encode()
            fault.code, fault.block_ns = code, block_ns
            fault.gpu = ANY_GPU if gpu is None else gpu
            fault.remaining = -1 if times is None else times
            fault.serial += 1
            fault.active = 1
            state.fault_count += 1
        return number

    def clear(self, number: int | None = None) -> None:
        """Ends one fault, or all of them, and lets blocked calls go on."""
        with self.exclusive() as state:
            for i in range(FAULTS) if number is None else (number,):
                if state.faults[i].active:
                    state.faults[i].active = 0
                    state.fault_count -= 1
        self.wake()

    def event(self, kind: int, data: int, gpu: int) -> None:
        """Queues an event of an nvmlEventType bit for every event set that registered for it."""
        with self.exclusive() as state:
            entry = state.events[state.event_head % EVENTS]
            entry.type, entry.data, entry.gpu = kind, data, gpu
            entry.gpu_instance = entry.compute_instance = ABSENT
            state.event_head += 1
        self.wake()

    def wake(self) -> None:
        """Wakes every call that waits for an event or for the end of a fault."""
        with self.exclusive() as state:
            state.wake = (state.wake + 1) & 0xFFFFFFFF
        number = _FUTEX_CALL.get(platform.machine())
        if number is not None:
            address = ctypes.addressof(self._state) + State.wake.offset
            ctypes.CDLL(None).syscall(
                ctypes.c_long(number),
                ctypes.c_void_p(address),
                _FUTEX_WAKE,
                _EVERYBODY,
                None,
                None,
                0,
            )

    def calls(self) -> dict[str, int]:
        """How often each function was called by now, by all processes that use this state."""
        rows = ((row.function.decode(), int(row.count)) for row in self._state.calls)
        return {name: count for name, count in rows if count}

    def wait_blocked(self, count: int = 1, *, timeout_s: float = 10.0) -> None:
        """Waits until that many calls are blocked by a fault; TimeoutError if they are not."""
        end = time.monotonic() + timeout_s
        while int(self._state.blocked) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"{self._state.blocked} of {count} calls are blocked")
            time.sleep(0.005)
