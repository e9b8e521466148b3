"""The sampler as a process: `python -m whyidle.sampler_process`, started by the supervisor."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from whyidle.child import Progress, Step, Stop, prepare, take_lock
from whyidle.clock import NS_PER_S, Clock, SystemClock
from whyidle.collect import ALL
from whyidle.collect.collector import Collector
from whyidle.dcgm import ENVIRONMENT as DCGM_URL
from whyidle.host import Host, NvmlSource
from whyidle.journal import JournalWriter, RecordingHost
from whyidle.layout import SAMPLER_LOCK, identify
from whyidle.live import Watched, live_host
from whyidle.release import ReleasedNvml
from whyidle.sampler import Sampler
from whyidle.spool import SpoolWriter


class Doors:
    """The hosts of a sampler: one for each thread, and over it one for each journaled collector."""

    __slots__ = ("_nvml", "_recording", "_root", "_watched", "hosts", "journal")

    def __init__(
        self, root: str, watched: Watched, host: Host, nvml: NvmlSource | None = None
    ) -> None:
        self._root = root
        self._watched = watched
        self._nvml = nvml
        self._recording: dict[str, RecordingHost] = {}
        self.hosts: dict[str, Host] = {"": host}
        self.journal: JournalWriter | None = None

    def host_for(self, collector: Collector) -> Host:
        """Return what a collector asks; threads share no descriptors and no NVML."""
        host = self.hosts.get(collector.thread)
        if host is None:
            host = live_host(self._root, SystemClock(), watched=self._watched, nvml=self._nvml)
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
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--no-gpus", action="store_true")
    parser.add_argument("--dcgm-url", default=None)
    options = parser.parse_args(argv)
    if options.dcgm_url is not None:
        os.environ[DCGM_URL] = options.dcgm_url
    waiter = prepare("sampler")
    clock = SystemClock(waiter.wait_s)
    watched = Watched(commands=tuple(options.watch), probe_folders=tuple(options.probe_dir))
    nvml = ReleasedNvml() if options.no_gpus else None
    host = live_host(options.root, clock, watched=watched, nvml=nvml)
    identity = identify(host, options.node)
    folder = identity.folder(options.recording)
    # Held until this process ends: the keeper leaves the newest piece alone meanwhile.
    folder.mkdir(parents=True, exist_ok=True)
    while take_lock(folder / SAMPLER_LOCK) is None and not waiter.stopping():
        waiter.wait_s(0.2)
    if waiter.stopping():
        return 0
    doors = Doors(options.root, watched, host, nvml)
    if options.journal:
        doors.journal = JournalWriter(folder / "journal", identity, clock)
    spool = SpoolWriter(folder / "spool", identity, clock)
    progress = Progress()
    sampler = Sampler(
        [collector for collector in ALL if collector.name not in options.without],
        doors.host_for,
        host,
        spool,
        pid=os.getpid(),
        observer_for=doors.observer_for,
        on_written=lambda: progress.done(Step.WRITE),
    )
    doors.close(sampler.run(_telling(progress, waiter, clock)))
    return 0


def _telling(progress: Progress, waiter: Stop, clock: Clock) -> Callable[[], bool]:
    """Return `waiter.stopping`, which the loop asks each time round: once a second that is told."""
    due_ns = 0

    def stopping() -> bool:
        nonlocal due_ns
        now_ns = clock.mono_ns()
        if now_ns >= due_ns:
            due_ns = now_ns + NS_PER_S
            progress.done(Step.LOOP)
        return waiter.stopping()

    return stopping


if __name__ == "__main__":
    sys.exit(main())
