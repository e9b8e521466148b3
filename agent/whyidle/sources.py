"""Finds the parts of recordings in what a user names: folders, files, globs."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

from whyidle.errors import UserError
from whyidle.layout import PIECE, SEGMENT, order
from whyidle.manifest import PARQUET, read_manifest
from whyidle.segment import span


@dataclass(slots=True, kw_only=True)
class Found:
    """What there is to read; a piece or segment that another one stands for is not in it."""

    segments: list[Path] = field(default_factory=list)
    pieces: list[Path] = field(default_factory=list)
    exports: list[Path] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing was found."""
        return not (self.segments or self.pieces or self.exports)


def find(sources: Sequence[str | Path]) -> Found:
    """Return the parts of all recordings named; raises UserError if one names nothing."""
    found = Found()
    seen: set[Path] = set()
    for source in sources:
        paths = list(_paths(str(source)))
        for path in paths:
            real = Path(os.path.realpath(path))
            if real in seen:
                continue
            seen.add(real)
            if path.name.endswith(SEGMENT):
                found.segments.append(path)
            elif path.name.endswith(PIECE):
                found.pieces.append(path)
            else:
                found.exports.append(path)
        if not paths:
            raise UserError(
                f"{source} holds no recording: pass a folder that whyidle record or the agent "
                f"wrote, a {SEGMENT} or {PIECE} file of one, or a Parquet export"
            )
    return _current(found)


def is_recording(path: Path) -> bool:
    """Say whether a path looks like a recording, or a part of one, without opening its files."""
    if path.is_dir():
        manifest = read_manifest(path)
        return manifest is not None or next(_walk(path), None) is not None
    return path.name.endswith((SEGMENT, PIECE))


def _paths(source: str) -> Iterator[Path]:
    path = Path(source)
    if path.exists():
        matches = [path]
    elif any(sign in source for sign in "*?["):
        matches = [Path(match) for match in sorted(glob(source, recursive=True))]  # noqa: PTH207
    else:
        raise UserError(f"there is no {source}{_nearest(path)}")
    for match in matches:
        if match.is_dir():
            manifest = read_manifest(match)
            if manifest is not None and manifest["format"] == PARQUET:
                yield match
            else:
                yield from _walk(match)
        elif match.name.endswith((SEGMENT, PIECE)):
            yield match


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(root) / name
            # A name alone proves nothing: reading a FIFO called x.wsp would never end.
            if name.endswith((SEGMENT, PIECE)) and path.is_file():
                yield path


def _nearest(path: Path) -> str:
    try:
        names = os.listdir(path.parent)  # noqa: PTH208 - the names alone
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, 1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _current(found: Found) -> Found:
    """Leave out what a crash, or a reader's bad moment, shows twice: names say what replaces it."""
    singles: set[tuple[Path, int]] = set()
    merged: dict[Path, list[tuple[int, int]]] = {}
    for path in found.segments:
        held = span(path)
        if held is not None and held[0] == held[1]:
            singles.add((path.parent, held[0]))
        elif held is not None:
            merged.setdefault(path.parent, []).append(held)

    def replaced(folder: Path, held: tuple[int, int] | None) -> bool:
        return held is not None and any(
            begin <= held[0] and held[1] <= end and held != (begin, end)
            for begin, end in merged.get(folder, ())
        )

    segments = [path for path in found.segments if not replaced(path.parent, span(path))]
    pieces = []
    for path in found.pieces:
        folder, held = path.parent.parent, span(path)
        if not replaced(folder, held) and (held is None or (folder, held[0]) not in singles):
            pieces.append(path)
    return Found(
        segments=sorted(segments, key=lambda path: (str(path.parent), order(path))),
        pieces=sorted(pieces, key=lambda path: (str(path.parent), order(path))),
        exports=sorted(found.exports),
    )
