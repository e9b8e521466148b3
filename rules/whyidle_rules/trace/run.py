"""A traced run: its GPUs with their ranks, waits between them, and everything cut into pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whyidle_rules.intervals import Ints
from whyidle_rules.trace.device import DeviceTrace
from whyidle_rules.trace.gaps import Piece
from whyidle_rules.trace.load import FileTrace
from whyidle_rules.trace.match import Matched, match
from whyidle_rules.trace.spin import SpinPieces, Waits, cut, waits_of

# Clocks of nodes without time service differ by seconds; profiles that are further apart than this
# are of two runs, even if both have a rank 0 and the same sequence numbers.
APART_MAX_NS = 60_000_000_000


@dataclass(slots=True)
class RunGpu:
    """One GPU of the run: what its file says, and what its communication waited for."""

    file: FileTrace
    trace: DeviceTrace
    rank: int | None
    waits: Waits
    spin: SpinPieces

    @property
    def node(self) -> str | None:
        """Host that the file names."""
        return self.file.node


@dataclass(slots=True)
class Timeline:
    """All pieces of one GPU but the working ones, sorted; `late` is a GPU of the run or -1."""

    spans: Ints
    kinds: npt.NDArray[np.int8]
    gap_ns: Ints
    late: Ints


@dataclass(slots=True)
class TraceRun:
    """What was read; `refused` are the files of which nothing could be used."""

    gpus: list[RunGpu]
    matched: list[Matched]
    files: list[FileTrace]
    refused: list[FileTrace]
    world_size: int | None
    ranks_clash: bool
    apart_ns: int  # between the end of one profile and the start of another; 0 where they overlap


def assemble(files: Sequence[FileTrace]) -> TraceRun:
    """Put files together to a run: name the ranks, match the collectives, cut what is exposed."""
    usable = [file for file in files if file.refusal is None]
    ranks, clash = _ranks(usable)
    found = [(file, device) for file in usable for device in file.devices]
    devices_of = Counter(id(file) for file, _ in found)
    sizes = {file.world_size for file in usable if file.world_size is not None}
    world_size = max(sizes) if len(sizes) == 1 else None
    apart_ns = _apart_ns([device for _, device in found])
    comparable = len(found) > 1 and not clash and len(sizes) <= 1 and apart_ns <= APART_MAX_NS
    # A file of several GPUs is one process driving them all: its kernels name no rank of their own.
    kernels = [
        device.comm
        if comparable and ranks[id(file)] is not None and devices_of[id(file)] == 1
        else None
        for file, device in found
    ]
    matched = match(kernels, world_size) if comparable else []
    gpus = []
    for place, (file, device) in enumerate(found):
        waits = waits_of(place, device.comm, matched)
        gpus.append(
            RunGpu(
                file=file,
                trace=device,
                rank=ranks[id(file)],
                waits=waits,
                spin=cut(device.exposed_comm, device.comm, waits),
            )
        )
    refused = [file for file in files if file.refusal is not None]
    return TraceRun(gpus, matched, list(files), refused, world_size, clash, apart_ns)


def _apart_ns(devices: list[DeviceTrace]) -> int:
    begin = max((device.parts.begin for device in devices), default=0)
    end = min((device.parts.end for device in devices), default=0)
    return max(0, begin - end)


def _ranks(files: list[FileTrace]) -> tuple[dict[int, int | None], bool]:
    """Return the rank of each file (by identity), and whether two files claim the same one."""
    said = {id(file): file.rank for file in files}
    if len(files) > 1 and all(rank is None for rank in said.values()):
        named = {id(file): file.rank_in_name for file in files}
        if None not in named.values() and len(set(named.values())) == len(named):
            said = named
    counts = Counter(rank for rank in said.values() if rank is not None)
    return said, any(count > 1 for count in counts.values())


def timeline(gpu: RunGpu) -> Timeline:
    """Merge a GPU's empty and spinning pieces."""
    pieces, spin = gpu.trace.pieces, gpu.spin
    spans = np.concatenate((pieces.spans, spin.spans))
    order = np.argsort(spans[:, 0], kind="stable")
    nothing = np.full(len(pieces.spans), -1, dtype=np.int64)
    return Timeline(
        spans=spans[order],
        kinds=np.concatenate((pieces.kinds, spin.kinds))[order],
        gap_ns=np.concatenate((pieces.gap_ns, np.zeros(len(spin.spans), dtype=np.int64)))[order],
        late=np.concatenate((nothing, spin.late))[order],
    )


def prelude(gpu: RunGpu) -> Timeline:
    """Return what the host did between its first record and the first GPU event."""
    pieces = gpu.trace.prelude
    nobody = np.full(len(pieces.spans), -1, dtype=np.int64)
    return Timeline(pieces.spans, pieces.kinds, pieces.gap_ns, nobody)


def is_spinning(kinds: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
    """Say of each piece whether communication alone ran in it."""
    return np.asarray((kinds >= Piece.TRANSFER) & (kinds <= Piece.POINT_TO_POINT), dtype=np.bool_)
