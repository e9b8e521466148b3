"""Makes the page of metrics: what is published is put into text when somebody asks, and kept.

The keeper publishes a state every few seconds; a scrape costs a look into memory, and the first one
of a state its rendering. Unknown values have no series: absent stays absent, and is never 0. Series
of causes are there at 0 from when a GPU is first known, so that no first second is lost to rate().
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from whyidle import metrics_own as own
from whyidle.causes import CAUSES
from whyidle.clock import NS_PER_S
from whyidle.ledger_counts import Counts, Part
from whyidle.metrics_families import SAMPLED, Family
from whyidle.metrics_recent import Labels, Runs, Values
from whyidle.settle import Settling

PAIRS: tuple[tuple[str, str], ...] = tuple(
    (cause.slug, subcause)
    for cause in CAUSES
    if not cause.root_only
    for subcause in cause.subcauses
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is on the page beyond the usual."""

    subcause: bool = False
    job: bool = False


@dataclass(slots=True, kw_only=True)
class State:
    """Everything that a page shows; nobody changes it once it is published.

    `counts` is None where nothing is settled: an agent without rules has no ledger.
    """

    version: str
    mono_ns: int
    wall_ns: int
    counts: Counts | None = None
    settling: Settling | None = None
    # GPUs that are known now, with their index as a label.
    gpus: Mapping[str, str] = field(default_factory=dict)
    sampled: Values = field(default_factory=dict)
    runs: Runs | None = None
    newest_ns: int | None = None
    answers: Mapping[int, int] = field(default_factory=dict)
    failed_connections: Mapping[str, int] = field(default_factory=dict)
    reload_failed: bool | None = None


