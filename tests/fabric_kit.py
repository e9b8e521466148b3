"""Lays machines with symbolic links out as folders: the synthetic node, and recorded ones."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric_make import Entry
from trees import FIXTURES, shared
from whyidle.clock import VirtualClock
from whyidle.host import LiveHost

FIXTURE = FIXTURES / "fabric-synthetic-v1.json"
# Recordings that went through an archive have links as small files with the target in them.
_TARGET = re.compile(r"(?:\.\./)+[\w.:/-]+|[0-9a-f:.]+/[\w.:/-]+")


def lay(root: Path, entries: Mapping[str, Entry]) -> Path:
    """Write files and links below `root`."""
    for name, entry in entries.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, str):
            path.write_text(entry)
        else:
            path.symlink_to(entry["link"])
    return root


def synthetic(root: Path) -> Path:
    """The synthetic node."""
    return lay(root, json.loads(FIXTURE.read_text()))


def put(root: Path, path: str, text: str) -> None:
    """Change a file, through the links that lead to it."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def recorded(root: Path, path: str) -> Path:
    """Copy a recorded machine, with its links as links again."""
    source = shared(path)
    for folder, _, names in os.walk(source):
        for name in names:
            old = Path(folder) / name
            new = root / old.relative_to(source)
            new.parent.mkdir(parents=True, exist_ok=True)
            data = old.read_bytes()
            text = data.decode("utf-8", "replace")
            if len(data) < 200 and _TARGET.fullmatch(text):
                new.symlink_to(text)
            else:
                new.write_bytes(data)
    return root


class SpoiledHost(LiveHost):
    """A folder in which reading some paths fails: `errors` has an errno by part of the path."""

    def __init__(self, root: Path, clock: VirtualClock, **more: Any) -> None:
        super().__init__(str(root), clock, **more)
        self.errors: dict[str, int] = {}
        self.asked: list[str] = []
        self.took_ns: dict[str, int] = {}
        self.moves = clock

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        """Fail, be slow, or read."""
        self.asked.append(path)
        for part, took in self.took_ns.items():
            if part in path:
                self.moves.advance(took)
        for part, code in self.errors.items():
            if part in path:
                raise OSError(code, os.strerror(code), path)
        return super().read_bytes(path, keep=keep)
