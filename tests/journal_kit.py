"""Journals of a simulated node, and hosts whose answers a test sets."""

from __future__ import annotations

from pathlib import Path

from recording_kit import sample
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect import ALL
from whyidle.faults import FaultHost, Faults
from whyidle.host import (
    Answer,
    Argument,
    Event,
    Stat,
)
from whyidle.journal import LIMIT_BYTES, JournalWriter, RecordingHost
from whyidle.journal_replay import read_journal
from whyidle.layout import JOURNAL, files
from whyidle.replay import replay
from whyidle.runner import Due
from world.machine import IDENTITY, Machine

# What is not the collectors' is not replayed: the sampler's own cost, and what a hang was told as.
OWN = ("agent_self",)


def record(folder: Path, seed: int, faults: Faults, seconds: float) -> Path:
    """Sample a simulated node with a journal; return the journal."""
    clock = VirtualClock(1000 * NS_PER_S)
    machine = Machine(seed, clock=clock)
    faulty = FaultHost(machine, faults, seed, hang=clock.advance, step=clock.step_wall)
    writer = JournalWriter(folder / "journal", IDENTITY, clock)
    hosts = {collector: RecordingHost(faulty, writer) for collector in ALL}
    sample(
        folder,
        ALL,
        hosts.__getitem__,
        machine,
        clock,
        seconds,
        observer_for=hosts.__getitem__,
    )
    writer.close()
    (path,) = files(folder / "journal", JOURNAL)
    return path


def replayed(journal: Path, folder: Path) -> Path:
    done = replay(journal, folder, ALL)
    assert done.unknown == {}
    assert done.refused == []
    return folder


class Asked:
    """A host whose answers are set by the test."""

    def __init__(self) -> None:
        self.clock = VirtualClock(5)
        self.answers: dict[str, object] = {}

    def _answer(self, key: str) -> object:
        answer = self.answers[key]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def read(self, path: str) -> str:
        return str(self._answer(path))

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        answer = self._answer(path)
        assert isinstance(answer, bytes)
        return answer

    def names(self, path: str) -> tuple[str, ...]:
        answer = self._answer(path)
        assert isinstance(answer, tuple)
        return answer

    def link(self, path: str) -> str:
        return str(self._answer(path))

    def stat(self, path: str) -> Stat:
        answer = self._answer(path)
        assert isinstance(answer, Stat)
        return answer

    def nvml(self, call: str, *args: Argument) -> Answer:
        return self._answer(call)  # type: ignore[return-value]

    def ask(self, question: str, *args: Argument) -> Answer:
        return self._answer(question)  # type: ignore[return-value]

    def events(self, source: str) -> tuple[Event, ...]:
        answer = self._answer(source)
        assert isinstance(answer, tuple)
        return answer

    def forget(self, prefix: str) -> None: ...

    def close(self) -> None: ...


class Tape:
    """Records runs of a host and plays them back."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.inner = Asked()
        self.folder = folder
        self.writer = JournalWriter(folder, IDENTITY, self.inner.clock, limit_bytes=limit_bytes)
        self.host = RecordingHost(self.inner, self.writer)

    def begin(self) -> RecordingHost:
        self.host.begin("x", Due(1))
        return self.host

    def lines(self) -> list[dict[str, object]]:
        self.writer.close()
        (path,) = files(self.folder, JOURNAL)
        return list(read_journal(path))[1:]
