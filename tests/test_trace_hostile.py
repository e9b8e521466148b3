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

import pytest

import independent
from hostile import (
    SLACK_S,
    independent_parts,
    parts_of,
    refused,
    run,
    run_together,
    same,
    says,
    small_text,
)
from world.trace_scenarios import Job, data_parallel
from world.trace_text import Dialect, trace_text
from world.traces import simulate


@pytest.fixture(scope="module")
def text() -> str:
    return small_text()


def _check_cut(folder: Path, cuts: dict[str, bytes], readable: dict[str, str]) -> None:
    """Diagnose cut files: each must give exactly what is whole before its cut, and be named."""
    for name, read in run_together(folder, cuts).items():
        assert read.said, name
        events = independent.load_damaged(readable[name])["traceEvents"]
        expected = [independent_parts({"traceEvents": events})]
        if readable[name].rstrip("\n ,{").endswith("}") and events:
            # Cut right behind an event: it may go with what is lost.
            expected.append(independent_parts({"traceEvents": events[:-1]}))
        assert any(same(read.parts, one) for one in expected), (name, read.parts, expected)


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
            assert same(read.parts, independent_parts(exact)), name


def test_flipped_bits_in_a_gzip_are_never_passed_over(text: str, tmp_path: Path) -> None:
    whole = gzip.compress(text.encode(), mtime=0)
    expected = independent_parts(json.loads(text, parse_float=Decimal))
    files = {f"flip{seed}.json.gz": _flipped(whole, seed) for seed in range(100)}
    for name, read in run_together(tmp_path, files).items():
        assert read.said or same(read.parts, expected), name


def test_a_file_with_flipped_bits_by_itself_never_ends_in_a_traceback(
    text: str, tmp_path: Path
) -> None:
    for seed in range(1000, 1008):
        path = tmp_path / "flipped.json"
        path.write_bytes(_flipped(text.encode(), seed))
        run(path)


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
@pytest.mark.parametrize("name", ["empty", "list", "strange_events", "duckdb", "half", "elf"])
def test_foreign_content_by_itself_is_refused(suffix: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(FOREIGN[name])
    assert path.name in refused(path)


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
