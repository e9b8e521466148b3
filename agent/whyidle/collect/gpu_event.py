"""Xids that the driver reports through its event set: the second witness beside the kernel log.

Source: nvml.h, nvmlEventSetWait. A set tells what happened since it was made, without a time; it
may miss what the kernel log has, and works where the log may not be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Collect, Collector, NoData, Problem
from whyidle.collect.gpu_info import parse_bus_id
from whyidle.collect.gpu_list import ABSENT, LISTS, Gpus, text, value, whole
from whyidle.host import Answer, Host, NvmlError
from whyidle.schema import GpuEvent

_ADDRESSES_EVERY_NS = 60 * NS_PER_S


def parse(answer: Answer) -> tuple[tuple[str | None, int, int | None], ...]:
    """Return (uuid, xid, GPU instance) of an answer to "xids"; raises ValueError."""
    found = []
    for item in answer if isinstance(answer, LISTS) else ():
        if not isinstance(item, LISTS) or len(item) != 3 or whole(item[1]) is None:
            raise ValueError(f"xids: {item!r} is not (uuid, xid, instance)")
        found.append((text(item[0]), int(str(item[1])), whole(item[2])))
    return tuple(found)


def make() -> Collect:
    """Return the collector; it keeps the addresses of the GPUs, which a lost one cannot tell."""
    gpus = Gpus()
    addresses: dict[str, str] = {}
    asked_ns: int | None = None

    def collect(host: Host) -> Iterator[GpuEvent | Problem]:
        nonlocal asked_ns
        listed = gpus.ask(host)
        now_ns = host.clock.mono_ns()
        if asked_ns is None or now_ns - asked_ns >= _ADDRESSES_EVERY_NS:
            asked_ns = now_ns
            addresses.update(_addresses(host, [gpu.uuid for gpu in listed if gpu.parent is None]))
        try:
            events = parse(host.nvml("xids"))
        except NvmlError as error:
            if error.code in ABSENT:
                raise NoData("the driver has no event sets") from None
            raise
        mono_ns = host.clock.mono_ns()
        for uuid, xid, instance in events:
            yield GpuEvent(
                mono_ns=mono_ns,
                uuid=uuid,
                pci_bus_id=None if uuid is None else addresses.get(uuid),
                kind="xid",
                xid=xid,
                source="nvml",
                pid=None,
                process=None,
                gpu_instance=instance,
                text=None,
            )

    return collect


def _addresses(host: Host, uuids: list[str]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for uuid in uuids:
        try:
            bus_id = text(value(host, "PciBusId", uuid))
        except NvmlError:
            continue  # its address stays as it was told before; gpu_state says that it is ill
        address = None if bus_id is None else parse_bus_id(bus_id)
        if address is not None:
            found[uuid] = address
    return found


GPU_EVENT = Collector(name="gpu_event", lane="normal", make=make, thread="nvml")
