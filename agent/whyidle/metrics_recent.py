"""What was sampled last, as the values of the sampled families; fed from the tail of the spool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whyidle.clock import NS_PER_S
from whyidle.metrics_families import SAMPLED, STALE_RARE_S, Sampled
from whyidle.metrics_own import INFO, INFO_LABELS, INFO_STALE_S
from whyidle.spool_read import Piece
from whyidle.spool_tail import Record, newest_ns, records

# Labels of one family at most: a node has some hundred disks, a bad one any number of cgroups.
KEYS_LIMIT = 512

Labels = tuple[str, ...]
Values = dict[str, dict[Labels, float]]


@dataclass(slots=True)
class _Mean:
    weighted: float = 0.0
    length_ns: int = 0


@dataclass(slots=True, kw_only=True)
class Runs:
    """Accounts of collectors, since the keeper began."""

    runs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    missed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    errors: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def copy(self) -> Runs:
        """Return a copy that later runs leave alone."""
        return Runs(runs=dict(self.runs), missed=dict(self.missed), errors=dict(self.errors))


class Recent:
    """The newest rows of those tables that families show."""

    __slots__ = ("_means", "_newest", "_sums", "_tables", "gpus", "newest_ns", "runs")

    def __init__(self, families: Sequence[Sampled] = SAMPLED) -> None:
        self._tables: dict[str, list[Sampled]] = {}
        for family in families:
            self._tables.setdefault(family.table, []).append(family)
        self._newest: dict[str, dict[Labels, tuple[int, Record]]] = {}
        self._means: dict[tuple[str, Labels], _Mean] = {}
        self._sums: dict[tuple[str, Labels], int] = {}
        # Of each GPU that was seen in the last minutes: what it was called last.
        self.gpus: dict[str, tuple[int, Record]] = {}
        self.newest_ns: int | None = None
        self.runs = Runs()

    def take(self, pieces: Iterable[Piece]) -> None:
        """Take in what was appended to the spool."""
        for piece in pieces:
            at = newest_ns(piece)
            if at is not None and (self.newest_ns is None or at > self.newest_ns):
                self.newest_ns = at
            for table, families in self._tables.items():
                for record in records(piece, table):
                    self._take(table, families, record)
            for record in records(piece, "gpu_info"):
                self.gpus[record["uuid"]] = (record["mono_ns"], record)
            self._account(piece)

    def active_gpus(self, now_ns: int) -> list[str]:
        """Return the GPUs that something is known of now."""
        seen: dict[str, None] = {}
        for family in self._tables.get("gpu_activity", ()):
            oldest = now_ns - family.stale_s * NS_PER_S
            for labels, (at, _) in self._newest.get("gpu_activity", {}).items():
                if at >= oldest:
                    seen[labels[0]] = None
            break
        return list(seen)

    def index(self, uuid: str) -> str:
        """Return the index of a GPU as a label; empty where nobody told it."""
        known = self.gpus.get(uuid)
        return "" if known is None else _text(known[1]["gpu"])

    def values(self, now_ns: int) -> Values:
        """Return values by family and labels; averages begin anew. What is stale is left out."""
        self._forget(now_ns)
        found: Values = {}
        for table, families in self._tables.items():
            for key, (at, record) in self._newest.get(table, {}).items():
                for family in families:
                    if at >= now_ns - family.stale_s * NS_PER_S:
                        self._value(family, key, record, found)
        self._means.clear()
        info = found.setdefault(INFO.name, {})
        for uuid, (_, record) in self.gpus.items():
            labels = (_text(record["gpu"]), uuid, *(_text(record[name]) for name in INFO_LABELS))
            info[labels] = 1.0
        return found

    def _take(self, table: str, families: Sequence[Sampled], record: Record) -> None:
        if table == "net_link" and record["namespace"]:
            return  # of a rank's own network namespace: the same names again
        key = tuple(_text(record[name]) for name in families[0].keys)
        newest = self._newest.setdefault(table, {})
        known = newest.get(key)
        at = record["mono_ns"]
        if known is None and len(newest) >= KEYS_LIMIT:
            return
        if known is None or at >= known[0]:
            newest[key] = (at, record)
        for family in families:
            if family.way != "newest":
                self._add(family, key, record)

    def _add(self, family: Sampled, key: Labels, record: Record) -> None:
        column = family.columns[0][0]
        value = record[column]
        if value is None:
            return
        if family.way == "sum":
            self._sums[family.name, key] = self._sums.get((family.name, key), 0) + value
            return
        begin, end = record["t0_ns"], record["t1_ns"]
        if begin is None or end is None or end <= begin:
            return
        mean = self._means.setdefault((family.name, key), _Mean())
        mean.weighted += value * (end - begin)
        mean.length_ns += end - begin

    def _value(self, family: Sampled, key: Labels, record: Record, found: Values) -> None:
        into = found.setdefault(family.name, {})
        labels = (self.index(key[0]), *key) if family.labels[:2] == ("gpu", "uuid") else key
        if family.way == "mean":
            mean = self._means.get((family.name, key))
            if mean is not None:
                into[labels] = mean.weighted / mean.length_ns
            return
        if family.way == "sum":
            total = self._sums.get((family.name, key))
            if total is not None:
                into[labels] = total * family.scale
            return
        for column, value in family.columns:
            known = record[column]
            if known is not None:
                full = (*labels, value) if family.by else labels
                into[full] = scaled(known, family.scale)

    def _forget(self, now_ns: int) -> None:
        oldest = now_ns - STALE_RARE_S * NS_PER_S
        for newest in self._newest.values():
            for key in [key for key, (at, _) in newest.items() if at < oldest]:
                del newest[key]
        rare = now_ns - INFO_STALE_S * NS_PER_S
        for uuid in [uuid for uuid, (at, _) in self.gpus.items() if at < rare]:
            del self.gpus[uuid]

    def _account(self, piece: Piece) -> None:
        for record in records(piece, "tick"):
            name = record["collector"]
            self.runs.runs[name] += record["began_ns"] is not None
            self.runs.missed[name] += record["missed"]
        for record in records(piece, "collector_error"):
            self.runs.errors[record["collector"], record["kind"]] += 1


def scaled(value: Any, scale: float) -> float:
    """Return a value in base units; thousandths are divided, so that 0.1 stays 0.1."""
    if scale < 1:
        return float(value) / round(1 / scale)
    return float(value) * scale


def _text(value: Any) -> str:
    return "" if value is None else str(value)
