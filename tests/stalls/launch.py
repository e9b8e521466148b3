"""Starts the ranks of a job, as torchrun does, and stops one now and then if so told.

python -m stalls.launch PLAN.json
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.02


def main() -> int:
    """The first failure of a rank is the job's: the others are ended."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    started = Path(plan["started"])
    ranks = [
        subprocess.Popen(
            words,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(plan["ranks"])),
            },
        )
        for rank, words in enumerate(plan["ranks"])
    ]
    every_s, stop_s = plan["stop_every_s"], plan["stop_s"]
    next_stop = None
    try:
        while any(process.poll() is None for process in ranks):
            if any(process.returncode for process in ranks):
                return 1
            time.sleep(POLL_S)
            if not every_s or not started.exists():
                continue
            now = time.monotonic()
            next_stop = now + every_s if next_stop is None else next_stop
            if now >= next_stop:
                _pause(ranks[-1], stop_s)
                next_stop = time.monotonic() + every_s
        return 1 if any(process.returncode for process in ranks) else 0
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def _pause(process: subprocess.Popen[bytes], seconds: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())
