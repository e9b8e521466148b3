"""The spool: what is written is read back; torn and damaged pieces lose only what was hit."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recording_kit import make_row
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.schema import TABLES, VERSION, Cpu, GpuActivity, GpuProcess, NetLink, Process
from whyidle.spool import BLOCK_MARK, FRAME, HEADER_MARK, Encoder, Rows, SpoolWriter, frame
from whyidle.spool_read import (
    NewerSchemaError,
    Piece,
    UnreadableError,
    piece_of,
    read_piece,
)
from whyidle.table import Column, Row, table_of
from world.machine import IDENTITY


def link(mono_ns: int, interface: str = "eth0", up: bool | None = None) -> NetLink:
    return make_row(
        NetLink, mono_ns=mono_ns, interface=interface, up=up, rx_bytes=mono_ns * 2, tx_bytes=0
    )


def values(piece: Piece, table: str, column: str) -> list[Any]:
    held = piece.tables[table][column]
    words = list(held.words)
    return [
        None if not present else words[value] if held.type == "VARCHAR" else value
        for value, present in zip(held.values, held.present, strict=True)
    ]


def written(tmp_path: Path, seconds: int) -> Path:
    """Write a piece with one block a second, each with two rows; return its path."""
    clock = VirtualClock(NS_PER_S)
    writer = SpoolWriter(tmp_path, IDENTITY, clock)
    for second in range(seconds):
        writer.write({NetLink: [link(second), link(second, f"ib{second % 3}", up=True)]})
        clock.advance(NS_PER_S)
    writer.close()
    assert writer.path is not None
    return writer.path


def of_column(column: Column) -> st.SearchStrategy[Any]:
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "BIGINT": st.integers(-(2**63), 2**63 - 1),
        "DOUBLE": st.floats(allow_nan=False, allow_infinity=False, width=32),
        "BOOLEAN": st.booleans(),
        "VARCHAR": st.text(alphabet=string.printable + "äöü\0€", max_size=20),
    }
    return st.none() | kinds[column.type] if column.nullable else kinds[column.type]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_rows_come_back_as_they_were(data: st.DataObject) -> None:
    row_type = data.draw(st.sampled_from(TABLES))
    spec = table_of(row_type)
    columns = {column.name: of_column(column) for column in spec.columns}
    drawn = data.draw(st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=12))
    piece = piece_of([row_type(**values) for values in drawn])
    for column in spec.columns:
        is_rounded = column.unit == "ratio" and not column.rounded
        want = [
            round(value, 6) if is_rounded and value is not None else value
            for value in (row[column.name] for row in drawn)
        ]
        assert values(piece, spec.name, column.name) == want


def test_numbers_whose_sum_is_too_large_come_back() -> None:
    huge = [1.7e308, 1.7e308, 0.5]
    rows = [make_row(GpuActivity, gr_active_ratio=value) for value in huge]
    assert values(piece_of(rows), "gpu_activity", "gr_active_ratio") == huge


def test_a_piece_comes_back_with_its_identity(tmp_path: Path) -> None:
    piece = read_piece(written(tmp_path, 5))
    assert piece.identity == IDENTITY
    assert piece.schema_version == VERSION
    assert (piece.blocks, piece.damaged_bytes, piece.torn_bytes) == (5, 0, 0)
    assert piece.counts == {"net_link": 10}
    assert values(piece, "net_link", "up") == [None, True] * 5
    assert values(piece, "net_link", "interface")[:4] == ["eth0", "ib0", "eth0", "ib1"]


def test_pieces_follow_one_another_once_a_minute_and_never_share_a_name(tmp_path: Path) -> None:
    clock = VirtualClock(NS_PER_S)
    for _ in range(2):  # a sampler that is started again at once
        writer = SpoolWriter(tmp_path, IDENTITY, clock)
        for second in range(121):
            writer.write({NetLink: [link(second)]})
            clock.advance(NS_PER_S)
        clock.advance(-121 * NS_PER_S)
        writer.close()
    pieces = sorted(tmp_path.iterdir())
    assert len(pieces) == 6
    assert sum(read_piece(piece).blocks for piece in pieces) == 242


def test_a_spool_that_nobody_takes_over_stays_within_its_limit(tmp_path: Path) -> None:
    clock = VirtualClock(NS_PER_S)
    writer = SpoolWriter(tmp_path, IDENTITY, clock, limit_bytes=20_000)
    for second in range(60 * 30):
        writer.write({NetLink: [link(second)]})
        clock.advance(NS_PER_S)
    writer.close()
    pieces = sorted(tmp_path.iterdir())
    assert 1 < len(pieces) < 10
    assert sum(piece.stat().st_size for piece in pieces) < 30_000
    assert values(read_piece(pieces[-1]), "net_link", "mono_ns")[-1] == 60 * 30 - 1


def test_a_piece_cut_off_anywhere_keeps_every_whole_block(tmp_path: Path) -> None:
    path = written(tmp_path, 6)
    data = path.read_bytes()
    ends = [at for at in range(len(data)) if data.startswith(BLOCK_MARK, at)] + [len(data)]
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends[1:])
        if cut < ends[0]:
            with pytest.raises(UnreadableError):
                read_piece(path)
        else:
            piece = read_piece(path)
            assert (piece.blocks, piece.damaged_bytes) == (whole, 0)
            assert piece.counts.get("net_link", 0) == 2 * whole


def test_damage_costs_the_blocks_that_it_hits_and_is_counted(tmp_path: Path) -> None:
    path = written(tmp_path, 20)
    data = path.read_bytes()
    generator = random.Random(5)
    for _ in range(300):
        hurt = bytearray(data)
        at = generator.randrange(len(data))
        for offset in range(min(generator.randrange(1, 40), len(data) - at)):
            hurt[at + offset] ^= generator.randrange(1, 256)
        path.write_bytes(hurt)
        piece = read_piece(path)
        assert piece.blocks >= 17
        assert piece.blocks == 20 or piece.damaged_bytes + piece.torn_bytes > 0
        # What is left is true: no value that was not written.
        assert set(values(piece, "net_link", "rx_bytes")) <= {2 * second for second in range(20)}


def test_a_piece_that_lost_its_header_is_read_while_the_schema_is_todays(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    data = bytearray(path.read_bytes())
    data[FRAME.size + 3] ^= 0xFF
    path.write_bytes(data)
    piece = read_piece(path)
    assert piece.identity is None
    assert piece.blocks == 3
    assert piece.damaged_bytes > 0


@pytest.mark.parametrize("content", [b"", b"x", b"WBLK" * 1000, bytes(5000), b"\xff" * 5000])
def test_what_is_no_piece_is_unreadable(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.wsp"
    path.write_bytes(content)
    with pytest.raises(UnreadableError):
        read_piece(path)


def test_a_newer_schema_is_told_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "x.wsp"
    header = b'{"format":1,"schema_version":99,"node":"n","boot_id":"b","tables":[]}'
    path.write_bytes(frame(HEADER_MARK, header, 0))
    with pytest.raises(NewerSchemaError) as told:
        read_piece(path)
    assert told.value.version == 99


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "x.wsp"
    path.write_bytes(frame(BLOCK_MARK, bytes(300 << 20), Encoder().hash))
    with pytest.raises(UnreadableError):
        read_piece(path)


def test_unfit_values_are_refused_by_row_and_the_others_kept() -> None:
    bad: list[Row] = [
        link(2**63),
        link("soon"),  # type: ignore[arg-type]
        link(1.5),  # type: ignore[arg-type]
        link(3, None),  # type: ignore[arg-type]
        link(3, up=1),  # type: ignore[arg-type]
        link(3, b"eth0"),  # type: ignore[arg-type]
    ]
    for row in bad:
        rows: Rows = {NetLink: [link(1), row, link(2)]}
        payload, refused = Encoder().encode(rows)
        assert len(refused) == 1
        assert refused[0].startswith("net_link.")
        assert payload == Encoder().encode({NetLink: [link(1), link(2)]})[0]


def test_what_is_not_finite_is_unknown() -> None:
    rows = [
        make_row(GpuProcess, sm_utilization_ratio=ratio)
        for ratio in (float("nan"), float("inf"), 0.25)
    ]
    assert values(piece_of(rows), "gpu_process", "sm_utilization_ratio") == [None, None, 0.25]


def test_long_strings_are_cut_and_broken_ones_replaced(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path, IDENTITY, VirtualClock())
    writer.write({NetLink: [link(1, "x" * 100_000), link(2, "a\udcffb")]})
    writer.close()
    assert writer.path is not None
    names = values(read_piece(writer.path), "net_link", "interface")
    assert names == ["x" * 4096, "a�b"]


def test_more_than_a_byte_of_different_strings() -> None:
    rows = [link(number, f"veth{number}") for number in range(700)]
    got = values(piece_of(rows), "net_link", "interface")
    assert got == [f"veth{number}" for number in range(700)]


def test_every_table_can_be_written() -> None:
    rows: list[Row] = []
    for row_type in TABLES:
        filler = {"BIGINT": 1, "DOUBLE": 0.5, "BOOLEAN": True, "VARCHAR": "x"}
        columns = table_of(row_type).columns
        rows.append(row_type(**{column.name: filler[column.type] for column in columns}))
    piece = piece_of(rows)
    assert piece.counts == {table_of(row).name: 1 for row in TABLES}
    assert Cpu in TABLES
    assert Process in TABLES
