"""`make demo`: records a training run on this machine and diagnoses it. No GPU is needed.

A stand-in plays the GPU: a library that speaks NVML, with a timeline of its own behind it, built
with the C compiler. Everything else is real: the process, its files, the agent, the recording.
Where there is no compiler, a recorded run is diagnosed instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vgpu.device.serve import virtual_gpus
from vgpu.library import Unavailable

TESTS = Path(__file__).parent
ROOT = TESTS.parent
RECORDED = "fixtures/traces/ddp-4-ranks-rank-1-loads-itself"
SECONDS = 15
LIMIT_S = 90


def main() -> int:
    """Record and diagnose; return what `diagnose` does, unless that is that it found something."""
    say("A GPU made of software, a real training process, 15 seconds:")
    try:
        with tempfile.TemporaryDirectory(prefix="whyidle-demo-") as name:
            return record(Path(name))
    except Unavailable as error:
        say(f"{error}: nothing to record, so here is a run that was.")
        return diagnose(RECORDED)


def record(work: Path) -> int:
    """Record the job beside a virtual GPU, then diagnose what was recorded."""
    node_folder, out = work / "node", work / "recording"
    node_folder.mkdir()
    with virtual_gpus(node_folder, gpus=1) as node:
        env = {**os.environ, **node.env, "PYTHONPATH": str(TESTS)}
        job = [sys.executable, "-m", "demo_job", "--seconds", str(SECONDS), str(work)]
        say("$ whyidle record -o recording -- python -m demo_job")
        done = subprocess.run(
            [tool("whyidle"), "record", "-o", str(out), "--", *job], env=env, timeout=LIMIT_S
        )
    if done.returncode:
        return done.returncode
    kept = Path("whyidle-demo")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(out, kept)
    return diagnose(str(kept))


def diagnose(source: str) -> int:
    """Run `diagnose`; findings are what a demo is for."""
    say(f"$ diagnose {source}")
    code = subprocess.run([tool("diagnose"), source], cwd=Path.cwd(), timeout=LIMIT_S).returncode
    return 0 if code == 1 else code


def tool(name: str) -> str:
    """Return the command beside this Python."""
    return str(Path(sys.executable).with_name(name))


def say(text: str) -> None:
    """Print at once, in order with what the commands print."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
