"""One GPU of the stand-in library, to be told what it does."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vgpu.layout import (
    ABSENT,
    ACTIVITIES,
    COUNTERS,
    LINKS,
    METRICS,
    MIGS,
    NVLINK_RX,
    NVLINK_TX,
    PROCESSES,
    SAMPLED,
    SLOTS,
    Count,
    Counter,
    Gauges,
    GpuState,
)
from vgpu.profiles import GpuSpec

if TYPE_CHECKING:
    from vgpu.state import StateFile

NVML_ERROR_GPU_IS_LOST = 15
EVENT_XID = 8  # nvmlEventTypeXidCriticalError
AMPERE, HOPPER = 7, 9  # nvmlDeviceArchitecture_t
FABRIC_COMPLETED = 3  # nvmlGpuFabricState_t
FABRIC_HEALTHY = 1
_GAUGES = frozenset(name for name, *_ in Gauges._fields_)
_MEMORY = frozenset(
    ("memory_total_bytes", "memory_reserved_bytes", "memory_used_bytes", "bar1_used_bytes")
)
_SPEC_FIELDS = (
    "pci_domain",
    "pci_bus",
    "pci_device",
    "pci_device_id",
    "minor",
    "numa_node",
    "architecture",
    "links",
    "link_speed_mbps",
    "nvlink_version",
    "multiprocessors",
    "memory_total_bytes",
    "memory_reserved_bytes",
)
_MIG_FIELDS = (
    "memory_total_bytes",
    "memory_used_bytes",
    "gpu_instance",
    "compute_instance",
    "slices",
    "multiprocessors",
)
_IN_UNITS = (Count.ENERGY_MJ, Count.PCIE_TX, Count.PCIE_RX, Count.C2C_TX, Count.C2C_RX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process on a GPU. `used_bytes` None: not available; `kind` 0 compute, 1 graphics, 2 MPS."""

    pid: int
    used_bytes: int | None
    kind: int = 0
    sm_percent: int = 0
    mem_percent: int = 0
    enc_percent: int = 0
    dec_percent: int = 0
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MigDevice:
    """A MIG device: one GPU instance with one compute instance."""

    uuid: str
    gpu_instance: int
    memory_total_bytes: int
    memory_used_bytes: int = 0
    compute_instance: int = 0
    slices: int = 1
    multiprocessors: int = 16


def value_at(counter: Counter, t_ns: int) -> int:
    """The value of a counter at a monotonic time, as the library computes it."""
    end = min(t_ns, counter.until_ns) if counter.until_ns else t_ns
    if end <= counter.at_ns or counter.rate_per_s == 0.0:
        return int(counter.value)
    exact = counter.rate_per_s * float(end - counter.at_ns) / 1e9
    return int(counter.value) + int(math.copysign(math.floor(abs(exact) + 0.5), exact))


def _per_second(name: str, rate: float) -> Iterator[tuple[int, float]]:
    """Counters and native rates of a keyword: shares become ns per second."""
    if name in ("nvlink_tx", "nvlink_rx"):
        first = NVLINK_TX if name == "nvlink_tx" else NVLINK_RX
        yield from ((first + link, rate) for link in range(LINKS))
        return
    try:
        count = Count[name.upper()]
    except KeyError:
        raise ValueError(f"no counter is called {name!r}; see vgpu.layout.Count") from None
    yield count, rate if count in _IN_UNITS else rate * 1e9


