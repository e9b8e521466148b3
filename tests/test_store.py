"""Reading recordings: any mix of parts is one set of views; damage is named, never an error."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest

from recording_kit import everything, sample
from whyidle import store as store_module
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.clocks import CLOCKS
from whyidle.collect.gpu_activity import GPU_ACTIVITY
from whyidle.collect.net_link import NET_LINK
from whyidle.errors import UserError
from whyidle.keeper import Keeper
from whyidle.layout import PIECE, SEGMENT, Identity, files
from whyidle.parquet import export
from whyidle.schema import TABLES, VERSION
from whyidle.segment import connect, new_segment
from whyidle.sources import find, is_recording
from whyidle.spool import HEADER_MARK, frame
from whyidle.store import Recording
from whyidle.table import table_of
from world.machine import IDENTITY, Machine

SOURCES = (CLOCKS, GPU_ACTIVITY, NET_LINK)
SECOND = Identity(node="sim1", boot_id="fedcba98-89ab-cdef-0123-456789abcdef")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes in one folder: one with two segments and a piece, one that is all spool."""
    recording = tmp_path_factory.mktemp("mixed")
    for identity, seconds in ((IDENTITY, 150), (SECOND, 20)):
        clock = VirtualClock(100 * NS_PER_S)
        machine = Machine(5, clock=clock)
        hosts = dict.fromkeys(SOURCES, machine)
        sample(recording, SOURCES, hosts.__getitem__, machine, clock, seconds, identity=identity)
    Keeper(recording, IDENTITY, Machine(0), pid=2).cycle()
    return recording


def count(recording: Recording, table: str = "clock") -> int:
    found = recording.con.execute(f'SELECT count(*) FROM "{table}"').fetchone()
    assert found is not None
    return int(found[0])


def test_segments_and_spools_of_several_nodes_are_one(mixed: Path) -> None:
    with Recording([mixed]) as recording:
        assert recording.nodes == ["sim0", "sim1"]
        assert recording.damaged == []
        by_node = recording.con.execute(
            "SELECT node, boot_id, count(*) FROM clock GROUP BY ALL ORDER BY node"
        ).fetchall()
        assert by_node == [
            ("sim0", IDENTITY.boot_id, 150),
            ("sim1", SECOND.boot_id, 20),
        ]


def test_every_table_has_its_view_whatever_was_recorded(mixed: Path) -> None:
    with Recording([mixed]) as recording:
        for row in TABLES:
            spec = table_of(row)
            described = recording.con.execute(f'DESCRIBE "{spec.name}"').fetchall()
            assert [(name, type_) for name, type_, *_ in described] == [
                ("node", "VARCHAR"),
                ("boot_id", "VARCHAR"),
                *((column.name, column.type) for column in spec.columns),
            ]


@pytest.mark.parametrize("threads", [1, 2])
def test_parts_can_be_named_one_by_one_or_by_a_glob(mixed: Path, threads: int) -> None:
    parts = [*files(mixed / "sim0" / IDENTITY.boot8, SEGMENT)]
    parts += files(mixed / "sim0" / IDENTITY.boot8 / "spool", PIECE)
    with Recording(parts, threads=threads) as recording:
        assert count(recording) == 150
    with Recording([f"{mixed}/sim?"]) as recording:
        assert count(recording) == 170
    with Recording([mixed, mixed / "sim0", *parts]) as recording:
        assert count(recording) == 170  # what is named twice is read once


