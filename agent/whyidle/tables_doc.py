"""The reference of tables, made from their declarations: `whyidle tables` and docs/tables.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from whyidle.schema import TABLES, VERSION
from whyidle.table import UNITS, Column, Table, table_of


def tables(names: Sequence[str] = ()) -> list[Table]:
    """Return the declared tables of these names, all for none; raises KeyError for an unknown."""
    known = {table_of(row).name: table_of(row) for row in TABLES}
    return [known[name] for name in names] if names else [known[name] for name in sorted(known)]


def text(specs: Iterable[Table]) -> str:
    """Return the reference for a terminal."""
    parts: list[str] = []
    for spec in specs:
        width = max(len(column.name) for column in spec.columns)
        parts.append(f"{spec.name}: {spec.meaning}")
        parts += [
            f"  {column.name:<{width}}  {column.type:<7}  {_kind(column):<22}  {column.meaning}"
            for column in spec.columns
        ]
        parts.append("")
    return "\n".join(parts)


def markdown(specs: Iterable[Table]) -> str:
    """Return the reference as a page."""
    parts = [
        "# Tables of a recording",
        "",
        f"Schema version {VERSION}. Made by `whyidle tables --markdown`; do not edit.",
        "",
        "Every view has two more columns in front: `node` and `boot_id`. Times named `mono_ns`,",
        "`t0_ns`, `due_ns` and the like are of the node's monotonic clock since that boot; the",
        "`clock` table turns them into wall time. Counters are stored as their source gives them,",
        "with resets and wraps in them. NULL means that nothing told; it is never 0.",
        "",
    ]
    for spec in specs:
        parts += [f"## {spec.name}", "", spec.meaning, ""]
        parts += ["| column | type | kind | meaning |", "|---|---|---|---|"]
        parts += [
            f"| {column.name} | {column.type}{'' if column.nullable else ' NOT NULL'} "
            f"| {_kind(column)} | {column.meaning.replace('|', chr(92) + '|')} |"
            for column in spec.columns
        ]
        parts.append("")
    return "\n".join(parts)


def _kind(column: Column) -> str:
    unit = f" [{UNITS[column.unit]}]" if column.unit else ""
    limit = f" {column.bits}-bit, {column.at_limit}" if column.bits != 64 else ""
    return f"{column.kind}{unit}{limit}"
