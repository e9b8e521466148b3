"""Evidence that goes missing never makes a case against anybody, and nothing breaks on it.

Each table of a recording is emptied, and each of its columns set to NULL, one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import duckdb
import pytest

from recording_rows import connect
from recording_stories import eventful
from test_recording_engine import check
from whyidle.schema import TABLES
from whyidle.table import table_of
from whyidle_rules.recording import engine
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

USED = sorted({table_of(type(row)).name for row in eventful()})
# Of 55 s of wall: what neighbours of a change may move.
SLACK_S = 0.25


def charged(con: duckdb.DuckDBPyConnection) -> Counter[str]:
    """Return seconds by cause."""
    return Counter(
        dict(con.execute("SELECT cause, sum(ns) / 1e9 FROM grants GROUP BY ALL").fetchall())
    )


@pytest.fixture(scope="module")
def rules() -> Sequence[Rule]:
    return load_rules()


# What may grow after all: without which columns of a table ("" for all), by how many seconds, why.
KEYS = ("", "mono_ns", "pid", "start_ns")
RECORDS = (*KEYS, "kind", "background", "begin_ns", "end_ns")
ALLOWED: Mapping[tuple[bool, str], tuple[Sequence[str], Mapping[str, float]]] = {
    # Rules for jobs without a page infer: they take the evaluation for a pause, and a second more
    # for the checkpoint.
    (True, "probe"): (KEYS, {"host_pause": 3.0, "storage": 1.0}),
    # The totals of a page hold the waits and pauses inside an evaluation as part of it.
    (True, "probe_event"): (RECORDS, {"lifecycle": 1.0}),
    # A thread that waits for FUSE sleeps; only the kernel function says that it waits for a file.
    (False, "process"): (("wait_channel",), {"host_pause": 3.0}),
}


@pytest.mark.parametrize(
    "probed",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["page", "no_page"],
)
@pytest.mark.parametrize("table", USED)
def test_what_is_missing_accuses_nobody(table: str, probed: bool, rules: Sequence[Rule]) -> None:
    spec = next(table_of(kind) for kind in TABLES if table_of(kind).name == table)
    grown: list[tuple[str, str, float]] = []
    with connect(eventful(probed=probed)) as con:
        engine.evaluate(con, rules)
        whole = charged(con)
        con.execute(f'CREATE TABLE kept AS SELECT * FROM "{table}"')
        for column in ["", *(column.name for column in spec.columns)]:
            con.execute(f'DELETE FROM "{table}"')
            if column:
                con.execute(
                    f'INSERT INTO "{table}" SELECT * REPLACE (NULL AS "{column}") FROM kept'
                )
            engine.evaluate(con, rules)
            check(con)
            for cause, seconds in (charged(con) - whole).items():
                columns, most = ALLOWED.get((probed, table), ((), {}))
                allowed = most.get(cause, SLACK_S) if column in columns else SLACK_S
                if seconds > allowed:
                    grown.append((column, cause, round(seconds, 2)))
    assert grown == [], f"{len(grown)} columns"


@pytest.mark.parametrize("table", USED)
def test_a_diagnosis_without_it_is_one(table: str, rules: Sequence[Rule]) -> None:
    with connect(eventful()) as con:
        con.execute(f'DELETE FROM "{table}"')
        found = diagnose(con, ["x"], rules, spans(con, None, None))
    if table != "gpu_activity":
        assert found.totals.gpu_s == pytest.approx(55)
        assert found.headline
