"""What the agent costs on a busy node, paced, beside an empty loop and a peer in the same run.

    PYTHONPATH=tests python -m bench.bench_sampler                 a minute
    PYTHONPATH=tests python -m bench.bench_sampler --minutes 30    the soak: memory, every tick
    PYTHONPATH=tests python -m bench.bench_sampler --everything    RDMA, NVMe-oF, NFS, the probe too

8 stand-in GPUs, 8 ports, 16 disks, 72 real processes. CPU is each process's own clock, in ratio of
one core: at a steady pace, and beside it with what starting cost, once. The bytes per value only
mean something once segments are large: look at the soak. Exits with 1 if a goal was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.busy_node import busy_node
from bench.recorded import Recorded, read

DAY_S = 86_400
WARM_UP_S = 8.0
LOOK_EVERY_S = 5.0
LOOKS = 6
CONNECTIONS = 200
_CPUCLOCK_SCHED = 2
# Wakes as often as the fast lane does, and does nothing.
EMPTY = """
import time
due = time.monotonic()
while True:
    due += 0.125
    time.sleep(max(0.0, due - time.monotonic()))
"""
GOALS: Mapping[str, float] = {
    "sampler_cpu_ratio_above_empty": 0.01,
    "agent_cpu_ratio_above_empty": 0.02,
    "agent_rss_bytes": 250e6,
    "written_bytes_per_day": 5e9,
    "merged_bytes_per_value": 2.0,
    "unaccounted_ticks": 0,
    "descriptors_grown": 0,
    "rss_growth_bytes_per_hour": 4e6,
}
# What a run must last for a figure to mean something.
NEEDS_S: Mapping[str, float] = {"merged_bytes_per_value": 1200, "rss_growth_bytes_per_hour": 1200}


def cpu_ns(pid: int) -> int:
    """CPU time of a process, ended threads too (clock_getcpuclockid of glibc)."""
    return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def written_bytes(pid: int) -> int:
    """What a process caused to be written to storage, less what it took back before that."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    io = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return io["write_bytes"] - io["cancelled_write_bytes"]


@dataclass(slots=True, kw_only=True)
class Watched:
    """A process that is measured."""

    pid: int
    begin_cpu_ns: int = 0
    begin_written_bytes: int = 0
    rss: list[tuple[float, int]] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Begin to count."""
        self.begin_cpu_ns = cpu_ns(self.pid)
        self.begin_written_bytes = written_bytes(self.pid)

    def look(self, at_s: float) -> None:
        """Note memory and descriptors."""
        self.rss.append((at_s, rss_bytes(self.pid)))
        self.descriptors.append(len(os.listdir(f"/proc/{self.pid}/fd")))  # noqa: PTH208

    def wrote(self) -> int:
        """Bytes written towards storage since `begin`."""
        return written_bytes(self.pid) - self.begin_written_bytes

    def ratio(self, wall_s: float) -> float:
        """CPU since `begin`, in ratio of one core."""
        return (cpu_ns(self.pid) - self.begin_cpu_ns) / 1e9 / wall_s


@contextmanager
def running(
    command: list[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program whose standard input stays open; it is told to stop by closing that."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env={**os.environ, **env},
        )
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
            try:
                process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The figures of a run."""

    wall_s: float
    load_average: float
    cpu_ratio: dict[str, float]
    start_cpu_s: dict[str, float]
    cpu_ratio_with_start: dict[str, float]
    rss_bytes: dict[str, int]
    written_bytes_per_day: dict[str, float]
    figures: dict[str, float]
    recorded: Recorded


