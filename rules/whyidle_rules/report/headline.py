"""The one sentence: what to fix first, whose it is, what it costs, what fixing it returns at most.

It speaks of the biggest root cause, never of the biggest felt one, and claims no more than the
grade of its evidence allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from whyidle_rules.diagnosis import (
    Diagnosis,
    Finding,
    GpuLedger,
    LedgerRow,
    RootCause,
    Run,
    Totals,
)
from whyidle_rules.report.places import cluster, waiting
from whyidle_rules.report.roots import RootGroup, group_roots, is_sure
from whyidle_rules.report.rounding import Figures, figures
from whyidle_rules.report.words import (
    as_number,
    clause,
    clean,
    gpu_time,
    percent,
    shorten,
    title_inside,
)

# Under this share of idle time a job is healthy, and naming a cause would send people after noise.
BUSY_RATIO = 0.02
# From this share of the idle time on, the missing cause is the news.
_MOSTLY_UNKNOWN_RATIO = 0.5
_MOUNT_CHARS = 40
# An unknown part of this share of the idle time belongs beside the biggest known cause.
_MENTION_RATIO = 0.2
# A known cause of this share of all GPU time belongs beside a mostly unknown rest.
_MENTION_KNOWN_RATIO = 0.1
# A cause is told as waiting for a rank once others spent this share of it waiting.
_WAITED_RATIO = 0.3
_MOST_RATIO = 0.5
_ALMOST_ALL_RATIO = 0.95
# A what-if this close to the cost itself is not a second number.
_SAME_COST_RATIO = 0.99

_UNATTRIBUTED = "unattributed"
# Unattributed, and still something to say: the clause is a reason, if not the last one.
_HALF_KNOWN = frozenset({"data_wait", "kernel_gap"})

# Which recording would tell, by the kind that was diagnosed; None stands for any other subcause.
_TELLS: dict[str, dict[str | None, str]] = {
    "trace": {
        None: "`whyidle record` on its nodes would show what the host did meanwhile",
        "no_evidence": "traces of every rank with CPU activity on (ProfilerActivity.CPU) would "
        "tell more",
        "data_wait": "`whyidle record` on its nodes would tell",
        "kernel_gap": "fewer and larger kernels, or CUDA graphs, would shrink it",
    },
    "recording": {
        None: "a profiler trace of a few steps would tell more",
        "no_evidence": "`whyidle record -- CMD`, which puts its probe into the trainer, would "
        "tell more",
        "data_wait": "a recording that may see the processes of the DataLoader workers would tell",
        "kernel_gap": "fewer and larger kernels, or CUDA graphs, would shrink it",
    },
}


def headline(
    *,
    totals: Totals,
    root_causes: Sequence[RootCause],
    ledger: Sequence[LedgerRow],
    gpus: Sequence[GpuLedger],
    run: Run,
    findings: Sequence[Finding],
) -> str:
    """Return the sentence; it is plain text on one line, safe for any terminal.

    Shares are of all GPU time (`totals.gpu_s`); GPU times are sums over all GPUs.
    """
    if not gpus or totals.gpu_s <= 0:
        return _nothing(run)
    if totals.idle_s < BUSY_RATIO * totals.gpu_s:
        return _busy(totals, figures(totals), len(gpus))
    groups = group_roots(root_causes, ledger)
    named = [group for group in groups if group.cause != _UNATTRIBUTED]
    unknown = [group for group in groups if group.cause == _UNATTRIBUTED]
    unknown_s = math.fsum(group.idle_s for group in unknown)
    start = f"{_subject(len(gpus))} idle {percent(totals.idle_s / totals.gpu_s)} of the time"
    if not named or unknown_s > _MOSTLY_UNKNOWN_RATIO * totals.idle_s:
        return (
            start + _unknown(unknown, totals, gpus, run) + _largest_known(named, totals, gpus) + "."
        )
    first = named[0]
    body = _cause(first, totals, gpus, findings) + _cost(first, totals, findings)
    return start + body + _rest(unknown_s, totals) + "."


def told_root(found: Diagnosis) -> tuple[bool, float] | None:
    """Return whether the sentence names a cause, and the GPU-seconds that it says come back.

    Where it names none they are all idle ones; None where it has nothing to sell.
    """
    totals = found.totals
    if not found.gpus or totals.gpu_s <= 0 or totals.idle_s < BUSY_RATIO * totals.gpu_s:
        return None
    groups = group_roots(found.root_causes, found.ledger)
    named = [group for group in groups if group.cause != _UNATTRIBUTED]
    unknown_s = math.fsum(group.idle_s for group in groups if group.cause == _UNATTRIBUTED)
    if not named or unknown_s > _MOSTLY_UNKNOWN_RATIO * totals.idle_s:
        return False, totals.idle_s
    promised = _returned_s(named[0], found.findings)
    return True, named[0].idle_s if promised is None else min(promised, named[0].idle_s)


def _subject(count: int) -> str:
    return "The GPU was" if count == 1 else "GPUs were"


def _nothing(run: Run) -> str:
    if run.kind == "trace":
        return (
            "No GPU activity was found in the trace, so nothing can be said about idle GPUs; "
            "profile again with GPU activity on (ProfilerActivity.CUDA)."
        )
    return (
        "No GPU activity was recorded, so nothing can be said about idle GPUs; "
        "`whyidle doctor` on the node says why."
    )


def _busy(totals: Totals, digits: Figures, count: int) -> str:
    start = f"{_subject(count)} busy: working {digits.share(digits.working, totals.working_s)}"
    if totals.idle_s <= 0:
        return f"{start} of the time and never idle."
    cost = f"{digits.idle().share} ({gpu_time(totals.idle_s)})"
    return f"{start} of the time, idle {cost}, too little to chase."


def _cause(
    group: RootGroup,
    totals: Totals,
    gpus: Sequence[GpuLedger],
    findings: Sequence[Finding],
) -> str:
    """Say why, and on whom it arose; as waiting for a rank where others mostly waited for it."""
    probably = "" if _is_sure(group, findings) else "probably "
    source = _source(group, findings)
    because = f"because {clause(group.cause, group.subcause)}{source} ({title_inside(group.cause)})"
    where = cluster(gpus).place(group)
    if where:
        where = f" on {where}" if group.is_only_there else f", mostly on {where}"
    if group.outside_s >= _MOST_RATIO * group.idle_s:
        return f", {_extent(group, totals)} {probably}waiting for a rank that was not recorded"
    if _is_alone(group):
        return f", {_extent(group, totals)} in collectives with nothing beside them{where}"
    if group.waited_s >= _WAITED_RATIO * group.idle_s:
        found = waiting(group, gpus)
        if found:
            # The others waited for the late rank whatever held it up; this cause may be a part.
            part = "" if found.explained else "in part " if not found.mostly else "mostly "
            comma = ", " if probably or part else " "
            late = f"{found.pronoun} late{comma}{probably}{part}{because}"
            return f": {found.sentence}, {late.replace('because a rank ', 'because it ')}"
    return f", {_extent(group, totals)} {probably}{because}{where}"


def _source(group: RootGroup, findings: Sequence[Finding]) -> str:
    """Say where the data lies, if that is known: ", /data"."""
    for finding in findings:
        mount = finding.evidence.get("read_mount")
        same = (finding.cause, finding.subcause) == (group.cause, group.subcause)
        if same and isinstance(mount, str) and mount:
            return f", {shorten(clean(mount), _MOUNT_CHARS)}"
    return ""


def _is_sure(group: RootGroup, findings: Sequence[Finding]) -> bool:
    """Neither the ledger nor the rule's own finding may be weaker than observed."""
    inferred = any(
        (finding.cause, finding.subcause, finding.grade)
        == (group.cause, group.subcause, "inferred")
        for finding in findings
    )
    return is_sure(group.grade) and not inferred


