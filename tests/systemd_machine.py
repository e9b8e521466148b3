"""A booted systemd with whyidle installed on it, in namespaces of its own: see systemd_boot.sh."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from service_kit import wait_for

ROOT = Path(__file__).parents[1]
BOOT = Path(__file__).with_name("systemd_boot.sh")
_TOOLS = ("unshare", "nsenter", "systemctl", "mount")
# In the machine, where systemd_boot.sh puts it.
PYTHON = "/opt/whyidle/bin/python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Booted:
    """The machine; `pid` is that of its systemd, seen from here."""

    pid: int

    def run(self, command: str, *, check: bool = True, stdin: str = "") -> str:
        """Run a shell command in it as root; return what it prints, errors included."""
        done = self.try_(command, stdin=stdin)
        if check and done.returncode != 0:
            raise AssertionError(f"{command}: {done.returncode}: {done.stdout}")
        return done.stdout

    def try_(self, command: str, *, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a shell command in it; return its exit code and what it prints."""
        words = ["nsenter", "-t", str(self.pid), "-m", "-p", "-u", "-i", "-C", "bash", "-c"]
        return subprocess.run(
            [*words, command],
            input=stdin,
            env={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin", "LD_LIBRARY_PATH": "/opt/python/lib"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )

    def python(self, script: str, *words: str) -> str:
        """Run a script in its Python, which has whyidle; return what it prints."""
        return self.run(f"{PYTHON} - {' '.join(words)}", stdin=script)

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run(f"systemctl show -P {name} {unit}").strip()

    def children(self, unit: str) -> list[int]:
        """Return the processes of a unit, the main one first, by their pids in the machine."""
        main = self.show(unit, "MainPID")
        return [int(main), *map(int, self.run(f"cat /proc/{main}/task/{main}/children").split())]

    def journal(self, unit: str, words: str = "") -> list[str]:
        """Return the messages of a unit."""
        return self.run(f"journalctl --no-pager -q -o cat -u {unit} {words}").splitlines()


def why_not() -> str:
    """Return why no systemd can be booted here; '' if it may be tried."""
    if os.geteuid() != 0:
        return "needs root to boot systemd in namespaces of its own"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if not Path("/lib/systemd/systemd").exists():
        missing.append("systemd")
    return f"needs {', '.join(missing)}" if missing else ""


@contextlib.contextmanager
def booted(folder: Path) -> Iterator[Booted]:
    """Boot the machine, wait until it is up, and take it down in the end."""
    folder.mkdir(exist_ok=True)
    words = [str(folder), str(ROOT), sysconfig.get_path("purelib"), sys.base_prefix]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(BOOT), *words], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT
        )
        assert process.stdin is not None
        try:
            pid = folder / "pid"
            end = time.monotonic() + 30
            while not pid.exists() or not pid.read_text().strip():
                if process.poll() is not None or time.monotonic() > end:
                    pytest.fail(f"systemd does not boot here: {log.read_text()[-2000:]}")
                time.sleep(0.05)
            machine = Booted(pid=int(pid.read_text()))
            wait_for(
                lambda: machine.try_("systemctl is-active whyidle-test.target").returncode == 0
            )
            yield machine
        finally:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
