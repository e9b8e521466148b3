"""`whyidle record`: an agent for the life of a command."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from whyidle.child import configure_log
from whyidle.clock import NS_PER_S, Clock
from whyidle.errors import UserError
from whyidle.host import LiveHost
from whyidle.layout import identify
from whyidle.run_command import probe_environment, problem
from whyidle.supervisor import SI_KERNEL, SIGNALS, TEND_S, AnotherAgentError, Supervisor

LOG = logging.getLogger("whyidle.agent")
# Two periods of the fast lane.
LINGER_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to record, and where to."""

    recording: Path
    node: str | None = None
    root: str = "/"
    journal: bool = False
    keeper: tuple[str, ...] = ()
    probe: bool = False
    probe_folders: tuple[Path, ...] = ()

    @property
    def sampler(self) -> tuple[str, ...]:
        """Arguments of the sampler."""
        journal = ("--journal",) if self.journal else ()
        folders = (word for path in self.probe_folders for word in ("--probe-dir", str(path)))
        return (*journal, *folders)


def default_folder(clock: Clock) -> Path:
    """Return a new recording's name, below the folder that the user is in."""
    now = datetime.fromtimestamp(clock.wall_ns() // NS_PER_S, tz=timezone.utc)
    return Path(f"whyidle-{now:%Y%m%dT%H%M%SZ}")


def record(options: Options, command: Sequence[str], clock: Clock) -> int:
    """Run a command and record the node meanwhile; return the command's own exit code.

    A command that a signal ended gives 128 + the signal's number, as in a shell. Nothing that goes
    wrong with the recording once the command runs touches the command. Raises UserError before.
    """
    configure_log("record")
    if shutil.which(command[0]) is None:
        raise UserError(f"cannot run {command[0]}: there is no such program on the PATH")
    supervisor = _supervisor(options, clock)
    environ = dict(os.environ)
    if options.probe:
        options = _with_probe(options, environ)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        # Runs in this process's only thread: unblocking signals there is safe.
        process = subprocess.Popen(command, preexec_fn=_unblock, env=environ)
    except OSError as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}") from error
    if supervisor is not None:
        _begin(supervisor, (*options.sampler, "--watch", str(process.pid)), options.keeper)
    status = _accompany(process, supervisor)
    if supervisor is not None:
        # What the trainer wrote last is still read: its page is open in the sampler.
        clock.sleep_until(clock.mono_ns() + int(LINGER_S * NS_PER_S))
        clean = supervisor.stop()
        _conclude(options.recording, clean)
    return status if status >= 0 else 128 - status


def _with_probe(options: Options, environ: dict[str, str]) -> Options:
    """Switch the probe on in an environment; where that fails the run goes on without it."""
    folder = options.probe_folders[0] if options.probe_folders else None
    try:
        pages = probe_environment(environ, folder)
    except OSError as error:
        LOG.warning("the probe is off: %s", problem(error))
        return options
    return replace(options, probe_folders=(pages,))


def _supervisor(options: Options, clock: Clock) -> Supervisor | None:
    identity = identify(LiveHost(options.root, clock), options.node)
    try:
        return Supervisor(options.recording, identity, clock, root=options.root)
    except AnotherAgentError:
        # Started once per rank by a launcher, only the first on a node records.
        LOG.info("another agent of this node records into %s already", options.recording)
        return None


def _begin(supervisor: Supervisor, sampler: Sequence[str], keeper: Sequence[str]) -> None:
    try:
        supervisor.begin(sampler, keeper)
    except OSError as error:
        LOG.error("nothing is recorded: cannot start the agent: %s", error.strerror)


def _accompany(process: subprocess.Popen[bytes], supervisor: Supervisor | None) -> int:
    """Wait for the command, pass signals on to it, and tend the agent."""
    while process.poll() is None:
        info = signal.sigtimedwait(SIGNALS, TEND_S)
        if supervisor is not None:
            supervisor.tend()
        if info is None or info.si_signo == signal.SIGCHLD:
            continue
        # What the terminal sends, such as Ctrl-C, the command has got already.
        if info.si_code != SI_KERNEL:
            process.send_signal(info.si_signo)
    return process.returncode


def _conclude(recording: Path, clean: bool) -> None:
    size = sum(path.stat().st_size for path in recording.rglob("*") if path.is_file())
    LOG.info("recorded %.1f MB in %s; now run: diagnose %s", size / 1e6, recording, recording)
    if not clean:
        LOG.warning("part of it is still in the spool, which readers of recordings take as well")


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
