"""Communication kernels of one GPU, with what the host wrote down about each.

New profilers write the collective, its process group and its sequence number on the kernel itself.
Older ones write them on the operator `record_param_comms` around the launch (since PyTorch 2.0, the
group as a pointer of that process), the oldest only leave an annotation "nccl:all_reduce" or
nothing. So a kernel takes what it has, and the rest from the spans around its launch call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whyidle_rules.intervals import Ints
from whyidle_rules.trace import names
from whyidle_rules.trace.columns import NO_VALUE, Columns, CommArguments, CommCall

_NESTING_MAX = 8  # spans around one launch: operator, collective, annotation, coalescing


@dataclass(frozen=True, slots=True)
class CommKernel:
    """What is known of one kernel; '' and NO_VALUE where it is not.

    `local_group` is comparable inside its process only, `group` between processes.
    """

    name: str
    operation: str
    group: str
    local_group: str
    ranks: str
    size: int
    sequence: int


@dataclass(slots=True)
class CommKernels:
    """Communication kernels in the order of their start; parallel columns, `info` one each."""

    start: Ints
    end: Ints
    stream: Ints
    blocks: Ints
    point_to_point: npt.NDArray[np.bool_]
    info: list[CommKernel]


def comm_kernels(
    columns: Columns, rows: Ints, launch_start: Ints, launch_thread: Ints
) -> CommKernels:
    """Return the kernels in `rows`, which were launched at these times by these threads."""
    calls = _CallsByThread(columns.comm_calls)
    info = []
    kernel_names = [columns.gpu_names[columns.gpu_name[row]] for row in rows.tolist()]
    for row, name, start, thread in zip(
        rows.tolist(), kernel_names, launch_start.tolist(), launch_thread.tolist(), strict=True
    ):
        info.append(_describe(name, columns.comm_arguments.get(row), calls.around(thread, start)))
    operations = [names.is_point_to_point(kernel.operation) for kernel in info]
    return CommKernels(
        start=np.frombuffer(columns.gpu_start, dtype=np.int64)[rows],
        end=np.frombuffer(columns.gpu_end, dtype=np.int64)[rows],
        stream=np.frombuffer(columns.gpu_stream, dtype=np.int64)[rows],
        blocks=np.frombuffer(columns.gpu_blocks, dtype=np.int64)[rows],
        point_to_point=np.array(operations, dtype=bool),
        info=info,
    )


def _describe(name: str, args: CommArguments | None, around: list[CommCall]) -> CommKernel:
    operation = args.operation if args else ""
    group = args.group if args else ""
    sequence = args.sequence if args else NO_VALUE
    local = ""
    for call in around:
        operation = operation or call.operation
        if sequence == NO_VALUE:
            sequence = call.sequence
        local = local or call.group
    return CommKernel(
        name=name,
        operation=operation,
        group=group,
        local_group=local or group,
        ranks=args.ranks if args else "",
        size=args.size if args else NO_VALUE,
        sequence=sequence,
    )


class _CallsByThread:
    """Finds the spans around a moment of a thread."""

    def __init__(self, calls: list[CommCall]) -> None:
        self._calls: dict[int, list[CommCall]] = defaultdict(list)
        for call in sorted(calls, key=lambda call: call.start_ns):
            self._calls[call.thread].append(call)
        self._starts = {
            thread: [call.start_ns for call in found] for thread, found in self._calls.items()
        }

    def around(self, thread: int, moment: int) -> list[CommCall]:
        """Return the spans that contain the moment, the innermost first."""
        starts = self._starts.get(thread)
        if starts is None:
            return []
        last = bisect_right(starts, moment)
        near = self._calls[thread][max(0, last - _NESTING_MAX) : last]
        return [call for call in reversed(near) if moment < call.end_ns]
