"""Makes a recording of a journal: today's collectors on the answers of then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect.collector import Collector
from whyidle.errors import UserError
from whyidle.journal_replay import ReplayHost, read_journal
from whyidle.layout import Identity
from whyidle.line import Block, Buffer
from whyidle.manifest import RECORDING, write_manifest
from whyidle.runner import Due, Runner
from whyidle.schema import VERSION
from whyidle.spool import SpoolWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of a replay."""

    identity: Identity
    runs: int
    rows: int
    # Recorded answers that no collector asked for, and collectors that are not there any more.
    unasked: int
    unknown: Mapping[str, int]
    refused: Sequence[str]


def replay(journal: Path, recording: Path, collectors: Sequence[Collector]) -> Replayed:
    """Write the spool of a recording from a journal; raises UserError, OSError."""
    lines = read_journal(journal)
    head = next(lines)
    identity = _identity(journal, head)
    clock = VirtualClock(int(head["begin_ns"]), wall_ns=int(head["begin_wall_ns"]))
    folder = identity.folder(recording)
    (folder / "spool").mkdir(parents=True, exist_ok=True)
    write_manifest(recording, RECORDING, {"replay_of": journal.name})
    spool = SpoolWriter(folder / "spool", identity, clock)
    hosts = {collector.name: ReplayHost() for collector in collectors}
    runners = {c.name: Runner(c, hosts[c.name], clock.mono_ns()) for c in collectors}
    buffer = Buffer()
    unknown: Counter[str] = Counter()
    runs = rows = 0
    refused: list[str] = []
    flush_at = clock.mono_ns() + NS_PER_S
    for line in lines:
        name = str(line.get("collector"))
        if name not in runners:
            unknown[name] += 1
            continue
        hosts[name].load(line["clocks"], line["answers"])
        due = Due(int(line["due_ns"]), int(line["missed"]), int(line.get("rested", 0)))
        found = runners[name].run(due)
        buffer.add(found)
        runs += 1
        rows += len(found)
        clock.sleep_until(hosts[name].clock.mono_ns())
        if clock.mono_ns() >= flush_at:
            refused += _flush(spool, buffer.take())
            flush_at = clock.mono_ns() + NS_PER_S
    for runner, host in zip(runners.values(), hosts.values(), strict=True):
        host.finish()
        buffer.add(runner.repeated(clock.mono_ns(), final=True))
    refused += _flush(spool, buffer.take())
    spool.close()
    return Replayed(
        identity=identity,
        runs=runs,
        rows=rows,
        unasked=sum(host.unasked for host in hosts.values()),
        unknown=dict(unknown),
        refused=refused,
    )


def _flush(spool: SpoolWriter, block: Block) -> list[str]:
    spool.write(block)
    refused, spool.refused = spool.refused, []
    return refused


def _identity(journal: Path, head: dict[str, Any]) -> Identity:
    try:
        version = int(head["schema_version"])
        identity = Identity(node=str(head["node"]), boot_id=str(head["boot_id"]))
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{journal} has a damaged head: pass another journal") from error
    if version > VERSION:
        raise UserError(
            f"{journal} was written by a newer whyidle (schema {version}, this one reads up to "
            f"{VERSION}): update whyidle to replay it"
        )
    return identity
