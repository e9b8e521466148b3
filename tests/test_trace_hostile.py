"""Damaged, foreign and malicious content: never a traceback, never a confident wrong answer.

What could be read must be parted exactly, and damage must be said by the name of its file.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import independent
from hostile import (
    SLACK_S,
    independent_parts,
    parts_of,
    parts_of_events,
    refused,
    run,
    says,
    small_text,
)
from trace_run import Json
from world.trace_scenarios import Job, data_parallel
from world.trace_text import Dialect, trace_text
from world.traces import simulate


@pytest.fixture(scope="module")
def text() -> str:
    return small_text()


def _check_damaged(path: Path, readable: str) -> None:
    """Diagnose a cut file: refused, or exactly what is whole before the cut, and said so."""
    outcome = run(path)
    expected = independent_parts(independent.load_damaged(readable))
    if outcome.code == 2:
        assert expected is None, (path, expected)
        assert path.name in outcome.stderr
        return
    assert expected is not None, path
    assert parts_of(outcome.found()) == pytest.approx(expected, abs=SLACK_S), path
    assert says(outcome.found(), path.name), outcome.found()["not_seen"]


def test_a_text_cut_anywhere_gives_what_is_whole_before_the_cut(text: str, tmp_path: Path) -> None:
    cuts = {*range(1, 2000, 271), *range(2000, len(text) - 40, len(text) // 25)}
    for cut in sorted(cuts):
        path = tmp_path / f"cut{cut}.json"
        path.write_text(text[:cut])
        _check_damaged(path, text[:cut])


def test_a_text_cut_next_to_an_edge_of_an_event(text: str, tmp_path: Path) -> None:
    edge = text.index('"cat": "kernel"', len(text) // 2)
    begin = text.rindex("{", 0, edge)
    for cut in (begin - 2, begin - 1, begin, begin + 1, edge, text.index("}\n  }", edge) + 5):
        path = tmp_path / f"edge{cut}.json"
        path.write_text(text[:cut])
        _check_damaged(path, text[:cut])


def _inflate(data: bytes) -> str:
    return zlib.decompressobj(wbits=31).decompress(data).decode(errors="ignore")


def test_a_gzip_cut_anywhere_gives_what_is_whole_before_the_cut(text: str, tmp_path: Path) -> None:
    whole = gzip.compress(text.encode(), mtime=0)
    for cut in (1, 5, 9, 10, 11, 40, *range(200, len(whole), len(whole) // 20), len(whole) - 1):
        path = tmp_path / f"cut{cut}.json.gz"
        path.write_bytes(whole[:cut])
        _check_damaged(path, _inflate(whole[:cut]))


def test_a_cut_rank_leaves_its_peers_exact(tmp_path: Path) -> None:
    ranks = simulate(3, data_parallel(Job(ranks=3, steps=2, layers=2)))
    texts = ["".join(trace_text(rank, Dialect())) for rank in ranks]
    for rank, written in enumerate(texts):
        cut = len(written) // 2 if rank == 1 else len(written)
        (tmp_path / f"rank-{rank}.json").write_text(written[:cut])
    found = run(tmp_path).found()
    by_rank = {gpu["rank"]: gpu for gpu in found["gpus"]}
    for rank in (0, 2):
        expected = independent_parts(json.loads(texts[rank], parse_float=Decimal))
        assert expected is not None
        assert by_rank[rank]["trace"]["idle_s"] == pytest.approx(expected[-1], abs=SLACK_S)
    assert says(found, "rank-1.json")


def _flipped(data: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def test_flipped_bits_in_a_text_are_said_or_read_as_they_stand(text: str, tmp_path: Path) -> None:
    path = tmp_path / "flipped.json"
    for seed in range(100):
        damaged = _flipped(text.encode(), seed)
        path.write_bytes(damaged)
        outcome = run(path)
        if outcome.code == 2:
            continue
        found = outcome.found()
        try:
            exact = json.loads(damaged.decode(errors="replace"), parse_float=Decimal)
        except ValueError:
            assert says(found, path.name), (seed, found["not_seen"])
            continue
        if not found["not_seen"]:
            expected = independent_parts(exact)
            assert expected is not None
            assert parts_of(found) == pytest.approx(expected, rel=1e-6, abs=SLACK_S), seed


def test_flipped_bits_in_a_gzip_are_never_passed_over(text: str, tmp_path: Path) -> None:
    whole = gzip.compress(text.encode(), mtime=0)
    expected = independent_parts(json.loads(text, parse_float=Decimal))
    assert expected is not None
    path = tmp_path / "flipped.json.gz"
    for seed in range(60):
        path.write_bytes(_flipped(whole, seed))
        outcome = run(path)
        if outcome.code == 2 or says(outcome.found(), path.name):
            continue
        assert parts_of(outcome.found()) == pytest.approx(expected, abs=SLACK_S), seed


def _kernel(begin: object, length: object, **more: object) -> Json:
    args = {"device": 0, "stream": 7, "correlation": 1}
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "args": args}
    return event | {"ts": begin, "dur": length} | more


GOOD = [_kernel(1000 * n + 0.5, 400.25) for n in range(1, 20)]
NAN, INFINITY = float("nan"), float("inf")
BAD_EVENTS: dict[str, Any] = {
    "nan_ts": _kernel(NAN, 5),
    "infinite_ts": _kernel(-INFINITY, 5),
    "nan_dur": _kernel(3.0, NAN),
    "infinite_dur": _kernel(3.0, INFINITY),
    "negative_dur": _kernel(5000.0, -2000.0),
    "huge_ts": _kernel(1e300, 5),
    "huge_whole_ts": _kernel(10**30, 5),
    "huge_dur": _kernel(3.0, 1e300),
    "no_ts": {key: value for key, value in _kernel(0, 5).items() if key != "ts"},
    "no_dur": {key: value for key, value in _kernel(3.0, 0).items() if key != "dur"},
    "null_ts": _kernel(None, 5),
    "word_ts": _kernel("soon", 5),
    "list_ts": _kernel([1], 5),
    "bool_ts": _kernel(True, 5),
    "object_dur": _kernel(3.0, {"us": 5}),
    "number": 17,
    "null": None,
    "text": "kernel",
    "list": [[]],
}


@pytest.mark.parametrize("bad", BAD_EVENTS.values(), ids=BAD_EVENTS.keys())
def test_an_event_that_cannot_be_placed_is_left_out_and_said(bad: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"traceEvents": [*GOOD[:9], bad, *GOOD[9:]]}))
    outcome = run(path)
    if outcome.code == 2:
        # NaN and Infinity are not JSON: to refuse the file by name is as good.
        assert path.name in outcome.stderr
        return
    found = outcome.found()
    expected = parts_of_events(GOOD)
    assert expected is not None
    everything = parts_of(found) == pytest.approx(expected, abs=SLACK_S)
    before = parts_of_events(GOOD[:9])
    assert everything or parts_of(found) == pytest.approx(before, abs=SLACK_S), parts_of(found)
    assert says(found, path.name), found["not_seen"]


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


@pytest.mark.parametrize("odd", ODD_FIELDS.values(), ids=ODD_FIELDS.keys())
def test_an_odd_field_costs_at_most_its_event(odd: Json, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    events = [*GOOD[:9], _kernel(9700.0, 100.0, **odd), *GOOD[9:]]
    path.write_text(json.dumps({"traceEvents": events}))
    outcome = run(path)
    with_it = parts_of_events(events)
    without = parts_of_events(GOOD)
    assert with_it is not None
    assert without is not None
    found = outcome.found()
    whole = sum(gpu["trace"]["compute_s"] for gpu in found["gpus"])
    if whole == pytest.approx(with_it[1], abs=SLACK_S):
        return
    assert whole == pytest.approx(without[1], abs=SLACK_S)
    assert says(found, path.name), found["not_seen"]


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


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_odd_metadata_never_touches_theparts_of(head: Json, tmp_path: Path) -> None:
    expected = parts_of_events(GOOD)
    for name, trace in (
        ("before", head | {"traceEvents": GOOD}),
        ("after", {"traceEvents": GOOD} | head),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(trace))
        assert parts_of(run(path).found()) == pytest.approx(expected, abs=SLACK_S), name


FOREIGN: dict[str, bytes] = {
    "empty": b"",
    "spaces": b" \n" * 500,
    "zeros": b"\0" * 5000,
    "object": b'{"a": 1}',
    "list": b"[]",
    "text": b'"traceEvents"',
    "number": b"17",
    "null": b"null",
    "null_events": b'{"traceEvents": null}',
    "object_events": b'{"traceEvents": {"ph": "X"}}',
    "no_events": b'{"schemaVersion": 1, "traceEvents": []}',
    "strange_events": b'{"traceEvents": [1, "a", null, [], {}]}',
    "half": b'{"traceEvents": ',
    "package": b'{"name": "left-pad", "dependencies": {"traceEvents": ["a"]}}',
    "lines": b'{"a": 1}\n{"a": 2}\n',
    "html": b"<html><body>401</body></html>",
    "png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20,
    "elf": b"\x7fELF" + bytes(range(256)) * 20,
    "sqlite": b"SQLite format 3\0" + bytes(4096),
    "parquet": b"PAR1" + bytes(400) + b"PAR1",
    "duckdb": bytes(8) + b"DUCK" + bytes(4096),
    "gzip_of_nothing": gzip.compress(b"", mtime=0),
    "gzip_header": b"\x1f\x8b",
    "gzip_of_noise": gzip.compress(random.Random(1).randbytes(5000), mtime=0),
    "zip": b"PK\x03\x04" + bytes(200),
    "zstd": b"\x28\xb5\x2f\xfd" + bytes(200),
    "nested": b"[" * 300_000,
    "nested_events": b'{"traceEvents": [' + b"[" * 300_000,
    "nested_whole": b'{"traceEvents": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested_head": b'{"a": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_001,
}


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".duckdb", ""])
def test_foreign_content_is_refused_in_a_sentence(suffix: str, tmp_path: Path) -> None:
    for name, content in FOREIGN.items():
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(content)
        assert path.name in refused(path), name


def test_a_nested_event_costs_at_most_itself(tmp_path: Path) -> None:
    deep = '{"ph": "X", "cat": "kernel", "args": ' + '{"a":' * 50_000 + "1" + "}" * 50_001
    events = [json.dumps(event) for event in GOOD]
    path = tmp_path / "deep.json"
    path.write_text('{"traceEvents": [' + ",".join([*events[:9], deep, *events[9:]]) + "]}")
    outcome = run(path)
    if outcome.code != 2:
        assert says(outcome.found(), path.name)


def _encoded(text: str) -> dict[str, bytes]:
    return {
        "bom": b"\xef\xbb\xbf" + text.encode(),
        "crlf": text.replace("\n", "\r\n").encode(),
        "latin": text.replace("ampere_bf16", "amp\u00e8re_bf16").encode("latin-1"),
        "members": gzip.compress(text[:5000].encode()) + gzip.compress(text[5000:].encode()),
        "padded": gzip.compress(text.encode()) + bytes(512),
    }


@pytest.mark.parametrize("kind", ["bom", "crlf", "latin", "members", "padded"])
def test_the_same_trace_in_another_encoding_reads_the_same(
    kind: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(_encoded(text)[kind])
    expected = independent_parts(json.loads(text, parse_float=Decimal))
    assert parts_of(run(path).found()) == pytest.approx(expected, abs=SLACK_S)


@pytest.mark.parametrize("kind", ["utf-16", "utf-32", "gzip of gzip"])
def test_an_encoding_that_is_not_read_isrefused(kind: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    if kind == "gzip of gzip":
        path.write_bytes(gzip.compress(gzip.compress(text.encode())))
    else:
        path.write_bytes(text.encode(kind))
    outcome = run(path)
    if outcome.code == 2:
        assert path.name in outcome.stderr
    else:
        expected = independent_parts(json.loads(text, parse_float=Decimal))
        assert parts_of(outcome.found()) == pytest.approx(expected, abs=SLACK_S)
