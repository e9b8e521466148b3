"""Hooks torch when it is imported, or at once where it already is; imports it never.

A finder at the front of `sys.meta_path` lets the others find the module, and adds one call to the
loader of these few modules. Loader, spec and module stay what they were.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from whyidle_probe import layout as at
from whyidle_probe import loader_hooks
from whyidle_probe.recorder import OURS, Recorder

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
    recorder.begin_steps()


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


def _hooks() -> dict[str, Hook]:
    return {
        "torch.optim.optimizer": _optimizers,
        "torch.serialization": _all(
            _timed(at.PHASES[1], "save"),
            _timed(at.PHASES[2], "load"),
        ),
        "torch.distributed.checkpoint.state_dict_saver": _timed(at.PHASES[1], "save", "async_save"),
        "torch.distributed.checkpoint.state_dict_loader": _timed(at.PHASES[2], "load"),
        "torch.utils.data.dataloader": loader_hooks.hook,
    }


def _all(*hooks: Hook) -> Hook:
    def hook(module: ModuleType, recorder: Recorder) -> None:
        for one in hooks:
            one(module, recorder)

    return hook


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; for every other module it costs one look into a dictionary."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._hooks = _hooks()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have, with one call added to its loader."""
        if fullname not in self._hooks:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._attach(spec)
                return spec
        return None

    def _attach(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: ModuleType) -> None:
            # On the instance, which serves this one module: gone again before the module runs.
            loader.__dict__.pop("exec_module", None)
            original(module)
            self.apply(module)

        try:
            loader.exec_module = exec_module
        except (AttributeError, TypeError):
            return  # a loader that takes no attribute is left alone

    def apply(self, module: ModuleType) -> None:
        """Hook a module that has been imported, once."""
        hook = self._hooks.pop(module.__name__, None)
        if hook is None:
            return
        try:
            hook(module, self._recorder)
        except OURS:
            self._recorder.failed()  # an unknown torch: what is not hooked stays unknown

    def apply_present(self) -> None:
        """Hook what has been imported before."""
        for name in tuple(self._hooks):
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            # One that is being imported just now is not complete.
            if module is not None and not getattr(spec, "_initializing", False):
                self.apply(module)


def install(recorder: Recorder) -> None:
    """Begin to watch for torch."""
    finder = Finder(recorder)
    finder.apply_present()
    sys.meta_path.insert(0, finder)
