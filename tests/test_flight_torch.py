"""Real dumps of PyTorch's flight recorder, which counts gloo's calls too, DDP's own among them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from whyidle_rules.recording import flight

pytest.importorskip("torch", reason="PyTorch is not installed")
fr = pytest.importorskip("torch._C._distributed_c10d", reason="torch has no distributed package")
if not hasattr(fr, "_dump_fr_trace_json"):
    pytest.skip("this torch has no flight recorder for CPUs", allow_module_level=True)

# Three ranks: rank 1 is late for each backward pass, and has not come to the last all_reduce when
# all of them write a dump, half of them as torch's JSON and half as its pickle.
_TRAINER = """
import os, sys, time, torch, torch.distributed as dist
rank, folder = int(sys.argv[1]), sys.argv[2]
fr = torch._C._distributed_c10d
dist.init_process_group("gloo", rank=rank, world_size=3, init_method=f"file://{folder}/meet")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
for _ in range(4):
    loss = model(torch.randn(4, 64)).sum()
    time.sleep(0.2 if rank == 1 else 0.0)
    loss.backward()
waited = dist.all_reduce(torch.ones(4), async_op=True) if rank != 1 else None
time.sleep(0.5)
if rank == 0:
    open(f"{folder}/trace_0.json", "wb").write(fr._dump_fr_trace_json(True, False))
else:
    open(f"{folder}/trace_{rank}", "wb").write(fr._dump_fr_trace(True, False, False))
print("dumped", flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> flight.Read:
    folder = tmp_path_factory.mktemp("flight")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _TRAINER, str(rank), str(folder)],
            env={"TORCH_FR_BUFFER_SIZE": "200", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    for one in ranks:
        out, _ = one.communicate(timeout=120)
        assert out == b"dumped\n" and one.returncode == 0
    assert json.loads((folder / "trace_0.json").read_text())["entries"]
    (folder / "meet").unlink(missing_ok=True)
    return flight.read([folder])


def test_the_rank_that_has_not_come_is_named(dumps: flight.Read) -> None:
    assert set(dumps.ranks) == {0, 1, 2} and not dumps.bad and not dumps.bad_calls
    (hang,) = flight.hangs(dumps)
    assert (hang.waiting, hang.missing, hang.unknown) == ([0, 2], [1], [])
    assert (hang.group, hang.operations) == ("0 (default_pg)", ["all_reduce"])
    assert hang.last == {1: hang.number - 1}


def test_calls_of_ddp_in_cpp_have_the_time_at_which_each_rank_came(dumps: flight.Read) -> None:
    came: dict[int, dict[int, int]] = {}
    for call in dumps.calls:
        if call.operation == "all_reduce" and call.ended:
            came.setdefault(call.number, {})[call.rank] = call.came_wall_ns
    whole = [at for at in came.values() if len(at) == 3]
    assert len(whole) >= 4
    late = [at for at in whole if max(at, key=lambda rank: at[rank]) == 1]
    assert len(late) >= 4
    assert sum(at[1] - max(at[0], at[2]) for at in late) > 4 * 0.1e9
