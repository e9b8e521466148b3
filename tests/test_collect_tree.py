"""The collectors of the host on a machine that was recorded whole (fixtures/tree)."""

from __future__ import annotations

from typing import Any

import pytest

from trees import FIXTURES, gather, host_of
from whyidle.collect import ALL
from whyidle.collect.collector import Problem

# What reads nothing but /proc and /sys.
OF_THE_HOST = ("cpu", "pressure", "vmstat", "block_device", "net_link", "process", "cgroup_cpu")
TRAINER, WORKERS = 5099, (5100, 5101)


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Any]]:
    """Rows by table of one run of each."""
    host = host_of(FIXTURES / "vm-6.18-v1", watched=lambda: {"gpu": (TRAINER,), "commands": ()})
    found: dict[str, list[Any]] = {}
    problems: list[Problem] = []
    for collector in ALL:
        if collector.name in OF_THE_HOST:
            made, failed = gather(collector.make(), host)
            problems += failed
            for row in made:
                found.setdefault(row.TABLE, []).append(row)
    host.close()
    assert problems == []
    return found


def test_cpu(rows: dict[str, list[Any]]) -> None:
    (cpu,) = rows["cpu"]
    assert cpu.cpus == 2
    assert cpu.user_ns == (384_146 + 1_077) * 10_000_000
    assert cpu.steal_ns == 293 * 10_000_000


def test_pressure(rows: dict[str, list[Any]]) -> None:
    assert [row.resource for row in rows["pressure"]] == ["cpu", "io", "memory"]
    assert rows["pressure"][1].some_ns > 0


def test_vmstat(rows: dict[str, list[Any]]) -> None:
    (vmstat,) = rows["vmstat"]
    assert (vmstat.major_faults, vmstat.refault_file_pages) == (3_340, 592_328)
    assert (vmstat.dirty_pages, vmstat.page_bytes) == (21_455, 4096)


def test_disks(rows: dict[str, list[Any]]) -> None:
    (disk,) = rows["block_device"]
    assert (disk.device, disk.reads, disk.read_bytes) == ("vda", 163_216, 6_366_338 * 512)
    assert (disk.queue_ms, disk.flushes, disk.flush_ms) == (189_724, 8_656, 600)


def test_links(rows: dict[str, list[Any]]) -> None:
    links = {row.interface: row for row in rows["net_link"]}
    assert set(links) == {"lo", "eth0"}
    assert links["eth0"].rx_bytes == 277_180_422
    assert (links["eth0"].up, links["eth0"].speed_bits_per_s) == (True, None)


def test_processes(rows: dict[str, list[Any]]) -> None:
    processes = {row.pid: row for row in rows["process"]}
    assert {pid: row.kind for pid, row in processes.items()} == {
        TRAINER: "trainer",
        **dict.fromkeys(WORKERS, "data_worker"),
    }
    trainer, worker = processes[TRAINER], processes[WORKERS[0]]
    assert (trainer.main_run_ns, trainer.main_run_delay_ns) == (17_861_545, 98_588_297)
    assert (trainer.threads, trainer.rss_bytes) == (5, 9_704 << 10)
    assert trainer.blkio_delay_ns is None
    assert worker.main_run_delay_ns == 1_537_759_042
    assert (worker.rchar_bytes, worker.read_bytes) == (150_994_944, 0)
    assert worker.wait_channel == "hrtimer_nanosleep"


def test_what_they_are(rows: dict[str, list[Any]]) -> None:
    infos = {row.pid: row for row in rows["process_info"]}
    trainer = infos[TRAINER]
    assert trainer.command == "/usr/bin/python3 train.py --lr 0.1"
    assert (trainer.rank, trainer.local_rank, trainer.world_size) == (3, 3, 8)
    assert (trainer.job, trainer.user_id) == ("42", 1000)
    assert trainer.cgroup == "/slurm/uid_1000/job_42/step_0/task_0"
    assert (trainer.cpus_allowed, trainer.cpus_allowed_count) == ("0-1", 2)
    assert trainer.thread_kinds == "autograd,data_pin,nccl"
    assert infos[WORKERS[0]].parent_pid == TRAINER


def test_the_quota_of_the_job_throttles_its_tasks(rows: dict[str, list[Any]]) -> None:
    groups = {row.cgroup: row for row in rows["cgroup_cpu"]}
    job = groups["/slurm/uid_1000/job_42"]
    assert (job.version, job.quota_ns, job.period_ns) == (1, 10_000_000, 100_000_000)
    assert (job.periods, job.throttled_periods, job.throttled_ns) == (42, 41, 2_600_292_467)
    own = groups["/slurm/uid_1000/job_42/step_0/task_0"]
    assert own.quota_ns is None
    assert set(groups) == {job.cgroup, own.cgroup}
