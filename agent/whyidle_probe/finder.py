"""Waits for torch: the only part of the probe that a Python without torch ever loads.

A finder at the front of `sys.meta_path` lets the others find a module, and adds one call to the
loader of these few modules. Loader, spec and module stay what they were. Nothing of the standard
library is imported here that Python has not loaded by itself.
"""

from __future__ import annotations

import sys

from whyidle_probe.guard import OURS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Apply = Callable[[ModuleType], None]

MODULES = (
    "torch.distributed.checkpoint.state_dict_loader",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.distributed_c10d",
    "torch.distributed.pipelining.schedules",
    "torch.nn.parallel.distributed",
    "torch.optim.optimizer",
    "torch.serialization",
    "torch.utils.data.dataloader",
)


class Finder:
    """Finds nothing itself; for every other module it costs one look into a set."""

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._waiting = set(MODULES)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have, with one call added to its loader."""
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: ModuleSpec | None = finder.find_spec(fullname, path, target)
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
            self._once(module)

        try:
            loader.exec_module = exec_module
        except (AttributeError, TypeError):
            return  # a loader that takes no attribute is left alone

    def _once(self, module: ModuleType) -> None:
        if module.__name__ in self._waiting:
            self._waiting.discard(module.__name__)
            try:
                self._apply(module)
            except OURS:
                return  # an unknown torch: what is not hooked stays unknown

    def apply_present(self) -> None:
        """Hook what has been imported before."""
        for name in MODULES:
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            # One that is being imported just now is not complete.
            if module is not None and not getattr(spec, "_initializing", False):
                self._once(module)


def install(apply: Apply) -> None:
    """Begin to wait; `apply` is called with each of MODULES once it has been imported."""
    finder: Any = Finder(apply)
    finder.apply_present()
    sys.meta_path.insert(0, finder)
