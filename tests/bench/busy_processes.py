"""Eight make-believe trainers with eight data workers each: real processes that mostly sleep.

Run as a program: `busy_processes.py DATA [PAGES]`. It prints their pids as JSON, trainers first,
and ends with its standard input. Each wakes about once a second and reads 64 KiB of a file, so that
its counters move; with PAGES, trainers have the probe's pages there, of a loader and a group each.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

TRAINERS = 8
WORKERS = 8
# A rank has 50 to 300 threads; what counts for the sampler is that their names are looked at once.
THREADS = 20
_PR_SET_NAME = 15
_PR_SET_PDEATHSIG = 1


def _name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _sleep_named(name: str) -> None:
    _name(name)
    threading.Event().wait()


class _Loader:
    """Stands for a DataLoader: what the probe needs of one is that it lives."""


def _page(pages: str) -> Callable[[], None]:
    """Make the page of this process; return what a step does to it."""
    from whyidle_probe import layout as at
    from whyidle_probe.recorder import make

    recorder, loader = make(pages), _Loader()
    block = recorder.block_of(loader)
    assert block is not None, f"no page can be made in {pages}"
    block.slots[at.LOADER_WORKERS] = WORKERS
    recorder.pipeline(0, 1, 8, "1f1b")

    def step() -> None:
        began = time.monotonic_ns()
        for slot in (at.LOADER_BATCHES, at.LOADER_EMPTY_ARRIVALS):
            block.slots[slot] += 1
        block.slots[at.LOADER_WAIT_NS] += 5_000_000
        recorder.waited(began - 5_000_000, began)
        recorder.step()

    return step


def _live(data: Path, step: Callable[[], None] = lambda: None) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    luck = random.Random(os.getpid())
    while True:
        time.sleep(luck.uniform(0.5, 1.5))
        step()
        with data.open("rb", buffering=0) as file:
            file.read(1 << 16)


def _trainer(data: Path, pids: int, pages: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for _ in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            _name("pt_data_worker")
            _live(data)
        os.write(pids, f"{pid}\n".encode())
    for index in range(THREADS):
        name = ("pt_autograd_0", "NCCL Progress 1", "pt_data_pin", "cuda-EvtHandlr")[index % 4]
        threading.Thread(target=_sleep_named, args=(name,), daemon=True).start()
    _live(data, *([_page(pages)] if pages else []))


def main() -> None:
    """Start everything, tell the pids, and wait for the end of standard input."""
    data, pages = Path(sys.argv[1]), "".join(sys.argv[2:])
    out, into = os.pipe()
    trainers = []
    for _ in range(TRAINERS):
        pid = os.fork()
        if pid == 0:
            os.close(0)
            _trainer(data, into, pages)
        trainers.append(pid)
    os.close(into)
    told = b""
    while told.count(b"\n") < TRAINERS * WORKERS:
        told += os.read(out, 4096)
    sys.stdout.write(json.dumps([trainers, [int(line) for line in told.split()]]) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    for pid in trainers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
