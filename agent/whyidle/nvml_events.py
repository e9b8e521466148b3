"""NVML's event set: what the driver reports by itself after it was asked to, such as an Xid.

Events have no time and no history, and a set tells each of them once. Waiting is for 0 ms: a call
takes what is there. Source: nvml.h, nvmlEventSetWait_v2.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml

from whyidle.host import Answer, NvmlError
from whyidle.nvml_device import Device, Events, Open, forget_events
from whyidle.nvml_fast import SUCCESS, check
from whyidle.nvml_rare import ask

XID = 8  # nvmlEventTypeXidCriticalError
_TIMEOUT = 10
_GPU_IS_LOST = 15
# A storm must not hold a run up; the rest comes with the next.
_LIMIT = 64
# What says "this is of no GPU instance".
_NO_INSTANCE = 0xFFFFFFFF


def take(opened: Open) -> Answer:
    """Return ((uuid, xid, GPU instance or None), ...) of Xids since the last call.

    A GPU that is lost makes a set useless: the next call makes one of the others. Raises NvmlError.
    """
    if opened.events is None:
        opened.events = Events(set=ask("EventSetCreate", pynvml.nvmlEventSetCreate))
    events = opened.events
    for uuid, device in opened.devices.items():
        if uuid not in events.tried and device.instance is None:
            events.tried.add(uuid)
            _listen(events, uuid, device)
    wait = opened.library.require("nvmlEventSetWait_v2", "nvmlEventSetWait")
    found: list[Answer] = []
    data = pynvml.c_nvmlEventData_t()
    while len(found) < _LIMIT:
        code = wait(events.set, ctypes.byref(data), 0)
        if code == _TIMEOUT:
            break
        if code == _GPU_IS_LOST:
            forget_events(opened)
            break
        if code != SUCCESS and found:
            break  # what was taken is not given again; the next call meets the error
        check(code, "EventSetWait")
        # Other kinds of events carry 0.
        if data.eventType == XID and data.eventData:
            instance = None if data.gpuInstanceId == _NO_INSTANCE else int(data.gpuInstanceId)
            uuid_ = events.uuids.get(_address(data.device))
            found.append((uuid_, int(data.eventData), instance))
    return tuple(found)


def _listen(events: Events, uuid: str, device: Device) -> None:
    try:
        ask("RegisterEvents", pynvml.nvmlDeviceRegisterEvents, device.handle, XID, events.set)
    except NvmlError:
        return  # not on this GPU: the others of the set are listened to, and the kernel log tells
    events.uuids[_address(device.handle)] = uuid


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
