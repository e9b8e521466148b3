"""The sampler: runs every collector on time and hands a second of rows at a time to the spool.

It imports no DuckDB, and nothing that it waits for can be slow: collectors of blocking sources have
threads of their own, and the spool is written by one more. All due times are absolute times of the
monotonic clock, so that lateness never adds up.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from whyidle.clock import NS_PER_S, Clock
from whyidle.collect.collector import Collector
from whyidle.host import Host
from whyidle.line import Block, Buffer, Halt, Line, drive
from whyidle.runner import Runner, RunObserver, describe
from whyidle.schema import AgentSelf, CollectorError
from whyidle.spool import SpoolWriter
from whyidle.table import Row

LOG = logging.getLogger("whyidle.sampler")
FLUSH_NS = NS_PER_S
# Seconds of rows that wait for a disk that does not answer: 0.3 MB each on a busy node. What comes
# after that is lost, and counted.
QUEUE_LIMIT = 60
SELF_EVERY_FLUSHES = 5
# Failures that repeat are told every ten seconds at most; looking through them takes 0.1 ms.
REPEATED_EVERY_FLUSHES = 5
# Threads begin this much apart, so that they do not wake at the same time and wait for each other's
# interpreter lock: what one does takes 0.3 to 4 ms. Not more, for who follows finds caches warm.


STAGGER_NS = 3_000_000
# Longest wait for threads when stopping: a source that hangs must not hold the shutdown up.
JOIN_S = 3.0


@dataclass(slots=True)
class Written:
    """What became of blocks: bytes in the recording, rows that could not be written."""

    written_bytes: int = 0
    rows_lost: int = 0


class BlockWriter:
    """Writes blocks to the spool, in the calling thread; counts what a full disk loses."""

    __slots__ = (
        "_buffer",
        "_clock",
        "_failing",
        "_lock",
        "_on_written",
        "_overflowing",
        "_spool",
        "written",
    )

    def __init__(
        self,
        spool: SpoolWriter,
        clock: Clock,
        buffer: Buffer,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_written = on_written
        self._spool = spool
        self._clock = clock
        self._buffer = buffer
        self._failing = False
        self._overflowing = False
        self._lock = threading.Lock()  # the loop counts too what it has no room for
        self.written = Written()

    def write(self, block: Block) -> None:
        """Append a block; a failure is told in the next one that can be written."""
        try:
            self._spool.write(block)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next second is tried
            self.lose(block)
            self._tell("failed", "spool", describe(error))
            if not self._failing:
                LOG.error("cannot write the spool: %s", describe(error))
            self._failing = True
        else:
            if self._failing or self._overflowing:
                LOG.info("the spool is written again")
            self._failing = self._overflowing = False
        for sentence in self._spool.refused:
            with self._lock:
                self.written.rows_lost += 1
            self._tell("refused", sentence.split(" ", 1)[0], sentence)
        self._spool.refused.clear()
        self.written.written_bytes = self._spool.written_bytes
        self._on_written()

    def lose(self, block: Block) -> None:
        """Count a block that was not written."""
        with self._lock:
            self.written.rows_lost += sum(len(rows) for rows in block.values())

    def overflow(self, block: Block) -> None:
        """Lose a block for which there is no room, and say so."""
        self.lose(block)
        self._tell(
            "failed", "spool", f"the disk does not answer: rows are lost after {QUEUE_LIMIT} s"
        )
        if not self._overflowing:
            LOG.error(
                "the disk has not taken a row for %d s: rows are lost until it does", QUEUE_LIMIT
            )
        self._overflowing = True

    def close(self) -> None:
        """Finish the piece."""
        self._spool.close()

    def _tell(self, kind: str, subject: str, message: str) -> None:
        row = CollectorError(
            mono_ns=self._clock.mono_ns(),
            collector="sampler",
            kind=kind,
            subject=subject,
            message=message,
            repeats=1,
        )
        self._buffer.add([row])


class WriterThread:
    """Takes blocks off the loop's hands, so that a slow disk never delays a sample."""

    __slots__ = ("_blocks", "_thread", "_writer")

    def __init__(self, writer: BlockWriter) -> None:
        self._writer = writer
        self._blocks: queue.Queue[Block | None] = queue.Queue(QUEUE_LIMIT)
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    def write(self, block: Block) -> None:
        """Queue a block; if the disk has not answered for a minute it is lost, and counted."""
        try:
            self._blocks.put_nowait(block)
        except queue.Full:
            self._writer.overflow(block)

    def close(self) -> None:
        """Write what is queued and finish the piece, within JOIN_S."""
        with suppress(queue.Full):
            self._blocks.put(None, timeout=JOIN_S)
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            LOG.error(
                "the disk does not answer: the last %d s of rows are lost", self._blocks.qsize()
            )

    def _run(self) -> None:
        while (block := self._blocks.get()) is not None:
            self._writer.write(block)
        self._writer.close()


