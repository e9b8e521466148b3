"""What each GPU and MIG device is; once a minute.

Source: nvml.h, and sysfs for the NUMA node (NVML's own call tells the node of the GPU's memory).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from whyidle.collect.collector import Collect, Collector, Problem
from whyidle.collect.gpu_list import LISTS, Gpu, Gpus, text, value, whole
from whyidle.collect.gpu_units import parts
from whyidle.collect.numbers import whole as parse_whole
from whyidle.host import Answer, Argument, Host, NvmlError
from whyidle.schema import GpuInfo

# nvmlDeviceArchitecture_t
ARCHITECTURES: Mapping[int, str] = MappingProxyType(
    {
        2: "kepler",
        3: "maxwell",
        4: "pascal",
        5: "volta",
        6: "turing",
        7: "ampere",
        8: "ada",
        9: "hopper",
        10: "blackwell",
        13: "rubin",
    }
)
# nvmlGpuFabricState_t and NVML_GPU_FABRIC_HEALTH_SUMMARY; health 0: the driver does not tell.
FABRIC_STATES = ("not_supported", "not_started", "in_progress", "completed")
FABRIC_HEALTH: Mapping[int, str] = MappingProxyType(
    {1: "healthy", 2: "unhealthy", 3: "limited_capacity"}
)
_NVLINK_COUNT_FIELD = 91
_CLOCK_SM = 1
_CLOCK_MEMORY = 2
# NVML_NVLINK_MAX_LINKS is 36 today; a count beyond this is garbage, not a link to ask about.
_LINKS_LIMIT = 128
_BUS_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2}\.[0-7])")


def parse_bus_id(bus_id: str) -> str | None:
    """Return NVML's PCI address, of a domain of eight digits, as sysfs writes it."""
    found = _BUS_ID.fullmatch(bus_id.strip().lower())
    if found is None:
        return None
    domain = f"{int(found[1], 16):04x}"
    return f"{domain}:{found[2]}:{found[3]}"


def parse_numa_node(line: str) -> int | None:
    """Return the NUMA node; -1 says that the firmware does not tell."""
    node = parse_whole(line.strip(), "numa_node")
    return node if node >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What a GPU is in an NVLink domain; None where the driver tells nothing."""

    cluster: str | None = None
    clique: int | None = None
    state: str | None = None
    status: int | None = None
    health: str | None = None
    health_mask: int | None = None


def parse_fabric(answer: Answer) -> Fabric:
    """Return an answer to "FabricInfo": (cluster, status, clique, state, mask, summary).

    Clique, status and cluster mean something only once the registration has completed.
    """
    cluster, status, clique, number, mask, summary = parts(answer, 6)
    code = whole(number)
    known = code is not None and 0 <= code < len(FABRIC_STATES)
    if code is None or not known:
        return Fabric()
    if FABRIC_STATES[code] != "completed":
        return Fabric(state=FABRIC_STATES[code])
    return Fabric(
        cluster=text(cluster),
        clique=whole(clique),
        state=FABRIC_STATES[code],
        status=whole(status),
        health=FABRIC_HEALTH.get(whole(summary) or 0),
        health_mask=whole(mask),
    )


class _Asker:
    """Asks about one GPU and gathers what was refused, so that the other columns are told."""

    def __init__(self, host: Host, uuid: str) -> None:
        self._host = host
        self._uuid = uuid
        self.problems: list[Problem] = []

    def ask(self, call: str, *args: Argument) -> Answer:
        """Return NVML's answer; None where there is none."""
        try:
            return value(self._host, call, self._uuid, *args)
        except NvmlError as error:
            self.problems.append(Problem(subject=f"{self._uuid} {call}", message=str(error)))
            return None

    def system(self, call: str) -> str | None:
        """Return an answer of the driver as a whole."""
        try:
            return text(self._host.nvml(call))
        except NvmlError as error:
            self.problems.append(Problem(subject=call, message=str(error)))
            return None


