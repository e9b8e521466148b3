"""The keeper: turns pieces of the spool into segments, merges them by the hour, keeps retention.

Every step can be cut off at any point and simply be done again: a segment appears whole by rename,
under a name that says which pieces it stands for, and only then is what it replaces deleted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from whyidle.clock import NS_PER_S, Clock, SystemClock
from whyidle.host import Host, LiveHost
from whyidle.layout import PART, PIECE, SEGMENT, Identity, files
from whyidle.merge import merge_into, newest_schema
from whyidle.sampler import resident_bytes
from whyidle.schema import VERSION, AgentSelf
from whyidle.segment import (
    attach,
    first_line,
    insert_piece,
    merged_name,
    new_segment,
    read_info,
    span,
    sync,
    verify,
)
from whyidle.spool_read import NewerSchemaError, UnreadableError, piece_of, read_piece

DAMAGED = ".damaged"
# Merging an hour at once takes 270 MB of process, since each open segment takes 1.4 MB: so quarters
# of an hour are merged first, and then four of them, whose blocks are fuller: 20 minutes of a busy
# node take 2.3 bytes a value, an hour 1.95.
MERGE_MS = 900_000
HOUR_MS = 3_600_000
LOG = logging.getLogger("whyidle.keeper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept of this node; None keeps everything. The oldest segments go first."""

    age_s: float | None = None
    size_bytes: int | None = None
    # Left to others on the file system: a service must not be what fills a disk.
    free_bytes: int | None = None


