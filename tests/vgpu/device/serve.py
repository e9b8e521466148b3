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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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

    `truth_path`: where the whole truth lies once the node has ended. Of several machines `standins`
    and `envs` have one each; `standin` and `env` are the first one's.
    """

    standins: tuple[Standin, ...]
    pid: int
    envs: tuple[dict[str, str], ...]
    truth_path: Path

    @property
    def standin(self) -> Standin:
        """The (first) machine as NVML has it."""
        return self.standins[0]

    @property
    def env(self) -> dict[str, str]:
        """The environment on the (first) machine."""
        return self.envs[0]

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
    folder: Path, *, gpus: int = 8, profile: Callable[[int], GpuSpec] = h100, machines: int = 1
) -> Iterator[VirtualNode]:
    """A node of `gpus` virtual GPUs, its files in `folder`.

    They may be shared out among `machines`, evenly and in order: each has an NVML of its own, and
    collectives go from one to the other.
    Raises Unavailable where the stand-in library cannot be built. At the end the node writes
    `folder/truth`.
    """
    # A socket's path is limited to 107 bytes; the test's folder may be deeper.
    private = Path(tempfile.mkdtemp(prefix="vgpu-"))
    try:
        with ExitStack() as stack:
            each, lower = gpus // machines, []
            for machine in range(machines):
                own = folder if machines == 1 else folder / f"machine-{machine}"
                own.mkdir(exist_ok=True)
                specs = [profile(machine * each + place) for place in range(each)]
                lower.append(
                    stack.enter_context(standin(own, gpus=each, profile=specs.__getitem__))
                )
            address, truth_path = private / "socket", folder / "truth"
            process = _start(lower, address, truth_path)
            try:
                more = {ENVIRONMENT: str(address), "PYTHONPATH": _python_path()}
                yield VirtualNode(
                    standins=tuple(lower),
                    pid=process.pid,
                    envs=tuple({**one.env, **more} for one in lower),
                    truth_path=truth_path,
                )
            finally:
                _stop(process)
    finally:
        shutil.rmtree(private)


def _python_path() -> str:
    return os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _start(lower: Sequence[Standin], address: Path, truth_path: Path) -> subprocess.Popen[bytes]:
    arguments = [("state", one.state.path) for one in lower]
    arguments += [("socket", address), ("truth", truth_path)]
    options = [part for name, value in arguments for part in (f"--{name}", str(value))]
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
