"""The journal: what is replayed is what was recorded, row for row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from recording_kit import everything, sample
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect import ALL
from whyidle.collect.collector import Collector
from whyidle.errors import UserError
from whyidle.faults import ALL_FAULTS, FaultHost, Faults
from whyidle.host import (
    Answer,
    Argument,
    Event,
    NotRecordedError,
    NvmlError,
    NvmlUnavailableError,
    Stat,
)
from whyidle.journal import LIMIT_BYTES, JournalWriter, RecordingHost
from whyidle.journal_replay import ReplayHost, read_journal
from whyidle.layout import JOURNAL, files
from whyidle.replay import replay
from whyidle.runner import Due
from whyidle.schema import VERSION
from whyidle.store import Recording
from world.machine import IDENTITY, Machine

# What is not the collectors' is not replayed: the sampler's own cost, and what a hang was told as.
OWN = ("agent_self",)


def record(folder: Path, seed: int, faults: Faults, seconds: float) -> Path:
    """Sample a simulated node with a journal; return the journal."""
    clock = VirtualClock(1000 * NS_PER_S)
    machine = Machine(seed, clock=clock)
    faulty = FaultHost(machine, faults, seed, hang=clock.advance, step=clock.step_wall)
    writer = JournalWriter(folder / "journal", IDENTITY, clock)
    hosts = {collector: RecordingHost(faulty, writer) for collector in ALL}
    sample(
        folder,
        ALL,
        hosts.__getitem__,
        machine,
        clock,
        seconds,
        observer_for=hosts.__getitem__,
    )
    writer.close()
    (path,) = files(folder / "journal", JOURNAL)
    return path


def replayed(journal: Path, folder: Path) -> Path:
    done = replay(journal, folder, ALL)
    assert done.unknown == {}
    assert done.refused == []
    return folder


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


class _Asked:
    """A host whose answers are set by the test."""

    def __init__(self) -> None:
        self.clock = VirtualClock(5)
        self.answers: dict[str, object] = {}

    def _answer(self, key: str) -> object:
        answer = self.answers[key]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def read(self, path: str) -> str:
        return str(self._answer(path))

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        answer = self._answer(path)
        assert isinstance(answer, bytes)
        return answer

    def names(self, path: str) -> tuple[str, ...]:
        answer = self._answer(path)
        assert isinstance(answer, tuple)
        return answer

    def link(self, path: str) -> str:
        return str(self._answer(path))

    def stat(self, path: str) -> Stat:
        answer = self._answer(path)
        assert isinstance(answer, Stat)
        return answer

    def nvml(self, call: str, *args: Argument) -> Answer:
        return self._answer(call)  # type: ignore[return-value]

    def ask(self, question: str, *args: Argument) -> Answer:
        return self._answer(question)  # type: ignore[return-value]

    def events(self, source: str) -> tuple[Event, ...]:
        answer = self._answer(source)
        assert isinstance(answer, tuple)
        return answer

    def forget(self, prefix: str) -> None: ...

    def close(self) -> None: ...


class _Tape:
    """Records runs of a host and plays them back."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.inner = _Asked()
        self.folder = folder
        self.writer = JournalWriter(folder, IDENTITY, self.inner.clock, limit_bytes=limit_bytes)
        self.host = RecordingHost(self.inner, self.writer)

    def begin(self) -> RecordingHost:
        self.host.begin("x", Due(1))
        return self.host

    def lines(self) -> list[dict[str, object]]:
        self.writer.close()
        (path,) = files(self.folder, JOURNAL)
        return list(read_journal(path))[1:]


