"""What the collectors of the fabric cost on a node of 8 ports, 8 GPUs, 16 drives; paced.

    PYTHONPATH=tests python -m bench.bench_fabric [--seconds 40] [--connections 200]

CPU time of the thread for each run, at the real period of each, files on this disk in place of
sysfs. The time that drivers take is not in it: there are none here. Exits with 1 if they cost more
together than their part of a core.
"""

from __future__ import annotations

import argparse
import socket
import struct
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from fabric_kit import lay
from fabric_make import MLX5, PMA, Entry, link_to
from whyidle import ethtool
from whyidle.clock import SystemClock
from whyidle.collect.collector import Collect, Collector, NoData
from whyidle.collect.ethtool_port import ETHTOOL_PORT
from whyidle.collect.pcie_gpudirect import GPUDIRECT
from whyidle.collect.pcie_link import PCIE_LINK
from whyidle.collect.rdma_info import RDMA_INFO
from whyidle.collect.rdma_port import RDMA_PORT
from whyidle.collect.socket_tcp import TCP_SOCKET
from whyidle.collect.topology import TOPOLOGY
from whyidle.host import LiveHost
from whyidle.live import Watched, live_host
from whyidle.runner import PERIOD_S

PORTS = 8
GOAL_RATIO = 0.0015
COLLECTORS = (RDMA_PORT, RDMA_INFO, ETHTOOL_PORT, PCIE_LINK, TOPOLOGY, GPUDIRECT, TCP_SOCKET)
# A ConnectX of 64 queues, with PFC on two priorities.
STATISTICS = (
    [f"rx{queue}_{name}" for queue in range(64) for name in ("packets", "bytes", "drops")]
    + [f"tx{queue}_{name}" for queue in range(64) for name in ("packets", "bytes", "stopped")]
    + ["rx_discards_phy", "rx_out_of_buffer", "outbound_pci_stalled_wr", "rx_crc_errors_phy"]
    + [
        f"{way}_prio{priority}_{what}"
        for priority in (3, 5)
        for way in ("rx", "tx")
        for what in ("pause", "pause_duration", "pause_transition")
    ]
    + [f"unused_{number}" for number in range(360)]
)


