"""Collectives whose bytes go through real sockets: how long they take, and what the truth says."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vgpu.device.serve import virtual_gpus
from vgpu.device.truth import Truth

MS = 1_000_000
CODE = """
import os, sys, time
from vgpu.client import connect
from vgpu.network import Proxy
rank, size, count = (int(word) for word in sys.argv[1:4])
addresses = [("127.0.0.1", int(port)) for port in sys.argv[4:]]
gpu = connect(rank)
group = gpu.group("world", rank, size)
Proxy(group, addresses)
for number in range(count):
    if rank == size - 1:
        time.sleep(0.1)
    gpu.launch(5.0)
    gpu.all_reduce(None, group, size_bytes=8 << 20)
    gpu.launch(1.0)
    gpu.synchronize()
"""


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@pytest.mark.parametrize("size", [2, 3])
def test_a_collective_takes_as_long_as_its_bytes(tmp_path: Path, size: int) -> None:
    count = 5
    ports = [str(port) for port in free_ports(size)]
    with virtual_gpus(tmp_path, gpus=size) as node:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", CODE, str(rank), str(size), str(count), *ports],
                env={**os.environ, **node.env},
            )
            for rank in range(size)
        ]
        try:
            assert [rank.wait(60) for rank in ranks] == [0] * size
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        truth = node.truth()
    for number in range(count):
        met = [one for one in truth.intervals(what="all_reduce") if one.sequence == number]
        assert len(met) == size
        # All begin to move when the last has come, and not one ends before data could have moved.
        assert len({one.ready_ns for one in met}) == 1
        assert met[0].ready_ns == max(one.begin_ns for one in met)
        for one in met:
            assert one.ready_ns is not None and not one.cut
            assert one.end_ns - one.ready_ns > 0.1 * MS
            if one.gpu < size - 1:
                assert one.ready_ns - one.begin_ns > 50 * MS
    for gpu in range(size - 1):
        (process,) = [who for who in truth.processes if who.gpu == gpu]
        assert process.end_ns is not None
        parts = truth.split(gpu=gpu, begin_ns=process.begin_ns, end_ns=process.end_ns)
        assert parts.waiting_ns > count * 50 * MS
        assert 0 < parts.transferring_ns < parts.waiting_ns
        assert parts.working_ns == count * 6 * MS


def test_a_rank_that_dies_leaves_the_others_polling(tmp_path: Path) -> None:
    ports = [str(port) for port in free_ports(2)]
    code = CODE.replace("gpu.launch(5.0)", "if rank and number: os._exit(3)\n    gpu.launch(5.0)")
    with virtual_gpus(tmp_path, gpus=2) as node:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), "2", "3", *ports],
                env={**os.environ, **node.env},
            )
            for rank in range(2)
        ]
        try:
            assert ranks[1].wait(60) == 3
            with pytest.raises(subprocess.TimeoutExpired):
                ranks[0].wait(0.5)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    (hung,) = [
        one for one in Truth.load(node.truth_path).intervals(gpu=0, what="all_reduce") if one.cut
    ]
    assert hung.ready_ns is None
