"""A driver that hangs: said, accounted for, and no other collector notices."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from vgpu import standin
from whyidle.store import Recording


def test_a_hanging_driver_blinds_the_gpus_only(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    command = [sys.executable, "-m", "whyidle.sampler_process", str(recording), "--node", "n"]
    with standin(tmp_path, gpus=2) as node:
        sampler = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **node.env})
        assert sampler.stdin is not None
        try:
            end = time.monotonic() + 30
            while node.state.calls().get("nvmlGpmMetricsGet", 0) < 8:
                assert time.monotonic() < end, "the sampler has not begun"
                time.sleep(0.05)
            node.state.hang("nvmlGpmSampleGet", gpu=1)
            node.state.wait_blocked()
            time.sleep(4.0)
            node.state.clear()
            time.sleep(1.5)
        finally:
            sampler.stdin.close()
            sampler.wait(timeout=30)
    assert sampler.returncode == 0
    with Recording([recording]) as store:
        con = store.con
        late = con.execute("SELECT collector FROM collector_error WHERE kind = 'late'").fetchall()
        longest = con.execute(
            "SELECT max(took_ns) FROM tick WHERE collector = 'gpu_activity'"
        ).fetchone()
        missed = con.execute(
            "SELECT sum(missed) FROM tick WHERE collector = 'gpu_activity'"
        ).fetchone()
        others = con.execute(
            "SELECT max(gap) FROM (SELECT began_ns - lag(began_ns) OVER (ORDER BY began_ns) AS gap "
            "FROM tick WHERE collector = 'cpu')"
        ).fetchone()
        windows = con.execute(
            "SELECT max(t1_ns - t0_ns) FROM gpu_activity WHERE uuid LIKE '%0'"
        ).fetchone()
    assert late == [("gpu_activity",)]
    assert longest is not None and longest[0] > 3_500_000_000
    assert missed is not None and missed[0] >= 20, "8 a second for the time that it hung"
    assert others is not None and others[0] < 2_500_000_000, "the loop ran on"
    assert windows is not None and windows[0] > 3_500_000_000, "the gap is in the window's bounds"
