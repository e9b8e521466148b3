"""An evaluator with a truth of its own, and a ledger in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.ledger import Ledger
from whyidle.ledger_counts import Counts, Part
from whyidle.schema import Settled, SettledGpu
from whyidle.settle import Evaluation, Settler
from world.machine import IDENTITY, Machine

UUIDS = ("GPU-a", "GPU-b")
CHARGES = (
    ("empty", "storage", "nfs_read", "observed"),
    ("empty", "host_pause", "gc", "measured"),
    ("empty", "unattributed", "no_evidence", None),
    ("spinning", "collective", "late_rank", "inferred"),
)
BEGIN_S = 10_000


@dataclass(slots=True)
class Seeded:
    """Charges that depend on the interval alone; raises what it is told to."""

    raises: Exception | None = None
    asked: list[tuple[int, int]] = field(default_factory=list)

    def evaluate(self, begin_ns: int, end_ns: int) -> Evaluation:
        self.asked.append((begin_ns, end_ns))
        if self.raises is not None:
            raise self.raises
        return charged(begin_ns, end_ns)


def charged(begin_ns: int, end_ns: int) -> Evaluation:
    luck = random.Random(begin_ns)
    gpus, causes = [], []
    for index, uuid in enumerate(UUIDS):
        job = f"job{begin_ns // (600 * NS_PER_S)}" if index else None
        left = end_ns - begin_ns
        pools = {"empty": 0, "spinning": 0}
        for pool, cause, subcause, grade in CHARGES:
            ns = luck.randrange(left // 4) * luck.randrange(2)
            left -= ns
            pools[pool] += ns
            if ns:
                causes.append(
                    Settled(
                        mono_ns=end_ns,
                        uuid=uuid,
                        pool=pool,
                        cause=cause,
                        subcause=subcause,
                        grade=grade,
                        gpu=index,
                        job=job,
                        idle_ns=ns,
                    )
                )
        gpus.append(
            SettledGpu(
                mono_ns=end_ns,
                uuid=uuid,
                gpu=index,
                job=job,
                windows=240,
                working_ns=left,
                empty_ns=pools["empty"],
                spinning_ns=pools["spinning"],
                underfilled_ns=None,
                compute_fill_ratio=0.9,
                comm_fill_ratio=0.1,
            )
        )
    return Evaluation(windows=480, gpus=gpus, causes=causes)


def expected(intervals: list[tuple[int, int]]) -> dict[Part, int]:
    """Return what counters stand at after these intervals."""
    counts = Counts()
    for begin, end in intervals:
        found = charged(begin, end)
        counts.settle(begin, end, found.gpus, found.causes)
    return counts.total


class Node:
    """A settler on a ledger, in virtual time; `restart` makes another one of what is on disk."""

    def __init__(self, recording: Path, *, seconds: float = BEGIN_S) -> None:
        self.recording = recording
        self.clock = VirtualClock(int(seconds * NS_PER_S))
        self.machine = Machine(1, clock=self.clock)
        self.evaluator = Seeded()
        self.restart()

    def restart(self) -> None:
        self.ledger = Ledger(self.recording, IDENTITY, self.machine, pid=1)
        self.settler = Settler(
            self.evaluator, self.ledger.spool, self.clock, resumed=self.ledger.resume()
        )

    def go(self, seconds: float, *, step: float = 5.0, behind: float = 1.0) -> None:
        """Look every few seconds; samples are written up to a second ago."""
        end = self.clock.now_ns + int(seconds * NS_PER_S)
        while self.clock.now_ns < end:
            self.clock.advance(int(step * NS_PER_S))
            self.settler.look(self.clock.now_ns - int(behind * NS_PER_S))
