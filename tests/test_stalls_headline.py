"""The one sentence about recorded runs of several ranks: who is late, where, why, and what for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stalls.root_score import diagnosis
from whyidle.store import Recording
from whyidle_rules.diagnosis import Diagnosis
from whyidle_rules.rule_load import load_rules

FOLDER = Path(__file__).parents[1] / "fixtures" / "stalls"


def diagnosed(name: str) -> Diagnosis:
    truth = json.loads((FOLDER / name / "truth.json").read_text(encoding="utf-8"))
    rules = load_rules((), site=FOLDER / "no-site")
    return diagnosis(FOLDER / name / "recording", rules, truth)


def node_of(name: str, rank: int) -> str:
    with Recording([FOLDER / name / "recording"]) as recording:
        row = recording.con.execute(
            "SELECT DISTINCT node FROM process_info WHERE rank = ?", [rank]
        ).fetchone()
    assert row is not None
    return str(row[0])


def test_a_rank_on_a_throttled_disk_is_named_with_its_node_its_mount_and_the_return() -> None:
    name = "late_node-medium"
    found = diagnosed(name)
    sentence = found.headline
    assert f"waiting in collectives for rank 1 ({node_of(name, 1)}), which was late" in sentence
    assert "because data came slowly from a local disk, " in sentence
    assert "(storage)" in sentence
    with Recording([FOLDER / name / "recording"]) as recording:
        mounts = recording.con.execute(
            "SELECT DISTINCT mount_point FROM mount WHERE kind = 'block' AND node = ?",
            [node_of(name, 1)],
        ).fetchall()
    told = sentence.split("a local disk, ")[1].split(" (storage)")[0]
    assert (told,) in mounts, (sentence, mounts)
    # At most: what ranks 0 and 2 waited for it, and what its own GPU stood empty.
    (first,) = [row for row in found.root_causes if (row.cause, row.rank) == ("storage", 1)]
    words = sentence.split("fixing it returns at most ")[1]
    assert float(words.split()[0]) == pytest.approx(first.idle_s, rel=0.01)
    assert words.split()[1].startswith("GPU-second")


def test_of_ranks_on_one_node_the_late_one_is_named() -> None:
    sentence = diagnosed("late_rank_of_three-medium").headline
    assert "ranks 0 and 2 spent" in sentence and "for rank 1, which was late" in sentence
    assert "(storage)" in sentence and "fixing it returns at most" in sentence
