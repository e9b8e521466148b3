"""The levels of the compiled query, from the facts of a window to what is left of it at the end.

Each level is a list of `expression AS name`, read by the levels after it; `compile` nests them. The
meaning of `lo`, `hidden` and `open` is explained there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whyidle_rules import evidence
from whyidle_rules.expression import Expression
from whyidle_rules.groups import Group, Pool
from whyidle_rules.rule import Rule

_WHOLE = 1_000_000_000  # nanoseconds of a second; parts of a share
_ENDLESS_S = "1e8"  # three years: what is longer, infinity and NaN among it, is not a duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is the same in all windows of an evidence table: columns that are NULL, 0, never NULL.

    Most rules have nothing to say of an hour of a GPU, and need not be asked window by window.
    """

    null: frozenset[str] = frozenset()
    zero: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()

    def claims(self, rule: Rule, witness: Expression | None) -> bool:
        """Say whether a rule may be granted anything."""
        if self.null & set(rule.reads) or self.full & set(rule.lacks):
            return False
        if witness is not None:
            return not set(witness.amounts) <= self.zero | self.null
        cited = cited_columns(rule)
        return not cited or not set(cited) <= self.zero | self.null

    def hides(self, rule: Rule) -> bool:
        """Say whether a rule may lack what it has to know."""
        return not (set(rule.reads) <= self.full and set(rule.lacks) <= self.null)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rule in the query; `key` names its columns there, `open` is explained above.

    `claims` and `hides` say whether it has any of `lo` and `hidden`.
    """

    key: str
    rule: Rule
    stand_ins: tuple[Rule, ...]
    open: bool
    claims: bool = True
    hides: bool = True

    @property
    def terms(self) -> list[str]:
        """Columns of what it claims and of what it might claim."""
        return [f"{self.key}_lo"] * self.claims + [f"{self.key}_hidden"] * self.hides


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A group in the query; `open` says that its witness is open."""

    key: str
    group: Group
    witness: Expression | None
    members: tuple[Member, ...]
    open: bool

    @property
    def hidden(self) -> list[str]:
        """Columns of what the group might claim if it knew."""
        if self.witness:
            return [f"{self.key}_hidden"]
        return [f"{member.key}_hidden" for member in self.members if member.hides]

    @property
    def claiming(self) -> list[Member]:
        """Rules that may be granted anything."""
        return [member for member in self.members if member.claims]

    @property
    def doubt(self) -> list[str]:
        """Terms above 0 in windows where something open claims or might claim."""
        if self.open:
            return [f"{self.key}_want", f"{self.key}_hidden"]
        open_members = [] if self.witness else [m for m in self.members if m.open]
        return [term for member in open_members for term in member.terms]


def roots(columns: Iterable[str]) -> frozenset[str] | None:
    """Return the exclusive columns whose seconds these are, or None if any is not exclusive."""
    seconds = [evidence.BY_NAME[name] for name in columns if evidence.BY_NAME[name].unit == "s"]
    found = {column.part_of or column.name for column in seconds}
    closed = found and all(evidence.BY_NAME[name].exclusive for name in found)
    return frozenset(found) if closed else None


def prefix(rule: Rule) -> str:
    """Return what goes before the names of a rule's bound parameters."""
    return f"{rule.id}__"


def amount_sql(rule: Rule) -> str:
    """Return the SQL of a rule's claim or share as it is compiled."""
    return rule.amount.sql(prefix(rule))


def cited_columns(rule: Rule) -> list[str]:
    """Return the seconds that a claim on exclusive columns is held to; [] for any other."""
    if rule.share or roots(rule.amount.amounts) is None:
        return []
    cited = [evidence.BY_NAME[name] for name in rule.amount.amounts]
    names = {column.name for column in cited if column.unit == "s"}
    return [c.name for c in cited if c.name in names and c.part_of not in names]


def levels(pool: Pool, parts: list[Part]) -> list[list[str]]:
    """Return the levels of a pool's query, the first of them over the evidence itself."""
    return [
        _facts(pool, parts),
        _amounts(parts),
        _wants(parts),
        _limits(parts),
        _grants(parts),
        _shares(parts),
        _rest(parts),
    ]


def _facts(pool: Pool, parts: list[Part]) -> list[str]:
    """Per window: the pool; per rule: what it would take, whether it knows, whether it speaks."""
    columns = [f"{_ns(f'least({pool}_s, {_ENDLESS_S})')} AS pool_ns"]
    for part in parts:
        if part.witness:
            columns.append(f"{part.witness.sql('')} AS {part.key}_seen")
        for member in part.members:
            rule = member.rule
            if not member.claims and (rule.share or not member.hides):
                continue
            columns.append(f"{amount_sql(rule)} AS {member.key}_amount")
            columns.append(f"{knows_sql(rule)} AS {member.key}_knows")
            if rule.when:
                columns.append(f"{rule.when.sql(prefix(rule))} AS {member.key}_when")
    return columns