def _extent(group: RootGroup, totals: Totals) -> str:
    if group.idle_s >= _ALMOST_ALL_RATIO * totals.idle_s:
        return "almost all of it"
    if group.idle_s >= _MOST_RATIO * totals.idle_s:
        return "most of it"
    return "the largest known part"


def _cost(group: RootGroup, totals: Totals, findings: Sequence[Finding]) -> str:
    """Say what it costs, and what fixing it returns at most where a rule knows better."""
    cost = f"{gpu_time(group.idle_s)}, {percent(group.idle_s / totals.gpu_s)} of all GPU time"
    if group.outside_s >= _MOST_RATIO * group.idle_s:
        return f"; that is {cost}, and recordings of all ranks would tell more"
    if _is_alone(group):
        return f"; that is {cost}, and recordings of all ranks would tell waiting from transfer"
    returned = _returned_s(group, findings)
    if returned is None or returned >= _SAME_COST_RATIO * group.idle_s:
        return f"; fixing it returns at most {cost}"
    return f"; that cost {cost}, and fixing it returns at most {gpu_time(returned)}"


def _is_alone(group: RootGroup) -> bool:
    """Say whether collectives were seen from one side only."""
    return (group.cause, group.subcause) == ("collective", "exposed")


def _returned_s(group: RootGroup, findings: Sequence[Finding]) -> float | None:
    """What the findings of a cause promise together, in GPU-seconds; None if none promises."""
    promised = [
        value
        for finding in findings
        if (finding.cause, finding.subcause) == (group.cause, group.subcause)
        for value in [as_number((finding.what_if or {}).get("gpu_s_returned"))]
        if value is not None and value >= 0
    ]
    return math.fsum(promised) if promised else None


