"""What holds for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# CI looks at the same examples each time; at a desk every run looks at others.
settings.register_profile("ci", derandomize=True)
if os.environ.get("WHYIDLE_CI"):
    settings.load_profile("ci")

DESCRIPTORS_MAX = 256


@pytest.fixture(autouse=True)
def few_descriptors() -> Iterator[None]:
    """Let go of descriptors that only a reference cycle keeps: select() knows no more than 1024."""
    yield
    if len(os.listdir("/proc/self/fd")) > DESCRIPTORS_MAX:  # noqa: PTH208 - counted, not used
        gc.collect()
