"""The folders that pages are looked for in.

One of the service, those that the agent was told of, and those that `whyidle run` made in shared
memory, one a user. None of them needs to be there.
"""

from __future__ import annotations

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Problem
from whyidle.host import Answer, Host, NotRecordedError
from whyidle.probe_page import SUFFIX

SERVICE_FOLDER = "run/whyidle/probe"
SHARED_MEMORY = "dev/shm"
PREFIX = "whyidle-probe-"
# Shared memory holds thousands of tensors; new users come rarely.
_LIST_EVERY_NS = 5 * NS_PER_S
# More names than this in a folder of pages is somebody filling it.
_NAMES_LIMIT = 4096


class Folders:
    """Lists the pages of all folders. `found` are the folders that could be listed last."""

    __slots__ = ("_due_ns", "_shared", "found", "why")

    def __init__(self) -> None:
        self._shared: tuple[str, ...] = ()
        self._due_ns = 0
        self.found: tuple[str, ...] = ()
        self.why = "no folder of pages has been looked for yet"

    def pages(self, host: Host, now_ns: int) -> tuple[list[str], list[Problem]]:
        """Return the paths of all pages, and what is wrong with folders."""
        told = told_folders(host)
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + _LIST_EVERY_NS
            self._shared = _shared_folders(host)
        paths: list[str] = []
        problems: list[Problem] = []
        found: list[str] = []
        for folder in dict.fromkeys((SERVICE_FOLDER, *told, *self._shared)):
            try:
                names = host.names(folder)
            except FileNotFoundError:
                if folder in told:
                    problems.append(_problem(folder, "does not exist; make it, writable to all"))
                continue
            except OSError as error:
                problems.append(_problem(folder, f"cannot be listed: {error.strerror}"))
                continue
            found.append(folder)
            if len(names) > _NAMES_LIMIT:
                problems.append(
                    _problem(folder, f"has {len(names)} files; the first {_NAMES_LIMIT} are read")
                )
            paths += [f"{folder}/{n}" for n in names[:_NAMES_LIMIT] if n.endswith(SUFFIX)]
        self.found = tuple(found)
        self.why = (
            f"there is no folder of pages such as /{SERVICE_FOLDER}: no trainer here has the probe"
        )
        return paths, problems


def _problem(folder: str, message: str) -> Problem:
    return Problem(subject="/" + folder, message=message)


def told_folders(host: Host) -> tuple[str, ...]:
    """Return the folders that the agent was started with, without leading slash."""
    try:
        answer: Answer = host.ask("probe_folders")
    except (KeyError, NotRecordedError):
        return ()  # a recorded tree, or a journal from before this was asked
    if not isinstance(answer, tuple | list):
        raise ValueError(f"probe_folders: {answer!r} is no list")
    return tuple(str(folder).strip("/") for folder in answer)


def _shared_folders(host: Host) -> tuple[str, ...]:
    try:
        names = host.names(SHARED_MEMORY)
    except OSError:
        return ()
    return tuple(f"{SHARED_MEMORY}/{name}" for name in names if name.startswith(PREFIX))
