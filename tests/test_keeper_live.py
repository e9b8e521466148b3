"""What the keeper does beside keeping: none of it may end it, all of it is said."""

from __future__ import annotations

import argparse
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from live_kit import AGENT, free_port, get
from recording_kit import sample
from settle_kit import Seeded, charged, expected
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect import ALL
from whyidle.errors import UserError
from whyidle.keeper_live import Around, KeeperLive, MakeEvaluator, add_options
from whyidle.layout import files
from whyidle.settle import FOLDER, Evaluator
from whyidle.store import Recording
from world.machine import IDENTITY, Machine


class Node:
    """A node in virtual time: samples a while, then the keeper looks."""

    def __init__(self, recording: Path) -> None:
        self.recording = recording
        self.clock = VirtualClock(6000 * NS_PER_S)
        self.machine = Machine(3, clock=self.clock)

    def keeper(self, make: MakeEvaluator | None = None, *arguments: str) -> KeeperLive:
        parser = argparse.ArgumentParser()
        parser.add_argument("recording", type=Path)
        add_options(parser)
        options = parser.parse_args([str(self.recording), *arguments])
        return KeeperLive(options, IDENTITY, self.machine, make)

    def go(self, live: KeeperLive, seconds: int) -> None:
        for _ in range(seconds // 10):
            host = dict.fromkeys(ALL, self.machine).__getitem__
            sample(self.recording, ALL, host, self.machine, self.clock, 10)
            live.look()


def seeded(around: Around) -> Evaluator:
    return Seeded()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "recording")


def page(live: KeeperLive) -> str:
    return live._pages("")[0].decode()


def values(live: KeeperLive, series: str) -> list[float]:
    lines = [line for line in page(live).splitlines() if line.startswith(series)]
    return [float(line.rsplit(" ", 1)[1]) for line in lines]


def test_an_agent_without_rules_serves_what_it_samples(node: Node, tmp_path: Path) -> None:
    live = node.keeper(None, "--metrics-textfile", str(tmp_path / "whyidle.prom"))
    node.go(live, 20)
    assert len(values(live, "whyidle_gpu_sm_active_ratio{")) == 2
    assert values(live, "whyidle_node_cpu_seconds_total{")
    assert values(live, 'whyidle_agent_resident_memory_bytes{part="keeper"}')
    assert values(live, "whyidle_sample_age_seconds")[0] < 5
    for pool in ("idle", "empty", "spinning", "working"):
        assert f"whyidle_gpu_{pool}_seconds_total" not in page(live)
    assert "whyidle_ledger" not in page(live)
    live.close(ended=True, merge=True)
    assert not (node.recording / FOLDER).exists()


def test_a_ledger_is_settled_and_the_rest_at_the_end(node: Node) -> None:
    live = node.keeper(seeded)
    node.go(live, 100)
    settled = values(live, "whyidle_ledger_intervals_total")
    assert settled[0] >= 2
    assert 30 <= values(live, "whyidle_ledger_lag_seconds")[0] <= 70
    shown = sum(values(live, "whyidle_gpu_idle_seconds_total{"))
    assert shown > 0
    live.close(ended=True, merge=True)
    with Recording([node.recording / FOLDER]) as opened:
        intervals = opened.con.execute(
            "SELECT begin_ns, mono_ns FROM settlement ORDER BY 1"
        ).fetchall()
        totals = opened.con.execute("SELECT sum(idle_ns)::BIGINT FROM settled").fetchone()
    assert intervals[-1][1] > node.clock.now_ns - 3 * NS_PER_S
    counts = expected([(begin, end) for begin, end in intervals])
    assert totals == (sum(ns for part, ns in counts.items() if part.cause is not None),)
    assert len(files(IDENTITY.folder(node.recording / FOLDER), ".duckdb")) == 1


def test_it_is_asked_for_nothing_to_settle_nothing(node: Node) -> None:
    live = node.keeper(seeded, "--no-settle", "--metrics-listen", f"{AGENT}:{free_port()}")
    node.go(live, 10)
    assert "whyidle_ledger" not in page(live)
    assert values(live, "whyidle_gpu_sm_active_ratio{")
    live.close(ended=False, merge=False)


