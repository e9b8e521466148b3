"""All rules as SQL: who is granted which nanoseconds of each window, and what is left over.

Each rule gives, per window, what it claims (`lo`, nothing while it abstains) and what it might
claim if it knew (`hidden`, nothing once it knows). Nanoseconds are whole, so it all sums exactly.

Groups are walked in order. A group without a witness wants the sum of what its members claim; one
with a witness wants what the witness shows, whoever of its members can say why. If a group wants
more than is left of the pool, the claims of its members are scaled down alike.

Missing evidence never helps a cause. Two things see to that:

- Rules whose amounts come from `exclusive` columns of the evidence view, no two groups using the
  same, cannot take each other's seconds: by the meaning of those columns they never share one.
  Members of one group may use the same columns; they must split them, and their cases show it.
- For any other rule (an *open* one) there is no such promise. From the group of an open rule on, in
  windows where it claims or might claim, the worst is assumed: what an abstaining rule of an
  earlier group might claim is not left for a later one, and what one of the same group might claim
  counts when claims are scaled. What is held back like that is `unattributed/no_evidence`.

A rule that `lacks` a column speaks in the place of those rules of its group that need it. Shares
of a group with a witness are fractions of one whole: an unknown one takes nothing from the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from whyidle_rules import evidence, groups
from whyidle_rules.compile_levels import Facts, Member, Part, levels, prefix, quoted, roots
from whyidle_rules.expression import Expression
from whyidle_rules.expression_parser import parse
from whyidle_rules.groups import Group, Pool
from whyidle_rules.rule import Rule

_ENDS = ("no_evidence", "unexplained")
_PARAM = re.compile(r"\$([a-z][a-z0-9_]*)")
_WORD = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A column of the query that nobody is granted: its group ('' for none) and subcause."""

    column: str
    group: str
    subcause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The SELECT for one pool: a row per window that has some of it, in nanoseconds.

    Its columns are window_id, pool_ns, one per rule in `grants` and one per `Left`; per row, all
    but the first two sum to pool_ns. `values` are the parameters to bind.
    """

    pool: Pool
    sql: str
    values: dict[str, float | int | str]
    grants: tuple[tuple[str, Rule], ...]
    leftovers: tuple[Left, ...]


def compile_rules(
    rules: Sequence[Rule], table: str = "evidence", facts: Facts | None = None
) -> tuple[Query, ...]:
    """Return the query of each pool over an evidence table or view, of which `facts` are true."""
    return tuple(_pool_query(pool, rules, table, facts or Facts()) for pool in get_args(Pool))


def open_rules(rules: Sequence[Rule]) -> tuple[str, ...]:
    """Return the ids of the open rules: those whose seconds other rules may claim as well."""
    parts = [part for pool in get_args(Pool) for part in _parts(pool, rules, Facts())]
    members = [member for part in parts if not part.witness for member in part.members]
    return tuple(sorted(member.rule.id for member in members if member.open))


def _pool_query(pool: Pool, rules: Sequence[Rule], table: str, facts: Facts) -> Query:
    parts = _parts(pool, rules, facts)
    members = [member for part in parts for member in part.members]
    sql = _nested(f"{quoted(table)} WHERE {pool}_s > 0", levels(pool, parts))
    lefts = [part for part in parts if part.witness]
    leftovers = [
        Left(column=f"{part.key}_left", group=part.group.id, subcause=part.group.leftover)
        for part in lefts
    ]
    ends = [Left(column=f"{word}_ns", group="", subcause=word) for word in _ENDS]
    read = set(_PARAM.findall(sql))
    bound = {
        name: param.value
        for member in members
        for param in member.rule.params
        if (name := f"{prefix(member.rule)}{param.name}") in read
    }
    return Query(
        pool=pool,
        sql=sql,
        values=bound,
        grants=tuple((f"{m.key}_ns", m.rule) for part in parts for m in part.claiming),
        leftovers=(*leftovers, *ends),
    )


def _parts(pool: Pool, rules: Sequence[Rule], facts: Facts) -> list[Part]:
    """Return the groups of a pool in order, without those that hold no rule and no witness."""
    chosen = [group for group in groups.GROUPS if group.pool == pool]
    users = {group.id: _users(group, rules) for group in chosen}
    found: list[Part] = []
    for number, group in enumerate(chosen):
        own = sorted((rule for rule in rules if rule.group == group.id), key=lambda rule: rule.id)
        witness = parse(group.witness, {}, "number") if group.witness else None
        if not own and witness is None:
            continue
        taken = frozenset[str]().union(*(users[other.id] for other in chosen if other != group))
        members = tuple(
            Member(
                key=f"r{number}_{at}",
                rule=rule,
                stand_ins=tuple(other for other in own if set(other.lacks) & set(rule.reads)),
                open=_is_open(rule.amount, taken),
                claims=facts.claims(rule, witness),
                hides=witness is None and facts.hides(rule),
            )
            for at, rule in enumerate(own)
        )
        is_open = witness is not None and _is_open(witness, taken)
        found.append(
            Part(key=f"g{number}", group=group, witness=witness, members=members, open=is_open)
        )
    return found


def _users(group: Group, rules: Sequence[Rule]) -> frozenset[str]:
    """Return the exclusive columns that a group takes seconds from."""
    if group.witness:
        return roots(parse(group.witness, {}, "number").amounts) or frozenset()
    own = [roots(rule.amount.amounts) for rule in rules if rule.group == group.id]
    return frozenset[str]().union(*(columns for columns in own if columns))


def _is_open(amount: Expression, taken: frozenset[str]) -> bool:
    mine = roots(amount.amounts)
    return mine is None or bool(mine & taken)


def _nested(source: str, columns: list[list[str]]) -> str:
    """Return one SELECT in the next; each hands on only what is still read, or is in the result.

    Planning costs more than running ten thousand windows; this saves a tenth of it.
    """
    filled = [level for level in columns if level]
    names = [[column.rsplit(" AS ", 1)[1] for column in level] for level in filled]
    result = {"window_id", "pool_ns", *(name for level in names for name in level)}
    result = {name for name in result if name.endswith(("window_id", "_ns", "_left"))}
    sql = source
    given = {*evidence.BY_NAME}
    for at, level in enumerate(filled):
        later = [column for other in filled[at + 1 :] for column in other]
        wanted = {*_WORD.findall(" ".join(later)), *result}
        kept = sorted(given & wanted)
        sql = f"(SELECT {', '.join([*map(quoted, kept), *level])} FROM {sql})"
        given = {*kept, *names[at]}
    return sql[1:-1]
