"""Demand against supply by mount and second: totals kept, nothing counted twice, gaps unknown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from recording_kit import make_row
from recording_rows import connect, s, write
from whyidle.schema import (
    BlockDevice,
    FileUse,
    LustreMount,
    LustreTarget,
    Mount,
    NfsMount,
    NfsOp,
    NvmeController,
    Process,
)
from whyidle.storage_sql import create_view
from whyidle.store import Recording
from whyidle.table import Row

MB = 1_000_000
DISK = {"mount_id": 50, "mount_point": "/data", "kind": "block", "device": "259:2"}
NFS = {"mount_id": 60, "mount_point": "/nfs", "kind": "nfs", "device": "0:50"}
LUSTRE = {"mount_id": 63, "mount_point": "/lustre", "kind": "lustre", "device": "0:52"}
# second, mount point, wanted, fetched, served
Answer = list[tuple[int, str | None, float | None, float | None, float | None]]


def answer(rows: Iterable[Row]) -> Answer:
    """Return the rows of the view; seconds count from the beginning of the story."""
    con = connect(list(rows))
    create_view(con)
    return con.execute(
        "SELECT second - 1000, mount_point, wanted_bytes, fetched_bytes, served_bytes"
        " FROM storage_second ORDER BY ALL"
    ).fetchall()


def mount(place: dict[str, object], block_device: str | None = None) -> Row:
    return make_row(Mount, mono_ns=s(0), block_device=block_device, **place)


def every_second(
    make: Callable[[float], Row], seconds: int = 10, *, at: float = 0.0, step: float = 1.0
) -> list[Row]:
    """A row at each second from `at` on, made of the time since."""
    count = int(seconds / step) + 1
    return [make(at + number * step) for number in range(count)]


def worker(pid: int, rchar: float, fetched: float = 0.0, kind: str = "data_worker") -> list[Row]:
    """A process that asks for `rchar` bytes a second, of which `fetched` come from storage."""
    return every_second(
        lambda t: make_row(
            Process,
            mono_ns=s(t),
            pid=pid,
            start_ns=5,
            kind=kind,
            rchar_bytes=round(7 * MB + rchar * t),
            read_bytes=round(fetched * t),
        )
    )


def uses(pid: int, place: dict[str, object] | None, files: int = 1) -> Row:
    at: dict[str, object] = {} if place is None else {"mount_id": place["mount_id"]}
    return make_row(FileUse, mono_ns=s(3), pid=pid, start_ns=5, read_files=files, **at)


def disk(device: str, rate: float, **more: object) -> list[Row]:
    more = {"role": "disk", **more}
    return every_second(
        lambda t: make_row(
            BlockDevice, mono_ns=s(t), device=device, reads=1, read_bytes=round(rate * t), **more
        )
    )


def nfs(rate: float, *, at: float = 0.0, step: float = 1.0) -> list[Row]:
    return every_second(
        lambda t: make_row(NfsMount, mono_ns=s(t), server_read_bytes=round(rate * t), **_of(NFS)),
        at=at,
        step=step,
    )


def _of(place: dict[str, object]) -> dict[str, object]:
    return {name: place[name] for name in ("mount_point", "device")}


def test_a_worker_on_nfs_gets_what_it_asks_for() -> None:
    found = answer([mount(NFS), *worker(7, 100 * MB, 100 * MB), uses(7, NFS), *nfs(100 * MB)])
    assert len(found) == 10
    assert [row[0] for row in found] == list(range(10))
    for row in found:
        assert row[1:] == ("/nfs", 100 * MB, 100 * MB, 100 * MB)


def test_readings_between_seconds_are_spread_and_totals_kept() -> None:
    found = answer([mount(NFS), *nfs(100 * MB, at=0.4)])
    assert [(row[0], round(row[4] or 0)) for row in found] == [
        (0, 60 * MB),
        *((second, 100 * MB) for second in range(1, 10)),
        (10, 40 * MB),
    ]
    assert all(row[2] is row[3] is None for row in found), "nobody is known to ask"


def test_the_page_cache_serves_without_the_disk() -> None:
    rows = [mount(DISK, "nvme0n1"), *worker(7, 500 * MB, 0), uses(7, DISK), *disk("nvme0n1", 0)]
    assert {row[1:] for row in answer(rows)} == {("/data", 500 * MB, 0, 0)}


def test_workers_of_two_mounts_are_told_apart_and_one_of_both_is_split() -> None:
    rows = [
        mount(DISK, "nvme0n1"),
        mount(NFS),
        *worker(7, 100 * MB),
        uses(7, DISK),
        *worker(8, 10 * MB, kind="trainer"),
        uses(8, NFS),
        *worker(9, 4 * MB),
        uses(9, DISK, 3),
        uses(9, NFS, 1),
        *worker(10, 900 * MB, kind="helper"),
        uses(10, NFS),
    ]
    wanted = {(row[1], round(row[2] or 0)) for row in answer(rows)}
    assert wanted == {("/data", 103 * MB), ("/nfs", 11 * MB)}, "helpers are not trainers"


def test_who_was_never_seen_with_a_file_has_no_mount() -> None:
    rows = [mount(NFS), *worker(7, 5 * MB), uses(7, None, 0)]
    assert {row[1:] for row in answer(rows)} == {(None, 5 * MB, 0, None)}


@pytest.mark.parametrize(("head", "expected"), [(300.0, 300.0), (0.0, 500.0)])
def test_paths_are_counted_only_where_their_head_counts_nothing(
    head: float, expected: float
) -> None:
    moves = {} if head else {"reads": 0}
    rows = [
        mount(DISK, "nvme1n1"),
        *disk("nvme1c0n1", 200.0, role="path", head="nvme1n1"),
        *disk("nvme1c1n1", 300.0, role="path", head="nvme1n1"),
        *(
            make_row(
                BlockDevice,
                mono_ns=s(t),
                device="nvme1n1",
                role="disk",
                read_bytes=round(head * t),
                **{"reads": 1, **moves},
            )
            for t in range(11)
        ),
    ]
    assert {row[4] for row in answer(rows)} == {expected}


def test_a_striped_volume_has_the_bytes_of_all_its_disks_and_not_its_own() -> None:
    rows = [
        mount(DISK, "nvme0n1,nvme1n1"),
        *disk("nvme0n1", 100.0),
        *disk("nvme1n1", 50.0),
        *disk("dm-0", 150.0, role="stacked"),
    ]
    assert {row[4] for row in answer(rows)} == {150.0}


def test_lustre_is_what_its_targets_gave() -> None:
    def target(number: int, rate: float) -> list[Row]:
        return every_second(
            lambda t: make_row(
                LustreTarget,
                mono_ns=s(t),
                instance=f"syn-OST000{number}-osc-1",
                target=f"syn-OST000{number}",
                kind="ost",
                read_bytes=round(rate * t),
            ),
            20,
            step=10.0,
        )

    client = make_row(
        LustreMount, mono_ns=s(0), instance="syn-1", file_system="syn", mount_point="/lustre"
    )
    found = answer([mount(LUSTRE), client, *target(1, 30.0), *target(2, 12.0)])
    assert [(row[0], row[1], row[4]) for row in found] == [
        (second, "/lustre", 42.0) for second in range(20)
    ]


def test_a_counter_that_fell_and_a_gap_are_not_known() -> None:
    rows = nfs(100.0)
    fallen = [row for row in rows if row.mono_ns != s(5)]  # type: ignore[attr-defined]
    fallen.append(make_row(NfsMount, mono_ns=s(5), server_read_bytes=0, **_of(NFS)))
    served = {row[0]: row[4] for row in answer([mount(NFS), *fallen])}
    assert served[4] is None, "it began anew"
    assert served[3] == served[6] == 100.0
    gap = [row for row in rows if not s(1) < row.mono_ns < s(8)]  # type: ignore[attr-defined]
    assert [row[0] for row in answer([mount(NFS), *gap])] == [0, 8, 9]


def test_fuse_has_no_supply() -> None:
    bucket = {"mount_id": 67, "mount_point": "/bucket", "kind": "object", "device": "0:60"}
    found = answer([mount(bucket), *worker(7, 8 * MB, 8 * MB), uses(7, bucket)])
    assert {row[1:] for row in found} == {("/bucket", 8 * MB, 8 * MB, None)}


PAGE = Path(__file__).parents[1] / "docs" / "storage.md"


@pytest.mark.parametrize(
    "query", re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
)
def test_the_queries_of_the_page_answer(query: str, tmp_path: Path) -> None:
    ops = [
        make_row(
            NfsOp, mono_ns=s(t), mount_point="/nfs", op="READ", ops=t, transmissions=2 * t, rtt_ms=t
        )
        for t in range(3)
    ]
    states = [
        make_row(NvmeController, mono_ns=s(t), controller="nvme1", state=state)
        for t, state in ((0, "live"), (1, "connecting"), (3, "live"))
    ]
    rows = [mount(NFS), *worker(7, MB, MB), uses(7, NFS), *nfs(MB), *ops, *states]
    con = connect(rows)
    create_view(con)
    found = con.execute(query).fetchall()
    assert found
    if "lasted_s" in query:
        assert [(row[1], row[4]) for row in found] == [
            ("live", 1.0),
            ("connecting", 2.0),
            ("live", None),
        ]
    if "sent_again" in query:
        assert found == [("/nfs", "READ", 2, None, 1.0, 2)]


def test_over_a_real_recording(tmp_path: Path) -> None:
    rows = [mount(NFS), *worker(7, 100 * MB, 100 * MB), uses(7, NFS), *nfs(100 * MB)]
    write(tmp_path / "recording", rows)
    with Recording([tmp_path / "recording"]) as recording:
        create_view(recording.con)
        total = recording.con.execute(
            "SELECT mount_point, sum(wanted_bytes), sum(served_bytes) FROM storage_second"
            " GROUP BY ALL"
        ).fetchall()
    assert total == [("/nfs", 1000 * MB, 1000 * MB)]
