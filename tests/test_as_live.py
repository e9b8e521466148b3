"""`diagnose --as-live`: the ledger as it was settled, nothing added and nothing taken back."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from settle_kit import Node, charged
from whyidle.clock import NS_PER_S
from whyidle_rules import cli

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "fixtures" / "traces" / "ddp-4-ranks-rank-1-loads-itself"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """Twenty minutes of a node, settled; three intervals of them failed."""
    made = Node(tmp_path_factory.mktemp("recording"))
    made.go(600, step=10)
    made.evaluator.raises = RuntimeError("a rule fell over")
    made.go(90, step=10)
    made.evaluator.raises = None
    made.go(510, step=10)
    made.settler.finish(made.clock.now_ns)
    made.ledger.keep(drain=True)
    return made


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.diagnose_main([*words, "--as-live", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_says_what_the_counters_say(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, str(node.recording))
    counts = node.settler.counts
    by_gpu: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for part, ns in counts.total.items():
        by_gpu[part.uuid][part.cause or part.pool] += ns
    for gpu in found["gpus"]:
        mine = by_gpu[gpu["uuid"]]
        assert round(gpu["working_s"] * NS_PER_S) == mine["working"]
        assert round(gpu["empty_s"] * NS_PER_S) == mine["empty"]
        assert round(gpu["spinning_s"] * NS_PER_S) == mine["spinning"]
        causes = {cause: round(s * NS_PER_S) for cause, s in gpu["causes"].items()}
        pools = ("working", "empty", "spinning")
        assert causes == {cause: ns for cause, ns in mine.items() if cause not in pools and ns}
    rows = sum(row["idle_s"] for row in found["ledger"])
    assert rows == pytest.approx(found["totals"]["idle_s"])
    assert found["findings"] == []
    (unseen,) = found["not_seen"]
    assert unseen["what"] == "causes in 3 intervals of sim0"
    assert unseen["why"] == "RuntimeError: a rule fell over"


def test_a_range_holds_the_intervals_that_end_in_it(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    intervals = node.evaluator.asked
    begin = intervals[0][0]
    found = asked(capsys, str(node.recording), "--since", "2m", "--until", "4m")
    inside = [(b, e) for b, e in intervals if 120 * NS_PER_S < e - begin <= 240 * NS_PER_S]
    assert len(inside) == 4
    expected = sum(gpu.working_ns for b, e in inside for gpu in charged(b, e).gpus)
    assert round(found["totals"]["working_s"] * NS_PER_S) == pytest.approx(expected, abs=2)


def test_the_report_is_a_report(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.diagnose_main([str(node.recording), "--as-live"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("GPUs were idle ")
    assert "sim0" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--since", "3h"), "nothing was settled between --since and --until: the ledger is 12"),
        (("--since", "soon"), "'soon' is no time of a run"),
    ],
)
def test_what_cannot_be_had_is_a_sentence(
    node: Node, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert cli.diagnose_main([str(node.recording), "--as-live", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_recording_without_a_ledger_has_nothing_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from recording_kit import sample
    from whyidle.clock import VirtualClock
    from whyidle.collect.clocks import CLOCKS
    from world.machine import Machine

    clock = VirtualClock(100 * NS_PER_S)
    machine = Machine(5, clock=clock)
    sample(tmp_path, [CLOCKS], lambda collector: machine, machine, clock, 5)
    assert cli.diagnose_main([str(tmp_path), "--as-live"]) == 2
    assert "holds no settled ledger" in capsys.readouterr().err


def test_a_trace_was_not_settled(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.diagnose_main([str(TRACE), "--as-live"]) == 2
    assert "is a trace; leave it out." in capsys.readouterr().err
