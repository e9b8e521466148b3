"""NVML for `Host.nvml`: finding the library, the vocabulary of questions, and their answers.

Questions name GPUs by UUID. Reference: nvml.h of the CUDA toolkit; binding: nvidia-ml-py.
"""

from __future__ import annotations

from whyidle.host import Answer, Argument, NvmlUnavailableError


class NoNvml:
    """The NVML source of a machine that has no driver: every question says so."""

    __slots__ = ("_why",)

    def __init__(self, why: str) -> None:
        self._why = why

    def answer(self, call: str, *args: Argument) -> Answer:
        """Raise NvmlUnavailableError with the reason."""
        raise NvmlUnavailableError(self._why)

    def close(self) -> None:
        """Hold nothing."""
