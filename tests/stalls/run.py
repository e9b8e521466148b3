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
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stalls.inject import Ground, busy_cpu_s, ground, problem, wait_for
from stalls.scenario import Scenario, Setup, kinds, load
from stalls.truth import Run, account, length_s, load_run, windows
from vgpu.device.serve import VirtualNode, virtual_gpus

TESTS = Path(__file__).parents[1]
BASELINE_S = 4.0
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run it. `folder`: where the recording and the truth go; made, and empty."""

    folder: Path
    probe: bool = True
    seconds: float | None = None
    baseline_s: float = BASELINE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    run: Run
    uuid: str
    half_ns: int | None


def run(scenario: Scenario, options: Options) -> dict[str, Any]:
    """The truth of one recorded run; raises RuntimeError with the reason if it cannot be had."""
    if why := problem(scenario.setup):
        raise RuntimeError(f"{scenario.kind}: {why}")
    seconds = options.seconds or scenario.seconds
    own_s, baseline = 0.0, None
    with tempfile.TemporaryDirectory(prefix="stall-") as name:
        work = Path(name)
        if scenario.baseline is not None:
            calm = _job(scenario.baseline, work / "calm", options.baseline_s, ())
            edges = calm.run.training
            steps, idle_s = calm.run.steps(*edges), length_s(calm.run.idle(*edges))
            own_s = idle_s / steps
            baseline = {"steps": steps, "wall_s": (edges[1] - edges[0]) / 1e9, "idle_s": idle_s}
        recording = options.folder / "recording"
        record = (
            *(sys.executable, str(TESTS / "agent_cli.py"), "record", "-o", str(recording)),
            *(() if options.probe else ("--no-probe",)),
            "--",
        )
        before = busy_cpu_s(), _children_cpu_s()
        ran = _job(scenario.setup, work / "stalled", seconds, record)
        ours = _children_cpu_s() - before[1]
        foreign_s = max(0.0, busy_cpu_s() - before[0] - ours)
    cuts = windows(scenario, ran.run, ran.half_ns)
    truth = {
        "kind": scenario.kind,
        "strength": scenario.strength,
        "title": scenario.title,
        "role": scenario.role,
        "subcause": scenario.subcause,
        "allowed": list(scenario.allowed),
        "probe": options.probe,
        "setup": dataclasses.asdict(scenario.setup),
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
        "uuid": ran.uuid,
        "baseline": baseline,
        "windows": [account(scenario, ran.run, *cut, own_s) for cut in cuts.items()],
        "workers": ran.run.marks["workers"],
        "foreign_cpu_s": foreign_s,
    }
    (options.folder / "truth.json").write_text(json.dumps(truth, indent=1), encoding="utf-8")
    return truth


def _job(setup: Setup, work: Path, seconds: float, record: tuple[str, ...]) -> _Ran:
    """One run of the job on a node of its own."""
    work.mkdir(parents=True)
    with ground(setup, work / "ground") as place:
        with virtual_gpus(work, gpus=1) as node:
            uuid = node.standin.state.gpus[0].uuid
            half_ns = _train(setup, work, seconds, (*record, *place.command), node, place)
        return _Ran(run=load_run(work), uuid=uuid, half_ns=half_ns)


def _train(
    setup: Setup,
    work: Path,
    seconds: float,
    before: tuple[str, ...],
    node: VirtualNode,
    place: Ground,
) -> int | None:
    """Runs the trainer; when its surroundings changed, if they do."""
    started, told = work / "started", work / "job.json"
    paths = {
        "data": place.data,
        "out": place.out,
        "started": started,
        "marks": work / "marks.json",
    }
    job = {"setup": dataclasses.asdict(setup), "seconds": seconds}
    job.update({name: str(path) for name, path in paths.items()})
    told.write_text(json.dumps(job), encoding="utf-8")
    env = {**os.environ, **node.env, "OMP_NUM_THREADS": "1"}
    words = [*before, sys.executable, "-m", "stalls.train", str(told)]
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_for(started, START_TIMEOUT_S, process)
            half_ns = None
            if setup.half:
                time.sleep(seconds / 2)
                half_ns = time.monotonic_ns()
                place.change()
            code = process.wait(seconds * 4 + START_TIMEOUT_S)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{error}; it said: {_tail(work / 'log')}") from error
        finally:
            _end(process)
    if code:
        raise RuntimeError(f"the job failed with {code}; it said: {_tail(work / 'log')}")
    return half_ns


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what still runs: the recorder passes the signal on to the job."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_on_sigterm() -> None:
    """Lets a signal unwind this process, so that nothing stays mounted or limited."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _tail(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-2000:]


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
