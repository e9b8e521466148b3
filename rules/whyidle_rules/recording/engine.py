"""Evaluates rules over a recording: evidence for every GPU window, and who is granted its seconds.

Readings from before and after a range are read too, so that a range cut out of a run says the same
of its windows as the whole run does, but for those within `EDGE_NS` of its ends.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules import beside, evidence
from whyidle_rules.allocate import Given, allocate, granted
from whyidle_rules.compile import compile_rules
from whyidle_rules.recording import (
    chains,
    gds,
    hardware,
    inspector,
    mounts,
    phases,
    power,
    processes,
    ranks,
    spin,
    stages,
    surroundings,
    waits,
    windows,
    written,
)
from whyidle_rules.recording import jobs as jobs_of
from whyidle_rules.recording.columns import Columns, facts, joined
from whyidle_rules.recording.fill import gpu_evidence, outline
from whyidle_rules.recording.jobs import Waits
from whyidle_rules.recording.known import Known
from whyidle_rules.recording.shown import insert, shown
from whyidle_rules.recording.spans import Machine
from whyidle_rules.recording.windows import Gpu
from whyidle_rules.rule import Rule

# The widest neighbourhood that evidence is told from.
LOOK_NS = 15 * NS_PER_S
# What a mount would give is told from the waits of windows around, and those from their own.
EDGE_NS = LOOK_NS + mounts.AROUND_NS
_NEVER = 1 << 61
# Evidence of so many windows is made at a time, of one GPU at least: eight for an hour.
BATCH_WINDOWS = 300_000
_WORDS = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """The GPUs of the evidence, the number of the first window of each, and who waited for whom."""

    gpus: list[Gpu]
    first: list[int]
    waits: Waits
    known: Mapping[Machine, Known]
    fills: Sequence[float | None]

    @property
    def parts(self) -> list[slice]:
        """Windows of each GPU."""
        return [slice(n, n + len(gpu.t0)) for gpu, n in zip(self.gpus, self.first, strict=True)]

    def batches(self) -> Iterator[Sequence[int]]:
        """Yield numbers of GPUs of one node, few enough to be evaluated at a time."""
        batch: list[int] = []
        windows = 0
        for number, gpu in enumerate(self.gpus):
            more = windows + len(gpu.t0)
            if batch and (self.gpus[batch[0]].machine != gpu.machine or more > BATCH_WINDOWS):
                yield batch
                batch, windows = [], 0
            batch.append(number)
            windows += len(gpu.t0)
        if batch:
            yield batch


def evaluate(
    con: duckdb.DuckDBPyConnection,
    rules: Sequence[Rule],
    since_ns: int | None = None,
    until_ns: int | None = None,
    *,
    spans: Mapping[Machine, tuple[int, int]] | None = None,
) -> Filled:
    """Create tables `evidence`, `grants` and `leftovers` of the windows that end in (since, until].

    `con` has the views of a recording (whyidle.store). Times are CLOCK_MONOTONIC of each node;
    `spans` gives each machine (node, boot id) a range of its own and leaves out all others.
    """
    filled = fill(con, since_ns, until_ns, spans=spans)
    allocate(con, rules)
    # What is only inferred says so, whatever the rule that took it is worth elsewhere.
    con.execute(
        "UPDATE grants SET grade = 'inferred' FROM evidence e WHERE e.window_id = grants.window_id"
        " AND (grants.pool = 'spinning'"
        "  OR (grants.\"group\" = 'input' AND e.data_wait_inferred))"
    )
    return filled


def fill(
    con: duckdb.DuckDBPyConnection,
    since_ns: int | None = None,
    until_ns: int | None = None,
    *,
    spans: Mapping[Machine, tuple[int, int]] | None = None,
) -> Filled:
    """Create table `evidence`."""
    filled = load(con, since_ns, until_ns, spans=spans)
    con.execute("DROP TABLE IF EXISTS evidence")
    con.execute(evidence.ddl("evidence"))
    with _one_transaction(con):
        for batch in filled.batches():
            for columns in told(con, filled, batch):
                insert(con, columns)
    return filled


def load(
    con: duckdb.DuckDBPyConnection,
    since_ns: int | None = None,
    until_ns: int | None = None,
    *,
    spans: Mapping[Machine, tuple[int, int]] | None = None,
) -> Filled:
    """Return what has to be known of all GPUs before the evidence of any can be told."""
    gpus = windows.load(con, since_ns, until_ns)
    if spans is not None:
        cut = [gpu.between(*spans[gpu.machine]) for gpu in gpus if gpu.machine in spans]
        gpus = [gpu for gpu in cut if len(gpu.t0)]
    known: dict[Machine, Known] = {}
    for gpu in gpus:
        if gpu.machine not in known:
            known[gpu.machine] = _known(con, gpu.machine, gpus)
    fills = spin.fills(gpus, [known[gpu.machine].job_of(gpu) for gpu in gpus])
    outlines = (
        outline(gpu, known[gpu.machine], full).columns
        for gpu, full in zip(gpus, fills, strict=True)
    )
    lengths = [len(gpu.t0) for gpu in gpus]
    return Filled(
        gpus=gpus,
        first=[0, *itertools.accumulate(lengths[:-1])] if gpus else [],
        waits=jobs_of.find(con, gpus, outlines, known),
        known=known,
        fills=fills,
    )


def told(con: duckdb.DuckDBPyConnection, filled: Filled, batch: Sequence[int]) -> Iterator[Columns]:
    """Yield the evidence of some GPUs of one node."""
    gpus = [filled.gpus[number] for number in batch]
    known = filled.known[gpus[0].machine]
    procs = {p.identity: p for gpu in gpus for p in known.node.around(gpu.uuid)}
    since, until = _around(gpus)
    known = known.with_procs(processes.read(con, gpus[0].machine, since, until, procs.values()))
    for number, gpu in zip(batch, gpus, strict=True):
        columns = gpu_evidence(gpu, known, filled.fills[number])
        hardware.add(gpu, known.hardware, columns)
        power.add(gpu, known.power, columns)
        gds.add(gpu, known.gds, columns)
        mounts.add(gpu, known, columns)
        for job, row in filled.waits.of(number):
            with columns.only(job.own[row]) as own:
                if job.chain:
                    chains.tell(job, row, job.bins[row], own)
                elif job.pipeline is None:
                    exact = inspector.of_gpu(con, gpu, known.pids(gpu.uuid))
                    waits.tell(con, job, row, job.bins[row], filled.gpus, own, exact)
                else:
                    stages.tell(job, job.pipeline, row, job.bins[row], own)
        first = filled.first[number]
        columns["window_id"] = np.arange(first, first + len(gpu.t0), dtype=np.int64)
        yield columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """GPUs of one node by number, the evidence of each, and who is granted their seconds.

    Windows are numbered through all of them, from 0. `beside` are the windows of rules beside the
    ledger, in nanoseconds.
    """

    numbers: Sequence[int]
    columns: Sequence[Columns]
    given: Sequence[Given]
    beside: Sequence[Given]


def batches(
    con: duckdb.DuckDBPyConnection, filled: Filled, rules: Sequence[Rule]
) -> Iterator[Batch]:
    """Yield the GPUs batch by batch; what `evaluate` puts into tables, without the tables."""
    for numbers in filled.batches():
        columns = list(told(con, filled, numbers))
        everything = joined(columns)
        everything["window_id"] = np.arange(everything.size)
        queries = compile_rules(rules, "whyidle_evidence", facts(everything))
        names = {"d_s", *(name for rule in rules if rule.beside for name in rule.reads)}
        names.update(*(_WORDS.findall(query.sql) for query in queries))
        with shown(con, everything, names, "whyidle_evidence"):
            given = list(granted(con, queries))
            more = list(beside.granted(con, rules, "whyidle_evidence"))
        yield Batch(numbers=numbers, columns=columns, given=given, beside=more)


@contextmanager
def _one_transaction(con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Commit once: each commit copies what was put in, which takes twice as long as the rest."""
    con.execute("BEGIN")
    try:
        yield
    except BaseException:
        con.execute("ROLLBACK")
        raise
    con.execute("COMMIT")


def _known(con: duckdb.DuckDBPyConnection, where: Machine, gpus: Sequence[Gpu]) -> Known:
    own = [gpu for gpu in gpus if gpu.machine == where]
    since, until = _around(own)
    return Known(
        node=processes.load(con, *where, since, until),
        told=phases.load(con, *where, since, until),
        around=surroundings.load(con, *where, since, until),
        ranks=ranks.load(con, *where),
        hardware=hardware.load(con, *where, since, until),
        gds=gds.load(con, *where, since, until),
        written=written.load(con, *where, since, until),
        power=power.load(con, *where, since, until, own),
    )


def _around(gpus: Sequence[Gpu]) -> tuple[int, int]:
    """Return the time that evidence of GPUs is told from."""
    since = max(-_NEVER, min(int(gpu.t0[0]) for gpu in gpus) - LOOK_NS)
    return since, max(int(gpu.t1[-1]) for gpu in gpus) + LOOK_NS
