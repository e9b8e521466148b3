"""What the rules have to say: most costly first, each with its numbers and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.text import Text

from whyidle_rules.diagnosis import Diagnosis, Finding
from whyidle_rules.report.pen import STYLE_DIM, STYLE_TITLE, Pen
from whyidle_rules.report.words import (
    as_number,
    duration,
    figure,
    gpu_time,
    percent,
    rank_list,
    size,
)

_MAX_FINDINGS = 5
_MAX_EVIDENCE = 8
_VALUE_CELLS = 40
# A what-if this close to the cost itself is not a second number.
_SAME_RATIO = 0.01

_SEVERITY_STYLES = {
    "critical": Style(color="red", bold=True),
    "warning": Style(color="yellow", bold=True),
    "info": Style(bold=True),
}
_OWNERS = {
    "application": "training code",
    "infrastructure": "cluster",
    "hardware": "hardware",
    "config": "configuration",
}


def findings(pen: Pen, d: Diagnosis) -> Iterable[RenderableType]:
    """The findings, at most five unless everything is asked for."""
    if not d.findings:
        return
    ordered = sorted(d.findings, key=lambda one: (-_worth_s(one), -(one.beside_s or 0.0), one.rule))
    kept = ordered if pen.verbose else ordered[:_MAX_FINDINGS]
    yield Text("Findings", style=STYLE_TITLE)
    for number, finding in enumerate(kept):
        if number:
            yield Text()
        yield from _finding(pen, finding, d.totals.gpu_s)
    if len(ordered) > len(kept):
        yield Text()
        yield Padding(
            Text(f"{len(ordered) - len(kept):,} smaller ones with --verbose", style=STYLE_DIM),
            (0, 0, 0, 2),
        )


def _worth_s(finding: Finding) -> float:
    """What a finding costs: a late rank's own seconds are few beside those of who waited.

    What is told beside the ledger comes after all that is idle.
    """
    if finding.beside_s is not None:
        return 0.0
    return max(finding.idle_s, _returned_s(finding) or 0.0)


def _finding(pen: Pen, finding: Finding, gpu_s: float) -> Iterable[RenderableType]:
    style = _SEVERITY_STYLES.get(finding.severity, Style())
    head = pen.phrase((finding.severity.upper(), style), (finding.title, STYLE_TITLE))
    yield Padding(head, (0, 0, 0, 2))
    lines = [pen.prose(finding.says)]
    if pen.verbose and finding.why:
        lines.append(pen.prose(finding.why))
    owner = _OWNERS.get(finding.owner, pen.short(finding.owner, 24))
    lines.append(pen.phrase((f"Fix ({owner}):", STYLE_TITLE), (finding.advice, None)))
    lines.append(pen.phrase(("Cost:", STYLE_TITLE), (_cost(finding, gpu_s), None)))
    shown = _evidence(pen, finding.evidence)
    if shown:
        lines.append(pen.prose(f"Evidence: {shown}", STYLE_DIM))
    lines.append(pen.prose(_origin(finding), STYLE_DIM))
    for line in lines:
        yield Padding(line, (0, 0, 0, 4))


def _cost(finding: Finding, gpu_s: float) -> str:
    """Write what was idle for it, and what fixing it returns, waiting of others included."""
    if finding.beside_s is not None:
        told = "told beside the ledger: no idle time is charged to it."
        return f"{_shared(finding.beside_s, gpu_s)}, {told}"
    cost = f"{_shared(finding.idle_s, gpu_s)} idle"
    returned_s = _returned_s(finding)
    if returned_s is None:
        return f"{cost}."
    if abs(returned_s - finding.idle_s) <= _SAME_RATIO * finding.idle_s:
        return f"{cost}; at most that comes back."
    others = " with those who waited for it" if returned_s > finding.idle_s else ""
    return f"{cost};{others} at most {_shared(returned_s, gpu_s)} comes back."


def _shared(seconds: float, gpu_s: float) -> str:
    return f"{gpu_time(seconds)} ({percent(seconds / gpu_s)})" if gpu_s > 0 else gpu_time(seconds)


def _returned_s(finding: Finding) -> float | None:
    return as_number((finding.what_if or {}).get("gpu_s_returned"))


def _origin(finding: Finding) -> str:
    parts = [f"Rule {finding.rule} ({finding.cause}/{finding.subcause})"]
    if finding.grade is not None:
        parts.append(finding.grade)
    if finding.ranks:
        parts.append(rank_list(finding.ranks))
    return ", ".join(parts)


def _evidence(pen: Pen, evidence: Mapping[str, Any]) -> str:
    items = list(evidence.items())
    kept = items if pen.verbose else items[:_MAX_EVIDENCE]
    words = [_fact(pen, name, value) for name, value in kept]
    if len(items) > len(kept):
        words.append(f"{len(items) - len(kept)} more")
    return ", ".join(words)


def _fact(pen: Pen, name: str, value: object) -> str:
    """Write one number of the evidence; its unit is the end of its name."""
    stem, _, unit = name.rpartition("_")
    number = as_number(value)
    written = _with_unit(number, unit) if number is not None and stem else ""
    label = pen.short(stem if written else name, _VALUE_CELLS).replace("_", " ")
    return f"{label} {written or _plain(pen, value)}"


def _with_unit(value: float, unit: str) -> str:
    match unit:
        case "s":
            return duration(value)
        case "ns":
            return duration(value / 1e9)
        case "bytes":
            return size(value)
        case "ratio":
            return percent(value)
    return ""


def _plain(pen: Pen, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        number = as_number(value)
        is_count = number is not None and isinstance(value, int) and abs(number) < 1e15
        return f"{value:,}" if is_count else figure(math.nan if number is None else number)
    if isinstance(value, str):
        return pen.short(value, _VALUE_CELLS)
    return pen.short("unknown" if value is None else str(value), _VALUE_CELLS)
