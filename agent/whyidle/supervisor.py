"""Runs sampler and keeper, and starts again what ends by itself; imports neither of them.

One agent writes a node's part of a recording at a time: a lock in its folder sees to that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from whyidle.child import start, stop, take_lock
from whyidle.clock import NS_PER_S, Clock
from whyidle.errors import UserError
from whyidle.layout import Identity
from whyidle.manifest import RECORDING, write_manifest

LOG = logging.getLogger("whyidle.agent")
SAMPLER = "whyidle.sampler_process"
KEEPER = "whyidle.keeper_process"
# A child that keeps ending is started again after 1, 2, 4 ... seconds, at most this.
PAUSE_LIMIT_S = 60
# The sampler needs a second to flush, the keeper one per piece that it still has to take over.
SAMPLER_PATIENCE_S = 10.0
KEEPER_PATIENCE_S = 60.0


class Child:
    """A process that is kept running."""

    __slots__ = (
        "_arguments",
        "_begin_ns",
        "_clock",
        "_module",
        "_pause_s",
        "_process",
        "_retry_ns",
    )

    def __init__(self, module: str, arguments: Sequence[str], clock: Clock) -> None:
        self._module = module
        self._arguments = tuple(arguments)
        self._clock = clock
        self._pause_s = 1
        self._retry_ns: int | None = None
        self._begin_ns = clock.mono_ns()
        self._process = start(module, self._arguments)

    @property
    def pid(self) -> int:
        """Process id of the child that runs, or ran last."""
        return self._process.pid

    def tend(self) -> None:
        """Start the child again if it ended, after a pause that doubles while it keeps ending."""
        now = self._clock.mono_ns()
        status = self._process.poll()
        if status is None:
            if now - self._begin_ns > PAUSE_LIMIT_S * NS_PER_S:
                self._pause_s = 1
            return
        if self._retry_ns is None:
            self._retry_ns = now + self._pause_s * NS_PER_S
            LOG.warning(
                "%s ended with status %d; started again in %d s",
                self._module,
                status,
                self._pause_s,
            )
            self._pause_s = min(PAUSE_LIMIT_S, self._pause_s * 2)
        if now >= self._retry_ns:
            stop(self._process, 0.0)
            self._retry_ns = None
            try:
                self._process = start(self._module, self._arguments)
            except OSError as error:  # out of processes or memory: the next look tries again
                LOG.warning("%s cannot be started: %s", self._module, error.strerror)
            self._begin_ns = now

    def stop(self, patience_s: float) -> int:
        """End the child; return its status."""
        return stop(self._process, patience_s)


class AnotherAgentError(UserError):
    """An agent of this node is recording into the same folder already."""


class Supervisor:
    """The agent of a node: a sampler and a keeper on one recording.

    Making one takes the folder, or raises UserError; `begin` starts the processes.
    """

    __slots__ = ("_clock", "_common", "_keeper", "_lock", "_sampler")

    def __init__(
        self,
        recording: Path,
        identity: Identity,
        clock: Clock,
        *,
        root: str = "/",
        manifest: dict[str, object] | None = None,
    ) -> None:
        self._clock = clock
        self._keeper: Child | None = None
        self._sampler: Child | None = None
        folder = identity.folder(recording)
        try:
            (folder / "spool").mkdir(parents=True, exist_ok=True)
            lock = take_lock(folder / ".agent.lock")
            if lock is None:
                raise AnotherAgentError(
                    f"another agent of this node is recording into {recording}; stop it, or name "
                    "another folder with -o"
                )
            self._lock = lock
            write_manifest(recording, RECORDING, manifest or {})
        except OSError as error:
            raise UserError(
                f"cannot record into {recording}: {error.strerror}; name another folder with -o"
            ) from error
        self._common = (str(recording.absolute()), "--node", identity.node, "--root", root)

    def begin(self, sampler: Sequence[str] = (), keeper: Sequence[str] = ()) -> None:
        """Start both processes with further arguments; raises OSError."""
        self._sampler = Child(SAMPLER, [*self._common, *sampler], self._clock)
        self._keeper = Child(KEEPER, [*self._common, *keeper], self._clock)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of sampler and keeper."""
        return tuple(child.pid for child in (self._sampler, self._keeper) if child is not None)

    def tend(self) -> None:
        """Start again what has ended; call it once a second or so."""
        for child in (self._sampler, self._keeper):
            if child is not None:
                child.tend()

    def stop(self) -> bool:
        """End the sampler, then the keeper; say whether everything is in segments."""
        if self._sampler is not None:
            self._sampler.stop(SAMPLER_PATIENCE_S)
        clean = self._keeper is None or self._keeper.stop(KEEPER_PATIENCE_S) == 0
        os.close(self._lock)
        return clean