def entries() -> dict[str, Entry]:
    """A node: 4 host bridges, a switch below each with two GPUs, two NICs and four drives."""
    found: dict[str, Entry] = {"proc/cpuinfo": "flags\t: fpu\n"}

    def function(base: str, kind: str, vendor: str) -> None:
        address = base.rpartition("/")[2]
        found[f"sys/bus/pci/devices/{address}"] = link_to(f"sys/bus/pci/devices/{address}", base)
        for name, text in (
            ("class", kind),
            ("vendor", vendor),
            ("numa_node", "0"),
            ("current_link_speed", "32.0 GT/s PCIe"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("current_link_width", "16"),
            ("max_link_width", "16"),
            ("power/runtime_status", "active"),
            ("aer_dev_correctable", "RxErr 0\nBadTLP 0\nBadDLLP 0\nRollover 0\nTimeout 0"),
        ):
            found[f"{base}/{name}"] = f"{text}\n"

    port = drive = 0
    for root in range(0x10, 0x50, 0x10):
        above = f"sys/devices/pci0000:{root:x}/0000:{root:x}:01.0"
        function(above, "0x060400", "0x8086")
        above = f"{above}/0000:{root + 1:x}:00.0"
        function(above, "0x060400", "0x1000")
        for place in range(8):
            down = f"{above}/0000:{root + 2:x}:{place:02x}.0"
            function(down, "0x060400", "0x1000")
            leaf = f"{down}/0000:{root + 3 + place:x}:00.0"
            if place < 2:
                function(leaf, "0x030200", "0x10de")
            elif place < 4:
                function(leaf, "0x020000", "0x15b3")
                found |= rdma(leaf, port)
                port += 1
            else:
                function(leaf, "0x010802", "0x1344")
                found[f"{leaf}/nvme/nvme{drive}/transport"] = "pcie\n"
                found[f"sys/class/nvme/nvme{drive}"] = link_to(
                    f"sys/class/nvme/nvme{drive}", f"{leaf}/nvme/nvme{drive}"
                )
                drive += 1
    # What else a server has on PCI.
    for number in range(150):
        function(
            f"sys/devices/pci0000:80/0000:80:{number >> 3:02x}.{number & 7}", "0x088000", "0x8086"
        )
    return found


def rdma(leaf: str, number: int) -> dict[str, Entry]:
    """A port with every counter of mlx5."""
    base = f"{leaf}/infiniband/mlx5_{number}"
    found: dict[str, Entry] = {
        f"sys/class/infiniband/mlx5_{number}": link_to(f"sys/class/infiniband/mlx5_{number}", base),
        f"{base}/device": link_to(f"{base}/device", leaf),
        f"{leaf}/net/eth{number}/dev_port": "0\n",
    }
    for name, text in (
        ("state", "4: ACTIVE"),
        ("phys_state", "5: LinkUp"),
        ("rate", "400 Gb/sec (4X NDR)"),
        ("link_layer", "Ethernet"),
    ):
        found[f"{base}/ports/1/{name}"] = f"{text}\n"
    for folder, counters in (("counters", PMA), ("hw_counters", MLX5)):
        for name in counters:
            found[f"{base}/ports/1/{folder}/{name}"] = "230539874932483\n"
    return found


def driver(interface: str, data: bytearray) -> None:
    """Answer in place of a driver."""
    (command,) = struct.unpack_from("=I", data)
    if command == 0x37:
        struct.pack_into("=I", data, 16, len(STATISTICS))
    elif command == 0x1B:
        struct.pack_into("=I", data, 8, len(STATISTICS))
        for at, name in enumerate(STATISTICS):
            struct.pack_into("32s", data, 12 + 32 * at, name.encode())
    else:
        struct.pack_into("=I", data, 4, len(STATISTICS))


@dataclass(slots=True)
class Cost:
    """Runs of a collector."""

    collector: Collector
    collect: Collect
    due: float
    runs: list[int] = field(default_factory=list)
    rows: int = 0

    @property
    def period_s(self) -> float:
        """Its period."""
        return self.collector.every_s or PERIOD_S[self.collector.lane]

    def run(self, host: LiveHost) -> None:
        """Run it once."""
        self.due += self.period_s
        before = time.thread_time_ns()
        try:
            self.rows += len(list(self.collect(host)))
        except NoData as why:
            sys.stderr.write(f"{self.collector.name}: {why}\n")
        self.runs.append(time.thread_time_ns() - before)

    @property
    def later_us(self) -> float:
        """A run after the first, which finds everything out; microseconds."""
        later = self.runs[1:] or self.runs
        return sum(later) / len(later) / 1000


def measure(root: Path, seconds: float) -> list[Cost]:
    """Run every collector at its period for a while; the rare ones a few times beside it."""
    host = live_host(str(root), SystemClock(), watched=Watched())
    begin = time.monotonic()
    costs = [Cost(collector, collector.make(), begin) for collector in COLLECTORS]
    paced = [cost for cost in costs if cost.period_s < seconds / 4]
    while (now := time.monotonic()) < begin + seconds:
        for cost in paced:
            if now >= cost.due:
                cost.run(host)
        time.sleep(max(0.0, min(cost.due for cost in paced) - time.monotonic()))
    for cost in costs:
        for _ in range(0 if cost in paced else 5):
            cost.run(host)
            time.sleep(0.5)  # long enough for caches to be of others
    host.close()
    return costs


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--connections", type=int, default=200)
    options = parser.parse_args()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ethtool, "_call", driver))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="whyidle-bench-"))
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=200))
        for _ in range(options.connections // 2):
            stack.enter_context(socket.create_connection(server.getsockname()))
            stack.enter_context(server.accept()[0])
        costs = measure(lay(Path(folder), entries()), options.seconds)
    ratio = 0.0
    sys.stdout.write(f"{'collector':<16}{'runs':>6}{'rows':>7}{'us a run':>10}{'of a core':>12}\n")
    for cost in costs:
        share = cost.later_us / 1e6 / cost.period_s
        ratio += share
        sys.stdout.write(
            f"{cost.collector.name:<16}{len(cost.runs):>6}{cost.rows:>7}{cost.later_us:>10.0f}"
            f"{share:>12.4%}\n"
        )
    sys.stdout.write(f"{'together':<16}{ratio:>35.4%}, at most {GOAL_RATIO:.2%}\n")
    return 0 if ratio <= GOAL_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
