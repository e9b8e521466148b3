"""Machines as folders: trees that a test writes, and the recorded ones beside the checkout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from whyidle.clock import VirtualClock
from whyidle.collect.collector import Collect, Problem
from whyidle.host import Answer, Host, LiveHost
from whyidle.table import Row

SHARED = Path(__file__).parents[1].parent / "shared" / "recorded"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "tree"
BEGIN_NS = 1_000_000_000_000


def shared(path: str) -> Path:
    """A recorded file or folder; the test is skipped where the recordings are not."""
    if not SHARED.is_dir():
        pytest.skip("the recordings of others are not beside this checkout")
    found = SHARED / path
    assert found.exists(), f"{path} is not among the recordings"
    return found


def write(root: Path, files: Mapping[str, str | bytes]) -> None:
    """Write the files of a machine below `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def host_of(
    root: Path,
    *,
    watched: Callable[[], Answer] | None = None,
    clock: VirtualClock | None = None,
) -> LiveHost:
    """A host that answers from a folder, in virtual time."""
    askers = {} if watched is None else {"watched": watched}
    return LiveHost(str(root), clock or VirtualClock(BEGIN_NS), askers=askers)


def gather(collect: Collect, host: Host) -> tuple[list[Any], list[Problem]]:
    """Run a collector once; return its rows and its problems."""
    rows: list[Row] = []
    problems: list[Problem] = []
    for item in collect(host):
        if isinstance(item, Problem):
            problems.append(item)
        else:
            rows.append(item)
    return rows, problems


def series() -> Iterator[dict[str, Any]]:
    """The moments of the recorded series of this project's own virtual machine."""
    with shared("this-vm-6.18/series-5hz.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def damaged(text: bytes) -> Iterator[bytes]:
    """Yield damaged variants of a text: cut anywhere, with bytes that are no text, emptied."""
    step = max(1, len(text) // 50)
    for at in range(0, len(text), step):
        yield text[:at]
        yield text[:at] + b"\xff\x00x" + text[at + 3 :]
    yield text.replace(b" ", b"")
    yield text.replace(b"\n", b" ")
    yield b"\0" * 64
