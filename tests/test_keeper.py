"""The keeper: rows are in the recording exactly once, whenever it is cut off; limits are kept."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from recording_kit import everything, sample
from whyidle import keeper as keeper_module
from whyidle import segment as segment_module
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.clocks import CLOCKS
from whyidle.collect.gpu_activity import GPU_ACTIVITY
from whyidle.collect.process import PROCESS
from whyidle.keeper import Keeper, Retention
from whyidle.layout import PIECE, SEGMENT, Identity, files
from whyidle.segment import attach, columns_of, connect, insert_piece, read_info, span, verify
from whyidle.spool import SpoolWriter
from whyidle.store import Recording
from whyidle.table import identifier
from world.machine import IDENTITY, Machine

SOURCES = (CLOCKS, GPU_ACTIVITY, PROCESS)
FOLDER = Path(IDENTITY.node) / IDENTITY.boot8


@pytest.fixture(scope="module")
def spooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of four minutes that is still all spool; copy it."""
    recording = tmp_path_factory.mktemp("spooled")
    clock = VirtualClock(3590 * NS_PER_S)  # so that an hour ends inside
    machine = Machine(4, clock=clock)
    sample(recording, SOURCES, lambda collector: machine, machine, clock, 239)
    return recording


@pytest.fixture(scope="module")
def wanted(spooled: Path) -> dict[str, list[tuple[Any, ...]]]:
    return everything(spooled)


def keeper(recording: Path, **options: Any) -> Keeper:
    clock = VirtualClock(5000 * NS_PER_S)
    return Keeper(recording, IDENTITY, Machine(0, clock=clock), pid=2, **options)


def without_itself(found: dict[str, list[tuple[Any, ...]]]) -> dict[str, list[tuple[Any, ...]]]:
    """Leave the keeper's own cost rows out."""
    own = [row for row in found["agent_self"] if row[3] != "keeper"]
    return {**found, "agent_self": own}


def names(folder: Path, ending: str) -> list[str]:
    return [path.name for path in files(folder, ending)]


