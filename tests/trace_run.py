"""Runs `diagnose` inside the test process, and checks what must hold for every diagnosis."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whyidle.causes import is_known
from whyidle_rules import cli

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run of `diagnose` left behind."""

    code: int
    stdout: str
    stderr: str

    def found(self) -> Json:
        """Return the diagnosis; fails the test where there is none."""
        assert self.code in (0, 1), (self.code, self.stderr)
        found = json.loads(self.stdout, parse_constant=_refuse)
        assert isinstance(found, dict)
        return found


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


def diagnose(*arguments: str | Path) -> Outcome:
    """Run `diagnose ARGUMENTS` in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["diagnose", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            try:
                code: object = cli.diagnose_main()
            except SystemExit as stop:
                code = stop.code
    finally:
        sys.argv = before
    assert code is None or isinstance(code, int), code
    return Outcome(code=code or 0, stdout=stdout.getvalue(), stderr=stderr.getvalue())


def diagnosis(*arguments: str | Path) -> Json:
    """Run `diagnose --json ARGUMENTS` and return what it found, after checking that it sums."""
    found = diagnose("--json", *arguments).found()
    check_sums(found)
    return found


def check_one_sentence(outcome: Outcome) -> None:
    """Check that a refusal is one line on stderr; a diagnosis beside it must be of nothing."""
    assert outcome.code == 2, outcome
    if outcome.stdout:
        found = json.loads(outcome.stdout, parse_constant=_refuse)
        check_sums(found)
        assert found["totals"]["gpu_s"] == 0, outcome
        assert found["findings"] == [], outcome
    lines = outcome.stderr.strip("\n").split("\n")
    assert len(lines) == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert len(lines[0]) > 20, outcome.stderr


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int | float):
        yield float(value)


def _near(this: float, other: float, whole: float) -> bool:
    return abs(this - other) <= 1e-9 * max(1.0, abs(whole))


def _check_gpu(gpu: Json) -> None:
    wall = gpu["wall_s"]
    assert _near(gpu["working_s"] + gpu["empty_s"] + gpu["spinning_s"], wall, wall), gpu
    assert _near(sum(gpu["causes"].values()), gpu["empty_s"] + gpu["spinning_s"], wall), gpu
    assert all(seconds >= 0 for seconds in gpu["causes"].values()), gpu
    assert sum(gpu["waited_for"].values()) <= gpu["spinning_s"] + 1e-9 * max(1.0, wall), gpu
    assert str(gpu["rank"]) not in gpu["waited_for"], gpu
    parts = gpu["trace"]
    if parts is not None:
        inside = ("compute_s", "exposed_comm_s", "exposed_copy_s", "idle_s")
        assert _near(sum(parts[part] for part in inside), parts["window_s"], wall), gpu
        assert _near(parts["compute_s"], gpu["working_s"], wall), gpu
        assert _near(parts["exposed_comm_s"], gpu["spinning_s"], wall), gpu
        assert _near(parts["exposed_copy_s"] + parts["idle_s"], gpu["empty_s"], wall), gpu


def check_sums(found: Json) -> None:
    """Check every sum that the contract promises, and that no number is a sentinel."""
    totals, ledger = found["totals"], found["ledger"]
    whole = totals["gpu_s"]
    assert all(math.isfinite(number) for number in _numbers(found))
    assert _near(totals["working_s"] + totals["idle_s"], whole, whole), totals
    assert _near(totals["empty_s"] + totals["spinning_s"], totals["idle_s"], whole), totals
    for column in ("idle_s", "empty_s", "spinning_s"):
        assert _near(sum(row[column] for row in ledger), totals[column], whole), column
        assert all(row[column] >= 0 for row in ledger), column
    assert _near(sum(row["idle_s"] for row in found["root_causes"]), totals["idle_s"], whole)
    for row in [*ledger, *found["root_causes"]]:
        assert _near(row["share"] * whole, row["idle_s"], whole), row
    by_cause: Counter[str] = Counter()
    for gpu in found["gpus"]:
        _check_gpu(gpu)
        by_cause.update(gpu["causes"])
    for column, name in (("wall_s", "gpu_s"), ("working_s",) * 2, ("empty_s",) * 2):
        assert _near(sum(gpu[column] for gpu in found["gpus"]), totals[name], whole), column
    for row in ledger:
        assert is_known(row["cause"], row["subcause"]), row
        assert is_known(row["root"]["cause"], row["root"]["subcause"]), row
        by_cause[row["cause"]] -= row["idle_s"]
    assert all(_near(rest, 0.0, whole) for rest in by_cause.values()), by_cause


def roots(found: Json) -> dict[tuple[str, str, int | None], float]:
    """Return idle seconds by (cause, subcause, rank) of their root."""
    sums: Counter[tuple[str, str, int | None]] = Counter()
    for row in found["root_causes"]:
        sums[row["cause"], row["subcause"], row["rank"]] += row["idle_s"]
    return dict(sums)


def gpus_by_rank(found: Json) -> dict[int, Json]:
    """Return the diagnosed GPUs by rank; each rank must be there once."""
    by_rank = {gpu["rank"]: gpu for gpu in found["gpus"]}
    assert len(by_rank) == len(found["gpus"]), [gpu["rank"] for gpu in found["gpus"]]
    return by_rank
