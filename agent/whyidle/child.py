"""What sampler and keeper have in common as processes: how they are started, told to stop, and log.

A child's standard input is a pipe that its supervisor holds open. When it closes, because the
supervisor ended in whatever way, the child stops as on SIGTERM: nothing is ever left running alone.
Its standard output is a pipe, too: a letter for each thing that it got done, which is what feeds
the watchdog of a service.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import resource
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import FrameType

from whyidle.notify import VARIABLES

# What a sampler may hold open: the kept descriptors of its hosts, see host.DESCRIPTOR_LIMIT.
DESCRIPTORS = 16_384
# Set by the launcher of a training job for the trainer; the agent is not one.
_NOT_INHERITED = (
    *("WHYIDLE_PROBE", "WHYIDLE_PROBE_DIR", "PYTHONPATH", "PYTHONSTARTUP"),
    *VARIABLES,  # only the supervisor speaks to systemd
)
# Syslog's severities, as sd-daemon(3) writes them in front of a line.
_SEVERITIES = (
    (logging.CRITICAL, "<2>"),
    (logging.ERROR, "<3>"),
    (logging.WARNING, "<4>"),
    (logging.INFO, "<6>"),
    (logging.NOTSET, "<7>"),
)


class Step(Enum):
    """What a child got done, as its supervisor is told."""

    LOOP = b"t"  # the sampling loop went round
    WRITE = b"w"  # a second of rows went to the spool, or was refused by the disk
    CYCLE = b"c"  # the keeper looked at everything it has to do


class Progress:
    """Tells the supervisor of steps; never waits, and does nothing where nobody listens."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int = 1) -> None:
        self._fd: int | None = None
        with suppress(OSError):  # a closed descriptor: nobody listens
            # A file or terminal is somebody who runs this module by hand.
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.set_blocking(fd, False)
                self._fd = fd

    def done(self, step: Step) -> None:
        """Tell of a step."""
        if self._fd is None:
            return
        try:
            os.write(self._fd, step.value)
        except BlockingIOError:
            pass  # the pipe is full of steps that were not looked at yet: they say the same
        except OSError:  # nobody listens any more
            self._fd = None


class Stop:
    """Tells whether to stop, and waits for it: after SIGTERM, or when standard input closes."""

    __slots__ = ("_lifeline", "_stopping", "_wake", "_woken")

    def __init__(self, lifeline: int | None = None) -> None:
        self._lifeline = lifeline
        self._stopping = False
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def install(self) -> None:
        """Take SIGTERM over; SIGINT goes to a whole terminal, and the supervisor answers it."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def stopping(self) -> bool:
        """Say whether to stop."""
        return self._stopping

    def wait_s(self, seconds: float) -> None:
        """Wait, and return early when it is time to stop."""
        watched = [self._woken] if self._lifeline is None else [self._woken, self._lifeline]
        ready, _, _ = select.select(watched, [], [], 0.0 if self._stopping else seconds)
        # Nobody writes into the lifeline, so that readable means closed.
        if self._lifeline in ready and not os.read(self._lifeline or 0, 4096):
            self._stopping = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        os.write(self._wake, b"x")


def start(module: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments` with a lifeline; raises OSError.

    It runs in /, so that no file of a user's folder is imported, and sees the import path that this
    process has found itself by.
    """
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    path = [entry for entry in sys.path if entry and os.path.isabs(entry)]  # noqa: PTH117
    environment["PYTHONPATH"] = os.pathsep.join(path)
    environment["PYTHONSAFEPATH"] = "1"
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        cwd="/",
        env=environment,
    )


def steps_of(process: subprocess.Popen[bytes]) -> frozenset[Step]:
    """Return what a child told since it was last asked."""
    if process.stdout is None:
        return frozenset()
    said = b""
    with suppress(BlockingIOError):
        os.set_blocking(process.stdout.fileno(), False)
        while chunk := os.read(process.stdout.fileno(), 65_536):
            said += chunk
    return frozenset(step for step in Step if step.value in said)


def stop(process: subprocess.Popen[bytes], patience_s: float) -> int:
    """Close a child's lifeline and wait; kill it if it does not end in time. Return its status."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()


def take_lock(path: Path) -> int | None:
    """Take a lock for the life of this process; None if another has it. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def prepare(name: str) -> Stop:
    """Make this process a child: signals, lifeline, log to standard error, descriptors, memory."""
    configure_log(name)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    waiter = Stop(lifeline=0)
    waiter.install()
    # The supervisor waits for signals and so has them blocked, which a child inherits; what came
    # before the handlers were there comes now.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    gc.collect()
    gc.freeze()  # what was imported stays: no collection needs to look at it again
    return waiter


def configure_log(name: str) -> None:
    """Log to standard error, one line each; the journal of a service adds time and severity."""
    handler = logging.StreamHandler(sys.stderr)
    text = f"whyidle {name}: %(message)s"
    handler.setFormatter(_Severity(text) if _is_journal(os.environ) else logging.Formatter(text))
    root = logging.getLogger("whyidle")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(logging.INFO)


class _Severity(logging.Formatter):
    """Puts the severity in front of a line, by which the journal sorts and colours it."""

    def format(self, record: logging.LogRecord) -> str:
        severity = next(mark for level, mark in _SEVERITIES if record.levelno >= level)
        # Each line is an entry of its own in the journal.
        return "\n".join(severity + line for line in super().format(record).split("\n"))


def _is_journal(environ: Mapping[str, str]) -> bool:
    """Whether standard error is the journal's own stream, which JOURNAL_STREAM names."""
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
