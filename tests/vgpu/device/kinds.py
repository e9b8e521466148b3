"""What each kind of work keeps busy while it is resident.

Fill is the share of SMs that a grid covers. Weighted by time in profiles of training (A100, 8-way
tensor parallel; H100, data parallel; V100, recommendation): matrix products 0.98 to 1.00, attention
0.99, element-wise 0.84 to 0.99, reductions 0.98 to 1.00, NCCL 0.21, 0.14, 0.10; kernels of a small
model 0.01 to 0.12 where their grid is a few blocks. A little less here: the last wave has a tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vgpu.layout import Count

# The order of `Activity.shares`.
QUANTITIES = (
    Count.GR,
    Count.SM,
    Count.OCCUPANCY,
    Count.TENSOR,
    Count.HMMA,
    Count.FP32,
    Count.DRAM,
    Count.MEM,
)
SHARES = len(QUANTITIES)
GR, SM, DRAM = (QUANTITIES.index(count) for count in (Count.GR, Count.SM, Count.DRAM))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Activity:
    """Shares of a GPU that are busy, in the order of QUANTITIES. Compared by identity."""

    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of kernel: SM fill, and per filled SM the pipes and the share of DRAM bandwidth."""

    name: str
    fill: float
    occupancy: float
    tensor: float
    fp32: float
    dram: float


KINDS = (
    Kind(name="gemm", fill=0.96, occupancy=0.15, tensor=0.6, fp32=0.02, dram=0.4),
    Kind(name="conv", fill=0.94, occupancy=0.25, tensor=0.5, fp32=0.05, dram=0.45),
    Kind(name="attention", fill=0.96, occupancy=0.15, tensor=0.5, fp32=0.15, dram=0.25),
    Kind(name="elementwise", fill=0.84, occupancy=0.8, tensor=0.0, fp32=0.2, dram=0.9),
    Kind(name="reduce", fill=0.94, occupancy=0.7, tensor=0.0, fp32=0.2, dram=0.8),
    Kind(name="optimizer", fill=0.94, occupancy=0.8, tensor=0.0, fp32=0.25, dram=0.9),
    Kind(name="embedding", fill=0.9, occupancy=0.6, tensor=0.0, fp32=0.05, dram=0.5),
    Kind(name="small", fill=0.12, occupancy=0.3, tensor=0.0, fp32=0.2, dram=0.2),
)
KIND_INDEX = {kind.name: index for index, kind in enumerate(KINDS)}

TO_DEVICE, TO_HOST = 0, 1
COPIES = ("copy_to_device", "copy_to_host")
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
)
# The names of `what` in the truth, in the order of their numbers.
WHATS = (*(kind.name for kind in KINDS), *COPIES, *COLLECTIVES)
FIRST_COPY = len(KINDS)
FIRST_COLLECTIVE = FIRST_COPY + len(COPIES)

# A fill is kept in steps of 1/256: the number of different activities stays bounded.
_FILL_STEPS = 256
# Warps of NCCL's 512 to 640 threads a channel on an SM that holds 2,048; the DRAM share of a
# transfer at full bus bandwidth.
_NCCL_OCCUPANCY, _NCCL_DRAM = 0.28, 0.12
_COPY_DRAM = 0.02


class Activities:
    """Makes each different activity once."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[int, int], Activity] = {}
        self._nccl: dict[tuple[int, int, bool], Activity] = {}
        self._together: dict[tuple[Activity, ...], Activity] = {}
        self.copy = _activity(
            gr=0.0, fill=0.0, occupancy=0.0, tensor=0.0, fp32=0.0, dram=_COPY_DRAM
        )

    def kernel(self, kind: int, fill: float) -> Activity:
        """A kernel of a kind (index in KINDS); `fill` NaN is the kind's own."""
        of = KINDS[kind]
        steps = round((of.fill if math.isnan(fill) else fill) * _FILL_STEPS)
        found = self._kernels.get((kind, steps))
        if found is None:
            share = steps / _FILL_STEPS
            found = self._kernels[kind, steps] = _activity(
                gr=1.0,
                fill=share,
                occupancy=of.occupancy * share,
                tensor=of.tensor * share,
                fp32=of.fp32 * share,
                dram=of.dram * share,
            )
        return found

    def nccl(self, channels: int, multiprocessors: int, *, moving: bool) -> Activity:
        """A communication kernel that polls its peers, or moves data."""
        key = (channels, multiprocessors, moving)
        found = self._nccl.get(key)
        if found is None:
            share = min(1.0, channels / multiprocessors)
            found = self._nccl[key] = _activity(
                gr=1.0,
                fill=share,
                occupancy=_NCCL_OCCUPANCY * share,
                tensor=0.0,
                fp32=0.0,
                dram=_NCCL_DRAM if moving else 0.0,
            )
        return found

    def together(self, several: tuple[Activity, ...]) -> Activity:
        """Activities of one moment, one or more: kernels share the chip, no part over its whole."""
        if len(several) == 1:
            return several[0]
        key = tuple(sorted(several, key=id))
        found = self._together.get(key)
        if found is None:
            columns = zip(*(one.shares for one in several), strict=True)
            found = self._together[key] = Activity(
                shares=tuple(min(1.0, sum(column)) for column in columns)
            )
        return found


def _activity(
    *, gr: float, fill: float, occupancy: float, tensor: float, fp32: float, dram: float
) -> Activity:
    """All tensor work is half precision; memory is "read or written" a little more than busy."""
    by_count = {
        Count.GR: gr,
        Count.SM: fill,
        Count.OCCUPANCY: occupancy,
        Count.TENSOR: tensor,
        Count.HMMA: tensor,
        Count.FP32: fp32,
        Count.DRAM: dram,
        Count.MEM: min(1.0, dram * 1.2),
    }
    return Activity(shares=tuple(by_count[count] for count in QUANTITIES))
