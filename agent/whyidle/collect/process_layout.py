"""The options of a command line that say how a job is shared out over its ranks.

Sources: Megatron-LM's arguments.py, Megatron-DeepSpeed, NeMo and DeepSpeed launch lines. Only names
on the list are kept, and only whole numbers after them: a command line may hold anything.
"""

from __future__ import annotations

_NAMES = frozenset(
    (
        "context-parallel-size",
        "global-batch-size",
        "gradient-accumulation-steps",
        "micro-batch-size",
        "num-layers",
        "num-layers-per-virtual-pipeline-stage",
        "num-virtual-stages-per-pipeline-rank",
        "pipe-parallel-size",
        "pipeline-model-parallel-size",
        "tensor-model-parallel-size",
        "train-batch-size",
    )
)
_DIGITS_MOST = 9


def parse_layout(data: bytes) -> str | None:
    """Return "--name=number ..." of a command line (NUL-separated), None where it has none."""
    words = data.split(b"\0")
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        if not word.startswith(b"--"):
            continue
        name, equals, value = word[2:].partition(b"=")
        if not equals:
            value = words[place + 1] if place + 1 < len(words) else b""
        known = name.decode("ascii", "replace").replace("_", "-")
        if known in _NAMES and value.isdigit() and len(value) <= _DIGITS_MOST:
            found[known] = value.decode("ascii")  # of several the last one counts
    return " ".join(f"--{name}={value}" for name, value in sorted(found.items())) or None