class Keeper:
    """Keeps one node's part of a recording; `identity` names the boot that is being sampled."""

    __slots__ = (
        "_clock",
        "_host",
        "_identity",
        "_merge_ms",
        "_node",
        "_pid",
        "_retention",
        "_tells_of_itself",
        "written_bytes",
    )

    def __init__(
        self,
        recording: Path,
        identity: Identity,
        host: Host,
        *,
        pid: int,
        retention: Retention | None = None,
        merge_ms: int = MERGE_MS,
        tells_of_itself: bool = True,
    ) -> None:
        self._node = recording / identity.node
        self._merge_ms = merge_ms
        self._tells_of_itself = tells_of_itself
        self._identity = identity
        self._host = host
        self._clock: Clock = host.clock
        self._pid = pid
        self._retention = retention or Retention()
        self.written_bytes = 0

    def cycle(self, *, drain: bool = False) -> int:
        """Take over every finished piece, merge finished spans, keep retention.

        The newest piece of this boot is still being written, unless `drain` says that the sampler
        has ended. Returns how many pieces were taken. Raises OSError or duckdb.Error if the disk is
        full; the spool then stays as it is.
        """
        taken = 0
        for folder in self._boots():
            _tidy(folder)
            pieces = files(folder / "spool", PIECE)
            if folder.name == self._identity.boot8 and not drain:
                pieces = pieces[:-1]
            for piece in pieces:
                self._take(folder, piece)
                taken += 1
        self.merge()
        self.retain()
        return taken

    def merge(self, *, everything: bool = False) -> None:
        """Merge the segments of each finished span, or of each boot, into one."""
        for folder in self._boots():
            hour_ms = max(self._merge_ms, HOUR_MS)
            for span_ms in (0,) if everything else dict.fromkeys((self._merge_ms, hour_ms)):
                self._merge_spans(folder, span_ms)

    def _merge_spans(self, folder: Path, span_ms: int) -> None:
        """Merge the segments of each span but the newest; 0 is one span of them all."""
        groups: dict[int, list[Path]] = {}
        for path in files(folder, SEGMENT):
            begin = span(path)
            if begin is not None:
                groups.setdefault(begin[0] // span_ms if span_ms else 0, []).append(path)
        newest = max(groups, default=0)
        for number, group in groups.items():
            if len(group) > 1 and (number != newest or not span_ms):
                self._merge(folder, group)

    def retain(self) -> None:
        """Delete the oldest segments until age, size and free space are as they should be."""
        held = [
            path
            for folder in self._boots()
            for path in (
                *files(folder, SEGMENT),
                *files(folder, DAMAGED),
                *files(folder / "spool", DAMAGED),
            )
        ]
        held.sort(key=lambda path: path.name)  # by wall time: boots count monotonic time anew
        sizes = {path: path.stat().st_size for path in held}
        total = sum(sizes.values())
        now_s = self._clock.wall_ns() / NS_PER_S
        for path in held[:-1]:  # what was written last stays, whatever the limits say
            limits = self._retention
            old = limits.age_s is not None and now_s - path.stat().st_mtime > limits.age_s
            big = limits.size_bytes is not None and total > limits.size_bytes
            full = limits.free_bytes is not None and self._free_bytes() < limits.free_bytes
            if not (old or big or full):
                break
            why = "old" if old else "over the size limit" if big else "short of free space"
            LOG.info("deleted %s: %s", path, why)
            path.unlink(missing_ok=True)
            total -= sizes[path]

    def _boots(self) -> list[Path]:
        try:
            return sorted(path for path in self._node.iterdir() if path.is_dir())
        except FileNotFoundError:
            return []

    def _free_bytes(self) -> int:
        stats = os.statvfs(self._node)
        return stats.f_bavail * stats.f_frsize

    def _take(self, folder: Path, path: Path) -> None:
        try:
            piece = read_piece(path)
        except NewerSchemaError as error:
            LOG.warning("%s is left to a newer whyidle: %s", path, error)
            return
        except UnreadableError as error:
            _set_aside(path, str(error))
            return
        if piece.damaged_bytes:
            LOG.warning("%s: %d damaged bytes were skipped", path, piece.damaged_bytes)
        if piece.blocks:
            target = folder / (path.name.removesuffix(PIECE) + SEGMENT)
            identity = piece.identity or self._identity_of(folder)
            pieces = [piece]
            if folder.name == self._identity.boot8 and self._tells_of_itself:
                pieces.append(piece_of([self._self_row()]))
            try:
                with new_segment(target, identity) as con:
                    for each in pieces:
                        insert_piece(con, each)
            except (duckdb.IOException, duckdb.OutOfMemoryException):
                raise  # the disk is full or away: the piece is good and can wait
            except duckdb.Error as error:
                _set_aside(path, first_line(error))
                return
            self.written_bytes += target.stat().st_size
        path.unlink()

    def _merge(self, folder: Path, group: Sequence[Path]) -> None:
        target = folder / merged_name(group[0], group[-1])
        try:
            if newest_schema(group) > VERSION:
                return  # merging would lose columns that are not known here
            merge_into(target, self._identity_of(folder), group)
        except duckdb.Error as error:
            damaged = {path: why for path in group if (why := verify(path)) is not None}
            if not damaged:
                raise
            LOG.warning("%s is not merged yet: %s", target, first_line(error))
            for path, why in damaged.items():
                _set_aside(path, why)
            return  # the next cycle merges the others
        self.written_bytes += target.stat().st_size
        for path in group:
            if path != target:
                path.unlink()

    def _identity_of(self, folder: Path) -> Identity:
        """Return the identity of a boot's folder: ours, or what its segments say."""
        if folder.name == self._identity.boot8:
            return self._identity
        for path in files(folder, SEGMENT):
            con = duckdb.connect(":memory:")
            try:
                attach(con, path, "old")
                return read_info(con, "old").identity
            except (duckdb.Error, ValueError):
                continue
            finally:
                con.close()
        return Identity(node=self._identity.node, boot_id=folder.name)

    def _self_row(self) -> AgentSelf:
        return AgentSelf(
            mono_ns=self._clock.mono_ns(),
            part="keeper",
            pid=self._pid,
            cpu_ns=self._clock.process_cpu_ns(),
            rss_bytes=resident_bytes(self._host),
            written_bytes=self.written_bytes,
            rows_lost=0,
        )


def _tidy(folder: Path) -> None:
    """Finish what a crash cut off: half-written files, and pieces and segments already replaced."""
    for part in [*files(folder, PART), *files(folder, PART + ".wal")]:
        part.unlink(missing_ok=True)
    segments = [(path, held) for path in files(folder, SEGMENT) if (held := span(path))]
    for path, (begin, end) in segments:
        for other, (first, last) in segments:
            if other != path and begin <= first and last <= end and path.exists():
                other.unlink(missing_ok=True)
    for piece in files(folder / "spool", PIECE):
        at = span(piece)
        if at and any(begin <= at[0] <= end for _, (begin, end) in segments):
            piece.unlink(missing_ok=True)


def _set_aside(path: Path, why: str) -> None:
    """Put what cannot be read out of the way, where a person finds it."""
    LOG.warning("%s cannot be read and was set aside as %s%s: %s", path, path.name, DAMAGED, why)
    path.rename(path.with_name(path.name + DAMAGED))
    sync(path.parent)


def keep_at_once(recording: Path, identity: Identity) -> None:
    """Turn the whole spool of a recording that nobody writes any more into one segment."""
    host = LiveHost("/", SystemClock())
    keeper = Keeper(recording, identity, host, pid=os.getpid())
    keeper.cycle(drain=True)
    keeper.merge(everything=True)
    host.close()
