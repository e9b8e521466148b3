"""From trace files to a diagnosis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import duckdb

from whyidle_rules.allocate import allocate
from whyidle_rules.diagnosis import (
    Diagnosis,
    GpuLedger,
    Quality,
    Run,
    StepPartition,
    Totals,
    TracePartition,
)
from whyidle_rules.findings import findings, heard
from whyidle_rules.ledger import (
    UNATTRIBUTED,
    Charge,
    Place,
    by_cause,
    ledger_rows,
    root_causes,
    split,
)
from whyidle_rules.report.headline import headline
from whyidle_rules.rule import Rule
from whyidle_rules.trace.device import Parts
from whyidle_rules.trace.fill import Filled, fill
from whyidle_rules.trace.gaps import Piece
from whyidle_rules.trace.origin import Charged, RootKey, roots_of_waits
from whyidle_rules.trace.run import RunGpu, TraceRun
from whyidle_rules.trace.unseen import not_seen

FELT_AS_WAIT = ("collective", "late_rank")


def diagnose(
    con: duckdb.DuckDBPyConnection,
    sources: Sequence[Path],
    run: TraceRun,
    rules: Sequence[Rule],
) -> Diagnosis:
    """Diagnose an assembled run; leaves `evidence`, `grants` and `leftovers` in `con`."""
    filled = fill(con, run)
    allocate(con, rules, "trace_evidence")
    charges = _charges(con, run, filled)
    everything = [charge for own in charges for charge in own]
    gpu_ns = sum(gpu.trace.parts.window for gpu in run.gpus)
    roots = root_causes(everything, gpu_ns)
    rows = ledger_rows(everything, gpu_ns)
    totals = _totals(run)
    told = findings(heard(con, rules), rules, roots, totals.gpu_s)
    gpus = [_gpu(run, place, own) for place, own in enumerate(charges)]
    about = _run(sources, run)
    return Diagnosis(
        run=about,
        totals=totals,
        ledger=rows,
        root_causes=roots,
        gpus=gpus,
        findings=told,
        not_seen=not_seen(con, run, rules),
        quality=Quality(missed_ticks=None, gaps_s=None, clock_error_ns=None, agent_cpu_ratio=None),
        headline=headline(
            totals=totals,
            root_causes=roots,
            ledger=rows,
            gpus=gpus,
            run=about,
            findings=told,
        ),
    )


def _charges(con: duckdb.DuckDBPyConnection, run: TraceRun, filled: Filled) -> list[list[Charge]]:
    """Return what every GPU's idle time was charged to."""
    by_row: dict[int, list[Charged]] = defaultdict(list)
    if run.matched:
        for row, cause, subcause, ns in con.execute(
            "SELECT window_id, cause, subcause, ns FROM grants UNION ALL"
            f" SELECT window_id, '{UNATTRIBUTED}', subcause, ns FROM leftovers"
        ).fetchall():
            by_row[row].append(Charged(cause, subcause, ns))
    for table in ("grants", "leftovers"):  # preludes have told what they could
        con.execute(f"DELETE FROM {table} WHERE window_id >= {filled.count}")
    waits = roots_of_waits(run, filled, by_row)
    out: list[list[Charge]] = [[] for _ in run.gpus]
    for place, cause, subcause, grade, pool, ns in con.execute(
        "SELECT p.place, c.cause, c.subcause, c.grade, c.pool, sum(c.ns)::BIGINT FROM"
        " (SELECT window_id, cause, subcause, grade, pool, ns FROM grants UNION ALL"
        f"  SELECT window_id, '{UNATTRIBUTED}', subcause, NULL, pool, ns FROM leftovers) c"
        " JOIN trace_rows p USING (window_id) GROUP BY ALL ORDER BY ALL"
    ).fetchall():
        gpu = _place(run.gpus[place])
        roots: dict[RootKey, int] = {}
        if (cause, subcause) == FELT_AS_WAIT:
            weights: dict[RootKey, float] = defaultdict(float)
            for shares in waits[place].values():
                for key, weight in shares.items():
                    weights[key] += weight
            roots = split(ns, weights)
        for key, part in (roots or {RootKey(place, cause, subcause): ns}).items():
            out[place].append(
                Charge(
                    gpu=gpu,
                    cause=cause,
                    subcause=subcause,
                    grade=grade,
                    pool=pool,
                    ns=part,
                    origin=_place(run.gpus[key.gpu]),
                    root=(key.cause, key.subcause),
                )
            )
    return out


def _place(gpu: RunGpu) -> Place:
    return Place(node=gpu.file.node, rank=gpu.rank)


def _totals(run: TraceRun) -> Totals:
    parts = [gpu.trace.parts for gpu in run.gpus]
    working = sum(part.compute for part in parts)
    empty = sum(part.exposed_copy + part.idle for part in parts)
    spinning = sum(part.exposed_comm for part in parts)
    return Totals(
        gpu_s=(working + empty + spinning) / 1e9,
        working_s=working / 1e9,
        empty_s=empty / 1e9,
        spinning_s=spinning / 1e9,
        idle_s=(empty + spinning) / 1e9,
    )


def _run(sources: Sequence[Path], run: TraceRun) -> Run:
    parts = [gpu.trace.parts for gpu in run.gpus]
    ranks = sorted({gpu.rank for gpu in run.gpus if gpu.rank is not None})
    job = None
    if ranks or run.world_size is not None:
        job = {"world_size": run.world_size, "ranks": ranks}
    return Run(
        source=[str(path) for path in sources],
        kind="trace",
        begin_ns=min((part.begin for part in parts), default=None),
        end_ns=max((part.end for part in parts), default=None),
        nodes=sorted({gpu.node for gpu in run.gpus if gpu.node is not None}),
        job=job,
    )


def _gpu(run: TraceRun, place: int, charges: Sequence[Charge]) -> GpuLedger:
    gpu = run.gpus[place]
    parts = gpu.trace.parts
    spin = gpu.spin
    waited: dict[int, int] = defaultdict(int)
    waiting = spin.kinds == Piece.WAIT
    lengths = (spin.spans[:, 1] - spin.spans[:, 0])[waiting]
    for late, ns in zip(spin.late[waiting].tolist(), lengths.tolist(), strict=True):
        waited[late] += ns
    described = gpu.file.gpus.get(gpu.trace.device)
    return GpuLedger(
        node=gpu.node,
        gpu=gpu.trace.device if gpu.trace.device >= 0 else None,
        uuid=None,
        rank=gpu.rank,
        wall_s=parts.window / 1e9,
        working_s=parts.compute / 1e9,
        empty_s=(parts.exposed_copy + parts.idle) / 1e9,
        spinning_s=parts.exposed_comm / 1e9,
        underfilled_s=None,
        causes=by_cause(charges),
        waited_for={
            str(run.gpus[late].rank): ns / 1e9
            for late, ns in sorted(waited.items(), key=lambda item: -item[1])
        },
        trace=_partition(parts),
        source=gpu.file.path.name,
        name=described.name if described else None,
        steps=[
            StepPartition(step=str(number), begin_ns=step.begin, parts=_partition(step))
            for number, step in gpu.trace.steps
        ],
    )


def _partition(parts: Parts) -> TracePartition:
    return TracePartition(
        window_s=parts.window / 1e9,
        compute_s=parts.compute / 1e9,
        exposed_comm_s=parts.exposed_comm / 1e9,
        exposed_copy_s=parts.exposed_copy / 1e9,
        idle_s=parts.idle / 1e9,
    )
