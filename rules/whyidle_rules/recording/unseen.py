"""What a recording does not hold, why, and which rules are blind for it."""

from __future__ import annotations

from collections.abc import Sequence

import duckdb

from whyidle.store import Damaged
from whyidle_rules.diagnosis import NotSeen
from whyidle_rules.recording.tally import Unseen
from whyidle_rules.report.words import duration
from whyidle_rules.rule import Rule

# Less than this share of all GPU time is not worth a line.
WORTH_RATIO = 0.01
_PROBLEMS_MAX = 12
# Collectors whose silence blinds rules, and the columns that it costs.
_COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "process": ("what processes did", ("loader_cpu_ratio", "main_run_s")),
    "gpu_process": ("which process had which GPU", ("no_process_s", "startup_s")),
    "cgroup_cpu": ("CPU quotas", ("cgroup_throttled_ratio",)),
    "cpu": ("the node's CPUs", ("node_cpu_busy_ratio",)),
    "file_use": ("which file systems data came from", ("read_fs",)),
}
_KINDS = {
    "no_data": "",
    "failed": "could not be read: ",
    "late": "came too late: ",
    "refused": "had values that do not fit: ",
}


def not_seen(
    con: duckdb.DuckDBPyConnection,
    rules: Sequence[Rule],
    unseen: Unseen,
    wall_s: float,
    damaged: Sequence[Damaged],
    clashes: Sequence[str] = (),
) -> list[NotSeen]:
    """Return what was not seen."""
    found = [NotSeen(what=f"part of {item.path.name}", why=item.why, rules=[]) for item in damaged]
    found += [
        NotSeen(
            what="how long ranks waited for each other",
            why=why,
            rules=_reading(rules, "coll_wait_s", "bubble_schedule_s"),
        )
        for why in clashes
    ]
    worth = WORTH_RATIO * wall_s
    unknown = unseen.unknown_s
    if unknown > worth:
        found.append(
            NotSeen(
                what=f"which process left a GPU empty for {duration(unknown)}",
                why="none was seen there; in a container, the agent has to share the host's "
                "process ids",
                rules=_reading(rules, "main_run_s", "loader_workers"),
            )
        )
    if unseen.unprobed_s - unknown > worth:
        found.append(
            NotSeen(
                what="how long trainers waited for their DataLoader",
                why="they published no counter page; start them with `whyidle record` or "
                "`whyidle run`",
                rules=_reading(rules, "probed", "checkpoint_save_s", "gc_s"),
            )
        )
    if unseen.coarse_s > worth:
        found.append(
            NotSeen(
                what="how full GPUs were, and gaps shorter than the driver's own windows",
                why="GPM is not there (before Hopper, or on MIG): utilization alone was recorded",
                rules=[],
            )
        )
    return [*found, *_silent(con, rules)]


def _silent(con: duckdb.DuckDBPyConnection, rules: Sequence[Rule]) -> list[NotSeen]:
    """Return what collectors said of what they could not see, once each."""
    rows = con.execute(
        "SELECT collector, kind, subject, arg_max(message, mono_ns), max(repeats) FROM"
        " collector_error WHERE kind <> 'not_recorded' GROUP BY collector, kind, subject"
        " ORDER BY max(repeats) DESC, collector, subject"
    ).fetchall()
    found = []
    for collector, kind, subject, message, _ in rows:
        known = _COLUMNS.get(collector)
        if known is None:
            continue
        what, columns = known
        about = f"{what} ({subject})" if subject else what
        found.append(
            NotSeen(
                what=about,
                why=f"{_KINDS.get(kind, '')}{message}",
                rules=[] if subject else _reading(rules, *columns),
            )
        )
    return found[:_PROBLEMS_MAX]


def _reading(rules: Sequence[Rule], *columns: str) -> list[str]:
    return [rule.id for rule in rules if set(columns) & set(rule.reads)]
