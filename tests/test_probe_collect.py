"""The collector of counter pages: whose they are, what is forged, left over, or not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from probe_kit import environment, script
from probe_pages import BEGAN_NS, make_page, page_of, put, put_record, seal, with_group
from trees import BEGIN_NS, gather, host_of, write
from whyidle.clock import NS_PER_S, SystemClock, VirtualClock
from whyidle.collect.collector import Collect, NoData, Problem
from whyidle.collect.probe import PROBE
from whyidle.host import Answer, LiveHost
from whyidle.live import Watched, live_host
from whyidle.schema import Probe, ProbeCall, ProbeEvent, ProbeGroup, ProbeInfo, ProbeLoader
from whyidle_probe import layout as at

FOLDER = "run/whyidle/probe"
PID, START_TICKS = 700, 5_000
START_NS = START_TICKS * NS_PER_S // 100


def process(
    pid: int,
    *,
    ticks: int = START_TICKS,
    uid: int | None = None,
    inner: str = "",
    state: str = "S",
    environ: str = "",
) -> dict[str, str | bytes]:
    """/proc/PID of a process; `inner` are its pids in inner namespaces."""
    fields = ["0"] * 50
    fields[18] = str(ticks)
    owner = os.geteuid() if uid is None else uid
    return {
        f"proc/{pid}/stat": f"{pid} (python3) {state} {' '.join(fields)}\n",
        f"proc/{pid}/status": f"Name:\tp\nUid:\t{owner}\t{owner}\t0\t0\nNSpid:\t{pid}{inner}\n",
        f"proc/{pid}/environ": environ.replace(" ", "\0"),
    }


class Node:
    """A tree with processes and pages, and a collector on it."""

    def __init__(self, root: Path, *, gpu: tuple[int, ...] = ()) -> None:
        self.root = root
        self.clock = VirtualClock(BEGIN_NS)
        self.host = host_of(root, watched=lambda: {"gpu": gpu, "commands": ()}, clock=self.clock)
        self.collect: Collect = PROBE.make()
        (root / FOLDER).mkdir(parents=True)
        write(root, process(PID))

    def page(self, name: str, data: bytes) -> Path:
        """Put a page there, whole at once."""
        path = self.root / FOLDER / f"{name}.page"
        path.write_bytes(data)
        return path

    def run(self, after_s: float = 1.0) -> tuple[list[object], list[Problem]]:
        """Let time pass, and collect."""
        self.clock.advance(int(after_s * NS_PER_S))
        return gather(self.collect, self.host)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def kinds(rows: list[object]) -> list[str]:
    return [type(row).__name__ for row in rows]


def test_a_page_gives_totals_loaders_events_and_who_it_is(node: Node) -> None:
    node.page("a", make_page(pid=PID, start_ns=START_NS))
    rows, problems = node.run()
    assert problems == []
    assert kinds(rows) == ["Probe", "ProbeLoader", "ProbeEvent", "ProbeInfo"]
    now = node.clock.mono_ns()
    probe, loader, event, info = rows
    assert isinstance(probe, Probe)
    assert (probe.mono_ns, probe.pid, probe.start_ns) == (now, PID, START_NS)
    assert (probe.steps, probe.batches, probe.data_wait_ns, probe.phase) == (1, 1, 5, None)
    assert isinstance(loader, ProbeLoader)
    assert (loader.queue_depth, loader.queue_capacity, loader.tasks_outstanding) == (3, 4, 1)
    assert (loader.place, loader.loader, loader.workers, loader.iterable) == (0, 1, 2, False)
    assert isinstance(event, ProbeEvent)
    assert (event.kind, event.sequence, event.begin_ns) == ("step", 1, BEGAN_NS)
    assert (event.step, event.data_wait_ns, event.batches) == (1, 5, 1)
    assert isinstance(info, ProbeInfo)
    assert (info.page, info.rank, info.local_rank) == (f"/{FOLDER}/a.page", 3, None)
    # What stays as it is is told once a second, events once, who it is once a minute.
    assert [kinds(node.run(0.25)[0]) for _ in range(4)] == [[]] * 3 + [["Probe", "ProbeLoader"]]
    assert kinds(node.run(60)[0]) == ["Probe", "ProbeLoader", "ProbeInfo"]


def test_what_changes_between_two_reads_is_told(node: Node) -> None:
    page = page_of(pid=PID, start_ns=START_NS)
    path = node.page("a", bytes(page))
    node.run()
    put(page, at.PHASE, BEGAN_NS >> 4 << 4 | 1)
    put_record(page, 1, at.EVENT_STEP, BEGAN_NS, BEGAN_NS + 1, 1, 0, 0)
    put_record(page, 2, at.EVENT_GC, BEGAN_NS, BEGAN_NS + 1, 2, 50, 0)
    with path.open("r+b") as file:
        file.write(page)
    rows, problems = node.run(0.5)
    assert problems == []
    assert kinds(rows) == ["Probe", "ProbeEvent", "ProbeEvent"]
    assert isinstance(rows[0], Probe)
    assert (rows[0].phase, rows[0].phase_since_ns) == ("checkpoint_save", BEGAN_NS >> 4 << 4)
    put(page, at.HEADER_RANK, 5)  # learned late: its checksum follows
    with path.open("r+b") as file:
        file.write(page)
    assert node.run(0.5) == ([], [])
    with path.open("r+b") as file:
        file.write(seal(page))
    info = node.run(0.5)[0][-1]
    assert isinstance(info, ProbeInfo)
    assert info.rank == 5


def test_a_page_whose_ring_fills_quickly_is_read_twice_as_often(node: Node) -> None:
    page = page_of(pid=PID, start_ns=START_NS)
    path = node.page("a", bytes(page))
    node.run()
    newest = 0
    told = []
    for number in range(8):
        # 20 records in a quarter of a second at first, and then one.
        for _ in range(20 if number < 4 else 1):
            newest += 1
            put_record(page, newest, at.EVENT_STEP, BEGAN_NS, BEGAN_NS + 1, newest, 0, 0)
        with path.open("r+b") as file:
            file.write(page)
        told.append(kinds(node.run(0.25)[0]).count("ProbeEvent"))
    assert told == [0, 40, 20, 20, 1, 0, 2, 0]


def test_between_two_rows_a_counter_always_grew_evenly(node: Node) -> None:
    """A row that says what was, before the row that says what has changed."""
    page = page_of(
        pid=PID,
        start_ns=START_NS,
        loaders=[{at.LOADER_SERIAL: 1, at.LOADER_BATCHES: 5}, {at.LOADER_SERIAL: 2}],
    )
    path = node.page("a", bytes(page))
    begin = node.clock.mono_ns() + NS_PER_S
    assert kinds(node.run(1.0)[0]) == ["Probe", "ProbeLoader", "ProbeLoader", "ProbeInfo"]
    assert node.run(0.5) == ([], [])
    put(page, at.LOADERS_AT + at.LOADER_BATCHES, 9)
    put(page, at.LOADERS_AT + at.LOADER_WAIT_NS, 77)
    with path.open("r+b") as file:
        file.write(page)
    rows, problems = node.run(0.45)
    assert problems == []
    told = [
        (type(row).__name__, (row.mono_ns - begin) // 1_000_000, row.batches)
        for row in rows
        if isinstance(row, Probe | ProbeLoader)
    ]
    # The other loader has nothing to tell.
    assert told == [
        ("Probe", 500, 5),
        ("Probe", 950, 9),
        ("ProbeLoader", 500, 5),
        ("ProbeLoader", 950, 9),
    ]


def test_a_process_of_an_inner_pid_namespace_is_found(node: Node) -> None:
    write(node.root, process(912, ticks=77, inner="\t14"))
    write(node.root, process(14, ticks=1))  # another one, of the agent's namespace
    write(node.root, process(913, ticks=78, inner="\t14"))
    node.page("a", make_page(pid=14, start_ns=77 * NS_PER_S // 100))
    rows, problems = node.run()
    assert problems == []
    assert isinstance(rows[0], Probe)
    assert rows[0].pid == 912
    info = rows[-1]
    assert isinstance(info, ProbeInfo)
    assert info.inner_pid == 14


def said(node: Node, after_s: float = 1.0) -> list[str]:
    rows, problems = node.run(after_s)
    assert rows == []
    return [f"{problem.subject} {problem.message}" for problem in problems]


def test_a_page_of_another_user_than_its_process_is_forged(node: Node) -> None:
    write(node.root, process(800, uid=os.geteuid() + 1))
    node.page("a", make_page(pid=800, start_ns=START_NS))
    me = os.geteuid()
    assert said(node) == [
        f"/{FOLDER}/a.page belongs to user {me} and names a process of user {me + 1}: "
        "forged, and not read"
    ]


def test_what_is_no_page_is_refused_and_hurts_no_other(node: Node) -> None:
    good = make_page(pid=PID, start_ns=START_NS)
    node.page("good", good)
    node.page("short", good[:-1])
    node.page("long", good + b"x")
    node.page("elf", b"\x7fELF" + good[4:])
    page = page_of(pid=PID, start_ns=START_NS)
    put(page, at.HEADER_VERSION, 9)
    node.page("newer", bytes(seal(page)))
    os.mkfifo(node.root / FOLDER / "fifo.page")
    (node.root / FOLDER / "link.page").symlink_to(node.root / FOLDER / "good.page")
    (node.root / FOLDER / "folder.page").mkdir()
    (node.root / FOLDER / "notes.txt").write_text("of no interest")
    rows, problems = node.run()
    assert kinds(rows) == ["Probe", "ProbeLoader", "ProbeEvent", "ProbeInfo"]
    messages = {Path(p.subject).stem: p.message for p in problems}
    assert messages == {
        "short": "has 16383 bytes, not 16384: no page of a probe",
        "long": "has 16385 bytes, not 16384: no page of a probe",
        "elf": "does not begin as a page of a probe does",
        "newer": "is a page of version 9; this agent reads versions up to 2",
        "fifo": "is no regular file",
        "link": "is no regular file",
        "folder": "is no regular file",
    }


def test_a_page_that_is_cut_short_while_it_is_read(node: Node) -> None:
    path = node.page("a", make_page(pid=PID, start_ns=START_NS))
    assert len(node.run()[0]) == 4
    os.truncate(path, 100)
    assert said(node, 0.5) == [f"/{FOLDER}/a.page has 100 bytes, not 16384: no page of a probe"]
    path.write_bytes(make_page(pid=PID, start_ns=START_NS))
    assert len(node.run(5)[0]) == 4


def test_a_page_that_begins_to_name_another_process(node: Node) -> None:
    write(node.root, process(701))
    path = node.page("a", make_page(pid=PID, start_ns=START_NS))
    node.run()
    path.write_bytes(make_page(pid=701, start_ns=START_NS))
    assert said(node, 0.5) == [f"/{FOLDER}/a.page names another process than before"]
    rows, _ = node.run(5)  # looked at anew, from the beginning
    assert isinstance(rows[0], Probe)
    assert rows[0].pid == 701


def test_an_empty_page_means_that_there_was_no_room(node: Node) -> None:
    node.page("a", b"")
    assert said(node) == []  # it may be made just now
    (message,) = said(node, 3)
    assert "is empty: there was no room for it" in message


def test_a_page_left_by_a_killed_process_is_told_a_last_time(node: Node) -> None:
    path = node.page("a", make_page(pid=PID, start_ns=START_NS))
    node.run()
    shutil.rmtree(node.root / f"proc/{PID}")
    assert kinds(node.run()[0]) == ["Probe", "ProbeLoader"]
    for _ in range(100):
        assert node.run() == ([], [])
    assert path.exists()
    # The same pid again is another process, and a zombie is none.
    write(node.root, process(PID, ticks=START_TICKS + 1))
    assert node.run(61) == ([], [])
    write(node.root, process(PID, state="Z"))
    assert node.run(61) == ([], [])
    write(node.root, process(PID))
    assert kinds(node.run(61)[0])[0] == "Probe"


def test_a_page_whose_name_is_gone_is_read_to_its_end(node: Node) -> None:
    page = page_of(pid=PID, start_ns=START_NS)
    path = node.page("a", bytes(page))
    node.run()
    put(page, at.CLOSED_NS, BEGAN_NS + 7)
    put_record(page, 1, at.EVENT_STEP, BEGAN_NS, BEGAN_NS + 1, 1, 0, 0)
    with path.open("r+b") as file:
        file.write(page)
    path.unlink()
    rows, problems = node.run()
    assert problems == []
    assert kinds(rows) == ["Probe", "ProbeEvent", "ProbeInfo"]
    assert isinstance(rows[-1], ProbeInfo)
    assert rows[-1].closed_ns == BEGAN_NS + 7
    assert node.run() == ([], [])


def test_of_two_pages_of_a_process_the_newer_counts(node: Node) -> None:
    for number, name in enumerate(("a", "b")):
        node.page(name, bytes(page_of(pid=PID, start_ns=START_NS, opened_ns=BEGAN_NS - number)))
    rows, problems = node.run()
    assert problems == []
    assert kinds(rows) == ["Probe", "ProbeInfo"]
    assert isinstance(rows[1], ProbeInfo)
    assert rows[1].page == f"/{FOLDER}/a.page"
    assert kinds(node.run(100)[0]) == ["Probe", "ProbeInfo"]


def test_a_folder_that_is_filled_has_its_limits(node: Node) -> None:
    for number in range(600):
        write(node.root, process(10_000 + number))
        node.page(f"{number:04}", make_page(pid=10_000 + number, start_ns=START_NS))
    rows, problems = node.run()
    assert kinds(rows).count("Probe") == 512
    assert len(problems) == 88
    assert {p.message for p in problems} == {"is not read: there are 512 other pages"}


def test_without_any_folder_there_is_no_data(tmp_path: Path) -> None:
    host = host_of(tmp_path)
    with pytest.raises(NoData, match="no folder of pages such as /run/whyidle/probe"):
        gather(PROBE.make(), host)


def test_folders_of_users_and_of_the_command_line(tmp_path: Path) -> None:
    write(tmp_path, process(PID))
    write(tmp_path, process(PID + 1))
    write(
        tmp_path,
        {
            "dev/shm/whyidle-probe-1000/a.page": make_page(pid=PID, start_ns=START_NS),
            "dev/shm/torch_1234/a.page": b"of somebody else",
            "tmp/mine/b.page": make_page(pid=PID + 1, start_ns=START_NS),
        },
    )
    told: Answer = ("/tmp/mine", "/tmp/missing")
    clock = VirtualClock(BEGIN_NS)
    host = LiveHost(str(tmp_path), clock, askers={"probe_folders": lambda: told})
    rows, problems = gather(PROBE.make(), host)
    assert sorted(row.pid for row in rows if isinstance(row, Probe)) == [PID, PID + 1]
    assert [f"{p.subject} {p.message}" for p in problems] == [
        "/tmp/missing does not exist; make it, writable to all"
    ]


def test_a_trainer_that_asked_and_publishes_nothing_is_named(tmp_path: Path) -> None:
    node = Node(tmp_path, gpu=(801, 802, 803, 804))
    write(tmp_path, process(801, environ="WHYIDLE_PROBE=1 HOME=/"))
    write(tmp_path, process(802, environ="WHYIDLE_PROBE=1 WHYIDLE_PROBE_DIR=/scratch/x"))
    write(tmp_path, process(803, environ="HOME=/"))
    write(tmp_path, process(804, environ="WHYIDLE_PROBE=1"))
    node.page("a", make_page(pid=804, start_ns=START_NS))
    assert node.run()[1] == []
    _, problems = node.run(61)
    messages = {p.subject: p.message for p in problems}
    assert set(messages) == {"pid 801", "pid 802"}
    assert "has published nothing in a minute" in messages["pid 801"]
    assert "start the agent with --probe-dir /scratch/x" in messages["pid 802"]


def test_a_living_trainer(tmp_path: Path) -> None:
    """The machine itself: a process of this test, its page, its end."""
    pages = tmp_path / "pages"
    pages.mkdir()
    body = """
    import sys, whyidle_probe
    whyidle_probe.step()
    print("on", flush=True)
    sys.stdin.readline()
    with whyidle_probe.phase("evaluation"):
        whyidle_probe.step()
    print("done", flush=True)
    sys.stdin.readline()
    sys.exit(0)
    """
    trainer = subprocess.Popen(
        [sys.executable, str(script(tmp_path, body))],
        env=environment(pages),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    host = live_host("/", SystemClock(), watched=Watched(probe_folders=(str(pages),)))
    try:
        assert trainer.stdout.readline() == "on\n"
        collect = PROBE.make()
        rows = mine(gather(collect, host)[0], trainer.pid)
        assert isinstance(rows[0], Probe)
        assert rows[0].steps == 1
        trainer.stdin.write("go\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "done\n"
        time.sleep(0.5)
        rows = mine(gather(collect, host)[0], trainer.pid)
        assert isinstance(rows[0], Probe)
        assert rows[0].steps == 2
        assert rows[0].evaluation_ns is not None
        assert rows[0].evaluation_ns > 0
        trainer.communicate("end\n", timeout=30)
        time.sleep(0.5)
        rows = mine(gather(collect, host)[0], trainer.pid)
        info = rows[-1]
        assert isinstance(info, ProbeInfo)
        assert info.closed_ns is not None
        assert list(pages.iterdir()) == []
    finally:
        trainer.kill()
        trainer.communicate()
        host.close()


def mine(rows: list[object], pid: int) -> list[object]:
    """The rows of one process: the machine may have other trainers."""
    return [row for row in rows if getattr(row, "pid", None) == pid]


def test_a_page_with_a_process_group_makes_rows_of_it_and_of_its_calls(node: Node) -> None:
    node.page("a", with_group(make_page(pid=PID, start_ns=START_NS)))
    rows, problems = node.run()
    assert problems == []
    assert kinds(rows) == [
        *("Probe", "ProbeLoader", "ProbeCall", "ProbeGroup"),
        *("ProbeEvent", "ProbeInfo"),
    ]
    (total,) = [row for row in rows if isinstance(row, Probe)]
    assert (total.coll_wait_ns, total.message_wait_ns, total.coll_waiting_since_ns) == (0, 0, None)
    (group,) = [row for row in rows if isinstance(row, ProbeGroup)]
    assert (group.place, group.group_key, group.size, group.backend) == (1, 7, 8, "nccl")
    (call,) = [row for row in rows if isinstance(row, ProbeCall)]
    assert (call.operation, call.number, call.wait_ns, call.size_bytes) == (
        "all_reduce",
        1,
        5,
        4000,
    )


def test_a_page_of_an_older_probe_does_not_know_what_was_waited_for(node: Node) -> None:
    page = page_of(
        pid=PID,
        start_ns=START_NS,
        process={at.HEADER_VERSION: 1, at.HEADER_SIZE: 8192, at.STEPS: 1},
    )
    node.page("a", bytes(page)[:8192])
    rows, problems = node.run()
    assert problems == []
    (total,) = [row for row in rows if isinstance(row, Probe)]
    assert (total.steps, total.coll_wait_ns, total.message_wait_ns) == (1, None, None)
