"""The allocation as its definition says it, one window and one rule at a time, without SQL.

Written apart from the compiled query, to check it: expressions are walked as trees, claims are
whole nanoseconds, and every quotient is a floor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal

from whyidle_rules import evidence, groups
from whyidle_rules.expression import Expression, Node
from whyidle_rules.expression_parser import parse
from whyidle_rules.rule import Rule, Value

_ENDLESS_S = 1e8
_WHOLE = 10**9
Answer = float | str | bool | None


def evaluate(
    expression: Expression, row: Mapping[str, Value], params: Mapping[str, Value]
) -> Answer:
    """Return the value of an expression over a window; None where evidence is missing."""
    lenient = {"case", "greatest", "least", "nullif"}
    if any(node.op in lenient for node in expression.root.walk()):
        for name in expression.columns:
            if row.get(name) is None:
                return None
    return _node(expression.root, row, params)


def _node(node: Node, row: Mapping[str, Value], params: Mapping[str, Value]) -> Answer:
    if node.op == "column":
        return _plain(row.get(node.name))
    if node.op == "param":
        return _plain(params[node.name])
    if node.op == "number":
        return float(node.name)
    if node.op == "text":
        return node.name
    if node.op in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.op]
    if node.op == "case":
        return _case(node, row, params)
    args = [_node(arg, row, params) for arg in node.args]
    if node.op == "and":
        return False if False in args else None if None in args else True
    if node.op == "or":
        return True if True in args else None if None in args else False
    if node.op == "in":
        found = [None if None in (args[0], arg) else args[0] == arg for arg in args[1:]]
        return True if True in found else None if None in found else False
    if node.op == "between":
        low = None if None in args[:2] else args[0] >= args[1]  # type: ignore[operator]
        high = None if None in (args[0], args[2]) else args[0] <= args[2]  # type: ignore[operator]
        both = [low, high]
        return False if False in both else None if None in both else True
    if node.op in ("least", "greatest"):
        known = [float(arg) for arg in args if arg is not None]
        return (min if node.op == "least" else max)(known) if known else None
    if node.op == "nullif":
        return None if args[0] == args[1] else args[0]
    return None if None in args else _strict(node.op, args)


def _case(node: Node, row: Mapping[str, Value], params: Mapping[str, Value]) -> Answer:
    for when, then in zip(node.args[0:-1:2], node.args[1::2], strict=True):
        if _node(when, row, params) is True:
            return _node(then, row, params)
    return _node(node.args[-1], row, params)


def _strict(op: str, args: list[Answer]) -> Answer:
    if op == "not":
        return not args[0]
    if op in ("=", "<>"):
        return (args[0] == args[1]) is (op == "=")
    first = args[0]
    assert isinstance(first, float) or (isinstance(first, str) and op in ("<", "<=", ">", ">="))
    if len(args) == 1:
        return _unary(op, float(first))
    second = args[1]
    if op in ("<", "<=", ">", ">="):
        less = first < second  # type: ignore[operator]
        return {"<": less, "<=": less or first == second}.get(
            op, _not_less(op, less, first, second)
        )
    left, right = float(first), float(second)  # type: ignore[arg-type]
    if op == "/":
        return None if right == 0 else left / right
    if op == "%":
        return math.nan if right == 0 else math.fmod(left, right)
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def _not_less(op: str, less: bool, first: Answer, second: Answer) -> bool:
    return not less and (op == ">=" or first != second)


def _unary(op: str, value: float) -> float:
    if op == "round":
        return float(Decimal(value).quantize(Decimal(1), ROUND_HALF_UP))
    if op == "sign":
        return float((value > 0) - (value < 0))
    return {
        "negate": lambda: -value,
        "abs": lambda: abs(value),
        "ceil": lambda: float(math.ceil(value)),
        "floor": lambda: float(math.floor(value)),
    }[op]()


def _plain(value: Value) -> Answer:
    return float(value) if isinstance(value, int | float) else value


def _ns(seconds: float) -> int:
    return int(Decimal(seconds * _WHOLE).quantize(Decimal(1), ROUND_HALF_UP))


class Window:
    """One pool of one window while its groups are walked."""

    def __init__(self, pool: groups.Pool, rules: Sequence[Rule], row: Mapping[str, Value]) -> None:
        seconds = row.get(f"{pool}_s")
        known = float(seconds) if isinstance(seconds, int | float) and seconds > 0 else 0.0
        self.pool = pool
        self.pool_ns = _ns(min(known, _ENDLESS_S))
        self.row = row
        self.rules = sorted(rules, key=lambda rule: rule.id)
        self.grants: dict[str, int] = {}
        self.leftovers: dict[tuple[str, str], int] = defaultdict(int)
        self.claimed: dict[str, int] = {}
        self._wanted = 0
        self._hidden = 0
        self._doubt = False

    def allocate(self) -> None:
        """Walk the groups of the pool, then book what is left."""
        if self.pool_ns == 0:
            return
        for group in groups.GROUPS:
            if group.pool == self.pool:
                own = [rule for rule in self.rules if rule.group == group.id]
                (self._witnessed if group.witness else self._claiming)(group, own)
        rest = self.pool_ns - sum(self.grants.values()) - sum(self.leftovers.values())
        unknown = min(rest, self._hidden)
        self.leftovers["", "no_evidence"] += unknown
        self.leftovers["", "unexplained"] += rest - unknown

    def _limit(self) -> int:
        held = self._hidden if self._doubt else 0
        return max(0, self.pool_ns - self._wanted - held)

    def _witnessed(self, group: groups.Group, own: list[Rule]) -> None:
        witness = parse(group.witness, {}, "number")
        seen = evaluate(witness, self.row, {})
        hidden = self.pool_ns if seen is None else 0
        want = self._capped(float(seen)) if isinstance(seen, float) and seen > 0 else 0
        if self._is_open(group.id, witness):
            self._doubt |= want + hidden > 0
        taken = min(want, self._limit())
        parts = {rule.id: self._parts(rule) for rule in own}
        whole = max(sum(parts.values()), _WHOLE)
        for rule in own:
            self.grants[rule.id] = self.claimed[rule.id] = taken * parts[rule.id] // whole
        left = taken - sum(self.grants[rule.id] for rule in own)
        self.leftovers[group.id, group.leftover] += left
        self._wanted += want
        self._hidden += hidden

    def _claiming(self, group: groups.Group, own: list[Rule]) -> None:
        low = {rule.id: self._claim(rule) for rule in own}
        high = {rule.id: self._might(rule, own) for rule in own}
        for rule in own:
            if self._is_open(group.id, rule.amount):
                self._doubt |= low[rule.id] + high[rule.id] > 0
        limit = self._limit()
        want = sum(low.values())
        against = want + (sum(high.values()) if self._doubt else 0)
        for rule in own:
            claim = self.claimed[rule.id] = low[rule.id]
            self.grants[rule.id] = claim if against <= limit else claim * limit // against
        self._wanted += want
        self._hidden += sum(high.values())

    def _value(self, rule: Rule, expression: Expression) -> Answer:
        return evaluate(expression, self.row, {param.name: param.value for param in rule.params})

    def _knows(self, rule: Rule) -> bool:
        known = all(self.row.get(name) is not None for name in rule.reads)
        return known and all(self.row.get(name) is None for name in rule.lacks)

    def _speaks(self, rule: Rule) -> bool:
        return self._knows(rule) and (rule.when is None or self._value(rule, rule.when) is True)

    def _claim(self, rule: Rule) -> int:
        amount = self._value(rule, rule.amount)
        if not self._speaks(rule) or not isinstance(amount, float) or not 0 < amount < _ENDLESS_S:
            return 0
        return self._taken(rule, amount)

    def _taken(self, rule: Rule, amount: float) -> int:
        """Hold a claim on exclusive columns to what they show."""
        if _roots(rule.amount) is not None:
            cited = [evidence.BY_NAME[name] for name in rule.amount.amounts]
            seconds = [column for column in cited if column.unit == "s"]
            names = {column.name for column in seconds}
            amount = min(
                amount,
                sum(
                    float(self.row[column.name] or 0)
                    for column in seconds
                    if column.part_of not in names
                ),
            )
        return self._capped(amount)

    def _capped(self, amount: float) -> int:
        return min(_ns(min(amount, _ENDLESS_S)), self.pool_ns)

    def _might(self, rule: Rule, own: list[Rule]) -> int:
        stand_ins = [other for other in own if set(other.lacks) & set(rule.reads)]
        if self._knows(rule) or any(self._knows(other) for other in stand_ins):
            return 0
        if any(self.row.get(name) is not None for name in rule.lacks):
            return 0
        if rule.when is not None and self._value(rule, rule.when) is False:
            return 0
        amount = self._value(rule, rule.amount)
        if not isinstance(amount, float) or not amount < _ENDLESS_S:
            return self.pool_ns
        return self._taken(rule, amount) if amount > 0 else 0

    def _parts(self, rule: Rule) -> int:
        share = self._value(rule, rule.amount)
        if not self._speaks(rule) or not isinstance(share, float) or not share > 0:
            return 0
        return math.floor(min(share, 1.0) * _WHOLE)

    def _is_open(self, group: str, amount: Expression) -> bool:
        mine = _roots(amount)
        if mine is None:
            return True
        for other in groups.GROUPS:
            if other.id == group or other.pool != self.pool:
                continue
            amounts = [rule.amount for rule in self.rules if rule.group == other.id]
            if other.witness:
                amounts = [parse(other.witness, {}, "number")]
            if any(mine & (_roots(expression) or frozenset()) for expression in amounts):
                return True
        return False


def _roots(amount: Expression) -> frozenset[str] | None:
    names: set[str] = set()
    for name in amount.amounts:
        column = evidence.BY_NAME[name]
        if column.unit == "s":
            names.add(column.part_of or name)
    if not names or not all(evidence.BY_NAME[name].exclusive for name in names):
        return None
    return frozenset(names)
