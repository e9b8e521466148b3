"""What each RDMA port is and where its device sits; once a minute.

Source: /sys/class/infiniband (https://docs.kernel.org/infiniband/sysfs.html).
"""

from __future__ import annotations

from collections.abc import Iterator

from whyidle.collect.collector import Collect, Collector, Problem
from whyidle.collect.gpu_info import parse_numa_node
from whyidle.collect.rdma_counters import parse_rate, parse_state
from whyidle.collect.rdma_device import CLASS, devices, interfaces, pci_address, ports
from whyidle.host import Host
from whyidle.schema import RdmaInfo

# node_type of drivers that are no InfiniBand adapter: an RNIC talks iWARP.
_RNIC = "rnic"
_USNIC = "usnic"
_TRANSPORTS = {"infiniband": "infiniband", "ethernet": "roce"}


def transport(link_layer: str | None, node_type: str | None, driver: str | None) -> str | None:
    """Return what a port talks, None where nothing says."""
    if driver == "efa":
        return "efa"
    if driver == "hfi1":
        return "opa"
    if node_type == _RNIC:
        return "iwarp"
    if node_type is not None and node_type.startswith(_USNIC):
        return "usnic"
    return None if link_layer is None else _TRANSPORTS.get(link_layer)


def _text(host: Host, path: str) -> str | None:
    try:
        return host.read(path).strip() or None
    except OSError:
        return None  # not every driver has every file


def _last(host: Host, path: str) -> str | None:
    try:
        return host.link(path).rpartition("/")[2]
    except OSError:
        return None


def _exists(host: Host, path: str) -> bool:
    try:
        host.stat(path)
    except OSError:
        return False
    return True


def _row(host: Host, device: str, port: int, count: int) -> RdmaInfo:
    base, directory = f"{CLASS}/{device}", f"{CLASS}/{device}/ports/{port}"
    layer = (_text(host, f"{directory}/link_layer") or "").lower()
    node_type = _text(host, f"{base}/node_type")
    driver = _last(host, f"{base}/device/driver")
    over = interfaces(host, device, port, count)
    address = pci_address(host, device)
    numa = _text(host, f"{base}/device/numa_node")
    state, rate = _text(host, f"{directory}/state"), _text(host, f"{directory}/rate")
    active = state is not None and parse_state(state) == "active"
    link_layer = layer if layer in _TRANSPORTS else None
    return RdmaInfo(
        mono_ns=host.clock.mono_ns(),
        device=device,
        port=port,
        link_layer=link_layer,
        transport=transport(link_layer, node_type and parse_state(node_type), driver),
        driver=driver,
        node_guid=_text(host, f"{base}/node_guid"),
        firmware=_text(host, f"{base}/fw_ver"),
        hca_type=_text(host, f"{base}/hca_type"),
        board_id=_text(host, f"{base}/board_id"),
        interfaces=",".join(over) or None,
        pci_bus_id=address,
        numa_node=None if numa is None else parse_numa_node(numa),
        virtual_function=None if address is None else _exists(host, f"{base}/device/physfn"),
        bond="_bond_" in device
        or any(_exists(host, f"sys/class/net/{name}/bonding") for name in over),
        rate_bits_per_s=parse_rate(rate) if active and rate is not None else None,
    )


def collect(host: Host) -> Iterator[RdmaInfo | Problem]:
    """Yield a row for each port."""
    for device in devices(host):
        try:
            numbers = ports(host, device)
            for number in numbers:
                yield _row(host, device, number, len(numbers))
        except OSError as error:
            yield Problem(subject=device, message=f"{error.strerror}: {error.filename}")
        except ValueError as error:
            yield Problem(subject=device, message=str(error))


def make() -> Collect:
    """Return the collector, which keeps nothing."""
    return collect


RDMA_INFO = Collector(name="rdma_info", lane="slow", make=make, thread="rdma", deadline_s=5.0)
