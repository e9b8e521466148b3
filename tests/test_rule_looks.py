"""How far rules look around a window: declared in each, bounded by what live counters wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from whyidle.clock import NS_PER_S
from whyidle.settle import LAG_NS, LOOKAHEAD_NS, LOOKBACK_NS
from whyidle_rules.rule import LONG_COLUMNS, LOOKAHEAD_MOST_S, LOOKBACK_MOST_S, Rule
from whyidle_rules.rule_load import BUILTIN, load_rules
from whyidle_rules.rule_read import read_rule
from whyidle_rules.rule_yaml import RuleError

PLAIN = BUILTIN / "host_pause" / "gc.yaml"
LONG = BUILTIN / "host_pause" / "main_thread.yaml"


def read(path: Path, more: str = "", without: str = "") -> Rule:
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not without or not line.startswith(without)]
    return read_rule("\n".join([*kept, more]), path).rule


def test_a_rule_says_how_far_it_looks() -> None:
    rule = read(PLAIN)
    assert (rule.lookback_s, rule.lookahead_s) == (15, 10)
    rule = read(PLAIN, "lookback_s: 42\nlookahead_s: 0.5")
    assert (rule.lookback_s, rule.lookahead_s) == (42, 0.5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("lookback_s: 61", "`lookback_s` is at most 60: live counters wait no longer"),
        ("lookahead_s: 10.5", "`lookahead_s` is at most 10: live counters wait no longer"),
        ("lookback_s: -1", "`lookback_s` has to be a plain decimal number"),
        ("lookahead_s: soon", "`lookahead_s` has to be a plain decimal number"),
    ],
)
def test_no_rule_looks_further_than_live_counters_wait(more: str, said: str) -> None:
    with pytest.raises(RuleError) as caught:
        read(PLAIN, more)
    (problem,) = caught.value.problems
    assert said in problem.message or "at most" in problem.message
    assert problem.line == len(PLAIN.read_text(encoding="utf-8").splitlines()) + 1


def test_a_rule_on_whole_gaps_has_to_look_back_a_minute() -> None:
    assert read(LONG).lookback_s == 60
    for more in ("", "lookback_s: 30"):
        with pytest.raises(RuleError, match=r"`gap_s` is told from a minute: add `lookback_s: 60`"):
            read(LONG, more, without="lookback_s")


def test_all_rules_keep_to_what_the_keeper_waits_for() -> None:
    rules = load_rules((), site=Path(__file__).with_name("no-such-folder"))
    assert LOOKBACK_MOST_S * NS_PER_S == LOOKBACK_NS
    assert LOOKAHEAD_MOST_S * NS_PER_S == LOOKAHEAD_NS < LAG_NS
    for rule in rules:
        assert 0 <= rule.lookback_s <= LOOKBACK_MOST_S
        assert 0 <= rule.lookahead_s <= LOOKAHEAD_MOST_S
        if set(rule.reads) & set(LONG_COLUMNS):
            assert rule.lookback_s == LOOKBACK_MOST_S, rule.id
