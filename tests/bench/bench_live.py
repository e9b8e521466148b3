"""What settling and serving cost on a busy node, and whether scrapes can hold the sampler up.

    PYTHONPATH=tests python -m bench.bench_live                 about four minutes

The node is that of bench_sampler: 8 GPUs, 8 ports, 16 disks, 72 processes. The keeper settles every
30 s as in production. First one scrape every 15 s; then for a minute 100 scrapes a second beside
clients that are slow, silent or malformed. CPU is each process's own clock, as a ratio of one core.
Exits with 1 if a goal was missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.bench_sampler import EMPTY, Watched, running
from bench.busy_node import busy_node
from live_kit import AGENT, free_port, get
from whyidle.store import Recording

# Until segments and spool hold what an evaluation looks back at.
WARM_UP_S = 100.0
SCRAPE_EVERY_S = 15.0
HOSTILE = 24
_GARBAGE = (b"\x16\x03\x01\x02\x00", b"GET /metrics HTTP/1.1\r\nA: ", b"\x00" * 512, b"POST / HTTP")


@dataclass(slots=True, kw_only=True)
class Scrapes:
    """What became of scrapes."""

    answered: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def once(self, port: int) -> None:
        """Scrape once."""
        began = time.monotonic()
        try:
            request = urllib.request.Request(
                f"http://{AGENT}:{port}/metrics", headers={"Accept-Encoding": "gzip"}
            )
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.read()
        except OSError:
            with self.lock:
                self.refused += 1
            return
        with self.lock:
            self.answered += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)


@contextmanager
def flood(port: int, per_second: float, scrapes: Scrapes) -> Iterator[None]:
    """Scrape at a rate, beside clients that mean no good."""
    stop = threading.Event()

    def steady(threads: int, number: int) -> None:
        period = threads / per_second
        due = time.monotonic() + number / per_second
        while not stop.wait(max(0.0, due - time.monotonic())):
            due += period
            scrapes.once(port)

    def hostile(number: int) -> None:
        while not stop.is_set():
            try:
                with socket.create_connection((AGENT, port), timeout=2) as connection:
                    connection.sendall(_GARBAGE[number % len(_GARBAGE)])
                    stop.wait(1.0 + number % 7)
                    if number % 2:
                        connection.sendall(b"x")
                        stop.wait(20.0)
            except OSError:
                stop.wait(0.2)

    jobs: list[tuple[Callable[..., None], tuple[int, ...]]] = [
        *((steady, (4, number)) for number in range(4)),
        *((hostile, (number,)) for number in range(HOSTILE)),
    ]
    threads = [threading.Thread(target=work, args=values, daemon=True) for work, values in jobs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the run: CPU of a core by process."""

    begin_ns: int
    end_ns: int
    cpu: dict[str, float]


def part(watched: dict[str, Watched], seconds: float, step: Callable[[], None]) -> Part:
    """Pass some time and measure it; `step` is called about once a second."""
    for one in watched.values():
        one.begin()
    begin = time.monotonic_ns()
    while (now := time.monotonic_ns()) - begin < seconds * 1e9:
        time.sleep(min(1.0, seconds - (now - begin) / 1e9))
        step()
        for one in watched.values():
            one.look((now - begin) / 1e9)
    end = time.monotonic_ns()
    wall = (end - begin) / 1e9
    cpu = {name: one.ratio(wall) for name, one in watched.items()}
    return Part(begin_ns=begin, end_ns=end, cpu=cpu)


