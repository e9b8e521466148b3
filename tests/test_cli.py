"""The commands as a shell sees them: exit codes, streams, signals, and the JSON contract."""

from __future__ import annotations

import gzip
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trace_make import call, kernel, operator
from trace_run import check_one_sentence, check_sums, diagnose, diagnosis
from whyidle_rules import cli

FIXTURE = Path(__file__).parents[1] / "fixtures" / "traces" / "ddp-4-ranks-rank-1-loads-itself"
TIMEOUT_S = 60
# Output is buffered, as it is for whoever has not asked for anything else.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("NO_COLOR", "PYTHONUNBUFFERED")
}


def command(program: str, *arguments: str | Path) -> list[str]:
    entry = {"diagnose": "diagnose_main", "whyidle": "main"}[program]
    code = f"import sys; from whyidle_rules.cli import {entry} as run; sys.exit(run())"
    return [sys.executable, "-c", code, *map(str, arguments)]


def run(
    program: str, *arguments: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(program, *arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**ENVIRONMENT, **(env or {})},
    )


@pytest.fixture
def busy(tmp_path: Path) -> Path:
    """Return a trace of a GPU that is never idle."""
    events = [kernel(1000 * n, 1000, n) for n in range(20)]
    events += [call(1000 * n - 20, 5, n) for n in range(20)]
    path = tmp_path / "busy.json"
    path.write_text(json.dumps({"traceEvents": [*events, operator(0, 5)]}))
    return path


