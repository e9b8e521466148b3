"""What a traced run does not hold, why, and which rules are blind for it."""

from __future__ import annotations

from collections.abc import Sequence

import duckdb

from whyidle_rules.diagnosis import NotSeen
from whyidle_rules.report.words import duration, listing, rank_list
from whyidle_rules.rule import Rule
from whyidle_rules.trace.gaps import Piece
from whyidle_rules.trace.run import APART_MAX_NS, TraceRun

# Less than this share of all GPU time is not worth a line.
WORTH_RATIO = 0.001
FILES_NAMED_MAX = 8


def not_seen(con: duckdb.DuckDBPyConnection, run: TraceRun, rules: Sequence[Rule]) -> list[NotSeen]:
    """Return what was not seen, the gravest first."""
    found = [*_files(run), *_ranks(run, rules)]
    seconds: dict[int, float] = {
        kind: ns / 1e9
        for kind, ns in con.execute(
            "SELECT kind, sum(ns)::DOUBLE FROM trace_rows GROUP BY kind"
        ).fetchall()
    }
    worth = WORTH_RATIO * sum(seconds.values())

    def of(*kinds: Piece) -> float:
        total = sum(seconds.get(kind, 0.0) for kind in kinds)
        return total if total > worth else 0.0

    if unseen := of(Piece.UNSEEN):
        found.append(
            NotSeen(
                what=f"which host thread ended {duration(unseen)} of empty time",
                why="the launch of the next kernel is not in the trace",
                rules=_reading(rules, "host_busy_s", "host_silent_s", "sync_s", "allocator_s"),
            )
        )
    if unseen := of(Piece.LATE_UNSEEN):
        found.append(
            NotSeen(
                what=f"what the host did in {duration(unseen)} in which it launched late",
                why="its operators were not recorded; profile with ProfilerActivity.CPU",
                rules=_reading(rules, "data_wait_s", "host_busy_s", "host_silent_s", "gc_s"),
            )
        )
    frames = all(gpu.file.has_python for gpu in run.gpus)
    if (unseen := of(Piece.SILENT)) and not frames:
        found.append(
            NotSeen(
                what=f"what the launching thread did in {duration(unseen)} without a record",
                why="Python frames were not recorded; profile with with_stack=True",
                rules=_reading(rules, "gc_s", "logging_s", "checkpoint_save_s"),
            )
        )
    if unseen := of(Piece.DATA):
        found.append(
            NotSeen(
                what=f"whether {duration(unseen)} of waiting for data was reading or computing",
                why="a trace does not hold the processes of the DataLoader workers; record the job "
                "with `whyidle record`",
                rules=_in_group(rules, "input"),
            )
        )
    if of(Piece.TRANSFER):
        found.append(
            NotSeen(
                what="what carried the collectives, and how fast it could",
                why="a trace does not hold the links; record the job with `whyidle record`",
                rules=_reading(rules, "coll_transport"),
            )
        )
    return found


def _files(run: TraceRun) -> list[NotSeen]:
    by_reason: dict[str, list[str]] = {}
    for file in run.refused:
        by_reason.setdefault(file.refusal or "", []).append(file.path.name)
    found = [
        NotSeen(what=_named(names), why=reason, rules=[]) for reason, names in by_reason.items()
    ]
    for file in run.files:
        if file.refusal is None and file.problems:
            found.append(
                NotSeen(
                    what=f"part of {file.path.name}",
                    why="; ".join(file.problems),
                    rules=[],
                )
            )
        if file.refusal is None and not file.devices:
            found.append(
                NotSeen(
                    what=f"any GPU work in {file.path.name}",
                    why="no kernel, copy or set is in it; profile with ProfilerActivity.CUDA",
                    rules=[],
                )
            )
    return found


def _named(names: list[str]) -> str:
    if len(names) > FILES_NAMED_MAX:
        names = [*names[:FILES_NAMED_MAX], f"{len(names) - FILES_NAMED_MAX} more files"]
    return listing(names)


def _ranks(run: TraceRun, rules: Sequence[Rule]) -> list[NotSeen]:
    waiting = _reading(rules, "coll_wait_s", "coll_transfer_s")
    if run.ranks_clash:
        return [
            NotSeen(
                what="how long ranks waited for each other",
                why=f"{_same_rank(run)}, so the files are not one run; diagnose each run by itself",
                rules=waiting,
            )
        ]
    if run.apart_ns > APART_MAX_NS:
        return [
            NotSeen(
                what="how long ranks waited for each other",
                why=f"the profiles were taken {duration(run.apart_ns / 1e9)} apart, so the files "
                "are not one run; diagnose each run by itself",
                rules=waiting,
            )
        ]
    ranks = {gpu.rank for gpu in run.gpus if gpu.rank is not None}
    if run.world_size is None or len(ranks) >= run.world_size or not run.gpus:
        return []
    missing = sorted(set(range(run.world_size)) - ranks)
    several = len(missing) > 1
    return [
        NotSeen(
            what=f"{rank_list(missing)} of {run.world_size}",
            why=f"{'their traces are' if several else 'its trace is'} not among the sources, so "
            "waits for them cannot be told from transfer",
            rules=waiting,
        )
    ]


def _same_rank(run: TraceRun) -> str:
    by_rank: dict[int, list[str]] = {}
    for file in run.files:
        if file.refusal is None and file.rank is not None:
            by_rank.setdefault(file.rank, []).append(file.path.name)
    rank, names = next(item for item in by_rank.items() if len(item[1]) > 1)
    others = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{names[0]} and {names[1]}{others} are both of rank {rank}"


def _reading(rules: Sequence[Rule], *columns: str) -> list[str]:
    return [rule.id for rule in rules if set(columns) & set(rule.reads)]


def _in_group(rules: Sequence[Rule], group: str) -> list[str]:
    return [rule.id for rule in rules if rule.group == group]
