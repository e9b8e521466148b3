"""Runs sampler and keeper, and starts again what ends by itself; imports neither of them.

One agent writes a node's part of a recording at a time: a lock in its folder sees to that.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from whyidle.child import Step, start, steps_of, stop, take_lock
from whyidle.clock import NS_PER_S, Clock
from whyidle.errors import UserError
from whyidle.layout import Identity
from whyidle.manifest import RECORDING, write_manifest
from whyidle.release import LOCK, REQUEST, State, write_state

LOG = logging.getLogger("whyidle.agent")
SAMPLER = "whyidle.sampler_process"
KEEPER = "whyidle.keeper_process"
SAMPLER_PART = "sampler"
KEEPER_PART = "keeper"
PARTS = (SAMPLER_PART, KEEPER_PART)
# Waited for one at a time, so that none is lost and none interrupts anything.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
# siginfo.si_code of a signal that the kernel sent, as a terminal does to all of its processes.
SI_KERNEL = 128
TEND_S = 1.0
# Of an agent that is a keeper only, beside one that is a sampler only.
_KEEPER_LOCK = ".agent-keeper.lock"
# A child that keeps ending is started again after 1, 2, 4 ... seconds, at most this.
PAUSE_LIMIT_S = 60
# The sampler needs a second to flush, the keeper one per piece that it still has to take over.
SAMPLER_PATIENCE_S = 10.0
KEEPER_PATIENCE_S = 60.0
# How long each step may be overdue before its process counts as hung. The loop goes round 8 times a
# second. A disk may take its time, and restarting the sampler would lose the minute that waits for
# it; so may the merge of an hour on a keeper with a fifth of a core.
SAMPLER_LIMITS_S: Mapping[Step, float] = MappingProxyType({Step.LOOP: 10.0, Step.WRITE: 120.0})
KEEPER_LIMITS_S: Mapping[Step, float] = MappingProxyType({Step.CYCLE: 300.0})


class Child:
    """A process that is kept running."""

    __slots__ = (
        "_arguments",
        "_begin_ns",
        "_clock",
        "_done_ns",
        "_leave_by_ns",
        "_limits_s",
        "_module",
        "_next",
        "_patience_s",
        "_pause_s",
        "_process",
        "_retry_ns",
        "_since_ns",
    )

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        clock: Clock,
        *,
        patience_s: float,
        limits_s: Mapping[Step, float],
    ) -> None:
        self._module = module
        self._arguments = tuple(arguments)
        self._clock = clock
        self._patience_s = patience_s
        self._limits_s = limits_s
        self._pause_s = 1
        self._retry_ns: int | None = None
        self._next: tuple[str, ...] | None = None
        self._leave_by_ns = 0
        self._done_ns: dict[Step, int] = {}
        self._begin_ns = self._since_ns = clock.mono_ns()
        self._process = start(module, self._arguments)

    @property
    def pid(self) -> int:
        """Process id of the child that runs, or ran last."""
        return self._process.pid

    @property
    def arguments(self) -> tuple[str, ...]:
        """What it runs with; once it is told to begin anew, what it will run with."""
        return self._arguments if self._next is None else self._next

    @property
    def began_anew(self) -> bool:
        """Whether nothing of a restart is left to wait for."""
        return self._next is None and self._retry_ns is None

    def tend(self) -> None:
        """Start the child again if it ended, after a pause that doubles while it keeps ending."""
        now = self._clock.mono_ns()
        self._done_ns |= dict.fromkeys(steps_of(self._process), now)
        status = self._process.poll()
        if status is None:
            self._watch(now)
            return
        if self._next is not None:  # it ended because it was told to
            self._arguments, self._next = self._next, None
            self._pause_s, self._retry_ns = 1, now
            self._since_ns, self._done_ns = now, {}
        elif self._retry_ns is None:
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

    def _watch(self, now_ns: int) -> None:
        if self._next is not None and now_ns > self._leave_by_ns:
            LOG.warning("%s does not end and is killed", self._module)
            self._process.kill()
        elif now_ns - self._begin_ns > PAUSE_LIMIT_S * NS_PER_S:
            self._pause_s = 1

    def ready(self) -> bool:
        """Whether it has done each of its steps since it was begun."""
        return self._done_ns.keys() >= self._limits_s.keys()

    def overdue(self) -> str:
        """Return in words what it should have done by now; '' if it gets on.

        A child that keeps ending gets nothing done, so its restarts do not count as progress.
        """
        now = self._clock.mono_ns()
        for step, limit_s in self._limits_s.items():
            late_s = (now - self._done_ns.get(step, self._since_ns)) / NS_PER_S
            if late_s > limit_s:
                return f"{self._module} has not told of its {step.name.lower()} for {late_s:.0f} s"
        return ""

    def restart(self, arguments: Sequence[str]) -> None:
        """Have the child end as for good and begin with these arguments, while others go on."""
        self._next = tuple(arguments)
        self._leave_by_ns = self._clock.mono_ns() + int(self._patience_s * NS_PER_S)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self) -> int:
        """End the child; return its status."""
        return stop(self._process, self._patience_s)


class AnotherAgentError(UserError):
    """An agent of this node is recording into the same folder already."""


class Supervisor:
    """The agent of a node, or one part of it: a sampler and a keeper on one recording.

    Making one takes the folder, or raises UserError; `begin` starts the processes.
    """

    __slots__ = (
        "_clock",
        "_common",
        "_folder",
        "_keeper",
        "_keeper_module",
        "_lock",
        "_parts",
        "_said",
        "_sampler",
        "_sampler_words",
    )

    def __init__(
        self,
        recording: Path,
        identity: Identity,
        clock: Clock,
        *,
        root: str = "/",
        manifest: dict[str, object] | None = None,
        parts: Sequence[str] = PARTS,
        keeper: str = KEEPER,
    ) -> None:
        self._clock = clock
        self._parts = tuple(parts)
        self._keeper_module = keeper
        self._keeper: Child | None = None
        self._sampler: Child | None = None
        self._sampler_words: tuple[str, ...] = ()
        self._said: State | None = None
        self._folder = identity.folder(recording)
        try:
            (self._folder / "spool").mkdir(parents=True, exist_ok=True)
            lock = take_lock(
                self._folder / (LOCK if SAMPLER_PART in parts else ".agent-keeper.lock")
            )
            if lock is None:
                raise AnotherAgentError(
                    f"another agent of this node is recording into {recording}; stop it, or name "
                    "another folder with -o"
                )
            self._lock = lock
            if SAMPLER_PART in parts:
                write_manifest(recording, RECORDING, manifest or {})
        except OSError as error:
            raise UserError(
                f"cannot record into {recording}: {error.strerror}; name another folder with -o"
            ) from error
        self._common = (str(recording.absolute()), "--node", identity.node, "--root", root)

    def begin(self, sampler: Sequence[str] = (), keeper: Sequence[str] = ()) -> None:
        """Start the processes with further arguments; raises OSError."""
        self._sampler_words = tuple(sampler)
        if SAMPLER_PART in self._parts:
            self._sampler = Child(
                SAMPLER,
                self._sampler_arguments(released=self.release_wanted()),
                self._clock,
                patience_s=SAMPLER_PATIENCE_S,
                limits_s=SAMPLER_LIMITS_S,
            )
        if KEEPER_PART in self._parts:
            self._keeper = Child(
                self._keeper_module,
                [*self._common, *keeper],
                self._clock,
                patience_s=KEEPER_PATIENCE_S,
                limits_s=KEEPER_LIMITS_S,
            )
        self._tell()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of sampler and keeper."""
        return tuple(child.pid for child in self._children())

    @property
    def released(self) -> bool:
        """Whether the sampler runs without the GPUs, or will in a moment."""
        return self._sampler is not None and "--no-gpus" in self._sampler.arguments

    def tend(self) -> None:
        """Start again what has ended; call it once a second or so."""
        for child in self._children():
            child.tend()
        self._tell()

    def ready(self) -> bool:
        """Whether everything has done what it is for at least once."""
        return all(child.ready() for child in self._children())

    def overdue(self) -> str:
        """Return in words what hangs; '' if everything gets on."""
        return next((said for child in self._children() if (said := child.overdue())), "")

    def release_wanted(self) -> bool:
        """Whether somebody asked for the GPU devices."""
        return (self._folder / REQUEST).exists()

    def take_back(self) -> None:
        """Withdraw the request for the GPU devices, as `whyidle release --resume` does."""
        (self._folder / REQUEST).unlink(missing_ok=True)

    def let_go(self, *, released: bool) -> None:
        """Have the sampler begin anew without the GPUs, or with them again."""
        if self._sampler is not None:
            self._sampler.restart(self._sampler_arguments(released=released))
            self._tell()

    def apply(self, sampler: Sequence[str], keeper: Sequence[str]) -> None:
        """Take further arguments over.

        The keeper is started again in any case, since it reads rules when it starts; the sampler
        only if something changed for it. Nothing is lost but samples of the second in between.
        """
        self._sampler_words = tuple(sampler)
        wanted = self._sampler_arguments(released=self.released)
        if self._sampler is not None and self._sampler.arguments != wanted:
            self._sampler.restart(wanted)
        if self._keeper is not None:
            self._keeper.restart([*self._common, *keeper])
        self._tell()

    def stop(self) -> bool:
        """End the sampler, then the keeper; say whether everything is in segments."""
        if self._sampler is not None:
            self._sampler.stop()
        clean = self._keeper is None or self._keeper.stop() == 0
        os.close(self._lock)
        return clean

    def _children(self) -> list[Child]:
        return [child for child in (self._sampler, self._keeper) if child is not None]

    def _sampler_arguments(self, *, released: bool) -> tuple[str, ...]:
        return (*self._common, *self._sampler_words, *(("--no-gpus",) if released else ()))

    def _tell(self) -> None:
        """Write the state file when it has changed; a full disk is no reason to stop."""
        if self._sampler is None or not self._sampler.began_anew:
            return
        state = State(pids=(os.getpid(), *self.pids), released=self.released)
        if state == self._said:
            return
        try:
            write_state(self._folder, state)
        except OSError as error:
            LOG.warning("cannot write the state of the agent: %s", error.strerror)
        self._said = state
