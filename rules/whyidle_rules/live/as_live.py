"""`diagnose --as-live`: what the live counters said, from the rows that they were made of.

No rule is evaluated: charges are those that were settled while the node recorded, without what
hindsight or other ranks could add. Sums of all rows equal the counters to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import duckdb

from whyidle.clock import NS_PER_S
from whyidle.errors import UserError
from whyidle_rules.diagnosis import Diagnosis, GpuLedger, NotSeen, Quality, Run, Totals
from whyidle_rules.ledger import Charge, Place, by_cause, ledger_rows, root_causes
from whyidle_rules.recording.spans import Machine, Moment
from whyidle_rules.report.headline import headline

_Span = tuple[int, int]
_Gpu = tuple[str, str, str]  # node, boot id, uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """Nanoseconds of a GPU in the settled intervals."""

    index: int | None
    working: int
    empty: int
    spinning: int
    underfilled: int | None


def diagnose_settled(
    con: duckdb.DuckDBPyConnection,
    sources: Sequence[str],
    since: Moment | None = None,
    until: Moment | None = None,
) -> Diagnosis:
    """Return the diagnosis of the intervals that end inside a range. Raises UserError for none."""
    spans, offsets = _spans(con, since, until)
    if not spans:
        raise UserError(
            f"{', '.join(sources)} holds no settled ledger: `whyidle agent` writes one while it "
            "records with rules; leave out --as-live to diagnose the samples."
        )
    con.execute(
        "CREATE OR REPLACE TEMP TABLE asked (node VARCHAR, boot_id VARCHAR, a BIGINT, b BIGINT)"
    )
    con.executemany(
        "INSERT INTO asked VALUES (?, ?, ?, ?)",
        [[*machine, begin, end] for machine, (begin, end) in spans.items()],
    )
    sums = _sums(con)
    charges = _charges(con)
    everything = [charge for own in charges.values() for charge in own]
    gpu_ns = sum(each.working + each.empty + each.spinning for each in sums.values())
    totals = _totals(sums.values())
    roots, rows = root_causes(everything, gpu_ns), ledger_rows(everything, gpu_ns)
    gpus = [_gpu(key, each, charges.get(key, [])) for key, each in sums.items()]
    about = Run(
        source=list(sources),
        kind="recording",
        begin_ns=min(begin + offsets[machine] for machine, (begin, _) in spans.items()),
        end_ns=max(end + offsets[machine] for machine, (_, end) in spans.items()),
        nodes=sorted({node for node, _ in spans}),
        job=None,
    )
    return Diagnosis(
        run=about,
        totals=totals,
        ledger=rows,
        root_causes=roots,
        gpus=gpus,
        findings=[],
        not_seen=_not_seen(con),
        quality=Quality(missed_ticks=None, gaps_s=None, clock_error_ns=None, agent_cpu_ratio=None),
        headline=headline(
            totals=totals, root_causes=roots, ledger=rows, gpus=gpus, run=about, findings=[]
        ),
    )


def _spans(
    con: duckdb.DuckDBPyConnection, since: Moment | None, until: Moment | None
) -> tuple[Mapping[Machine, _Span], Mapping[Machine, int]]:
    """Return what is asked for of each machine, and its wall minus monotonic time."""
    held: dict[Machine, _Span] = {}
    offsets: dict[Machine, int] = {}
    for node, boot, begin, end, offset in con.execute(
        "SELECT node, boot_id, min(begin_ns), max(mono_ns), median(wall_ns - mono_ns)::BIGINT"
        " FROM settlement GROUP BY ALL"
    ).fetchall():
        held[node, boot], offsets[node, boot] = (begin, end), int(offset)
    if not held:
        return {}, {}
    first = min(begin + offsets[machine] for machine, (begin, _) in held.items())
    last = max(end + offsets[machine] for machine, (_, end) in held.items())
    low, high = _wall(since, first, last, first), _wall(until, first, last, last)
    found = {
        machine: (max(low - offsets[machine], begin), min(high - offsets[machine], end))
        for machine, (begin, end) in held.items()
    }
    kept = {machine: span for machine, span in found.items() if span[0] < span[1]}
    if not kept:
        length = (last - first) / NS_PER_S
        raise UserError(
            f"nothing was settled between --since and --until: the ledger is {length:.0f} s long; "
            "widen the range."
        )
    return kept, offsets


def _wall(moment: Moment | None, first_ns: int, last_ns: int, otherwise_ns: int) -> int:
    if moment is None:
        return otherwise_ns
    if moment.wall_ns is not None:
        return moment.wall_ns
    if moment.before_end_ns is not None:
        return last_ns - moment.before_end_ns
    return first_ns + (moment.after_start_ns or 0)


_ASKED = "JOIN asked USING (node, boot_id) WHERE mono_ns > a AND mono_ns <= b"


def _sums(con: duckdb.DuckDBPyConnection) -> dict[_Gpu, _Sums]:
    rows = con.execute(
        "SELECT node, boot_id, uuid, arg_max(gpu, mono_ns), sum(working_ns)::BIGINT,"
        " sum(empty_ns)::BIGINT, sum(spinning_ns)::BIGINT, sum(underfilled_ns)::BIGINT"
        f" FROM settled_gpu {_ASKED} GROUP BY ALL ORDER BY node, boot_id, 4, uuid"
    ).fetchall()
    return {
        (node, boot, uuid): _Sums(
            index=index, working=working, empty=empty, spinning=spinning, underfilled=underfilled
        )
        for node, boot, uuid, index, working, empty, spinning, underfilled in rows
    }


def _charges(con: duckdb.DuckDBPyConnection) -> dict[_Gpu, list[Charge]]:
    found: dict[_Gpu, list[Charge]] = {}
    for node, boot, uuid, cause, subcause, grade, pool, ns in con.execute(
        "SELECT node, boot_id, uuid, cause, subcause, grade, pool, sum(idle_ns)::BIGINT"
        f" FROM settled {_ASKED} GROUP BY ALL ORDER BY ALL"
    ).fetchall():
        place = Place(node=node, rank=None)
        found.setdefault((node, boot, uuid), []).append(
            Charge(
                gpu=place,
                cause=cause,
                subcause=subcause,
                grade=grade,
                pool=pool,
                ns=ns,
                origin=place,
                root=(cause, subcause),
            )
        )
    return found


def _totals(sums: Iterable[_Sums]) -> Totals:
    each = list(sums)
    working = sum(one.working for one in each)
    empty = sum(one.empty for one in each)
    spinning = sum(one.spinning for one in each)
    return Totals(
        gpu_s=(working + empty + spinning) / NS_PER_S,
        working_s=working / NS_PER_S,
        empty_s=empty / NS_PER_S,
        spinning_s=spinning / NS_PER_S,
        idle_s=(empty + spinning) / NS_PER_S,
    )


def _gpu(key: _Gpu, sums: _Sums, charges: Sequence[Charge]) -> GpuLedger:
    return GpuLedger(
        node=key[0],
        gpu=sums.index,
        uuid=key[2],
        rank=None,
        wall_s=(sums.working + sums.empty + sums.spinning) / NS_PER_S,
        working_s=sums.working / NS_PER_S,
        empty_s=sums.empty / NS_PER_S,
        spinning_s=sums.spinning / NS_PER_S,
        underfilled_s=None if sums.underfilled is None else sums.underfilled / NS_PER_S,
        causes=by_cause(charges),
        waited_for={},
        trace=None,
    )


def _not_seen(con: duckdb.DuckDBPyConnection) -> list[NotSeen]:
    """Say what was settled badly, or not at all."""
    found = []
    for node, count, why in con.execute(
        f"SELECT node, count(*), arg_max(failure, mono_ns) FROM settlement {_ASKED}"
        " AND failure IS NOT NULL GROUP BY node ORDER BY node"
    ).fetchall():
        what = f"causes in {count} intervals of {node}"
        found.append(NotSeen(what=what, why=str(why), rules=[]))
    for node, skipped in con.execute(
        f"SELECT node, sum(skipped_ns)::BIGINT FROM settlement {_ASKED}"
        " GROUP BY node HAVING sum(skipped_ns) > 0 ORDER BY node"
    ).fetchall():
        what = f"{skipped / NS_PER_S:.0f} s of {node}"
        why = "they were too old to be settled when the keeper came back"
        found.append(NotSeen(what=what, why=why, rules=[]))
    return found
