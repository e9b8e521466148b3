"""Hooks modules of torch that have been imported: optimizers, saving and loading, DataLoader."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from whyidle_probe import group_hooks, loader_hooks
from whyidle_probe import layout as at
from whyidle_probe.guard import OURS
from whyidle_probe.recorder import Recorder

Hook = Callable[[ModuleType, Recorder], None]


def _optimizers(module: ModuleType, recorder: Recorder) -> None:
    """Count steps: torch.optim.optimizer.register_optimizer_step_post_hook, torch 2.0 and later."""
    torch = sys.modules["torch"]

    def on_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        # A compiled step is traced: what follows must not be part of its graph.
        is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", None)
        if is_compiling is not None and is_compiling():
            return
        try:
            recorder.optimizer_step(optimizer)
        except OURS:
            recorder.failed()

    module.register_optimizer_step_post_hook(on_step)


def _timed(name: str, *functions: str) -> Hook:
    """Return a hook that makes calls of functions a phase."""

    def hook(module: ModuleType, recorder: Recorder) -> None:
        outer = sys.modules.get("torch")
        for function in functions:
            original = getattr(module, function, None)
            if original is None:
                continue
            wrapped = _phase(original, name, recorder)
            setattr(module, function, wrapped)
            # Where torch was there before us, it has its own name for the function.
            for other in (outer, sys.modules.get(module.__name__.rpartition(".")[0])):
                if getattr(other, function, None) is original:
                    setattr(other, function, wrapped)

    return hook


def _phase(original: Callable[..., Any], name: str, recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        entered = None
        try:
            entered = recorder.enter(name)
        except OURS:
            recorder.failed()
        try:
            return original(*args, **kwargs)
        finally:
            if entered is not None:
                _leave(recorder, entered)

    return timed


def _leave(recorder: Recorder, entered: tuple[int, int, bool]) -> None:
    try:
        recorder.leave(entered)
    except OURS:
        recorder.failed()


# Source: torch/distributed/pipelining/schedules.py, 2.5 to 2.13.
_SCHEDULES = {
    "Schedule1F1B": "1f1b",
    "ScheduleGPipe": "gpipe",
    "ScheduleInterleaved1F1B": "interleaved",
}


def _pipelines(module: ModuleType, recorder: Recorder) -> None:
    """Tell of a pipeline when its schedule is made."""
    for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
        kind: Any = getattr(module, name)
        kind.__init__ = _scheduled(kind.__init__, recorder)


def _scheduled(original: Callable[..., None], recorder: Recorder) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            stages = getattr(self, "_stages", None) or [self._stage]
            stage = stages[0]
            schedule = _SCHEDULES.get(type(self).__name__, "other")
            batches = int(self._n_microbatches)
            recorder.pipeline(
                int(stage.stage_index), int(stage.num_stages), batches, schedule, len(stages)
            )
        except OURS:
            recorder.failed()

    return __init__


def hook(module: ModuleType, recorder: Recorder) -> None:
    """Hook one of finder.MODULES."""
    try:
        _hooks()[module.__name__](module, recorder)
    except OURS:
        recorder.failed()  # an unknown torch: what is not hooked stays unknown


def _hooks() -> dict[str, Hook]:
    return {
        "torch.optim.optimizer": _optimizers,
        "torch.serialization": _all(
            _timed(at.PHASES[1], "save"),
            _timed(at.PHASES[2], "load"),
        ),
        "torch.distributed.checkpoint.state_dict_saver": _timed(at.PHASES[1], "save", "async_save"),
        "torch.distributed.checkpoint.state_dict_loader": _timed(at.PHASES[2], "load"),
        "torch.distributed.distributed_c10d": group_hooks.hook,
        "torch.distributed.pipelining.schedules": _pipelines,
        "torch.nn.parallel.distributed": group_hooks.hook_ddp,
        "torch.utils.data.dataloader": loader_hooks.hook,
    }


def _all(*hooks: Hook) -> Hook:
    def hook(module: ModuleType, recorder: Recorder) -> None:
        for one in hooks:
            one(module, recorder)

    return hook
