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
from whyidle.journal import JournalWriter, RecordingHost
from whyidle.layout import JOURNAL, identify, stem
from whyidle.live import Watched, live_host
from whyidle.sampler import Sampler
from whyidle.spool import SpoolWriter


class Doors:
    """The hosts of a sampler: one for each thread, and over it one for each journaled collector."""

    __slots__ = ("_recording", "_root", "_watched", "hosts", "journal")

    def __init__(self, root: str, watched: Watched, host: Host) -> None:
        self._root = root
        self._watched = watched
        self._recording: dict[str, RecordingHost] = {}
        self.hosts: dict[str, Host] = {"": host}
        self.journal: JournalWriter | None = None

    def host_for(self, collector: Collector) -> Host:
        """Return what a collector asks; threads share no descriptors and no NVML."""
        host = self.hosts.get(collector.thread)
        if host is None:
            host = live_host(self._root, SystemClock(), watched=self._watched)
            self.hosts[collector.thread] = host
        if self.journal is None:
            return host
        return self._recording.setdefault(collector.name, RecordingHost(host, self.journal))

    def observer_for(self, collector: Collector) -> RecordingHost | None:
        """Return who is told of a collector's runs: its journal, if there is one."""
        return self._recording.get(collector.name)

    def close(self, hung: Sequence[str]) -> None:
        """Let go of NVML and everything else, but for what a thread that hangs still uses."""
        for thread, host in self.hosts.items():
            if thread not in hung:
                host.close()
        if self.journal is not None:
            self.journal.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Sample until told to stop."""
    parser = argparse.ArgumentParser(prog="whyidle.sampler_process")
    parser.add_argument("recording", type=Path)
    parser.add_argument("--node", default=None)
    parser.add_argument("--root", default="/")
    parser.add_argument("--watch", type=int, action="append", default=[])
    parser.add_argument("--probe-dir", action="append", default=[])
    parser.add_argument("--journal", action="store_true")
    options = parser.parse_args(argv)
    waiter = prepare("sampler")
    clock = SystemClock(waiter.wait_s)
    watched = Watched(commands=tuple(options.watch), probe_folders=tuple(options.probe_dir))
    host = live_host(options.root, clock, watched=watched)
    identity = identify(host, options.node)
    folder = identity.folder(options.recording)
    doors = Doors(options.root, watched, host)
    if options.journal:
        name = stem(clock.wall_ns(), clock.mono_ns()) + JOURNAL
        doors.journal = JournalWriter(folder / "journal" / name, identity, clock)
    spool = SpoolWriter(folder / "spool", identity, clock)
    sampler = Sampler(
        ALL, doors.host_for, host, spool, pid=os.getpid(), observer_for=doors.observer_for
    )
    doors.close(sampler.run(waiter.stopping))
    return 0


if __name__ == "__main__":
    sys.exit(main())
