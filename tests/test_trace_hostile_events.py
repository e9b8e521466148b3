"""Hostile events: times that are none, odd fields, look-alikes of an event's edge.

Whatever cannot be placed is left out and said; everything else is parted exactly.
"""

from __future__ import annotations

import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from hostile import (
    SLACK_S,
    independent_parts,
    parts_of,
    parts_of_events,
    run,
    run_together,
    same,
    says,
    small_text,
)
from trace_run import Json


@pytest.fixture(scope="module")
def text() -> str:
    return small_text()


def kernel(begin: object, length: object, **more: object) -> Json:
    args = {"device": 0, "stream": 7, "correlation": 1}
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "args": args}
    return event | {"ts": begin, "dur": length} | more


GOOD = [kernel(1000 * n + 0.5, 400.25) for n in range(1, 20)]
NAN, INFINITY = float("nan"), float("inf")
BAD_EVENTS: dict[str, Any] = {
    "nan_ts": kernel(NAN, 5),
    "infinite_ts": kernel(-INFINITY, 5),
    "nan_dur": kernel(3.0, NAN),
    "infinite_dur": kernel(3.0, INFINITY),
    "negative_dur": kernel(5000.0, -2000.0),
    "huge_ts": kernel(1e300, 5),
    "huge_whole_ts": kernel(10**30, 5),
    "huge_dur": kernel(3.0, 1e300),
    "no_ts": {key: value for key, value in kernel(0, 5).items() if key != "ts"},
    "no_dur": {key: value for key, value in kernel(3.0, 0).items() if key != "dur"},
    "null_ts": kernel(None, 5),
    "word_ts": kernel("soon", 5),
    "list_ts": kernel([1], 5),
    "bool_ts": kernel(True, 5),
    "object_dur": kernel(3.0, {"us": 5}),
    "number": 17,
    "null": None,
    "text": "kernel",
    "list": [[]],
}


def test_an_event_that_cannot_be_placed_is_left_out_and_said(tmp_path: Path) -> None:
    expected = parts_of_events(GOOD)
    files = {
        f"{name}.json": json.dumps({"traceEvents": [*GOOD[:9], bad, *GOOD[9:]]}).encode()
        for name, bad in BAD_EVENTS.items()
    }
    for name, read in run_together(tmp_path, files).items():
        assert same(read.parts, expected), (name, read.parts, expected)
        assert read.said, name


ODD_FIELDS: dict[str, Json] = {
    "name_number": {"name": 5},
    "name_null": {"name": None},
    "args_list": {"args": [1, 2]},
    "args_null": {"args": None},
    "args_text": {"args": "device 0"},
    "correlation_text": {"args": {"device": 0, "stream": 7, "correlation": "one"}},
    "correlation_huge": {"args": {"device": 0, "stream": 7, "correlation": 10**40}},
    "correlation_float": {"args": {"device": 0, "stream": 7, "correlation": 1.5}},
    "stream_text": {"args": {"device": 0, "stream": "seven", "correlation": 3}},
    "stream_negative": {"args": {"device": 0, "stream": -1, "correlation": 3}},
    "tid_list": {"tid": [7]},
    "tid_huge": {"tid": 2**70},
    "pid_null": {"pid": None},
    "group_number": {"args": {"device": 0, "stream": 7, "Process Group Name": 5, "Seq": "x"}},
    "escapes": {"name": "gemm\x1b[31m\x00\u202e"},
    "surrogate": {"name": "gemm\ud800"},
    "long_name": {"name": "k" * 300_000},
}


def test_an_odd_field_costs_at_most_its_event(tmp_path: Path) -> None:
    without = parts_of_events(GOOD)
    lists = {
        f"{name}.json": [*GOOD[:9], kernel(9700.0, 100.0, **odd), *GOOD[9:]]
        for name, odd in ODD_FIELDS.items()
    }
    files = {name: json.dumps({"traceEvents": events}).encode() for name, events in lists.items()}
    for name, read in run_together(tmp_path, files).items():
        if not same(read.parts, parts_of_events(lists[name])):
            assert same(read.parts, without), (name, read.parts, without)
            assert read.said, name


def test_garbage_between_events_costs_nothing_else(text: str, tmp_path: Path) -> None:
    chance = random.Random(5)
    trace = json.loads(text)
    junk: list[Any] = [None, 5, "x", [], {}, {"ph": 7}, {"ph": "X", "cat": [], "ts": {}}]
    mixed: list[Any] = []
    for event in trace["traceEvents"]:
        mixed.append(event)
        if chance.random() < 0.1:
            mixed.append(chance.choice(junk))
    path = tmp_path / "junk.json"
    path.write_text(json.dumps(trace | {"traceEvents": mixed}))
    found = run(path).found()
    expected = independent_parts(json.loads(text, parse_float=Decimal))
    assert parts_of(found) == pytest.approx(expected, abs=SLACK_S)


HEADS: dict[str, Json] = {
    "rank_text": {"distributedInfo": {"rank": "zero"}},
    "rank_negative": {"distributedInfo": {"rank": -1}},
    "rank_huge": {"distributedInfo": {"rank": 10**30}},
    "rank_float": {"distributedInfo": {"rank": 1.5}},
    "rank_bool": {"distributedInfo": {"rank": True}},
    "info_list": {"distributedInfo": [0]},
    "info_null": {"distributedInfo": None},
    "world_text": {"distributedInfo": {"rank": 0, "world_size": "many"}},
    "pg_config": {"distributedInfo": {"rank": 0, "pg_config": {"a": [1]}}},
    "devices": {"deviceProperties": "A100"},
    "device": {"deviceProperties": [None, 5, {"id": "x", "name": 7}]},
    "base": {"baseTimeNanoseconds": "yesterday"},
    "base_huge": {"baseTimeNanoseconds": 10**40},
    "schema": {"schemaVersion": {"a": 1}},
}


