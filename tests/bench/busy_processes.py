"""Eight make-believe trainers with eight data workers each: real processes that mostly sleep.

Run as a program. It prints their pids as JSON, trainers first, and ends with its standard input.
Each wakes about once a second and reads 64 KiB of a file, so that its counters move.
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


def _live(data: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    luck = random.Random(os.getpid())
    while True:
        time.sleep(luck.uniform(0.5, 1.5))
        with data.open("rb", buffering=0) as file:
            file.read(1 << 16)


def _trainer(data: Path, pids: int) -> None:
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
    _live(data)


def main() -> None:
    """Start everything, tell the pids, and wait for the end of standard input."""
    data = Path(sys.argv[1])
    out, into = os.pipe()
    trainers = []
    for _ in range(TRAINERS):
        pid = os.fork()
        if pid == 0:
            os.close(0)
            _trainer(data, into)
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
