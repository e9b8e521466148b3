"""The sampler as a process: `python -m whyidle.sampler_process`, started by the supervisor."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from whyidle.child import prepare
from whyidle.clock import SystemClock
from whyidle.collect import ALL
from whyidle.collect.collector import Collector
from whyidle.host import Host
from whyidle.layout import identify
from whyidle.live import live_host
from whyidle.sampler import Sampler
from whyidle.spool import SpoolWriter


def main(argv: Sequence[str] | None = None) -> int:
    """Sample until told to stop."""
    parser = argparse.ArgumentParser(prog="whyidle.sampler_process")
    parser.add_argument("recording", type=Path)
    parser.add_argument("--node", default=None)
    parser.add_argument("--root", default="/")
    options = parser.parse_args(argv)
    waiter = prepare("sampler")
    clock = SystemClock(waiter.wait_s)
    host = live_host(options.root, clock)
    identity = identify(host, options.node)
    spool = SpoolWriter(identity.folder(options.recording) / "spool", identity, clock)
    hosts: dict[str, Host] = {"": host}

    def host_for(collector: Collector) -> Host:
        """Return the host of a collector's thread: threads share no descriptors and no NVML."""
        if collector.thread not in hosts:
            hosts[collector.thread] = live_host(options.root, SystemClock())
        return hosts[collector.thread]

    sampler = Sampler(ALL, host_for, host, spool, pid=os.getpid())
    sampler.run(waiter.stopping)
    return 0


if __name__ == "__main__":
    sys.exit(main())
