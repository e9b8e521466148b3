"""Asks unmodified nvidia-ml-py in a process of its own: the state can change between questions.

    with Asker(node.env) as ask:
        ask.do("h = nvmlDeviceGetHandleByIndex(0)")
        assert ask("nvmlDeviceGetUUID(h)") == node.state.gpus[0].uuid

Answers travel as JSON: structures become dictionaries, an NVMLError becomes `Failed` with its
value.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

_STOP_TIMEOUT_S = 10.0


class Failed(Exception):
    """An nvidia-ml-py call raised; `value` is the nvmlReturn_t, None for other exceptions."""

    def __init__(self, kind: str, value: int | None) -> None:
        super().__init__(f"{kind} ({value})")
        self.kind = kind
        self.value = value


class Asker:
    """The asking side, for one thread. `start` lets one call run beside others over there."""

    def __init__(self, env: Mapping[str, str], *, init: bool = True) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            text=True,
        )
        if init:
            self.do("nvmlInit()")

    def __enter__(self) -> Asker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _exchange(self, mode: str, text: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([mode, text]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the asked process ended with {self._process.wait()}")
        answer = json.loads(line)
        if "kind" in answer:
            raise Failed(answer["kind"], answer["value"])
        return answer["result"]

    def __call__(self, expression: str) -> Any:
        """The value of an expression over there."""
        return self._exchange("eval", expression)

    def do(self, statements: str) -> None:
        """Runs statements over there; their names stay."""
        self._exchange("exec", statements)

    def start(self, expression: str) -> None:
        """Evaluates in a thread over there. One at a time; `finish` gives the value."""
        self._exchange("start", expression)

    def finish(self) -> Any:
        """Waits for what `start` began."""
        return self._exchange("finish", "")

    def code(self, expression: str) -> int:
        """The nvmlReturn_t of an expression; 0 when it succeeds."""
        try:
            self(expression)
        except Failed as failed:
            if failed.value is None:
                raise
            return failed.value
        return 0


def _plain(value: Any) -> Any:
    """A value as JSON can carry it."""
    if isinstance(value, (ctypes.Structure, ctypes.Union)):
        return {name: _plain(getattr(value, name)) for name, *_ in type(value)._fields_}
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (ctypes.Array, list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str, dict)):
        return value
    if hasattr(value, "__dict__"):
        return {name: _plain(item) for name, item in vars(value).items()}
    return str(value)


class _Server:
    def __init__(self) -> None:
        import pynvml  # only the asked process loads the library

        self._error = pynvml.NVMLError
        self._names = dict(vars(pynvml))
        self._thread: threading.Thread | None = None
        self._later: dict[str, Any] = {}

    def _evaluate(self, mode: str, text: str) -> dict[str, Any]:
        try:
            if mode == "exec":
                exec(text, self._names)
                return {"result": None}
            return {"result": _plain(eval(text, self._names))}
        except self._error as error:
            return {"kind": type(error).__name__, "value": error.value}
        except Exception as error:  # noqa: BLE001  the asking side shows it
            return {"kind": f"{type(error).__name__}: {error}", "value": None}

    def _background(self, text: str) -> None:
        self._later = self._evaluate("eval", text)

    def answer(self, mode: str, text: str) -> dict[str, Any]:
        if mode == "start":
            self._thread = threading.Thread(target=self._background, args=(text,), daemon=True)
            self._thread.start()
            return {"result": None}
        if mode == "finish":
            assert self._thread is not None
            self._thread.join()
            return self._later
        return self._evaluate(mode, text)


def _serve() -> None:
    server = _Server()
    for line in sys.stdin:
        mode, text = json.loads(line)
        sys.stdout.write(json.dumps(server.answer(mode, text)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
