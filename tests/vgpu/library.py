"""Builds the stand-in NVML library: C sources here, the official header from nvidia-nvml-dev."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
import unittest
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent / "nvml"
SONAME = "libnvidia-ml.so.1"
_FLAGS = ("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
_BUILD_TIMEOUT_S = 120


class Unavailable(unittest.SkipTest):
    """The library cannot be built here. pytest counts it as a skip, with this reason."""


def compiler() -> str:
    """The C compiler; Unavailable without one."""
    found = shutil.which(os.environ.get("CC", "cc"))
    if found is None:
        raise Unavailable("the stand-in NVML library needs a C compiler (cc, or set CC)")
    return found


def header() -> Path:
    """The folder of the official nvml.h; Unavailable without nvidia-nvml-dev."""
    try:
        files = importlib.metadata.files("nvidia-nvml-dev") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvml.h":
            return Path(str(file.locate())).resolve().parent
    raise Unavailable("the stand-in NVML library needs nvml.h: pip install nvidia-nvml-dev")


def build(cache: Path, *, without: Iterable[str] = ()) -> Path:
    """Returns a folder that holds the library, built at most once per content.

    `without`: functions to leave out, as an older driver would.
    """
    cc, folder, missing = compiler(), header(), sorted(without)
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(repr((cc, _FLAGS, missing)).encode())
    for file in (*sources, folder / "nvml.h"):
        digest.update(file.read_bytes())
    target = cache / digest.hexdigest()[:16]
    if (target / SONAME).exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        exports = Path(scratch) / "exports"
        # A name in the local list wins over the pattern: the symbol is not there for the loader.
        hidden = "".join(f"{name}; " for name in missing)
        exports.write_text("{ global: nvml*; local: " + hidden + "*; };\n")
        made = Path(scratch) / SONAME
        command = [
            cc,
            *_FLAGS,
            f"-I{folder}",
            f"-Wl,-soname,{SONAME}",
            f"-Wl,--version-script={exports}",
            *(str(file) for file in sources if file.suffix == ".c"),
            "-o",
            str(made),
            "-lm",
            "-lpthread",
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"the stand-in NVML library does not build:\n{done.stderr}")
        made.rename(target / SONAME)
    return target
