"""Shows one GPU's timeline to readers of NVML, through the stand-in library's state.

The counters there run by themselves at a rate. At each publication they are set to what the
timeline says now, and get the mean rate of what it plans next: exactly until the next edge where
that is a tick away or more, else over PLAN_NS. So a counter strays from the timeline by the
plan's length and by how late the node wakes, never for longer, and errors do not add up. A counter
that ran ahead waits: it never goes back.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from vgpu.device.kinds import DRAM, GR, QUANTITIES, SM, Activities
from vgpu.device.lane import FAR_NS, Lane
from vgpu.device.ledger import Ledger
from vgpu.device.machine import Device
from vgpu.device.usage import Usage, measure, next_edge_ns
from vgpu.gpu import Gpu, Process
from vgpu.layout import NVLINK_RX, NVLINK_TX, Count

TICK_NS = 2_000_000
# Two ticks: a node that wakes late by one leaves no hole in the counters.
PLAN_NS = 4_000_000
# How often the share of each process is shown anew.
PROCESS_PERIOD_NS = 250_000_000
# A context without allocations, as nvidia-smi shows it on an H100.
CONTEXT_BYTES = 520 << 20
# Shares of the span between idle power and the limit: a context's clocks, any kernel, SMs, DRAM.
_POWER_CONTEXT, _POWER_GR, _POWER_SM, _POWER_DRAM = 0.07, 0.14, 0.55, 0.24
_IDLE_REASON = 1  # nvmlClocksEventReasonGpuIdle
_IDLE_CLOCKS_MHZ = (345, 345)  # data-centre boards rest in P0 all the same
_NS_PER_S = 1e9
_COUNTER = struct.Struct("=qdQQ")  # vgpu.layout.Counter


class _Running:
    """One counter as last written, and its exact value. Links that share a load are one of them."""

    __slots__ = ("at_ns", "exact", "places", "rate_per_s", "until_ns", "value")

    def __init__(self, value: float, places: Sequence[int]) -> None:
        self.exact, self.places = value, [place * _COUNTER.size for place in places]
        self.value, self.rate_per_s, self.at_ns, self.until_ns = round(value), 0.0, 0, 0

    def write(
        self, counters: memoryview, at_ns: int, amount: float, plan_ns: int, until_ns: int
    ) -> None:
        """Advances by `amount` in plan_ns from now on, and stores that if it is news."""
        rate, value, exact = self.rate_per_s, self.value, self.exact
        if rate == 0.0 and amount == 0.0 and value >= exact - 0.5:
            return
        if rate != 0.0:  # what a reader sees now
            end_ns = until if (until := self.until_ns) and until < at_ns else at_ns
            if end_ns > self.at_ns:
                value += round(rate * (end_ns - self.at_ns) / _NS_PER_S)
        if value < exact:
            value = round(exact)
        elif until_ns and value > exact + 1.0:
            # A plan without end keeps its rate for longer than plan_ns: no catching up in it.
            amount = amount + exact - value if amount + exact > value else 0.0
        self.value, self.rate_per_s = value, amount * _NS_PER_S / plan_ns
        self.at_ns, self.until_ns = at_ns, until_ns
        for place in self.places:
            _COUNTER.pack_into(counters, place, value, self.rate_per_s, at_ns, until_ns)


class Publisher:
    """The NVML side of one GPU. `swept_ns`: up to when its timeline is counted and final."""

    def __init__(self, gpu: Gpu, device: Device, activities: Activities, now_ns: int) -> None:
        self._gpu, self._device, self._activities = gpu, device, activities
        self.swept_ns = self.due_ns = self._shown_ns = now_ns
        self.uuid = gpu.uuid
        with gpu.raw(now_ns) as raw:
            self._links = int(raw.links)
            self._idle_mw = int(raw.gauges.power_mw)
            self._span_mw = int(raw.gauges.power_limit_mw) - self._idle_mw
            self._clocks_mhz = (int(raw.gauges.clock_max_mhz[0]), int(raw.gauges.clock_max_mhz[1]))
            links = range(self._links)
            places: list[Sequence[int]] = [
                *((index,) for index in (*QUANTITIES, Count.PCIE_TX, Count.PCIE_RX)),
                *([first + link for link in links] for first in (NVLINK_TX, NVLINK_RX)),
            ]
            self._counters = [
                _Running(raw.counters[some[0]].value if some else 0, some) for some in places
            ]
            self._energy = _Running(gpu.value("energy_mj", now_ns), (Count.ENERGY_MJ,))
            self._memory = memoryview(raw.counters).cast("B")
        self._news = False  # something happened, or was planned, since the last publication
        self._powered = False

    @property
    def lost(self) -> bool:
        """Whether the GPU fell off the bus."""
        return self._gpu.lost

    def sweep(self, now_ns: int, ledger: Ledger) -> None:
        """Counts the timeline up to now, and takes out what has ended."""
        if now_ns <= self.swept_ns:
            return
        lanes = list(self._device.lanes())
        usage = measure(lanes, self.swept_ns, now_ns, self._activities)
        self._news = self._news or usage.any()
        self._energy.exact += self._energy_mj(usage, now_ns - self.swept_ns)
        for running, amount in zip(self._counters, self._amounts(usage), strict=True):
            running.exact += amount
        self._shares(usage, now_ns)
        self.swept_ns = now_ns
        for lane in lanes:
            gone = lane.retire(now_ns)
            ledger.finished(lane, gone)
            lane.context.done += sum(piece.last for piece in gone)

    def _shares(self, usage: Usage, now_ns: int) -> None:
        """Adds up each process's own residency; once a period its share is shown."""
        contexts = self._device.contexts
        for context in contexts:
            alone = len(contexts) == 1
            own = (
                usage
                if alone
                else measure(context.lanes.values(), self.swept_ns, now_ns, self._activities)
            )
            context.resident_ns += own.shares[GR]
        length_ns = now_ns - self._shown_ns
        if length_ns < PROCESS_PERIOD_NS:
            return
        self._shown_ns = now_ns
        changed = False
        for context in contexts:
            percent = min(100, round(100 * context.resident_ns / length_ns))
            changed = changed or percent != context.sm_percent
            context.sm_percent, context.resident_ns = percent, 0.0
        if changed:
            self.processes()

    def publish(self) -> None:
        """Writes the counters of the moment swept to; sets when it is due again."""
        now_ns = self.swept_ns
        lanes = list(self._device.lanes())
        plan_ns, until_ns = self._plan(lanes, now_ns)
        usage = measure(lanes, now_ns, now_ns + plan_ns, self._activities)
        powered = bool(self._device.contexts)
        news = usage.any()
        if news or self._news or powered != self._powered:
            self._write(usage, now_ns, plan_ns, until_ns, powered=powered)
        self._news, self._powered = news, powered
        if any(context.sm_percent or context.resident_ns for context in self._device.contexts):
            self.due_ns = min(self.due_ns, self._shown_ns + PROCESS_PERIOD_NS)

    def _plan(self, lanes: list[Lane], now_ns: int) -> tuple[int, int]:
        """How far the rates are planned, and the counters' end (0: none)."""
        edge_ns = next_edge_ns(lanes, now_ns)
        if edge_ns == FAR_NS:
            self.due_ns = FAR_NS
            return round(_NS_PER_S), 0
        if edge_ns - now_ns >= TICK_NS:
            self.due_ns = edge_ns
            return edge_ns - now_ns, edge_ns
        self.due_ns = now_ns + TICK_NS
        return PLAN_NS, now_ns + PLAN_NS

    def _write(
        self, usage: Usage, now_ns: int, plan_ns: int, until_ns: int, *, powered: bool
    ) -> None:
        energy_mj = self._energy_mj(usage, plan_ns)
        with self._gpu.raw(now_ns) as raw:
            for running, amount in zip(self._counters, self._amounts(usage), strict=True):
                running.write(self._memory, now_ns, amount, plan_ns, until_ns)
            self._energy.write(self._memory, now_ns, energy_mj, plan_ns, 0)
            gauges = raw.gauges
            gauges.power_mw = round(energy_mj * _NS_PER_S / plan_ns)
            gauges.event_reasons = 0 if usage.shares[GR] else _IDLE_REASON
            if powered != self._powered:
                gauges.clock_mhz[0:2] = self._clocks_mhz if powered else _IDLE_CLOCKS_MHZ

    def processes(self) -> None:
        """Writes who is on this GPU, and their memory."""
        contexts = self._device.contexts
        rows = [
            Process(
                pid=context.pid,
                used_bytes=CONTEXT_BYTES + context.memory_bytes,
                sm_percent=context.sm_percent,
            )
            for context in contexts
        ]
        self._gpu.processes(rows)
        self._gpu.set(memory_used_bytes=sum(row.used_bytes or 0 for row in rows))

    def _amounts(self, usage: Usage) -> list[float]:
        """In the order of the counters; links share evenly."""
        links = self._links or 1
        return [
            *usage.shares,
            usage.pcie_tx,
            usage.pcie_rx,
            usage.nvlink_tx / links,
            usage.nvlink_rx / links,
        ]

    def _energy_mj(self, usage: Usage, length_ns: int) -> float:
        """mW times s is mJ."""
        shares = usage.shares
        active_ns = (
            _POWER_GR * shares[GR] + _POWER_SM * shares[SM] + _POWER_DRAM * shares[DRAM]
        ) + (_POWER_CONTEXT * length_ns if self._device.contexts else 0.0)
        return (self._idle_mw * length_ns + self._span_mw * active_ns) / _NS_PER_S
