"""How a job is shared out over its ranks, by the options of its command line.

Megatron-LM and DeepSpeed number ranks so that pipeline stages are outermost: the first world / p
ranks are the first stage. A job says how many micro-batches a step has, or how large batches are.
"""

from __future__ import annotations

from dataclasses import dataclass

# More stages or micro-batches than anybody runs: damage, or something else of the same name.
_MOST = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A rank's place in a pipeline; `virtual` stages run on it in turns."""

    stage: int
    stages: int
    batches: int
    virtual: int


def layout(options: str | None, rank: int | None, world: int | None) -> Layout | None:
    """Return a rank's place, None where options do not tell it all or contradict the job."""
    if not options or rank is None or not world:
        return None
    told = _told(options)
    stages = told.get("pipeline-model-parallel-size") or told.get("pipe-parallel-size") or 0
    if stages < 2 or world % stages or not 0 <= rank < world:
        return None
    batches = _batches(told, world // stages)
    virtual = _virtual(told, stages)
    if batches is None or virtual is None or not max(stages, batches, virtual) <= _MOST:
        return None
    return Layout(stage=rank // (world // stages), stages=stages, batches=batches, virtual=virtual)


def _told(options: str) -> dict[str, int]:
    found = {}
    for word in options.split():
        name, _, value = word.removeprefix("--").partition("=")
        if value.isascii() and value.isdigit():
            found[name] = int(value)
    return found


def _batches(told: dict[str, int], ranks: int) -> int | None:
    """Return the micro-batches of a step, of which `ranks` ranks make up a stage."""
    steps = told.get("gradient-accumulation-steps")
    if steps:
        return steps
    shared = told.get("tensor-model-parallel-size", 1) * told.get("context-parallel-size", 1)
    whole = told.get("global-batch-size") or told.get("train-batch-size")
    micro = told.get("micro-batch-size")
    if not whole or not micro or not shared or ranks % shared:
        return None
    per_step = micro * (ranks // shared)
    return whole // per_step if whole % per_step == 0 else None


def _virtual(told: dict[str, int], stages: int) -> int | None:
    """Return how many stages a rank runs in turns; None where that does not come out even."""
    if told.get("num-virtual-stages-per-pipeline-rank"):
        return told["num-virtual-stages-per-pipeline-rank"]
    each, layers = told.get("num-layers-per-virtual-pipeline-stage"), told.get("num-layers")
    if not each:
        return 1
    if not layers or layers % (stages * each):
        return None
    return layers // stages // each
