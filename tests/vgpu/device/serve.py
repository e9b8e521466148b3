"""Starts and stops a virtual GPU node: the stand-in NVML library with a timeline behind it."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vgpu import Standin, standin
from vgpu.device.truth import Truth
from vgpu.device.wire import ENVIRONMENT, MESSAGE_BYTES_MAX
from vgpu.profiles import GpuSpec, h100

_ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualNode:
    """A node that runs. `env`: what a trainer or a reader of NVML needs to see it.

    `truth_path`: where the whole truth lies once the node has ended.
    """

    standin: Standin
    pid: int
    env: dict[str, str]
    truth_path: Path

    def truth(self) -> Truth:
        """What has happened up to now, exactly."""
        path = self.truth_path.with_name("truth-now")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.settimeout(_START_TIMEOUT_S)
            asking.connect(self.env[ENVIRONMENT])
            asking.send(json.dumps({"ask": "truth", "path": str(path)}).encode())
            answer = json.loads(asking.recv(MESSAGE_BYTES_MAX))
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return Truth.load(path)


@contextmanager
def virtual_gpus(
    folder: Path, *, gpus: int = 8, profile: Callable[[int], GpuSpec] = h100
) -> Iterator[VirtualNode]:
    """A node of `gpus` virtual GPUs, its files in `folder`.

    Raises Unavailable where the stand-in library cannot be built. At the end the node writes
    `folder/truth`.
    """
    # A socket's path is limited to 107 bytes; the test's folder may be deeper.
    private = Path(tempfile.mkdtemp(prefix="vgpu-"))
    try:
        with standin(folder, gpus=gpus, profile=profile) as lower:
            address, truth_path = private / "socket", folder / "truth"
            process = _start(lower, address, truth_path)
            try:
                env = {**lower.env, ENVIRONMENT: str(address), "PYTHONPATH": _python_path()}
                yield VirtualNode(standin=lower, pid=process.pid, env=env, truth_path=truth_path)
            finally:
                _stop(process)
    finally:
        shutil.rmtree(private)


def _python_path() -> str:
    return os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _start(lower: Standin, address: Path, truth_path: Path) -> subprocess.Popen[bytes]:
    arguments = {"state": lower.state.path, "socket": address, "truth": truth_path}
    options = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen(
        [sys.executable, "-m", "vgpu.device.node", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": _python_path()},
    )
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
    if not ready or process.stdout.readline() != b"ready\n":
        _stop(process)
        raise RuntimeError(f"the virtual GPU node did not start ({process.returncode})")
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The end of its input is the node's sign to write the truth and go."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
