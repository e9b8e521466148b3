"""An agent as a service, with a manager that the test plays: what systemd would be told."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CLI = [sys.executable, str(Path(__file__).with_name("agent_cli.py"))]


def wait_for(done: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if done():
            return
        time.sleep(0.02)
    raise AssertionError(f"still not so after {seconds} s")


@dataclass
class Agent:
    """A running agent; `told` is what it said to its manager, with when that was."""

    process: subprocess.Popen[bytes]
    door: socket.socket
    log: Path
    told: list[tuple[float, str]] = field(default_factory=list)

    def hear(self) -> list[str]:
        """Return everything that was told so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.told.append((time.monotonic(), self.door.recv(4096).decode()))
        return [text for _, text in self.told]

    def wait_for(self, start: str, *, after: int = 0, seconds: float = 30.0) -> str:
        """Wait for a message that begins so, behind the first `after`; return it."""
        found: list[str] = []

        def heard() -> bool:
            found[:] = [text for text in self.hear()[after:] if text.startswith(start)]
            return bool(found)

        wait_for(heard, seconds)
        return found[0]

    def children(self) -> dict[str, int]:
        """Return the pids of sampler and keeper, by the last word of their module."""
        found = {}
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in path.read_text().split():
            with contextlib.suppress(OSError, ValueError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                found[words[words.index("-m") + 1].rpartition(".")[2]] = int(pid)
        return found

    def stop(self, seconds: float = 30.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def agent(
    folder: Path, *words: str, env: Mapping[str, str] | None = None, watchdog_s: float | None = None
) -> Iterator[Agent]:
    """Start `whyidle agent WORDS` as a service of a manager of ours; end it in the end."""
    folder.mkdir(exist_ok=True)
    address = folder / "notify"
    log = folder / "log"
    environment = {**os.environ, **(env or {}), "NOTIFY_SOCKET": str(address)}
    if watchdog_s is not None:
        environment["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door, log.open("wb") as out:
        door.bind(str(address))
        door.setblocking(False)
        found = os.fstat(out.fileno())
        environment["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino}"
        process = subprocess.Popen(
            [*CLI, "agent", *words], cwd=folder, env=environment, stderr=out, start_new_session=True
        )
        try:
            yield Agent(process=process, door=door, log=log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of whyidle to its end."""
    return subprocess.run(
        [*CLI, *words],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
