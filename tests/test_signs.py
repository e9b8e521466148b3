"""Signs of hardware, from a machine's own files and NVML through collectors, evidence and rules.

Each cause has a story in which it is named and stories in which it is not: a wrong path, column or
unit anywhere on the way fails here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from signs_kit import COMPUTES, EMPTY, POLLS, PORT, Now, Story, charged, told
from whyidle_rules.diagnosis import Diagnosis

SECONDS = 30
# A lane of PCIe generation 4 carries 1.969 GB/s, of generation 2 0.5 GB/s; a packet takes 15 %.
GEN4_X16_BYTES_PER_S = 1.969e9 * 16 * 0.85
GEN2_X16_BYTES_PER_S = 0.5e9 * 16 * 0.85
PORT_BYTES_PER_S = 50e9
# The kernel counts the data of a port in words of four bytes.
WORD = 4


def half_empty(now: float) -> tuple[float, float]:
    return EMPTY if now % 1 < 0.5 else COMPUTES


def talks(now: float) -> tuple[float, float]:
    return POLLS if now % 1 < 0.5 else COMPUTES


def share(found: Diagnosis, name: str) -> float:
    """Return the part of the idle time that is charged to this."""
    idle = found.totals.idle_s
    return charged(found).get(name, 0.0) / idle if idle else 0.0


def accused(found: Diagnosis) -> set[str]:
    """Return what more than a hundredth of all GPU time is charged to."""
    wall = found.totals.gpu_s
    return {
        name
        for name, seconds in charged(found).items()
        if seconds > 0.01 * wall and not name.startswith("unattributed")
    }


# PCIe: one node, its GPU empty for half of each second.


@pytest.mark.parametrize(
    ("generation", "per_s", "name"),
    [
        (4, 0.9 * GEN4_X16_BYTES_PER_S, "host_transfer/pcie_saturated"),
        (2, 0.9 * GEN2_X16_BYTES_PER_S, "host_transfer/pcie_degraded"),
        # Slow for the link, and what the degraded one could just carry.
        (4, 0.9 * GEN2_X16_BYTES_PER_S, ""),
        (2, 0.2 * GEN2_X16_BYTES_PER_S, ""),
    ],
    ids=["full", "full at generation 2", "room", "room at generation 2"],
)
def test_pcie(generation: int, per_s: float, name: str, tmp_path: Path) -> None:
    state: Mapping[str | int, Now] = {"CurrPcieLinkGeneration": lambda now: generation}
    found = told(tmp_path, [Story(gpu=half_empty, pcie=lambda now: per_s, state=state)])
    pcie = {name for name in charged(found) if name.startswith("host_transfer")}
    assert pcie == ({name} if name else set())
    if name:
        assert share(found, name) > 0.85
        (finding,) = [one for one in found.findings if one.cause == "host_transfer"]
        assert "90%" in finding.says
        assert finding.idle_s == pytest.approx(SECONDS / 2, rel=0.15)


# Errors: the kernel log, NVML.


def computes_until(second: float) -> Now:
    return lambda now: COMPUTES if now < second else EMPTY


XID = "NVRM: Xid (PCI:0000:19:00): {}, pid='<unknown>', name=<unknown>, said the driver"


def test_a_fatal_error_in_the_kernel_log(tmp_path: Path) -> None:
    log = ((10.0, XID.format(48)),)
    found = told(tmp_path, [Story(gpu=computes_until(10.5), log=log)])
    assert charged(found)["hardware/xid"] == pytest.approx(SECONDS - 10.5, abs=0.5)
    (finding,) = [one for one in found.findings if one.rule == "xid"]
    assert "Xid 48" in finding.says
    assert "hardware" in found.headline


@pytest.mark.parametrize(
    ("log", "gpu"),
    [
        (((10.0, XID.format(31)),), computes_until(10.5)),
        (((10.0, XID.format(48).replace("19:00", "3b:00")),), computes_until(10.5)),
        (((10.0, XID.format(48)),), lambda now: COMPUTES),
        ((), computes_until(10.5)),
    ],
    ids=["the job's own fault", "another GPU", "it computes on", "nothing logged"],
)
def test_what_is_no_fatal_error(log: Any, gpu: Now, tmp_path: Path) -> None:
    found = told(tmp_path, [Story(gpu=gpu, log=log)])
    assert not any(name.startswith("hardware") for name in charged(found))


def test_a_gpu_that_falls_off_the_bus(tmp_path: Path) -> None:
    log = ((10.0, XID.format(79)),)
    story = Story(log=log, gone=lambda now: now >= 10)
    found = told(tmp_path, [story])
    assert charged(found)["hardware/gpu_lost"] == pytest.approx(SECONDS - 10, abs=1.5)
    assert found.totals.working_s == pytest.approx(10, abs=0.5)
    assert "hardware" in found.headline


def test_a_gpu_that_comes_back_after_a_moment(tmp_path: Path) -> None:
    found = told(tmp_path, [Story(gone=lambda now: 10 <= now < 10.6)])
    assert accused(found) == set()


# Clocks, beside the ledger.


def test_clocks_that_heat_holds_down(tmp_path: Path) -> None:
    state: dict[str | int, Now] = {
        "ClockInfo": lambda now: 1110,
        74: lambda now: 0,  # power cap, ns
        269: lambda now: 0,  # heat, by software
        270: lambda now: round(0.4e9 * now),  # heat, by hardware
    }
    found = told(tmp_path, [Story(state=state)])
    (finding,) = found.findings
    assert (finding.rule, finding.severity) == ("overheated", "warning")
    assert "1,110 of 1,980 MHz" in finding.says
    lost = SECONDS * 0.4 * (1 - 1110 / 1980)
    assert finding.beside_s == pytest.approx(lost, rel=0.05)
    assert found.totals.idle_s == 0


def test_clocks_at_their_highest(tmp_path: Path) -> None:
    state: dict[str | int, Now] = {74: lambda now: round(0.4e9 * now), 270: lambda now: 0}
    assert told(tmp_path, [Story(state=state)]).findings == []


# The fabric: two nodes of a job that talk for half of each second.


def grows(per_s: float) -> Now:
    return lambda now: round(per_s * now)


def port(carried: float, **more: Now) -> dict[str, Now]:
    """Return a port that carries this part of its rate while ranks talk, each way."""
    words = grows(carried * PORT_BYTES_PER_S * 0.5 / WORD)
    packets = grows(carried * PORT_BYTES_PER_S * 0.5 / 4096)
    return {
        f"{PORT}counters/port_rcv_data": words,
        f"{PORT}counters/port_xmit_data": words,
        f"{PORT}counters/port_xmit_packets": packets,
        f"{PORT}counters/port_rcv_packets": packets,
        **{f"{PORT}{name.replace('__', '/')}": value for name, value in more.items()},
    }


def pair(files: Mapping[str, Now], **more: Any) -> list[Story]:
    return [Story(gpu=talks, files=files, **more) for _ in range(2)]


def half(found: Diagnosis) -> float:
    return found.totals.idle_s


def test_a_sound_fabric(tmp_path: Path) -> None:
    found = told(tmp_path, pair(port(0.9)))
    assert accused(found) == {"collective/transfer_ib"}
    assert share(found, "collective/transfer_ib") > 0.9


def falls(second: float) -> Now:
    return lambda now: "400 Gb/sec (4X NDR)" if now < second else "200 Gb/sec (4X HDR)"


def test_a_port_that_trains_lower(tmp_path: Path) -> None:
    found = told(tmp_path, pair(port(0.45, rate=falls(10))))
    seconds = charged(found)["collective/link_degraded"]
    # Rates are read every ten seconds.
    assert seconds == pytest.approx(half(found) * 2 / 3, rel=0.25)


def test_a_port_that_was_slow_all_along(tmp_path: Path) -> None:
    """Its rate is what it is; nothing says that it should be another."""
    found = told(tmp_path, pair(port(0.45, rate=lambda now: "200 Gb/sec (4X HDR)")))
    assert accused(found) == {"collective/transfer_ib"}


@pytest.mark.parametrize(
    ("name", "per_s", "speaks"),
    [
        ("hw_counters__rp_cnp_handled", 200_000.0, True),
        ("hw_counters__out_of_sequence", 5_000.0, True),
        ("hw_counters__packet_seq_err", 5_000.0, True),
        ("hw_counters__rp_cnp_handled", 100.0, False),
        ("hw_counters__out_of_sequence", 1.0, False),
        # What only says that a queue was full for a moment, and what is about requests.
        ("counters__port_xmit_wait", 1_000_000.0, False),
        ("hw_counters__duplicate_request", 5_000.0, False),
    ],
)
def test_congestion(name: str, per_s: float, speaks: bool, tmp_path: Path) -> None:
    found = told(tmp_path, pair(port(0.6, **{name: grows(per_s)})))
    assert accused(found) == {f"collective/{'congestion' if speaks else 'transfer_ib'}"}


@pytest.mark.parametrize(("per_s", "speaks"), [(2_000.0, True), (2.0, False)])
def test_receivers_that_are_not_ready(per_s: float, speaks: bool, tmp_path: Path) -> None:
    more = {"hw_counters__rnr_nak_retry_err": grows(per_s)}
    found = told(tmp_path, pair(port(0.6, **more)))
    assert share(found, "collective/receiver_not_ready") > 0.9 or not speaks
    assert accused(found) == {f"collective/{'receiver_not_ready' if speaks else 'transfer_ib'}"}


def net(per_s: float) -> dict[str, Now]:
    """Return what a network interface carries."""

    def text(now: float) -> str:
        count = round(per_s * now)
        packets = count // 9000
        head = "Inter-|   Receive |  Transmit\n face |bytes packets|bytes packets\n"
        sides = [f"{count} {packets} 0 0 0 0 0 0"] * 2
        return f"{head}  eth0: {' '.join(sides)}\n    lo: {' '.join(sides)}"

    return {"proc/net/dev": text}


def test_collectives_over_tcp_beside_a_port_that_does_nothing(tmp_path: Path) -> None:
    found = told(tmp_path, pair({**port(0.0), **net(2e9)}))
    assert share(found, "collective/wrong_transport") > 0.9
    (finding,) = [one for one in found.findings if one.rule == "wrong_transport"]
    assert "1 RDMA ports" in finding.says


@pytest.mark.parametrize(
    "files",
    [
        {**port(0.9), **net(2e9)},
        {**port(0.9), **net(1e6)},
        {**port(0.0, state=lambda now: "1: DOWN"), **net(2e9)},
    ],
    ids=["more over RDMA", "heartbeats", "the port is down"],
)
def test_what_is_no_detour(files: Mapping[str, Now], tmp_path: Path) -> None:
    assert share(told(tmp_path, pair(files)), "collective/wrong_transport") == 0


PROPRIETARY = {
    "proc/driver/nvidia/version": lambda now: (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Release Build"
    )
}
NO_PEER_MEMORY = ("sys/module/nvidia_peermem",)


@pytest.mark.parametrize(
    ("carried", "files", "without", "speaks"),
    [
        (0.4, PROPRIETARY, NO_PEER_MEMORY, True),
        (0.9, PROPRIETARY, NO_PEER_MEMORY, False),
        (0.4, {}, NO_PEER_MEMORY, False),
        (0.4, PROPRIETARY, (), False),
    ],
    ids=["no way and half the rate", "at its rate", "the open driver", "peer memory"],
)
def test_gpudirect(
    carried: float,
    files: Mapping[str, Now],
    without: tuple[str, ...],
    speaks: bool,
    tmp_path: Path,
) -> None:
    found = told(tmp_path, pair({**port(carried), **files}, without=without))
    # What all spin longer than their bytes take, nobody can tell from waiting in turns.
    accusations = accused(found) - {"collective/exposed"}
    assert accusations == {f"collective/{'gpudirect_off' if speaks else 'transfer_ib'}"}
    if speaks:
        (finding,) = [one for one in found.findings if one.rule == "gpudirect_off"]
        assert "neither nvidia_peermem nor the open GPU driver is loaded" in finding.says
