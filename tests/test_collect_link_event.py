"""Links that go up and down: what a report says, which are told, and a real namespace."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fabric_wire import RUNNING, UP, link_report
from trees import BEGIN_NS, damaged, gather, write
from whyidle.clock import VirtualClock
from whyidle.collect.link_watch import LinkWatch, Parser, Report
from whyidle.collect.net_link import NET_LINK
from whyidle.host import Event, LiveHost
from whyidle.link_events import LinkEvents
from whyidle.schema import LinkEvent

ETH = " {name}: 1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7\n"


class Source:
    """A source of events that a test fills."""

    def __init__(self) -> None:
        self.reports: list[str] = []
        self.error = 0

    def read(self) -> list[str]:
        """What came since."""
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        found, self.reports = self.reports, []
        return found

    def close(self) -> None:
        """Hold nothing."""


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def run(tmp_path: Path, source: Source) -> Callable[[], list[tuple[str, str]]]:
    """A node with two NICs that are up and a veth of a container; runs the collector once."""
    interfaces(tmp_path, "eth0", "eth1", "veth7")
    for name in ("eth0", "eth1"):
        write(tmp_path, {f"sys/class/net/{name}/device/vendor": "0x15b3\n"})
    collect = NET_LINK.make()
    host = LiveHost(str(tmp_path), VirtualClock(BEGIN_NS), sources={"links": source})

    def once() -> list[tuple[str, str]]:
        found, problems = gather(collect, host)
        assert problems == []
        return [(row.interface, row.event) for row in found if isinstance(row, LinkEvent)]

    return once


def interfaces(root: Path, *names: str) -> None:
    """Write /proc/net/dev and the states, all up."""
    write(root, {"proc/net/dev": "Inter-|\n face |\n" + "".join(ETH.format(name=n) for n in names)})
    for name in names:
        write(root, {f"sys/class/net/{name}/operstate": "up\n"})


def test_a_report() -> None:
    (found,) = Parser().parse(link_report("eth0", 4, up=False))
    assert found == Report(
        number=4,
        interface="eth0",
        removed=False,
        operational="down",
        carrier=False,
        flags=UP,
    )
    assert not found.up
    assert Parser().parse(link_report("eth0", 4))[0].up
    assert Parser().parse(link_report("eth0", 4, removed=True))[0].removed


def test_a_link_without_a_state_of_its_own_has_flags() -> None:
    lo = Report(1, "lo", removed=False, operational="unknown", carrier=True, flags=UP | RUNNING)
    assert lo.up
    assert not lo._replace(flags=UP).up
    assert lo._replace(operational=None).up


def test_only_changes_are_told(run: Callable[[], list[tuple[str, str]]], source: Source) -> None:
    assert run() == []
    # A new MTU is reported by the kernel too.
    source.reports = [link_report("eth0", 4, mtu=9000)]
    assert run() == []
    source.reports = [
        link_report("eth0", 4, up=False),
        link_report("eth0", 4, up=False, mtu=9000),
        link_report("eth0", 4),
        link_report("eth1", 5, up=False),
    ]
    assert run() == [("eth0", "down"), ("eth0", "up"), ("eth1", "down")]
    assert run() == []


def test_links_of_containers_are_not_told(
    run: Callable[[], list[tuple[str, str]]], source: Source
) -> None:
    run()
    source.reports = [link_report("veth7", 9, up=False), link_report("veth8", 10)]
    assert run() == []


def test_a_link_that_comes_and_goes(
    tmp_path: Path, run: Callable[[], list[tuple[str, str]]], source: Source
) -> None:
    run()
    interfaces(tmp_path, "eth0", "eth1", "veth7", "eth2")
    write(tmp_path, {"sys/class/net/eth2/device/vendor": "0x15b3\n"})
    source.reports = [link_report("eth2", 11, up=False), link_report("eth2", 11)]
    assert run() == [("eth2", "new"), ("eth2", "up")]
    shutil.rmtree(tmp_path / "sys/class/net/eth2")
    interfaces(tmp_path, "eth0", "eth1", "veth7")
    source.reports = [link_report("eth2", 11, removed=True)]
    assert run() == [("eth2", "removed")]


def test_lost_reports_are_a_problem_and_the_counters_go_on(tmp_path: Path, source: Source) -> None:
    interfaces(tmp_path, "eth0")
    host = LiveHost(str(tmp_path), VirtualClock(BEGIN_NS), sources={"links": source})
    collect = NET_LINK.make()
    gather(collect, host)
    source.error = errno.ENOBUFS
    found, problems = gather(collect, host)
    assert [type(row).TABLE for row in found] == ["net_link"]
    assert [problem.subject for problem in problems] == ["link events"]
    # From then on changes are told as before.
    source.error = 0
    source.reports = [link_report("eth0", 4, mtu=9000), link_report("eth0", 4, up=False)]
    found, problems = gather(collect, host)
    assert (problems, [type(row).TABLE for row in found]) == ([], ["net_link", "link_event"])


def test_a_recorded_tree_has_no_reports(tmp_path: Path) -> None:
    interfaces(tmp_path, "eth0")
    found, problems = gather(NET_LINK.make(), LiveHost(str(tmp_path), VirtualClock(BEGIN_NS)))
    assert (len(found), problems) == (1, [])


def test_damaged_reports_are_problems(tmp_path: Path, source: Source) -> None:
    interfaces(tmp_path, "eth0")
    host = LiveHost(str(tmp_path), VirtualClock(BEGIN_NS), sources={"links": source})
    collect = NET_LINK.make()
    gather(collect, host)
    whole = bytes.fromhex(link_report("eth0", 4, up=False))
    source.reports = [data.hex() for data in damaged(whole)] + ["no hex", ""]
    found, problems = gather(collect, host)
    assert problems
    assert all(problem.subject == "link events" for problem in problems)
    assert any(row.interface == "eth0" for row in found)


def test_events_carry_when_they_were_read() -> None:
    watch = LinkWatch()
    list(watch.listen(LiveHost("/nowhere", VirtualClock(0))))
    event = Event(mono_ns=7, text=link_report("eth0", 4, up=False))
    (row,) = list(watch.rows([event], {"eth0": True}))
    assert isinstance(row, LinkEvent)
    assert (row.mono_ns, row.index, row.carrier, row.operational) == (7, 4, False, "down")


def test_a_source_that_was_closed_listens_anew() -> None:
    source = LinkEvents()
    assert source.read() == []
    source.close()
    source.close()
    assert source.read() == []
    source.close()


def test_more_reports_than_a_run_takes_come_with_the_next() -> None:
    source = LinkEvents()
    source.read()
    # A socket of datagrams stands in for the kernel: messages of others are not let in.
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    right.setblocking(False)
    inner, source._socket = source._socket, right
    for number in range(101):
        left.send(bytes([number]))
    assert len(source.read()) == 100
    assert source.read() == ["64"]
    source._socket = inner
    source.close()
    left.close()
    right.close()


AGENT = """
import json, sys
from whyidle.clock import SystemClock
from whyidle.collect.net_link import NET_LINK
from whyidle.live import live_host
from whyidle.schema import LinkEvent

