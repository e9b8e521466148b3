"""The data-loader pair of real traces, sampled 8 times a second: verdicts as of the exact ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_run import diagnosis
from whyidle_rules.trace.sample import write

RUNS = Path(__file__).parents[1].parent / "shared" / "recorded-runs"
PAIR = RUNS / "kineto-tbplugin-resnet50-dataloader"
POINTS = 0.05  # of wall
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not PAIR.is_dir(), reason="no recorded runs beside the checkout"),
]


def shares(source: Path) -> dict[str, float]:
    """Return each top-level cause's share of the GPU's time."""
    found = diagnosis(source)
    (gpu,) = found["gpus"]
    return {cause: seconds / gpu["wall_s"] for cause, seconds in gpu["causes"].items()}


@pytest.mark.parametrize(
    ("workers", "first"), [(0, "cpu_preprocessing"), (4, "host_pause")], ids=["none", "four"]
)
def test_samples_say_what_the_trace_says(workers: int, first: str, tmp_path: Path) -> None:
    (trace,) = PAIR.glob(f"resnet50_num_workers_{workers}__*.json.gz")
    write([trace], tmp_path / "out")
    exact, sampled = shares(trace), shares(tmp_path / "out")
    assert max(sampled, key=lambda cause: sampled[cause]) == first
    assert max(exact, key=lambda cause: exact[cause]) == first
    for cause in {*exact, *sampled} - {"unattributed"}:
        # Copies and launches are microseconds: samples tell them as the host's own time.
        assert sampled.get(cause, 0.0) <= exact.get(cause, 0.0) + POINTS, cause
    assert abs(sampled[first] - exact[first]) <= POINTS