def test_every_kind_of_answer_and_error_comes_back(tmp_path: Path) -> None:
    tape = _Tape(tmp_path)
    stat = Stat(mode=0o100644, size_bytes=7, user_id=1000, device=3, inode=9)
    errors: dict[str, Exception] = {
        "gone": FileNotFoundError(2, "No such file or directory", "gone"),
        "dead": ProcessLookupError(3, "No such process", "dead"),
        "odd": OSError(5, "Input/output error", "odd"),
    }
    tape.inner.answers |= {
        "text": "a\udcff\n\0b",
        "bytes": bytes(range(256)),
        "dir": ("a", "b"),
        "stat": stat,
        "link": "sys/devices/x",
        "gpm": (1, 2.5, None, ("x", True), {"k": (1,)}),
        "lost": NvmlError(15, "PowerUsage", "GPU is lost"),
        "none": NvmlUnavailableError("no driver"),
        "netlink": {"eth0": 1 << 63},
        "kmsg": (Event(mono_ns=4, text="NVRM: Xid"),),
        "bug": ZeroDivisionError("x"),
        **errors,
    }
    host = tape.begin()

    def ask_all(host: RecordingHost | ReplayHost) -> list[object]:
        got: list[object] = [
            host.read("text"),
            host.read_bytes("bytes"),
            host.names("dir"),
            host.stat("stat"),
            host.link("link"),
            host.nvml("gpm", "GPU-1", 3),
            host.ask("netlink", 1),
            host.events("kmsg"),
        ]
        for name, error in errors.items():
            with pytest.raises(type(error)) as told:
                host.read(name)
            assert isinstance(told.value, OSError)
            got.append((told.value.errno, told.value.filename))
        with pytest.raises(NvmlError) as lost:
            host.nvml("lost", "GPU-1")
        got.append((lost.value.code, str(lost.value)))
        with pytest.raises(NvmlUnavailableError, match="no driver"):
            host.nvml("none")
        with pytest.raises(KeyError):
            host.ask("unknown")
        return got

    wanted = ask_all(host)
    with pytest.raises(ZeroDivisionError):
        host.read("bug")
    host.end()
    (line,) = tape.lines()
    player = ReplayHost()
    player.load(line["clocks"], line["answers"])  # type: ignore[arg-type]
    assert ask_all(player) == wanted
    with pytest.raises(RuntimeError, match="ZeroDivisionError: x"):
        player.read("bug")


def test_what_was_never_asked_is_not_recorded_rather_than_missing(tmp_path: Path) -> None:
    player = ReplayHost()
    player.load({}, {})
    with pytest.raises(NotRecordedError, match="holds no answer to read proc/stat"):
        player.read("proc/stat")


def test_unchanged_answers_are_not_written_again(tmp_path: Path) -> None:
    tape = _Tape(tmp_path)
    for text in ("a", "a", "b", "b"):
        tape.inner.answers["f"] = text
        tape.begin().read("f")
        tape.host.end()
    lines = tape.lines()
    assert [list(line["answers"]) for line in lines] == [  # type: ignore[call-overload]
        ['["read","f"]'],
        [],
        ['["read","f"]'],
        [],
    ]
    player = ReplayHost()
    got = []
    for line in lines:
        player.load(line["clocks"], line["answers"])  # type: ignore[arg-type]
        got.append(player.read("f"))
    assert got == ["a", "a", "b", "b"]


def test_a_question_asked_twice_in_a_run_gets_both_answers_again(tmp_path: Path) -> None:
    tape = _Tape(tmp_path)
    wanted = []
    for pair in (("a", "b"), ("b", "a"), ("a", "a")):
        host = tape.begin()
        for text in pair:
            tape.inner.answers["f"] = text
            wanted.append(host.read("f"))
        host.end()
    player = ReplayHost()
    got = []
    for line in tape.lines():
        player.load(line["clocks"], line["answers"])  # type: ignore[arg-type]
        got += [player.read("f"), player.read("f")]
    assert got == wanted


