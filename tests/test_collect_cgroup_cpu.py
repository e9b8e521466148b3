"""Quota, throttling and pressure of cgroups, versions 1 and 2, and of mixtures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trees import BEGIN_NS, gather, host_of, shared, write
from whyidle.clock import NS_PER_S, SystemClock, VirtualClock
from whyidle.collect.cgroup_cpu import CGROUP_CPU
from whyidle.collect.cgroup_text import (
    levels,
    parse_cfs,
    parse_cpu_max,
    parse_cpu_stat,
    parse_membership,
)
from whyidle.collect.collector import NoData
from whyidle.host import Answer
from whyidle.live import Watched, live_host
from whyidle.schema import CgroupCpu, Pressure

V2_STAT = "usage_usec 500\nuser_usec 300\nnr_periods 40\nnr_throttled 6\nthrottled_usec 70\n"
V1_STAT = "nr_periods 40\nnr_throttled 6\nthrottled_time 70000\n"
PSI = "some avg10=0 avg60=0 avg300=0 total=9\nfull avg10=0 avg60=0 avg300=0 total=4\n"


def watching(*pids: int) -> Answer:
    return {"gpu": pids, "commands": ()}


def test_version_2_counts_in_us() -> None:
    stat = parse_cpu_stat(V2_STAT)
    assert (stat.usage_ns, stat.periods, stat.throttled_periods) == (500_000, 40, 6)
    assert stat.throttled_ns == 70_000


def test_version_1_counts_in_ns() -> None:
    stat = parse_cpu_stat(V1_STAT)
    assert (stat.usage_ns, stat.throttled_ns) == (None, 70_000)


def test_without_the_controller_nothing_is_counted() -> None:
    stat = parse_cpu_stat("usage_usec 5\n")
    assert (stat.usage_ns, stat.periods, stat.throttled_ns) == (5_000, None, None)
    with pytest.raises(ValueError, match=r"cpu\.stat: nr_periods"):
        parse_cpu_stat("nr_periods many\n")


def test_quotas() -> None:
    assert parse_cpu_max("200000 100000\n") == (200_000_000, 100_000_000)
    assert parse_cpu_max("max 100000\n") == (None, 100_000_000)
    assert parse_cfs("-1\n", "100000\n") == (None, 100_000_000)
    assert parse_cfs("50000\n", "100000\n") == (50_000_000, 100_000_000)
    with pytest.raises(ValueError, match=r"cpu\.max"):
        parse_cpu_max("200000\n")


def test_the_v1_controller_rules_where_it_is_mounted() -> None:
    text = "12:cpu,cpuacct:/slurm/job_1\n3:memory:/m\n0::/unified\n"
    found = parse_membership(text)
    assert found is not None
    assert (found.version, found.controllers, found.path) == (1, "cpu,cpuacct", "/slurm/job_1")
    unified = parse_membership("3:memory:/m\n0::/a/b:c\n")
    assert unified is not None
    assert (unified.version, unified.path) == (2, "/a/b:c")
    assert parse_membership("3:memory:/m\n") is None
    assert parse_membership("garbage") is None


def test_levels() -> None:
    assert levels("/a/b") == ("/a/b", "/a", "/")
    assert levels("/") == ("/",)


def v2(root: Path) -> None:
    base = "sys/fs/cgroup"
    write(
        root,
        {
            "proc/7/cgroup": "0::/pod/c1\n",
            "proc/8/cgroup": "0::/pod/c2\n",
            f"{base}/cgroup.procs": "",
            f"{base}/cpu.stat": "usage_usec 9000\n",
            f"{base}/pod/cpu.stat": V2_STAT,
            f"{base}/pod/cpu.max": "400000 100000\n",
            f"{base}/pod/cpu.pressure": PSI,
            f"{base}/pod/c1/cpu.stat": V2_STAT,
            f"{base}/pod/c1/cpu.max": "max 100000\n",
            f"{base}/pod/c1/cpu.pressure": PSI,
            f"{base}/pod/c2/cpu.stat": V2_STAT,
            f"{base}/pod/c2/cpu.max": "max 100000\n",
        },
    )


def test_a_quota_above_is_found_and_told_once(tmp_path: Path) -> None:
    v2(tmp_path)
    rows, problems = gather(CGROUP_CPU.make(), host_of(tmp_path, watched=lambda: watching(7, 8)))
    assert problems == []
    quotas = {row.cgroup: row.quota_ns for row in rows if isinstance(row, CgroupCpu)}
    assert quotas == {"/pod/c1": None, "/pod": 400_000_000, "/pod/c2": None}
    assert len([row for row in rows if isinstance(row, CgroupCpu)]) == 3
    row = next(row for row in rows if isinstance(row, CgroupCpu) and row.cgroup == "/pod")
    assert (row.version, row.period_ns, row.usage_ns) == (2, 100_000_000, 500_000)
    assert (row.periods, row.throttled_periods, row.throttled_ns) == (40, 6, 70_000)


def test_pressure_of_a_cgroup_has_a_full(tmp_path: Path) -> None:
    v2(tmp_path)
    rows, _ = gather(CGROUP_CPU.make(), host_of(tmp_path, watched=lambda: watching(7)))
    pressure = {row.cgroup: row for row in rows if isinstance(row, Pressure)}
    assert set(pressure) == {"/pod/c1", "/pod"}
    assert (pressure["/pod"].resource, pressure["/pod"].full_ns) == ("cpu", 4_000)


def test_a_new_quota_is_seen_within_ten_seconds(tmp_path: Path) -> None:
    v2(tmp_path)
    clock = VirtualClock(BEGIN_NS)
    host = host_of(tmp_path, watched=lambda: watching(7), clock=clock)
    collect = CGROUP_CPU.make()
    gather(collect, host)
    write(tmp_path, {"sys/fs/cgroup/pod/c1/cpu.max": "100000 100000\n"})
    clock.advance(10 * NS_PER_S)
    rows, _ = gather(collect, host)
    assert {row.cgroup: row.quota_ns for row in rows if isinstance(row, CgroupCpu)} == {
        "/pod/c1": 100_000_000,
        "/pod": 400_000_000,
    }


def test_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/cpu,cpuacct"
    write(
        tmp_path,
        {
            "proc/7/cgroup": "4:cpu,cpuacct:/job\n0::/x\n",
            f"{base}/cgroup.procs": "",
            f"{base}/cpu.cfs_quota_us": "-1\n",
            f"{base}/cpu.cfs_period_us": "100000\n",
            f"{base}/job/cpu.stat": V1_STAT,
            f"{base}/job/cpu.cfs_quota_us": "50000\n",
            f"{base}/job/cpu.cfs_period_us": "100000\n",
            f"{base}/job/cpuacct.usage": "123456789\n",
        },
    )
    rows, problems = gather(CGROUP_CPU.make(), host_of(tmp_path, watched=lambda: watching(7)))
    assert problems == []
    (row,) = rows
    assert (row.version, row.cgroup, row.quota_ns) == (1, "/job", 50_000_000)
    assert (row.usage_ns, row.throttled_ns) == (123_456_789, 70_000)


def test_outside_the_own_namespace_is_a_problem(tmp_path: Path) -> None:
    write(tmp_path, {"proc/7/cgroup": "0::/../other\n"})
    rows, problems = gather(CGROUP_CPU.make(), host_of(tmp_path, watched=lambda: watching(7)))
    assert rows == []
    assert "cgroup namespace" in problems[0].message


def test_a_cgroup_that_cannot_be_read_is_a_problem_of_that_level(tmp_path: Path) -> None:
    v2(tmp_path)
    write(tmp_path, {"sys/fs/cgroup/pod/c1/cpu.stat": "nr_periods many\n"})
    rows, problems = gather(CGROUP_CPU.make(), host_of(tmp_path, watched=lambda: watching(7)))
    assert [problem.subject for problem in problems] == ["/pod/c1"]
    assert {row.cgroup for row in rows} == {"/pod"}


def test_nothing_watched_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData):
        gather(CGROUP_CPU.make(), host_of(tmp_path))


def test_an_ended_process_is_no_problem(tmp_path: Path) -> None:
    assert gather(CGROUP_CPU.make(), host_of(tmp_path, watched=lambda: watching(7))) == ([], [])


@pytest.mark.shared
@pytest.mark.parametrize(
    ("path", "periods", "throttled_ns"),
    [
        (
            "telegraf/cgroup-v2/cpu.stat",
            3_936_904,
            19_175_137_007_000,
        ),
        ("treydock-cgroup_exporter/system.slice/slurmstepd.scope/job_4/cpu.stat", 0, 0),
        ("treydock-cgroup_exporter/cpuacct/slurm/uid_20821/job_11/cpu.stat", 0, 0),
    ],
)
def test_recorded_cpu_stat(path: str, periods: int, throttled_ns: int) -> None:
    stat = parse_cpu_stat(shared(path).read_text())
    assert (stat.periods, stat.throttled_ns) == (periods, throttled_ns)


@pytest.mark.shared
def test_recorded_memberships() -> None:
    for path in shared("treydock-cgroup_exporter/proc").rglob("cgroup"):
        found = parse_membership(path.read_text())
        assert found is not None and found.version == 2


V1_ROOT = Path("/sys/fs/cgroup/cpu")
# Joins the cgroup named first and computes for the seconds named second.
HOG = (
    "import os, sys, time\n"
    "open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
    "print('in', flush=True)\n"
    "end = time.monotonic() + float(sys.argv[2])\n"
    "while time.monotonic() < end: pass\n"
)


@pytest.mark.skipif(
    os.geteuid() != 0 or not (V1_ROOT / "cpu.cfs_quota_us").exists(),
    reason="needs root and a version 1 cpu controller",
)
def test_a_real_quota_throttles_and_shows(tmp_path: Path) -> None:
    group = V1_ROOT / f"whyidle-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("20000")
        (group / "cpu.cfs_period_us").write_text("100000")
        hog = subprocess.Popen(
            [sys.executable, "-c", HOG, str(group), "1.5"], stdout=subprocess.PIPE, text=True
        )
        assert hog.stdout is not None
        assert hog.stdout.readline() == "in\n"
        clock = SystemClock()
        host = live_host("/", clock, watched=Watched(commands=(hog.pid,)))
        collect = CGROUP_CPU.make()
        before = next(row for row in gather(collect, host)[0] if row.cgroup != "/")
        clock.sleep_until(clock.mono_ns() + NS_PER_S)
        after = next(row for row in gather(collect, host)[0] if row.cgroup != "/")
        host.close()
        hog.wait(timeout=30)
        hog.stdout.close()
    finally:
        group.rmdir()
    assert after.quota_ns == 20_000_000
    # On a busy machine it gets less than its quota in some periods, and is not cut in those.
    assert 5 <= after.periods - before.periods <= 12
    assert after.throttled_periods - before.throttled_periods >= 3
    assert after.throttled_ns - before.throttled_ns > NS_PER_S // 10
