"""A diagnosis goes GPU by GPU and adds up arrays; tables of the whole recording say the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import duckdb
import pytest

from recording_rows import Rows, connect
from recording_stories import anything, checkpointed, eventful
from whyidle_rules.recording import engine
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.engine import Batch
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

Windows = dict[tuple[str, str, int], int]  # rule or subcause of what is left, pool, window


@pytest.fixture(scope="module")
def rules() -> Sequence[Rule]:
    return load_rules()


@pytest.fixture(autouse=True)
def one_gpu_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BATCH_WINDOWS", 1)


def tables(con: duckdb.DuckDBPyConnection, rules: Sequence[Rule]) -> Windows:
    engine.evaluate(con, rules)
    found: Windows = defaultdict(int)
    for name, pool, window, ns in con.execute(
        "SELECT rule::VARCHAR, pool, window_id, ns FROM grants UNION ALL"
        " SELECT subcause::VARCHAR, pool, window_id, ns FROM leftovers"
    ).fetchall():
        found[name, pool, window] += ns
    return found


def batches(con: duckdb.DuckDBPyConnection, rules: Sequence[Rule]) -> Windows:
    found: Windows = defaultdict(int)
    filled = engine.load(con)
    for batch in engine.batches(con, filled, rules):
        begin = filled.first[batch.numbers[0]]
        for given in batch.given:
            name = given.subcause if given.rule is None else given.rule.id
            for window, ns in zip(given.windows.tolist(), given.ns.tolist(), strict=True):
                found[name, given.pool, begin + window] += ns
    return found


STORIES: dict[str, Callable[[], Rows]] = {
    "eventful": eventful,
    "no page": partial(eventful, probed=False),
    "checkpointed": checkpointed,
    **{f"anything {seed}": partial(anything, seed) for seed in range(12)},
}


@pytest.mark.parametrize("story", STORIES)
def test_every_window_is_granted_alike(story: str, rules: Sequence[Rule]) -> None:
    with connect(STORIES[story]()) as con:
        whole = tables(con, rules)
        assert batches(con, rules) == whole
        assert whole or story.startswith("anything")


def test_a_batch_is_one_node_and_no_larger_than_said(
    rules: Sequence[Rule], monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(anything(3)) as con:
        filled = engine.load(con)
        lengths = [len(gpu.t0) for gpu in filled.gpus]
        assert [list(batch) for batch in filled.batches()] == [[n] for n in range(len(lengths))]
        monkeypatch.setattr(engine, "BATCH_WINDOWS", sum(lengths))
        (batch,) = engine.batches(con, filled, rules)
        assert isinstance(batch, Batch)
        assert sum(columns.size for columns in batch.columns) == sum(lengths)


@pytest.mark.parametrize("story", ["eventful", "no page", "anything 1"])
def test_a_diagnosis_says_the_same_however_it_is_cut(
    story: str, rules: Sequence[Rule], monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(STORIES[story]()) as con:
        one_by_one = diagnose(con, ["x"], rules, spans(con, None, None)).to_json()
        monkeypatch.setattr(engine, "BATCH_WINDOWS", 1 << 30)
        whole = diagnose(con, ["x"], rules, spans(con, None, None)).to_json()
    assert one_by_one == whole
