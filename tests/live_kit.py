"""A node that records, settles and serves metrics, and a real Prometheus that scrapes it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AGENT = "127.0.0.1"
NODE = "n1"


def program(name: str) -> str:
    """Return the path of a program of Debian's package `prometheus`; skips without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}, of Debian's package prometheus")
    return found


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((AGENT, 0))
        return int(taken.getsockname()[1])


@contextmanager
def child(arguments: list[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run sampler or keeper; it is told to stop by closing its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **env},
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    process.stdin.close()
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def sampler(recording: Path, *more: str) -> list[str]:
    return ["whyidle.sampler_process", str(recording), "--node", NODE, *more]


def keeper(recording: Path, port: int, *more: str) -> list[str]:
    """A keeper that settles every two seconds, two seconds late."""
    return [
        "whyidle_rules.live.keeper",
        str(recording),
        *("--node", NODE, "--metrics-listen", f"{AGENT}:{port}"),
        *("--settle-every-s", "2", "--settle-lag-s", "2", *more),
    ]


def get(port: int, path: str = "/metrics", **headers: str) -> str:
    request = urllib.request.Request(f"http://{AGENT}:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def until(ready: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        try:
            if ready():
                return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"not within {limit_s:g} s: {what}")


class Prometheus:
    """A Prometheus that runs."""

    def __init__(self, port: int) -> None:
        self.port = port

    def query(self, expression: str) -> list[dict[str, Any]]:
        said = json.loads(
            get(self.port, "/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        )
        assert said["status"] == "success", said
        found: list[dict[str, Any]] = said["data"]["result"]
        return found


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, int], **more: Any) -> Iterator[Prometheus]:
    """Scrape ports every second, by the name of their job."""
    folder.mkdir()
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"{AGENT}:{port}"]}], **more}
            for job, port in targets.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={AGENT}:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            until(lambda: "Ready" in get(port, "/-/ready"), "Prometheus is ready")
            yield Prometheus(port)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
