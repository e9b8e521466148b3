"""What belongs to an open NVML library: its devices, their buffers, and how they are let go of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from whyidle.host import Answer, Argument, NvmlError
from whyidle.nvml_fast import (
    ABSENT,
    NOT_SUPPORTED,
    PAIR_SAMPLES,
    Buffer,
    Fields,
    Gpm,
    Library,
    Ring,
)
from whyidle.nvml_rare import ask


@dataclass(slots=True, kw_only=True)
class Device:
    """A GPU or MIG device: its handle and the buffers that are kept for it."""

    handle: Any
    parent: Any | None = None
    instance: int | None = None
    gpm: Gpm | None = None
    # Of some seconds each, with samples of its own.
    pipes: Gpm | None = None
    # Asked once: the answer does not change while the handle is good.
    gpm_refused: NvmlError | None = None
    fields: dict[tuple[Argument, ...], Fields] = field(default_factory=dict)
    rings: dict[int, Ring] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Events:
    """An event set, and the UUIDs by handle of the GPUs that it was told to listen to."""

    set: Any
    uuids: dict[int, str] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Open:
    """An open library and what belongs to it: all of it goes with a reload of the driver."""

    library: Library
    devices: dict[str, Device] = field(default_factory=dict)
    lost: dict[str, tuple[int, NvmlError]] = field(default_factory=dict)
    # Windows of GPUs that failed after them, by UUID.
    gpm_rest: dict[str, tuple[Answer, ...]] = field(default_factory=dict)
    gpus: tuple[Answer, ...] = ()
    listed_ns: int | None = None
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    utilization: Buffer = field(default_factory=lambda: Buffer(pynvml.c_nvmlUtilization_t()))
    memory: Buffer = field(default_factory=lambda: Buffer(_memory_v2()))
    memory_v1: Buffer = field(default_factory=lambda: Buffer(pynvml.c_nvmlMemory_t()))
    events: Events | None = None


def _memory_v2() -> Any:
    memory = pynvml.c_nvmlMemory_v2_t()
    memory.version = pynvml.nvmlMemory_v2
    return memory


def function(opened: Open, call: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return the library's function that answers `call`; raises NvmlError where it has none."""
    found = opened.functions.get(call)
    if found is None:
        found = opened.functions[call] = opened.library.require(*names)
    return found


def drop(opened: Open, uuid: str) -> None:
    """Let go of a device: its samples are freed."""
    device = opened.devices.pop(uuid, None)
    if device is None:
        return
    for gpm in (device.gpm, device.pipes):
        if gpm is not None:
            gpm.free()


def close(opened: Open) -> None:
    """Let go of all devices, of the event set and of the library. Never raises."""
    for uuid in list(opened.devices):
        drop(opened, uuid)
    forget_events(opened)
    opened.library.close()


def forget_events(opened: Open) -> None:
    """Give the event set back; the next question makes another. Never raises."""
    if opened.events is not None:
        release = opened.library.function("nvmlEventSetFree")
        if release is not None:
            release(opened.events.set)
        opened.events = None


def gpm_of(opened: Open, device: Device) -> Gpm:
    """Return a device's GPM; raises NvmlError where it has none."""
    if device.gpm is None:
        device.gpm = _make_gpm(opened, device)
    return device.gpm


def pipes_of(opened: Open, device: Device, metrics: tuple[int, ...]) -> Gpm | None:
    """Return what tells a device's pipes; None until its GPM has been seen to work."""
    if device.gpm is None or not device.gpm.worked:
        return None
    if device.pipes is None:
        sampled = device.handle if device.instance is None else device.parent
        device.pipes = Gpm(opened.library, sampled, device.instance, metrics, samples=PAIR_SAMPLES)
    return device.pipes


def _make_gpm(opened: Open, device: Device) -> Gpm:
    if device.gpm_refused is not None:
        raise device.gpm_refused
    sampled = device.handle if device.instance is None else device.parent
    try:
        support = ask("GpmQueryDeviceSupport", pynvml.nvmlGpmQueryDeviceSupport, sampled)
        if not support.isSupportedDevice:
            raise NvmlError(NOT_SUPPORTED, "gpm", "Not Supported")
        return Gpm(opened.library, sampled, device.instance)
    except NvmlError as error:
        if error.code in ABSENT:
            device.gpm_refused = error
        raise