def value(page: str, series: str) -> float:
    """Return a value of a page of metrics."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"{series} ")]
    return float(line.rsplit(" ", 1)[1])


def missed(recording: Path, begin_ns: int, end_ns: int) -> tuple[int, int]:
    """Return runs of collectors, and due runs that never began, in a part."""
    with Recording([recording]) as opened:
        found = opened.con.execute(
            "SELECT count(began_ns), coalesce(sum(missed), 0)::BIGINT FROM tick "
            f"WHERE due_ns > {begin_ns} AND due_ns <= {end_ns}"
        ).fetchone()
    assert found is not None
    return int(found[0]), int(found[1])


def measure(folder: Path, seconds: float, flood_s: float, keep: Path | None) -> bool:
    """Run, measure and report; say whether every goal was met."""
    scrapes = Scrapes()
    port = free_port()
    with busy_node(folder) as node, ExitStack() as stack:
        recording = folder / "recording"
        agent = [str(recording), "--node", "bench", "--root", str(node.root)]
        serve = ["--metrics-listen", f"{AGENT}:{port}"]
        commands = {
            "keeper": [sys.executable, "-m", "whyidle_rules.live.keeper", *agent, *serve],
            "sampler": [sys.executable, "-m", "whyidle.sampler_process", *agent],
            "empty": [sys.executable, "-c", EMPTY],
        }
        watched = {}
        for name, command in commands.items():
            log = folder / f"{name}.log"
            process = stack.enter_context(running(command, node.gpus.env, log))
            watched[name] = Watched(pid=process.pid)
        time.sleep(WARM_UP_S)
        last = [time.monotonic()]

        def seldom() -> None:
            if time.monotonic() - last[0] >= SCRAPE_EVERY_S:
                last[0] = time.monotonic()
                get(port)

        calm = part(watched, seconds, seldom)
        page = get(port)
        with flood(port, 100.0, scrapes):
            stormy = part(watched, flood_s, lambda: None)
        after = get(port)
        pss = {name: _pss(one.pid) for name, one in watched.items()}
    if keep is not None:
        shutil.copytree(recording, keep)
    return report(recording, (calm, stormy), watched, pss, (page, after), scrapes)


def _pss(pid: int) -> int:
    """Proportional set size, bytes: what is shared between processes counts once."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def report(
    recording: Path,
    parts: tuple[Part, Part],
    watched: dict[str, Watched],
    pss: dict[str, int],
    pages: tuple[str, str],
    scrapes: Scrapes,
) -> bool:
    """Print the figures; say whether every goal was met."""
    calm, stormy = parts
    rss = {name: max(size for _, size in one.rss) for name, one in watched.items()}
    lines = [f"{'process':<10}{'calm':>9}{'flooded':>9}{'peak RSS':>11}{'PSS':>9}"]
    for name in watched:
        cells = f"{calm.cpu[name]:>9.2%}{stormy.cpu[name]:>9.2%}"
        lines.append(f"{name:<10}{cells}{rss[name] / 1e6:>8.0f} MB{pss[name] / 1e6:>6.0f} MB")
    page, after = pages
    settled = value(page, "whyidle_ledger_intervals_total")
    series = sum(not line.startswith("#") for line in page.splitlines())
    cpu = value(page, "whyidle_ledger_cpu_seconds_total") / settled
    lines += [
        "",
        f"a page: {len(page)} bytes, {series} series",
        f"an evaluation: {cpu:.3f} s of CPU, took "
        f"{value(page, 'whyidle_ledger_evaluation_seconds'):.3f} s",
        f"lag: {value(page, 'whyidle_ledger_lag_seconds'):.1f} s calm, "
        f"{value(after, 'whyidle_ledger_lag_seconds'):.1f} s after the flood",
        f"flood: {scrapes.answered} answered, {scrapes.refused} refused, slowest "
        f"{scrapes.slowest_s:.3f} s",
    ]
    counted = [missed(recording, each.begin_ns, each.end_ns) for each in parts]
    lines += [
        f"{name}: {runs} runs of collectors, {late} missed"
        for name, (runs, late) in zip(("calm", "flooded"), counted, strict=True)
    ]
    both = calm.cpu["sampler"] + calm.cpu["keeper"] - calm.cpu["empty"]
    goals = {
        "sampler and keeper <= 2 % of a core": both <= 0.02,
        "sampler and keeper <= 250 MB": rss["sampler"] + rss["keeper"] <= 250e6,
        "no tick missed while flooded": counted[1][1] == 0,
        "lag <= 70 s": value(after, "whyidle_ledger_lag_seconds") <= 70,
        "flood is answered": scrapes.answered
        >= 0.9 * 100 * (stormy.end_ns - stormy.begin_ns) / 1e9,
    }
    lines += ["", *(f"{'ok' if met else 'MISSED':<8}{goal}" for goal, met in goals.items())]
    sys.stdout.write("\n".join([f"load average {os.getloadavg()[0]:.1f}", *lines]) + "\n")
    return all(goals.values())


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--flood-s", type=float, default=60.0)
    parser.add_argument("--keep", type=Path, help="leave the recording in this new folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="whyidle-bench-") as folder:
        met = measure(Path(folder), options.seconds, options.flood_s, options.keep)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
