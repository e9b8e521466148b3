"""GPUDirect Storage that is set up and moves nothing, beside a trainer that reads by itself."""

from __future__ import annotations

from typing import Any

import pytest

from recording_kit import make_row
from recording_rows import Act, clocks, connect, gpu, holds, listed, process, s, windows
from whyidle.schema import Gds
from whyidle.table import Row
from whyidle_rules.recording import engine
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule_load import load_rules

SECONDS = 40
# Reads 200 MB/s and is blocked in that for 80 % of the time.
READS = Act(run=0.2, blkio=0.8, state="D", read=200e6, asked=200e6, write=0.0)


def module(reads_per_s: float = 0.0, *, on: bool = True, **more: Any) -> list[Row]:
    values = {"processes": 1, "shadow_buffer_bytes": 64 << 20, "writes": 0, **more}
    return [
        make_row(
            Gds, mono_ns=s(second), io_stats=on,
            reads=round(second * reads_per_s) if on else None, **values,
        )
        for second in range(0, SECONDS + 1, 5)
    ]  # fmt: skip


def story(act: Act, more: list[Row]) -> list[Row]:
    held = [*holds(7, until=SECONDS), *listed(0, SECONDS)]
    trainer = process(7, [(SECONDS, act)])
    busy = [1.0, 0.0, 0.0, 0.0] * (2 * SECONDS)
    return [*clocks(0, SECONDS), gpu(), *trainer, *held, *windows(busy), *more]


def test_a_trainer_that_reads_through_the_host_while_nothing_moves_directly() -> None:
    rows = story(READS, module())
    con = connect(rows)
    found = diagnose(con, ["x"], load_rules(), spans(con, None, None))
    by_subcause = {row.subcause: row.idle_s for row in found.ledger if row.cause == "storage"}
    assert set(by_subcause) == {"gds_fallback"}
    assert by_subcause["gds_fallback"] > 0.6 * found.totals.idle_s


@pytest.mark.parametrize(
    ("act", "more"),
    [
        (READS, module(100.0)),
        (READS, module(writes=None, reads_per_s=1.0)),
        (READS, module(on=False)),
        (READS, module(processes=0)),
        (READS, module(shadow_buffer_bytes=0)),
        (Act(run=0.2, blkio=0.8, state="D", read=1e6, asked=1e6, write=0.0), module()),
        (READS, []),
    ],
    ids=[
        "it moves", "it moved a little", "statistics are off", "nobody uses it", "no buffers",
        "no data", "no module",
    ],
)  # fmt: skip
def test_what_is_no_fallback(act: Act, more: list[Row]) -> None:
    con = connect(story(act, more))
    engine.fill(con)
    bounced, blocked = con.execute(
        "SELECT sum(gds_bounced_s), sum(main_blocked_s) FROM evidence"
    ).fetchall()[0]
    assert not bounced
    assert blocked > 5
