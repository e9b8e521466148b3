"""A stand-in GPU node for tests: an NVML library in C and a shared state that a test writes.

    with standin(tmp_path, gpus=8) as node:
        node.state.gpus[0].run(gr=0.6, sm=0.5)
        subprocess.run([...], env={**os.environ, **node.env})

`node.env` is for a new process. In this process call `node.preload()` before nvmlInit.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vgpu.gpu import Gpu, MigDevice, Process
from vgpu.layout import Count
from vgpu.library import SONAME, Unavailable, build
from vgpu.profiles import GpuSpec, a100, b200, h100, v100
from vgpu.state import ENVIRONMENT, StateFile

_CACHE = Path(__file__).parents[2] / ".cache" / "standin-nvml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standin:
    """A stand-in node. `env`: what a process needs to see it; `library`: the library's folder."""

    state: StateFile
    library: Path
    env: dict[str, str]

    def preload(self) -> None:
        """Makes this process use the node from its next first nvmlInit on.

        The loader finds the library by its soname. It is loaded once: a later node brings its own
        state, but shares the functions of the first one.
        """
        os.environ[ENVIRONMENT] = self.env[ENVIRONMENT]
        ctypes.CDLL(str(self.library / SONAME), mode=ctypes.RTLD_GLOBAL)


@contextmanager
def standin(
    folder: Path,
    *,
    gpus: int = 8,
    profile: Callable[[int], GpuSpec] = h100,
    without: Iterable[str] = (),
    refresh_s: float = 0.1,
    sample_period_s: float = 1 / 6,
    cache: Path | None = None,
) -> Iterator[Standin]:
    """A node of `gpus` GPUs whose state lies in `folder`.

    Raises Unavailable, which pytest counts as a skip, without a C compiler or nvml.h. `without`
    leaves functions out of the library, as an older driver would.
    """
    library = build(cache or _writable(folder), without=without)
    state = StateFile.create(
        folder / "standin-nvml.state",
        [profile(index) for index in range(gpus)],
        refresh_s=refresh_s,
        sample_period_s=sample_period_s,
    )
    paths = [str(library), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    env = {"LD_LIBRARY_PATH": os.pathsep.join(paths), ENVIRONMENT: str(state.path)}
    try:
        yield Standin(state=state, library=library, env=env)
    finally:
        state.clear()  # a call that still hangs must not outlive the node
        state.close()
        if os.environ.get(ENVIRONMENT) == env[ENVIRONMENT]:  # preloaded
            del os.environ[ENVIRONMENT]


def _writable(folder: Path) -> Path:
    """The cache in the checkout, or the test's own folder where that is read-only."""
    try:
        _CACHE.mkdir(parents=True, exist_ok=True)
    except OSError:
        return folder
    return _CACHE if os.access(_CACHE, os.W_OK) else folder


__all__ = [
    "ENVIRONMENT",
    "Count",
    "Gpu",
    "GpuSpec",
    "MigDevice",
    "Process",
    "Standin",
    "StateFile",
    "Unavailable",
    "a100",
    "b200",
    "h100",
    "standin",
    "v100",
]
