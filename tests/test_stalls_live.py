"""Stalls injected here and now: the kernel, torch, the recorder and diagnose, from end to end."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from stalls.inject import problem
from stalls.root_score import diagnosis, score_roots
from stalls.run import Options, run
from stalls.scenario import load
from stalls.score import EDGE_S, charge, score
from vgpu.library import header
from whyidle_rules.rule_load import load_rules

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "needs torch, which the tests do not install by themselves", allow_module_level=True
    )

SECONDS, BASELINE_S = 6.0, 2.0
# Short runs beside whatever else the machine does: less than the bars of the kept recordings.
RIGHT, BLAMED = 0.75, 0.03


@pytest.mark.parametrize(
    ("kind", "strength"),
    [
        ("fuse_read", "medium"),
        ("throttled_device", "medium"),
        ("few_workers", "high"),
        ("cpu_quota", "high"),
        ("checkpoint_write", "medium"),
        ("healthy_async", "long"),
    ],
)
def test_live(tmp_path: Path, kind: str, strength: str) -> None:
    scenario = load(kind, strength)
    if why := problem(scenario.setup):
        pytest.skip(why)
    header()  # skips where the stand-in library cannot be built
    options = Options(folder=tmp_path, seconds=SECONDS, baseline_s=BASELINE_S)
    truth = run(scenario, options)
    kept = json.loads((tmp_path / "truth.json").read_text(encoding="utf-8"))
    assert kept["windows"] == truth["windows"]
    (window,) = truth["windows"]
    rules = load_rules((), site=tmp_path / "no-site")
    (told,) = charge(tmp_path / "recording", rules, [window])
    row = score(truth, window, *told, probe=True)
    assert row.seen_idle_s == pytest.approx(row.idle_s, abs=0.03 * row.wall_s + EDGE_S)
    if row.right_share is None:
        assert row.blamed_share <= BLAMED, row.charged_s
    else:
        assert row.stall_s > 0.1 * row.wall_s
        assert row.right_share >= RIGHT, row.charged_s


def test_live_nodes(tmp_path: Path) -> None:
    """Three nodes over a real network, of which one waits for its disk: who, where, why."""
    scenario = load("late_node", "medium")
    if why := problem(scenario.setup):
        pytest.skip(why)
    header()
    truth = run(scenario, Options(folder=tmp_path, seconds=8.0, baseline_s=BASELINE_S))
    rules = load_rules((), site=tmp_path / "no-site")
    found = diagnosis(tmp_path / "recording", rules, truth)
    row = score_roots(truth, found, probe=True)
    assert row.due_s > 0.1 * row.wall_s
    assert row.rank_share is not None and row.rank_share >= 0.95, row.charged_s
    assert row.cause_share is not None and row.cause_share >= RIGHT, row.charged_s
    assert "waiting in collectives for rank 1 (node1)" in found.headline
    assert "(storage)" in found.headline and "fixing it returns" in found.headline
    (transport,) = {row.subcause for row in found.ledger if row.subcause.startswith("transfer")}
    assert transport == "transfer_tcp"
