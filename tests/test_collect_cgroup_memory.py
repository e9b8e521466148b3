"""Memory of cgroups, versions 1 and 2: limits on any level, refaults, kills."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trees import damaged, gather, host_of, shared, write
from whyidle.collect.cgroup_memory import (
    CGROUP_MEMORY,
    Member,
    parse_limit,
    parse_member,
    parse_table,
)
from whyidle.collect.collector import NoData
from whyidle.host import Answer

BASE = "sys/fs/cgroup"
STAT = (
    "anon 4096\nfile 8192\nfile_dirty 100\nfile_writeback 200\nworkingset_refault_anon 3\n"
    "workingset_refault_file 44\npgmajfault 5\n"
)
EVENTS = "low 0\nhigh 6\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n"


def watching(*pids: int) -> Answer:
    return {"gpu": pids, "commands": ()}


def v2(root: Path) -> None:
    task = f"{BASE}/kubepods/pod1/ctr"
    write(
        root,
        {
            "proc/7/cgroup": "0::/kubepods/pod1/ctr\n",
            f"{BASE}/cgroup.procs": "",
            f"{task}/memory.current": "12288\n",
            f"{task}/memory.max": "max\n",
            f"{task}/memory.high": "16384\n",
            f"{task}/memory.swap.current": "0\n",
            f"{task}/memory.stat": STAT,
            f"{task}/memory.events": EVENTS,
            f"{BASE}/kubepods/pod1/memory.current": "20480\n",
            f"{BASE}/kubepods/pod1/memory.max": "65536\n",
            f"{BASE}/kubepods/pod1/memory.high": "max\n",
            f"{BASE}/kubepods/memory.current": "20480\n",
            f"{BASE}/kubepods/memory.max": "max\n",
            f"{BASE}/kubepods/memory.high": "max\n",
        },
    )


def test_who_is_charged() -> None:
    hybrid = "12:cpu:/c\n3:memory:/m\n0::/u\n"
    assert parse_member(hybrid) == Member(1, "memory", "/m")
    assert parse_member("12:cpu,cpuacct:/c\n0::/u:x\n") == Member(2, "", "/u:x")
    assert parse_member("12:cpu:/c\n") is parse_member("nonsense") is None


def test_limits() -> None:
    assert parse_limit("max\n", "memory.max") is None
    assert parse_limit("9223372036854771712\n", "memory.limit_in_bytes") is None
    assert parse_limit("9223372036854710272\n", "memory.limit_in_bytes") is None
    assert parse_limit("4096\n", "memory.max") == 4096
    with pytest.raises(ValueError, match=r"memory\.max is 'many'"):
        parse_limit("many", "memory.max")
    with pytest.raises(ValueError, match=r"memory\.stat: anon"):
        parse_table("anon x\n", "memory.stat")


def test_own_cgroup_and_every_limit_above(tmp_path: Path) -> None:
    v2(tmp_path)
    host = host_of(tmp_path, watched=lambda: watching(7))
    rows, problems = gather(CGROUP_MEMORY.make(), host)
    assert problems == []
    own, pod = rows
    assert (own.cgroup, pod.cgroup) == ("/kubepods/pod1/ctr", "/kubepods/pod1")
    assert (own.current_bytes, own.max_bytes, own.high_bytes) == (12288, None, 16384)
    assert (own.anon_bytes, own.file_bytes, own.dirty_bytes) == (4096, 8192, 100)
    assert (own.refault_file_pages, own.refault_anon_pages, own.major_faults) == (44, 3, 5)
    assert (own.high_events, own.max_events, own.oom_kills) == (6, 7, 1)
    assert (own.swap_bytes, own.writeback_bytes) == (0, 200)
    assert (pod.max_bytes, pod.high_bytes, pod.current_bytes) == (65536, None, 20480)
    assert (pod.oom_kills, pod.refault_file_pages) == (None, None), "not told: not 0"


def test_processes_of_one_cgroup_make_one_row(tmp_path: Path) -> None:
    v2(tmp_path)
    write(tmp_path, {"proc/8/cgroup": "0::/kubepods/pod1/ctr\n"})
    host = host_of(tmp_path, watched=lambda: watching(7, 8, 9))
    rows, _ = gather(CGROUP_MEMORY.make(), host)
    assert len(rows) == 2


def test_version_1(tmp_path: Path) -> None:
    task = f"{BASE}/memory/slurm/job_4/step_0"
    stat = (
        "cache 1\nrss 2\nhierarchical_memory_limit 99\ntotal_cache 8192\ntotal_rss 4096\n"
        "total_dirty 100\ntotal_writeback 200\ntotal_pgmajfault 5\ntotal_workingset_refault 44\n"
        "total_swap 512\n"
    )
    write(
        tmp_path,
        {
            "proc/7/cgroup": "3:memory:/slurm/job_4/step_0\n0::/user\n",
            f"{BASE}/memory/cgroup.procs": "",
            f"{task}/memory.usage_in_bytes": "12288\n",
            f"{task}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{task}/memory.failcnt": "0\n",
            f"{task}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            f"{task}/memory.stat": stat,
            f"{BASE}/memory/slurm/job_4/memory.usage_in_bytes": "12300\n",
            f"{BASE}/memory/slurm/job_4/memory.limit_in_bytes": "65536\n",
            f"{BASE}/memory/slurm/job_4/memory.failcnt": "31\n",
        },
    )
    host = host_of(tmp_path, watched=lambda: watching(7))
    (own, job), problems = gather(CGROUP_MEMORY.make(), host)
    assert problems == []
    assert (own.version, own.max_bytes, own.max_events, own.oom_kills) == (1, None, 0, 2)
    assert (own.file_bytes, own.anon_bytes, own.dirty_bytes) == (8192, 4096, 100)
    assert (own.refault_file_pages, own.refault_anon_pages) == (44, None)
    assert own.swap_bytes == 512
    assert (job.cgroup, job.max_bytes, job.max_events) == ("/slurm/job_4", 65536, 31)
    assert job.oom_kills is job.high_events is None


def test_outside_our_namespace_is_said(tmp_path: Path) -> None:
    write(tmp_path, {"proc/7/cgroup": "0::/../../job\n", f"{BASE}/cgroup.procs": ""})
    host = host_of(tmp_path, watched=lambda: watching(7))
    rows, ((problem),) = gather(CGROUP_MEMORY.make(), host)
    assert rows == []
    assert "namespace" in problem.message


def test_nobody_to_watch_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="no process is watched"):
        gather(CGROUP_MEMORY.make(), host_of(tmp_path))


def test_damaged_files_are_problems(tmp_path: Path) -> None:
    v2(tmp_path)
    path = tmp_path / f"{BASE}/kubepods/pod1/ctr/memory.stat"
    host = host_of(tmp_path, watched=lambda: watching(7))
    collect = CGROUP_MEMORY.make()
    bad = 0
    for text in damaged(STAT.encode()):
        path.write_bytes(text)
        rows, problems = gather(collect, host)
        assert {row.cgroup for row in rows} >= {"/kubepods/pod1"}
        bad += len(problems)
    assert bad > 0


def _live_cgroup() -> Path | None:
    """A memory cgroup that may be made here: version 1's or 2's."""
    for base in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        if (base / "memory.usage_in_bytes").exists() or (base / "memory.stat").exists():
            made = base / f"whyidle-test-{os.getpid()}"
            try:
                made.mkdir()
            except OSError:
                return None
            return made
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="cgroups are made by root")
def test_a_real_limit_shows(tmp_path: Path) -> None:
    """A process that reads a file larger than its limit allows, twice: the kernel counts."""
    group = _live_cgroup()
    if group is None:
        pytest.skip("no memory cgroup can be made here")
    one = (group / "memory.limit_in_bytes").exists()
    limit = group / ("memory.limit_in_bytes" if one else "memory.max")
    child = None
    try:
        try:
            limit.write_text(str(64 << 20))
        except OSError:
            pytest.skip("the memory controller is not enabled for cgroups below the root")
        data = tmp_path / "data"
        data.write_bytes(os.urandom(1 << 20) * 160)
        os.sync()
        code = (
            "import sys\nsys.stdin.readline()\n"
            f"for _ in range(2):\n    with open({str(data)!r}, 'rb') as f:\n"
            "        while f.read(1 << 20): pass\n"
            "print('done', flush=True)\nsys.stdin.readline()\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        (group / "cgroup.procs").write_text(str(child.pid))
        os.posix_fadvise(os.open(data, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
        pid = child.pid
        host = host_of(Path("/"), watched=lambda: watching(pid))
        collect = CGROUP_MEMORY.make()
        before = gather(collect, host)[0][0]
        assert before.max_bytes == 64 << 20
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        after = gather(collect, host)[0][0]
        assert after.current_bytes <= 64 << 20
        assert after.max_events > before.max_events
        assert after.refault_file_pages > before.refault_file_pages
        host.close()
    finally:
        if child is not None:
            child.communicate("\n", timeout=10)
        for _ in range(50):  # the kernel lets go of a cgroup a moment after its last process
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


@pytest.mark.shared
def test_a_recorded_slurm_node() -> None:
    root = shared("treydock-cgroup_exporter")
    found = sorted(root.glob("memory/slurm/uid_*/job_*"))
    assert found
    for folder in found:
        stat = parse_table((folder / "memory.stat").read_text(), "memory.stat")
        assert stat["hierarchical_memory_limit"] > 0
        assert stat["total_rss"] <= int((folder / "memory.usage_in_bytes").read_text())
