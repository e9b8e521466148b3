"""Xids in the kernel log: every form that drivers have printed, and whose GPU it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from trees import BEGIN_NS, gather, host_of, shared, write
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import NoData, Problem
from whyidle.collect.xid import XID, Xid, parse, parse_address
from whyidle.host import Event, LiveHost
from whyidle.schema import GpuEvent

UUID = "GPU-509665ad-b600-ac93-3616-d754b23d636d"
LOST = "GPU has fallen off the bus."


def xid(number: int | None, **known: object) -> Xid:
    """A report of the GPU at 0000:19:00.0 with these parts, the others unknown."""
    parts: dict[str, object] = {
        "kind": "xid",
        "pci_bus_id": "0000:19:00.0",
        "pid": None,
        "process": None,
        "gpu_instance": None,
        "text": None,
    }
    return Xid(number=number, **{**parts, **known})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            f"NVRM: Xid (PCI:0000:19:00): 79, pid=1234, name=python3, {LOST}",
            xid(79, pid=1234, process="python3", text=LOST),
        ),
        (
            f"NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, {LOST}",
            xid(79, text=LOST),
        ),
        (
            "NVRM: Xid (PCI:0000:19:00 GPU-I:05): 94, pid=7194, name=a b, c, Contained: CE User",
            xid(94, pid=7194, process="a b", gpu_instance=5, text="c, Contained: CE User"),
        ),
        (
            "NVRM: Xid (PCI:0000:19:00): 31, Ch 00000010, engmask 00000101, intr 10000000",
            xid(31, text="Ch 00000010, engmask 00000101, intr 10000000"),
        ),
        ("NVRM: Xid (0000:19:00): 8, Channel 0000001e", xid(8, text="Channel 0000001e")),
        ("NVRM: Xid (0019:00): 6, PE0001", xid(6, text="PE0001")),
        ("NVRM: Xid (PCI:0000:19:00): 45", xid(45)),
        (
            "NVRM: Xid (PCI:0000:19:00): 45, pid=77, Ch 00000008",
            xid(45, pid=77, text="Ch 00000008"),
        ),
        ("NVRM: GPU 0000:19:00.0: GPU has fallen off the bus.", xid(None, kind="lost")),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:19:00.0): 12028, Non-fatal, Link 32 egress",
            xid(12028, kind="sxid", text="Non-fatal, Link 32 egress"),
        ),
        (
            "NVRM: Xid (PCI:0000:19:00): 31, pid=9, name=t, MMU Fault @ 0x7fe3_0000 "
            "faulted at 0x00007f4c2a000000 and VA ffff8881024a3c00 code 0x20803032",
            xid(
                31,
                pid=9,
                process="t",
                text="MMU Fault @ 0x7fe3_0000 faulted at ... and VA ... code ...",
            ),
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_forms(line: str, found: Xid) -> None:
    assert parse(line) == found


@pytest.mark.parametrize(
    "line",
    [
        "",
        "NVRM: loading NVIDIA UNIX Open Kernel Module",
        "NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d",
        "audit: Xid (PCI:0000:19:00): 79",
        "NVRM: Xid (PCI:0000:19:00): many",
        "some Xid 79 in passing",
    ],
)
def test_what_is_no_report(line: str) -> None:
    assert parse(line) is None


def test_addresses() -> None:
    assert parse_address("0000:9B:00") == "0000:9b:00.0"
    assert parse_address("00000001:9b:1f.3") == "0001:9b:1f.3"
    assert parse_address("0009:00") == "0000:09:00.0"
    assert parse_address("::") is None


def test_text_is_cut() -> None:
    found = parse(f"NVRM: Xid (PCI:0000:19:00): 13, {'Graphics Exception ' * 40}")
    assert found is not None and found.text is not None
    assert len(found.text) == 200


class _Log(LiveHost):
    """A host whose kernel log is a list."""

    __slots__ = ("records",)

    def __init__(self, root: Path, clock: VirtualClock) -> None:
        super().__init__(str(root), clock)
        self.records: list[str] = []

    def events(self, source: str) -> tuple[Event, ...]:
        assert source == "kmsg"
        return tuple(Event(mono_ns=self.clock.mono_ns(), text=text) for text in self.records)


def record(sequence: int, time_ns: int, text: str) -> str:
    return f"3,{sequence},{time_ns // 1000},-;{text}"


def test_rows_have_the_gpu_and_the_time(tmp_path: Path) -> None:
    information = "proc/driver/nvidia/gpus/0000:9b:00.0/information"
    write(tmp_path, {information: f"Model: \t\t NVIDIA H100\nGPU UUID: \t {UUID}\n"})
    clock = VirtualClock(BEGIN_NS)
    host = _Log(tmp_path, clock)
    collect = XID.make()
    host.records = [
        record(1, BEGIN_NS - 900 * NS_PER_S, "NVRM: Xid (PCI:0000:9b:00): 13, long ago"),
        record(2, BEGIN_NS - NS_PER_S, "NVRM: Xid (PCI:0000:9b:00): 31, pid=5, name=t, just now"),
    ]
    rows, problems = gather(collect, host)
    assert problems == []
    assert [(row.xid, row.uuid, row.mono_ns) for row in rows] == [(31, UUID, BEGIN_NS - NS_PER_S)]
    clock.advance(NS_PER_S)
    host.records = [
        # The clock of the log is ahead by a minute, and behind by one.
        record(3, BEGIN_NS + 60 * NS_PER_S, "NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off"),
        record(5, BEGIN_NS - 60 * NS_PER_S, "NVRM: Xid (PCI:0000:3b:00): 48, DBE"),
    ]
    rows, problems = gather(collect, host)
    now = clock.mono_ns()
    assert [(row.xid, row.uuid, row.mono_ns) for row in rows] == [
        (79, UUID, now),
        (48, None, now - NS_PER_S),
    ]
    assert rows[1].pci_bus_id == "0000:3b:00.0"
    assert problems == [Problem(subject="kmsg", message="1 records were overwritten")]


def test_a_backlog_of_several_runs_stays_old(tmp_path: Path) -> None:
    clock = VirtualClock(BEGIN_NS)
    host = _Log(tmp_path, clock)
    collect = XID.make()
    old = BEGIN_NS - 500 * NS_PER_S
    host.records = [record(n, old, "usb 1-1: new device") for n in range(1000)]
    assert gather(collect, host) == ([], [])
    clock.advance(NS_PER_S)
    host.records = [record(1000, old, "NVRM: Xid (PCI:0000:9b:00): 13, long ago")]
    assert gather(collect, host) == ([], [])
    clock.advance(NS_PER_S)
    host.records = [record(1001, old, "NVRM: Xid (PCI:0000:9b:00): 13, by a slow clock")]
    assert [row.xid for row in gather(collect, host)[0]] == [13]


def test_the_log_itself_names_gpus(tmp_path: Path) -> None:
    host = _Log(tmp_path, VirtualClock(BEGIN_NS))
    host.records = [
        record(1, BEGIN_NS - 5, f"NVRM: GPU at PCI:0000:9b:00: {UUID}"),
        record(2, BEGIN_NS - 4, "NVRM: Xid (PCI:0000:9b:00): 119, pid=2, name=gpud, Timeout"),
    ]
    ((row,), _) = gather(XID.make(), host)
    assert isinstance(row, GpuEvent)
    assert (row.uuid, row.xid, row.pid, row.process, row.source) == (UUID, 119, 2, "gpud", "kmsg")


def test_a_log_that_may_not_be_read_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(NoData, match="kernel log"):
        gather(XID.make(), host_of(tmp_path))


@pytest.mark.shared
def test_a_real_log() -> None:
    text = shared("gpud-h100/dmesg-with-xid-119.log").read_text()
    found = [xid for line in text.splitlines() if (xid := parse(line)) is not None]
    assert len(found) == text.count("Xid (PCI") > 3
    assert {(xid.number, xid.pci_bus_id) for xid in found} == {(119, "0000:9b:00.0")}
    assert found[0].pid == 2024380 and found[0].process == "nvidia-smi"
    assert found[0].text is not None and found[0].text.startswith("Timeout after 6s of waiting")
