"""What a diagnosis adds up over the windows of a recording, some GPUs at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whyidle_rules.allocate import Given
from whyidle_rules.diagnosis import Grade
from whyidle_rules.groups import Pool
from whyidle_rules.heard import Heard, Told
from whyidle_rules.intervals import Ints
from whyidle_rules.ledger import UNATTRIBUTED
from whyidle_rules.recording import clocks
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.engine import Batch, Filled
from whyidle_rules.recording.series import Truths

Key = tuple[str, str]  # node, uuid
# Number of the GPU, cause, subcause, grade, pool.
Felt = tuple[int, str, str, Grade | None, Pool]
INFERRED: Grade = "inferred"
_SECONDS = ("d_s", "working_s", "empty_s", "spinning_s", "underfilled_s")


@dataclass(slots=True)
class Sums:
    """Seconds of a GPU, by column; its rank by windows, and the size of its job."""

    seconds: dict[str, float] = field(default_factory=dict)
    ranks: Counter[int] = field(default_factory=Counter)
    world_size: int | None = None

    @property
    def rank(self) -> int | None:
        """The rank that it was in most windows."""
        return self.ranks.most_common(1)[0][0] if self.ranks else None


@dataclass(slots=True)
class Unseen:
    """Seconds: empty ones without a counter page, without any process, and all without GPM."""

    unprobed_s: float = 0.0
    unknown_s: float = 0.0
    coarse_s: float = 0.0


class Tally:
    """Sums over all batches of a recording."""

    def __init__(self, filled: Filled) -> None:
        self._filled = filled
        self._heard: dict[str, Heard] = {}
        self.sums: dict[Key, Sums] = {}
        self.charges: dict[Felt, int] = defaultdict(int)
        self.unseen = Unseen()

    @property
    def told(self) -> Mapping[str, Told]:
        """What each rule told, by its id."""
        return {name: heard.told() for name, heard in self._heard.items()}

    def add(self, batch: Batch) -> None:
        """Add the windows of some GPUs."""
        begin = 0
        for number, columns in zip(batch.numbers, batch.columns, strict=True):
            part = slice(begin, begin + columns.size)
            begin = part.stop
            self._add_sums(number, columns)
            for job, row in self._filled.waits.of(number):
                with columns.only(job.own[row]) as own:
                    clocks.add(job, row, job.bins[row], own)
            for given in batch.given:
                rows, ns = _inside(given, part)
                if len(rows):
                    self._charge(number, given, rows, ns, columns)
            for given in batch.beside:
                rows, ns = _inside(given, part)
                if len(rows) and given.rule is not None:
                    heard = self._heard.setdefault(given.rule.id, Heard(given.rule))
                    heard.add(ns, _of(columns, rows), np.zeros(len(rows), dtype=bool))
                    heard.working_s += float(columns["working_s"].sum())

    def _charge(self, number: int, given: Given, rows: Ints, ns: Ints, columns: Columns) -> None:
        rule, whole = given.rule, int(ns.sum())
        cause = UNATTRIBUTED if rule is None else rule.cause
        # Waits for others are left out: what they arose from is another rank's.
        if given.pool == "empty" and cause not in ("collective", "pipeline_bubble"):
            for job, row in self._filled.waits.of(number):
                own = job.own[row]
                inside = (rows >= own.start) & (rows < own.stop)
                at = job.bins[row][rows[inside] - own.start]
                into = job.causes.setdefault((cause, given.subcause), np.zeros_like(job.spin))
                into[row] += np.bincount(at, weights=ns[inside], minlength=into.shape[1]) / 1e9
        if rule is None:
            self.charges[number, cause, given.subcause, None, given.pool] += whole
            return
        inferred = inferred_in(given, rows, columns)
        lowered = int(ns[inferred].sum())
        parts: tuple[tuple[Grade, int], ...] = (
            ("inferred", lowered),
            (rule.grade, whole - lowered),
        )
        for grade, part in parts:
            if part:
                self.charges[number, cause, given.subcause, grade, given.pool] += part
        heard = self._heard.setdefault(rule.id, Heard(rule))
        heard.add(ns, _of(columns, rows), inferred)

    def _add_sums(self, number: int, columns: Columns) -> None:
        gpu = self._filled.gpus[number]
        sums = self.sums.setdefault((gpu.node, gpu.uuid), Sums())
        for name in _SECONDS:
            if name in columns and not np.isnan(columns[name]).all():
                more = float(np.nansum(columns[name]))
                sums.seconds[name] = sums.seconds.get(name, 0.0) + more
        for name in ("rank", "world_size"):
            if name not in columns:
                continue
            values, counts = _counted(columns[name])
            if name == "rank":
                sums.ranks.update(dict(zip(values, counts, strict=True)))
            elif values:
                sums.world_size = max(sums.world_size or 0, *values)
        empty = columns["empty_s"]
        probed = columns["probed"]
        self.unseen.unprobed_s += float(empty[~(probed > 0)].sum())
        nobody = np.nan_to_num(columns["no_process_s"]) != 0
        # What the hardware itself tells of needs no process to explain it.
        for name in ("lost_s", "reset_s", "xid_s"):
            if name in columns:
                nobody |= np.nan_to_num(columns[name]) > 0
        self.unseen.unknown_s += float(empty[np.isnan(probed) & ~nobody].sum())
        if gpu.source == "nvml":
            self.unseen.coarse_s += float(columns["d_s"].sum())


def inferred_in(given: Given, rows: Ints, columns: Columns) -> Truths:
    """Return in which windows a grant is only inferred, whatever its rule is worth elsewhere."""
    if given.pool == "spinning":
        return np.ones(len(rows), dtype=bool)
    if given.rule is None or given.rule.group != "input" or "data_wait_inferred" not in columns:
        return np.zeros(len(rows), dtype=bool)
    return np.asarray(columns["data_wait_inferred"][rows] > 0)


def _inside(given: Given, part: slice) -> tuple[Ints, Ints]:
    """Return the windows of a GPU, numbered from its first one, and their nanoseconds."""
    chosen = (given.windows >= part.start) & (given.windows < part.stop)
    return given.windows[chosen] - part.start, given.ns[chosen]


def _of(columns: Columns, rows: Ints) -> Any:
    return lambda name: columns[name][rows]


def _counted(values: Any) -> tuple[list[int], list[int]]:
    """Return the whole numbers among values, and how often each is there."""
    known = values[np.abs(values) < 1 << 31]
    each, counts = np.unique(known, return_counts=True)
    return [round(value) for value in each.tolist()], counts.tolist()
