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
# Of 55 s of wall: what rounding and splitting may move.
SLACK_S = 0.02


def charged(con: duckdb.DuckDBPyConnection) -> Counter[str]:
    """Return seconds by cause."""
    return Counter(
        dict(con.execute("SELECT cause, sum(ns) / 1e9 FROM grants GROUP BY ALL").fetchall())
    )


@pytest.fixture(scope="module")
def rules() -> Sequence[Rule]:
    return load_rules()


# Told by a rule or by a rule's column on purpose, with the cause that may grow and why.
ALLOWED: Mapping[tuple[bool, str, str], tuple[str, str]] = {}


@pytest.mark.parametrize("probed", [True, False], ids=["page", "no_page"])
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
                allowed = ALLOWED.get((probed, table, column), ("", ""))[0]
                if seconds > SLACK_S and cause != allowed:
                    grown.append((column, cause, round(seconds, 2)))
    assert grown == []


@pytest.mark.parametrize("table", USED)
def test_a_diagnosis_without_it_is_one(table: str, rules: Sequence[Rule]) -> None:
    with connect(eventful()) as con:
        con.execute(f'DELETE FROM "{table}"')
        found = diagnose(con, ["x"], rules, spans(con, None, None))
    if table != "gpu_activity":
        assert found.totals.gpu_s == pytest.approx(55)
        assert found.headline
