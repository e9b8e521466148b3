"""Expressions of rules: a small, closed part of SQL as a checked tree, and its way back to SQL.

There are columns of the evidence view, $params, literals, arithmetic, comparisons, logic, BETWEEN,
IN, CASE WHEN and the functions in FUNCTIONS; nothing else can be said. What is run is written from
the tree, so no text of a rule file ever reaches the database. DuckDB's own serialised trees are not
used: their format differs between 1.4 and 2.0.

All arithmetic is done in DOUBLE, so nothing overflows with an error; division by zero is NULL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from whyidle_rules import evidence

Kind = Literal["number", "text", "truth", "null"]

# Functions that cannot raise on any double, with their least and most number of arguments.
FUNCTIONS: dict[str, tuple[int, int]] = {
    "abs": (1, 1),
    "ceil": (1, 1),
    "floor": (1, 1),
    "greatest": (2, 8),
    "least": (2, 8),
    "nullif": (2, 2),
    "round": (1, 1),
    "sign": (1, 1),
}
# A NULL among the arguments of these does not make their result NULL.
_LENIENT = frozenset({"case", "greatest", "least", "nullif"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An operator, a function, a column, a parameter or a literal, with its kind of result.

    `args` of `case` are condition, value, condition, value, ..., and last the value of ELSE.
    """

    op: str
    kind: Kind
    offset: int
    name: str = ""
    args: tuple[Node, ...] = ()

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it."""
        yield self
        for arg in self.args:
            yield from arg.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """A checked expression: its text as written, and its tree."""

    text: str
    root: Node

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it reads, sorted."""
        return tuple(sorted({node.name for node in self.root.walk() if node.op == "column"}))

    @property
    def params(self) -> tuple[str, ...]:
        """Parameters that it reads, sorted, without the $."""
        return tuple(sorted({node.name for node in self.root.walk() if node.op == "param"}))

    @property
    def amounts(self) -> tuple[str, ...]:
        """Columns whose amount enters the result; those that only decide a CASE are left out."""
        return tuple(sorted(set(_amounts(self.root))))

    def sql(self, prefix: str) -> str:
        """Return SQL that is NULL unless the columns that matter are known.

        Operators alone get that right by themselves: NULL * 0 is NULL, NULL AND false is false.
        With a lenient function anywhere, all columns have to be known. `prefix` goes before the
        name of each parameter.
        """
        body = render(self.root, prefix)
        if not self.columns or not any(node.op in _LENIENT for node in self.root.walk()):
            return body
        known = " AND ".join(f'"{name}" IS NOT NULL' for name in self.columns)
        return f"CASE WHEN {known} THEN {body} END"


def column_kind(name: str) -> Kind:
    """Return the kind of a column of the evidence view."""
    kinds: dict[str, Kind] = {"VARCHAR": "text", "BOOLEAN": "truth"}
    return kinds.get(evidence.BY_NAME[name].type, "number")


def _amounts(node: Node) -> Iterator[str]:
    if node.op == "column":
        yield node.name
    args = node.args
    if node.op == "case":
        args = (*args[1::2], args[-1])
    for arg in args:
        yield from _amounts(arg)


def render(node: Node, prefix: str) -> str:
    """Write a tree as SQL; only columns, bound parameters and literals of our own making."""
    args = [render(arg, prefix) for arg in node.args]
    match node.op:
        case "column":
            wide = evidence.BY_NAME[node.name].type in ("DOUBLE", "VARCHAR", "BOOLEAN")
            return f'"{node.name}"' if wide else f'CAST("{node.name}" AS DOUBLE)'
        case "param":
            return f"CAST(${prefix}{node.name} AS {'VARCHAR' if node.kind == 'text' else 'DOUBLE'})"
        case "number":
            return f"CAST({float(node.name)!r} AS DOUBLE)"
        case "text":
            return "'" + node.name.replace("'", "''") + "'"
        case "true" | "false" | "null":
            return node.op
        case "negate":
            return f"(-{args[0]})"
        case "not":
            return f"(NOT {args[0]})"
        case "/":
            return f"({args[0]} / nullif({args[1]}, 0))"
        case "between":
            return f"({args[0]} BETWEEN {args[1]} AND {args[2]})"
        case "in":
            return f"({args[0]} IN ({', '.join(args[1:])}))"
        case "case":
            arms = zip(args[0:-1:2], args[1::2], strict=True)
            body = " ".join(f"WHEN {when} THEN {then}" for when, then in arms)
            return f"(CASE {body} ELSE {args[-1]} END)"
        case "sign":
            return f"CAST(sign({args[0]}) AS DOUBLE)"  # TINYINT: the product of two sums overflows
        case name if name in FUNCTIONS:
            return f"{name}({', '.join(args)})"
        case sign:
            return f"({f' {sign} '.join(args)})"
