"""What a trainer may call; all of it does nothing, at no cost, where the probe is not on.

The rest of the probe is loaded when torch is, or with the first phase or step that is told.
"""

from __future__ import annotations

import os

from whyidle_probe.finder import install
from whyidle_probe.guard import OURS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from whyidle_probe.recorder import Recorder


class _Process:
    """The probe of this process: hooks are process-wide, and so is it."""

    __slots__ = ("folder", "made", "on")

    def __init__(self) -> None:
        self.on = False
        self.folder: str | None = None
        self.made: Recorder | None = None

    def recorder(self) -> Recorder | None:
        """Return the recorder, made if the probe is on; None if it is not."""
        if self.made is None and self.on:
            from whyidle_probe import recorder

            self.made = recorder.make(self.folder)
        return self.made

    def hook(self, module: ModuleType) -> None:
        """Hook a module of torch that has been imported."""
        from whyidle_probe import torch_hooks

        made = self.recorder()
        if made is not None:
            torch_hooks.hook(module, made)


_PROCESS = _Process()


def start(folder: str | None = None) -> None:
    """Switch the probe on; pages go to `folder`, else $WHYIDLE_PROBE_DIR, else the service's.

    A second call does nothing. Never raises: where pages cannot be made the agent says why.
    """
    if _PROCESS.on:
        return
    _PROCESS.on = True
    try:
        _PROCESS.folder = None if folder is None else os.path.abspath(folder)  # noqa: PTH100
        install(_PROCESS.hook)
    except (OSError, *OURS):
        return  # a Python that is not like ours: the trainer goes on without


def page_path() -> str | None:
    """Return the path of this process's page, None if it has none (yet)."""
    made = _PROCESS.made
    return None if made is None or made.page is None else made.page.path


def step() -> None:
    """End a training step, where no torch optimizer tells; then only these calls count as steps."""
    recorder = _PROCESS.recorder()
    if recorder is None:
        return
    try:
        recorder.tell_step()
    except OURS:
        recorder.failed()


def pipeline(stage: int, stages: int, batches: int, schedule: str = "1f1b") -> None:
    """Tell which pipeline stage (from 0) of how many this process runs, in how many micro-batches.

    `schedule`: 1f1b, gpipe or other. Schedules of torch.distributed.pipelining tell it themselves.
    """
    recorder = _PROCESS.recorder()
    if recorder is None:
        return
    try:
        recorder.pipeline(int(stage), int(stages), int(batches), str(schedule))
    except OURS:
        recorder.failed()


class Phase:
    """A stretch of time with a name, as a context."""

    __slots__ = ("_entered", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._entered: tuple[int, int, bool] | None = None

    def __enter__(self) -> None:
        recorder = _PROCESS.recorder()
        if recorder is not None:
            try:
                self._entered = recorder.enter(self._name)
            except OURS:
                recorder.failed()

    def __exit__(self, *raised: object) -> None:
        recorder, entered, self._entered = _PROCESS.made, self._entered, None
        if recorder is not None and entered is not None:
            try:
                recorder.leave(entered)
            except OURS:
                recorder.failed()


def phase(name: str) -> Phase:
    """Return a context for a phase, such as "evaluation", "checkpoint_save", "logging", "setup".

    Batches fetched inside are kept apart from those of steps. Eight other names may be told; the
    first 30 bytes of a name are kept.
    """
    return Phase(name)
