"""NVML for `Host.nvml`: the vocabulary of questions, and who answers them.

Questions are named after NVML's functions, without the words nvmlDeviceGet, and name GPUs by UUID,
because indices shuffle when a GPU is lost. Answers are decoded, not interpreted: units are NVML's.

    gpus                          ((uuid, index, uuid of the parent or None), ...) MIG devices too
    gpm, uuid                     (t0_ns, t1_ns, values of GPM_METRICS) or None: see nvml_fast.Gpm
    gpm_sample, uuid...           for each whether a sample ended a window, which gpm_windows will
                                  tell, or (code, call, text) where NVML refused it
    gpm_windows, uuid             the windows since it was last asked, each as that of gpm
    gpm_values, uuid, id...       further metrics of the last window, None if there is none
    gpm_worked, uuid              whether gpm has ever answered; None: not tried
    xids                          ((uuid, xid, GPU instance), ...) since last asked: nvml_events
    FieldValues, uuid, id...      a number, None or (code,) for each
    LinkFieldValues, uuid, link, id...  the same of one NVLink
    Samples, uuid, kind, us       ((timestamp in us, value), ...) of a ring since a timestamp
    UtilizationRates, uuid        (GPU, memory) in percent
    MemoryInfo, uuid              (total, reserved or None, free, used) in bytes
    Processes, uuid, context      ((pid, bytes or None), ...) of compute or mps
    ProcessUtilization, uuid, us  ((pid, SM percent, timestamp in us), ...) since a timestamp
    and the single values of _UINTS, _ULONGS, nvml_rare.RARE and nvml_rare.SYSTEM
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType

import pynvml

from whyidle.clock import NS_PER_S, Clock
from whyidle.host import Answer, Argument, NvmlError, NvmlUnavailableError
from whyidle.nvml_device import Device, Open, close, drop, function, gpm_of, pipes_of
from whyidle.nvml_events import take
from whyidle.nvml_fast import Fields, Library, Ring, check
from whyidle.nvml_rare import CONTEXTS, RARE, SYSTEM, ask, devices, memory_bytes, plain

# GPUs come and go with resets, MIG changes and losses: looked for this often.
_LIST_EVERY_NS = 10 * NS_PER_S
# A driver that is absent is asked again this often: opening costs milliseconds when it fails.
_RETRY_NS = 10 * NS_PER_S

_UNINITIALIZED = 1
_NOT_SUPPORTED = 3
_NOT_FOUND = 6
_DRIVER_NOT_LOADED = 9
_LIBRARY_NOT_FOUND = 12
_GPU_IS_LOST = 15
_RESET_REQUIRED = 16
_VERSION_MISMATCH = 18
_GPU_NOT_FOUND = 28
# The library must be opened anew; handles of before mean nothing.
_GONE = frozenset({_UNINITIALIZED, _DRIVER_NOT_LOADED, _VERSION_MISMATCH})
# This GPU's handle means nothing any more, and looking for another is slow while it is ill.
_LOST = frozenset({_GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND})

# Getters of one unsigned int, with a number of further arguments; old drivers' names follow.
_UINTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: (f"nvmlDeviceGet{name}",)
        for name in (
            "Architecture",
            "ClockInfo",
            "CurrPcieLinkGeneration",
            "CurrPcieLinkWidth",
            "EnforcedPowerLimit",
            "GpuInstanceId",
            "MaxClockInfo",
            "MaxMigDeviceCount",
            "MaxPcieLinkGeneration",
            "MaxPcieLinkWidth",
            "MinorNumber",
            "NumaNodeId",
            "NvLinkState",
            "PcieReplayCounter",
            "PerformanceState",
            "PowerUsage",
            "Temperature",
        )
    }
)
_ULONGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "CurrentClocksEventReasons": (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        ),
        "TotalEnergyConsumption": ("nvmlDeviceGetTotalEnergyConsumption",),
    }
)


class Nvml:
    """Answers NVML questions on one thread; opens the library at the first one.

    `on_processes` hears of the processes that hold a context on a GPU whenever they are listed,
    `on_gpm` whether GPM tells of a GPU, when that changes.
    """

    __slots__ = (
        *("_answers", "_clock", "_failed", "_failed_ns", "_gpm_told", "_on_gpm"),
        *("_on_processes", "_open"),
    )

    def __init__(
        self,
        clock: Clock,
        *,
        on_processes: Callable[[str, Iterable[int]], None] | None = None,
        on_gpm: Callable[[str, bool], None] | None = None,
    ) -> None:
        self._clock = clock
        self._on_gpm = on_gpm
        self._gpm_told: dict[Argument, bool] = {}
        self._on_processes = on_processes
        self._open: Open | None = None
        self._failed: Exception | None = None
        self._failed_ns = 0
        self._answers: dict[str, Callable[..., Answer]] = {
            "FieldValues": self._field_values,
            "LinkFieldValues": self._link_field_values,
            "MemoryInfo": self._memory,
            "ProcessUtilization": self._process_utilization,
            "Processes": self._processes,
            "Samples": self._samples,
            "UtilizationRates": self._utilization,
            "gpm": self._gpm,
            "gpm_pipes": self._gpm_pipes,
            "gpm_sample": self._gpm_sample,
            "gpm_windows": self._gpm_windows,
            "gpm_values": self._gpm_values,
            "gpm_worked": self._gpm_worked,
            "gpus": self._gpus,
            "xids": self._xids,
        }

    def answer(self, call: str, *args: Argument) -> Answer:
        """Return the answer of `call`; raises NvmlError, NvmlUnavailableError, KeyError."""
        opened = self._opened()
        try:
            composite = self._answers.get(call)
            if composite is not None:
                return composite(opened, *args)
            if call in SYSTEM:
                return plain(ask(call, SYSTEM[call]))
            device = self._device(opened, args[0])
            if call in RARE:
                return plain(ask(call, RARE[call], device.handle, *map(int, args[1:])))
            return self._single(opened, device, call, args[1:])
        except NvmlError as error:
            self._give_up(opened, error, args)
            raise

    def close(self) -> None:
        """Free the sample buffers and let go of the devices; a later question opens anew."""
        if self._open is not None:
            close(self._open)
            self._open = None

    def _opened(self) -> Open:
        if self._open is not None:
            return self._open
        now_ns = self._clock.mono_ns()
        if self._failed is not None and now_ns - self._failed_ns < _RETRY_NS:
            raise self._failed
        try:
            self._open = Open(library=Library())
        except NvmlError as error:
            self._failed, self._failed_ns = error, now_ns
            if error.code == _LIBRARY_NOT_FOUND:
                self._failed = NvmlUnavailableError("no NVIDIA driver: libnvidia-ml.so.1 not found")
            raise self._failed from None
        self._failed = None
        return self._open

    def _give_up(self, opened: Open, error: NvmlError, args: tuple[Argument, ...]) -> None:
        """Let go of what an error makes worthless: a lost GPU's handle, or the whole library."""
        if error.code in _GONE:
            self.close()
            self._failed, self._failed_ns = error, self._clock.mono_ns()
            if error.code == _VERSION_MISMATCH:
                # nvidia-ml-py never unloads the old library, so only a new process gets the new.
                error.text = "the driver was replaced while in use: restart the agent"
        elif error.code in _LOST and args:
            uuid = str(args[0])
            drop(opened, uuid)
            opened.lost[uuid] = (self._clock.mono_ns(), error)

    def _device(self, opened: Open, uuid: Argument) -> Device:
        name = str(uuid)
        device = opened.devices.get(name)
        if device is not None:
            return device
        lost = opened.lost.get(name)
        if lost is not None and self._clock.mono_ns() - lost[0] < _RETRY_NS:
            raise NvmlError(lost[1].code, "HandleByUUID", lost[1].text)
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        except pynvml.NVMLError as error:
            found = NvmlError(int(error.value), "HandleByUUID", str(error))
            opened.lost[name] = (self._clock.mono_ns(), found)
            raise found from None
        opened.lost.pop(name, None)
        device = opened.devices[name] = Device(handle=handle)
        return device

    def _single(
        self, opened: Open, device: Device, call: str, args: tuple[Argument, ...]
    ) -> Answer:
        if call in _UINTS:
            getter = function(opened, call, _UINTS[call])
            numbers = tuple(int(arg) for arg in args)
            return opened.library.uint(getter, call, device.handle, *numbers)
        getter = function(opened, call, _ULONGS[call])
        return opened.library.ulong(getter, call, device.handle)

    def _gpus(self, opened: Open) -> Answer:
        now_ns = self._clock.mono_ns()
        if opened.listed_ns is None or now_ns - opened.listed_ns >= _LIST_EVERY_NS:
            found = tuple(devices())
            for name in opened.devices.keys() - {gpu.uuid for gpu in found}:
                drop(opened, name)
            for gpu in found:
                device = opened.devices.get(gpu.uuid)
                if device is not None and device.instance != gpu.instance:
                    drop(opened, gpu.uuid)
                    device = None
                if device is None:
                    opened.devices[gpu.uuid] = Device(
                        handle=gpu.handle, parent=gpu.parent_handle, instance=gpu.instance
                    )
                    opened.lost.pop(gpu.uuid, None)
            opened.gpus = tuple((gpu.uuid, gpu.index, gpu.parent) for gpu in found)
            opened.listed_ns = now_ns
        return opened.gpus

    def _gpm(self, opened: Open, uuid: Argument) -> Answer:
        try:
            device = self._device(opened, uuid)
            window = gpm_of(opened, device).window(self._clock)
        except NvmlError:
            self._tell_gpm(uuid, False)
            raise
        if window is not None:
            self._tell_gpm(uuid, True)
        return window

    def _gpm_pipes(self, opened: Open, uuid: Argument, *ids: Argument) -> Answer:
        device = self._device(opened, uuid)
        pipes = pipes_of(opened, device, tuple(map(int, ids)))
        return None if pipes is None else pipes.window(self._clock)

    def _gpm_sample(self, opened: Open, *uuids: Argument) -> Answer:
        found: list[Answer] = []
        for uuid in map(str, uuids):
            device = opened.devices.get(uuid)
            gpm = None if device is None else device.gpm
            try:
                if gpm is None:
                    gpm = gpm_of(opened, self._device(opened, uuid))
                found.append(gpm.sample(self._clock))
            except NvmlError as error:
                self._tell_gpm(uuid, False)
                if gpm is not None:
                    # A GPU that is lost takes its samples with it: what they tell is kept.
                    with suppress(NvmlError):
                        opened.gpm_rest[uuid] = gpm.windows()
                self._give_up(opened, error, (uuid,))
                found.append((error.code, error.call, error.text))
                if self._open is None:
                    raise  # the library has gone, and all GPUs with it
        return tuple(found)

    def _gpm_windows(self, opened: Open, uuid: Argument) -> Answer:
        rest = opened.gpm_rest.pop(str(uuid), ())
        device = opened.devices.get(str(uuid))
        if device is None or device.gpm is None:
            return rest
        windows = device.gpm.windows()
        if windows:
            self._tell_gpm(uuid, True)
        return (*rest, *windows)

    def _tell_gpm(self, uuid: Argument, works: bool) -> None:
        if self._on_gpm is not None and self._gpm_told.get(uuid) is not works:
            self._gpm_told[uuid] = works
            self._on_gpm(str(uuid), works)

    def _gpm_values(self, opened: Open, uuid: Argument, *ids: Argument) -> Answer:
        device = self._device(opened, uuid)
        return gpm_of(opened, device).values(tuple(map(int, ids)))

    def _gpm_worked(self, opened: Open, uuid: Argument) -> Answer:
        device = self._device(opened, uuid)
        if device.gpm_refused is not None:
            return False
        return None if device.gpm is None else device.gpm.worked

    def _field_values(self, opened: Open, uuid: Argument, *ids: Argument) -> Answer:
        device = self._device(opened, uuid)
        fields = device.fields.get(ids)
        if fields is None:
            numbers = [int(number) for number in ids]
            fields = device.fields[ids] = Fields(opened.library, device.handle, numbers)
        return fields.read()

    def _link_field_values(
        self, opened: Open, uuid: Argument, link: Argument, *ids: Argument
    ) -> Answer:
        device = self._device(opened, uuid)
        key = ("link", link, *ids)
        fields = device.fields.get(key)
        if fields is None:
            numbers = [int(number) for number in ids]
            fields = device.fields[key] = Fields(
                opened.library, device.handle, numbers, link=int(link)
            )
        return fields.read()

    def _samples(self, opened: Open, uuid: Argument, kind: Argument, us: Argument) -> Answer:
        device = self._device(opened, uuid)
        ring = device.rings.get(int(kind))
        if ring is None:
            ring = device.rings[int(kind)] = Ring(opened.library, device.handle, int(kind))
        return ring.read(int(us))

    def _xids(self, opened: Open) -> Answer:
        self._gpus(opened)  # a set listens to the GPUs that are known
        return take(opened)

    def _utilization(self, opened: Open, uuid: Argument) -> Answer:
        device = self._device(opened, uuid)
        getter = function(opened, "UtilizationRates", ("nvmlDeviceGetUtilizationRates",))
        check(getter(device.handle, opened.utilization.ref), "UtilizationRates")
        gpu, memory = struct.unpack("<II", opened.utilization.bytes)
        return (int(gpu), int(memory))

    def _memory(self, opened: Open, uuid: Argument) -> Answer:
        device = self._device(opened, uuid)
        newer = opened.library.function("nvmlDeviceGetMemoryInfo_v2")
        if newer is not None:
            check(newer(device.handle, opened.memory.ref), "MemoryInfo")
            words = struct.unpack_from("<QQQQ", opened.memory.bytes, 8)
            return tuple(int(word) for word in words)
        getter = function(opened, "MemoryInfo", ("nvmlDeviceGetMemoryInfo",))
        check(getter(device.handle, opened.memory_v1.ref), "MemoryInfo")
        total, free, used = struct.unpack("<QQQ", opened.memory_v1.bytes)
        # The first version counts the reserve as used: what is used cannot be told.
        return (int(total), None, int(free), int(used))

    def _processes(self, opened: Open, uuid: Argument, context: Argument) -> Answer:
        device = self._device(opened, uuid)
        found = ask("Processes", CONTEXTS[str(context)], device.handle)
        processes = tuple((int(p.pid), memory_bytes(p.usedGpuMemory)) for p in found)
        if self._on_processes is not None:
            self._on_processes(f"{uuid} {context}", [pid for pid, _ in processes])
        return processes

    def _process_utilization(self, opened: Open, uuid: Argument, since_us: Argument) -> Answer:
        device = self._device(opened, uuid)
        try:
            found = ask(
                "ProcessesUtilizationInfo",
                lambda handle: pynvml.nvmlDeviceGetProcessesUtilizationInfo(handle, int(since_us)),
                device.handle,
            )
        except NvmlError as error:
            # A ring that has run dry, and nvidia-ml-py's word for a list of none.
            if error.code in (0, _NOT_FOUND):
                return ()
            raise
        return tuple((int(s.pid), int(s.smUtil), int(s.timeStamp)) for s in found)
