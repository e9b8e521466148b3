"""`whyidle release`: lets go of the GPU devices for driver work, and takes them back.

A request is a file beside the agent's lock, in the folder of this node and boot: gone with the next
boot, and writable by whoever may write the recording. The agent answers in its state file. Letting
go means that the sampler ends and another one begins that never opens NVML: whatever hung in the
driver, mapped its library or held one of its device files is gone with the process.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whyidle.clock import NS_PER_S, Clock
from whyidle.errors import UserError
from whyidle.host import Answer, Argument, Host, NvmlUnavailableError

LOCK = ".agent.lock"
REQUEST = ".release"
STATE = ".agent.json"
WHY = "the GPUs were released for driver work; whyidle release --resume takes them back"
# The driver's module makes this file when it is loaded and removes it when it goes.
_DRIVER = "proc/driver/nvidia/version"
_DEVICES = "/dev/nvidia"
# A sampler takes a second to flush; one that hangs in the driver is killed after ten.
PATIENCE_S = 30.0
_LOOK_S = 0.1


class ReleasedNvml:
    """Answers every question with why it does not ask the driver."""

    __slots__ = ()

    def answer(self, call: str, *args: Argument) -> Answer:
        """Raise NvmlUnavailableError."""
        raise NvmlUnavailableError(WHY)

    def close(self) -> None:
        """Nothing is open."""


class DriverWatch:
    """Notices that the driver went and came back: what it was released for is done."""

    __slots__ = ("_host", "_went")

    def __init__(self, host: Host) -> None:
        self._host = host
        self._went = False

    def is_back(self) -> bool:
        """Whether the driver is there again after it was gone; ask it once a second or so."""
        try:
            self._host.read_bytes(_DRIVER, keep=False)
        except OSError:
            self._went = True
            return False
        return self._went


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What an agent says of itself in its state file."""

    pids: tuple[int, ...]
    released: bool


def write_state(folder: Path, state: State) -> None:
    """Write the state file, whole or not at all. Raises OSError."""
    part = folder / f"{STATE}.part"
    said = {"pids": list(state.pids), "released": state.released}
    part.write_text(json.dumps(said) + "\n", encoding="utf-8")
    part.rename(folder / STATE)


def read_state(folder: Path) -> State | None:
    """Return what the agent said last, None where that cannot be read."""
    try:
        said: Any = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return State(pids=tuple(int(pid) for pid in said["pids"]), released=bool(said["released"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def ask(folder: Path, *, release: bool, clock: Clock, patience_s: float = PATIENCE_S) -> State:
    """Have the agent of a folder let go of the GPUs, or take them back; return its state after.

    Raises UserError if no agent runs there, if this user may not ask, or if it takes too long.
    """
    if not _is_locked(folder / LOCK):
        raise UserError(
            f"no agent of this node is recording into {folder.parents[1]}: nothing holds the GPUs; "
            "name another recording with -o"
        )
    try:
        if release:
            (folder / REQUEST).touch(mode=0o644)
        else:
            (folder / REQUEST).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot ask the agent in {folder}: {error.strerror}; run this as root or as the user "
            "of the agent"
        ) from error
    return _wait(folder, release, clock, patience_s)


def _wait(folder: Path, release: bool, clock: Clock, patience_s: float) -> State:
    end_ns = clock.mono_ns() + int(patience_s * NS_PER_S)
    while clock.mono_ns() < end_ns:
        state = read_state(folder)
        if state is not None and state.released == release:
            return state
        clock.sleep_until(clock.mono_ns() + int(_LOOK_S * NS_PER_S))
    wanted = "let go of the GPUs" if release else "take the GPUs back"
    raise UserError(
        f"the agent did not {wanted} within {patience_s:g} s; its log says why: "
        "journalctl -u whyidle-agent"
    )


def _is_locked(path: Path) -> bool:
    """Whether a running agent has its lock; raises UserError where that cannot be told."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UserError(
            f"cannot look at {path}: {error.strerror}; run this as root or as the user of the agent"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def holders(
    names: Callable[[], Iterator[int]] | None = None, devices: str = _DEVICES
) -> list[tuple[int, str]]:
    """Return (pid, name) of the processes that have a GPU device open, as far as one may see."""
    found = []
    for pid in names() if names is not None else _pids():
        if _holds(pid, devices):
            try:
                name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            found.append((pid, name.strip()))
    return found


def _pids() -> Iterator[int]:
    return (int(entry) for entry in sorted(os.listdir("/proc")) if entry.isdecimal())  # noqa: PTH208


def _holds(pid: int, devices: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        entries = os.listdir(folder)  # noqa: PTH208 - thousands of names
    except OSError:
        return False
    for entry in entries:
        try:
            if os.readlink(f"{folder}/{entry}").startswith(devices):  # noqa: PTH115
                return True
        except OSError:
            continue
    return False
