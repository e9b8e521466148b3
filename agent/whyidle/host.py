"""The only door to the machine: everything a collector may ask, and what answers.

A `Host` is answered by the machine, a recorded tree, a journal or a simulated world: one code path
for live, replay and simulation. Answers are plain values, below every parser.
"""

from __future__ import annotations

import os
import re
import stat as stat_
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from whyidle.clock import Clock
from whyidle.kmsg import Kmsg

# What a question may be answered with: JSON values, tuples for lists.
Answer: TypeAlias = "bool | int | float | str | tuple[Answer, ...] | Mapping[str, Answer] | None"
Argument: TypeAlias = "int | str"
Asker: TypeAlias = Callable[..., Answer]

# Largest file that is read: /proc/interrupts of 384 CPUs has 0.9 MB; nothing we parse is bigger.
FILE_LIMIT_BYTES = 4 << 20
# Descriptors kept per host; 8 ports x 30 files + 80 processes x 5 files + disks fit well.
DESCRIPTOR_LIMIT = 2048
# How long a list of all processes is good for who asks next; they are looked for once a second.
_LISTED_NS = 20_000_000


class NvmlError(Exception):
    """NVML refused a call; `code` is its nvmlReturn_t, such as 15 for a lost GPU."""

    def __init__(self, code: int, call: str, text: str = "") -> None:
        super().__init__(code, call, text)
        self.code = code
        self.call = call
        self.text = text

    def __str__(self) -> str:
        return f"NVML {self.call}: {self.text or 'error'} ({self.code})"


class NotRecordedError(Exception):
    """A replay was asked what its journal never asked: that says nothing about the machine."""