def test_what_is_not_there_is_said_with_what_may_be_meant(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*/sim00; did you mean .*/sim[01]\?"):
        find([mixed / "sim00"])
    with pytest.raises(UserError, match=r"holds no recording: pass a folder"):
        find([tmp_path])
    with pytest.raises(UserError, match=r"holds no recording"):
        find([f"{tmp_path}/*.nothing"])
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(UserError, match=r"holds no recording"):
        find([tmp_path / "x.txt"])
    assert is_recording(mixed)
    assert not is_recording(tmp_path)


def test_a_newer_schema_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = (
        rf"was written by a newer whyidle \(schema {VERSION + 1}, this one reads up to "
        rf"{VERSION}\): update whyidle to read it"
    )
    with monkeypatch.context() as patched:
        patched.setattr("whyidle.segment.VERSION", VERSION + 1)
        with new_segment(tmp_path / "a.duckdb", IDENTITY):
            pass
    with pytest.raises(UserError, match=sentence):
        Recording([tmp_path / "a.duckdb"])
    newer = f'{{"schema_version":{VERSION + 1},"node":"n","boot_id":"b","tables":[]}}'
    (tmp_path / "b.wsp").write_bytes(frame(HEADER_MARK, newer.encode(), 0))
    with pytest.raises(UserError, match=sentence):
        Recording([tmp_path / "b.wsp"])


def test_columns_and_tables_of_later_read_as_null(tmp_path: Path, mixed: Path) -> None:
    """An older segment has neither the column nor the table; it is made by taking them away."""
    old = tmp_path / "old.duckdb"
    (segment, *_) = files(mixed / "sim0" / IDENTITY.boot8, SEGMENT)
    shutil.copy(segment, old)
    con = duckdb.connect(str(old))
    con.execute("ALTER TABLE net_link DROP COLUMN speed_bits_per_s")
    con.execute("DROP TABLE vmstat")
    con.execute(
        "CREATE OR REPLACE VIEW segment_info AS SELECT 1::BIGINT AS schema_version, "
        "7::BIGINT AS schema_hash, 'sim0' AS node, 'b' AS boot_id, '1.4.0' AS duckdb_version"
    )
    con.close()
    with Recording([old]) as recording:
        assert recording.damaged == []
        speeds = recording.con.execute(
            "SELECT DISTINCT speed_bits_per_s, interface FROM net_link ORDER BY interface"
        ).fetchall()
        assert speeds == [(None, "eth0"), (None, "lo")]
        assert count(recording, "vmstat") == 0
        # A piece ends after a minute, with the block that was being written then.
        assert count(recording, "clock") in (60, 61)


def test_a_piece_of_an_older_schema_reads_as_null_too(tmp_path: Path, mixed: Path) -> None:
    import json
    import zlib

    from whyidle.layout import stem
    from whyidle.spool import BLOCK_MARK, FRAME, schema_hash

    (piece,) = files(mixed / "sim1" / SECOND.boot8 / "spool", PIECE)
    data = piece.read_bytes()
    length = FRAME.unpack_from(data)[1]
    header = json.loads(zlib.decompress(data[FRAME.size : FRAME.size + length]))
    # Another name for a column is to the reader a column that it does not know, and one missing.
    for table, columns in header["tables"]:
        for column in columns:
            if (table, column[0]) == ("net_link", "speed_bits_per_s"):
                column[0] = "speed_old"
    hash_ = schema_hash(json.dumps(header["tables"], separators=(",", ":")))
    blocks = data[FRAME.size + length :]
    out = frame(HEADER_MARK, json.dumps(header).encode(), hash_)
    at = 0
    while at < len(blocks):
        size = FRAME.unpack_from(blocks, at)[1]
        payload = zlib.decompress(blocks[at + FRAME.size : at + FRAME.size + size])
        out += frame(BLOCK_MARK, payload, hash_)
        at += FRAME.size + size
    (tmp_path / (stem(0, 0) + PIECE)).write_bytes(out)
    with Recording([tmp_path]) as recording:
        assert recording.damaged == []
        assert recording.con.execute(
            "SELECT count(*), count(speed_bits_per_s) FROM net_link"
        ).fetchone() == (40, 0)


@pytest.mark.parametrize("seed", range(12))
def test_damaged_parts_are_named_and_the_rest_is_read(
    mixed: Path, tmp_path: Path, seed: int
) -> None:
    recording = tmp_path / "r"
    shutil.copytree(mixed, recording)
    generator = random.Random(seed)
    folder = recording / "sim0" / IDENTITY.boot8
    victim = generator.choice([*files(folder, SEGMENT), *files(folder / "spool", PIECE)])
    data = bytearray(victim.read_bytes())
    kind = generator.choice(["flip", "cut", "blank", "garbage"])
    at = generator.randrange(len(data))
    if kind == "flip":
        for place in range(at, min(len(data), at + 64)):
            data[place] ^= generator.randrange(1, 256)
    elif kind == "cut":
        del data[at:]
    elif kind == "blank":
        data[at : at + 5000] = bytes(len(data[at : at + 5000]))
    else:
        data = bytearray(generator.randbytes(5000))
    victim.write_bytes(data)
    wanted = everything(mixed)
    with Recording([recording]) as opened:
        got = opened.run(lambda con: con.execute("SELECT * FROM clock").fetchall())
        links = opened.run(lambda con: con.execute("SELECT * FROM net_link").fetchall())
        assert set(got) <= set(wanted["clock"])
        assert set(links) <= set(wanted["net_link"])
        assert len(got) >= 100, opened.damaged  # no more than the one part is lost
        if len(got) < len(wanted["clock"]) and kind != "cut":
            assert [damaged.path for damaged in opened.damaged] == [victim]
            assert "\n" not in opened.damaged[0].why


def test_an_error_of_the_query_itself_is_not_taken_for_damage(mixed: Path) -> None:
    with Recording([mixed]) as recording:
        with pytest.raises(duckdb.Error, match="no_such_column"):
            recording.run(lambda con: con.execute("SELECT no_such_column FROM clock"))
        assert recording.damaged == []
        assert count(recording) == 170


def test_a_keeper_at_work_does_not_disturb_a_reader(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files go away between being listed and being opened: the reader lists them again."""
    recording = tmp_path / "r"
    shutil.copytree(mixed, recording)
    calls = 0

    def find_then_keep(sources: Any) -> Any:
        nonlocal calls
        found = find(sources)
        calls += 1
        if calls == 1:
            keeper = Keeper(recording, IDENTITY, Machine(0), pid=2)
            keeper.cycle(drain=True)
            keeper.merge(everything=True)
        return found

    monkeypatch.setattr(store_module, "find", find_then_keep)
    with Recording([recording]) as opened:
        assert calls == 2
        assert count(opened) == 170
        assert opened.damaged == []


def test_parquet_gives_back_what_went_in(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "parquet"
    with Recording([mixed]) as recording:
        export(recording, out)
        with pytest.raises(UserError, match="is not empty"):
            export(recording, out)
    assert everything(out) == everything(mixed)
    folders = sorted(str(path.relative_to(out)) for path in out.glob("clock/*/*"))
    # The simulated wall clock shows 2026-01-01 00:00 at monotonic time 100 s.
    assert folders == ["clock/node=sim0/hour=20260101T00", "clock/node=sim1/hour=20260101T00"]
    con = connect()
    try:
        metadata = con.execute(
            "SELECT decode(value) FROM parquet_kv_metadata($1) "
            "WHERE decode(key) = 'whyidle_schema_version'",
            [str(next(out.glob("clock/*/*/*.parquet")))],
        ).fetchall()
    finally:
        con.close()
    assert metadata == [(str(VERSION),)]
    with Recording([out]) as recording:
        assert recording.nodes == ["sim0", "sim1"]


def test_an_export_of_a_newer_schema_is_refused(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "parquet"
    with Recording([mixed / "sim1"]) as recording:
        export(recording, out)
    manifest = out / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f": {VERSION}", f": {VERSION + 1}"))
    with pytest.raises(UserError, match="newer whyidle"):
        Recording([out])


def test_a_manifest_is_not_needed(mixed: Path) -> None:
    assert not (mixed / "manifest.json").exists()


@pytest.mark.parametrize("left", [0, 3000])
def test_a_truncated_file_of_an_export_is_named_and_the_rest_is_read(
    left: int, tmp_path: Path
) -> None:
    kept = Path(__file__).parents[1] / "fixtures" / "stalls" / "pipeline-few" / "recording"
    shutil.copytree(kept, tmp_path / "export")
    (victim,) = (tmp_path / "export" / "process").rglob("*.parquet")
    with victim.open("r+b") as file:
        file.truncate(left)
    with Recording([tmp_path / "export"]) as recording:
        assert [damaged.path for damaged in recording.damaged] == [victim]
        assert recording.con.execute("SELECT count(*) FROM process").fetchone() == (0,)
        (rows,) = recording.con.execute("SELECT count(*) FROM gpu_activity").fetchone() or (0,)
        assert rows > 100
