"""`diagnose --sql` reads the recording and nothing else; Ctrl-C stops it at any moment."""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recording_rows import write
from recording_stories import checkpointed
from trace_run import Outcome, check_one_sentence, diagnose, diagnosis
from whyidle import parquet
from whyidle.store import Recording


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("recording") / "run", checkpointed())


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


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """While a query runs: DuckDB has to let go."""
    folder = write(tmp_path / "run", checkpointed())
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