def test_nothing_found_is_0_and_findings_are_1(busy: Path) -> None:
    assert diagnose(busy).code == 0
    assert diagnose(FIXTURE).code == 1
    assert diagnose(busy, FIXTURE).code == 1


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        ("diagnose", [], "name what to diagnose: a recording, a trace, or a folder; or --live."),
        (
            "diagnose",
            ["--jsn", "x"],
            "diagnose: unrecognized arguments: --jsn; see diagnose --help.",
        ),
        ("diagnose", ["--js", "x"], "diagnose: unrecognized arguments: --js; see diagnose --help."),
        ("diagnose", ["--colour=red", "x"], "diagnose: argument --colour: invalid choice: 'red' "),
        ("diagnose", ["/nowhere/at-all"], "/nowhere/at-all: there is no such file or folder; "),
        (
            "whyidle",
            [],
            "whyidle: the following arguments are required: COMMAND; see whyidle --help.",
        ),
        ("whyidle", ["diagnoze", "x"], "whyidle: argument COMMAND: invalid choice: 'diagnoze' "),
        ("whyidle", ["diagnose"], "name what to diagnose: a recording, "),
        ("whyidle", ["rules"], "whyidle rules: the following arguments are required: COMMAND; "),
        ("whyidle", ["sample-trace", "x"], "whyidle sample-trace: the following arguments are "),
        (
            "whyidle",
            ["sample-trace", "x", "-o", "y", "--hz", "5x"],
            "whyidle sample-trace: argument --hz: '5x' is not a number between 0.1 and 1000; ",
        ),
    ],
)
def test_what_cannot_run_is_2_and_one_sentence(
    program: str,
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry = cli.diagnose_main if program == "diagnose" else cli.main
    try:
        code: object = entry(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(said)
    assert error.count("\n") == 1
    assert error.endswith(".\n")


def test_a_missing_path_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "rank-10.json").write_text("[]")
    outcome = diagnose(tmp_path / "rank-1O.json")
    check_one_sentence(outcome)
    assert f"did you mean {tmp_path / 'rank-10.json'}?" in outcome.stderr


def test_a_recording_is_told_from_traces(tmp_path: Path, busy: Path) -> None:
    out = tmp_path / "recording"
    made = run("whyidle", "sample-trace", busy, "-o", out)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout == f"{out}: 1 trace(s), sampled 8 times a second.\n"
    found = diagnosis(out)
    assert (found["run"]["kind"], found["gpus"][0]["source"]) == ("recording", "trace")
    # Twenty kernels of 1 ms, one after the other.
    assert found["totals"]["gpu_s"] == pytest.approx(0.02)
    assert found["totals"]["idle_s"] == 0
    again = run("whyidle", "sample-trace", busy, "-o", out)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"{out}: this folder is not empty; name a new one with -o.\n"


def test_help_answers_at_once_and_names_every_command() -> None:
    told = run("whyidle", "--help")
    assert (told.returncode, told.stderr) == (0, "")
    for name in ("diagnose", "record", "agent", "tables", "rules", "sample-trace"):
        assert f"\n    {name}" in told.stdout
    heavy = "import sys; from whyidle_rules import cli; cli.diagnose_main"
    probe = f"{heavy}; print(sorted({{'duckdb', 'numpy', 'yaml', 'rich'}} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert found.stdout == "[]\n", found.stderr


# DESIGN, "The JSON contract": fields are added, never renamed.
ROOT = {"where", "node", "rank", "cause", "subcause"}
PARTS = {"window_s", "compute_s", "exposed_comm_s", "exposed_copy_s", "idle_s"}
KEYS: dict[str, set[str]] = {
    "": {
        "schema",
        "run",
        "totals",
        "ledger",
        "root_causes",
        "gpus",
        "findings",
        "not_seen",
        "quality",
        "headline",
        "gpu_hour_cost",
        "flight_recorder",
    },
    "run": {"source", "kind", "begin_ns", "end_ns", "nodes", "job"},
    "run.job": {"world_size", "ranks"},
    "totals": {"gpu_s", "working_s", "empty_s", "spinning_s", "idle_s"},
    "ledger": {
        "cause",
        "subcause",
        "grade",
        "idle_s",
        "empty_s",
        "spinning_s",
        "share",
        "root",
    },
    "ledger.root": ROOT,
    "root_causes": {"cause", "subcause", "node", "rank", "idle_s", "share", "what_if"},
    "gpus": {
        "node",
        "gpu",
        "uuid",
        "rank",
        "wall_s",
        "working_s",
        "empty_s",
        "spinning_s",
        "underfilled_s",
        "causes",
        "waited_for",
        "trace",
        "source",
        "name",
        "steps",
    },
    "gpus.trace": PARTS,
    "gpus.steps": {"step", "begin_ns", "parts"},
    "gpus.steps.parts": PARTS,
    "findings": {
        "rule",
        "title",
        "severity",
        "cause",
        "subcause",
        "owner",
        "idle_s",
        "says",
        "evidence",
        "advice",
        "what_if",
        "why",
        "grade",
        "ranks",
        "beside_s",
    },
    "findings.what_if": {"gpu_s_returned", "gpu_hours_returned", "money_returned"},
    "root_causes.what_if": {"gpu_s_returned", "gpu_hours_returned", "money_returned"},
    "not_seen": {"what", "why", "rules"},
    "quality": {"missed_ticks", "gaps_s", "clock_error_ns", "agent_cpu_ratio"},
}
# Their keys are data: names of causes, ranks, evidence columns.
OPEN = {"gpus.causes", "gpus.waited_for", "findings.evidence"}


def keys_of(value: Any, place: str, into: dict[str, set[str]]) -> None:
    if isinstance(value, list):
        for one in value:
            keys_of(one, place, into)
    elif isinstance(value, dict) and place not in OPEN:
        known = into.setdefault(place, set(value))
        assert known == set(value), place
        for key, inner in value.items():
            keys_of(inner, f"{place}.{key}" if place else key, into)


def test_json_has_the_fields_of_the_contract_and_no_others() -> None:
    told = run("diagnose", "--json", FIXTURE)
    assert (told.returncode, told.stderr) == (1, "")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(told.stdout, parse_constant=refuse)
    assert found["schema"] == "whyidle.diagnosis/1"
    assert next(iter(found)) == "schema"
    check_sums(found)
    keys: dict[str, set[str]] = {}
    keys_of(found, "", keys)
    assert keys == KEYS
    # Nothing that a trace cannot tell reads as zero.
    assert set(found["quality"].values()) == {None}
    assert all(gpu["uuid"] is None and gpu["underfilled_s"] is None for gpu in found["gpus"])


def test_json_of_traces_without_ranks_is_null_where_nothing_is_known(busy: Path) -> None:
    found = diagnose("--json", busy).found()
    assert found["run"]["job"] is None
    assert found["gpus"][0]["rank"] is None
    assert found["gpus"][0]["waited_for"] == {}


ESCAPE = "\x1b["


def on_terminal(*arguments: str | Path, env: dict[str, str] | None = None) -> str:
    """Return what `diagnose` writes to a terminal."""
    mine, theirs = pty.openpty()
    process = subprocess.Popen(
        command("diagnose", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**ENVIRONMENT, **(env or {})},
    )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(mine, 1 << 16)
        except OSError:  # what Linux says once the other side is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(mine)
    assert process.wait(TIMEOUT_S) == 1
    return b"".join(parts).decode()


def test_colours_are_for_terminals_that_want_them() -> None:
    assert ESCAPE in on_terminal(FIXTURE)
    assert ESCAPE not in on_terminal(FIXTURE, env={"NO_COLOR": "1"})
    assert ESCAPE not in on_terminal(FIXTURE, "--colour=never")


def test_colours_elsewhere_are_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ESCAPE not in diagnose(FIXTURE).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert ESCAPE in diagnose(FIXTURE, "--colour=always").stdout


@pytest.mark.parametrize("arguments", [["--json"], ["--help"], []])
def test_a_reader_that_leaves_is_no_failure(arguments: list[str]) -> None:
    process = subprocess.Popen(
        command("diagnose", *arguments, FIXTURE),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr as complaints:
        assert complaints.read() == b""
    assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("arguments", [["--json"], ["--help"], []])
def test_a_full_disk_is_one_sentence(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            command("diagnose", *arguments, FIXTURE),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            env=ENVIRONMENT,
        )
    assert process.returncode == 2
    assert process.stderr == (
        "the output cannot be written: no space left on device; send it somewhere else.\n"
    )


@pytest.mark.parametrize("closed", ["1", "2"])
def test_closed_streams_are_no_failure(closed: str) -> None:
    words = command("diagnose", FIXTURE)
    process = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 1
    assert process.stderr == ""
    assert ("GPUs were idle" in process.stdout) == (closed == "2")


def children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


@pytest.mark.parametrize("to_all", [True, False], ids=["terminal", "kill"])
def test_ctrl_c_is_one_line_and_leaves_nobody(to_all: bool, tmp_path: Path) -> None:
    event = json.dumps(kernel(1, 1, 1)).encode() + b",\n"
    member = gzip.compress(event * 5000, 1)
    for rank in range(4):  # 50 MB each once decompressed
        with (tmp_path / f"rank-{rank}.json.gz").open("wb") as file:
            file.write(gzip.compress(b'{"traceEvents": [\n', 1))
            for _ in range(60):
                file.write(member)
    process = subprocess.Popen(
        command("diagnose", tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + TIMEOUT_S
    several = len(os.sched_getaffinity(0)) > 1
    while several and not children(process.pid):
        assert time.monotonic() < until
        assert process.poll() is None, "it ended before it could be interrupted"
        time.sleep(0.005)
    time.sleep(0.05 if several else 0.5)
    if to_all:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, error) == (130, "", "interrupted.\n")
    with pytest.raises(ProcessLookupError):  # nobody of its process group is left
        os.killpg(process.pid, 0)
