"""The kernel log: each record once, gaps told, refusal told in words, live and from a tree."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trees import BEGIN_NS, host_of, write
from whyidle import kmsg as kmsg_module
from whyidle.clock import SystemClock, VirtualClock
from whyidle.collect.collector import NoData, Problem
from whyidle.collect.kernel_log import KernelLog, KernelRecord, parse_record
from whyidle.host import Event, LiveHost
from whyidle.kmsg import Kmsg

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def records(log: KernelLog, host: LiveHost) -> list[KernelRecord]:
    found = []
    for item in log.new(host):
        assert isinstance(item, KernelRecord), item
        found.append(item)
    return found


def test_a_record_is_parsed() -> None:
    got = parse_record(f"4,1234,98765432,-;{XID}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0", 7)
    assert got == KernelRecord(
        sequence=1234,
        time_us=98765432,
        read_ns=7,
        level=4,
        facility=0,
        text=XID,
        device="+pci:0000:3b:00.0",
    )


def test_more_fields_than_are_known_and_a_semicolon_in_the_text_are_no_trouble() -> None:
    got = parse_record("30,5,6,c,caller=T1,more;a;b,c", 0)
    assert (got.facility, got.level, got.text, got.device) == (3, 6, "a;b,c", None)


def test_what_the_kernel_escaped_reads_as_it_was_said() -> None:
    assert parse_record("6,1,2,-;caf\\xc3\\xa9 \\x5cdev \\x0a", 0).text == "café \\dev \n"
    assert parse_record("6,1,2,-;bad \\xff", 0).text == "bad �"


@pytest.mark.parametrize("text", ["", "hello", "6,1,2", "6,x,2,-;a", "6,1;a", "-6,1,2,-;a"])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no record of the kernel log"):
        parse_record(text, 0)


def test_each_record_of_a_tree_comes_once(tmp_path: Path) -> None:
    write(
        tmp_path, {"dev/kmsg": f"6,7,100,-;first\n SUBSYSTEM=pci\n DEVICE=b8:0\n4,8,200,-;{XID}\n"}
    )
    host, log = host_of(tmp_path), KernelLog()
    got = records(log, host)
    assert [(each.sequence, each.text, each.device) for each in got] == [
        (7, "first", "b8:0"),
        (8, XID, None),
    ]
    assert {each.read_ns for each in got} == {BEGIN_NS}
    assert records(log, host) == []
    with (tmp_path / "dev/kmsg").open("a") as file:
        file.write("6,9,300,-;third\n")
    assert [each.sequence for each in records(log, host)] == [9]
    host.close()
    assert records(log, host) == []  # opened anew, from the beginning
    host.close()


class Told(LiveHost):
    """A host whose kernel log says what a test wants."""

    def __init__(self, *said: list[str] | OSError) -> None:
        super().__init__("/nowhere", VirtualClock())
        self.said = list(said)

    def events(self, source: str) -> tuple[Event, ...]:
        said = self.said.pop(0)
        if isinstance(said, OSError):
            raise said
        return tuple(Event(mono_ns=1, text=text) for text in said)


def test_overwritten_records_and_garbage_are_told_and_the_rest_goes_on() -> None:
    host = Told(["6,1,1,-;a"], ["6,5,1,-;b", "rubbish", "6,6,1,-;c"])
    log = KernelLog()
    assert len(list(log.new(host))) == 1
    lost, second, garbage, third = log.new(host)
    assert isinstance(lost, Problem)
    assert lost.message == "3 records were overwritten"
    assert isinstance(garbage, Problem)
    assert "rubbish" in garbage.message
    assert isinstance(second, KernelRecord)
    assert isinstance(third, KernelRecord)
    assert (second.text, third.text) == ("b", "c")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (errno.EPERM, "give the agent CAP_SYSLOG"),
        (errno.EACCES, "give the agent CAP_SYSLOG"),
        (errno.ENOENT, "there is no kernel log here"),
    ],
)
def test_a_log_that_may_not_be_read_is_no_failure(code: int, why: str) -> None:
    with pytest.raises(NoData, match=why):
        list(KernelLog().new(Told(OSError(code, os.strerror(code)))))


def test_a_log_that_cannot_be_read_is_one() -> None:
    with pytest.raises(OSError, match="Input/output"):
        list(KernelLog().new(Told(OSError(errno.EIO, os.strerror(errno.EIO)))))


def test_a_missing_log_is_named_without_the_root(tmp_path: Path) -> None:
    host = host_of(tmp_path)
    with pytest.raises(FileNotFoundError) as told:
        host.events("kmsg")
    assert told.value.filename == "dev/kmsg"
    with pytest.raises(FileNotFoundError):
        host.events("nothing")
    host.close()


def test_the_log_of_this_machine_is_read_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        pytest.skip(f"the kernel log of this machine cannot be read: {error.strerror}")
    monkeypatch.setattr(kmsg_module, "RECORDS_LIMIT", 20)
    clock = SystemClock()
    host, log = LiveHost("/", clock), KernelLog()
    found: list[int] = []
    while True:
        got = [item for item in log.new(host) if isinstance(item, KernelRecord)]
        assert len(got) <= 20
        if not got:
            break
        assert all(each.time_us < clock.boot_ns() / 1000 + 60e6 for each in got)
        found += [each.sequence for each in got]
    host.close()
    assert found == sorted(set(found))
    assert found


def test_a_reader_that_is_closed_opens_anew(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("6,1,1,-;a\n")
    reader = Kmsg(str(path))
    assert reader.read() == ["6,1,1,-;a"]
    reader.close()
    reader.close()
    assert reader.read() == ["6,1,1,-;a"]
    reader.close()