def test_finished_pieces_become_segments_and_the_newest_stays(
    spooled: Path, wanted: dict[str, list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    recording = tmp_path / "r"
    shutil.copytree(spooled, recording)
    folder = recording / FOLDER
    pieces = names(folder / "spool", PIECE)
    assert len(pieces) == 4
    one = keeper(recording)
    assert one.cycle() == 3
    assert names(folder / "spool", PIECE) == pieces[3:]
    # The first piece began before the hour was full, so nothing is to be merged with it.
    assert len(names(folder, SEGMENT)) == 3
    assert without_itself(everything(recording)) == wanted
    assert one.cycle() == 0
    assert one.cycle(drain=True) == 1
    assert names(folder / "spool", PIECE) == []
    assert without_itself(everything(recording)) == wanted


def test_hours_are_merged_and_every_column_says_what_it_means(
    spooled: Path, wanted: dict[str, list[tuple[Any, ...]]], tmp_path: Path
) -> None:
    recording = tmp_path / "r"
    shutil.copytree(spooled, recording)
    one = keeper(recording)
    one.cycle(drain=True)
    one.merge(everything=True)
    (segment,) = files(recording / FOLDER, SEGMENT)
    begin, end = span(segment) or (0, 0)
    assert begin < 3_600_000 < end
    assert without_itself(everything(recording)) == wanted
    assert verify(segment) is None
    con = connect()
    attach(con, segment, "seg")
    assert read_info(con, "seg").identity == IDENTITY
    silent = con.execute(
        "SELECT table_name, column_name FROM duckdb_columns() WHERE database_name = 'seg' "
        "AND comment IS NULL AND table_name <> 'segment_info'"
    ).fetchall()
    assert silent == []
    assert "process" in columns_of(con, "seg")
    con.close()


def test_an_hour_is_merged_once_the_next_has_begun(tmp_path: Path) -> None:
    clock = VirtualClock(3470 * NS_PER_S)
    machine = Machine(4, clock=clock)
    sample(tmp_path, SOURCES, lambda collector: machine, machine, clock, 250)
    wanted = everything(tmp_path)
    pieces = files(tmp_path / FOLDER / "spool", PIECE)
    starts = [begin // 1000 for path in pieces for begin, _ in (span(path) or (0, 0),)]
    assert starts == [3471, 3531, 3591, 3651, 3711]
    keeper(tmp_path).cycle(drain=True)
    segments = files(tmp_path / FOLDER, SEGMENT)
    assert [span(path) for path in segments] == [
        (span(pieces[0])[0], span(pieces[2])[0]),  # type: ignore[index]
        span(pieces[3]),
        span(pieces[4]),
    ]
    assert without_itself(everything(tmp_path)) == wanted


def test_quarters_of_an_hour_are_merged_and_then_the_hour(tmp_path: Path) -> None:
    clock = VirtualClock(2640 * NS_PER_S)
    machine = Machine(4, clock=clock)
    sample(tmp_path, SOURCES, lambda collector: machine, machine, clock, 1100)
    wanted = everything(tmp_path)
    one = keeper(tmp_path)
    pieces = files(tmp_path / FOLDER / "spool", PIECE)
    begins = [(span(path) or (0, 0))[0] for path in pieces]
    # As long as the hour lasts its quarters are apart: that which ends with 2700 s, and the next.
    for path in [path for path, begin in zip(pieces, begins, strict=True) if begin >= 3_600_000]:
        path.rename(path.with_suffix(".later"))
    one.cycle(drain=True)
    first = [path for path in begins if path < 2_700_000]
    held = [span(path) for path in files(tmp_path / FOLDER, SEGMENT)]
    assert held[0] == (first[0], first[-1])
    assert len(held) == 1 + len([begin for begin in begins if 2_700_000 <= begin < 3_600_000])
    for path in (tmp_path / FOLDER / "spool").glob("*.later"):
        path.rename(path.with_suffix(PIECE))
    one.cycle(drain=True)
    held = [span(path) for path in files(tmp_path / FOLDER, SEGMENT)]
    last = [begin for begin in begins if begin < 3_600_000][-1]
    assert held == [(begins[0], last), *[(begin, begin) for begin in begins if begin > last]]
    assert without_itself(everything(tmp_path)) == wanted


def test_segments_can_be_read_by_the_oldest_duckdb_that_is_supported(
    spooled: Path, tmp_path: Path
) -> None:
    recording = tmp_path / "r"
    shutil.copytree(spooled, recording)
    keeper(recording).cycle(drain=True)
    con = connect()
    for number, path in enumerate(files(recording / FOLDER, SEGMENT)):
        attach(con, path, f"s{number}")
    versions = con.execute(
        "SELECT DISTINCT tags['storage_version'] FROM duckdb_databases() WHERE NOT internal "
        "AND database_name LIKE 's%'"
    ).fetchall()
    con.close()
    assert len(versions) == 1
    assert versions[0][0].startswith("v1.4.0"), versions


class _Died(BaseException):
    """The process is gone: nothing that it would do next happens."""


class _Mortal:
    """Lets a process do `lives` file operations, and no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lives: int) -> None:
        self.lives = lives
        monkeypatch.setattr(Path, "rename", self.limited(Path.rename))
        monkeypatch.setattr(Path, "unlink", self.limited(Path.unlink))
        monkeypatch.setattr(segment_module, "sync", self.limited(segment_module.sync))
        monkeypatch.setattr(keeper_module, "insert_piece", self.limited(insert_piece))

    def limited(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **options: Any) -> Any:
            self.lives -= 1
            if self.lives < 0:
                raise _Died
            return operation(*args, **options)

        return do


@pytest.mark.parametrize("lives", [*range(8), 20, *range(31, 41), 60])
def test_cut_off_anywhere_every_row_is_there_once(
    spooled: Path,
    wanted: dict[str, list[tuple[Any, ...]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lives: int,
) -> None:
    recording = tmp_path / "r"
    shutil.copytree(spooled, recording)
    with monkeypatch.context() as patched:
        mortal = _Mortal(patched, lives)
        try:
            one = keeper(recording)
            one.cycle(drain=True)
            one.merge(everything=True)
        except _Died:
            pass
        died = mortal.lives < 0
    assert without_itself(everything(recording)) == wanted
    again = keeper(recording)
    again.cycle(drain=True)
    again.merge(everything=True)
    assert len(names(recording / FOLDER, SEGMENT)) == 1
    left = {path.name for path in (recording / FOLDER).rglob("*") if path.is_file()}
    assert left == set(names(recording / FOLDER, SEGMENT))
    assert without_itself(everything(recording)) == wanted
    assert died or lives == 60  # the range reaches past the last operation


def test_a_damaged_piece_is_set_aside_and_the_others_are_taken(
    spooled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording = tmp_path / "r"
    shutil.copytree(spooled, recording)
    folder = recording / FOLDER
    pieces = files(folder / "spool", PIECE)
    pieces[1].write_bytes(b"nothing of ours")
    with caplog.at_level(logging.WARNING, logger="whyidle"):
        logging.getLogger("whyidle").propagate = True
        assert keeper(recording).cycle(drain=True) == 4
    assert names(folder / "spool", PIECE) == []
    assert (folder / "spool" / f"{pieces[1].name}.damaged").exists()
    assert "was set aside" in caplog.text
    assert len(names(folder, SEGMENT)) == 3


def test_a_damaged_segment_does_not_stop_the_merging_of_the_others(
    spooled: Path, tmp_path: Path
) -> None:
    recording = tmp_path / "r"
    shutil.copytree(spooled, recording)
    folder = recording / FOLDER
    one = keeper(recording)
    one.cycle(drain=True)
    segments = files(folder, SEGMENT)
    rows = [_count(path, "tick") for path in segments]
    data = bytearray(segments[1].read_bytes())
    for at in range(12_288, len(data), 4096):
        data[at] ^= 0xFF
    segments[1].write_bytes(data)
    one.merge(everything=True)
    one.merge(everything=True)
    (merged,) = files(folder, SEGMENT)
    assert _count(merged, "tick") == sum(rows) - rows[1]
    assert (folder / f"{segments[1].name}.damaged").exists()


def test_a_newer_piece_is_left_to_a_newer_program(spooled: Path, tmp_path: Path) -> None:
    from whyidle.spool import HEADER_MARK, frame

    recording = tmp_path / "r"
    shutil.copytree(spooled, recording)
    spool = recording / FOLDER / "spool"
    newer = files(spool, PIECE)[1]
    header = b'{"format":1,"schema_version":99,"node":"n","boot_id":"b","tables":[]}'
    newer.write_bytes(frame(HEADER_MARK, header, 0))
    keeper(recording).cycle(drain=True)
    assert names(spool, PIECE) == [newer.name]


def test_pieces_of_boots_before_are_taken_over_too(spooled: Path, tmp_path: Path) -> None:
    recording = tmp_path / "r"
    shutil.copytree(spooled, recording)
    now = Identity(node=IDENTITY.node, boot_id="ffffffff-89ab-cdef-0123-456789abcdef")
    clock = VirtualClock(5 * NS_PER_S)
    machine = Machine(0, clock=clock)
    sample(recording, SOURCES, lambda collector: machine, machine, clock, 5, identity=now)
    one = Keeper(recording, now, machine, pid=2)
    assert one.cycle() == 4
    assert names(recording / FOLDER / "spool", PIECE) == []
    assert len(names(recording / IDENTITY.node / "ffffffff" / "spool", PIECE)) == 1
    with Recording([recording]) as opened:
        boots = opened.con.execute("SELECT DISTINCT boot_id FROM tick").fetchall()
    assert {boot for (boot,) in boots} == {IDENTITY.boot_id, now.boot_id}


def test_a_disk_that_is_full_leaves_the_spool_as_it_is(
    spooled: Path,
    wanted: dict[str, list[tuple[Any, ...]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recording = tmp_path / "r"
    shutil.copytree(spooled, recording)

    def full(*args: Any) -> int:
        raise duckdb.IOException("Could not write file: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(keeper_module, "insert_piece", full)
        with pytest.raises(duckdb.IOException):
            keeper(recording).cycle(drain=True)
    assert len(names(recording / FOLDER / "spool", PIECE)) == 4
    assert list((recording / FOLDER).glob("*.part*")) == []
    assert everything(recording) == wanted
    assert keeper(recording).cycle(drain=True) == 4


def test_size_and_age_limits_delete_the_oldest_first(spooled: Path, tmp_path: Path) -> None:
    recording = tmp_path / "r"
    shutil.copytree(spooled, recording)
    folder = recording / FOLDER
    keeper(recording).cycle(drain=True)
    segments = files(folder, SEGMENT)
    size = sum(path.stat().st_size for path in segments[2:])
    keeper(recording, retention=Retention(size_bytes=size)).retain()
    assert files(folder, SEGMENT) == segments[2:]
    wall_s = VirtualClock(5000 * NS_PER_S).wall_ns() / NS_PER_S
    os.utime(segments[2], (wall_s - 100, wall_s - 100))
    os.utime(segments[3], (wall_s - 100, wall_s - 100))
    keeper(recording, retention=Retention(age_s=101)).retain()
    assert files(folder, SEGMENT) == segments[2:]
    keeper(recording, retention=Retention(age_s=99)).retain()
    assert files(folder, SEGMENT) == segments[3:]  # what was written last stays


def test_free_space_is_left_to_others(spooled: Path, tmp_path: Path) -> None:
    recording = tmp_path / "r"
    shutil.copytree(spooled, recording)
    keeper(recording).cycle(drain=True)
    stats = os.statvfs(recording)
    free = stats.f_bavail * stats.f_frsize
    keeper(recording, retention=Retention(free_bytes=free // 2)).retain()
    assert len(names(recording / FOLDER, SEGMENT)) == 4
    keeper(recording, retention=Retention(free_bytes=1 << 60)).retain()
    assert len(names(recording / FOLDER, SEGMENT)) == 1


def test_an_empty_spool_makes_no_segment(tmp_path: Path) -> None:
    clock = VirtualClock(NS_PER_S)
    folder = IDENTITY.folder(tmp_path)
    writer = SpoolWriter(folder / "spool", IDENTITY, clock)
    writer.write({})
    writer.close()
    assert keeper(tmp_path).cycle(drain=True) == 0
    assert names(folder, SEGMENT) == []


def _count(path: Path, table: str) -> int:
    con = connect()
    try:
        attach(con, path, "seg")
        counted = con.execute(f"SELECT count(*) FROM seg.{identifier(table)}").fetchone()
        assert counted is not None
        return int(counted[0])
    finally:
        con.close()
