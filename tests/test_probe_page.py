"""The counter page: what the probe writes is what the agent reads, and nothing in it can hurt."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_kit import read_page
from probe_pages import BEGAN_NS, make_page, page_of, put, put_record, put_text, seal
from whyidle import probe_groups, probe_page
from whyidle.probe_page import NotReadyError, parse_header
from whyidle_probe import layout as at
from whyidle_probe.group_block import GroupBlock
from whyidle_probe.identity import Identity
from whyidle_probe.loader_block import BACKGROUND, OUTSIDE, STEP, LoaderBlock
from whyidle_probe.page import Page, sweep

NOW_NS = BEGAN_NS + 10_000_000_000


def read_all(data: bytes) -> None:
    """Read whatever can be read; raises only what a reader is told of."""
    header = parse_header(data)
    totals = probe_page.parse_process(data, NOW_NS)
    loaders = list(probe_page.parse_loaders(data, NOW_NS))
    records = list(probe_page.parse_records(data, header, totals.sequence, 0))
    assert len(loaders) <= at.LOADERS
    assert len(records) <= at.RING_RECORDS
    assert header.python is None or header.python.isprintable()
    numbers = [totals.steps, totals.gc_ns, *totals.phase_ns, *totals.phase_background_ns]
    for item in loaders:
        numbers += [item.batches, item.wait_ns, item.ready, item.waiting_since_ns]
    groups = list(probe_groups.parse_groups(data, NOW_NS))
    newest, calls = probe_groups.parse_calls(data, 0)
    assert len(groups) <= at.GROUPS
    assert len(calls) <= at.CALL_RECORDS
    numbers.append(newest)
    for group in groups:
        numbers += [group.calls, group.wait_ns, group.waiting_since_ns, group.key, group.size]
    for call in calls:
        numbers += [call.called_ns, call.number, call.wait_ns, call.size_bytes, call.group]
        assert call.wait_ns <= call.ended_ns - call.called_ns
    for record in records:
        numbers += [*record.values, record.begin_ns, record.end_ns - record.begin_ns]
    assert all(number is None or 0 <= number < 1 << 63 for number in numbers)
    assert probe_page.phase_name(header, totals.phase).isprintable()


def test_both_descriptions_agree(tmp_path: Path) -> None:
    assert (at.MAGIC, at.VERSION, at.PAGE_BYTES, at.SUFFIX) == (
        probe_page.MAGIC,
        probe_page.VERSION,
        probe_page.PAGE_BYTES,
        probe_page.SUFFIX,
    )
    identity = Identity()
    identity.rank, identity.world_size, identity.local_rank = 5, 16, None
    page = Page(str(tmp_path), identity, "2.13.0")
    for number, slot in enumerate((at.STEPS, at.OPTIMIZER_STEPS, at.LAST_STEP_NS)):
        page.slots[slot] = 10 + number
    now = time.monotonic_ns()
    page.slots[at.PHASE] = now >> 4 << 4 | 9
    for kind in range(at.PHASE_KINDS):
        page.slots[at.PHASE_NS + kind] = 100 + kind
        page.slots[at.PHASE_BACKGROUND_NS + kind] = 200 + kind
    for number, slot in enumerate((at.GC_NS, at.GC_COUNT, at.GC_FULL_COUNT, at.HOOK_ERRORS)):
        page.slots[slot] = 20 + number
    page.slots[at.LOADERS_SEEN] = 2
    for number, slot in enumerate((at.PIPELINE_STAGE, at.PIPELINE_STAGES, at.PIPELINE_BATCHES)):
        page.slots[slot] = 3 + number
    page.slots[at.PIPELINE_SCHEDULE] = at.SCHEDULES.index("gpipe")
    page.name_phase(9, "warm-up")
    page.record(at.EVENT_STEP, now - 9, now, 1, 2, 3)
    page.record(1 | at.EVENT_BACKGROUND, now - 8, now, 4, 5, 6)
    page.record(9, now - 7, now, 7, 8, 9)
    page.record(at.EVENT_GC, now - 6, now, 2, 8, 0)
    page.record(at.EVENT_WAIT, now - 5, now, 1, 0, 0)
    page.record(at.EVENT_SETUP, now - 4, now, 1, 0, 0)
    block = LoaderBlock(page.slots[at.LOADERS_AT : at.LOADERS_AT + at.LOADER_SLOTS])
    block.begin(7)
    block.describe(at.FLAG_WORKERS | at.FLAG_PERSISTENT, 4, 8, 32)
    block.iterator_made(50)
    block.arrive(now, 3, 1)
    block.took(STEP, 11, 5)
    block.arrive(now, 0, 2)
    block.took(OUTSIDE, 12, 6)
    block.arrive(now, 0, 0)
    block.took(BACKGROUND, 13, 7)
    block.arrive(now, 2, 0)

    read = read_page(Path(page.path))
    header, totals = read.header, read.totals
    assert (header.pid, header.start_ns) == (identity.pid, identity.start_ns)
    assert (header.rank, header.world_size, header.local_rank) == (5, 16, None)
    assert header.torch == "2.13.0"
    assert header.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert Path(page.path).stem.replace("-", "") == header.page_id
    assert (totals.steps, totals.optimizer_steps, totals.last_step_ns) == (10, 11, 12)
    assert (totals.gc_ns, totals.gc_count, totals.gc_full_count) == (20, 21, 22)
    assert (totals.hook_errors, totals.loaders_seen, totals.closed_ns) == (23, 2, None)
    assert (totals.pipeline_stage, totals.pipeline_stages, totals.pipeline_batches) == (3, 4, 5)
    assert totals.pipeline_schedule == "gpipe"
    assert totals.phase_ns == tuple(range(100, 116))
    assert totals.phase_background_ns == tuple(range(200, 216))
    assert probe_page.phase_name(header, totals.phase) == "warm-up"
    assert totals.phase_since_ns == now >> 4 << 4
    assert read.kinds() == ["step", "checkpoint_save", "warm-up", "gc", "data_wait", "data_setup"]
    assert [record.background for record in read.records] == [False, True, *[False] * 4]
    assert read.records[0].values == (1, 2, 3)
    (loader,) = read.loaders
    assert (loader.serial, loader.workers, loader.capacity, loader.batch_size) == (7, 4, 8, 32)
    assert loader.flags == at.FLAG_WORKERS | at.FLAG_PERSISTENT
    assert (loader.batches, loader.wait_ns) == (1, 11)
    assert (loader.outside_batches, loader.outside_wait_ns) == (1, 12)
    assert (loader.background_batches, loader.background_wait_ns) == (1, 13)
    assert (loader.ready, loader.outstanding, loader.unpinned) == (2, 7, 0)
    assert (loader.empty_arrivals, loader.ready_sum, loader.waiting_since_ns) == (2, 5, now)
    assert (loader.iterators, loader.setup_ns) == (1, 50)
    page.close()
    assert not Path(page.path).exists()


def test_both_descriptions_of_process_groups_agree(tmp_path: Path) -> None:
    assert {version: size for version, size in probe_page.SIZES.items() if version == at.VERSION}
    assert at.GROUPS_AT * 8 + at.GROUPS * at.GROUP_SLOTS * 8 == at.CALLS_AT_BYTES
    assert at.CALLS_AT_BYTES + at.CALL_RECORDS * at.RING_BYTES == at.PAGE_BYTES
    assert at.CALL_SEQUENCE == at.GROUPS_AT + at.GROUPS * at.GROUP_SLOTS - 1
    page = Page(str(tmp_path), Identity(), "")
    now = time.monotonic_ns()
    block = GroupBlock(page.slots[at.GROUPS_AT : at.GROUPS_AT + at.GROUP_SLOTS], 1)
    block.describe(77, 8, 3, "nccl")
    assert block.called(at.OPERATIONS.index("all_reduce"), now - 9, 100) == 1
    assert block.called(at.OPERATIONS.index("recv"), now - 8, 10) == 1
    assert block.called(at.OPERATION_BARRIER, now - 7, 0) == 2
    block.waited(at.OPERATION_BARRIER, 5)
    block.waited(at.OPERATIONS.index("recv"), 6)
    block.slots[at.GROUP_WAITING_SINCE_NS] = now - 3
    assert block.backward() == 1
    for number, operation in enumerate(at.OPERATIONS[1:]):
        page.record_call(at.OPERATIONS.index(operation) | 1 << 8, now - 2, now, number, 1, 4)
    page.record_call(1 | 16 << 8 | at.CALL_BACKGROUND, now - 2, now, 9, 3, 4)
    data = Path(page.path).read_bytes()
    (group,) = probe_groups.parse_groups(data, time.monotonic_ns())
    assert group == probe_groups.Group(
        serial=1,
        key=77,
        size=8,
        rank=3,
        backend="nccl",
        calls=2,
        messages=1,
        moved_bytes=110,
        waits=2,
        wait_ns=5,
        message_wait_ns=6,
        waiting_since_ns=now - 3,
        arrived_ns=now - 7,
        operation="barrier",
        backwards=1,
    )
    newest, calls = probe_groups.parse_calls(data, 0)
    assert newest == len(at.OPERATIONS) == len(calls)
    assert [call.operation for call in calls] == [*at.OPERATIONS[1:], "all_reduce"]
    assert (calls[-1].group, calls[-1].background, calls[-1].wait_ns) == (16, True, 2)
    assert (calls[0].group, calls[0].background, calls[0].size_bytes) == (1, False, 4)
    assert probe_groups.parse_calls(data, newest - 1) == (newest, calls[-1:])
    block.share()
    (shared,) = probe_groups.parse_groups(Path(page.path).read_bytes(), time.monotonic_ns())
    assert shared.key is None
    page.close()


def test_ranks_that_call_at_another_pace_record_some_of_the_same_calls() -> None:
    slow, fast = (GroupBlock(memoryview(bytearray(128)).cast("q"), 1) for _ in range(2))
    kept: list[set[int]] = [set(), set()]
    for number in range(1, 4001):
        for block, apart_ns, own in ((slow, 3_000_000, kept[0]), (fast, 1_000_000, kept[1])):
            if block.records(number, number * apart_ns, 0):
                own.add(number)
    assert len(kept[1]) < len(kept[0]) < 400
    assert len(kept[0] & kept[1]) > 20
    assert slow.records(4001, 1 << 50, 2_000_000)


def test_a_page_of_the_first_version_is_read_and_has_no_groups() -> None:
    page = page_of(pid=9, start_ns=1, process={at.HEADER_VERSION: 1, at.HEADER_SIZE: 8192})
    data = bytes(seal(page))[:8192]
    assert parse_header(data).pid == 9
    assert list(probe_groups.parse_groups(data, NOW_NS)) == []
    assert probe_groups.parse_calls(data, 0) == (0, [])
    read_all(data)
    with pytest.raises(ValueError, match="has 8192 bytes and has 16384, not 8192"):
        parse_header(bytes(seal(page)))


def test_the_ring_keeps_the_newest_and_says_what_is_lost(tmp_path: Path) -> None:
    page = Page(str(tmp_path), Identity(), "")
    for number in range(500):
        page.record(at.EVENT_STEP, number, number + 1, number, 0, 0)
    data = Path(page.path).read_bytes()
    header = parse_header(data)
    kept = [r.sequence for r in probe_page.parse_records(data, header, 500, 0)]
    assert kept == list(range(500 - at.RING_RECORDS + 1, 501))
    assert [r.sequence for r in probe_page.parse_records(data, header, 500, 498)] == [499, 500]
    assert list(probe_page.parse_records(data, header, 500, 500)) == []


def test_a_record_that_is_being_written_is_left_out() -> None:
    page = bytearray(make_page(pid=9, start_ns=1))
    put_record(page, 2, at.EVENT_STEP, BEGAN_NS, BEGAN_NS + 1, 2, 2, 2)
    page[at.RING_AT_BYTES + 2 * at.RING_BYTES + 40] ^= 1
    put_record(page, 3, at.EVENT_STEP, BEGAN_NS + 5, BEGAN_NS, 3, 3, 3)  # ends before it begins
    put_record(page, 4, 77, BEGAN_NS, BEGAN_NS + 1, 4, -4, 4)
    header = parse_header(bytes(page))
    records = list(probe_page.parse_records(bytes(page), header, 4, 0))
    assert [(r.sequence, r.kind, r.values) for r in records] == [
        (1, "step", (1, 5, 1)),
        (4, "other", (4, None, 4)),
    ]


@pytest.mark.parametrize(
    ("slot", "value", "said"),
    [
        (at.HEADER_VERSION, 3, "version 3; this agent reads versions up to 2"),
        (at.HEADER_VERSION, 0, "version 0; this agent reads versions up to 2"),
        (at.HEADER_VERSION, 1, "has 16384 bytes and has 16384, not 8192"),
        (at.HEADER_SIZE, 4096, "says that it has 4096 bytes"),
        (at.HEADER_PID, 0, "names pid 0"),
        (at.HEADER_PID, -5, "names pid -5"),
        (at.HEADER_PID, 1 << 40, "names pid"),
        (at.HEADER_START_NS, -1, "start -1"),
    ],
)
def test_headers_that_are_refused(slot: int, value: int, said: str) -> None:
    page = page_of(pid=9, start_ns=1)
    put(page, slot, value)
    with pytest.raises(ValueError, match=said):
        parse_header(bytes(seal(page)))


def test_a_page_that_is_not_complete_is_looked_at_later() -> None:
    page = page_of(pid=9, start_ns=1)
    with pytest.raises(NotReadyError):
        parse_header(bytes(at.PAGE_BYTES))
    put(page, at.HEADER_RANK, 4)  # the checksum is the old one
    with pytest.raises(NotReadyError):
        parse_header(bytes(page))
    with pytest.raises(ValueError, match="does not begin"):
        parse_header(b"\x7fELF" + bytes(page[4:]))
    for size in (0, 1, at.PAGE_BYTES - 1, at.PAGE_BYTES + 1):
        with pytest.raises(ValueError, match=f"has {size} bytes"):
            parse_header(bytes(size))


def test_texts_of_a_stranger_are_plain() -> None:
    page = page_of(pid=9, start_ns=1)
    put_text(page, at.TEXT_PYTHON, "\x1b[31mred\n\r")
    page[at.TEXT_TORCH[0] : at.TEXT_TORCH[0] + 4] = b"\xff\xfe\xc3("
    header = parse_header(bytes(seal(page)))
    assert header.python == "?[31mred??"
    assert header.torch is not None
    assert header.torch.isprintable()


def test_times_that_have_not_come_are_not_known() -> None:
    page = page_of(
        pid=9,
        start_ns=1,
        process={at.LAST_STEP_NS: NOW_NS + 1, at.PHASE: (NOW_NS >> 4) + 9 << 4 | 1},
        loaders=[{at.LOADER_SERIAL: 1, at.LOADER_WAITING_SINCE_NS: NOW_NS + 1}],
    )
    totals = probe_page.parse_process(bytes(page), NOW_NS)
    assert (totals.last_step_ns, totals.phase, totals.phase_since_ns) == (None, 1, None)
    (loader,) = probe_page.parse_loaders(bytes(page), NOW_NS)
    assert loader.waiting_since_ns is None


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=600), seed=st.integers(0, 1 << 32))
def test_any_bytes_are_refused_or_read_within_bounds(data: bytes, seed: int) -> None:
    with pytest.raises((ValueError, NotReadyError)):
        parse_header(data)
    spoilt = bytearray(make_page(pid=9, start_ns=1))
    source = random.Random(seed)
    for _ in range(source.randrange(1, 40)):
        at_ = source.randrange(8, at.PAGE_BYTES - 8)
        value = source.choice(
            (source.getrandbits(64), 0, (1 << 63) - 1, 1 << 63, source.getrandbits(8))
        )
        struct.pack_into("<Q", spoilt, at_ // 8 * 8, value)
    put(spoilt, at.HEADER_VERSION, at.VERSION)
    put(spoilt, at.HEADER_SIZE, at.PAGE_BYTES)
    put(spoilt, at.HEADER_PID, 9)
    put(spoilt, at.HEADER_START_NS, 5)
    put(spoilt, at.HEADER_OPENED_NS, 5)
    read_all(bytes(seal(spoilt)))


def test_left_over_pages_are_swept_and_no_others(tmp_path: Path) -> None:
    mine = Page(str(tmp_path), Identity(), "")
    identity = Identity()
    identity.start_ns -= 10_000_000  # the pid of an earlier process
    dead = Page(str(tmp_path), identity, "")
    identity.pid_namespace += 1  # of a container: nobody here can tell
    inner = Page(str(tmp_path), identity, "")
    identity.boot_id = "11111111-2222-3333-4444-555555555555"
    old = Page(str(tmp_path), identity, "")
    (tmp_path / "notes.txt").write_text("of somebody")
    (tmp_path / "b.page").write_bytes(b"not a page of ours")
    sweep(str(tmp_path))
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {Path(mine.path).name, Path(inner.path).name, "notes.txt", "b.page"}
    assert not Path(dead.path).exists()
    assert not Path(old.path).exists()
