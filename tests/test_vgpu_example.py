"""A training script with the virtual GPU in it: fed, starved, and in two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vgpu.device.serve import VirtualNode, virtual_gpus

STEPS, STEP_MS = 40, 10.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[VirtualNode]:
    folder = tmp_path / "node"
    folder.mkdir()
    with virtual_gpus(folder, gpus=2) as made:
        yield made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.bin").write_bytes(bytes([i]) * 100_000)
    return folder


def start(node: VirtualNode, data: Path, *more: str, **env: str) -> subprocess.Popen[str]:
    arguments = ["--data", str(data), "--steps", str(STEPS), "--step-ms", str(STEP_MS), *more]
    return subprocess.Popen(
        [sys.executable, "-m", "vgpu.example_train", *arguments],
        env={**os.environ, **node.env, **env},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out.startswith("loss ")


def busy(node: VirtualNode, gpu: int = 0) -> float:
    """Share of the training in which the GPU computed."""
    truth = node.truth()
    rows = truth.intervals(gpu=gpu, what="gemm")
    begin_ns, end_ns = rows[0].begin_ns, rows[-1].end_ns
    return truth.split(gpu=gpu, begin_ns=begin_ns, end_ns=end_ns).working_ns / (end_ns - begin_ns)


def test_a_loader_that_keeps_up_keeps_the_gpu_busy(node: VirtualNode, data: Path) -> None:
    finish(start(node, data))
    assert busy(node) > 0.95


def test_a_loader_that_decodes_for_longer_than_a_step_starves_it(
    node: VirtualNode, data: Path
) -> None:
    finish(start(node, data, "--decode-ms", "20"))
    assert busy(node) < 0.55


def test_a_rank_whose_loader_is_late_lets_the_other_poll(node: VirtualNode, data: Path) -> None:
    ranks = [
        start(
            node,
            data,
            *(["--decode-ms", "25"] if rank == 1 else []),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
        )
        for rank in range(2)
    ]
    for process in ranks:
        finish(process)
    truth = node.truth()
    waits = []
    for gpu in range(2):
        rows = truth.intervals(gpu=gpu, what="all_reduce")
        assert len(rows) == STEPS
        # The first steps count start-up.
        waits.append(
            sum(row.ready_ns - row.begin_ns for row in rows[5:] if row.ready_ns is not None) / 1e6
        )
    assert waits[0] > 10 * (STEPS - 5)
    assert waits[1] < 0.05 * waits[0]
