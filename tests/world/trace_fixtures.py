"""Writes the trace fixtures: `PYTHONPATH=tests python -m world.trace_fixtures fixtures/traces`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from world.trace_scenarios import loading_itself
from world.trace_text import Dialect, packed, trace_text
from world.traces import simulate

DDP_NAME = "ddp-4-ranks-rank-1-loads-itself"


def fixtures() -> Iterator[tuple[str, str]]:
    """Yield the path under the fixture folder and the text of each trace."""
    ranks = simulate(4, loading_itself(True, first_step=0, steps=10), seed=20)
    for rank in ranks:
        text = "".join(trace_text(rank, Dialect()))
        yield f"{DDP_NAME}/rank-{rank.index}.json.gz", text


def main() -> None:
    """Write every fixture below the folder that the command line names."""
    folder = Path(sys.argv[1])
    for name, text in fixtures():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(packed([text]))


if __name__ == "__main__":
    main()
