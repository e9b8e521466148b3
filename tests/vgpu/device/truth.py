"""Reads what the virtual GPUs really did: intervals in integer ns of CLOCK_MONOTONIC.

truth = Truth.load(path)
truth.split(gpu=0, begin_ns=a, end_ns=b).working_ns
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vgpu.device.ledger import FORMAT

_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """One kernel, copy or collective as it ran.

    `begin_ns`: a collective's arrival; `ready_ns`: when its last peer had arrived, None for never;
    `cut`: it ran when its process ended, or still ran when the truth was written. `group` and
    `sequence` are of collectives. `fill`: the share of SMs.
    """

    gpu: int
    pid: int
    stream: int
    what: str
    launch_ns: int
    begin_ns: int
    ready_ns: int | None
    end_ns: int
    size_bytes: int
    group: str | None
    sequence: int | None
    fill: float
    cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """A process that used a GPU; `end_ns` None: still there."""

    pid: int
    gpu: int
    begin_ns: int
    end_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A window of one GPU, cut into exact parts that sum to it; each excludes those before it.

    working: a compute kernel; transferring, waiting: only communication kernels (with all peers
    there, or polling); copying: only copies; nothing: the rest.
    """

    working_ns: int
    transferring_ns: int
    waiting_ns: int
    copying_ns: int
    nothing_ns: int

    @property
    def spinning_ns(self) -> int:
        """Kernels resident, none computing."""
        return self.transferring_ns + self.waiting_ns

    @property
    def empty_ns(self) -> int:
        """No kernel resident."""
        return self.copying_ns + self.nothing_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The node's own account, exact up to `horizon_ns`."""

    horizon_ns: int
    processes: tuple[Presence, ...]
    rows: npt.NDArray[Any]
    _whats: tuple[str, ...]
    _kernels: int
    _groups: dict[int, str]

    @classmethod
    def load(cls, path: Path) -> Truth:
        """Reads a file that the node wrote."""
        line, _, records = path.read_bytes().partition(b"\n")
        head = json.loads(line)
        if head["format"] != FORMAT:
            raise ValueError(f"{path}: not {FORMAT} but {head['format']}")
        kind = np.dtype([(name, _NUMPY[code]) for name, code in head["fields"]])
        rows = np.frombuffer(records, dtype=kind)
        return cls(
            horizon_ns=head["horizon_ns"],
            processes=tuple(Presence(**row) for row in head["processes"]),
            rows=rows[np.argsort(rows["begin_ns"], kind="stable")],
            _whats=tuple(head["whats"]),
            _kernels=head["kernels"],
            _groups={int(number): name for number, name in head["groups"].items()},
        )

    def intervals(
        self, *, gpu: int | None = None, pid: int | None = None, what: str | None = None
    ) -> list[Interval]:
        """In order of their beginning; all, or those of one GPU, process or kind."""
        return list(self._chosen(gpu, pid, what))

    def _chosen(self, gpu: int | None, pid: int | None, what: str | None) -> Iterator[Interval]:
        for row in self.rows:
            interval = self._interval(row)
            if (
                (gpu is None or interval.gpu == gpu)
                and (pid is None or interval.pid == pid)
                and (what is None or interval.what == what)
            ):
                yield interval

    def _interval(self, row: Any) -> Interval:
        ready_ns, group, sequence = int(row["ready_ns"]), int(row["group"]), int(row["sequence"])
        return Interval(
            gpu=int(row["gpu"]),
            pid=int(row["pid"]),
            stream=int(row["stream"]),
            what=self._whats[row["what"]],
            launch_ns=int(row["launch_ns"]),
            begin_ns=int(row["begin_ns"]),
            ready_ns=None if ready_ns == _NONE else ready_ns,
            end_ns=int(row["end_ns"]),
            size_bytes=int(row["size_bytes"]),
            group=None if group == _NONE else self._groups[group],
            sequence=None if sequence == _NONE else sequence,
            fill=float(row["fill"]),
            cut=bool(row["cut"]),
        )

    def computing(self, gpu: int) -> npt.NDArray[np.int64]:
        """Begin and end of each compute kernel on a GPU, in order of beginning; shape (n, 2)."""
        rows = self.rows[(self.rows["gpu"] == gpu) & (self.rows["what"] < self._kernels)]
        return np.stack([rows["begin_ns"], rows["end_ns"]], axis=1)

    def split(self, *, gpu: int, begin_ns: int, end_ns: int) -> Split:
        """Cuts a window of one GPU into its parts; it must end by the horizon."""
        if end_ns > self.horizon_ns:
            raise ValueError(f"the truth ends {end_ns - self.horizon_ns} ns before the window does")
        rows = self.rows[self.rows["gpu"] == gpu]
        rows = rows[(rows["end_ns"] > begin_ns) & (rows["begin_ns"] < end_ns)]
        compute = rows[rows["what"] < self._kernels]
        copies = rows[(rows["what"] >= self._kernels) & (rows["group"] == _NONE)]
        comm = rows[rows["group"] != _NONE]
        ready = np.where(comm["ready_ns"] == _NONE, comm["end_ns"], comm["ready_ns"])
        layers = (
            (compute["begin_ns"], compute["end_ns"]),
            (ready, comm["end_ns"]),
            (comm["begin_ns"], ready),
            (copies["begin_ns"], copies["end_ns"]),
        )
        return Split(**dict(zip(_PARTS, _lengths(layers, begin_ns, end_ns), strict=True)))


_NUMPY = {"q": "<i8", "i": "<i4", "f": "<f4", "H": "<u2"}
_PARTS = ("working_ns", "transferring_ns", "waiting_ns", "copying_ns", "nothing_ns")
_Layer = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _lengths(layers: tuple[_Layer, ...], begin_ns: int, end_ns: int) -> list[int]:
    """How long each layer is the first that covers; last, how long none does."""
    clipped = [(np.clip(b, begin_ns, end_ns), np.clip(e, begin_ns, end_ns)) for b, e in layers]
    edges = np.unique(
        np.concatenate([[begin_ns, end_ns], *(part for pair in clipped for part in pair)])
    )
    cells = np.diff(edges)
    free = np.ones(len(cells), dtype=bool)
    lengths = []
    for begins, ends in clipped:
        change = np.zeros(len(edges), dtype=np.int64)
        np.add.at(change, np.searchsorted(edges, begins), 1)
        np.add.at(change, np.searchsorted(edges, ends), -1)
        mine = free & (np.cumsum(change)[:-1] > 0)
        lengths.append(int(cells[mine].sum()))
        free &= ~mine
    lengths.append(int(cells[free].sum()))
    return lengths
