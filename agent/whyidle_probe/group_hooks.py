"""Watches torch.distributed: calls on process groups, waits for their works, gradients of DDP.

What is wrapped are the methods that all functions of torch.distributed end in, so that those
functions stay what they are: compilers and torch itself compare them. Calls that torch makes in C++
are not seen: functional collectives, and DDP's reducer on GPUs.

Source: torch/csrc/distributed/c10d/init.cpp and torch/nn/parallel/distributed.py, 1.10 to 2.13.
Names that a version lacks are left alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from time import monotonic_ns
from types import ModuleType
from typing import Any

from whyidle_probe import layout as at
from whyidle_probe.guard import OURS
from whyidle_probe.recorder import Recorder

_METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "_end_coalescing": "coalesced",
}


def hook(module: ModuleType, recorder: Recorder) -> None:
    """Hook the classes that torch.distributed.distributed_c10d works with."""
    group_type: Any = module.ProcessGroup
    work_type: Any = getattr(module, "Work", None) or sys.modules["torch"]._C._distributed_c10d.Work
    for method, name in _METHODS.items():
        original = getattr(group_type, method, None)
        if original is not None:
            setattr(group_type, method, _call(original, at.OPERATIONS.index(name), recorder))
    work_type.wait = _wait(work_type.wait, recorder)


def _call(original: Callable[..., Any], operation: int, recorder: Recorder) -> Callable[..., Any]:
    called = recorder.collectives.called

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = monotonic_ns()
        work = original(self, *args, **kwargs)
        try:
            called(self, operation, began, args, work)
        except OURS:
            recorder.failed()
        return work

    return call


def _wait(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    waits, waited = recorder.collectives.waits, recorder.collectives.waited

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        call, began = None, monotonic_ns()
        try:
            call = waits(self, began)
        except OURS:
            recorder.failed()
        if call is None:
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:
            try:
                waited(call, began)
            except OURS:
                recorder.failed()

    return wait


def hook_ddp(module: ModuleType, recorder: Recorder) -> None:
    """Take note of DDP modules whose backward pass waits for others in the thread that calls it.

    On GPUs the reducer only launches, and nothing of backward() is touched.
    """
    kind: Any = module.DistributedDataParallel
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            if self.device_type == "cpu":
                _watch_backward(recorder)
                recorder.collectives.modules.add(self)
        except OURS:
            recorder.failed()

    kind.__init__ = __init__


def _watch_backward(recorder: Recorder) -> None:
    """Wrap Tensor.backward, once there is a module for which that tells something."""
    tensor: Any = sys.modules["torch"].Tensor
    original = tensor.backward
    if hasattr(original, "_whyidle"):
        return

    @functools.wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = None
        try:
            began = recorder.collectives.backward_begins()
        except OURS:
            recorder.failed()
        if began is None:
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:
            try:
                recorder.collectives.backward_ended(began)
            except OURS:
                recorder.failed()

    backward._whyidle = True  # type: ignore[attr-defined] # a mark, for the line above
    tensor.backward = backward
