"""Reads the cases of a rule: windows of evidence, and the seconds the rule is granted there."""

from __future__ import annotations

from whyidle_rules import evidence
from whyidle_rules.expression_parser import suggest
from whyidle_rules.rule import Case, Value
from whyidle_rules.rule_fields import Reader
from whyidle_rules.rule_yaml import YamlNode

_LENGTHS = ("working_s", "empty_s", "spinning_s")
# window_id is given by the runner.
_COLUMNS = {column.name: column for column in evidence.COLUMNS if column.name != "window_id"}
_SECONDS = [
    column.name
    for column in evidence.OBSERVED
    if column.unit == "s" and column.name not in ("d_s", *_LENGTHS)
]


def read_cases(reader: Reader, node: YamlNode) -> tuple[Case, ...]:
    """Return the cases; there must be one that speaks and one that stays silent."""
    found: list[Case] = []
    for item in reader.items(node, "cases"):
        case = _read_case(reader, item)
        if case is None:
            continue
        if any(case.name == other.name for other in found):
            reader.wrong(item, f"two cases are called `{case.name}`")
        found.append(case)
    if not reader.problems:
        if not any(case.grants_s > 0 for case in found):
            reader.wrong(node, "no case speaks; add one with `grants` above 0")
        if not any(case.grants_s == 0 for case in found):
            reader.wrong(node, "no case stays silent; add one with `grants: 0`")
    return tuple(found)


def _read_case(reader: Reader, node: YamlNode) -> Case | None:
    """Read name, rows, grants and `unnamed`.

    `unnamed: 0` says that what no row names was recorded and did not happen; without it, it was not
    recorded (NULL).
    """
    fields = reader.mapping(node, "case", ("name", "rows", "grants"), ("unnamed",))
    if not {"name", "rows", "grants"} <= fields.keys():
        return None
    name = reader.text(fields["name"], "name")
    grants = reader.number(fields["grants"], "grants")
    if grants is not None and grants < 0:
        reader.wrong(fields["grants"], "`grants` has to be 0 or more seconds")
    filled: dict[str, Value] = {}
    if "unnamed" in fields and reader.one_of(fields["unnamed"], "unnamed", ("0", "null")) == "0":
        filled = dict.fromkeys(_SECONDS, 0.0)
    rows = [_read_row(reader, row, filled) for row in reader.items(fields["rows"], "rows")]
    if not rows:
        reader.wrong(fields["rows"], "a case needs at least one row")
    if name is None or grants is None:
        return None
    return Case(name=name, rows=tuple(rows), grants_s=float(grants))


def _read_row(reader: Reader, node: YamlNode, filled: dict[str, Value]) -> dict[str, Value]:
    """Return a window; parts of its length default to 0, and its length to their sum."""
    row: dict[str, Value] = {**filled, **dict.fromkeys(_LENGTHS, 0.0)}
    for key, value in reader.pairs(node, "rows"):
        if key.text in _COLUMNS:
            row[key.text] = _read_value(reader, key.text, value)
        else:
            hint = suggest(key.text, _COLUMNS)
            reader.wrong(key, f"no evidence column `{key.text[:40]}`{hint}")
    lengths = [row[name] for name in _LENGTHS]
    if "d_s" not in row and None not in lengths:
        row["d_s"] = float(sum(length for length in lengths if isinstance(length, float | int)))
    return row


def _read_value(reader: Reader, name: str, node: YamlNode) -> Value:
    if node.kind == "scalar" and node.plain and node.text == "null":
        return None
    column = _COLUMNS[name]
    if column.type == "VARCHAR":
        return reader.text(node, name)
    if column.type == "BOOLEAN":
        word = node.text if node.kind == "scalar" and node.plain else ""
        if word not in ("true", "false"):
            reader.wrong(node, f"`{name}` has to be true or false")
        return word == "true"
    value = reader.number(node, name)
    if value is None:
        return None
    if column.type in ("INTEGER", "BIGINT") and not isinstance(value, int):
        reader.wrong(node, f"`{name}` has to be a whole number")
    elif column.unit == "s" and value < 0:
        reader.wrong(node, f"`{name}` cannot be below 0")
    elif abs(value) >= 2**31 and column.type == "INTEGER":
        reader.wrong(node, f"`{name}` is too large")
    return float(value) if column.type == "DOUBLE" else value
