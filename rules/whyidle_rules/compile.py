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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from whyidle_rules import evidence, groups
from whyidle_rules.expression import Expression
from whyidle_rules.expression_parser import parse
from whyidle_rules.groups import Group, Pool
from whyidle_rules.rule import Rule

_WHOLE = 1_000_000_000  # nanoseconds of a second; parts of a share
_ENDLESS_S = "1e8"  # three years: what is longer, infinity and NaN among it, is not a duration
_ENDS = ("no_evidence", "unexplained")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A rule in the query; `key` names its columns there, `open` is explained above."""

    key: str
    rule: Rule
    stand_ins: tuple[Rule, ...]
    open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A group in the query; `open` says that its witness is open."""

    key: str
    group: Group
    witness: Expression | None
    members: tuple[_Member, ...]
    open: bool

    @property
    def hidden(self) -> list[str]:
        """Columns of what the group might claim if it knew."""
        if self.witness:
            return [f"{self.key}_hidden"]
        return [f"{member.key}_hidden" for member in self.members]

    @property
    def doubt(self) -> list[str]:
        """Terms above 0 in windows where something open claims or might claim."""
        if self.open:
            return [f"{self.key}_want", f"{self.key}_hidden"]
        open_keys = [] if self.witness else [m.key for m in self.members if m.open]
        return [f"{key}_{what}" for key in open_keys for what in ("lo", "hidden")]


def compile_rules(rules: Sequence[Rule], table: str = "evidence") -> tuple[Query, ...]:
    """Return the query of each pool over an evidence table or view."""
    return tuple(_pool_query(pool, rules, table) for pool in get_args(Pool))


def roots(columns: Iterable[str]) -> frozenset[str] | None:
    """Return the exclusive columns whose seconds these are, or None if any is not exclusive."""
    seconds = [evidence.BY_NAME[name] for name in columns if evidence.BY_NAME[name].unit == "s"]
    found = {column.part_of or column.name for column in seconds}
    closed = found and all(evidence.BY_NAME[name].exclusive for name in found)
    return frozenset(found) if closed else None


def open_rules(rules: Sequence[Rule]) -> tuple[str, ...]:
    """Return the ids of the open rules: those whose seconds other rules may claim as well."""
    parts = [part for pool in get_args(Pool) for part in _parts(pool, rules)]
    members = [member for part in parts if not part.witness for member in part.members]
    return tuple(sorted(member.rule.id for member in members if member.open))


def prefix(rule: Rule) -> str:
    """Return what goes before the names of a rule's bound parameters."""
    return f"{rule.id}__"


def amount_sql(rule: Rule) -> str:
    """Return the SQL of a rule's claim or share as it is compiled."""
    return rule.amount.sql(prefix(rule))


def cited_sql(rule: Rule) -> str:
    """Return the seconds that a claim on exclusive columns is held to, or '' for any other."""
    if rule.share or roots(rule.amount.amounts) is None:
        return ""
    cited = [evidence.BY_NAME[name] for name in rule.amount.amounts]
    names = {column.name for column in cited if column.unit == "s"}
    whole = [f'"{c.name}"' for c in cited if c.name in names and c.part_of not in names]
    return " + ".join(whole)


def _pool_query(pool: Pool, rules: Sequence[Rule], table: str) -> Query:
    parts = _parts(pool, rules)
    members = [member for part in parts for member in part.members]
    sql = f"{quoted(table)} WHERE {pool}_s > 0"
    for columns in (
        _facts(pool, parts),
        _amounts(parts),
        _wants(parts),
        _limits(parts),
        _grants(parts),
        _shares(parts),
    ):
        sql = f"(SELECT *, {', '.join(columns)} FROM {sql})" if columns else sql
    lefts = [part for part in parts if part.witness]
    leftovers = [
        Left(column=f"{part.key}_left", group=part.group.id, subcause=part.group.leftover)
        for part in lefts
    ]
    ends = [Left(column=f"{word}_ns", group="", subcause=word) for word in _ENDS]
    bound = {
        f"{prefix(member.rule)}{param.name}": param.value
        for member in members
        for param in member.rule.params
        if param.name in _bound(member.rule)
    }
    return Query(
        pool=pool,
        sql=_outer(sql, parts),
        values=bound,
        grants=tuple((f"{member.key}_ns", member.rule) for member in members),
        leftovers=(*leftovers, *ends),
    )


