"""NVML questions that are asked rarely, through nvidia-ml-py itself: identity, lists, processes."""

from __future__ import annotations

import ctypes
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pynvml

from whyidle.host import Answer, NvmlError
from whyidle.nvml_fast import ABSENT, error_text

_UNKNOWN = 999
_VERSION_MISMATCH = 25
# nvmlGpuFabricInfo_v3_t and _v2_t: version, cluster, status, clique, state, health mask, summary.
_FABRIC = ((3, struct.Struct("<I16sIIIIB3x")), (2, struct.Struct("<I16sIIII")))
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


def _attributes(handle: Any) -> tuple[int, ...]:
    """Return SMs, GPU instance slices, compute instance slices and MiB (nvmlDeviceAttributes_t)."""
    found = pynvml.nvmlDeviceGetAttributes(handle)
    return (
        int(found.multiprocessorCount),
        int(found.gpuInstanceSliceCount),
        int(found.computeInstanceSliceCount),
        int(found.memorySizeMB),
    )


def _fabric_info(handle: Any) -> tuple[Any, ...]:
    """Return cluster UUID, status, clique, state, health mask and summary (None before v3).

    Source: nvmlGpuFabricInfoV_t, packed here because bindings differ in what they know of it.
    """
    for version, layout in _FABRIC:
        buffer = ctypes.create_string_buffer(layout.size)
        struct.pack_into("<I", buffer, 0, layout.size | version << 24)
        try:
            pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(buffer))
        except pynvml.NVMLError as error:
            if int(error.value) != _VERSION_MISMATCH or version == _FABRIC[-1][0]:
                raise
            continue
        _, cluster, status, clique, state, mask, *summary = layout.unpack(buffer.raw)
        name = str(uuid.UUID(bytes=cluster)) if any(cluster) else None
        return (name, status, clique, state, mask, summary[0] if summary else None)
    raise AssertionError("the last version either answers or raises")


RARE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "Attributes": _attributes,
        "ComputeInstanceId": pynvml.nvmlDeviceGetComputeInstanceId,
        "CudaComputeCapability": pynvml.nvmlDeviceGetCudaComputeCapability,
        "FabricInfo": _fabric_info,
        "MigMode": lambda handle: pynvml.nvmlDeviceGetMigMode(handle)[0],
        "Name": pynvml.nvmlDeviceGetName,
        "NvLinkRemoteDeviceType": pynvml.nvmlDeviceGetNvLinkRemoteDeviceType,
        "NvLinkRemotePciBusId": lambda handle, link: (
            pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
        ),
        "PciBusId": lambda handle: pynvml.nvmlDeviceGetPciInfo(handle).busId,
        "Serial": pynvml.nvmlDeviceGetSerial,
    }
)


def memory_bytes(value: Any) -> int | None:
    """Return a process's device memory in bytes; None where the driver does not know it."""
    return None if value is None or int(value) == _NOT_AVAILABLE else int(value)


def devices() -> Iterator[Listed]:
    """Yield every GPU, each followed by its MIG devices; raises NvmlError if none can be listed."""
    for index in range(ask("Count", pynvml.nvmlDeviceGetCount)):
        try:
            handle = ask("HandleByIndex", pynvml.nvmlDeviceGetHandleByIndex, index)
            name = str(plain(ask("UUID", pynvml.nvmlDeviceGetUUID, handle)))
        except NvmlError as error:
            if error.code in _ILL:
                continue  # who knew it before asks by UUID and is told what is wrong
            raise
        yield Listed(uuid=name, index=index, handle=handle)
        yield from _mig_devices(name, index, handle)


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
            name = str(plain(ask("UUID", pynvml.nvmlDeviceGetUUID, mig)))
            instance = int(ask("GpuInstanceId", pynvml.nvmlDeviceGetGpuInstanceId, mig))
        except NvmlError:
            continue  # an empty slot, or an instance that is being taken apart
        yield Listed(
            uuid=name,
            index=index,
            handle=mig,
            parent=parent,
            parent_handle=handle,
            instance=instance,
        )
