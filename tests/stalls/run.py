"""Runs one scenario: the counterfactual, then the job with the stall, recorded. Needs root.

    python -m stalls.run fuse_read --strength medium -o out

Leaves out/recording (as `whyidle record` makes it) and out/truth.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalls import rank_truth
from stalls.inject import busy_cpu_s, problem
from stalls.job import Ran, run_job
from stalls.scenario import Scenario, kinds, load
from stalls.truth import Own, account, length_s, own, windows

TESTS = Path(__file__).parents[1]
BASELINE_S, BASELINE_STEPS = 4.0, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run it. `folder`: where the recording and the truth go; made, and empty."""

    folder: Path
    probe: bool = True
    seconds: float | None = None
    baseline_s: float = BASELINE_S


def run(scenario: Scenario, options: Options) -> dict[str, Any]:
    """The truth of one recorded run; raises RuntimeError with the reason if it cannot be had."""
    if why := problem(scenario.setup):
        raise RuntimeError(f"{scenario.kind}: {why}")
    with tempfile.TemporaryDirectory(prefix="stall-") as name:
        work = Path(name)
        calm = None
        if scenario.baseline is not None:
            calm_s = max(options.baseline_s, BASELINE_STEPS * scenario.baseline.step_ms / 1000)
            calm = run_job(scenario.baseline, work / "calm", calm_s, ())
        record = (
            *(sys.executable, str(TESTS / "agent_cli.py"), "record"),
            *("-o", str(options.folder / "recording")),
            *(() if options.probe else ("--no-probe",)),
        )
        busy_s, ours_s = busy_cpu_s(), _children_cpu_s()
        ran = run_job(scenario.setup, work / "stalled", options.seconds or scenario.seconds, record)
        foreign_s = busy_cpu_s() - busy_s - (_children_cpu_s() - ours_s)
    truth = _truth(scenario, options, calm, ran, max(0.0, foreign_s))
    (options.folder / "truth.json").write_text(json.dumps(truth, indent=1), encoding="utf-8")
    return truth


def _truth(
    scenario: Scenario, options: Options, calm: Ran | None, ran: Ran, foreign_s: float
) -> dict[str, Any]:
    accounts, baseline = [], []
    owns = [Own() for _ in ran.runs]
    if calm is not None:
        owns = _owns(scenario, calm)
    for gpu, one in enumerate(ran.runs):
        if calm is not None:
            edges = calm.runs[gpu].training
            steps = calm.runs[gpu].steps(*edges)
            wall_s = (edges[1] - edges[0]) / 1e9
            idle_s = length_s(calm.runs[gpu].idle(*edges))
            baseline.append({"steps": steps, "wall_s": wall_s, "idle_s": idle_s})
        for name, edges in windows(scenario, one, ran.half_ns).items():
            told = account(scenario, one, name, edges, owns[gpu])
            accounts.append({**told, "rank": gpu, "uuid": ran.uuids[gpu]})
    waited = None
    # Who waits in gloo waits on the host: the GPU's timeline does not tell for whom.
    on_gpu = scenario.setup.style != "gloo"
    if scenario.setup.ranks > 1 and scenario.window == "training" and on_gpu:
        scored = [(one["begin_ns"], one["end_ns"]) for one in accounts]
        waited = rank_truth.roots(scenario, ran.runs, owns, scored)
    return {
        "kind": scenario.kind,
        "strength": scenario.strength,
        "title": scenario.title,
        "role": scenario.role,
        "subcause": scenario.subcause,
        "allowed": list(scenario.allowed),
        "probe": options.probe,
        "setup": dataclasses.asdict(scenario.setup),
        "machine": {"cpus": os.cpu_count(), "kernel": ".".join(platform.release().split(".")[:2])},
        "baseline": baseline or None,
        "windows": accounts,
        "roots": waited,
        "workers": [one.marks["workers"] for one in ran.runs],
        "foreign_cpu_s": foreign_s,
    }


def _owns(scenario: Scenario, calm: Ran) -> list[Own]:
    """What each rank of the counterfactual has by itself."""
    found = []
    for run in calm.runs:
        matrix = rank_truth.waits(run, run.training)
        waited_s = sum(seconds for (gpu, _), seconds in matrix.items() if gpu == run.gpu)
        if scenario.setup.style == "pipeline":
            parts = run.truth.split(gpu=run.gpu, begin_ns=run.training[0], end_ns=run.training[1])
            waited_s = parts.waiting_ns / 1e9
        found.append(own(run, waited_s))
    return found


def end_on_sigterm() -> None:
    """Lets a signal unwind this process, so that nothing stays mounted or limited."""

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would cut the tidying short
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + own.ru_utime + own.ru_stime


def main() -> int:
    """One run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=kinds())
    parser.add_argument("--strength", default="medium")
    parser.add_argument("--probe", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    end_on_sigterm()
    args.output.mkdir(parents=True, exist_ok=True)
    options = Options(folder=args.output.absolute(), probe=args.probe, seconds=args.seconds)
    try:
        truth = run(load(args.kind, args.strength), options)
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for window in truth["windows"]:
        sys.stdout.write(json.dumps(window) + "\n")
    sys.stdout.write(f"foreign CPU {truth['foreign_cpu_s']:.1f} s, baseline {truth['baseline']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
