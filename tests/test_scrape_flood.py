"""Clients by the dozen, slow, silent and malformed: the sampler does not notice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench.bench_live import Scrapes, flood, missed
from live_kit import child, free_port, get, keeper, sampler, until
from vgpu import standin

pytestmark = pytest.mark.slow

FLOOD_S = 20.0


def test_a_hundred_scrapes_a_second_make_nobody_miss_a_tick(tmp_path: Path) -> None:
    recording, port, scrapes = tmp_path / "recording", free_port(), Scrapes()
    with standin(tmp_path, gpus=8) as node:
        for gpu in node.state.gpus:
            gpu.run(gr=0.7, sm=0.5)
        with (
            child(keeper(recording, port), node.env),
            child(sampler(recording), node.env),
        ):
            until(lambda: "whyidle_gpu_sm_active_ratio{" in get(port), "samples are served")
            begin_ns = time.monotonic_ns()
            with flood(port, 100.0, scrapes):
                time.sleep(FLOOD_S)
            end_ns = time.monotonic_ns()
            until(lambda: "whyidle_ledger_lag_seconds" in get(port), "it is served still")
    assert scrapes.answered >= 0.9 * 100 * FLOOD_S
    runs, late = missed(recording, begin_ns, end_ns)
    assert runs > 8 * FLOOD_S
    assert late == 0
