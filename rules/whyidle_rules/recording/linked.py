"""Which GPUs are the stages of one pipeline, by the bytes that they exchange.

A stage of a pipeline exchanges activations and gradients with its neighbours: as many bytes each
way, and the stages in the middle have two neighbours, those at the ends one. In a collective each
member sends as much as any other, and down a chain of broadcasts the first sends alone and the last
receives alone. So of three or more GPUs that exchange nothing else, bytes tell a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from whyidle_rules.recording.windows import LINKED_BYTES, Gpu

MEMBERS_LEAST = 3
# Counters are rates over windows, rounded to MiB/s.
ALIKE_RATIO = 0.1


def shape(gpus: Sequence[Gpu]) -> Literal["chain", "ring"] | None:
    """Say whether GPUs exchanged bytes over NVLink as the stages of one pipeline do, or all alike.

    None where bytes tell neither.
    """
    if len(gpus) < MEMBERS_LEAST or len({gpu.machine for gpu in gpus}) > 1:
        return None
    sent, received = np.array([gpu.linked_bytes for gpu in gpus]).T
    both = sent + received
    if both.min() <= LINKED_BYTES or (np.abs(sent - received) > ALIKE_RATIO * both / 2).any():
        return None
    neighbours = both / both.min()
    ends = neighbours <= 1 + ALIKE_RATIO
    middle = np.abs(neighbours - 2) <= 2 * ALIKE_RATIO
    if ends.all():
        return "ring"
    return "chain" if (ends | middle).all() and ends.sum() == 2 else None