class Gpu:
    """Writer of one GPU. Times are CLOCK_MONOTONIC ns; None is now.

    Counters run by themselves at the rate they were last given. An explicit time lies in the past,
    but by less than a sample period; in the future only while the counter is at rest.
    """

    def __init__(self, owner: StateFile, raw: GpuState, slot: int) -> None:
        self._owner = owner
        self._raw: Any = raw
        self.slot = slot

    @property
    def uuid(self) -> str:
        """The identity."""
        return str(self._raw.uuid.decode())

    @property
    def lost(self) -> bool:
        """Whether every call on it fails."""
        return bool(self._raw.lost)

    @property
    def multiprocessors(self) -> int:
        """How many SMs it has."""
        return int(self._raw.multiprocessors)

    @property
    def pcie_generation(self) -> int:
        """Of its link at its best."""
        return int(self._raw.pcie_generation_max)

    @contextmanager
    def _write(self, at_ns: int | None = None) -> Iterator[int]:
        with self._owner.exclusive():
            t_ns = time.monotonic_ns() if at_ns is None else at_ns
            self._raw.seq += 1
            try:
                self._keep_samples(t_ns)
                yield t_ns
            finally:
                self._raw.seq += 1

    @contextmanager
    def raw(self, at_ns: int) -> Iterator[Any]:
        """The structure itself, to change much of it for one moment in one go."""
        with self._write(at_ns):
            yield self._raw

    def _keep_samples(self, t_ns: int) -> None:
        """Writes down the history up to t, before a change would make it unknowable."""
        period = self._owner.sample_period_ns
        last, now = int(self._raw.samples_slot), t_ns // period
        if now <= last:
            return
        for i, count in enumerate(SAMPLED):
            counter = self._raw.counters[count]
            for slot in range(max(last, now - SLOTS) + 1, now + 1):
                self._raw.samples[i][slot % SLOTS] = value_at(counter, slot * period)
        self._raw.samples_slot = now

    def initialise(self, spec: GpuSpec) -> None:
        """Identity and values at rest; once, before the first reader."""
        raw = self._raw
        for name in ("name", "uuid", "serial"):
            setattr(raw, name, getattr(spec, name).encode())
        raw.part_number, raw.vbios = b"692-2G520-0200-000", b"96.00.99.00.01"
        for name in _SPEC_FIELDS:
            setattr(raw, name, getattr(spec, name))
        raw.pci_subsystem_id, raw.brand, raw.module_id = 0x16C110DE, 1, self.slot + 1
        raw.cc_major, raw.cc_minor = spec.compute_capability
        raw.pcie_generation_max, raw.pcie_width_max = spec.pcie_generation, 16
        raw.gpm = int(spec.gpm)
        raw.mig_enabled = 0 if spec.architecture >= AMPERE else ABSENT
        raw.fabric_state = FABRIC_COMPLETED if spec.architecture >= HOPPER else ABSENT
        raw.fabric_health_summary = FABRIC_HEALTHY
        raw.bar1_total_bytes = 128 << 30
        for link in range(spec.links):
            raw.link[link].active = 1
        self._initialise_gauges(spec)
        for counter in raw.counters:
            counter.at_ns = time.monotonic_ns()
        raw.counters[Count.ENERGY_MJ].value = 10**9
        self.set(power_mw=spec.power_idle_mw)
        self.steady()

    def _initialise_gauges(self, spec: GpuSpec) -> None:
        gauges = self._raw.gauges
        gauges.temperature_celsius, gauges.memory_temperature_celsius = 34.0, 38.0
        gauges.event_reasons = 1  # idle
        gauges.power_limit_mw = gauges.power_limit_default_mw = spec.power_limit_mw
        gauges.power_limit_min_mw, gauges.power_limit_max_mw = (
            spec.power_min_mw,
            spec.power_limit_mw,
        )
        gauges.clock_max_mhz[:] = spec.clock_max_mhz
        gauges.clock_mhz[:] = (345, 345, spec.clock_max_mhz[2], 765)
        gauges.fan_percent = ABSENT  # such boards have no fan of their own
        gauges.pcie_generation, gauges.pcie_width = spec.pcie_generation, 16
        gauges.ecc_enabled = gauges.persistence = 1

    def run(self, *, at_ns: int | None = None, until_ns: int | None = None, **rates: float) -> None:
        """Sets rates by counter name, from `at_ns` to `until_ns`; others keep theirs.

        Activity and throttling are shares of time, 0 to 1 (`gr=0.6, sm=0.5, tensor=0.3, dram=0.2,
        mem=0.4, throttle_power=0.1`); traffic is bytes per second (`pcie_tx, pcie_rx`, and
        `nvlink_tx, nvlink_rx` on each link).
        """
        self.set_rates(rates, at_ns=at_ns, until_ns=until_ns)

    def set_rates(
        self, rates: Mapping[str, float], *, at_ns: int | None = None, until_ns: int | None = None
    ) -> None:
        """`run` with the names in a mapping."""
        native = [pair for name, rate in rates.items() for pair in _per_second(name, rate)]
        with self._write(at_ns) as t_ns:
            for index, rate in native:
                self._turn(self._raw.counters[index], rate, t_ns, until_ns)

    def run_link(self, link: int, *, tx: float | None = None, rx: float | None = None) -> None:
        """Sets the traffic of one NVLink, in bytes per second."""
        with self._write() as t_ns:
            for first, rate in ((NVLINK_TX, tx), (NVLINK_RX, rx)):
                if rate is not None:
                    self._turn(self._raw.counters[first + link], rate, t_ns, None)

    @staticmethod
    def _turn(counter: Counter, rate: float, t_ns: int, until_ns: int | None) -> None:
        counter.value = value_at(counter, t_ns)
        counter.at_ns, counter.rate_per_s, counter.until_ns = t_ns, rate, until_ns or 0

    def stop(self, at_ns: int | None = None) -> None:
        """All activity and traffic ends; power keeps flowing."""
        with self._write(at_ns) as t_ns:
            for index in range(COUNTERS):
                if index != Count.ENERGY_MJ:
                    self._turn(self._raw.counters[index], 0.0, t_ns, None)

    def add(self, **amounts: int) -> None:
        """Adds to counters at once, in their own units: ns, bytes (per link for nvlink_*), mJ."""
        with self._write() as t_ns:
            for name, amount in amounts.items():
                for index, _ in _per_second(name, 0.0):
                    counter = self._raw.counters[index]
                    self._turn(counter, counter.rate_per_s, t_ns, counter.until_ns)
                    counter.value += amount

    def value(self, name: str, at_ns: int | None = None, link: int = 0) -> int:
        """The truth: a counter by name at a time, in ns, bytes or mJ."""
        index = next(_per_second(name, 0.0))[0] + link
        t_ns = time.monotonic_ns() if at_ns is None else at_ns
        with self._owner.exclusive():
            return value_at(self._raw.counters[index], t_ns)

    def set(self, **values: float | Sequence[int]) -> None:
        """Sets gauges and memory by field name; `power_mw` sets the flow of energy as well."""
        with self._write() as t_ns:
            for name, value in values.items():
                if name not in _GAUGES | _MEMORY:
                    raise ValueError(f"no gauge is called {name!r}; see vgpu.layout.Gauges")
                target = self._raw.gauges if name in _GAUGES else self._raw
                if isinstance(value, Sequence):
                    getattr(target, name)[:] = value
                else:
                    setattr(target, name, value)
            if "power_mw" in values:
                energy = self._raw.counters[Count.ENERGY_MJ]
                self._turn(energy, float(self._raw.gauges.power_mw), t_ns, None)

    def ecc(self, *, uncorrected: bool, aggregate: bool, sram: int = 0, dram: int = 0) -> None:
        """Sets ECC error counts of one kind."""
        with self._write():
            self._raw.gauges.ecc_sram[int(uncorrected)][int(aggregate)] = sram
            self._raw.gauges.ecc_dram[int(uncorrected)][int(aggregate)] = dram

    def steady(self) -> None:
        """Rewrites the history as if the present rates had always held: no wait for windows."""
        with self._write() as t_ns:
            period = self._owner.sample_period_ns
            now = t_ns // period
            for i, count in enumerate(SAMPLED):
                counter = self._raw.counters[count]
                for slot in range(now - SLOTS + 1, now + 1):
                    back_s = (t_ns - slot * period) / 1e9
                    past = value_at(counter, t_ns) - round(counter.rate_per_s * back_s)
                    self._raw.samples[i][slot % SLOTS] = past
            self._raw.samples_slot = now

    def lose(self, code: int = NVML_ERROR_GPU_IS_LOST) -> None:
        """Every call on it returns `code`; the next first init leaves out a lost one (15, 999)."""
        with self._write():
            self._raw.lost = code
        self._owner.wake()

    def recover(self) -> None:
        """Back on the bus."""
        self.lose(0)

    def gpm(self, *, supported: bool = True, code: int = 0, without: Iterable[int] = ()) -> None:
        """GPM support as claimed, the return code of taking samples, and metric ids that fail."""
        with self._write():
            self._raw.gpm, self._raw.gpm_return = int(supported), code
            self._raw.gpm_unsupported[:] = [0] * (METRICS // 8)
            for metric in without:
                self._raw.gpm_unsupported[metric // 8] |= 1 << (metric % 8)

    def fields(self, *, without: Iterable[int] = ()) -> None:
        """Field value ids that this driver does not know."""
        with self._write():
            self._raw.field_unsupported[:] = [0] * (METRICS // 8)
            for field in without:
                self._raw.field_unsupported[field // 8] |= 1 << (field % 8)

    def fabric(self, *, state: int, clique: int, health_mask: int, summary: int) -> None:
        """The NVLink domain's registration and health (nvmlGpuFabricInfo)."""
        with self._write():
            self._raw.fabric_state, self._raw.fabric_clique = state, clique
            self._raw.fabric_health_mask, self._raw.fabric_health_summary = health_mask, summary

    def processes(self, rows: Sequence[Process]) -> None:
        """The processes on this GPU from now on."""
        if len(rows) > PROCESSES:
            raise ValueError(f"at most {PROCESSES} processes, not {len(rows)}")
        with self._write():
            for raw, row in zip(self._raw.processes, rows, strict=False):
                raw.pid, raw.kind = row.pid, row.kind
                raw.used_bytes = 0xFFFFFFFFFFFFFFFF if row.used_bytes is None else row.used_bytes
                raw.sm_percent, raw.mem_percent = row.sm_percent, row.mem_percent
                raw.enc_percent, raw.dec_percent = row.enc_percent, row.dec_percent
                raw.gpu_instance = ABSENT if row.gpu_instance is None else row.gpu_instance
                raw.compute_instance = (
                    ABSENT if row.compute_instance is None else row.compute_instance
                )
            self._raw.process_count = len(rows)

    def mig(self, devices: Sequence[MigDevice] | None) -> None:
        """MIG on with these devices, their counters at zero, or off. Old handles become invalid."""
        rows = devices or ()
        if len(rows) > MIGS:
            raise ValueError(f"at most {MIGS} MIG devices, not {len(rows)}")
        with self._write() as t_ns:
            for raw, row in zip(self._raw.migs, rows, strict=False):
                ctypes.memset(ctypes.addressof(raw), 0, ctypes.sizeof(raw))
                raw.uuid = row.uuid.encode()
                for name in _MIG_FIELDS:
                    setattr(raw, name, getattr(row, name))
                for counter in raw.counters:
                    counter.at_ns = t_ns
            self._raw.mig_enabled, self._raw.mig_count = int(devices is not None), len(rows)
            self._raw.mig_epoch += 1

    def run_mig(self, index: int, rates: Mapping[Count, float]) -> None:
        """Sets activity shares of one MIG device."""
        with self._write() as t_ns:
            for count, share in rates.items():
                if count >= ACTIVITIES:
                    raise ValueError(f"a MIG device has no {count.name}")
                self._turn(self._raw.migs[index].counters[count], share * 1e9, t_ns, None)

    def link(self, number: int, **values: int) -> None:
        """Sets state and error counts of one NVLink by the names of vgpu.layout.Link."""
        with self._write():
            for name, value in values.items():
                setattr(self._raw.link[number], name, value)

    def c2c(self) -> None:
        """It shares a module with a CPU from now on."""
        with self._write():
            self._raw.c2c = 1

    def xid(self, number: int) -> None:
        """Delivers an Xid to event sets that registered for this GPU."""
        self._owner.event(EVENT_XID, number, self.slot)
