"""NVML questions that are asked rarely, through nvidia-ml-py itself: identity, lists, processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pynvml

from whyidle.host import Answer, NvmlError
from whyidle.nvml_fast import ABSENT, error_text

_UNKNOWN = 999
# A handle that cannot be had because the GPU behind it is ill: the others are listed all the same.
_ILL = frozenset({15, 16, 28, _UNKNOWN})
# A process's memory where the driver does not know it, as under WDDM or MPS.
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF

CONTEXTS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "compute": pynvml.nvmlDeviceGetComputeRunningProcesses,
        "mps": pynvml.nvmlDeviceGetMPSComputeRunningProcesses,
    }
)
SYSTEM: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "DriverVersion": pynvml.nvmlSystemGetDriverVersion,
        "NVMLVersion": pynvml.nvmlSystemGetNVMLVersion,
    }
)
RARE: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "CudaComputeCapability": pynvml.nvmlDeviceGetCudaComputeCapability,
        "MigMode": lambda handle: pynvml.nvmlDeviceGetMigMode(handle)[0],
        "Name": pynvml.nvmlDeviceGetName,
        "PciBusId": lambda handle: pynvml.nvmlDeviceGetPciInfo(handle).busId,
        "Serial": pynvml.nvmlDeviceGetSerial,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A GPU or MIG device of a list; a MIG device has its parent's uuid, handle and instance."""

    uuid: str
    index: int
    handle: Any
    parent: str | None = None
    parent_handle: Any | None = None
    instance: int | None = None


def ask(call: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of nvidia-ml-py returns; raises NvmlError for all that it raises."""
    try:
        return function(*args)
    except pynvml.NVMLError as error:
        raise NvmlError(int(error.value), call, error_text(int(error.value))) from None
    except UnicodeDecodeError:
        # A GPU that falls off the bus answers with bytes that are no text.
        raise NvmlError(_UNKNOWN, call, "the answer is garbled") from None


def plain(found: Any) -> Answer:
    """Return an answer of nvidia-ml-py as a plain value."""
    if isinstance(found, tuple | list):
        return tuple(plain(item) for item in found)
    if isinstance(found, bytes):
        return found.decode("utf-8", "replace")
    if found is None or isinstance(found, bool | int | float | str):
        return found
    raise TypeError(f"{found!r} is no plain value")


def memory_bytes(value: Any) -> int | None:
    """Return a process's device memory in bytes; None where the driver does not know it."""
    return None if value is None or int(value) == _NOT_AVAILABLE else int(value)


def devices() -> Iterator[Listed]:
    """Yield every GPU, each followed by its MIG devices; raises NvmlError if none can be listed."""
    for index in range(ask("Count", pynvml.nvmlDeviceGetCount)):
        try:
            handle = ask("HandleByIndex", pynvml.nvmlDeviceGetHandleByIndex, index)
            uuid = str(plain(ask("UUID", pynvml.nvmlDeviceGetUUID, handle)))
        except NvmlError as error:
            if error.code in _ILL:
                continue  # who knew it before asks by UUID and is told what is wrong
            raise
        yield Listed(uuid=uuid, index=index, handle=handle)
        yield from _mig_devices(uuid, index, handle)


def _mig_devices(parent: str, index: int, handle: Any) -> Iterator[Listed]:
    try:
        if not ask("MigMode", pynvml.nvmlDeviceGetMigMode, handle)[0]:
            return
        slots = ask("MaxMigDeviceCount", pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)
    except NvmlError as error:
        if error.code in ABSENT:
            return
        raise
    for slot in range(slots):
        try:
            mig = ask("Mig", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
            uuid = str(plain(ask("UUID", pynvml.nvmlDeviceGetUUID, mig)))
            instance = int(ask("GpuInstanceId", pynvml.nvmlDeviceGetGpuInstanceId, mig))
        except NvmlError:
            continue  # an empty slot, or an instance that is being taken apart
        yield Listed(
            uuid=uuid,
            index=index,
            handle=mig,
            parent=parent,
            parent_handle=handle,
            instance=instance,
        )
