"""Dumps of PyTorch's flight recorder: made up and hostile; real ones are in test_flight_torch."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import duckdb
import pytest

from recording_rows import write
from recording_stories import checkpointed
from trace_run import check_one_sentence, diagnose, diagnosis
from whyidle.clock import NS_PER_S
from whyidle.errors import UserError
from whyidle.schema import ClockReading as Clock
from whyidle.schema import ProbeCall, ProbeGroup
from whyidle.table import ddl, table_of
from whyidle_rules.diagnosis import FlightHang
from whyidle_rules.recording import flight
from whyidle_rules.recording.meetings import Meetings, Who, relate
from whyidle_rules.report.flight import sentence

BEGAN_NS = 1_750_000_000_000_000_000


def entry(number: int, name: str = "nccl:all_reduce", **more: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": name,
        "time_created_ns": BEGAN_NS + number * 1_000_000_000,
        "state": "completed",
        "retired": True,
        **more,
    }


def dump(entries: list[Any], ranks: str = "[0, 1, 2]") -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return {"version": "2.10", "pg_config": config, "entries": entries}


def put(folder: Path, rank: int, value: object) -> Path:
    path = folder / f"nccl_trace_rank_{rank}"
    path.write_bytes(pickle.dumps(value))
    return path


WAITING: dict[str, Any] = {"state": "started", "retired": False}


def test_who_has_not_come_is_named(tmp_path: Path) -> None:
    for rank in (0, 2):
        last = entry(8, "nccl:_all_gather_base", **WAITING)
        put(tmp_path, rank, dump([entry(6), entry(7), last]))
    put(tmp_path, 1, dump([entry(6), entry(7, "nccl:broadcast")]))
    found = flight.read([tmp_path])
    (hang,) = flight.hangs(found)
    assert hang == FlightHang(
        group="0 (default_pg)",
        number=8,
        operations=["all_gather"],
        waiting=[0, 2],
        missing=[1],
        unknown=[],
        last={1: 7},
        since_wall_ns=BEGAN_NS + 8_000_000_000,
    )
    assert sentence(hang) == (
        "Since 2025-06-15 15:06:48 UTC ranks 0 and 2 wait in all_gather, call 8 of group 0 "
        "(default_pg); rank 1 has not come, and had called call 7 last."
    )
    assert flight.left_out(found) == []


def test_calls_that_have_ended_are_no_hang(tmp_path: Path) -> None:
    for rank in range(3):
        put(tmp_path, rank, dump([entry(6), entry(7)]))
    assert flight.hangs(flight.read([tmp_path])) == []


def test_calls_under_way_on_all_ranks_are_no_hang(tmp_path: Path) -> None:
    for rank in range(3):
        put(tmp_path, rank, dump([entry(6), entry(7, **WAITING)]))
    assert flight.hangs(flight.read([tmp_path])) == []


def test_ranks_without_a_dump_are_unknown_and_not_accused(tmp_path: Path) -> None:
    put(tmp_path, 0, dump([entry(8, **WAITING)]))
    put(tmp_path, 2, dump([entry(8, **WAITING)]))
    (hang,) = flight.hangs(flight.read([tmp_path]))
    assert (hang.waiting, hang.missing, hang.unknown) == ([0, 2], [], [1])
    assert "of rank 1 there is no dump from then on" in sentence(hang)


def test_a_dump_from_before_the_wait_accuses_nobody(tmp_path: Path) -> None:
    put(tmp_path, 0, dump([entry(8, **WAITING)], "[0, 1]"))
    path = put(tmp_path, 1, dump([entry(7)], "[0, 1]"))
    os.utime(path, ns=(BEGAN_NS, BEGAN_NS + 7_500_000_000))
    (hang,) = flight.hangs(flight.read([tmp_path]))
    assert (hang.missing, hang.unknown, hang.last) == ([], [1], {})
    os.utime(path, ns=(BEGAN_NS, BEGAN_NS + 9_000_000_000))
    (hang,) = flight.hangs(flight.read([tmp_path]))
    assert (hang.missing, hang.unknown, hang.last) == ([1], [], {1: 7})


def test_ranks_that_go_different_ways_are_told(tmp_path: Path) -> None:
    put(tmp_path, 0, dump([entry(8, "nccl:all_reduce", **WAITING)], "[0, 1]"))
    put(tmp_path, 1, dump([entry(8, "nccl:broadcast", **WAITING)], "[0, 1]"))
    (hang,) = flight.hangs(flight.read([tmp_path]))
    assert hang.operations == ["all_reduce", "broadcast"]
    assert "do not call the same collective" in sentence(hang)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("nccl:all_reduce", "all_reduce"),
        ("gloo:all_reduce", "all_reduce"),
        ("nccl:_all_gather_base", "all_gather"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
        ("nccl:all_gather_into_tensor_coalesced", "all_gather"),
        ("nccl:all_reduce_barrier", "barrier"),
        ("gloo:barrier", "barrier"),
        ("nccl:ALL_TO_ALL", "all_to_all"),
        ("", "collective"),
        ("nccl:\n\x1b[31m", "??[31m"),
    ],
)
def test_names_of_operations(told: str, name: str) -> None:
    assert flight.operation(told) == name


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/whyidle-flight-was-run",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nothing of ours",
        b"{",
        b"{}",
        b'{"entries": 7}',
        pickle.dumps([1, 2]),
        pickle.dumps({"entries": _Evil()}),
        pickle.dumps(dump([entry(1)]))[:-40],
        b"[" * 100_000,
        b"\x80\x04" + b"(" * 100_000,
    ],
)
def test_what_is_no_dump_is_left_out(tmp_path: Path, data: bytes) -> None:
    put(tmp_path, 0, dump([entry(1)]))
    (tmp_path / "nccl_trace_rank_1").write_bytes(data)
    found = flight.read([tmp_path])
    assert set(found.ranks) == {0} and set(found.bad) == {"nccl_trace_rank_1"}
    (said,) = flight.left_out(found)
    assert said.what == "calls in nccl_trace_rank_1"
    assert not Path("/tmp/whyidle-flight-was-run").exists()
    with pytest.raises(UserError, match="one a rank"):
        flight.read([tmp_path / "nccl_trace_rank_1"])


@pytest.mark.parametrize(
    "change",
    [
        {"collective_seq_id": "7"},
        {"collective_seq_id": True},
        {"collective_seq_id": -1},
        {"time_created_ns": 1 << 70},
        {"time_created_ns": None},
        {"process_group": []},
        {"process_group": [3, 4]},
        {"process_group": ["0"]},
        {"profiling_name": None},
    ],
)
def test_entries_that_are_none_are_counted(tmp_path: Path, change: dict[str, Any]) -> None:
    entries = [entry(1), {**entry(2), **change}, entry(3, is_p2p=True), 17]
    put(tmp_path, 0, dump(entries))
    found = flight.read([tmp_path])
    assert [call.number for call in found.calls] == [1]
    assert found.bad_calls == 2


def test_names_without_a_rank_and_second_dumps(tmp_path: Path) -> None:
    put(tmp_path, 0, dump([entry(1)]))
    (tmp_path / "notes").write_text("hello")
    (tmp_path / "other_0.json").write_text(json.dumps(dump([entry(2)])))
    found = flight.read([tmp_path])
    assert len(found.calls) == 1
    assert found.bad == {
        "notes": "its name does not end in a rank",
        "other_0.json": "is no dump of a flight recorder: is a second dump of rank 0",
    }


def test_where_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no file"):
        flight.read([tmp_path])
    with pytest.raises(UserError, match="is not there"):
        flight.read([tmp_path / "none"])


def test_arrivals_of_dumps_name_the_late_rank(tmp_path: Path) -> None:
    """By wall clocks, on machines whose own clocks are related; and only if all members told."""
    late = {0: 0, 1: 40_000_000, 2: 3_000_000}
    for rank, ns in late.items():
        calls = [
            entry(number, time_created_ns=BEGAN_NS + number * 1_000_000_000 + ns)
            for number in range(20)
        ]
        calls.append(entry(20, "nccl:broadcast", time_created_ns=BEGAN_NS + 25_000_000_000))
        put(tmp_path, rank, dump(calls))
    con = duckdb.connect()
    for row in (Clock, ProbeCall, ProbeGroup):
        con.execute(ddl(table_of(row))[0].replace("(", "(node VARCHAR, boot_id VARCHAR, ", 1))
    con.execute(
        "INSERT INTO clock (node, boot_id, mono_ns, wall_ns) VALUES ('n', 'b', 500, $wall)",
        {"wall": BEGAN_NS},
    )
    flight.put(con, flight.read([tmp_path]))
    clocks = relate(con, {("n", "b")})
    whos: dict[int, Who] = {rank: ("n", "b", 100 + rank, 7) for rank in range(3)}
    meetings = Meetings(con, clocks)
    members = [frozenset({who}) for who in whos.values()]
    assert meetings.lateness(members, BEGAN_NS // NS_PER_S, 30, NS_PER_S) is None
    meetings.learn(con, whos)
    found = meetings.lateness(members, BEGAN_NS // NS_PER_S, 30, NS_PER_S)
    assert found is not None
    assert found.sum(axis=1) == pytest.approx([0.0, 20 * 0.037, 0.0])
    two = Meetings(con, clocks)
    two.learn(con, {0: whos[0], 1: whos[1]})
    assert two.lateness(members, BEGAN_NS // NS_PER_S, 30, NS_PER_S) is None


def test_diagnose_tells_what_dumps_say(tmp_path: Path) -> None:
    recording = write(tmp_path / "run", checkpointed())
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    put(dumps, 0, dump([entry(8, **WAITING)], "[0, 1]"))
    put(dumps, 1, dump([entry(7)], "[0, 1]"))
    (dumps / "rank_2").write_bytes(b"nothing of ours")
    found = diagnosis(recording, "--flight-recorder", str(dumps))
    (hang,) = found["flight_recorder"]
    assert (hang["waiting"], hang["missing"], hang["last"]) == ([0], [1], {"1": 7})
    assert "calls in rank_2" in [item["what"] for item in found["not_seen"]]
    text = diagnose(recording, "--flight-recorder", str(dumps)).stdout
    assert "By PyTorch's flight recorder" in text
    assert "rank 1 has not come" in " ".join(text.split())
    assert diagnosis(recording)["flight_recorder"] == []


def test_dumps_go_with_recordings_and_have_to_be_there(tmp_path: Path) -> None:
    recording = write(tmp_path / "run", checkpointed())
    check_one_sentence(diagnose(recording, "--flight-recorder", str(tmp_path / "none")))
    trace = Path(__file__).parents[1] / "fixtures/traces/ddp-4-ranks-rank-1-loads-itself"
    check_one_sentence(diagnose(trace, "--flight-recorder", str(tmp_path)))
