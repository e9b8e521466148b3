"""`diagnose` on recordings, as a shell sees it: sources, ranges, --sql, --live, exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import duckdb
import pytest

from recording_kit import make_row
from recording_rows import (
    BEGIN_NS,
    BOOT,
    WALL_AHEAD_NS,
    Act,
    clocks,
    event,
    gpu,
    holds,
    listed,
    page,
    process,
    windows,
    write,
)
from test_cli import KEYS, keys_of, run
from trace_run import Outcome, check_one_sentence, diagnose, diagnosis
from whyidle import parquet
from whyidle.clock import NS_PER_S
from whyidle.layout import Identity
from whyidle.manifest import RECORDING, write_manifest
from whyidle.schema.probe import ProbeLoader
from whyidle.segment import new_segment
from whyidle.store import Recording
from whyidle.table import Row
from whyidle_rules import diagnose_recording

FIXTURE = Path(__file__).parents[1] / "fixtures" / "traces" / "ddp-4-ranks-rank-1-loads-itself"


def story() -> list[Row]:
    """Return half a minute: the trainer saves a checkpoint from 10 to 15 s, else the GPU works."""
    return [
        *windows([1.0] * 80),
        *windows([0.0] * 40, at=10),
        *windows([1.0] * 120, at=15),
        gpu(name="NVIDIA H100 80GB HBM3"),
        *clocks(-1, 31),
        *process(100, [(30.0, Act(run=0.1))]),
        *holds(100, until=30),
        *listed(0, 30),
        *page(100, [n / 2 for n in range(61)], data_wait_ns=0, outside_wait_ns=0, steps=5),
        event(100, "checkpoint_save", 10, 15),
        make_row(ProbeLoader, mono_ns=BEGIN_NS, pid=100, start_ns=BEGIN_NS, place=0, workers=4),
    ]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("recording") / "run", story())


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


def sql(recording: Path, query: str) -> Outcome:
    return diagnose(recording, "--sql", query)


def test_sql_prints_rows_as_csv(recording: Path) -> None:
    outcome = sql(
        recording,
        "SELECT rule, round(sum(ns) / 1e9, 3) AS s, NULL AS n, 'a,\"b' AS t FROM grants GROUP BY 1",
    )
    assert (outcome.code, outcome.stderr) == (0, "")
    assert list(csv.reader(io.StringIO(outcome.stdout))) == [
        ["rule", "s", "n", "t"],
        ["checkpoint_write", "5.0", "", 'a,"b'],
    ]


def test_sql_sees_evidence_leftovers_and_all_tables(recording: Path) -> None:
    query = (
        "SELECT (SELECT count(*) FROM evidence), (SELECT count(*) FROM gpu_activity),"
        " (SELECT count(*) FROM leftovers)"
    )
    assert sql(recording, query).stdout.splitlines()[1] == "240,240,0"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 42 AS x -- why",
        "SELECT 42 AS x; -- why",
        "  SELECT 42 AS x ;; ",
        "FROM (VALUES (42)) t(x)",
    ],
)
def test_sql_may_end_as_it_likes(recording: Path, query: str) -> None:
    assert sql(recording, query).stdout == "x\n42\n"


def test_sql_keeps_its_order(recording: Path) -> None:
    outcome = sql(recording, "SELECT i FROM range(30000) t(i) ORDER BY i DESC")
    assert outcome.stdout.splitlines()[1:] == [str(i) for i in range(29999, -1, -1)]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELEC 1", '--sql: Parser Error: syntax error at or near "SELEC"'),
        ("SELECT nothing FROM evidence", "--sql: Binder Error: "),
        ("SELECT * FROM nobody", "--sql: Catalog Error: Table with name nobody does not exist!"),
        ("SELECT 1; SELECT 2", "--sql takes one SELECT; write one query."),
        ("", "--sql takes one SELECT; write one query."),
        ("-- nothing", "--sql takes one SELECT; write one query."),
        ("SELECT 'x'::INTEGER", "--sql: Conversion Error: "),
    ],
)
def test_sql_that_is_none_is_one_sentence(recording: Path, query: str, said: str) -> None:
    outcome = sql(recording, query)
    check_one_sentence(outcome)
    assert outcome.stderr.startswith(said)


@pytest.mark.parametrize(
    "query",
    [
        "COPY evidence TO '{out}/x.csv'",
        "COPY (SELECT 1) TO '{out}/x.csv'",
        "ATTACH '{out}/x.duckdb' AS x",
        "EXPORT DATABASE '{out}/x'",
        "CREATE TABLE x (i INTEGER)",
        "CREATE OR REPLACE VIEW evidence AS SELECT 1",
        "DELETE FROM grants",
        "DROP TABLE evidence",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "PRAGMA enable_checkpoint_on_shutdown",
        "CALL pragma_version()",
    ],
)
def test_sql_can_only_read(recording: Path, query: str, tmp_path: Path) -> None:
    outcome = sql(recording, query.replace("{out}", str(tmp_path)))
    check_one_sentence(outcome)
    assert outcome.stderr == "--sql takes one SELECT; write one query.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('{secret}')",
        "SELECT * FROM '{secret}'",
        "SELECT * FROM read_text('{secret}')",
        "SELECT * FROM read_blob('{secret}')",
        "SELECT * FROM read_json('{secret}')",
        "SELECT * FROM read_parquet('{secret}')",
        "SELECT * FROM glob('{folder}/*')",
        "SELECT * FROM query('SELECT * FROM read_text(''{secret}'')')",
        "SELECT getenv('HOME')",
    ],
)
def test_sql_reads_nothing_but_the_recording(recording: Path, query: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\nhush,1\n")
    text = query.replace("{secret}", str(secret)).replace("{folder}", str(tmp_path))
    outcome = sql(recording, text)
    check_one_sentence(outcome)
    assert "hush" not in outcome.stdout
    assert "secret.csv\n" not in outcome.stdout


def test_sql_sees_no_variable_of_ours(recording: Path) -> None:
    """DuckDB would take a name that is no table for a variable of whoever calls it."""
    check_one_sentence(sql(recording, "SELECT * FROM statements"))


@pytest.mark.parametrize("relative", [True, False])
def test_sql_reads_an_export(
    recording: Path, relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Recording([recording]) as opened:
        parquet.export(opened, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    source = Path("out") if relative else tmp_path / "out"
    assert sql(source, "SELECT count(*) AS n FROM gpu_activity").stdout == "n\n240\n"
    assert diagnosis(source)["totals"]["empty_s"] == pytest.approx(5)


def test_damaged_segments_are_named_and_the_rest_counts(recording: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", story())
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
    folder = write(tmp_path / "run", story())
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
    folder = write(tmp_path / "run", story())
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
    folder = write(tmp_path / "run", story())
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
    folder = write(tmp_path / "run", {(name, BOOT): story()})
    found = diagnosis(folder)
    assert found["run"]["nodes"] == [name]
    assert diagnose(folder).code == 1


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """While a query runs: DuckDB has to let go."""
    folder = write(tmp_path / "run", story())
    code = "import sys; from whyidle_rules.cli import diagnose_main as run; sys.exit(run())"
    query = "SELECT count(*) FROM range(100000) a, range(100000) b WHERE a.range * b.range % 7 = 3"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder), "--sql", query],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            # Starting takes a second of CPU time, the query hours of it.
            until = time.monotonic() + 60
            while cpu_s(running.pid) < 4:
                assert time.monotonic() < until
                assert running.poll() is None, "it ended before it could be interrupted"
                time.sleep(0.05)
            running.send_signal(signal.SIGINT)
            out, error = running.communicate(timeout=60)
        finally:
            running.kill()
    assert (running.returncode, out, error) == (130, "", "interrupted.\n")


@pytest.mark.parametrize("after", [0.05, 0.2, 0.4, 0.7])
def test_ctrl_c_at_any_moment_is_heard(after: float, recording: Path) -> None:
    """Also in the middle of imports, where DuckDB would swallow it."""
    code = "import sys; from whyidle_rules.cli import diagnose_main as run; sys.exit(run())"
    query = "SELECT count(*) FROM range(100000) a, range(100000) b WHERE a.range * b.range % 7 = 3"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(recording), "--sql", query],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            until = time.monotonic() + 60
            while cpu_s(running.pid) < after:
                assert time.monotonic() < until
                time.sleep(0.005)
            running.send_signal(signal.SIGINT)
            out, error = running.communicate(timeout=60)
        finally:
            running.kill()
    # Before our own code is there, Python itself ends.
    assert running.returncode in (130, -signal.SIGINT, 1), error
    assert out == ""
    assert error == "interrupted.\n" or error.endswith("KeyboardInterrupt\n")


def cpu_s(pid: int) -> float:
    """Return the CPU time of a running process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_programs_of_a_shell_agree(recording: Path) -> None:
    one, other = (
        run("diagnose", "--json", recording),
        run("whyidle", "diagnose", "--json", recording),
    )
    assert (one.returncode, one.stderr) == (1, "")
    assert json.loads(one.stdout) == json.loads(other.stdout)
