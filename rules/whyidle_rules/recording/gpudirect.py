"""Whether network cards of a node can reach a GPU's memory by themselves (GPUDirect RDMA).

Only what is certain counts: no module that would let them, or a switch or an IOMMU that sends what
goes from card to GPU through the root. What is not recorded, or belongs to other drivers than
mlx5's, is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle_rules.intervals import Ints
from whyidle_rules.recording.series import Floats, counter, fetch, one
from whyidle_rules.recording.threads import GAP_NS, LEAST_NS

_HALF_NS = NS_PER_S // 2
# The Elastic Fabric Adapter, and others, bring a way to GPU memory of their own.
_DRIVER = "mlx5_core"
# Paths on which what goes from card to GPU need not reach the root.
_BELOW_ROOT = ("same_switch", "switches")
# Groups of an IOMMU that passes addresses through translate nothing.
_TRANSLATES = ("DMA", "DMA-FQ")
# Copies through the host halve what a port carries; from here on it is not held up by them.
BOUNCED_RATIO = 0.6


def why_off(con: duckdb.DuckDBPyConnection, node: str, boot_id: str, uuid: str) -> str | None:
    """Return why cards cannot reach the memory of this GPU directly; "" if they can, or None."""
    at = {"node": node, "boot": boot_id, "uuid": uuid}
    here = "node = $node AND boot_id = $boot"
    drivers = con.execute(
        f"SELECT DISTINCT driver FROM rdma_info WHERE {here}",
        {"node": node, "boot": boot_id},
    ).fetchall()
    told = con.execute(
        "SELECT peer_memory, open_kernel_module, virtual FROM gpudirect_info"
        f" WHERE {here} ORDER BY mono_ns DESC LIMIT 1",
        {"node": node, "boot": boot_id},
    ).fetchall()
    if not told or not drivers or {driver for (driver,) in drivers} != {_DRIVER}:
        return None
    peer_memory, opened, virtual = told[0]
    if peer_memory is False and opened is False:
        return "neither nvidia_peermem nor the open GPU driver is loaded"
    if virtual is not False or (peer_memory is None and opened is None):
        return None  # the switches of a virtual machine are not its own
    pairs = con.execute(
        "SELECT d.gpu_pci_bus_id, d.pci_bus_id FROM gpu_distance d JOIN gpu_info g USING"
        f" (node, boot_id) WHERE {here} AND g.uuid = $uuid AND d.kind = 'nic'"
        f" AND g.pci_bus_id = d.gpu_pci_bus_id AND d.path IN {_BELOW_ROOT}"
        " AND d.nearest_device GROUP BY ALL ORDER BY ALL",
        at,
    ).fetchall()
    links = {
        address: (upstream, acs, iommu)
        for address, upstream, acs, iommu in con.execute(
            "SELECT pci_bus_id, arg_max(upstream, mono_ns), arg_max(acs_redirect, mono_ns),"
            f" arg_max(iommu, mono_ns) FROM pcie_link WHERE {here} GROUP BY ALL",
            {"node": node, "boot": boot_id},
        ).fetchall()
    }
    found = [_between(gpu, card, links) for gpu, card in pairs]
    if not found or None in found:
        return None
    # One card that reaches it is enough.
    return "" if "" in found else found[0]


def _between(
    gpu: str, card: str, links: Mapping[str, tuple[str | None, bool | None, str | None]]
) -> str | None:
    above = [_above(address, links) for address in (gpu, card)]
    common = set(above[0]) & set(above[1])
    ports = [port for chain in above for port in chain if port not in common]
    redirects = [links[port][1] for port in ports if port in links]
    translated = [links[end][2] for end in (gpu, card) if end in links]
    if True in redirects:
        port = next(port for port in ports if port in links and links[port][1])
        return f"ACS of PCIe bridge {port} sends traffic between devices to the root"
    if any(kind in _TRANSLATES for kind in translated):
        return "the IOMMU translates the addresses of both devices"
    return None if None in redirects or not redirects else ""


def _above(
    address: str, links: Mapping[str, tuple[str | None, bool | None, str | None]]
) -> list[str]:
    found: list[str] = []
    upstream = links[address][0] if address in links else None
    while upstream is not None and upstream not in found:
        found.append(upstream)
        upstream = links[upstream][0] if upstream in links else None
    return found


def line_ratio(con: duckdb.DuckDBPyConnection, at: Mapping[str, Any], centres: Ints) -> Floats:
    """Return what active RDMA ports carry in the busier direction, of what their rates allow."""
    (rate,) = one(
        con,
        "SELECT sum(rate) FROM (SELECT device, port, max(rate_bits_per_s) AS rate FROM rdma_port"
        " WHERE node = $node AND boot_id = $boot AND state = 'active' GROUP BY device, port)",
        at,
    )
    if not rate:
        return np.full(len(centres), np.nan)
    ways = []
    for name in ("rx_bytes", "tx_bytes"):
        rows = fetch(
            con,
            f"SELECT device, port, mono_ns, {name}::DOUBLE AS bytes FROM rdma_traffic"
            " WHERE node = $node AND boot_id = $boot ORDER BY mono_ns",
            at,
        )
        total, known = np.zeros(len(centres)), np.zeros(len(centres), dtype=bool)
        for own in rows.groups("device", "port").values():
            grown, seen = counter(
                own["mono_ns"].astype(np.int64), own["bytes"].astype(np.float64), gap_ns=GAP_NS
            ).around(centres, _HALF_NS, LEAST_NS)
            total += grown * 1e9 / np.maximum(seen, 1.0)
            known |= seen > 0
        ways.append(np.where(known, total, np.nan))
    return np.asarray(np.maximum(*ways) / (float(rate) / 8))
