"""Prints, as a JSON list, what this process cannot see of another one and of the machine.

systemd_see.py PID
"""

from __future__ import annotations

import json
import sys
import time

from whyidle.clock import SystemClock
from whyidle.collect import ALL
from whyidle.collect.collector import NoData, Problem
from whyidle.live import Watched, live_host


def rows(name: str, pid: int) -> list[object] | None:
    """Run a collector three times; return its rows, None where it says that it may not look."""
    host = live_host("/", SystemClock(), watched=Watched(commands=(pid,)))
    (collect,) = (one.make() for one in ALL if one.name == name)
    found: list[object] = []
    for _ in range(3):
        try:
            found += [row for row in collect(host) if not isinstance(row, Problem)]
        except (NoData, PermissionError):
            return None
        time.sleep(0.3)
    return found


def main() -> None:
    pid = int(sys.argv[1])
    blind = []
    if rows("xid", pid) is None:
        blind.append("xid")
    seen = [row for row in rows("process", pid) or [] if getattr(row, "pid", None) == pid]
    for name, column in (
        ("io", "rchar_bytes"),
        ("wait_channel", "wait_channel"),
        ("net_namespace", "net_namespace"),
    ):
        if all(getattr(row, column, None) is None for row in seen):
            blind.append(name)
    if not rows("file_use", pid):
        blind.append("open_files")
    json.dump(blind, sys.stdout)


if __name__ == "__main__":
    main()
