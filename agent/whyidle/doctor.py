"""What this node can and cannot show: every source is tried once, as the agent would read it.

Each collector runs twice a fifth of a second apart, because some tell nothing before their second
look, on the thread that it has in the agent, so that one that hangs takes no other along. What it
returned, or the sentence that it failed with, is the answer; `doctor_advice` says what to type.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from whyidle.clock import NS_PER_S, Clock
from whyidle.collect import ALL
from whyidle.collect.collector import Collector, NoData, Problem
from whyidle.doctor_advice import about, advise, in_order
from whyidle.doctor_checks import CHECKS
from whyidle.host import Host
from whyidle.live import Watched, live_host
from whyidle.runner import describe
from whyidle.table import Row

# works; partly: some of it is refused; idle: it works and has nothing to tell now; off: a switch of
# the kernel or of a module; refused: it is there and may not be read; broken: it fails otherwise;
# late: no answer in time; absent: not on this machine.
State = Literal["works", "partly", "idle", "off", "refused", "broken", "late", "absent"]
# Something is missing that somebody can mend.
WRONG: frozenset[State] = frozenset({"partly", "off", "refused", "broken", "late"})

# A GPM window needs 100 ms; the agent's own are 125 ms.
_AGAIN_NS = NS_PER_S // 5
# Longer than any source takes that works; NVML opens a sleeping driver in some seconds.
DEADLINE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A source and how it does. `why` is a sentence, `fix` what to type, '' where there is none."""

    name: str
    section: str
    shows: str
    state: State
    why: str = ""
    fix: str = ""
    rows: int = 0
    tables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """A node as it was found."""

    node: str
    kernel: str
    user_id: int
    gpus: tuple[str, ...]
    driver: str | None
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """What somebody can mend."""
        return tuple(finding for finding in self.findings if finding.state in WRONG)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a collector gave in all of its runs."""

    runs: int = 0
    rows: list[Row] = field(default_factory=list)
    problems: dict[tuple[str, str], Problem] = field(default_factory=dict)
    no_data: str | None = None
    error: Exception | None = None

    def failures(self) -> list[Problem]:
        """Return the problems that are failures, not parts that a device does not offer."""
        return [problem for problem in self.problems.values() if problem.kind == "failed"]


def run_once(collector: Callable[[Host], object], host: Host, outcome: Outcome) -> None:
    """Run a collector and take down what it gives; nothing that it raises gets through."""
    outcome.no_data = outcome.error = None
    try:
        found = collector(host)
        for item in found if isinstance(found, Sequence) else iter(found):  # type: ignore[call-overload]
            if isinstance(item, Problem):
                outcome.problems[item.subject, item.message] = item
            else:
                outcome.rows.append(item)
    except NoData as why:
        outcome.no_data = str(why)
    except Exception as error:  # noqa: BLE001 - it is what this is here to tell
        outcome.error = error
    outcome.runs += 1


def _drive(
    collectors: Sequence[Collector], host: Host, outcomes: Mapping[str, Outcome], clock: Clock
) -> None:
    made = [(collector, collector.make()) for collector in collectors]
    for turn in range(2):
        began = clock.mono_ns()
        for collector, collect in made:
            run_once(collect, host, outcomes[collector.name])
        if turn == 0:
            clock.sleep_until(began + _AGAIN_NS)


def examine_collectors(
    host_for: Callable[[], Host],
    clock: Clock,
    *,
    collectors: Sequence[Collector] = ALL,
    deadline_s: float = DEADLINE_S,
) -> dict[str, Outcome]:
    """Run the collectors, those of one thread one after another; return what each gave.

    One that has not run twice by the deadline is late; its thread is left behind.
    """
    outcomes = {collector.name: Outcome() for collector in collectors}
    groups: dict[str, list[Collector]] = {}
    for collector in collectors:
        groups.setdefault(collector.thread, []).append(collector)
    hosts = {name: host_for() for name in groups}
    threads = {
        name: threading.Thread(
            target=_drive, args=(group, hosts[name], outcomes, clock), daemon=True
        )
        for name, group in groups.items()
    }
    for thread in threads.values():
        thread.start()
    end_ns = clock.mono_ns() + int(deadline_s * NS_PER_S)
    for name, thread in threads.items():
        thread.join(max(0.0, (end_ns - clock.mono_ns()) / NS_PER_S))
        if not thread.is_alive():
            hosts[name].close()
    return outcomes


def judge(collector: str, outcome: Outcome) -> Finding:
    """Return how a collector does."""
    section, shows = about(collector)
    tables = tuple(sorted({type(row).TABLE for row in outcome.rows}))
    state, why = _state(outcome)
    advice = advise(collector, why)
    if advice is not None:
        state, why = advice.state or state, advice.why or why
    return Finding(
        name=collector,
        section=section,
        shows=shows,
        state=state,
        why=why,
        fix="" if advice is None else advice.fix,
        rows=len(outcome.rows),
        tables=tables,
    )


def _state(outcome: Outcome) -> tuple[State, str]:
    failures = outcome.failures()
    if outcome.error is not None:
        refused = isinstance(outcome.error, PermissionError)
        return ("refused" if refused else "broken"), describe(outcome.error)
    if outcome.runs < 2:
        return "late", "no answer in time: the driver or the device behind it hangs"
    if outcome.no_data is not None and not outcome.rows:
        return "absent", outcome.no_data
    if failures:
        first = failures[0]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        where = f"{first.subject}: " if first.subject else ""
        return ("partly" if outcome.rows else "broken"), f"{where}{first.message}{more}"
    notes = [problem.message for problem in outcome.problems.values()]
    if not outcome.rows:
        return "idle", notes[0] if notes else ""
    return "works", notes[0] if notes else ""


def examine(
    root: str, clock: Clock, *, deadline_s: float = DEADLINE_S, node: str = ""
) -> Examination:
    """Try every source of the machine below `root`."""
    watched = Watched(commands=(os.getpid(),))
    host = live_host(root, clock, watched=watched)
    outcomes = examine_collectors(
        lambda: live_host(root, clock, watched=watched), clock, deadline_s=deadline_s
    )
    findings = [judge(name, outcomes[name]) for name in in_order(outcomes)]
    rows = {name: outcome.rows for name, outcome in outcomes.items()}
    for check in CHECKS:
        told = check.look(host, rows)
        if told is not None:
            findings.append(
                Finding(
                    name=check.name,
                    section=check.section,
                    shows=check.shows,
                    state=told.state,
                    why=told.why,
                    fix=told.fix,
                )
            )
    infos = [row for row in outcomes["gpu_info"].rows if getattr(row, "parent_uuid", None) is None]
    latest = {str(getattr(row, "uuid", "")): row for row in infos}
    drivers = {getattr(row, "driver_version", None) for row in infos} - {None}
    found = Examination(
        node=node or _read(host, "proc/sys/kernel/hostname"),
        kernel=_read(host, "proc/sys/kernel/osrelease"),
        user_id=os.geteuid(),
        gpus=tuple(str(getattr(row, "name", None) or "GPU") for row in latest.values()),
        driver=next(iter(sorted(map(str, drivers))), None),
        findings=tuple(findings),
    )
    host.close()
    return found


def _read(host: Host, path: str) -> str:
    try:
        return host.read(path).strip()
    except OSError:
        return ""
