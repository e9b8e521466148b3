"""Trainers that tests start with the probe on, as `whyidle run` does, and the pages they leave."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from whyidle.probe_page import (
    PAGE_BYTES,
    Header,
    Loader,
    Process,
    Record,
    parse_header,
    parse_loaders,
    parse_process,
    parse_records,
)
from whyidle.run_command import site_folder

# A process that ends in good order takes its page away: these end at once, as killed ones do.
_SCRIPT = """\
{top}

def main():
{body}

if __name__ == "__main__":
    main()
    import os, sys
    sys.stdout.flush()
    os._exit(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A page as the agent reads it."""

    header: Header
    totals: Process
    loaders: tuple[Loader, ...]
    records: tuple[Record, ...]

    def kinds(self) -> list[str]:
        """The kinds of its records, in order."""
        return [record.kind for record in self.records]


def read_page(path: Path) -> Read:
    data = path.read_bytes()
    assert len(data) == PAGE_BYTES
    now = time.monotonic_ns()
    header = parse_header(data)
    totals = parse_process(data, now)
    return Read(
        header=header,
        totals=totals,
        loaders=tuple(parse_loaders(data, now)),
        records=tuple(parse_records(data, header, totals.sequence, 0)),
    )


def pages(folder: Path) -> list[Read]:
    """All pages of a folder, in the order in which they were made."""
    found = [read_page(path) for path in folder.glob("*.page") if path.stat().st_size]
    return sorted(found, key=lambda read: read.header.opened_ns)


def environment(folder: Path | str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment as `whyidle run` makes it."""
    ours = {
        "WHYIDLE_PROBE": "1",
        "WHYIDLE_PROBE_DIR": str(folder),
        "PYTHONPATH": str(site_folder()),
    }
    return {**os.environ, **ours, **(more or {})}


def script(folder: Path, body: str, top: str = "") -> Path:
    """Write a trainer whose main() is `body`."""
    path = folder / "train.py"
    inner = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    path.write_text(_SCRIPT.format(top=textwrap.dedent(top), body=inner), encoding="utf-8")
    return path


def train(
    tmp_path: Path,
    body: str,
    *,
    top: str = "",
    folder: Path | str | None = None,
    more: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run a trainer to its end; pages go to tmp_path/pages unless a folder is named."""
    if folder is None:
        folder = tmp_path / "pages"
        folder.mkdir(exist_ok=True)
    return subprocess.run(
        [python, str(script(tmp_path, body, top))],
        env=environment(folder, more),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def trained(
    tmp_path: Path, body: str, *, top: str = "", more: Mapping[str, str] | None = None
) -> Read:
    """Run a trainer that must end well and leave one page, and read that."""
    done = train(tmp_path, body, top=top, more=more)
    assert done.returncode == 0, done.stderr
    (read,) = pages(tmp_path / "pages")
    return read


def python_of(version: str) -> str | None:
    """A Python of another version on the PATH that starts; pyenv's stand-ins may lead nowhere."""
    found = shutil.which(f"python{version}")
    if found is None:
        return None
    done = subprocess.run([found, "-c", ""], capture_output=True, timeout=60, check=False)
    if done.returncode == 0:
        return found
    root = (
        subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False).stdout
        if shutil.which("pyenv")
        else ""
    )
    real = (
        sorted(Path(root.strip()).glob(f"versions/{version}.*/bin/python{version}")) if root else []
    )
    return str(real[-1]) if real else None
