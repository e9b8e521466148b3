from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whyidle_rules.trace import stream
from whyidle_rules.trace.stream import EventStream, NotATrace, open_trace

decode: Callable[[bytes], list[Any]] = msgspec.json.Decoder(list[Any]).decode


def read(text: str | bytes, block: int = 1 << 20) -> tuple[list[Any], EventStream]:
    """Return the events of a file that is read in blocks of so many bytes, and its stream."""
    raw = text.encode() if isinstance(text, str) else text
    source = EventStream(io.BytesIO(raw), decode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "BLOCK_BYTES", block)
        return all_of(source), source


def all_of(source: EventStream) -> list[Any]:
    found: list[Any] = []
    piece: list[Any]
    for piece in source:
        found += piece
    return found


def event(number: int, **more: object) -> dict[str, object]:
    return {"ph": "X", "name": f"k{number}", "ts": number, **more}


# Whatever looks like the end of an event or of the array, inside of one.
TEXTS = st.sampled_from(
    ["k", "},{", "} , {", "}]", ']},"a":[{', '\\"},{\\', "\u00e9\u4e16", "{", ""]
)
VALUES = st.recursive(
    TEXTS | st.integers(-5, 5) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
EVENTS = st.lists(st.builds(lambda name, args: event(0, name=name, args=args), TEXTS, VALUES))
HEADERS = st.dictionaries(st.sampled_from(["schemaVersion", "x},{", "deviceProperties"]), VALUES)


@settings(max_examples=150, deadline=None)
@given(
    EVENTS,
    HEADERS,
    HEADERS,
    st.integers(1, 90),
    st.sampled_from([(",", ":"), (", ", ": ")]),
    st.sampled_from([None, 0, 2]),
)
def test_events_are_those_of_json_wherever_blocks_end(
    events: list[dict[str, object]],
    before: dict[str, object],
    after: dict[str, object],
    block: int,
    separators: tuple[str, str],
    indent: int | None,
) -> None:
    after = {f"{key}2": value for key, value in after.items()}
    text = json.dumps(
        {**before, "traceEvents": events, **after},
        separators=separators,
        indent=indent,
        ensure_ascii=False,
    )
    found, source = read(text, block)
    assert found == json.loads(text)["traceEvents"]
    assert source.header == {**before, **after}
    assert source.damage == stream.Damage()


@pytest.mark.parametrize("block", [1, 13, 1000])
def test_an_array_without_an_object_is_a_trace(block: int) -> None:
    events = [event(n, args={"a": [{"b": 1}, {"c": 2}]}) for n in range(9)]
    found, source = read("\n " + json.dumps(events) + "\n", block)
    assert found == events
    assert (source.header, source.damage.notes) == ({}, [])


def test_a_name_that_reads_like_the_header_is_no_header() -> None:
    text = '{"note": "\\"traceEvents\\": [{\\"ph\\": 1}]", "traceEvents" :\n[{"ph": "X"}]}'
    found, source = read(text, 7)
    assert found == [{"ph": "X"}]
    assert source.header == {"note": '"traceEvents": [{"ph": 1}]'}


@pytest.mark.parametrize("block", [64, 333, 1 << 20])
@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('"name"', '"name'),
        ('"k5"', '"k5'),
        ('"ts": 5', '"ts": \x00'),
        ('"ts": 5', '"ts" 5'),
        ('{"ph": "X", "name": "k5"', '{"ph": "X", "name": "k5"}'),
        ('"args": {', '"args": '),
        ('{"p": 1}', '{"p": 1'),
        ("[{", "[["),
    ],
)
def test_damage_in_the_middle_costs_one_event(good: str, bad: str, block: int) -> None:
    args = {"a": [{"p": 1}, {"q": "},{"}], "b": {"c": "}]"}}
    texts = [json.dumps(event(n, args=args)) for n in range(10)]
    assert good in texts[5]
    texts[5] = texts[5].replace(good, bad, 1)
    found, source = read('{"traceEvents": [' + ", ".join(texts) + '], "traceName": "t"}', block)
    whole = [one for one in found if isinstance(one, dict) and "ts" in one]
    assert [one["ts"] for one in whole] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert source.damage.events in (1, 2)  # a string in the damaged one may look like a boundary
    assert source.damage.notes == []
    assert source.header == {"traceName": "t"}


