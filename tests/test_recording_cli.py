"""`diagnose` on recordings, as a shell sees it: sources, ranges, --sql, --live, exit codes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import duckdb
import pytest

from recording_rows import (
    BEGIN_NS,
    BOOT,
    WALL_AHEAD_NS,
    Act,
    clocks,
    gpu,
    process,
    windows,
    write,
)
from recording_stories import checkpointed
from test_cli import KEYS, keys_of, run
from trace_run import check_one_sentence, diagnose, diagnosis
from whyidle.clock import NS_PER_S
from whyidle.layout import Identity
from whyidle.manifest import RECORDING, write_manifest
from whyidle.segment import new_segment
from whyidle_rules import diagnose_recording

FIXTURE = Path(__file__).parents[1] / "fixtures" / "traces" / "ddp-4-ranks-rank-1-loads-itself"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("recording") / "run", checkpointed())


def of_cause(found: dict[str, object], cause: str) -> float:
    rows = found["ledger"]
    assert isinstance(rows, list)
    return float(sum(row["idle_s"] for row in rows if row["cause"] == cause))


def test_a_recording_is_diagnosed(recording: Path) -> None:
    found = diagnosis(recording)
    assert found["totals"]["gpu_s"] == pytest.approx(30)
    assert found["totals"]["empty_s"] == pytest.approx(5)
    assert of_cause(found, "storage") == pytest.approx(5)
    assert found["run"]["begin_ns"] == BEGIN_NS + WALL_AHEAD_NS
    assert found["run"]["end_ns"] == BEGIN_NS + 30 * NS_PER_S + WALL_AHEAD_NS
    assert found["run"]["nodes"] == ["n0"]
    assert diagnose(recording).code == 1


def test_a_run_without_idle_time_is_nothing_found(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [*windows([1.0] * 80), gpu(), *clocks(0, 10)])
    assert diagnose(folder).code == 0


def test_json_has_the_same_fields_as_of_traces(recording: Path) -> None:
    found = diagnosis(recording)
    keys: dict[str, set[str]] = {}
    keys_of(found, "", keys)
    of_traces = {place for place in KEYS if not place.startswith(("gpus.trace", "gpus.steps"))}
    assert set(keys) <= set(KEYS)
    assert {place: KEYS[place] for place in keys} == keys
    assert of_traces - set(keys) <= {"run.job", "not_seen", "findings.what_if"}
    assert found["run"]["kind"] == "recording"
    assert found["gpus"][0]["trace"] is None


def test_a_segment_alone_a_glob_and_the_folder_say_the_same(recording: Path) -> None:
    (segment,) = recording.glob("*/*/*.duckdb")
    whole = diagnosis(recording)
    for source in (segment, f"{recording}/n0/*/*.duckdb", recording / "n0"):
        assert diagnosis(source)["ledger"] == whole["ledger"]


@pytest.mark.parametrize(
    ("options", "seconds", "idle"),
    [
        (["--since", "10s"], 20, 5),
        (["--until", "12500ms"], 12.5, 2.5),
        (["--since", "11s", "--until", "14s"], 3, 3),
        (["--since", "0.1m", "--until", "9s"], 3, 0),
        (["--since", "0s"], 30, 5),
        (["--until", "1h"], 30, 5),
    ],
)
def test_a_range_is_what_is_between(
    recording: Path, options: Sequence[str], seconds: float, idle: float
) -> None:
    found = diagnosis(recording, *options)
    assert found["totals"]["gpu_s"] == pytest.approx(seconds)
    assert of_cause(found, "storage") == pytest.approx(idle)
    assert found["totals"]["idle_s"] == pytest.approx(idle)


def test_a_range_may_be_told_by_the_time_of_day(recording: Path) -> None:
    """1,780,000,000 s of 1970 plus an uptime of 1,000 s is when it began."""
    begin = "2026-05-28T20:43:20"
    for since in (f"{begin}Z", f"{begin}+00:00", f"{begin.replace('T', ' ')}Z"):
        assert diagnosis(recording, "--since", since)["totals"]["gpu_s"] == pytest.approx(30)
    found = diagnosis(recording, "--since", "2026-05-28T22:43:30+02:00")
    assert found["totals"]["gpu_s"] == pytest.approx(20)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yesterday", "'yesterday' is no time of a run: take 90s, "),
        ("10", "'10' is no time of a run: "),
        ("10 m", "'10 m' is no time of a run: "),
        ("1m30", "'1m30' is no time of a run: "),
        ("-5m", ""),
        ("9" * 400 + "d", "'9999"),
        ("5h", "nothing was recorded between --since and --until: the recording is 30 s long; "),
        ("2020-01-01T00:00:00Z/x", "'2020-01-01T00:00:00Z/x' is no time of a run: "),
        ("0001-01-01", ""),
        ("9999-12-31T23:59:59Z", "nothing was recorded between --since and --until: "),
    ],
)
def test_a_time_that_is_none_is_one_sentence(recording: Path, text: str, said: str) -> None:
    outcome = diagnose(recording, f"--since={text}")
    if text == "0001-01-01" and outcome.code != 2:
        return  # long before: where the local time allows it, all of the recording
    check_one_sentence(outcome)
    assert outcome.stderr.startswith(said)


def test_a_node_without_a_clock_is_cut_by_its_own_beginning(tmp_path: Path) -> None:
    other = ("n1", BOOT)
    own = windows([1.0] * 80)
    folder = write(tmp_path / "run", {("n0", BOOT): [*own, *clocks(0, 10)], other: own})
    found = diagnosis(folder, "--since", "4s")
    assert [gpu["wall_s"] for gpu in found["gpus"]] == [pytest.approx(6)] * 2
    outcome = diagnose(folder, "--since", "2026-05-28T20:43:20Z")
    check_one_sentence(outcome)
    assert outcome.stderr.startswith("no clock was read on n1, so its time of day is not known; ")


@pytest.mark.parametrize("option", ["--since=1s", "--until=1s", "--sql=SELECT 1"])
def test_traces_have_no_ranges_and_no_tables(option: str) -> None:
    outcome = diagnose(FIXTURE, option)
    check_one_sentence(outcome)
    assert f"{option.split('=', 1)[0]} works on recordings, and {FIXTURE} is a trace" in (
        outcome.stderr
    )


def test_recordings_and_traces_are_diagnosed_apart(recording: Path) -> None:
    outcome = diagnose(recording, FIXTURE)
    check_one_sentence(outcome)
    assert outcome.stderr == (
        f"{FIXTURE} is no recording and others are; diagnose traces and recordings apart.\n"
    )


def test_without_gpus_it_cannot_tell(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [*clocks(0, 10), *process(100, [(10.0, Act())])])
    outcome = diagnose(folder)
    check_one_sentence(outcome)
    assert str(folder) in outcome.stderr
    # With JSON it is no different: a script must take it neither for healthy nor for ill.
    check_one_sentence(diagnose("--json", folder))


def test_live_wants_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose_recording, "SERVICE_FOLDER", tmp_path / "nobody")
    outcome = diagnose("--live")
    check_one_sentence(outcome)
    assert outcome.stderr.startswith(f"{tmp_path / 'nobody'} is not there: no service records ")
    outcome = diagnose("--live", tmp_path)
    check_one_sentence(outcome)
    assert "leave out the sources, or --live" in outcome.stderr


def test_live_is_the_last_ten_minutes_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second stands for each window: 15 minutes of work, the last one of them empty."""
    rows = [
        *windows([1.0] * 840 + [0.0] * 60, length_ns=NS_PER_S),
        gpu(),
        *clocks(0, 900),
    ]
    folder = write(tmp_path / "service", rows)
    monkeypatch.setattr(diagnose_recording, "SERVICE_FOLDER", folder)
    found = diagnose("--live", "--json").found()
    assert found["totals"]["gpu_s"] == pytest.approx(600)
    assert found["totals"]["idle_s"] == pytest.approx(60)
    found = diagnose("--live", "--json", "--since", "0s").found()
    assert found["totals"]["gpu_s"] == pytest.approx(900)