class Pages:
    """The page of the state that was published last."""

    __slots__ = ("_choice", "_lock", "_rendered", "_state")

    def __init__(self, state: State, choice: Choice | None = None) -> None:
        self._choice = choice or Choice()
        self._lock = threading.Lock()
        self._state = state
        self._rendered: dict[str, bytes] = {}

    def publish(self, state: State) -> None:
        """Show a state from now on."""
        with self._lock:
            self._state = state
            self._rendered = {}

    def __call__(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type for an Accept header."""
        encode, kind = choose_encoder(accept)
        with self._lock:
            body = self._rendered.get(kind)
            if body is None:
                registry = CollectorRegistry(auto_describe=False)
                registry.register(_Once(families(self._state, self._choice)))
                body = self._rendered[kind] = encode(registry)
        return body, kind


class _Once(Collector):
    """What prometheus-client collects from."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics

    def describe(self) -> Iterable[Metric]:
        return ()  # registering asks for names, to refuse doubles; there is one of us


def families(state: State, choice: Choice) -> list[Metric]:
    """Return the families of a state that have a value."""
    found: dict[str, Metric] = {}
    for family, labels, value in _everything(state, choice):
        names = family.labels
        if choice.subcause and family is own.IDLE:
            names = (*names, "subcause")
        metric = found.get(family.name)
        if metric is None:
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            by = getattr(family, "by", "")
            metric = found[family.name] = kind(
                family.name, family.meaning, labels=(*names, by) if by else names
            )
        assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
        metric.add_metric(labels, value)
    return list(found.values())


Sample = tuple[Family, Labels, float]


def _everything(state: State, choice: Choice) -> Iterator[Sample]:
    if state.counts is not None:
        # While nothing can be charged a 0 would be a lie.
        failing = state.settling is not None and state.settling.failing
        yield from _ledger(state.counts, {} if failing else state.gpus, choice)
        if choice.job:
            yield from _jobs(state.counts)
    for family in (own.INFO, *SAMPLED):
        for labels, value in state.sampled.get(family.name, {}).items():
            yield family, labels, value
    yield from _settling(state)
    yield from _agent(state)


def seconds(ns: int) -> float:
    """Return the double that is nearest to so many seconds: exact to the ns for 104 days."""
    return ns / NS_PER_S


def _ledger(counts: Counts, known: Mapping[str, str], choice: Choice) -> Iterator[Sample]:
    indices = {uuid: "" if gpu is None else str(gpu) for uuid, gpu in counts.gpus.items()}
    for uuid, gpu in {**indices, **known}.items():
        label = gpu or indices.get(uuid, "")
        working = counts.total.get(Part(uuid, "working", None, None), 0)
        yield own.WORKING, (label, uuid), seconds(working)
        pools: dict[str, dict[str, int]] = {"empty": {}, "spinning": {}}
        for cause, subcause in PAIRS:
            both = 0
            for pool, sums in pools.items():
                ns = counts.total.get(Part(uuid, pool, cause, subcause), 0)
                sums[cause] = sums.get(cause, 0) + ns
                both += ns
            if choice.subcause:
                yield own.IDLE, (label, uuid, cause, subcause), seconds(both)
        for cause in pools["empty"]:
            empty, spinning = pools["empty"][cause], pools["spinning"][cause]
            if not choice.subcause:
                yield own.IDLE, (label, uuid, cause), seconds(empty + spinning)
            yield own.EMPTY, (label, uuid, cause), seconds(empty)
            yield own.SPINNING, (label, uuid, cause), seconds(spinning)


def _jobs(counts: Counts) -> Iterator[Sample]:
    for job, parts in counts.by_job.items():
        idle: dict[tuple[str, str], int] = {}
        for part, ns in parts.items():
            gpu = counts.gpus.get(part.uuid)
            label = "" if gpu is None else str(gpu)
            if part.pool == "working":
                yield own.JOB_WORKING, (job, label, part.uuid), seconds(ns)
            elif part.cause is not None:
                key = (part.uuid, part.cause)
                idle[key] = idle.get(key, 0) + ns
        for (uuid, cause), ns in idle.items():
            gpu = counts.gpus.get(uuid)
            yield own.JOB_IDLE, (job, "" if gpu is None else str(gpu), uuid, cause), seconds(ns)


def _settling(state: State) -> Iterator[Sample]:
    counts, settling = state.counts, state.settling
    if counts is None or settling is None:
        return
    if counts.settled_ns is not None:
        lag = state.mono_ns - counts.settled_ns
        yield own.LAG, (), seconds(lag)
        yield own.SETTLED, (), seconds(state.wall_ns - lag)
        yield own.SETTLED_MONOTONIC, (), seconds(counts.settled_ns)
    if counts.begin_ns is not None:
        yield own.BEGAN, (), seconds(counts.begin_ns)
    yield own.SETTLEMENTS, (), settling.settled
    yield own.FAILURES, (), settling.failures
    yield own.FAILING, (), float(settling.failing)
    yield own.SKIPPED, (), seconds(settling.skipped_ns)
    yield own.WINDOWS, (), settling.windows
    yield own.EVALUATION_CPU, (), seconds(settling.cpu_ns)
    if settling.took_ns is not None:
        yield own.TOOK, (), seconds(settling.took_ns)


def _agent(state: State) -> Iterator[Sample]:
    if state.runs is not None:
        for name, runs in state.runs.runs.items():
            yield own.RUNS, (name,), runs
        for name, missed in state.runs.missed.items():
            yield own.MISSED, (name,), missed
        for labels, errors in state.runs.errors.items():
            yield own.ERRORS, labels, errors
    if state.newest_ns is not None:
        yield own.SAMPLE_AGE, (), seconds(state.mono_ns - state.newest_ns)
    for code, answers in state.answers.items():
        yield own.ANSWERS, (str(code),), answers
    for reason, connections in state.failed_connections.items():
        yield own.CONNECTIONS, (reason,), connections
    if state.reload_failed is not None:
        yield own.RELOAD_FAILED, (), float(state.reload_failed)
    yield own.PAGE_TIME, (), seconds(state.wall_ns)
    yield own.BUILD, (state.version,), 1.0
