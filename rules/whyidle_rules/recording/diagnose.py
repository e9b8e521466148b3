"""From recordings to a diagnosis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import duckdb

from whyidle.store import Damaged
from whyidle_rules.diagnosis import Diagnosis, GpuLedger, Quality, Run, Totals
from whyidle_rules.findings import findings
from whyidle_rules.ledger import (
    Charge,
    Place,
    by_cause,
    ledger_rows,
    root_causes,
    split,
)
from whyidle_rules.recording import chains, clocks, jobs, stages, waits
from whyidle_rules.recording.engine import Filled, batches, load
from whyidle_rules.recording.spans import Machine, wall_offsets
from whyidle_rules.recording.tally import Sums, Tally
from whyidle_rules.recording.unseen import not_seen
from whyidle_rules.recording.windows import Gpu
from whyidle_rules.report.headline import headline
from whyidle_rules.rule import Rule

_GpuKey = tuple[str, str]  # node, uuid
FELT_AS_WAIT = ("collective", "late_rank")
FELT_AS_HANG = ("collective", "hang")


def diagnose(
    con: duckdb.DuckDBPyConnection,
    sources: Sequence[str],
    rules: Sequence[Rule],
    spans: Mapping[Machine, tuple[int, int]],
    damaged: Sequence[Damaged] = (),
) -> Diagnosis:
    """Diagnose the windows inside `spans`."""
    filled = load(con, spans=spans)
    tally = Tally(filled)
    for batch in batches(con, filled, rules):
        tally.add(batch)
    sums = tally.sums
    charges = _charges(filled, tally)
    everything = [charge for own in charges.values() for charge in own]
    gpu_ns = round(sum(each.seconds["d_s"] for each in sums.values()) * 1e9)
    roots = root_causes(everything, gpu_ns)
    rows = ledger_rows(everything, gpu_ns)
    totals = _totals(sums)
    told = findings(tally.told, rules, roots, totals.gpu_s)
    gpus = [
        _gpu(
            filled.gpus[number],
            sums[key],
            charges.get(key, []),
            waits.waited_for(filled.waits, number),
        )
        for key, number in _once(filled.gpus).items()
    ]
    about = _run(con, sources, filled, sums)
    return Diagnosis(
        run=about,
        totals=totals,
        ledger=rows,
        root_causes=roots,
        gpus=gpus,
        findings=told,
        not_seen=not_seen(con, rules, tally.unseen, totals.gpu_s, damaged, filled.waits.clashes),
        quality=_quality(con, filled),
        headline=headline(
            totals=totals, root_causes=roots, ledger=rows, gpus=gpus, run=about, findings=told
        ),
    )


def _once(gpus: Sequence[Gpu]) -> dict[_GpuKey, int]:
    """Return the number of each GPU, once, whatever boots it was seen in."""
    return {(gpu.node, gpu.uuid): number for number, gpu in enumerate(gpus)}


def _charges(filled: Filled, tally: Tally) -> dict[_GpuKey, list[Charge]]:
    arisen = _arisen(filled)
    places = [Place(node=gpu.node, rank=tally.sums[gpu.node, gpu.uuid].rank) for gpu in filled.gpus]
    found: dict[_GpuKey, list[Charge]] = defaultdict(list)
    for felt in sorted(
        tally.charges, key=lambda felt: (felt[0], [word or "~" for word in felt[1:]])
    ):
        number, cause, subcause, grade, pool = felt
        ns = tally.charges[felt]
        gpu, place = filled.gpus[number], places[number]
        weights = arisen.get((number, cause, subcause), {})
        shares = split(ns, weights) or {(number, cause, subcause): ns}
        for (origin, root_cause, root_subcause), part in shares.items():
            found[gpu.node, gpu.uuid].append(
                Charge(
                    gpu=place,
                    cause=cause,
                    subcause=subcause,
                    grade=grade,
                    pool=pool,
                    ns=part,
                    origin=places[origin],
                    root=(root_cause, root_subcause),
                )
            )
    return found


def _arisen(
    filled: Filled,
) -> Mapping[tuple[int, str, str], Mapping[tuple[int, str, str], float]]:
    """Return what waits arose from: weights by (GPU, cause, subcause), for each that was felt."""
    found: dict[tuple[int, str, str], dict[tuple[int, str, str], float]] = {}

    def add(felt: tuple[int, str, str], weights: Mapping[tuple[int, str, str], float]) -> None:
        into = found.setdefault(felt, {})
        for root, weight in weights.items():
            into[root] = into.get(root, 0.0) + weight

    for job in filled.waits.jobs:
        job.causes[jobs.SLOW] = job.working
        if job.pipeline is not None:
            for felt in ("stage_imbalance", "late_upstream"):
                for number, weights in stages.roots(job, job.pipeline, felt).items():
                    add((number, "pipeline_bubble", felt), weights)
            continue
        if job.chain:
            arisen = waits.roots(job)
            for felt in ("stage_imbalance", "late_upstream"):
                for number, weights in chains.roots(arisen, felt).items():
                    add((number, "pipeline_bubble", felt), weights)
            continue
        cost = clocks.lost(job)
        for row, (number, weights) in enumerate(waits.roots(job).items()):
            add((number, *FELT_AS_WAIT), clocks.apart(job, row, weights, cost))
        for row, number in enumerate(job.members):
            # Why it is gone is not recorded: its log knows. Where it is gone is.
            away = waits.gone(job, row).items()
            add((number, *FELT_AS_HANG), {(who, *FELT_AS_HANG): ns for who, ns in away})
    return {felt: weights for felt, weights in found.items() if weights}


def _totals(sums: Mapping[_GpuKey, Sums]) -> Totals:
    working, empty, spinning = (
        sum(each.seconds[name] for each in sums.values())
        for name in ("working_s", "empty_s", "spinning_s")
    )
    return Totals(
        gpu_s=working + empty + spinning,
        working_s=working,
        empty_s=empty,
        spinning_s=spinning,
        idle_s=empty + spinning,
    )


def _gpu(
    gpu: Gpu,
    sums: Sums,
    charges: Sequence[Charge],
    waited: Mapping[str, float],
) -> GpuLedger:
    return GpuLedger(
        node=gpu.node,
        gpu=gpu.index,
        uuid=gpu.uuid,
        rank=sums.rank,
        wall_s=sums.seconds["d_s"],
        working_s=sums.seconds["working_s"],
        empty_s=sums.seconds["empty_s"],
        spinning_s=sums.seconds["spinning_s"],
        underfilled_s=sums.seconds.get("underfilled_s"),
        causes=by_cause(charges),
        waited_for=dict(waited),
        trace=None,
        source=gpu.source,
        name=gpu.name,
    )


def _run(
    con: duckdb.DuckDBPyConnection,
    sources: Sequence[str],
    filled: Filled,
    sums: Mapping[_GpuKey, Sums],
) -> Run:
    """Times are wall time, ns since 1970; without any clock reading, monotonic time."""
    offsets = wall_offsets(con)
    dated = [gpu for gpu in filled.gpus if gpu.machine in offsets] or filled.gpus
    begins = [int(gpu.t0[0]) + offsets.get(gpu.machine, 0) for gpu in dated]
    ends = [int(gpu.t1[-1]) + offsets.get(gpu.machine, 0) for gpu in dated]
    ranks = sorted({own.rank for own in sums.values() if own.rank is not None})
    world = [own.world_size for own in sums.values() if own.world_size is not None]
    job = {"world_size": max(world), "ranks": ranks} if world else None
    return Run(
        source=list(sources),
        kind="recording",
        begin_ns=min(begins, default=None),
        end_ns=max(ends, default=None),
        nodes=sorted({gpu.node for gpu in filled.gpus}),
        job=job,
    )


def _quality(con: duckdb.DuckDBPyConnection, filled: Filled) -> Quality:
    missed = con.execute("SELECT sum(missed) FROM tick").fetchone()
    error = con.execute("SELECT max(wall_error_ns) FROM clock WHERE synchronised").fetchone()
    cost = con.execute(
        "SELECT avg(ratio) FROM (SELECT node, sum(grown) / max(length) AS ratio FROM"
        " (SELECT node, part, pid, max(cpu_ns)::DOUBLE - min(cpu_ns) AS grown,"
        "   max(mono_ns)::DOUBLE - min(mono_ns) AS length FROM agent_self GROUP BY ALL)"
        " WHERE length > 0 GROUP BY node)"
    ).fetchone()
    return Quality(
        missed_ticks=missed[0] if missed else None,
        gaps_s=sum(gpu.unknown_ns for gpu in filled.gpus) / 1e9 if filled.gpus else None,
        # What ranks did together tells it better than the clocks do of themselves.
        clock_error_ns=filled.waits.clocks.error_ns or (error[0] if error else None),
        agent_cpu_ratio=cost[0] if cost else None,
    )