def _rest(unknown_s: float, totals: Totals) -> str:
    if unknown_s < _MENTION_RATIO * totals.idle_s:
        return ""
    return f"; for another {percent(unknown_s / totals.gpu_s)} of all GPU time no cause is known"


def _unknown(
    groups: Sequence[RootGroup], totals: Totals, gpus: Sequence[GpuLedger], run: Run
) -> str:
    """Say that the cause is not known, why not, and which recording would tell."""
    if not groups:
        return " and nothing says why"
    main = groups[0]
    tells = _TELLS[run.kind].get(main.subcause, _TELLS[run.kind][None])
    reason = clause(main.cause, main.subcause)
    share = percent(main.idle_s / totals.gpu_s)
    is_half_known = main.subcause in _HALF_KNOWN
    found = waiting(main, gpus) if main.waited_s >= _WAITED_RATIO * main.idle_s else None
    if found:
        late = f"{found.pronoun} late because {reason}"
        why = late if is_half_known else f"and why is not known ({reason})"
        return (
            f": {found.sentence}, {why}; that is {gpu_time(main.idle_s)}, {share} of all GPU time; "
            f"{tells}"
        )
    if is_half_known:
        return f", {_extent(main, totals)} ({share} of all GPU time) because {reason}; {tells}"
    unknown_s = math.fsum(group.idle_s for group in groups)
    if unknown_s >= _ALMOST_ALL_RATIO * totals.idle_s:
        return f" and no cause is known: {reason}; {tells}"
    share = percent(unknown_s / totals.gpu_s)
    return f" and for most of it ({share}) no cause is known: {reason}; {tells}"


def _largest_known(named: Sequence[RootGroup], totals: Totals, gpus: Sequence[GpuLedger]) -> str:
    if not named or named[0].idle_s < _MENTION_KNOWN_RATIO * totals.gpu_s:
        return ""
    group = named[0]
    share = percent(group.idle_s / totals.gpu_s)
    probably = "" if is_sure(group.grade) else "probably "
    where = cluster(gpus).place(group)
    what = title_inside(group.cause) + (f" on {where}" if where else "")
    return f"; the largest known part ({share}) is {probably}{what}"