class Sampler:
    """Runs the collectors until it is told to stop.

    `host_for` returns the host of a collector; collectors of one `thread` are asked from one thread
    only. With `inline` everything runs in the calling thread, in virtual time: replay, simulation.
    `on_written` is called when the disk has taken a second of rows, or refused it.
    """

    __slots__ = (
        "_begin_ns",
        "_buffer",
        "_clock",
        "_flushes",
        "_host",
        "_line",
        "_lines",
        "_pid",
        "_sink",
        "_writer",
    )

    def __init__(
        self,
        collectors: Sequence[Collector],
        host_for: Callable[[Collector], Host],
        host: Host,
        spool: SpoolWriter,
        *,
        pid: int,
        inline: bool = False,
        observer_for: Callable[[Collector], RunObserver | None] = lambda collector: None,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._clock = host.clock
        self._pid = pid
        self._buffer = Buffer()
        self._flushes = 0
        begin = self._clock.mono_ns()
        names = dict.fromkeys("" if inline else one.thread for one in collectors)
        names.pop("", None)
        begins = {name: begin + at * STAGGER_NS for at, name in enumerate(names)}
        # The loop comes last, so that what the others read at the turn of a second is written then.
        self._begin_ns = begins[""] = begin + len(names) * STAGGER_NS
        groups: dict[str, list[Runner]] = {name: [] for name in begins}
        for collector in collectors:
            name = "" if inline else collector.thread
            asked = host_for(collector)
            observer = observer_for(collector)
            runner = Runner(collector, asked, begins[name], observer)
            # A journal has the answers of each run with it, to be replayed as they came.
            if not inline and observer is None:
                runner.hold(begins[name])
            groups[name].append(runner)
        inside = groups.pop("")
        self._line = Line(inside, self._clock, self._buffer) if inside else None
        self._lines = {
            name: Line(runners, self._clock, self._buffer) for name, runners in groups.items()
        }
        self._writer = BlockWriter(spool, self._clock, self._buffer, on_written)
        self._sink: BlockWriter | WriterThread = (
            self._writer if inline else WriterThread(self._writer)
        )

    def run(self, stopping: Callable[[], bool]) -> list[str]:
        """Sample until `stopping` says so, which is asked after every wait, then flush everything.

        Returns the names of threads that still hang.
        """
        halt = Halt()
        threads = [
            threading.Thread(target=drive, args=(line, halt), name=name, daemon=True)
            for name, line in self._lines.items()
        ]
        for thread in threads:
            thread.start()
        flush_at = self._begin_ns + FLUSH_NS  # as the loop's own collectors: one wake-up for both
        while not stopping():
            due = self._line.step() if self._line is not None else flush_at
            now = self._clock.mono_ns()
            if now >= flush_at:
                self._flush(now)
                flush_at += (1 + (now - flush_at) // FLUSH_NS) * FLUSH_NS
            self._clock.sleep_until(min(due, flush_at))
        halt.stop()
        for thread in threads:
            thread.join(JOIN_S / max(1, len(threads)))
        self._flush(self._clock.mono_ns(), final=True)
        self._sink.close()
        return [thread.name for thread in threads if thread.is_alive()]

    def _flush(self, now_ns: int, *, final: bool = False) -> None:
        told = final or self._flushes % REPEATED_EVERY_FLUSHES == 0
        for line in self._all_lines():
            line.watch(now_ns)
            if told:
                line.repeated(now_ns, final=final)
        if final or self._flushes % SELF_EVERY_FLUSHES == 0:
            self._buffer.add([self._self_row(now_ns)])
        self._flushes += 1
        self._sink.write(self._buffer.take())

    def _all_lines(self) -> list[Line]:
        return [*([self._line] if self._line is not None else []), *self._lines.values()]

    def _self_row(self, now_ns: int) -> Row:
        return AgentSelf(
            mono_ns=now_ns,
            part="sampler",
            pid=self._pid,
            cpu_ns=self._clock.process_cpu_ns(),
            rss_bytes=resident_bytes(self._host),
            written_bytes=self._writer.written.written_bytes,
            rows_lost=self._writer.written.rows_lost,
        )


def resident_bytes(host: Host) -> int | None:
    """Return the resident memory of the calling process, None where /proc does not tell."""
    try:
        return int(host.read("proc/self/statm").split()[1]) * 4096
    except (OSError, ValueError, IndexError):
        return None
