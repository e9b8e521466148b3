"""Runs HolisticTraceAnalysis on a folder of traces and prints its figures as JSON.

Started with the interpreter of HTA's own environment: `python hta_run.py FOLDER temporal|all`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]


def main() -> None:
    """Load the folder, ask for what `diagnose` answers too, and print it."""
    folder, what = sys.argv[1:]
    analysis = TraceAnalysis(trace_dir=folder)
    found: dict[str, Any] = {}
    temporal = analysis.get_temporal_breakdown(visualize=False)
    found["temporal"] = json.loads(temporal.to_json(orient="records"))
    if what == "all":
        ranks = sorted(int(rank) for rank in temporal["rank"])
        idle, _ = analysis.get_idle_time_breakdown(ranks=ranks, visualize=False)
        found["idle"] = json.loads(idle.to_json(orient="records"))
        overlap = analysis.get_comm_comp_overlap(visualize=False)
        found["overlap"] = json.loads(overlap.to_json(orient="records"))
        try:
            stragglers = analysis.get_potential_stragglers(visualize=False)
            found["stragglers"] = [int(rank) for rank in stragglers]
        except ValueError as error:  # where only one step is annotated
            found["stragglers"] = f"{type(error).__name__}: {error}"
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
