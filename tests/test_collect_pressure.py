"""Pressure stall information: files of the node and of cgroups, kernels with and without it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from trees import damaged, gather, host_of, series, shared, write
from whyidle.clock import VirtualClock
from whyidle.collect.collector import NoData
from whyidle.collect.pressure import PRESSURE, parse, read_cgroup
from whyidle.host import LiveHost

IO = "some avg10=0.20 avg60=1.32 avg300=1.26 total=29251531\nfull avg10=0.01 avg60=1.11 total=213\n"


def test_totals_in_ns() -> None:
    row = parse(IO, "io", 5)
    assert (row.some_ns, row.full_ns) == (29_251_531_000, 213_000)
    assert (row.resource, row.cgroup, row.mono_ns) == ("io", "", 5)


def test_full_of_the_whole_nodes_cpu_is_no_measurement() -> None:
    assert parse(IO, "cpu", 0).full_ns is None
    assert parse(IO, "cpu", 0, cgroup="/job", system=False).full_ns == 213_000


def test_irq_has_no_some() -> None:
    row = parse("full avg10=0.00 avg60=0.00 avg300=0.00 total=1\n", "irq", 0)
    assert row.some_ns is None
    assert row.full_ns == 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "neither"), ("some avg10=0\n", "no total"), ("some total=many\n", "some total")],
)
def test_what_cannot_be_read_names_the_file(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"pressure/io.*{message}"):
        parse(text, "io", 0)


def test_damage_is_an_error_or_a_row() -> None:
    for text in damaged(IO.encode()):
        try:
            row = parse(text.decode("utf-8", "replace"), "io", 0)
        except ValueError:
            continue
        assert row.some_ns is not None or row.full_ns is not None


def test_a_kernel_without_it_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="psi=1"):
        gather(PRESSURE.make(), host_of(tmp_path))


class Refusing(LiveHost):
    """A host whose pressure files exist and cannot be read."""

    def __init__(self, number: int) -> None:
        super().__init__("/nonexistent", VirtualClock())
        self.number = number

    def read(self, path: str) -> str:
        raise OSError(self.number, "refused", path)


def test_switched_off_at_boot_is_no_data_and_an_error_is_a_problem() -> None:
    with pytest.raises(NoData, match="psi=1"):
        gather(PRESSURE.make(), Refusing(errno.EOPNOTSUPP))
    rows, problems = gather(PRESSURE.make(), Refusing(errno.EIO))
    assert rows == []
    assert [problem.subject for problem in problems] == ["cpu", "io", "memory", "irq"]


def test_cgroup_files(tmp_path: Path) -> None:
    write(tmp_path, {"job/io.pressure": IO, "job/cpu.pressure": IO})
    rows = list(read_cgroup(host_of(tmp_path), "job", "/job"))
    assert [(row.resource, row.cgroup) for row in rows] == [("cpu", "/job"), ("io", "/job")]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("root", "resources"),
    [
        ("this-vm-6.18/root", ["cpu", "io", "memory"]),
        ("prometheus-procfs", ["cpu", "io", "memory"]),
        ("prometheus-node_exporter", ["cpu", "io", "memory", "irq"]),
        ("pcp/linux/pressure-root-001", ["cpu", "io", "memory"]),
        ("pcp/linux/pressure-root-002", ["cpu", "io", "memory", "irq"]),
        ("sysstat/root1", ["cpu", "io", "memory"]),
        ("sysstat/root3", ["cpu", "io", "memory"]),
    ],
)
def test_on_recorded_machines(root: str, resources: list[str]) -> None:
    rows, problems = gather(PRESSURE.make(), host_of(shared(root)))
    assert [row.resource for row in rows] == resources
    assert problems == []
    assert all(row.some_ns is not None or row.full_ns is not None for row in rows)


@pytest.mark.shared
def test_readers_press_on_io_and_hogs_on_the_cpu() -> None:
    """In the recorded series four direct readers gave io.some 0.77, CPU hogs cpu.some 0.86."""
    first: dict[tuple[str, str], tuple[float, int]] = {}
    last: dict[tuple[str, str], tuple[float, int]] = {}
    for moment in series():
        for resource in ("cpu", "io"):
            row = parse(moment["files"][f"/proc/pressure/{resource}"], resource, 0)
            assert row.some_ns is not None
            key = (moment["phase"], resource)
            first.setdefault(key, (moment["t"], row.some_ns))
            last[key] = (moment["t"], row.some_ns)
    share = {
        key: (last[key][1] - some) / 1e9 / (last[key][0] - t) for key, (t, some) in first.items()
    }
    phases = {phase for phase, _ in share}
    readers = next(phase for phase in phases if "read" in phase)
    hogs = next(phase for phase in phases if "hog" in phase or "cpu" in phase)
    assert share[readers, "io"] == pytest.approx(0.77, abs=0.05)
    assert share[hogs, "cpu"] == pytest.approx(0.86, abs=0.05)