def test_damaged_segments_are_named_and_the_rest_counts(recording: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", checkpointed())
    (segment,) = folder.glob("*/*/*.duckdb")
    damaged = segment.with_name("20260528T210000Z-0000002000000.duckdb")
    damaged.write_bytes(segment.read_bytes()[:5000])
    found = diagnosis(folder)
    assert found["ledger"] == diagnosis(recording)["ledger"]
    (lost,) = [item for item in found["not_seen"] if damaged.name in item["what"]]
    assert lost["why"]


def test_damage_inside_a_segment_shows_while_it_is_read_and_is_left_out(
    recording: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "run", checkpointed())
    (segment,) = folder.glob("*/*/*.duckdb")
    damaged = segment.with_name("20260528T210000Z-0000002000000.duckdb")
    data = bytearray(segment.read_bytes())
    for place in range(64 << 10, len(data), 4096):  # behind what opening it reads
        data[place] ^= 0xFF
    damaged.write_bytes(data)
    found = diagnosis(folder)
    assert found["ledger"] == diagnosis(recording)["ledger"]
    assert any(damaged.name in item["what"] for item in found["not_seen"])


def test_nothing_but_damage_is_one_sentence(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", checkpointed())
    (segment,) = folder.glob("*/*/*.duckdb")
    segment.write_bytes(b"not a database" * 1000)
    outcome = diagnose(folder)
    check_one_sentence(outcome)
    assert segment.name in outcome.stderr


def test_a_newer_schema_is_refused_in_a_sentence(tmp_path: Path) -> None:
    identity = Identity(node="n0", boot_id=BOOT)
    target = identity.folder(tmp_path) / "20260528T210000Z-0000002000000.duckdb"
    target.parent.mkdir(parents=True)
    with new_segment(target, identity) as con:
        row = con.execute("SELECT * FROM seg.segment_info").fetchone()
        assert row is not None
        con.execute("DROP VIEW seg.segment_info")
        con.execute(
            "CREATE VIEW seg.segment_info AS SELECT 99::BIGINT AS schema_version, 5::BIGINT AS"
            f" schema_hash, 'n0' AS node, '{BOOT}' AS boot_id, 'x' AS duckdb_version"
        )
    write_manifest(tmp_path, RECORDING, {})
    outcome = diagnose(tmp_path)
    check_one_sentence(outcome)
    assert "was written by a newer whyidle (schema 99" in outcome.stderr


def test_an_older_schema_lacks_columns_and_is_diagnosed(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", checkpointed())
    (segment,) = folder.glob("*/*/*.duckdb")
    with duckdb.connect(str(segment)) as con:
        con.execute("ALTER TABLE process DROP COLUMN wait_channel")
        con.execute("DROP TABLE cgroup_cpu")
        (text,) = con.execute(
            "SELECT sql FROM duckdb_views() WHERE view_name = 'segment_info'"
        ).fetchone() or ("",)
        con.execute("DROP VIEW segment_info")
        con.execute(
            "CREATE VIEW segment_info AS SELECT 1::BIGINT AS schema_version, 7::BIGINT AS"
            f" schema_hash, 'n0' AS node, '{BOOT}' AS boot_id, 'x' AS duckdb_version"
        )
    assert text
    assert of_cause(diagnosis(folder), "storage") == pytest.approx(5)


def test_names_of_nodes_are_shown_as_they_are(tmp_path: Path) -> None:
    name = "knoten-ü.example"
    folder = write(tmp_path / "run", {(name, BOOT): checkpointed()})
    found = diagnosis(folder)
    assert found["run"]["nodes"] == [name]
    assert diagnose(folder).code == 1


def test_the_programs_of_a_shell_agree(recording: Path) -> None:
    one, other = (
        run("diagnose", "--json", recording),
        run("whyidle", "diagnose", "--json", recording),
    )
    assert (one.returncode, one.stderr) == (1, "")
    assert json.loads(one.stdout) == json.loads(other.stdout)
