"""What holds RDMA ports up: receivers that are not ready, and detours through the host's memory."""

from __future__ import annotations

from typing import Any

import pytest

from recording_kit import make_row
from recording_rows import BOOT, HERE, Machine, clocks, connect, gpu, s
from test_recording_ranks import COMPUTES, POLLS, SECONDS, rank_rows, sums, uuid_of
from whyidle.schema import (
    GpudirectInfo,
    GpuDistance,
    PcieLink,
    RdmaInfo,
    RdmaPort,
    RdmaTraffic,
)
from whyidle.table import Row, replaced
from whyidle_rules.recording import engine

THERE: Machine = ("n1", BOOT[::-1])
SECOND = [POLLS] * 2 + [COMPUTES] * 6
GPU_PCI, NIC_PCI = "0000:19:00.0", "0000:1a:00.0"
# A port of 400 Gb/s carries this much in a second.
LINE_BYTES = 50_000_000_000


def ports(carried: float, *, unready_per_s: float | None = 0.0) -> list[Row]:
    """Return a port that carries so much of its rate while a quarter of each second is transfer."""
    step = round(LINE_BYTES * carried * 0.25)
    made: list[Row] = [
        make_row(
            RdmaInfo, mono_ns=s(0), device="mlx5_0", port=1, link_layer="infiniband",
            driver="mlx5_core",
        )
    ]  # fmt: skip
    for n in range(SECONDS + 1):
        # As the collector reads them: what is rare comes every ten seconds.
        rare = unready_per_s is not None and n % 10 == 0
        made.append(
            make_row(
                RdmaPort, mono_ns=s(n), device="mlx5_0", port=1, state="active",
                rate_bits_per_s=8 * LINE_BYTES, rx_bytes=n * step, tx_bytes=n * step,
                receiver_not_ready=round(n * (unready_per_s or 0.0)) if rare else None,
            )
        )  # fmt: skip
        made.append(
            make_row(
                RdmaTraffic, mono_ns=s(n), device="mlx5_0", port=1, rx_bytes=n * step,
                tx_bytes=n * step,
            )
        )  # fmt: skip
    return made


def told(more: list[Row], *columns: str, alone: bool = False) -> list[float | None]:
    """Return sums of columns of rank 0 of a job of two ranks, on two nodes or on one."""
    ranks = [rank_rows(rank, SECOND) for rank in range(2)]
    known = [gpu(uuid_of(0), 0, name="H100", pci_bus_id=GPU_PCI), *clocks(0, SECONDS), *more]
    if alone:
        con = connect({HERE: [*known, *ranks[0], *ranks[1]]})
    else:
        con = connect({HERE: [*known, *ranks[0]], THERE: [*known, *ranks[1]]})
    engine.fill(con)
    return sums(con, 0, *columns)


def moved_at(carried: float) -> float:
    """Return what is told as transfer where nothing is known to be wrong."""
    (moved,) = told(ports(carried, unready_per_s=None), "coll_transfer_s")
    assert moved is not None and moved > 2
    return moved


@pytest.mark.parametrize(
    ("per_s", "share"), [(500.0, 1.0), (5.0, 0.0), (None, None)], ids=["many", "a few", "uncounted"]
)
def test_receivers_that_are_not_ready(per_s: float | None, share: float | None) -> None:
    whole = moved_at(0.5)
    unready, moved = told(ports(0.5, unready_per_s=per_s), "coll_unready_s", "coll_transfer_s")
    if share is None:
        assert unready is None
    else:
        assert unready == pytest.approx(whole * share, rel=0.02)
    assert moved == pytest.approx(whole * (1.0 - (share or 0.0)), abs=0.05)


def directly(**info: Any) -> list[Row]:
    facts = {"peer_memory": True, "open_kernel_module": False, "virtual": False, **info}
    return [make_row(GpudirectInfo, mono_ns=s(0), **facts)]


def tree(*, acs: bool | None = False, iommu: str | None = None, path: str = "same_switch") -> Any:
    """Return a GPU and a card below two ports of a switch, each with its bridge."""

    def link(address: str, upstream: str | None, **more: Any) -> Row:
        kind = more.pop("kind", "bridge")
        return make_row(
            PcieLink, mono_ns=s(0), pci_bus_id=address, upstream=upstream, kind=kind, **more
        )

    return [
        link(GPU_PCI, "0000:17:00.0", kind="gpu", iommu=iommu),
        link(NIC_PCI, "0000:17:01.0", kind="nic", iommu=iommu),
        link("0000:17:00.0", "0000:16:00.0", acs_redirect=acs),
        link("0000:17:01.0", "0000:16:00.0", acs_redirect=acs),
        link("0000:16:00.0", None, acs_redirect=True),  # above both: nothing crosses it
        make_row(
            GpuDistance, mono_ns=s(0), gpu_pci_bus_id=GPU_PCI, device="mlx5_0", kind="nic",
            pci_bus_id=NIC_PCI, path=path, nearest_device=True, nearest_gpu=True,
        ),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "facts",
    [
        directly(peer_memory=False),
        [*directly(), *tree(acs=True)],
        [*directly(), *tree(iommu="DMA-FQ")],
    ],
    ids=["no module", "ACS", "IOMMU"],
)
def test_cards_that_cannot_reach_the_gpu_and_carry_little(facts: list[Row]) -> None:
    bounced, moved = told([*ports(0.45), *facts], "coll_bounced_s", "coll_transfer_s")
    assert bounced == pytest.approx(moved_at(0.45), rel=0.02)
    assert moved == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(
    ("facts", "known"),
    [
        ([*directly(), *tree()], True),
        ([*directly(open_kernel_module=True, peer_memory=False), *tree()], True),
        ([*directly(), *tree(iommu="identity")], True),
        ([*directly(virtual=True), *tree(acs=True)], False),
        ([*directly(), *tree(acs=None)], False),
        ([*directly(), *tree(acs=True, path="same_numa")], False),
        (directly(), False),
        (directly(peer_memory=None, open_kernel_module=None), False),
        ([], False),
    ],
    ids=[
        "below one switch", "open driver", "IOMMU that passes through", "virtual", "ACS not read",
        "by the root anyway", "no tree", "modules not read", "nothing",
    ],
)  # fmt: skip
def test_cards_that_reach_the_gpu_or_of_which_it_is_not_known(
    facts: list[Row], known: bool
) -> None:
    bounced, moved = told([*ports(0.45), *facts], "coll_bounced_s", "coll_transfer_s")
    assert bounced == (0 if known else None)
    assert moved == pytest.approx(moved_at(0.45), rel=0.02)


def test_ports_near_their_rate_are_not_held_up() -> None:
    facts = directly(peer_memory=False)
    assert told([*ports(0.9), *facts], "coll_bounced_s") == [0]


def test_gpus_of_one_node_need_no_card() -> None:
    facts = directly(peer_memory=False)
    assert told([*ports(0.45), *facts], "coll_bounced_s", alone=True) == [0]


def test_other_cards_bring_a_way_of_their_own() -> None:
    rows = [
        replaced(row, driver="efa") if isinstance(row, RdmaInfo) else row for row in ports(0.45)
    ]
    assert told([*rows, *directly(peer_memory=False)], "coll_bounced_s") == [None]