def test_events_are_told_once(tmp_path: Path) -> None:
    tape = _Tape(tmp_path)
    wanted = []
    for events in ((Event(mono_ns=1, text="x"),), (), (Event(mono_ns=1, text="x"),)):
        tape.inner.answers["kmsg"] = events
        wanted.append(tape.begin().events("kmsg"))
        tape.host.end()
    player = ReplayHost()
    got = []
    for line in tape.lines():
        player.load(line["clocks"], line["answers"])  # type: ignore[arg-type]
        got.append(player.events("kmsg"))
    assert got == wanted


def test_what_a_process_left_is_forgotten_with_it(tmp_path: Path) -> None:
    tape = _Tape(tmp_path)
    tape.inner.answers |= {"proc/12/stat": "a", "proc/121/stat": "b"}
    host = tape.begin()
    host.read("proc/12/stat")
    host.read("proc/121/stat")
    host.end()
    host.forget("proc/12/")
    host = tape.begin()
    host.read("proc/12/stat")
    host.read("proc/121/stat")
    host.end()
    _, second = tape.lines()
    assert list(second["answers"]) == ['["read","proc/12/stat"]']  # type: ignore[call-overload]


def test_journals_follow_each_other_within_their_limit(tmp_path: Path) -> None:
    tape = _Tape(tmp_path, limit_bytes=40_000)
    for number in range(6000):
        tape.inner.answers["f"] = str(number**20)
        tape.inner.answers["same"] = "the same"
        tape.inner.clock.advance(NS_PER_S)
        host = tape.begin()
        assert host.read("f") == str(number**20)
        assert host.read("same") == "the same"
        host.end()
    tape.writer.close()
    held = files(tmp_path, JOURNAL)
    assert len(held) == 3  # each is a little over a quarter: a fourth would not fit
    assert 20_000 < sum(path.stat().st_size for path in held) <= 40_000
    assert tape.writer.number > 6
    for path in held:  # each begins anew: it can be replayed without those before it
        _, first, second, *_ = read_journal(path)
        assert set(first["answers"]) == {'["read","f"]', '["read","same"]'}
        assert set(second["answers"]) == {'["read","f"]'}
    newest = list(read_journal(held[-1]))[-1]
    assert newest["answers"]['["read","f"]'][0]["a"] == str(5999**20)


def test_journals_of_before_count_too(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"20260101T000000Z-{number:013d}{JOURNAL}").write_bytes(bytes(10_000))
    JournalWriter(tmp_path, IDENTITY, VirtualClock(NS_PER_S), limit_bytes=40_000).close()
    assert len(files(tmp_path, JOURNAL)) == 4  # three of them, and its own


def test_a_disk_that_is_full_ends_the_journal_and_sampling_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = _Tape(tmp_path)

    def full(self: JournalWriter, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JournalWriter, "_put", full)
    for number in range(3):
        tape.inner.answers["f"] = str(number)
        assert tape.begin().read("f") == str(number)
        tape.host.end()
    assert tape.writer.ended
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"the journal in {tmp_path} ends here (No space left on device)")
    tape.writer.close()


def test_secrets_of_processes_never_reach_a_journal(tmp_path: Path) -> None:
    tape = _Tape(tmp_path)
    tape.inner.answers |= {
        "proc/7/environ": b"RANK=3\0WANDB_API_KEY=hunter2\0",
        "proc/7/cmdline": b"python\0--api-key=hunter2\0--lr=1\0",
    }
    host = tape.begin()
    assert b"hunter2" in host.read_bytes("proc/7/environ", keep=False)
    assert b"hunter2" in host.read_bytes("proc/7/cmdline", keep=False)
    host.end()
    (line,) = tape.lines()
    player = ReplayHost()
    player.load(line["clocks"], line["answers"])  # type: ignore[arg-type]
    assert player.read_bytes("proc/7/environ") == b"RANK=3"
    assert player.read_bytes("proc/7/cmdline") == b"python\0--api-key=***\0--lr=1\0"
    (path,) = files(tmp_path, JOURNAL)
    assert b"hunter2" not in gzip.decompress(path.read_bytes())


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