def knows_sql(rule: Rule) -> str:
    """Return the SQL of whether all that a rule needs is known, and all that it lacks is not."""
    known = [f'"{name}" IS NOT NULL' for name in rule.reads]
    unknown = [f'"{name}" IS NULL' for name in rule.lacks]
    return f"({' AND '.join([*known, *unknown]) or 'true'})"


def _amounts(parts: list[Part]) -> list[str]:
    """Per rule and witness: nanoseconds it claims and might claim; per share: its parts."""
    columns: list[str] = []
    for part in parts:
        if part.witness:
            seen = f"{part.key}_seen"
            columns.append(
                f"CASE WHEN {seen} > 0 THEN {_capped(seen)} ELSE 0 END AS {part.key}_want"
            )
            columns.append(f"CASE WHEN {seen} IS NULL THEN pool_ns ELSE 0 END AS {part.key}_hidden")
        for member in part.members:
            columns += _member_amounts(member)
    return columns


def _member_amounts(member: Member) -> list[str]:
    amount, knows = f"{member.key}_amount", f"{member.key}_knows"
    speaks = f"{knows} AND {member.key}_when" if member.rule.when else knows
    if member.rule.share:
        if not member.claims:
            return []
        parts = f"CAST(floor(least({amount}, 1) * {_WHOLE}) AS BIGINT)"
        return [
            f"CASE WHEN {speaks} AND {amount} > 0 THEN {parts} ELSE 0 END AS {member.key}_parts"
        ]
    # Where the amount is known, all columns are; so least() does not pass over a NULL here.
    cited = " + ".join(quoted(name) for name in cited_columns(member.rule))
    taken = _capped(f"least({amount}, {cited})" if cited else amount)
    nothing = [knows, *(knows_sql(other) for other in member.stand_ins)]
    nothing += [f"NOT {member.key}_when"] if member.rule.when else []
    nothing += [f'"{name}" IS NOT NULL' for name in member.rule.lacks]
    claims = (
        f"CASE WHEN {speaks} AND {amount} > 0 AND {amount} < {_ENDLESS_S} "
        f"THEN {taken} ELSE 0 END AS {member.key}_lo"
    )
    hidden = (
        f"CASE WHEN {' OR '.join(nothing)} OR {amount} <= 0 THEN 0 "
        f"WHEN {amount} < {_ENDLESS_S} THEN {taken} ELSE pool_ns END "
        f"AS {member.key}_hidden"
    )
    return [claims] * member.claims + [hidden] * member.hides


def _wants(parts: list[Part]) -> list[str]:
    columns = [
        f"{_total([f'{member.key}_lo' for member in part.claiming])} AS {part.key}_want"
        for part in parts
        if not part.witness
    ]
    for part in parts:
        if part.witness and part.claiming:
            parts_sum = _total([f"{member.key}_parts" for member in part.claiming])
            columns.append(f"greatest({parts_sum}, {_WHOLE}) AS {part.key}_whole")
    return columns


def _limits(parts: list[Part]) -> list[str]:
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


def _grants(parts: list[Part]) -> list[str]:
    columns: list[str] = []
    for part in parts:
        limit, against = f"{part.key}_limit", f"{part.key}_against"
        if part.witness:
            columns.append(f"least({part.key}_want, {limit}) AS {part.key}_taken")
            continue
        columns += [
            f"CASE WHEN {member.key}_lo = 0 OR {against} <= {limit} THEN {member.key}_lo "
            f"ELSE {_scaled(f'{member.key}_lo', limit, against)} END AS {member.key}_ns"
            for member in part.claiming
        ]
    return columns


def _shares(parts: list[Part]) -> list[str]:
    """Per member of a group with a witness: its fraction of what the group was given."""
    return [
        f"CASE WHEN {member.key}_parts = 0 THEN 0 "
        f"ELSE {_scaled(f'{part.key}_taken', f'{member.key}_parts', f'{part.key}_whole')} "
        f"END AS {member.key}_ns"
        for part in parts
        if part.witness
        for member in part.claiming
    ]


def _rest(parts: list[Part]) -> list[str]:
    """What each witness shows and nobody was granted, what is left at the end, what is unknown."""
    columns = [
        f"{part.key}_taken - {_total([f'{member.key}_ns' for member in part.claiming])} "
        f"AS {part.key}_left"
        for part in parts
        if part.witness
    ]
    spent = [f"{part.key}_taken" for part in parts if part.witness]
    spent += [f"{m.key}_ns" for part in parts if not part.witness for m in part.claiming]
    hidden = [column for part in parts for column in part.hidden]
    rest = f"(pool_ns - {_total(spent)})"
    return [
        *columns,
        f"least({rest}, {_total(hidden)}) AS no_evidence_ns",
        f"{rest} - least({rest}, {_total(hidden)}) AS unexplained_ns",
    ]


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
