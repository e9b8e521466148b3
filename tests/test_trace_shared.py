"""Recorded runs of others: parts, waits, causes and verdicts, against what was computed apart."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import independent
from trace_run import check_one_sentence, check_sums, diagnose, diagnosis, gpus_by_rank, roots

pytestmark = pytest.mark.shared

RUNS = Path(__file__).parents[1].parent / "shared" / "recorded-runs"
WHOLE = 1e-3
RANKS_AGREE = 0.05

TORCHREC = "kineto-torchrec-4xV100/"
SLEEP = TORCHREC + "sst_long_a2a_optimizer"
MEGATRON = "kineto-megatron-tp8-8xA100"
LOADER = "kineto-tbplugin-resnet50-dataloader"
# Ranks of one run lie in one folder; the files of the others have nothing to do with each other.
ONE_RUN = (MEGATRON, SLEEP, SLEEP + "_3", SLEEP + "_qcomm_trace")
APART = (
    "kineto-hta-single",
    "kineto-nanogpt-ab",
    "kineto-param-single",
    LOADER,
    "kineto-tracelens",
)


def _folder(name: str) -> Path:
    folder = RUNS / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not beside this checkout")
    return folder


def _expected(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "expected-independent.json").read_text())
    assert isinstance(found, dict)
    return found


@functools.cache
def _diagnosed(*sources: Path) -> dict[str, Any]:
    return diagnosis(*sources)


@functools.cache
def _exact(path: Path) -> tuple[int | None, independent.Parts | None]:
    """Return the rank and the independent parts of a trace; the trace itself is large."""
    trace = independent.read(path)
    return trace.rank, independent.partition(trace.events)


def _traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json.gz"))


def _check_parts(gpu: dict[str, Any], path: Path) -> None:
    _, expected = _exact(path)
    assert expected is not None
    for part in ("window", "compute", "exposed_comm", "exposed_copy", "idle"):
        difference = gpu["trace"][f"{part}_s"] - getattr(expected, f"{part}_ns") / 1e9
        slack = WHOLE * expected.window_ns / 1e9
        assert abs(difference) <= slack, (path, part, gpu["trace"], expected)


@pytest.mark.parametrize("name", ONE_RUN)
def test_parts_of_each_rank_of_a_run(name: str) -> None:
    folder = _folder(name)
    found = gpus_by_rank(_diagnosed(*_traces(folder)))
    assert len(found) == len(_traces(folder))
    for path in _traces(folder):
        rank, _ = _exact(path)
        assert rank is not None
        _check_parts(found[rank], path)


@pytest.mark.parametrize("name", APART)
def test_parts_of_each_trace_that_stands_alone(name: str) -> None:
    for path in _traces(_folder(name)):
        if _exact(path)[1] is None:
            check_one_sentence(diagnose("--json", path))
            continue
        (gpu,) = _diagnosed(path)["gpus"]
        _check_parts(gpu, path)


@pytest.mark.parametrize("name", ONE_RUN + APART)
def test_the_independent_computation_agrees_with_the_recorded_one(name: str) -> None:
    """The recorded one has copies before communication; all else must be equal to the nanosecond.

    So its exposed communication is ours less what copies cover, its idle time and compute the same.
    """
    folder = _folder(name)
    for entry in _expected(folder)["ranks"]:
        _, parts = _exact(folder / entry["file"])
        if parts is None:
            assert entry["gpu_events"] == 0
            continue
        whole = entry["whole"]
        assert parts.window_ns == whole["window_ns"]
        assert parts.idle_ns == whole["idle_ns"]
        assert parts.compute_ns == whole["compute_ns"]
        assert whole["comm_exposed_ns"] <= parts.exposed_comm_ns
        assert parts.exposed_comm_ns - whole["comm_exposed_ns"] <= whole["mem_ns"]


def _matrix(found: dict[str, Any]) -> dict[int, dict[int, float]]:
    return {
        rank: {int(late): seconds for late, seconds in gpu["waited_for"].items()}
        for rank, gpu in gpus_by_rank(found).items()
    }


def test_megatron_ranks_wait_for_those_who_came_last() -> None:
    folder = _folder(MEGATRON)
    found = _matrix(_diagnosed(*_traces(folder)))
    expected = _expected(folder)["cross_rank"]["wait_matrix_ns"]
    for rank, row in expected.items():
        for late, wait_ns in row.items():
            seconds = found[int(rank)].get(int(late), 0.0)
            # Recorded waits are matched by the clock, these by order: microseconds per collective.
            slack = max(RANKS_AGREE * wait_ns / 1e9, 84 * 10e-6)
            assert abs(seconds - wait_ns / 1e9) <= slack, (rank, late, seconds, wait_ns)


@pytest.mark.parametrize("name", [MEGATRON, SLEEP, SLEEP + "_qcomm_trace"])
def test_waits_equal_the_independent_ones(name: str) -> None:
    folder = _folder(name)
    paths = _traces(folder)
    found = _matrix(_diagnosed(*paths))
    expected = independent.wait_matrix(independent.read(path) for path in paths)
    for rank, row in expected.items():
        for late in row.keys() | found[rank].keys():
            wait_s, seconds = row.get(late, 0) / 1e9, found[rank].get(late, 0.0)
            assert abs(seconds - wait_s) <= max(RANKS_AGREE * wait_s, 1e-3), (
                name,
                rank,
                late,
                seconds,
                wait_s,
            )


@pytest.mark.parametrize("name", [SLEEP + "_3", SLEEP + "_qcomm_trace"])
def test_waits_of_overlapping_exchanges_stay_within_the_independent_ones(name: str) -> None:
    """Exchanges of several streams overlap here: who owns a shared second is a matter of rule."""
    paths = _traces(_folder(name))
    found = _matrix(_diagnosed(*paths))
    most = independent.wait_matrix((independent.read(path) for path in paths), exposed=False)
    for rank in (0, 1, 3):
        for late, seconds in found[rank].items():
            assert seconds <= most[rank].get(late, 0) / 1e9 + 1e-3, (rank, late)
        assert max(found[rank], key=lambda late: found[rank][late]) == 2, found[rank]


def test_the_sleeping_rank_is_named_and_its_peers_only_wait() -> None:
    folder = _folder(SLEEP)
    found = _diagnosed(*_traces(folder))
    gpus = gpus_by_rank(found)
    recorded = _expected(folder)["cross_rank"]["wait_for_last_arrival_ns"]
    for rank in (0, 1, 3):
        wait_s = recorded[str(rank)] / 1e9
        assert gpus[rank]["waited_for"]["2"] == pytest.approx(wait_s, rel=RANKS_AGREE)
    assert not gpus[2]["waited_for"]
    by_root = roots(found)
    top = max(by_root, key=lambda key: by_root[key])
    assert (top[0], top[2]) == ("host_pause", 2)
    # Rank 2 itself stood for 3 x 1 s, the three others for as long each.
    of_rank_2 = sum(
        seconds
        for (cause, _, rank), seconds in by_root.items()
        if (cause, rank) == ("host_pause", 2)
    )
    expected_s = 3.0 + sum(recorded[str(rank)] for rank in (0, 1, 3)) / 1e9
    assert of_rank_2 == pytest.approx(expected_s, rel=RANKS_AGREE)
    carried_s = sum(row["idle_s"] for row in found["ledger"] if row["root"]["where"] == "rank")
    assert carried_s == pytest.approx(expected_s - 3.0, rel=RANKS_AGREE)
    assert "rank 2" in found["headline"]
    (finding,) = (one for one in found["findings"] if one["subcause"] == "main_thread")
    assert finding["ranks"] == [2]
    assert finding["severity"] == "critical"
    assert finding["what_if"]["gpu_s_returned"] == pytest.approx(expected_s, rel=RANKS_AGREE)


def test_data_loader_workers_turn_the_verdict() -> None:
    folder = _folder(LOADER)
    without, four = sorted(_traces(folder))
    slow, fast = _diagnosed(without), _diagnosed(four)
    recorded = {Path(entry["file"]).name: entry for entry in _expected(folder)["ranks"]}
    inside_s = recorded[without.name]["whole"]["idle_inside_dataloader_ns"] / 1e9
    assert inside_s == pytest.approx(0.287, abs=0.001)
    causes = slow["gpus"][0]["causes"]
    assert max(causes, key=causes.get) == "cpu_preprocessing"
    assert causes["cpu_preprocessing"] == pytest.approx(inside_s, rel=RANKS_AGREE)
    assert slow["findings"][0]["cause"] == "cpu_preprocessing"
    assert slow["findings"][0]["subcause"] == "main_thread"
    others = fast["gpus"][0]["causes"]
    assert others.get("cpu_preprocessing", 0.0) <= 0.01 * fast["totals"]["gpu_s"]
    assert all(finding["cause"] != "cpu_preprocessing" for finding in fast["findings"])


def test_a_trace_without_gpu_says_so() -> None:
    path = _folder("kineto-hta-single") / "rank_non_gpu__rank_non_gpu.json.gz"
    outcome = diagnose("--json", path)
    check_one_sentence(outcome)
    assert path.name in outcome.stderr
    assert "ProfilerActivity.CUDA" in outcome.stderr


def test_no_recorded_file_of_any_kind_breaks_it() -> None:
    files = [path for path in sorted(_folder(".").rglob("*")) if path.is_file()]
    assert len(files) > 100
    for path in files:
        outcome = diagnose("--json", path)
        assert "Traceback" not in outcome.stderr, path
        if outcome.code == 2:
            check_one_sentence(outcome)
        else:
            check_sums(outcome.found())


def test_every_folder_is_diagnosed_or_refused_in_a_sentence() -> None:
    folders = [path for path in sorted(_folder(".").rglob("*")) if path.is_dir()]
    for path in folders:
        outcome = diagnose("--json", path)
        if outcome.code == 2:
            check_one_sentence(outcome)
        else:
            check_sums(outcome.found())
