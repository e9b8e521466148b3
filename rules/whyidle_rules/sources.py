"""What a user points `diagnose` at: files, folders, globs; and what they turn out to be."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path

from whyidle.errors import UserError
from whyidle.sources import is_recording

_TRACE_SUFFIXES = (".json", ".json.gz", ".gz")


def are_recordings(sources: Sequence[str]) -> bool:
    """Say whether these are recordings; raises UserError for a mixture, or without any source."""
    if not sources:
        raise UserError("name what to diagnose: a recording, a trace, or a folder; or --live.")
    found = {source: any(map(_is_recording, _expand(source))) for source in sources}
    if len(set(found.values())) > 1:
        trace = next(source for source, recorded in found.items() if not recorded)
        raise UserError(
            f"{trace} is no recording and others are; diagnose traces and recordings apart."
        )
    return all(found.values())


def _is_recording(path: Path) -> bool:
    """Say whether a path is a recording; a folder with traces right inside is one of traces."""
    try:
        if path.is_dir() and not (path / "manifest.json").is_file():
            names = [entry.name for entry in path.iterdir()]
            if any(n.endswith(_TRACE_SUFFIXES) and not n.startswith(".") for n in names):
                return False
        return is_recording(path)
    except OSError:
        return False  # reading it says why


def trace_files(sources: Sequence[str]) -> list[Path]:
    """Return the files that may be traces, each once, in a steady order; raises UserError."""
    found: dict[Path, None] = {}
    for source in sources:
        for path in _expand(source):
            try:
                if path.is_dir():
                    found.update(dict.fromkeys(_in_folder(path)))
                else:
                    found[path] = None
            except OSError as error:
                raise UserError(f"{source}: {_reason(error)}; name another source.") from error
    return list(found)


def _expand(source: str) -> list[Path]:
    path = Path(source)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # Path.exists hides some of these, each Python others
        raise UserError(f"{source!r} cannot be opened ({error}); name another source.") from error
    else:
        return [path]
    if any(sign in source for sign in "*?["):
        matches = sorted(glob.glob(source))  # noqa: PTH207 - the pattern may be absolute
        if matches:
            return [Path(match) for match in matches]
        raise UserError(f"{source}: nothing matches it; check the pattern.")
    if path.is_symlink():
        raise UserError(f"{source}: the link leads nowhere; name another source.")
    near = difflib.get_close_matches(path.name, _names(path.parent), n=1)
    hint = f"did you mean {path.with_name(near[0])}?" if near else "check the path."
    raise UserError(f"{source}: there is no such file or folder; {hint}")


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def _in_folder(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir(), key=lambda path: _natural(path.name))
    except OSError as error:
        raise UserError(f"{folder}: {_reason(error)}; make it readable or name another.") from error
    files = [
        path
        for path in entries
        if path.name.endswith(_TRACE_SUFFIXES) and not path.name.startswith(".") and path.is_file()
    ]
    if files:
        return files
    below = sorted(path.name for path in entries if path.is_dir())
    hint = f"name one of its folders, such as {folder / below[0]}" if below else "name another one"
    raise UserError(f"{folder}: no .json or .json.gz file is in this folder; {hint}.")


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts rank-10 after rank-9."""
    parts: list[tuple[int, str]] = []
    number = ""
    for char in name:
        if char.isascii() and char.isdigit():
            number += char
            continue
        if number:
            parts.append((int(number[:18]), ""))
            number = ""
        parts.append((-1, char))
    if number:
        parts.append((int(number[:18]), ""))
    return parts


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