class NvmlUnavailableError(Exception):
    """This host has no NVML at all; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """What lstat says of a path."""

    mode: int
    size_bytes: int
    user_id: int
    device: int
    inode: int

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file, not a link to one."""
        return stat_.S_ISREG(self.mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a source reported by itself, such as a record of the kernel log.

    `mono_ns` is when it was read; when it came to be, if known, is in `text`.
    """

    mono_ns: int
    text: str


class NvmlSource(Protocol):
    """Answers NVML questions; used by one thread at a time."""

    def answer(self, call: str, *args: Argument) -> Answer:
        """Return the answer of `call`; raises NvmlError, NvmlUnavailableError."""
        ...

    def close(self) -> None:
        """Free samples and let go of the device files."""
        ...


class EventSource(Protocol):
    """Something that reports by itself; used by one thread at a time."""

    def read(self) -> list[str]:
        """Return the next reports, a bounded number, without waiting. Raises OSError."""
        ...

    def close(self) -> None:
        """Let go of it; the next read opens it anew."""
        ...


class Host(Protocol):
    """The questions. Paths have no leading slash. One thread at a time uses one Host."""

    @property
    def clock(self) -> Clock:
        """The clock that stamps rows."""
        ...

    def read(self, path: str) -> str:
        """Return a small text file whole; undecodable bytes as surrogates. Raises OSError."""
        ...

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        """Return a small file whole; `keep` leaves its descriptor open. Raises OSError."""
        ...

    def names(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a directory. Raises OSError."""
        ...

    def link(self, path: str) -> str:
        """Return the real path that `path` leads to, without leading slash. Raises OSError."""
        ...

    def stat(self, path: str) -> Stat:
        """Return what lstat says. Raises OSError."""
        ...

    def nvml(self, call: str, *args: Argument) -> Answer:
        """Ask NVML; GPUs are named by UUID. Raises NvmlError, NvmlUnavailableError."""
        ...

    def ask(self, question: str, *args: Argument) -> Answer:
        """Ask what is no file: "clock", netlink, ethtool. Raises OSError, KeyError if unknown."""
        ...

    def events(self, source: str) -> tuple[Event, ...]:
        """Return what `source` reported since it was last asked: "kmsg", "links". Raises OSError.

        A call returns a bounded number; the rest comes with the next. The first call returns what
        the source still holds.
        """
        ...

    def forget(self, prefix: str) -> None:
        """Let go of what is kept for paths that begin so: their process or device has gone."""
        ...

    def close(self) -> None:
        """Let go of everything that is kept."""
        ...


# Files that the kernel makes in one piece: a read that is not full has got all of it. Asking procfs
# for more means that it makes the text again: 40 % of what reading a process costs.
_WHOLE = re.compile(
    # Of the probe's pages, the second read is a quarter of what looking at one costs.
    r".*\.page"
    r"|sys/(class|devices|block|bus)/.*"
    r"|proc/(\d+/(task/\d+/)?(stat|status|io|schedstat|wchan|cgroup)|pressure/\w+|stat)"
)

# Files that cannot be read at an offset, nor again: the kernel opens them as streams.
_STREAMS = "sys/fs/fuse/connections/"


class _Kept:
    """A kept descriptor, the buffer size that its file needed last, and how it is read."""

    __slots__ = ("fd", "hint", "whole")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.hint = 4096
        self.whole = _WHOLE.fullmatch(path) is not None


class LiveHost:
    """The machine below `root`, or a recorded tree of one.

    Descriptors stay open and are read with pread: 0.6 us a file against 4 us for reopening and
    10-20 us for pathlib. A kept descriptor of /proc/PID never answers for another process that got
    the same number: it raises ProcessLookupError. After any error the descriptor is dropped and the
    next question opens anew.
    """

    __slots__ = (
        *("_askers", "_clock", "_kept", "_limit", "_listed", "_listed_ns", "_nvml", "_root"),
        "_sources",
    )

    def __init__(
        self,
        root: str,
        clock: Clock,
        *,
        nvml: NvmlSource | None = None,
        askers: Mapping[str, Asker] | None = None,
        sources: Mapping[str, EventSource] | None = None,
        descriptor_limit: int = DESCRIPTOR_LIMIT,
    ) -> None:
        self._root = root.rstrip("/") + "/"
        self._clock = clock
        self._nvml = nvml
        self._askers = dict(askers or {})
        self._kept: dict[str, _Kept] = {}
        self._sources: dict[str, EventSource] = {
            "kmsg": Kmsg(self._root + "dev/kmsg"),
            **(sources or {}),
        }
        self._limit = descriptor_limit
        self._listed: tuple[str, ...] = ()
        self._listed_ns = -_LISTED_NS

    @property
    def clock(self) -> Clock:
        """The clock that was passed in."""
        return self._clock

    def read(self, path: str) -> str:
        """Return a text file whole."""
        return self.read_bytes(path).decode("utf-8", "surrogateescape")

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        """Return a file whole, at most FILE_LIMIT_BYTES of it: a bigger one raises EFBIG."""
        kept = self._kept.get(path)
        if kept is not None and kept.whole:
            # Nearly every question of the fast lanes: this way round it costs two thirds.
            try:
                data = os.pread(kept.fd, kept.hint, 0)
            except OSError as error:
                raise self._dropped(kept, path, error) from None
            if len(data) < kept.hint <= 2 * len(data) + 512:
                return data
        elif path.startswith(_STREAMS):
            return self._read_stream(path)
        if kept is None:
            kept = self._open(path, keep)
        try:
            data = _pread_whole(kept, path) if kept.whole else _pread_all(kept.fd, kept.hint, path)
        except OSError as error:
            raise self._dropped(kept, path, error) from None
        if not keep:
            if self._kept.get(path) is not kept:
                os.close(kept.fd)
        elif not len(data) < kept.hint <= 2 * len(data) + 512:
            # A little more than it needs: counters grow by a digit, lists by a line.
            kept.hint = max(256, len(data) + (len(data) >> 2) + 64)
        return data

    def names(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a directory."""
        if path == "proc":
            # Several ask one after another, and it costs 0.3 us and more for each process.
            now_ns = self._clock.mono_ns()
            if now_ns - self._listed_ns >= _LISTED_NS:
                self._listed, self._listed_ns = self._names(path), now_ns
            return self._listed
        return self._names(path)

    def _names(self, path: str) -> tuple[str, ...]:
        return tuple(sorted(os.listdir(self._root + path)))  # noqa: PTH208 - Path.iterdir is 5x

    def link(self, path: str) -> str:
        """Return the real path, relative to the root."""
        root = os.path.realpath(self._root)
        real = os.path.realpath(self._root + path, strict=True)
        if real != root and not real.startswith(root.rstrip("/") + "/"):
            raise FileNotFoundError(2, "leads out of the tree", path)
        return real[len(root) :].lstrip("/")

    def stat(self, path: str) -> Stat:
        """Return what lstat says."""
        got = os.lstat(self._root + path)
        return Stat(
            mode=got.st_mode,
            size_bytes=got.st_size,
            user_id=got.st_uid,
            device=got.st_dev,
            inode=got.st_ino,
        )

    def nvml(self, call: str, *args: Argument) -> Answer:
        """Pass the question on to the NVML source, if there is one."""
        if self._nvml is None:
            raise NvmlUnavailableError("this host has no NVML")
        return self._nvml.answer(call, *args)

    def ask(self, question: str, *args: Argument) -> Answer:
        """Pass the question on to its asker; a question without one raises KeyError."""
        return self._askers[question](*args)

    def events(self, source: str) -> tuple[Event, ...]:
        """Return what a source has; a recorded tree has no source but a log, if it has one."""
        if source not in self._sources:
            raise FileNotFoundError(2, "no such source of events", source)
        try:
            records = self._sources[source].read()
        except OSError as error:
            where = "dev/kmsg" if source == "kmsg" else source
            raise type(error)(error.errno, error.strerror, where) from None
        now = self._clock.mono_ns()
        return tuple(Event(mono_ns=now, text=text) for text in records)

    def forget(self, prefix: str) -> None:
        """Close the kept descriptors below `prefix`."""
        for path in [path for path in self._kept if path.startswith(prefix)]:
            os.close(self._kept.pop(path).fd)

    def close(self) -> None:
        """Close every kept descriptor and the NVML source."""
        self.forget("")
        for source in self._sources.values():
            source.close()
        if self._nvml is not None:
            self._nvml.close()

    def __del__(self) -> None:
        # A host that is dropped without being closed must not keep a thousand descriptors open.
        # `_kept` is missing if the constructor was called wrongly.
        for kept in getattr(self, "_kept", {}).values():
            os.close(kept.fd)
        for source in getattr(self, "_sources", {}).values():
            source.close()

    def _read_stream(self, path: str) -> bytes:
        """Read a file of one number, opened anew."""
        kept = self._open(path, keep=False)
        try:
            return os.read(kept.fd, 4096)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, path) from None
        finally:
            os.close(kept.fd)

    def _dropped(self, kept: _Kept, path: str, error: OSError) -> OSError:
        """Let go of a descriptor that failed; return the error with the path in it."""
        self._kept.pop(path, None)
        os.close(kept.fd)
        return type(error)(error.errno, error.strerror, path)

    def _open(self, path: str, keep: bool) -> _Kept:
        # O_NONBLOCK: opening a FIFO that somebody put in our way must not wait for its writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        kept = _Kept(os.open(self._root + path, flags), path)
        if keep:
            if len(self._kept) >= self._limit:
                # The oldest goes; a set that does not fit only costs what reopening costs.
                os.close(self._kept.pop(next(iter(self._kept))).fd)
            self._kept[path] = kept
        return kept


def _pread_whole(kept: _Kept, path: str) -> bytes:
    """Read a file that comes in one piece; one that has grown is read again, not on from there."""
    data = os.pread(kept.fd, kept.hint, 0)
    while len(data) >= kept.hint:
        if kept.hint > FILE_LIMIT_BYTES:
            raise OSError(27, f"is larger than {FILE_LIMIT_BYTES >> 20} MiB", path)
        kept.hint *= 2
        data = os.pread(kept.fd, kept.hint, 0)
    return data


def _pread_all(fd: int, hint: int, path: str) -> bytes:
    """Read to the end: procfs may answer a page at a time, so only an empty read ends a file."""
    data = os.pread(fd, hint, 0)
    size = len(data)
    parts = [data]
    while data:
        if size > FILE_LIMIT_BYTES:
            raise OSError(27, f"is larger than {FILE_LIMIT_BYTES >> 20} MiB", path)
        data = os.pread(fd, max(4096, size), size)
        size += len(data)
        parts.append(data)
    return parts[0] if len(parts) == 2 else b"".join(parts)
