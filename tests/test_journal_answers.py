"""Answers in a journal: every kind comes back, the same ones once, secrets never, within limits."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from journal_kit import Tape
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.host import (
    Event,
    NotRecordedError,
    NvmlError,
    NvmlUnavailableError,
    Stat,
)
from whyidle.journal import JournalWriter, RecordingHost
from whyidle.journal_replay import ReplayHost, read_journal
from whyidle.layout import JOURNAL, files
from world.machine import IDENTITY


def test_every_kind_of_answer_and_error_comes_back(tmp_path: Path) -> None:
    tape = Tape(tmp_path)
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
    tape = Tape(tmp_path)
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
    tape = Tape(tmp_path)
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
    tape = Tape(tmp_path)
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
    tape = Tape(tmp_path)
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
    tape = Tape(tmp_path, limit_bytes=40_000)
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
    tape = Tape(tmp_path)

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
    tape = Tape(tmp_path)
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
