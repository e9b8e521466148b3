"""Who is which rank of a job, where a run says so itself (table run_info)."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank of a run and what is known of its job."""

    rank: int | None
    world_size: int | None
    communicates: bool


def load(con: duckdb.DuckDBPyConnection, node: str, boot_id: str) -> dict[str, Rank]:
    """Return the ranks of a node's GPUs by their UUID."""
    return {
        uuid: Rank(rank=rank, world_size=world, communicates=bool(communicates))
        for uuid, rank, world, communicates in con.execute(
            "SELECT uuid, arg_max(rank, mono_ns), arg_max(world_size, mono_ns),"
            " bool_or(communicates) FROM run_info"
            " WHERE node = $node AND boot_id = $boot AND uuid IS NOT NULL GROUP BY uuid",
            {"node": node, "boot": boot_id},
        ).fetchall()
    }
