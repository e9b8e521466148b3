"""`whyidle run -- CMD`: a command with the probe on, and nothing else.

The command replaces this process, so that signals and exit code are its own. The probe comes in by
PYTHONPATH: a sitecustomize that does nothing but for WHYIDLE_PROBE=1.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from whyidle.collect.probe_folder import PREFIX, SERVICE_FOLDER, SHARED_MEMORY
from whyidle.errors import UserError

PACKAGE = "whyidle_probe"


def run(command: Sequence[str], folder: Path | None, environ: Mapping[str, str]) -> NoReturn:
    """Become the command, with the probe on; raises UserError if it cannot be run.

    A folder of pages that cannot be made costs the probe, never the run: it is said on stderr.
    """
    if shutil.which(command[0]) is None:
        raise UserError(f"cannot run {command[0]}: there is no such program on the PATH")
    changed = dict(environ)
    try:
        probe_environment(changed, folder)
    except OSError as error:
        sys.stderr.write(f"whyidle run: the probe is off: {problem(error)}\n")
    try:
        os.execvpe(command[0], list(command), changed)
    except OSError as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}") from error


def problem(error: OSError) -> str:
    """Return why there is no folder of pages, and what helps."""
    return (
        f"cannot use the folder {error.filename} for its pages: {error.strerror}; "
        "name another one with --probe-dir"
    )


def probe_environment(environ: MutableMapping[str, str], folder: Path | None) -> Path:
    """Switch the probe on in an environment; return the folder of pages. Raises OSError.

    Without `folder` it is that of the environment, the service's, or one in shared memory.
    """
    named = environ.get("WHYIDLE_PROBE_DIR")
    if folder is None and named:
        folder = Path(named)
    pages = default_folder() if folder is None else _made(folder)
    environ["WHYIDLE_PROBE"] = "1"
    environ["WHYIDLE_PROBE_DIR"] = str(pages)
    entries = [str(site_folder())]
    # An empty PYTHONPATH is none; an empty part of one is the current folder.
    before = environ.get("PYTHONPATH", "")
    if before:
        entries += [entry for entry in before.split(os.pathsep) if entry != entries[0]]
    environ["PYTHONPATH"] = os.pathsep.join(entries)
    return pages


def site_folder() -> Path:
    """Return the folder of the probe's sitecustomize, without importing the probe."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(2, "the probe is not installed", PACKAGE)
    return Path(spec.origin).parent / "site"


def default_folder() -> Path:
    """Return the service's folder of pages, or one of this user in shared memory; makes it."""
    service = Path("/", SERVICE_FOLDER)
    if service.is_dir() and os.access(service, os.W_OK | os.X_OK):
        return service
    memory = Path("/", SHARED_MEMORY)
    mine = memory / f"{PREFIX}{os.geteuid()}"
    try:
        return _made(mine, private=True)
    except (FileExistsError, PermissionError):
        # Somebody else has taken the name; the agent reads every folder that begins like it.
        other = Path(tempfile.mkdtemp(prefix=PREFIX, dir=memory))
        other.chmod(0o755)
        return other


def _made(folder: Path, *, private: bool = False) -> Path:
    """Return a folder that exists and is writable, made if need be; raises OSError."""
    folder = folder.absolute()
    folder.mkdir(mode=0o755, parents=not private, exist_ok=True)
    found = folder.lstat()
    if private and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid()):
        raise FileExistsError(17, "belongs to somebody else", str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "not writable", str(folder))
    return folder