def _bound(rule: Rule) -> set[str]:
    return {*rule.amount.params, *(rule.when.params if rule.when else ())}


def _parts(pool: Pool, rules: Sequence[Rule]) -> list[_Part]:
    """Return the groups of a pool in order, without those that hold no rule and no witness."""
    chosen = [group for group in groups.GROUPS if group.pool == pool]
    users = {group.id: _users(group, rules) for group in chosen}
    found: list[_Part] = []
    for number, group in enumerate(chosen):
        own = sorted((rule for rule in rules if rule.group == group.id), key=lambda rule: rule.id)
        witness = parse(group.witness, {}, "number") if group.witness else None
        if not own and witness is None:
            continue
        taken = frozenset[str]().union(*(users[other.id] for other in chosen if other != group))
        members = tuple(
            _Member(
                key=f"r{number}_{at}",
                rule=rule,
                stand_ins=tuple(other for other in own if set(other.lacks) & set(rule.reads)),
                open=_is_open(rule.amount, taken),
            )
            for at, rule in enumerate(own)
        )
        is_open = witness is not None and _is_open(witness, taken)
        found.append(
            _Part(key=f"g{number}", group=group, witness=witness, members=members, open=is_open)
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


def _facts(pool: Pool, parts: list[_Part]) -> list[str]:
    """Per window: the pool; per rule: what it would take, whether it knows, whether it speaks."""
    columns = [f"{_ns(f'least({pool}_s, {_ENDLESS_S})')} AS pool_ns"]
    for part in parts:
        if part.witness:
            columns.append(f"{part.witness.sql('')} AS {part.key}_seen")
        for member in part.members:
            rule = member.rule
            columns.append(f"{amount_sql(rule)} AS {member.key}_amount")
            columns.append(f"{_knows(rule)} AS {member.key}_knows")
            if rule.when:
                columns.append(f"{rule.when.sql(prefix(rule))} AS {member.key}_when")
    return columns


def _knows(rule: Rule) -> str:
    known = [f'"{name}" IS NOT NULL' for name in rule.reads]
    unknown = [f'"{name}" IS NULL' for name in rule.lacks]
    return f"({' AND '.join([*known, *unknown]) or 'true'})"


def _amounts(parts: list[_Part]) -> list[str]:
    """Per rule and witness: nanoseconds it claims and might claim; per share: its parts."""
    columns: list[str] = []
    for part in parts:
        if part.witness:
            seen = f"{part.key}_seen"
            columns.append(f"CASE WHEN {seen} > 0 THEN {_capped(seen)} ELSE 0 END {part.key}_want")
            columns.append(f"CASE WHEN {seen} IS NULL THEN pool_ns ELSE 0 END {part.key}_hidden")
        for member in part.members:
            columns += _member_amounts(member)
    return columns


def _member_amounts(member: _Member) -> list[str]:
    amount, knows = f"{member.key}_amount", f"{member.key}_knows"
    speaks = f"{knows} AND {member.key}_when" if member.rule.when else knows
    if member.rule.share:
        parts = f"CAST(floor(least({amount}, 1) * {_WHOLE}) AS BIGINT)"
        return [f"CASE WHEN {speaks} AND {amount} > 0 THEN {parts} ELSE 0 END {member.key}_parts"]
    # Where the amount is known, all columns are; so least() does not pass over a NULL here.
    cited = cited_sql(member.rule)
    taken = _capped(f"least({amount}, {cited})" if cited else amount)
    nothing = [knows, *(_knows(other) for other in member.stand_ins)]
    nothing += [f"NOT {member.key}_when"] if member.rule.when else []
    nothing += [f'"{name}" IS NOT NULL' for name in member.rule.lacks]
    return [
        f"CASE WHEN {speaks} AND {amount} > 0 AND {amount} < {_ENDLESS_S} "
        f"THEN {taken} ELSE 0 END AS {member.key}_lo",
        f"CASE WHEN {' OR '.join(nothing)} OR {amount} <= 0 THEN 0 "
        f"WHEN {amount} < {_ENDLESS_S} THEN {taken} ELSE pool_ns END "
        f"AS {member.key}_hidden",
    ]


def _wants(parts: list[_Part]) -> list[str]:
    columns = [
        f"{_total([f'{member.key}_lo' for member in part.members])} AS {part.key}_want"
        for part in parts
        if not part.witness
    ]
    columns += [
        f"greatest({_total([f'{m.key}_parts' for m in part.members])}, {_WHOLE}) {part.key}_whole"
        for part in parts
        if part.witness and part.members
    ]
    return columns


def _limits(parts: list[_Part]) -> list[str]:
    """Per group: what it may take at most, and what its members' claims are measured against."""
    columns: list[str] = []
    wants: list[str] = []
    hidden: list[str] = []
    doubt: list[str] = []
    for part in parts:
        doubt += part.doubt
        held = f"(CASE WHEN {_total(doubt)} > 0 THEN {_total(hidden)} ELSE 0 END)"
        more = f"(CASE WHEN {_total(doubt)} > 0 THEN {_total(part.hidden)} ELSE 0 END)"
        spent = [*wants, held] if doubt and hidden else wants
        columns.append(f"greatest(pool_ns - {_total(spent)}, 0) AS {part.key}_limit")
        if not part.witness:
            against = [f"{part.key}_want", more] if doubt else [f"{part.key}_want"]
            columns.append(f"{_total(against)} AS {part.key}_against")
        wants.append(f"{part.key}_want")
        hidden += part.hidden
    return columns


def _grants(parts: list[_Part]) -> list[str]:
    columns: list[str] = []
    for part in parts:
        limit, against = f"{part.key}_limit", f"{part.key}_against"
        if part.witness:
            columns.append(f"least({part.key}_want, {limit}) AS {part.key}_taken")
            continue
        columns += [
            f"CASE WHEN {member.key}_lo = 0 OR {against} <= {limit} THEN {member.key}_lo "
            f"ELSE {_scaled(f'{member.key}_lo', limit, against)} END AS {member.key}_ns"
            for member in part.members
        ]
    return columns


def _shares(parts: list[_Part]) -> list[str]:
    """Per member of a group with a witness: its fraction of what the group was given."""
    return [
        f"CASE WHEN {member.key}_parts = 0 THEN 0 "
        f"ELSE {_scaled(f'{part.key}_taken', f'{member.key}_parts', f'{part.key}_whole')} "
        f"END AS {member.key}_ns"
        for part in parts
        if part.witness
        for member in part.members
    ]


def _outer(sql: str, parts: list[_Part]) -> str:
    """Add what nobody was granted, split into what might have been claimed and what not."""
    grants = [f"{member.key}_ns" for part in parts for member in part.members]
    lefts = [
        f"{part.key}_taken - {_total([f'{member.key}_ns' for member in part.members])} "
        f"AS {part.key}_left"
        for part in parts
        if part.witness
    ]
    taken = [f"{part.key}_taken" for part in parts if part.witness]
    claimed = [f"{m.key}_ns" for part in parts if not part.witness for m in part.members]
    hidden = [column for part in parts for column in part.hidden]
    columns = ["window_id", "pool_ns", *grants, *lefts]
    rest = f"pool_ns - {_total([*taken, *claimed])} AS rest_ns"
    inner = f"SELECT {', '.join([*columns, rest, f'{_total(hidden)} AS hidden_ns'])} FROM {sql}"
    names = [name.split(" AS ")[-1] for name in columns]
    unknown = "least(rest_ns, hidden_ns)"
    ends = [f"{unknown} AS no_evidence_ns", f"rest_ns - {unknown} AS unexplained_ns"]
    return f"SELECT {', '.join([*names, *ends])} FROM ({inner})"


def _ns(seconds: str) -> str:
    return f"CAST(round({seconds} * {_WHOLE}) AS BIGINT)"


def _capped(seconds: str) -> str:
    return f"least({_ns(f'least({seconds}, {_ENDLESS_S})')}, pool_ns)"


def _scaled(value: str, part: str, whole: str) -> str:
    # The product of two BIGINTs needs 128 bits; this branch is rare.
    return f"CAST(CAST({value} AS HUGEINT) * {part} // {whole} AS BIGINT)"


def _total(terms: Sequence[str]) -> str:
    return f"({' + '.join(terms)})" if terms else "0"


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