def _row(host: Host, asker: _Asker, gpu: Gpu) -> GpuInfo:
    capability = asker.ask("CudaComputeCapability")
    memory = asker.ask("MemoryInfo")
    mig = whole(asker.ask("MigMode"))
    worked = asker.ask("gpm_worked")
    bus_id = text(asker.ask("PciBusId"))
    address = None if bus_id is None else parse_bus_id(bus_id)
    links, active = _links(asker) if gpu.parent is None else (None, None)
    fabric = parse_fabric(asker.ask("FabricInfo") if gpu.parent is None else None)
    multiprocessors, gpu_slices, compute_slices, _ = parts(asker.ask("Attributes"), 4)
    split = gpu.parent is not None
    return GpuInfo(
        mono_ns=host.clock.mono_ns(),
        uuid=gpu.uuid,
        gpu=gpu.index,
        parent_uuid=gpu.parent,
        name=text(asker.ask("Name")),
        architecture=ARCHITECTURES.get(whole(asker.ask("Architecture")) or -1),
        compute_capability=_joined(capability),
        pci_bus_id=address,
        numa_node=None if address is None else _numa_node(host, address),
        minor=whole(asker.ask("MinorNumber")),
        serial=text(asker.ask("Serial")),
        driver_version=asker.system("DriverVersion"),
        nvml_version=asker.system("NVMLVersion"),
        mig=None if mig is None else bool(mig),
        gpm=worked if isinstance(worked, bool) else None,
        memory_total_bytes=whole(memory[0]) if isinstance(memory, LISTS) else None,
        power_limit_milliwatts=whole(asker.ask("EnforcedPowerLimit")),
        max_sm_clock_megahertz=whole(asker.ask("MaxClockInfo", _CLOCK_SM)),
        max_memory_clock_megahertz=whole(asker.ask("MaxClockInfo", _CLOCK_MEMORY)),
        max_pcie_generation=whole(asker.ask("MaxPcieLinkGeneration")),
        max_pcie_width=whole(asker.ask("MaxPcieLinkWidth")),
        nvlinks=links,
        nvlinks_active=active,
        multiprocessors=whole(multiprocessors),
        gpu_instance=whole(asker.ask("GpuInstanceId")) if split else None,
        compute_instance=whole(asker.ask("ComputeInstanceId")) if split else None,
        gpu_slices=whole(gpu_slices) if split else None,
        compute_slices=whole(compute_slices) if split else None,
        fabric_cluster=fabric.cluster,
        fabric_clique=fabric.clique,
        fabric_state=fabric.state,
        fabric_status=fabric.status,
        fabric_health=fabric.health,
        fabric_health_mask=fabric.health_mask,
    )


def _joined(capability: Answer) -> str | None:
    if isinstance(capability, LISTS) and len(capability) == 2:
        return f"{capability[0]}.{capability[1]}"
    return None


def _links(asker: _Asker) -> tuple[int | None, int | None]:
    fields = asker.ask("FieldValues", _NVLINK_COUNT_FIELD)
    count = whole(fields[0]) if isinstance(fields, LISTS) else None
    if count is None or not 0 <= count <= _LINKS_LIMIT:
        return None, None
    states = [whole(asker.ask("NvLinkState", link)) for link in range(count)]
    known = [state for state in states if state is not None]
    return count, sum(known) if len(known) == count else None


def _numa_node(host: Host, address: str) -> int | None:
    try:
        return parse_numa_node(host.read(f"sys/bus/pci/devices/{address}/numa_node"))
    except OSError:
        return None  # no sysfs here, as in a sandbox


def make() -> Collect:
    """Return the collector."""
    gpus = Gpus()

    def collect(host: Host) -> Iterator[GpuInfo | Problem]:
        for gpu in gpus.ask(host):
            if gpu.index is None:
                continue  # lost: gpu_state says so, and what it was has been told
            asker = _Asker(host, gpu.uuid)
            yield _row(host, asker, gpu)
            yield from asker.problems

    return collect


GPU_INFO = Collector(name="gpu_info", lane="slow", make=make, thread="nvml")
