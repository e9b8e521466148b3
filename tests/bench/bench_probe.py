"""What the probe costs a trainer: python tests/bench/bench_probe.py (needs torch).

Each figure is with minus without, in one process, in turns: the same iterator through torch's own
`__next__` and through the hooked one. Beside it, the share of a step of 100 ms.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import whyidle_probe

# Torch is no dependency, so that type checkers may not find it.
torch: Any = importlib.import_module("torch")
module: Any = importlib.import_module("torch.utils.data.dataloader")

TURNS = 60
CALLS = 4_000
GOAL_NS = 2_000
STEP_NS = 100_000_000


def ones(self: object) -> Iterator[int]:
    """Give the same number for ever, at no cost of its own."""
    while True:
        yield 1


class Numbers:
    """Some numbers, as a map-style data set."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index


def cost_ns(call: Callable[[], object], calls: int) -> float:
    began = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - began) / calls


def paired(plain: Callable[[], object], hooked: Callable[[], object], calls: int) -> dict[str, Any]:
    """Run both in turns, the order swapped each time; CPU time of this thread."""
    without, differences = [], []
    for turn in range(TURNS):
        pair = (plain, hooked) if turn % 2 else (hooked, plain)
        costs = {call: cost_ns(call, calls) for call in pair}
        without.append(costs[plain])
        differences.append(costs[hooked] - costs[plain])
    differences.sort()
    added = statistics.median(differences)
    return {
        "without_ns": round(statistics.median(without)),
        "added_ns": round(added),
        "added_p10_ns": round(differences[len(differences) // 10]),
        "added_p90_ns": round(differences[len(differences) * 9 // 10]),
        "of_a_100_ms_step": round(added / STEP_NS, 8),
    }


def of_loader(loader: Any, plain_next: Callable[[Any], object]) -> dict[str, Any]:
    """What a batch costs more; a loader with workers is asked without taking from its queue."""
    from whyidle_probe import api, loader_hooks

    iterator: Any = iter(loader)
    next(iterator)
    recorder = api._PROCESS.made
    assert recorder is not None
    if loader.num_workers == 0:
        hooked_next = module._BaseDataLoaderIter.__next__
        return paired(lambda: plain_next(iterator), lambda: hooked_next(iterator), CALLS)

    def nothing(self: Any) -> None:
        """Stand in for torch's next(): the queue stays as full as it is."""

    time.sleep(1.0)  # the workers fill it
    wrapped = loader_hooks._next(nothing, recorder)
    return paired(lambda: nothing(iterator), lambda: wrapped(iterator), CALLS)


def of_step() -> dict[str, Any]:
    """What the hook on an optimizer's step costs."""
    from whyidle_probe import api

    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    recorder = api._PROCESS.made
    assert recorder is not None
    step = recorder.optimizer_step

    def hooked() -> None:
        recorder.step_batches = 1
        step(optimizer)

    return paired(lambda: None, hooked, CALLS)


class _Group:
    """A process group of which nothing is called but what it is."""

    group_name = "0"

    def size(self) -> int:
        return 8

    def rank(self) -> int:
        return 3


class _Work:
    """Something to wait for that has ended."""


def of_call() -> dict[str, Any]:
    """What a collective and the wait for it cost: a call and a wait, both hooked."""
    from whyidle_probe import api, group_hooks

    recorder = api._PROCESS.recorder()
    assert recorder is not None
    group, works, tensors = _Group(), [_Work() for _ in range(64)], [torch.ones(1000)]
    turn = iter(range(1 << 40))

    def call(self: object, given: object) -> _Work:
        return works[next(turn) & 63]

    def wait(self: object) -> None:
        return None

    hooked_call = group_hooks._call(call, 1, recorder)
    hooked_wait = group_hooks._wait(wait, recorder)
    told = paired(
        lambda: wait(call(group, tensors)),
        lambda: hooked_wait(hooked_call(group, tensors)),
        CALLS,
    )
    return {**told, "hooked_calls": 2}


def main() -> int:
    loader = torch.utils.data.DataLoader
    endless = type("Endless", (torch.utils.data.IterableDataset,), {"__iter__": ones})
    plain_next = module._BaseDataLoaderIter.__next__
    with tempfile.TemporaryDirectory() as folder:
        whyidle_probe.start(folder)
        figures = {
            "batch, no workers": of_loader(loader(endless(), batch_size=None), plain_next),
            "batch, 2 workers": of_loader(
                loader(Numbers(), batch_size=2, num_workers=2, prefetch_factor=4), plain_next
            ),
            "optimizer step": of_step(),
            "collective and its wait": of_call(),
        }
        assert whyidle_probe.page_path() is not None
    for name, figure in figures.items():
        sys.stdout.write(f"{name:24} {json.dumps(figure)}\n")
    worst = max(figure["added_ns"] // figure.get("hooked_calls", 1) for figure in figures.values())
    sys.stdout.write(f"worst {worst} ns of {GOAL_NS} a call\n")
    return 0 if worst <= GOAL_NS else 1


if __name__ == "__main__":
    sys.exit(main())