def test_odd_metadata_never_touches_the_parts(tmp_path: Path) -> None:
    expected = parts_of_events(GOOD)
    files = {}
    for name, head in HEADS.items():
        files[f"{name}-before.json"] = json.dumps(head | {"traceEvents": GOOD}).encode()
        files[f"{name}-after.json"] = json.dumps({"traceEvents": GOOD} | head).encode()
    for name, read in run_together(tmp_path, files).items():
        assert same(read.parts, expected), (name, read.parts, expected)


def test_a_nested_event_costs_at_most_itself(tmp_path: Path) -> None:
    deep = '{"ph": "X", "cat": "kernel", "args": ' + '{"a":' * 50_000 + "1" + "}" * 50_001
    events = [json.dumps(event) for event in GOOD]
    path = tmp_path / "deep.json"
    path.write_text('{"traceEvents": [' + ",".join([*events[:9], deep, *events[9:]]) + "]}")
    outcome = run(path)
    if outcome.code != 2:
        assert says(outcome.found(), path.name)


AWKWARD: dict[str, Json] = {
    "objects_in_args": {"args": {"device": 0, "stream": 7, "x": [{"a": 1}, {"b": 2}]}},
    "braces_in_name": {"name": "f(int)::{lambda()#1}, {lambda()#2}"},
    "brackets_in_name": {"name": 'g(a[0], b) }] "traceEvents": [ {'},
    "quotes_in_name": {"name": '"}, {"\\'},
}


@pytest.mark.parametrize("awkward", AWKWARD.values(), ids=AWKWARD.keys())
def test_what_looks_like_the_edge_of_an_event_is_none(awkward: Json, tmp_path: Path) -> None:
    """The file is longer than any block that a reader may take at once."""
    path = tmp_path / "awkward.json"
    events = [kernel(1000 * n + 0.5, 400.25, **awkward) for n in range(60_000)]
    path.write_text(json.dumps({"traceEvents": events}))
    found = run(path).found()
    expected = (59_999 * 1e-3 + 400.25e-6, 60_000 * 400.25e-6, 0.0, 0.0, 59_999 * 599.75e-6)
    assert same(parts_of(found), expected), (parts_of(found), expected)
    assert not says(found, path.name), found["not_seen"]


@pytest.mark.parametrize("awkward", AWKWARD.values(), ids=AWKWARD.keys())
def test_one_damaged_event_costs_itself(awkward: Json, tmp_path: Path) -> None:
    events = [json.dumps(kernel(1000 * n + 0.5, 400.25, **awkward)) for n in range(2000)]
    events[1000] = events[1000].replace('"dur"', '"dur')
    path = tmp_path / "damaged.json"
    path.write_text('{"traceEvents": [' + ", ".join(events) + "]}")
    found = run(path).found()
    expected = (1999 * 1e-3 + 400.25e-6, 1999 * 400.25e-6)
    assert parts_of(found)[:2] == pytest.approx(expected, abs=SLACK_S)
    assert says(found, path.name), found["not_seen"]


EDGES: dict[str, list[Json]] = {
    "one_empty_event": [kernel(5.0, 0.0)],
    "one_event": [kernel(5.0, 2.5)],
    "at_zero": [kernel(0, 2.5), kernel(10.5, 1)],
    "before_zero": [kernel(-7.25, 2.5), kernel(10.5, 1)],
    "late_century": [kernel(4e15, 2.5), kernel(4e15 + 64, 1)],
    "all_empty": [kernel(5.0, 0), kernel(9.0, 0)],
    "always_busy": [kernel(5.0, 10), kernel(15.0, 10)],
    "months": [kernel(0, 1), kernel(8e12, 1)],
    "only_copies": [kernel(5.0, 10, cat="gpu_memcpy", name="Memcpy DtoD (Device -> Device)")],
    "only_communication": [kernel(5.0, 10, name="ncclDevKernel_Broadcast_RING_LL(int)")],
}


@pytest.mark.parametrize("events", EDGES.values(), ids=EDGES.keys())
def test_edges_of_time_are_parted_exactly(events: list[Json], tmp_path: Path) -> None:
    path = tmp_path / "edge.json"
    path.write_text(json.dumps({"traceEvents": events}))
    outcome = run(path)
    if outcome.code == 2:
        assert path.name in outcome.stderr
        return
    assert same(parts_of(outcome.found()), parts_of_events(events))


def test_a_process_that_drives_two_gpus_has_two(tmp_path: Path) -> None:
    second = {"device": 1, "stream": 7, "correlation": 2}
    events = [*GOOD, *(kernel(1000 * n, 700, pid=1, args=second) for n in range(5, 9))]
    path = tmp_path / "two.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = run(path).found()
    parts = [gpu["trace"]["compute_s"] for gpu in found["gpus"]]
    assert parts == pytest.approx([19 * 400.25e-6, 4 * 700e-6])
    assert [gpu["gpu"] for gpu in found["gpus"]] == [0, 1]
