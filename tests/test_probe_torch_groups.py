"""The probe on process groups: what ranks call and wait for, and that nothing else changes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from probe_kit import environment
from whyidle import probe_groups, probe_page

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
TIMEOUT_S = 120
# Each rank prints what `body` leaves in `told`, and keeps its page until it has been read.
_SCRIPT = """\
import json, os, sys, time
import torch
import torch.distributed as dist
rank, size = int(os.environ["MEMBER"]), int(os.environ["MEMBERS"])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=size)
told = {}
def main():
    linear = torch.nn.Linear
"""
_END = """
main()
from whyidle_probe import page_path
told["page"] = page_path()
print(json.dumps(told), flush=True)
sys.stdin.read()
os._exit(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a rank told, and its page."""

    told: dict[str, Any]
    header: probe_page.Header | None
    totals: probe_page.Process | None
    groups: tuple[probe_groups.Group, ...]
    calls: tuple[probe_groups.Call, ...]


def ranks(tmp_path: Path, body: str, *, size: int = 2, probe: bool = True) -> list[Ran]:
    """Run the same script as so many ranks at once."""
    script = tmp_path / "ranks.py"
    script.write_text(_SCRIPT + textwrap.indent(textwrap.dedent(body), "    ") + _END)
    pages, meeting = tmp_path / "pages", tmp_path / f"meeting-{probe}"
    pages.mkdir(exist_ok=True)
    more = {"MEMBERS": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    if not probe:
        more["WHYIDLE_PROBE"] = "0"
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(meeting)],
            env=environment(pages, {**more, "MEMBER": str(rank)}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        found = []
        for process in started:
            assert process.stdout
            line = process.stdout.readline()
            assert line, "a rank failed"
            found.append(_read(json.loads(line)))
        return found
    finally:
        for process in started:
            assert process.stdin and process.stdout
            process.stdin.close()
            process.wait(TIMEOUT_S)
            process.stdout.close()


def _read(told: dict[str, Any]) -> Ran:
    if told["page"] is None:
        return Ran(told=told, header=None, totals=None, groups=(), calls=())
    data, now = Path(told["page"]).read_bytes(), time.monotonic_ns()
    return Ran(
        told=told,
        header=probe_page.parse_header(data),
        totals=probe_page.parse_process(data, now),
        groups=tuple(probe_groups.parse_groups(data, now)),
        calls=tuple(probe_groups.parse_calls(data, 0)[1]),
    )


def ns(value: int | None) -> int:
    assert value is not None
    return value


TRAINS = """
    model = torch.nn.Sequential(linear(64, 64), torch.nn.ReLU(), linear(64, 1))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(12):
        if rank == 1:
            time.sleep(0.05)
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    told["losses"] = losses
"""


def test_gradients_that_are_waited_for_are_told_and_losses_stay_bit_identical(
    tmp_path: Path,
) -> None:
    with_probe = ranks(tmp_path, TRAINS)
    without = ranks(tmp_path, TRAINS, probe=False)
    assert [r.told["losses"] for r in with_probe] == [r.told["losses"] for r in without]
    assert [r.totals for r in without] == [None, None]
    waiting, late = with_probe
    for ran in with_probe:
        assert ran.totals is not None
        assert ran.totals.hook_errors == 0
        (group,) = ran.groups
        assert (group.size, group.backend, group.backwards) == (2, "gloo", 12)
    assert waiting.groups[0].key == late.groups[0].key
    assert [r.groups[0].rank for r in with_probe] == [0, 1]
    # Eleven of the twelve waits are for the sleep; the first step has other business as well.
    assert ns(waiting.groups[0].wait_ns) >= 11 * 45_000_000
    assert ns(late.groups[0].wait_ns) <= 0.5 * ns(waiting.groups[0].wait_ns)
    numbers = [{c.number for c in r.calls if c.operation == "backward"} for r in with_probe]
    assert len(numbers[0] & numbers[1]) >= 4


def test_calls_count_alike_and_their_waits_are_the_callers(tmp_path: Path) -> None:
    first, second = ranks(
        tmp_path,
        """
        part = dist.new_group([0, 1])
        tensor = torch.ones(1000)
        if rank == 1:
            time.sleep(0.2)
        dist.all_reduce(tensor)
        dist.barrier()
        work = dist.all_reduce(tensor, group=part, async_op=True)
        time.sleep(0.1)
        work.wait()
        dist.broadcast(tensor, 0)
        dist.all_gather_into_tensor(torch.ones(2000), tensor)
        dist.reduce_scatter_tensor(torch.ones(500), tensor)
        gathered = [None] * size
        dist.all_gather_object(gathered, rank)
        told["gathered"] = gathered
        told["sum"] = tensor.sum().item()
        if rank == 0:
            time.sleep(0.15)
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        peer = 1 - rank
        both = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, tensor.clone(), peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        """,
    )
    for ran in (first, second):
        assert ran.totals is not None
        assert ran.totals.hook_errors == 0
        assert ran.told["gathered"] == [0, 1]
        assert ran.told["sum"] == 4000.0
        world, part = sorted(ran.groups, key=lambda g: -(g.messages or 0))
        assert (world.messages, part.messages, part.calls) == (3, 0, 1)
    worlds = [max(r.groups, key=lambda g: g.messages or 0) for r in (first, second)]
    assert worlds[0].calls == worlds[1].calls
    assert worlds[0].key == worlds[1].key
    assert {g.key for g in first.groups} == {g.key for g in second.groups}
    assert len({g.key for g in first.groups}) == 2
    assert ns(worlds[0].wait_ns) >= 190_000_000 > 100_000_000 > ns(worlds[1].wait_ns)
    assert ns(worlds[1].message_wait_ns) >= 140_000_000
    assert ns(worlds[0].message_wait_ns) < 100_000_000
    reduced = [next(c for c in r.calls if c.operation == "all_reduce") for r in (first, second)]
    assert reduced[0].number == reduced[1].number == 1
    assert reduced[0].size_bytes == 4000
    # Both clocks are one here: rank 1 came 0.2 s later, and it ended for both at once.
    assert 190_000_000 <= reduced[1].called_ns - reduced[0].called_ns <= 500_000_000
    assert abs(reduced[1].ended_ns - reduced[0].ended_ns) <= 50_000_000


def test_what_a_wait_raises_is_the_trainers_and_a_compiled_step_stays_whole(
    tmp_path: Path,
) -> None:
    first, _ = ranks(
        tmp_path,
        """
        import datetime
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
        def step(x):
            y = x * 2
            dist.all_reduce(y)
            return y + 1
        compiled = torch.compile(step, backend="eager", fullgraph=True)
        told["compiled"] = compiled(torch.ones(2)).tolist()
        dist.barrier()
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(1), group=group)
                told["raised"] = None
            except RuntimeError as error:
                told["raised"] = type(error).__name__
        else:
            time.sleep(2)
        """,
    )
    assert first.told["compiled"] == [5.0, 5.0]
    assert first.told["raised"] is not None
    assert first.totals is not None
    assert first.totals.hook_errors == 0
    assert max(group.wait_ns or 0 for group in first.groups) >= 900_000_000
    assert all(group.waiting_since_ns is None for group in first.groups)


def test_a_rank_that_is_stuck_says_in_what_and_since_when(tmp_path: Path) -> None:
    first, _ = ranks(
        tmp_path,
        """
        import threading
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            begun = time.monotonic_ns()
            told["begun"] = begun
            # The others never come: what the page says meanwhile is read from another thread.
            from whyidle_probe import page_path
            def look():
                time.sleep(0.5)
                told["page"] = page_path()
                print(json.dumps(told), flush=True)
                sys.stdin.read()
                os._exit(0)
            threading.Thread(target=look).start()
            dist.barrier()
        """,
    )
    (group,) = first.groups
    assert group.operation in ("barrier", "all_reduce")
    assert group.waiting_since_ns is not None
    assert group.waiting_since_ns >= first.told["begun"]


def test_a_fork_leaves_the_page_of_its_parent_alone(tmp_path: Path) -> None:
    first, _ = ranks(
        tmp_path,
        """
        dist.all_reduce(torch.ones(1))
        child = os.fork()
        if child == 0:
            from whyidle_probe import api
            blocks = api._PROCESS.made.collectives._blocks
            os._exit(len(blocks))
        told["blocks"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        dist.all_reduce(torch.ones(1))
        """,
    )
    assert first.told["blocks"] == 0
    (group,) = first.groups
    assert group.calls == 2


def test_ranks_are_learnt_from_the_process_group_where_no_launcher_set_them(
    tmp_path: Path,
) -> None:
    told = [ran.header for ran in ranks(tmp_path, "dist.all_reduce(torch.ones(1))")]
    assert [(h.rank, h.world_size, h.local_rank) for h in told if h] == [(0, 2, None), (1, 2, None)]