def test_where_nobody_looks_nothing_is_done(node: Node) -> None:
    live = node.keeper()
    node.go(live, 20)
    assert "whyidle_gpu" not in page(live)
    live.close(ended=True, merge=True)


def test_rules_that_are_not_good_are_said_and_samples_are_served(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    def bad(around: Around) -> Evaluator:
        raise UserError("a.yaml:3:1: `clam` is not known; did you mean `claim`?")

    live = node.keeper(bad)
    node.go(live, 80)
    assert values(live, "whyidle_ledger_failing") == [1.0]
    assert values(live, "whyidle_ledger_failures_total")[0] >= 1
    assert "whyidle_gpu_idle_seconds_total" not in page(live)
    assert values(live, "whyidle_gpu_sm_active_ratio{")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "idle time cannot be charged, samples are kept: a.yaml:3:1: `clam` is not known; did you "
        "mean `claim`?"
    ]
    live.close(ended=False, merge=False)


def test_a_port_that_is_taken_is_tried_again(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "whyidle")
    with socket.socket() as taken:
        taken.bind((AGENT, 0))
        taken.listen()
        port = taken.getsockname()[1]
        live = node.keeper(None, "--metrics-listen", f"{AGENT}:{port}")
        for _ in range(3):
            live.look()
        assert len([r for r in caplog.records if "cannot serve metrics on" in r.getMessage()]) == 1
    node.go(live, 10)
    assert "whyidle_build_info" in get(port)
    live.close(ended=False, merge=False)
    with pytest.raises(OSError, match=r"refused"):
        get(port)


def test_the_page_is_served_as_it_is_published(node: Node) -> None:
    port = free_port()
    live = node.keeper(seeded, "--metrics-listen", f"{AGENT}:{port}", "--metrics-subcause")
    node.go(live, 90)
    served = get(port)
    assert 'subcause="nfs_read"' in served
    assert get(port) == served  # nothing was published in between
    live.look()
    assert values(live, 'whyidle_exporter_responses_total{code="200"}') == [2.0]
    live.close(ended=False, merge=False)


def test_a_textfile_is_whole_and_goes_with_the_agent(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "textfiles"
    path = folder / "whyidle.prom"
    live = node.keeper(seeded, "--metrics-textfile", str(path))
    node.go(live, 20)
    assert "the textfile cannot be written: No such file or directory" in caplog.text
    folder.mkdir()
    node.go(live, 20)
    assert "whyidle_build_info" in path.read_text()
    first = path.read_text()
    live.look()
    assert path.read_text() == first  # not oftener than it is read
    node.go(live, 20)
    assert path.read_text() != first
    assert [entry.name for entry in folder.iterdir()] == ["whyidle.prom"]
    live.close(ended=False, merge=False)
    assert list(folder.iterdir()) == []


def test_a_ledger_that_cannot_be_written_is_said_once_and_counts_nothing(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whyidle.spool import SpoolWriter

    live = node.keeper(seeded)
    node.go(live, 10)
    write = SpoolWriter.write

    def full(self: SpoolWriter, rows: Any) -> None:
        if FOLDER in self._folder.parts:
            raise OSError(28, "No space left on device")
        write(self, rows)

    monkeypatch.setattr(SpoolWriter, "write", full)
    node.go(live, 90)
    before = values(live, "whyidle_ledger_intervals_total")
    said = [r.getMessage() for r in caplog.records if "ledger" in r.getMessage()]
    assert said == ["the ledger cannot be written: No space left on device"]
    monkeypatch.setattr(SpoolWriter, "write", write)
    node.go(live, 20)
    assert values(live, "whyidle_ledger_intervals_total")[0] > before[0]
    assert values(live, "whyidle_ledger_failures_total") == [0.0]
    live.close(ended=True, merge=False)


def test_charges_are_of_the_interval() -> None:
    found = charged(0, 30 * NS_PER_S)
    for gpu in found.gpus:
        assert gpu.working_ns + gpu.empty_ns + gpu.spinning_ns == 30 * NS_PER_S
