"""The state of each GPU: power, memory, clocks, temperature, why it is slowed, errors.

Source: nvml.h. Time spent slowed comes from the driver's own totals (fields 74, 76, 269-271): the
momentary bits miss pulses between two readings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from whyidle.collect.collector import Collect, Collector, Problem
from whyidle.collect.gpu_list import LISTS, Gpus, is_gone, number, refused, value, whole
from whyidle.host import Answer, Host, NvmlError
from whyidle.schema import GpuState

# NVML field ids (NVML_FI_DEV_*) by what they are called here, in one question.
FIELDS: tuple[tuple[str, int], ...] = (
    ("sw_power_cap", 74),
    ("sync_boost", 76),
    ("memory_temperature", 82),
    ("power_instant", 186),
    ("ecc_corrected", 3),
    ("ecc_uncorrected", 4),
    ("remapped_corrected", 142),
    ("remapped_uncorrected", 143),
    ("remap_pending", 144),
    ("remap_failed", 145),
    ("recovery_action", 230),
    ("sw_thermal", 269),
    ("hw_thermal", 270),
    ("hw_power_brake", 271),
)
# nvmlClockType_t
_CLOCK_SM = 1
_CLOCK_MEMORY = 2
_TEMPERATURE_GPU = 0
# What the driver prints for a P-state that it does not know (NVML_PSTATE_UNKNOWN).
_PSTATE_UNKNOWN = 32


@dataclass(slots=True, kw_only=True)
class Reading:
    """The answers of one GPU by question, None where it has no such value, and what failed."""

    answers: dict[str, Answer] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def get(self, name: str) -> int | None:
        """Return an answer that is a whole number."""
        return whole(self.answers.get(name))


def state_row(uuid: str, mono_ns: int, code: int, reading: Reading) -> GpuState:
    """Return the row; `code` is NVML's answer, with which all that was not read is None."""
    memory = reading.answers.get("memory")
    total, reserved, free, used = (
        memory if isinstance(memory, LISTS) and len(memory) == 4 else (None,) * 4
    )
    del total, reserved
    pstate = reading.get("pstate")
    pending, failed = reading.get("remap_pending"), reading.get("remap_failed")
    temperature = number(reading.answers.get("memory_temperature"))
    return GpuState(
        mono_ns=mono_ns,
        uuid=uuid,
        nvml_return=code,
        power_milliwatts=reading.get("power"),
        power_instant_milliwatts=reading.get("power_instant"),
        power_limit_milliwatts=reading.get("power_limit"),
        energy_millijoules=reading.get("energy"),
        memory_used_bytes=whole(used),
        memory_free_bytes=whole(free),
        sm_clock_megahertz=reading.get("sm_clock"),
        memory_clock_megahertz=reading.get("memory_clock"),
        temperature_celsius=reading.get("temperature"),
        memory_temperature_celsius=None if temperature is None else round(temperature),
        performance_state=None if pstate == _PSTATE_UNKNOWN else pstate,
        event_reasons=reading.get("event_reasons"),
        sw_power_cap_ns=reading.get("sw_power_cap"),
        sync_boost_ns=reading.get("sync_boost"),
        sw_thermal_ns=reading.get("sw_thermal"),
        hw_thermal_ns=reading.get("hw_thermal"),
        hw_power_brake_ns=reading.get("hw_power_brake"),
        pcie_generation=reading.get("pcie_generation"),
        pcie_width=reading.get("pcie_width"),
        pcie_replays=reading.get("pcie_replays"),
        ecc_corrected=reading.get("ecc_corrected"),
        ecc_uncorrected=reading.get("ecc_uncorrected"),
        remapped_corrected=reading.get("remapped_corrected"),
        remapped_uncorrected=reading.get("remapped_uncorrected"),
        remap_pending=None if pending is None else bool(pending),
        remap_failed=None if failed is None else bool(failed),
        recovery_action=reading.get("recovery_action"),
    )


# Each value: its name here, NVML's question and its further arguments.
_QUESTIONS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("power", "PowerUsage", ()),
    ("power_limit", "EnforcedPowerLimit", ()),
    ("energy", "TotalEnergyConsumption", ()),
    ("memory", "MemoryInfo", ()),
    ("sm_clock", "ClockInfo", (_CLOCK_SM,)),
    ("memory_clock", "ClockInfo", (_CLOCK_MEMORY,)),
    ("temperature", "Temperature", (_TEMPERATURE_GPU,)),
    ("pstate", "PerformanceState", ()),
    ("event_reasons", "CurrentClocksEventReasons", ()),
    ("pcie_generation", "CurrPcieLinkGeneration", ()),
    ("pcie_width", "CurrPcieLinkWidth", ()),
    ("pcie_replays", "PcieReplayCounter", ()),
)


def read(host: Host, uuid: str) -> tuple[int, Reading]:
    """Ask a GPU everything; return NVML's code, 0 or that of a GPU that is gone, and the answers.

    One refused value is a problem of that value only.
    """
    reading = Reading()
    for name, call, args in _QUESTIONS:
        try:
            reading.answers[name] = value(host, call, uuid, *args)
        except NvmlError as error:
            reading.problems.append(Problem(subject=f"{uuid} {call}", message=str(error)))
            if is_gone(error):
                return error.code, reading
    try:
        found = value(host, "FieldValues", uuid, *(number_ for _, number_ in FIELDS))
    except NvmlError as error:
        reading.problems.append(Problem(subject=f"{uuid} FieldValues", message=str(error)))
        return (error.code if is_gone(error) else 0), reading
    if isinstance(found, LISTS):
        for (name, number_), answer in zip(FIELDS, found, strict=True):
            reading.answers[name] = answer
            if (code := refused(answer)) is not None:
                reading.problems.append(
                    Problem(subject=f"{uuid} field {number_}", message=f"NVML error {code}")
                )
    return 0, reading


def make() -> Collect:
    """Return the collector."""
    gpus = Gpus()

    def collect(host: Host) -> Iterator[GpuState | Problem]:
        for gpu in gpus.ask(host):
            if gpu.parent is not None:
                continue  # a MIG device shares power, clocks and errors with its GPU
            code, reading = read(host, gpu.uuid)
            yield state_row(gpu.uuid, host.clock.mono_ns(), code, reading)
            yield from reading.problems

    return collect


GPU_STATE = Collector(name="gpu_state", lane="normal", make=make, thread="nvml")
