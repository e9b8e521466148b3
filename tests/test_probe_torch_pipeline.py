"""The probe tells of pipelines that torch makes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
TIMEOUT_S = 120
SCRIPT = """
import json, os, sys
import whyidle_probe
whyidle_probe.start(sys.argv[1])
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
stage = PipelineStage(torch.nn.Linear(2, 2), 0, 1, torch.device("cpu"))
Schedule1F1B(stage, n_microbatches=3, loss_fn=torch.nn.functional.mse_loss)
print(json.dumps(whyidle_probe.page_path()))
sys.stdout.flush()
sys.stdin.read()
dist.destroy_process_group()
"""


def test_a_schedule_of_torch_tells_its_stage(tmp_path: Path) -> None:
    from whyidle import probe_page

    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert process.stdin and process.stdout
    try:
        path = json.loads(process.stdout.readline())
        totals = probe_page.parse_process(Path(path).read_bytes(), 1 << 62)
    finally:
        process.stdin.close()
        process.wait(TIMEOUT_S)
        process.stdout.close()
    assert process.returncode == 0
    assert (totals.pipeline_stage, totals.pipeline_stages) == (0, 1)
    assert (totals.pipeline_batches, totals.pipeline_schedule) == (3, "1f1b")
    assert totals.hook_errors == 0