def measure(folder: Path, seconds: float, *, peer: bool, everything: bool = False) -> Result:
    """Run everything for a while and measure it."""
    with busy_node(folder, everything=everything) as node, ExitStack() as stack:
        if everything:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=200))
            for _ in range(CONNECTIONS // 2):  # each is two sockets
                stack.enter_context(socket.create_connection(server.getsockname()))
                stack.enter_context(server.accept()[0])
        recording = folder / "recording"
        agent = [str(recording), "--node", "bench", "--root", str(node.root)]
        commands = {
            "sampler": [sys.executable, "-m", "whyidle.sampler_process", *agent],
            "keeper": [sys.executable, "-m", "whyidle.keeper_process", *agent, "--merge-at-end"],
            "empty": [sys.executable, "-c", EMPTY],
        }
        exporter = Path(sys.executable).with_name("nvitop-exporter")
        if peer and exporter.exists():
            commands["nvitop-exporter"] = [str(exporter), "--interval", "1", "--port", "18432"]
        # The keeper is stopped last: it takes over what the sampler leaves.
        order = ["keeper", "sampler", *(set(commands) - {"keeper", "sampler"})]
        watched = {
            name: Watched(
                pid=stack.enter_context(
                    running(commands[name], node.gpus.env, folder / f"{name}.log")
                ).pid
            )
            for name in order
        }
        time.sleep(WARM_UP_S)
        for one in watched.values():
            one.begin()
        begin = time.monotonic()
        while (left := seconds - (time.monotonic() - begin)) > 0:
            time.sleep(min(LOOK_EVERY_S, left))
            for one in watched.values():
                one.look(time.monotonic() - begin)
        wall_s = time.monotonic() - begin
        cpu = {name: one.ratio(wall_s) for name, one in watched.items()}
        start_s = {name: one.begin_cpu_ns / 1e9 for name, one in watched.items()}
        wrote = {name: one.wrote() / wall_s * DAY_S for name, one in watched.items()}
    recorded = read(recording)
    return Result(
        wall_s=wall_s,
        load_average=os.getloadavg()[1],
        cpu_ratio=cpu,
        start_cpu_s=start_s,
        cpu_ratio_with_start={
            name: (ratio * wall_s + start_s[name]) / (wall_s + WARM_UP_S)
            for name, ratio in cpu.items()
        },
        rss_bytes={name: max(size for _, size in one.rss) for name, one in watched.items()},
        written_bytes_per_day=wrote,
        figures=figures(watched, cpu, wrote["sampler"] + wrote["keeper"], recorded),
        recorded=recorded,
    )


def figures(
    watched: Mapping[str, Watched],
    cpu: Mapping[str, float],
    written_bytes_per_day: float,
    recorded: Recorded,
) -> dict[str, float]:
    """Return what the goals are about."""
    both = zip(watched["sampler"].rss, watched["keeper"].rss, strict=True)
    together = [(at, sampler + keeper) for (at, sampler), (_, keeper) in both]
    descriptors = watched["sampler"].descriptors
    return {
        "sampler_cpu_ratio_above_empty": cpu["sampler"] - cpu["empty"],
        "agent_cpu_ratio_above_empty": cpu["sampler"] + cpu["keeper"] - cpu["empty"],
        "agent_rss_bytes": max(size for _, size in together),
        "written_bytes_per_day": written_bytes_per_day,
        "merged_bytes_per_value": recorded.bytes_per_value,
        "unaccounted_ticks": recorded.unaccounted_ticks,
        # The least of some looks: a file that is read once is open for a moment, and no growth.
        "descriptors_grown": max(0, min(descriptors[-LOOKS:]) - min(descriptors[:LOOKS])),
        "rss_growth_bytes_per_hour": slope(watched["sampler"].rss[len(together) // 3 :]) * 3600,
    }


def slope(points: list[tuple[float, int]]) -> float:
    """Return the least-squares slope, 0 where there are too few points for one."""
    if len(points) < 3:
        return 0.0
    mean_t = sum(t for t, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    return sum((t - mean_t) * (y - mean_y) for t, y in points) / spread


def report(result: Result) -> tuple[str, bool]:
    """Return the tables as text, and whether every goal that this run can judge was met."""
    lines = [f"{result.wall_s:.0f} s, load average of the machine {result.load_average:.1f}", ""]
    lines.append(
        f"{'process':<18}{'CPU of a core':>14}{'with start':>12}{'start':>9}{'peak RSS':>12}"
        f"{'written a day':>15}"
    )
    for name, ratio in sorted(result.cpu_ratio.items()):
        start = f"{result.cpu_ratio_with_start[name]:>12.2%}{result.start_cpu_s[name]:>7.2f} s"
        wrote = f"{result.written_bytes_per_day[name] / 1e9:>12.2f} GB"
        lines.append(
            f"{name:<18}{ratio:>14.2%}{start}{result.rss_bytes[name] / 1e6:>9.0f} MB{wrote}"
        )
    lines += ["", f"{'collector':<18}{'runs':>7}{'rows':>9}{'us a run':>10}{'CPU of a core':>15}"]
    for cost in result.recorded.costs:
        each = f"{cost.cpu_ns_per_run / 1000:>10.0f}{cost.cpu_ratio:>15.3%}"
        lines.append(f"{cost.name:<18}{cost.runs:>7}{cost.rows:>9}{each}")
    lines += ["", f"{'table':<18}{'rows':>9}{'values':>11}"]
    for table, (rows, values) in sorted(result.recorded.tables.items()):
        lines.append(f"{table:<18}{rows:>9}{values:>11}")
    lines += ["", f"{'goal':<34}{'at most':>14}{'measured':>16}"]
    met = True
    for name, goal in GOALS.items():
        found = result.figures[name]
        judged = result.wall_s >= NEEDS_S.get(name, 0)
        verdict = ("ok" if found <= goal else "MISSED") if judged else "too short to tell"
        met = met and (found <= goal or not judged)
        lines.append(f"{name:<34}{goal:>14,.4g}{found:>16,.4g}  {verdict}")
    if result.recorded.errors:
        lines += ["", "errors recorded:", *(f"  {line}" for line in result.recorded.errors)]
    return "\n".join(lines), met


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--no-peer", action="store_true", help="leave nvitop-exporter out")
    parser.add_argument("--everything", action="store_true", help="with fabric, storage, pages")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--keep", type=Path, help="leave the recording in this new folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="whyidle-bench-") as folder:
        result = measure(
            Path(folder),
            options.minutes * 60,
            peer=not options.no_peer,
            everything=options.everything,
        )
        if options.keep is not None:
            shutil.copytree(Path(folder, "recording"), options.keep)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result), indent=1))
    text, met = report(result)
    sys.stdout.write(text + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
