"""Shows one GPU's timeline to readers of NVML, through the stand-in library's state.

The counters there run by themselves at a rate. At each publication they are set to what the
timeline says now, and get the mean rate of what it plans next: exactly until the next edge where
that is a tick away or more, else over PLAN_NS. So a counter strays from the timeline by the
plan's length and by how late the node wakes, never for longer, and errors do not add up. A counter
that ran ahead waits: it never goes back.
"""

from __future__ import annotations

from vgpu.device.kinds import DRAM, GR, QUANTITIES, SHARES, SM, Activities
from vgpu.device.lane import FAR_NS, Lane
from vgpu.device.ledger import Ledger
from vgpu.device.machine import Device
from vgpu.device.usage import Usage, measure, next_edge_ns
from vgpu.gpu import Gpu, Process
from vgpu.layout import NVLINK_RX, NVLINK_TX, Count

TICK_NS = 2_000_000
# Two ticks: a node that wakes late by one leaves no hole in the counters.
PLAN_NS = 4_000_000
# A context without allocations, as nvidia-smi shows it on an H100.
CONTEXT_BYTES = 520 << 20
# Shares of the span between idle power and the limit: a context's clocks, any kernel, SMs, DRAM.
_POWER_CONTEXT, _POWER_GR, _POWER_SM, _POWER_DRAM = 0.07, 0.14, 0.55, 0.24
_IDLE_REASON = 1  # nvmlClocksEventReasonGpuIdle
_IDLE_CLOCKS_MHZ, _IDLE_PSTATE = (345, 345), 8
_NS_PER_S = 1e9


class _Running:
    """One counter as last written, and its exact value."""

    __slots__ = ("at_ns", "exact", "rate_per_s", "until_ns", "value")

    def __init__(self, value: float) -> None:
        self.exact = value
        self.value, self.rate_per_s, self.at_ns, self.until_ns = round(value), 0.0, 0, 0

    @property
    def moves(self) -> bool:
        """Whether readers must be told even if nothing more is planned."""
        return self.rate_per_s != 0.0 or self.exact > self.value

    def shown(self, at_ns: int) -> int:
        """What a reader sees at a moment."""
        end_ns = min(at_ns, self.until_ns) if self.until_ns else at_ns
        if self.rate_per_s == 0.0 or end_ns <= self.at_ns:
            return self.value
        return self.value + round(self.rate_per_s * (end_ns - self.at_ns) / _NS_PER_S)

    def turn(self, at_ns: int, amount: float, plan_ns: int, until_ns: int) -> bool:
        """Advances by `amount` in plan_ns from now on. Whether anything changes."""
        was, shown = self.rate_per_s, self.shown(at_ns)
        self.value = max(shown, round(self.exact))
        # A plan without end keeps its rate for longer than plan_ns: no catching up in it.
        ahead = self.value - self.exact if until_ns and self.value > self.exact + 1 else 0.0
        self.rate_per_s = max(0.0, amount - ahead) * _NS_PER_S / plan_ns
        self.at_ns, self.until_ns = at_ns, until_ns
        return self.rate_per_s != 0.0 or was != 0.0 or self.value != shown


class Publisher:
    """The NVML side of one GPU. `swept_ns`: up to when its timeline is counted and final."""

    def __init__(self, gpu: Gpu, device: Device, activities: Activities, now_ns: int) -> None:
        self._gpu, self._device, self._activities = gpu, device, activities
        self.swept_ns = self.due_ns = now_ns
        self.uuid = gpu.uuid
        with gpu.raw(now_ns) as raw:
            self._links = int(raw.links)
            self._idle_mw = int(raw.gauges.power_mw)
            self._span_mw = int(raw.gauges.power_limit_mw) - self._idle_mw
            self._clocks_mhz = (int(raw.gauges.clock_max_mhz[0]), int(raw.gauges.clock_max_mhz[1]))
            self._counters = {
                index: _Running(raw.counters[index].value)
                for index in (
                    *QUANTITIES,
                    Count.PCIE_TX,
                    Count.PCIE_RX,
                    *(NVLINK_TX + link for link in range(self._links)),
                    *(NVLINK_RX + link for link in range(self._links)),
                )
            }
            self._energy = _Running(gpu.value("energy_mj", now_ns))
        self._news = False  # something happened, or was planned, since the last publication
        self._powered = False

    def sweep(self, now_ns: int, ledger: Ledger) -> None:
        """Counts the timeline up to now, and takes out what has ended."""
        if now_ns <= self.swept_ns:
            return
        lanes = list(self._device.lanes())
        usage = measure(lanes, self.swept_ns, now_ns, self._activities)
        self._news = self._news or usage.any()
        self._energy.exact += self._energy_mj(usage, now_ns - self.swept_ns)
        for index, amount in self._amounts(usage):
            self._counters[index].exact += amount
        self.swept_ns = now_ns
        for lane in lanes:
            gone = lane.retire(now_ns)
            ledger.finished(lane, gone)
            lane.context.done += sum(piece.last for piece in gone)

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
        self._energy.turn(now_ns, energy_mj, plan_ns, 0)
        with self._gpu.raw(now_ns) as raw:
            for index, amount in self._amounts(usage, everything=True):
                running = self._counters[index]
                if running.turn(now_ns, amount, plan_ns, until_ns):
                    _store(raw.counters[index], running)
            _store(raw.counters[Count.ENERGY_MJ], self._energy)
            gauges = raw.gauges
            gauges.power_mw = round(energy_mj * _NS_PER_S / plan_ns)
            gauges.event_reasons = 0 if usage.shares[GR] else _IDLE_REASON
            if powered != self._powered:
                gauges.clock_mhz[0:2] = self._clocks_mhz if powered else _IDLE_CLOCKS_MHZ
                gauges.pstate = 0 if powered else _IDLE_PSTATE

    def processes(self) -> None:
        """Writes who is on this GPU, and their memory."""
        contexts = self._device.contexts
        rows = [
            Process(pid=context.pid, used_bytes=CONTEXT_BYTES + context.memory_bytes)
            for context in contexts
        ]
        self._gpu.processes(rows)
        self._gpu.set(memory_used_bytes=sum(row.used_bytes or 0 for row in rows))

    def _amounts(self, usage: Usage, *, everything: bool = False) -> list[tuple[int, float]]:
        """Amounts by counter. Links share evenly; they are left out where nothing moves."""
        rows: list[tuple[int, float]] = [(QUANTITIES[i], usage.shares[i]) for i in range(SHARES)]
        rows += [(Count.PCIE_TX, usage.pcie_tx), (Count.PCIE_RX, usage.pcie_rx)]
        for first, total in ((NVLINK_TX, usage.nvlink_tx), (NVLINK_RX, usage.nvlink_rx)):
            if self._links and (total or (everything and self._counters[first].moves)):
                rows += [(first + link, total / self._links) for link in range(self._links)]
        return rows

    def _energy_mj(self, usage: Usage, length_ns: int) -> float:
        """mW times s is mJ."""
        shares = usage.shares
        active_ns = (
            _POWER_GR * shares[GR] + _POWER_SM * shares[SM] + _POWER_DRAM * shares[DRAM]
        ) + (_POWER_CONTEXT * length_ns if self._device.contexts else 0.0)
        return (self._idle_mw * length_ns + self._span_mw * active_ns) / _NS_PER_S


def _store(counter: object, running: _Running) -> None:
    raw = counter
    raw.value, raw.rate_per_s = running.value, running.rate_per_s  # type: ignore[attr-defined]
    raw.at_ns, raw.until_ns = running.at_ns, running.until_ns  # type: ignore[attr-defined]
