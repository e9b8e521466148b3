"""Collectors of GPUs in a process of their own, on a stand-in node that the test controls.

    with standin(tmp_path) as node, GpuAgent(node) as agent:
        rows, problems = agent.run("gpu_state")

Rows are dictionaries by column; a run that raises gives `Failed`.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

from vgpu import Standin
from vgpu.ask import Asker

_SETUP = """
import msgspec
from trees import gather
from whyidle.clock import SystemClock
from whyidle.collect import ALL
from whyidle.host import NvmlError, NvmlUnavailableError
from whyidle.live import Watched, live_host
watched = Watched()
host = live_host({root!r}, SystemClock(), watched=watched)
notes = []
made = {{collector.name: collector.make() for collector in ALL}}

def run(name):
    rows, told = gather(made[name], host)
    problems = [(p.subject, p.message) for p in told if p.kind == "failed"]
    notes.extend((p.subject, p.message) for p in told if p.kind == "no_data")
    return [[dict(msgspec.structs.asdict(row), TABLE=row.TABLE) for row in rows], problems]

def hold():
    made["gpu_activity"].hold(host.clock.mono_ns())

def release():
    return [msgspec.structs.asdict(row) for row in made["gpu_activity"].release(host)]

def nvml(call, *args):
    try:
        return host.nvml(call, *args)
    except NvmlError as error:
        return dict(code=error.code, call=error.call, text=error.text)
"""


class GpuAgent:
    """The asking side."""

    def __init__(self, node: Standin, *, root: str = "/") -> None:
        env = {**node.env, "PYTHONPATH": str(Path(__file__).parent)}
        self.ask = Asker(env, init=False)
        self.ask.do(_SETUP.format(root=root))

    def __enter__(self) -> GpuAgent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ask.__exit__(kind, error, trace)

    def run(
        self, name: str, *, table: str | None = None
    ) -> tuple[list[dict[str, Any]], list[list[str]]]:
        """Run a collector once; return its rows, those of `table` if one is named, and problems."""
        rows, problems = self.ask(f"run({name!r})")
        kept = [row for row in rows if table in (None, row["TABLE"])]
        for row in kept:
            del row["TABLE"]
        return kept, problems

    def notes(self) -> list[list[str]]:
        """Return what was said so far of parts that are not offered."""
        return list(self.ask("notes"))

    def nvml(self, call: str, *args: object) -> Any:
        """Ask the host's NVML; an NvmlError comes as {"code", "call", "text"}."""
        return self.ask(f"nvml({', '.join(map(repr, (call, *args)))})")

    def window(
        self, seconds: float = 0.15, *, table: str | None = None
    ) -> tuple[list[dict[str, Any]], list[list[str]]]:
        """Begin windows, wait, and return what a run says of them."""
        self.run("gpu_activity")
        time.sleep(seconds)
        return self.run("gpu_activity", table=table)