def test_a_damaged_last_event_does_not_hide_what_follows() -> None:
    text = '{"traceEvents": [{"ph": "X"}, {"ph": "X", "ts": }], "traceName": "t"}'
    found, source = read(text)
    assert (found, source.header) == ([{"ph": "X"}], {"traceName": "t"})
    assert source.damage == stream.Damage(events=1)


@pytest.mark.parametrize("block", [5, 1000])
def test_every_cut_keeps_what_came_before_it(block: int) -> None:
    events = [event(n, args={"a": [{"b": "}]"}, {"c": 2}]}) for n in range(4)]
    whole = json.dumps({"schemaVersion": 1, "traceEvents": events})
    ends = [whole.index(text) + len(text) for text in map(json.dumps, events)]
    for end in range(whole.index('{"ph"'), ends[-1] + 1):
        found, source = read(whole[:end], block)
        assert found == events[: sum(one <= end for one in ends)], end
        assert source.damage == stream.Damage(notes=["it is cut off"]), end


def test_an_event_before_rubbish_is_not_lost() -> None:
    found, source = read('{"traceEvents": [{"ph": "X", "ts": 1} rubbish')
    assert found == [{"ph": "X", "ts": 1}]
    assert source.damage.notes == ["it is cut off"]


def test_members_after_the_events_that_are_damaged_are_told() -> None:
    found, source = read('{"traceEvents": [{"ph": "X"}], "traceName": "t}')
    assert found == [{"ph": "X"}]
    assert source.damage.notes == ["what stands after its events is damaged"]


def test_whitespace_may_be_as_long_as_it_likes() -> None:
    space = " \n" * 20_000
    text = f'{space}{{{space}"traceEvents"{space}:{space}[{space}{{"ph":1}}{space},{space}'
    text += f'{{"ph":2}}{space}]{space},{space}"a"{space}:{space}1}}{space}'
    found, source = read(text, 4096)
    assert found == [{"ph": 1}, {"ph": 2}]
    assert (source.header, source.damage) == ({"a": 1}, stream.Damage())


def test_names_in_another_encoding_lose_their_odd_characters_only() -> None:
    text = b'{"traceEvents": [{"ph": "X", "name": "caf\xe9"}, {"ph": "X"}]}'
    found, source = read(text, 9)
    assert found == [{"ph": "X", "name": "caf\ufffd"}, {"ph": "X"}]
    assert source.damage == stream.Damage()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("GIF89a", "it is not JSON"),
        ('{"a": 1}', "it is JSON without traceEvents"),
        ('{"a": 1, "traceEv', "it is not whole JSON and holds no traceEvents"),
        ('{"a": {"traceEvents": [{"ph": 1}]}}', "it is JSON without traceEvents"),
        ("{" * 5000, "it is not whole JSON and holds no traceEvents"),
    ],
)
@pytest.mark.parametrize("block", [3, 1 << 20])
def test_what_is_no_trace_is_told(text: str, why: str, block: int) -> None:
    with pytest.raises(NotATrace, match=f"^{why}$"):
        read(text, block)


def test_too_many_damaged_events_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "DAMAGED_EVENTS_MAX", 3)
    text = '{"traceEvents": [{"ph": 0}, ' + '{"ph": }, ' * 9 + '{"ph": 1}]}'
    found, source = read(text)
    assert found == [{"ph": 0}]
    assert source.damage == stream.Damage(4, ["over 3 of its events are damaged"])


def test_an_event_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEADER_BYTES_MAX", 500)
    found, source = read('{"traceEvents": [{"ph": 1}, {"ph": "' + "x" * 5000, 50)
    assert found == [{"ph": 1}]
    assert source.damage.notes == ["one of its events is larger than 64 MiB"]


class _Failing(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > 60:
            raise OSError(5, "Input/output error")
        return super().read(size)


def test_a_disk_that_fails_costs_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 10)
    text = json.dumps({"traceEvents": [event(n) for n in range(20)]})
    source = EventStream(_Failing(text.encode()), decode)
    assert all_of(source) == [event(0)]
    assert source.damage.notes == ["reading it failed (input/output error)", "it is cut off"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_compression_is_told_by_content_not_by_name(name: str, tmp_path: Path) -> None:
    text = b'{"traceEvents": [{"ph": "X"}]}'
    for packed in (text, gzip.compress(text)):
        (tmp_path / name).write_bytes(packed)
        with open_trace(tmp_path / name) as file:
            assert file.read() == text
