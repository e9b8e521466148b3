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
    run_together,
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


def _same(these: tuple[float, ...] | None, those: tuple[float, ...] | None) -> bool:
    if these is None or those is None:
        return these is those
    return all(abs(this - that) <= SLACK_S for this, that in zip(these, those, strict=True))


def _check_cut(folder: Path, cuts: dict[str, bytes], readable: dict[str, str]) -> None:
    """Diagnose cut files: each must give exactly what is whole before its cut, and be named."""
    for name, read in run_together(folder, cuts).items():
        assert read.said, name
        events = independent.load_damaged(readable[name])["traceEvents"]
        expected = [independent_parts({"traceEvents": events})]
        if readable[name].rstrip("\n ,{").endswith("}") and events:
            # Cut right behind an event: it may go with what is lost.
            expected.append(independent_parts({"traceEvents": events[:-1]}))
        assert any(_same(read.parts, one) for one in expected), (name, read.parts, expected)


def test_a_text_cut_anywhere_gives_what_is_whole_before_the_cut(text: str, tmp_path: Path) -> None:
    edge = text.index('"cat": "kernel"', len(text) // 2)
    begin = text.rindex("{", 0, edge)
    cuts = {
        *range(0, 2000, 271),
        *range(2000, len(text) - 40, len(text) // 40),
        *range(begin - 3, begin + 3),
        *range(text.index("}\n  }", edge), text.index("}\n  }", edge) + 8),
        len(text) - 3,
    }
    readable = {f"cut{cut}.json": text[:cut] for cut in sorted(cuts)}
    _check_cut(tmp_path, {name: cut.encode() for name, cut in readable.items()}, readable)


def _inflate(data: bytes) -> str:
    return zlib.decompressobj(wbits=31).decompress(data).decode(errors="ignore")


def test_a_gzip_cut_anywhere_gives_what_is_whole_before_the_cut(text: str, tmp_path: Path) -> None:
    whole = gzip.compress(text.encode(), mtime=0)
    cuts = (5, 9, 10, 11, 40, *range(200, len(whole), len(whole) // 20), len(whole) - 1)
    files = {f"cut{cut}.json.gz": whole[:cut] for cut in cuts}
    _check_cut(tmp_path, files, {name: _inflate(content) for name, content in files.items()})


@pytest.mark.parametrize("cut", [0, 1, 700, 20_000, 50_000])
def test_a_cut_file_by_itself_is_refused_or_diagnosed(cut: int, text: str, tmp_path: Path) -> None:
    for name, content in (
        ("cut.json", text.encode()[:cut]),
        ("cut.json.gz", gzip.compress(text.encode(), 1)[: cut // 10]),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        outcome = run(path)
        assert path.name in outcome.stderr if outcome.code == 2 else says(outcome.found(), name)


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
    files = {f"flip{seed}.json": _flipped(text.encode(), seed) for seed in range(100)}
    for name, read in run_together(tmp_path, files).items():
        try:
            exact = json.loads(files[name].decode(errors="replace"), parse_float=Decimal)
        except ValueError:
            assert read.said, name
            continue
        if not read.said:
            # A digit that reads as another one cannot be told from the truth.
            assert _same(read.parts, independent_parts(exact)), name


def test_flipped_bits_in_a_gzip_are_never_passed_over(text: str, tmp_path: Path) -> None:
    whole = gzip.compress(text.encode(), mtime=0)
    expected = independent_parts(json.loads(text, parse_float=Decimal))
    files = {f"flip{seed}.json.gz": _flipped(whole, seed) for seed in range(100)}
    for name, read in run_together(tmp_path, files).items():
        assert read.said or _same(read.parts, expected), name


def test_a_file_with_flipped_bits_by_itself_never_ends_in_a_traceback(
    text: str, tmp_path: Path
) -> None:
    for seed in range(1000, 1008):
        path = tmp_path / "flipped.json"
        path.write_bytes(_flipped(text.encode(), seed))
        run(path)


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


def test_an_event_that_cannot_be_placed_is_left_out_and_said(tmp_path: Path) -> None:
    expected = parts_of_events(GOOD)
    files = {
        f"{name}.json": json.dumps({"traceEvents": [*GOOD[:9], bad, *GOOD[9:]]}).encode()
        for name, bad in BAD_EVENTS.items()
    }
    for name, read in run_together(tmp_path, files).items():
        assert _same(read.parts, expected), (name, read.parts, expected)
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
        f"{name}.json": [*GOOD[:9], _kernel(9700.0, 100.0, **odd), *GOOD[9:]]
        for name, odd in ODD_FIELDS.items()
    }
    files = {name: json.dumps({"traceEvents": events}).encode() for name, events in lists.items()}
    for name, read in run_together(tmp_path, files).items():
        if not _same(read.parts, parts_of_events(lists[name])):
            assert _same(read.parts, without), (name, read.parts, without)
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
        assert _same(read.parts, expected), (name, read.parts, expected)


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


def test_foreign_content_in_a_folder_is_named(tmp_path: Path) -> None:
    files = {f"{name}.json": content for name, content in FOREIGN.items()}
    for name, read in run_together(tmp_path, files).items():
        assert read.parts is None, name
        assert read.said, name


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".duckdb", ""])
@pytest.mark.parametrize("name", ["empty", "list", "nested_events", "duckdb", "half", "elf"])
def test_foreign_content_by_itself_is_refused(suffix: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(FOREIGN[name])
    assert path.name in refused(path)


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
def test_an_encoding_that_is_not_read_is_refused(kind: str, text: str, tmp_path: Path) -> None:
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
    events = [_kernel(1000 * n + 0.5, 400.25, **awkward) for n in range(60_000)]
    path.write_text(json.dumps({"traceEvents": events}))
    found = run(path).found()
    expected = (59_999 * 1e-3 + 400.25e-6, 60_000 * 400.25e-6, 0.0, 0.0, 59_999 * 599.75e-6)
    assert _same(parts_of(found), expected), (parts_of(found), expected)
    assert not says(found, path.name), found["not_seen"]


@pytest.mark.parametrize("awkward", AWKWARD.values(), ids=AWKWARD.keys())
def test_one_damaged_event_costs_itself(awkward: Json, tmp_path: Path) -> None:
    events = [json.dumps(_kernel(1000 * n + 0.5, 400.25, **awkward)) for n in range(2000)]
    events[1000] = events[1000].replace('"dur"', '"dur')
    path = tmp_path / "damaged.json"
    path.write_text('{"traceEvents": [' + ", ".join(events) + "]}")
    found = run(path).found()
    expected = (1999 * 1e-3 + 400.25e-6, 1999 * 400.25e-6)
    assert parts_of(found)[:2] == pytest.approx(expected, abs=SLACK_S)
    assert says(found, path.name), found["not_seen"]
