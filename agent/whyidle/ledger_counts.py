"""What the ledger's counters stand at: whole nanoseconds by GPU, pool and cause since this boot.

Counters are sums of settled rows and of nothing else. They go on after a restart of the keeper from
what the ledger holds, so that they step back only when the machine boots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from whyidle.schema import LedgerTotal, Settled, SettledGpu

# Jobs whose own counters are kept: those that had a GPU last. A node runs few at a time.
JOBS_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Part:
    """What a counter counts; `cause` and `subcause` are None for working."""

    uuid: str
    pool: str
    cause: str | None
    subcause: str | None


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counters in ns, by part; `by_job` has them again for each job that was known."""

    begin_ns: int | None = None
    settled_ns: int | None = None
    gpus: dict[str, int | None] = field(default_factory=dict)
    total: dict[Part, int] = field(default_factory=dict)
    # Jobs in the order in which they last had a GPU.
    by_job: dict[str, dict[Part, int]] = field(default_factory=dict)

    def settle(
        self, begin_ns: int, end_ns: int, gpus: Iterable[SettledGpu], causes: Iterable[Settled]
    ) -> None:
        """Add an interval that was settled."""
        self.begin_ns = begin_ns if self.begin_ns is None else self.begin_ns
        self.settled_ns = end_ns
        for gpu in gpus:
            for pool, ns in (
                ("working", gpu.working_ns),
                ("empty", gpu.empty_ns),
                ("spinning", gpu.spinning_ns),
            ):
                cause = None
                self._add(Part(gpu.uuid, pool, cause, cause), gpu.gpu, gpu.job, ns)
        for row in causes:
            part = Part(row.uuid, row.pool, row.cause, row.subcause)
            self._add(part, row.gpu, row.job, row.idle_ns)

    def resume(self, rows: Iterable[LedgerTotal]) -> None:
        """Take over what the counters stood at."""
        for row in rows:
            part = Part(row.uuid, row.pool, row.cause, row.subcause)
            self.begin_ns = row.begin_ns
            self.settled_ns = row.mono_ns
            self.gpus[row.uuid] = row.gpu
            into = self.total if row.job is None else self.by_job.setdefault(row.job, {})
            into[part] = row.total_ns

    def rows(self) -> list[LedgerTotal]:
        """Return what the counters stand at, as `resume` takes it."""
        if self.begin_ns is None or self.settled_ns is None:
            return []
        found = []
        jobs: list[tuple[str | None, Mapping[Part, int]]] = [(None, self.total)]
        jobs.extend(self.by_job.items())
        for job, parts in jobs:
            for part, total in parts.items():
                found.append(
                    LedgerTotal(
                        mono_ns=self.settled_ns,
                        uuid=part.uuid,
                        pool=part.pool,
                        cause=part.cause,
                        subcause=part.subcause,
                        job=job,
                        gpu=self.gpus.get(part.uuid),
                        begin_ns=self.begin_ns,
                        total_ns=total,
                    )
                )
        return found

    def copy(self) -> Counts:
        """Return a copy that later settlements leave alone."""
        return Counts(
            begin_ns=self.begin_ns,
            settled_ns=self.settled_ns,
            gpus=dict(self.gpus),
            total=dict(self.total),
            by_job={job: dict(parts) for job, parts in self.by_job.items()},
        )

    def _add(self, part: Part, gpu: int | None, job: str | None, ns: int) -> None:
        self.gpus[part.uuid] = gpu if gpu is not None else self.gpus.get(part.uuid)
        self.total[part] = self.total.get(part, 0) + ns
        if job is None:
            return
        parts = self.by_job.pop(job, {})
        self.by_job[job] = parts  # the last to have had a GPU stands last
        parts[part] = parts.get(part, 0) + ns
        while len(self.by_job) > JOBS_LIMIT:
            del self.by_job[next(iter(self.by_job))]
