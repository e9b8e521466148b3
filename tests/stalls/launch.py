"""Starts the ranks of a job, as torchrun does, and stops or ends one if so told.

python -m stalls.launch PLAN.json [PLAN.json ...]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

POLL_S = 0.02
_END_S = 10.0


class Job:
    """The ranks of one job, and what is done to one of them from the first step on."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan, self._started = plan, Path(plan["started"])
        self._began: float | None = None
        self._next_stop: float | None = None
        size = len(plan["ranks"])
        self.ranks = [
            subprocess.Popen(
                words,
                env={
                    **os.environ,
                    **plan["envs"][rank],
                    "RANK": str(rank),
                    "LOCAL_RANK": "0" if plan["nodes"] else str(rank),
                    "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": "1" if plan["nodes"] else str(size),
                    "GROUP_RANK": str(rank) if plan["nodes"] else "0",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(plan["port"]),
                    "TORCHELASTIC_RUN_ID": "none",
                },
            )
            for rank, words in enumerate(plan["ranks"])
        ]

    def look(self) -> bool | None:
        """Whether it went well; None while it runs. One that hangs on purpose does in any case."""
        codes = [process.poll() for process in self.ranks]
        hangs = self._plan["end_after_s"]
        if hangs is None and any(codes):
            return False
        if all(code is not None for code in codes):
            return True
        now = time.monotonic()
        if self._began is None and self._started.exists():
            self._began = now
        if self._began is None:
            return None
        if hangs is not None and now - self._began >= hangs:
            self.end()
            return True
        if self._plan["stop_every_s"]:
            self._stop(now)
        return None

    def _stop(self, now: float) -> None:
        every_s = self._plan["stop_every_s"]
        if self._next_stop is None:
            self._next_stop = now + every_s
        if now >= self._next_stop:
            _pause(self.ranks[self._plan["late"]], self._plan["stop_s"])
            self._next_stop = time.monotonic() + every_s

    def end(self) -> None:
        """Ends what runs: politely, so that the ranks leave their marks, then not."""
        for process in self.ranks:
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + _END_S
        while any(process.poll() is None for process in self.ranks) and time.monotonic() < end:
            time.sleep(POLL_S)
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def main() -> int:
    """One job; of several plans each has a launcher of its own, as several torchruns would be."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if len(sys.argv) > 2:
        return _several(sys.argv[1:])
    job = Job(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    try:
        while (well := job.look()) is None:
            time.sleep(POLL_S)
        return 0 if well else 1
    finally:
        job.end()


def _several(plans: Sequence[str]) -> int:
    """The first failure of a job is everybody's."""
    launchers: list[subprocess.Popen[bytes]] = []
    try:
        for plan in plans:  # one by one: those that began are ended if another cannot
            words = [sys.executable, "-m", "stalls.launch", plan]
            launchers += [subprocess.Popen(words)]
        while any(one.poll() is None for one in launchers):
            if any(one.returncode for one in launchers):
                return 1
            time.sleep(POLL_S)
        return 1 if any(one.returncode for one in launchers) else 0
    finally:
        for one in launchers:
            if one.poll() is None:
                one.terminate()
                one.wait(2 * _END_S)


def _pause(process: subprocess.Popen[bytes], seconds: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())