host = live_host("/", SystemClock())
collect = NET_LINK.make()
for line in sys.stdin:
    rows = [item for item in collect(host) if isinstance(item, LinkEvent)]
    print(json.dumps([[row.interface, row.event, row.operational] for row in rows]), flush=True)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nsenter") is None, reason="needs root and nsenter"
)
def test_live_in_a_namespace() -> None:
    """A pair of virtual links is made, goes up and down, and is removed."""
    shell = f'mount -t sysfs sysfs /sys && ip link set lo up && exec {sys.executable} -c "$0"'
    process = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", shell, AGENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None

    def look() -> list[Any]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        found: list[Any] = json.loads(process.stdout.readline())
        return found

    def expect(*wanted: tuple[str, str]) -> None:
        """Look until these are told, and no others: the kernel tells a lost carrier a bit late."""
        seen: set[tuple[str, str]] = set()
        until = time.monotonic() + 10
        while seen != set(wanted) and time.monotonic() < until:
            seen |= {(interface, event) for interface, event, _ in look()}
            time.sleep(0.02)
        assert seen == set(wanted)

    def ip(*words: str) -> None:
        inside = ["nsenter", f"--net=/proc/{process.pid}/ns/net", "ip", "link"]
        subprocess.run([*inside, *words], check=True, timeout=10)

    try:
        assert look() == []
        ip("add", "wi0", "type", "veth", "peer", "name", "wi1")
        expect(("wi0", "new"), ("wi1", "new"))
        ip("set", "wi0", "up")
        ip("set", "wi1", "up")
        expect(("wi0", "up"), ("wi1", "up"))
        ip("set", "wi1", "mtu", "1400")
        assert look() == []
        ip("set", "wi1", "down")
        expect(("wi0", "down"), ("wi1", "down"))
        ip("del", "wi0")
        expect(("wi0", "removed"), ("wi1", "removed"))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
