"""What a trainer may call; all of it does nothing, at no cost, where the probe is not on."""

from __future__ import annotations

import atexit
import os
from contextlib import AbstractContextManager
from types import TracebackType

from whyidle_probe.recorder import OURS, Recorder, folder_of
from whyidle_probe.torch_hooks import install


class _Started:
    """The one recorder of this process: hooks are process-wide, and so is it."""

    __slots__ = ("recorder",)

    def __init__(self) -> None:
        self.recorder: Recorder | None = None


_STARTED = _Started()


def start(folder: str | None = None) -> None:
    """Switch the probe on; pages go to `folder`, else $WHYIDLE_PROBE_DIR, else the service's.

    A second call does nothing. Never raises: where pages cannot be made the agent says why.
    """
    if _STARTED.recorder is not None:
        return
    try:
        workers = os.environ.get("WHYIDLE_PROBE_WORKERS") == "1"
        recorder = Recorder(folder or folder_of(os.environ), workers=workers)
        os.register_at_fork(after_in_child=recorder.after_fork)
        atexit.register(recorder.close)
        install(recorder)
        _STARTED.recorder = recorder
    except OURS:
        return  # a Python that is not like ours: the trainer goes on without


def page_path() -> str | None:
    """Return the path of this process's page, None if it has none (yet)."""
    recorder = _STARTED.recorder
    return None if recorder is None or recorder.page is None else recorder.page.path


def step() -> None:
    """End a training step, where no torch optimizer tells; then only these calls count as steps."""
    recorder = _STARTED.recorder
    if recorder is None:
        return
    try:
        recorder.tell_step()
    except OURS:
        recorder.failed()


class _Phase(AbstractContextManager["_Phase"]):
    """A stretch of time with a name."""

    __slots__ = ("_entered", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._entered: tuple[int, int, bool] | None = None

    def __enter__(self) -> _Phase:
        recorder = _STARTED.recorder
        if recorder is not None:
            try:
                self._entered = recorder.enter(self._name)
            except OURS:
                recorder.failed()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorder, entered, self._entered = _STARTED.recorder, self._entered, None
        if recorder is not None and entered is not None:
            try:
                recorder.leave(entered)
            except OURS:
                recorder.failed()


def phase(name: str) -> AbstractContextManager[object]:
    """Return a context for a phase, such as "evaluation", "checkpoint_save", "logging", "setup".

    Batches fetched inside are kept apart from those of steps. Eight other names may be told; the
    first 30 bytes of a name are kept.
    """
    return _Phase(name)
