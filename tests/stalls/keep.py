"""Makes a fixture of a scenario: runs it, and keeps the recording as Parquet with its truth.

python -m stalls.keep fuse_read medium -o ../fixtures/stalls       (as root, with torch)
python -m stalls.keep --list                                       (every kind and strength)
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from stalls.run import Options, end_on_sigterm, run
from stalls.scenario import kinds, load, strengths
from whyidle.parquet import export
from whyidle.redact import Redaction
from whyidle.store import Recording

# The most that a fixture may take: fifteen seconds of a rank are about 100 kB.
BYTES_MAX = 500_000
# Less of the wall time is nothing that accuracy can be told from.
STALL_SHARE_MIN = 0.03


def keep(
    kind: str, strength: str, folder: Path, *, probe: bool = True, foreign_s: float | None = None
) -> Path:
    """Runs a scenario and returns its fixture, which takes the place of an older one.

    Raises RuntimeError if others used more than `foreign_s` of CPU time meanwhile.
    """
    kept = folder / (f"{kind}-{strength}" + ("" if probe else "-no-probe"))
    with tempfile.TemporaryDirectory(prefix="kept-") as name:
        work = Path(name)
        truth = run(load(kind, strength), Options(folder=work, probe=probe))
        if foreign_s is not None and truth["foreign_cpu_s"] > foreign_s:
            raise RuntimeError(f"{kind}: others used {truth['foreign_cpu_s']:.1f} s of CPU time")
        for window in truth["windows"]:
            if (
                truth["role"] != "control"
                and window["causes"]
                and window["stall_s"] < STALL_SHARE_MIN * window["wall_s"]
            ):
                raise RuntimeError(f"{kind} {strength}: no stall to speak of: {_line(window)}")
        with Recording([work / "recording"]) as recording:
            if recording.damaged:
                raise RuntimeError(f"{kind}: damaged: {recording.damaged[0]}")
            export(recording, work / "parquet", Redaction())
        size = sum(path.stat().st_size for path in (work / "parquet").rglob("*.parquet"))
        if size > BYTES_MAX:
            raise RuntimeError(f"{kind}: {size} bytes are more than {BYTES_MAX}")
        for window in truth["windows"]:
            sys.stdout.write(f"{kind} {strength} {window['name']}: {_line(window)}\n")
        sys.stdout.write(f"foreign CPU {truth['foreign_cpu_s']:.1f} s, {size} bytes\n")
        if kept.exists():
            shutil.rmtree(kept)
        kept.mkdir(parents=True)
        shutil.move(work / "parquet", kept / "recording")
        shutil.move(work / "truth.json", kept / "truth.json")
    return kept


def _line(window: dict[str, Any]) -> str:
    return (
        f"wall {window['wall_s']:.1f} s, idle {window['idle_s']:.2f} s, "
        f"stall {window['stall_s']:.2f} s, {window['steps']} steps"
    )


def main() -> int:
    """One fixture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--probe", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--foreign-max", type=float, help="CPU seconds of others, else no fixture")
    parser.add_argument("kind", nargs="?", choices=kinds())
    parser.add_argument("strength", nargs="?", default="medium")
    parser.add_argument("-o", "--output", type=Path, default=Path("fixtures/stalls"))
    args = parser.parse_args()
    if args.list or args.kind is None:
        for kind in kinds():
            sys.stdout.write("".join(f"{kind} {strength}\n" for strength in strengths(kind)))
        return 0
    end_on_sigterm()
    try:
        keep(args.kind, args.strength, args.output, probe=args.probe, foreign_s=args.foreign_max)
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
