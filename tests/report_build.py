"""Builders of diagnoses for the tests of the report; they add up as the contract demands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from whyidle_rules.diagnosis import (
    Diagnosis,
    Finding,
    GpuLedger,
    Grade,
    LedgerRow,
    NotSeen,
    Quality,
    Root,
    RootCause,
    Run,
    Totals,
    Where,
)
from whyidle_rules.report.headline import headline

UNKNOWN_QUALITY = Quality(missed_ticks=None, gaps_s=None, clock_error_ns=None, agent_cpu_ratio=None)
NODE = "ip-172-31-16-248"


def gpu(
    rank: int | None,
    wall_s: float,
    *,
    empty_s: float = 0.0,
    spinning_s: float = 0.0,
    node: str = NODE,
    index: int | None = None,
    causes: dict[str, float] | None = None,
    waited_for: dict[str, float] | None = None,
    underfilled_s: float | None = None,
) -> GpuLedger:
    return GpuLedger(
        node=node,
        gpu=rank if index is None else index,
        uuid=None,
        rank=rank,
        wall_s=wall_s,
        working_s=wall_s - empty_s - spinning_s,
        empty_s=empty_s,
        spinning_s=spinning_s,
        underfilled_s=underfilled_s,
        causes=causes or {},
        waited_for=waited_for or {},
        trace=None,
    )


def row(
    cause: str,
    subcause: str,
    empty_s: float = 0.0,
    spinning_s: float = 0.0,
    *,
    grade: Grade | None = "measured",
    where: Where = "self",
    node: str | None = NODE,
    rank: int | None = None,
    root: tuple[str, str] | None = None,
) -> LedgerRow:
    """A ledger row; its share is put in by `diagnosis`."""
    of_cause, of_subcause = root or (cause, subcause)
    return LedgerRow(
        cause=cause,
        subcause=subcause,
        grade=grade,
        idle_s=empty_s + spinning_s,
        empty_s=empty_s,
        spinning_s=spinning_s,
        share=0.0,
        root=Root(where=where, node=node, rank=rank, cause=of_cause, subcause=of_subcause),
    )


def roots(ledger: Sequence[LedgerRow], idle_s: float) -> list[RootCause]:
    sums: dict[tuple[str, str, str | None, int | None], float] = {}
    for one in ledger:
        key = (one.root.cause, one.root.subcause, one.root.node, one.root.rank)
        sums[key] = sums.get(key, 0.0) + one.idle_s
    return [
        RootCause(
            cause=cause,
            subcause=subcause,
            node=node,
            rank=rank,
            idle_s=seconds,
            share=seconds / idle_s if idle_s > 0 else 0.0,
        )
        for (cause, subcause, node, rank), seconds in sums.items()
    ]


def diagnosis(
    gpus: list[GpuLedger],
    ledger: list[LedgerRow],
    *,
    kind: Literal["recording", "trace"] = "trace",
    source: list[str] | None = None,
    findings: list[Finding] | None = None,
    not_seen: list[NotSeen] | None = None,
    quality: Quality = UNKNOWN_QUALITY,
    job: Mapping[str, object] | None = None,
) -> Diagnosis:
    empty_s = math.fsum(one.empty_s for one in gpus)
    spinning_s = math.fsum(one.spinning_s for one in gpus)
    totals = Totals(
        gpu_s=math.fsum(one.wall_s for one in gpus),
        working_s=math.fsum(one.working_s for one in gpus),
        empty_s=empty_s,
        spinning_s=spinning_s,
        idle_s=empty_s + spinning_s,
    )
    run = Run(
        source=source or ["trace.json.gz"],
        kind=kind,
        begin_ns=None,
        end_ns=None,
        nodes=sorted({one.node for one in gpus if one.node is not None}),
        job=None if job is None else dict(job),
    )
    root_causes = roots(ledger, totals.idle_s)
    return Diagnosis(
        run=run,
        totals=totals,
        ledger=ledger,
        root_causes=root_causes,
        gpus=gpus,
        findings=findings or [],
        not_seen=not_seen or [],
        quality=quality,
        headline=headline(
            totals=totals,
            root_causes=root_causes,
            ledger=ledger,
            gpus=gpus,
            run=run,
            findings=findings or [],
        ),
    )


def finding(
    rule: str,
    cause: str,
    subcause: str,
    idle_s: float,
    *,
    title: str,
    says: str,
    advice: str,
    returned_s: float | None = None,
    severity: Literal["info", "warning", "critical"] = "critical",
    owner: str = "application",
    evidence: dict[str, object] | None = None,
    grade: Grade | None = "measured",
    ranks: list[int] | None = None,
    why: str = "",
) -> Finding:
    return Finding(
        rule=rule,
        title=title,
        severity=severity,
        cause=cause,
        subcause=subcause,
        owner=owner,
        idle_s=idle_s,
        says=says,
        evidence=evidence or {},
        advice=advice,
        what_if=None if returned_s is None else {"gpu_s_returned": returned_s},
        why=why,
        grade=grade,
        ranks=ranks or [],
    )
