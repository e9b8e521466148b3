"""Each NVLink of each GPU: state, payload, errors. All of it are totals, so 10 s lose nothing.

Source: nvml.h, field values with the link in scopeId. Blackwell counts under numbers of its own
(NVLink 5) and has dropped the old ones; both are asked, and what a GPU does not have stays NULL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, Problem
from whyidle.collect.gpu_info import parse_bus_id
from whyidle.collect.gpu_list import LISTS, Gpus, is_gone, text, value, whole
from whyidle.collect.gpu_units import KIB, Notes, parts
from whyidle.host import Answer, Host, NvmlError
from whyidle.schema import NvLink

# NVML_FI_DEV_NVLINK_* of one link, by what they are called here.
FIELDS: tuple[tuple[str, int], ...] = (
    ("tx_kib", 138),
    ("rx_kib", 139),
    ("replays", 161),
    ("recoveries", 162),
    ("crc_errors", 163),
    ("speed", 164),
    ("state", 165),
    ("version", 166),
    ("tx_bytes5", 202),
    ("rx_bytes5", 204),
    ("rx_errors", 208),
    ("recoveries_failed", 214),
    ("recoveries5", 215),
    ("effective_errors", 219),
    ("symbol_errors", 221),
)
_COUNT_FIELD = 91
# NVML_NVLINK_MAX_LINKS is 36 today; a count beyond this is garbage, not a link to ask about.
LINKS_LIMIT = 128
# nvmlIntNvLinkDeviceType_t
REMOTES: Mapping[int, str] = MappingProxyType({0: "gpu", 1: "ibmnpu", 2: "switch", 255: "unknown"})
# States of field 165 in which a link can carry something: active, and asleep until asked.
_UP = frozenset({1, 2})
_MB = 1_000_000
# What is at the other end changes with a reset or a new cable.
# State and errors of 144 links take 2.5 ms; bytes come with GPM, eight times a second.
_EVERY_S = 20.0
_REMOTE_EVERY_NS = 600 * NS_PER_S
# A link that is down does not tell its other end.
_AGAIN_NS = 60 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """The other end of a link, and when it was asked."""

    asked_ns: int
    kind: str | None
    pci_bus_id: str | None


def link_count(answer: Answer) -> int | None:
    """Return how many links an answer to field 91 tells; None if it tells nothing sensible."""
    count = whole(answer[0]) if isinstance(answer, LISTS) and answer else None
    return count if count is not None and 0 <= count <= LINKS_LIMIT else None


def row(uuid: str, link: int, mono_ns: int, values: Answer, remote: Remote) -> NvLink:
    """Return the row of an answer of FIELDS."""
    told = parts(values, len(FIELDS))
    found = {name: whole(part) for (name, _), part in zip(FIELDS, told, strict=True)}
    state, speed = found["state"], found["speed"]
    return NvLink(
        mono_ns=mono_ns,
        uuid=uuid,
        link=link,
        up=None if state is None else state in _UP,
        # A link that is down has no speed; the driver says 0.
        speed_bytes_per_s=speed * _MB if speed else None,
        version=found["version"],
        remote=remote.kind,
        remote_pci=remote.pci_bus_id,
        tx_bytes=_bytes(found["tx_kib"], found["tx_bytes5"]),
        rx_bytes=_bytes(found["rx_kib"], found["rx_bytes5"]),
        replays=found["replays"],
        recoveries=_first(found["recoveries"], found["recoveries5"]),
        recoveries_failed=found["recoveries_failed"],
        crc_errors=found["crc_errors"],
        rx_errors=found["rx_errors"],
        effective_errors=found["effective_errors"],
        symbol_errors=found["symbol_errors"],
    )


def _first(old: int | None, new: int | None) -> int | None:
    return new if old is None else old


def _bytes(kib: int | None, exact: int | None) -> int | None:
    return _first(None if kib is None else kib * KIB, exact)


class _Links:
    """The collector; it keeps how many links a GPU has and what they lead to."""

    __slots__ = ("_counts", "_gpus", "_notes", "_remotes")

    def __init__(self) -> None:
        self._gpus = Gpus()
        self._notes = Notes()
        self._counts: dict[str, int] = {}
        self._remotes: dict[tuple[str, int], Remote] = {}

    def __call__(self, host: Host) -> Iterator[NvLink | Problem]:
        for gpu in self._gpus.ask(host):
            if gpu.parent is not None:
                continue  # links belong to the whole GPU
            try:
                yield from self._rows(host, gpu.uuid)
            except NvmlError as error:
                self._counts.pop(gpu.uuid, None)
                yield Problem(subject=gpu.uuid, message=str(error))

    def _rows(self, host: Host, uuid: str) -> Iterator[NvLink | Problem]:
        count = self._counts.get(uuid)
        if count is None:
            count = link_count(value(host, "FieldValues", uuid, _COUNT_FIELD))
            if not count:
                yield from self._notes.once(uuid, "it has no NVLink")
                return
            self._counts[uuid] = count
        for link in range(count):
            remote = self._remote(host, uuid, link)
            values = value(host, "LinkFieldValues", uuid, link, *(number for _, number in FIELDS))
            yield row(uuid, link, host.clock.mono_ns(), values, remote)

    def _remote(self, host: Host, uuid: str, link: int) -> Remote:
        now_ns = host.clock.mono_ns()
        known = self._remotes.get((uuid, link))
        if known is not None:
            keep_ns = _AGAIN_NS if known.kind is None else _REMOTE_EVERY_NS
            if now_ns - known.asked_ns < keep_ns:
                return known
        kind = whole(_told(host, "NvLinkRemoteDeviceType", uuid, link))
        bus_id = text(_told(host, "NvLinkRemotePciBusId", uuid, link))
        found = Remote(
            asked_ns=now_ns,
            kind=None if kind is None else REMOTES.get(kind, "unknown"),
            pci_bus_id=None if bus_id is None else parse_bus_id(bus_id),
        )
        self._remotes[uuid, link] = found
        return found


def _told(host: Host, call: str, uuid: str, link: int) -> Answer:
    """Return an answer about the other end; None where this link tells nothing of it."""
    try:
        return value(host, call, uuid, link)
    except NvmlError as error:
        if is_gone(error):
            raise
        return None  # a link that is down refuses with codes of many kinds


def make() -> Collect:
    """Return the collector."""
    return _Links()


GPU_NVLINK = Collector(name="gpu_nvlink", lane="slow", make=make, thread="nvml", every_s=_EVERY_S)
