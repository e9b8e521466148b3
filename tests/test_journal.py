"""The journal: what is replayed is what was recorded, row for row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from journal_kit import OWN, record, replayed
from recording_kit import everything
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect import ALL
from whyidle.collect.collector import Collector
from whyidle.errors import UserError
from whyidle.faults import ALL_FAULTS, Faults
from whyidle.journal import JournalWriter
from whyidle.journal_replay import read_journal
from whyidle.layout import JOURNAL, files
from whyidle.replay import replay
from whyidle.schema import VERSION
from whyidle.store import Recording
from world.machine import IDENTITY


@pytest.mark.parametrize("seed", range(4))
def test_replay_gives_the_same_rows(tmp_path: Path, seed: int) -> None:
    faults = ALL_FAULTS if seed else Faults()
    journal = record(tmp_path / "live", seed, faults, 90)
    again = replayed(journal, tmp_path / "again")
    live, twice = everything(tmp_path / "live", without=OWN), everything(again, without=OWN)
    # A run that hangs is told twice live, when it is late and when it returns; replay knows only
    # that it returned.
    assert _without_late(live.pop("collector_error")) == _without_late(twice.pop("collector_error"))
    assert live == twice
    assert len(live["gpu_activity"]) > (1400 if seed == 0 else -1)  # GPUs may be lost at once
    assert len(live["process"]) > (600 if seed == 0 else 50)


def _without_late(rows: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Leave out what only the live sampler says, and when repeats were summed up."""
    return sorted({row[3:7] for row in rows if row[4] != "late"})


def test_a_journal_cut_off_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    clock = VirtualClock(1000 * NS_PER_S)
    writer = JournalWriter(tmp_path, IDENTITY, clock)
    (path,) = files(tmp_path, JOURNAL)
    for number in range(50):
        writer.add({"collector": "x", "n": number}, writer.number)
        clock.advance(NS_PER_S // 2)
    writer.close()
    data = path.read_bytes()
    last = -1
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        try:
            lines = list(read_journal(path))[1:]
        except UserError:
            assert last == -1
            continue
        assert [line["n"] for line in lines] == list(range(len(lines)))
        assert len(lines) >= last
        last = len(lines)
    assert last >= 45


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a journal of whyidle"),
        (gzip.compress(b"{}\n"), "is not a journal of whyidle"),
        (gzip.compress(b"[1, 2]\n"), "is not a journal of whyidle"),
        (b"\xff" * 100, "is not a journal of whyidle"),
        (gzip.compress(b'{"format":"whyidle.journal/1"}\n'), "has a damaged head"),
        (
            gzip.compress(
                json.dumps(
                    {
                        "format": "whyidle.journal/1",
                        "schema_version": VERSION + 1,
                        "node": "n",
                        "boot_id": "b",
                    }
                ).encode()
                + b"\n"
            ),
            "newer whyidle",
        ),
    ],
)
def test_what_is_no_journal_is_said_in_a_sentence(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        replay(path, tmp_path / "out", ALL)


def test_collectors_that_are_gone_and_answers_that_nobody_wants_are_told(tmp_path: Path) -> None:
    journal = record(tmp_path / "live", 0, Faults(), 5)
    only: tuple[Collector, ...] = tuple(c for c in ALL if c.name == "clock")
    done = replay(journal, tmp_path / "again", only)
    assert set(done.unknown) == {collector.name for collector in ALL} - {"clock"}
    assert done.runs == 5
    with Recording([tmp_path / "again"]) as recording:
        assert recording.con.execute("SELECT count(*) FROM clock").fetchone() == (5,)


def test_a_journal_costs_little(tmp_path: Path) -> None:
    journal = record(tmp_path, 0, Faults(), 60)
    assert journal.stat().st_size < 400_000
