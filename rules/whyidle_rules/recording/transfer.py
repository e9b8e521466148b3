"""What a rank's transfer went over, and what held it up there: each second of it to one thing."""

from __future__ import annotations

import numpy as np

from whyidle_rules.recording.fabric import LINE_RATIO, Fabric
from whyidle_rules.recording.gpudirect import BOUNCED_RATIO
from whyidle_rules.recording.inspector import NOTHING, Exact
from whyidle_rules.recording.series import Array, Floats
from whyidle_rules.recording.windows import Gpu


def columns(
    way: Fabric,
    gpu: Gpu,
    spun: Floats,
    moved: Floats,
    *,
    apart: bool,
    exact: Exact = NOTHING,
) -> dict[str, Array]:
    """Return the columns of a transfer of `moved` seconds in each window.

    `spun` is how long ranks communicated together, transfer or not; `apart`: on several nodes;
    `exact` is what NCCL itself told of the GPU's collectives.
    """
    rdma = (way.transport == "ib") | (way.transport == "roce")
    # On one node, bytes over TCP are of something else: data, metrics.
    detour = (way.transport == "tcp") & (way.rdma_ports > 0) & apart
    degraded = rdma & way.degraded
    congested = rdma & way.congested & ~degraded
    unready = np.zeros(len(moved), dtype=bool)
    if way.unready is not None:
        unready = rdma & way.unready & ~degraded & ~congested
    bounced = np.zeros(len(moved), dtype=bool)
    if apart and _held_up(way, gpu, np.where(rdma, spun, 0.0)):
        bounced = rdma & ~degraded & ~congested & ~unready
    why = np.full(len(moved), None, dtype=object)
    why[bounced] = way.direct_why
    counted, direct = way.unready is not None, way.direct_why is not None
    plain = moved * ~(detour | degraded | congested | unready | bounced)
    small = np.full(len(moved), np.nan)
    if exact.small_ratio is not None:
        small = plain * exact.small_ratio
    return {
        "coll_transfer_s": plain - np.nan_to_num(small),
        "coll_small_s": small,
        "coll_line_ratio": _of_line(way, moved, exact),
        "coll_detour_s": np.where(way.known, moved * detour, np.nan),
        "coll_degraded_s": np.where(way.known, moved * degraded, np.nan),
        "coll_congested_s": np.where(way.known, moved * congested, np.nan),
        "coll_unready_s": np.where(way.known & counted, moved * unready, np.nan),
        "coll_bounced_s": np.where(way.known & direct, moved * bounced, np.nan),
        "gpudirect_why": why,
        "coll_transport": way.transport,
        "rdma_ports": np.full(len(moved), float(way.rdma_ports)),
    }


def _of_line(way: Fabric, moved: Floats, exact: Exact) -> Floats:
    """Return the bandwidth while data moved, of the line rate; NaN where either is unknown.

    NCCL's own bus bandwidth is of its large collectives; without it, bytes of links over the time
    that all ranks spent moving, which is a lower bound: they are counted over a second or two.
    """
    if exact.bus_bytes_per_s is not None:
        told = exact.bus_bytes_per_s / way.line_bytes_per_s
    else:
        told = LINE_RATIO * way.most_s / np.where(moved > 0, moved, np.nan)
    return np.asarray(np.minimum(told, 1.0))


def _held_up(way: Fabric, gpu: Gpu, spun: Floats) -> bool:
    """Say whether copies through the host hold the ports up: they move less than they could.

    What they carry beside computing counts too, so that the rate is the most that it can have been.
    """
    carried = np.where(np.isnan(way.line_ratio), 0.0, way.line_ratio * gpu.length / 1e9)
    known = not np.isnan(way.line_ratio).all()
    return bool(way.direct_why) and known and bool(carried.sum() < BOUNCED_RATIO * np.nansum(spun))
