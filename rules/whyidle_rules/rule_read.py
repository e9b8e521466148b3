"""Reads one rule from the text of its file: every field checked, every problem located."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from whyidle import causes
from whyidle_rules import evidence, groups, says
from whyidle_rules.expression import Expression, Kind, column_kind
from whyidle_rules.expression_parser import ExpressionError, parse
from whyidle_rules.rule import (
    ALWAYS,
    LONG_COLUMNS,
    LOOKAHEAD_MOST_S,
    LOOKAHEAD_S,
    LOOKBACK_MOST_S,
    LOOKBACK_S,
    Grade,
    Owner,
    Param,
    Rule,
    Severity,
)
from whyidle_rules.rule_cases import read_cases
from whyidle_rules.rule_fields import Reader
from whyidle_rules.rule_yaml import RuleError, YamlNode, parse_yaml, place

_REQUIRED = (
    "id",
    "title",
    "cause",
    "subcause",
    "needs",
    "grade",
    "says",
    "why",
    "advice",
    "owner",
    "refs",
    "cases",
)
_OPTIONAL = (
    "group",
    "lacks",
    "params",
    "when",
    "claim",
    "share",
    "beside",
    "at_most",
    "lookback_s",
    "lookahead_s",
)
# One underscore at a time: two of them separate a rule from its parameter in the query.
_ID = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_URL = re.compile(r"https://[!-~]+")
_MAX_ID = 48
_FREE = frozenset([*ALWAYS, *(column.name for column in evidence.KEYS)])
# What a template may name beside columns and parameters, with a value to try its format on.
_TOTALS: dict[str, float | str] = {"idle_s": 1.5, "share": 0.5, "wall_s": 1.5, "ranks": "0-2, 5"}
_TOTALS_BESIDE: dict[str, float | str] = {
    **{name: value for name, value in _TOTALS.items() if name != "idle_s"},
    "beside_s": 1.5,
    "working_share": 0.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A rule, and where its `lacks` stands for problems that show only beside the other rules."""

    rule: Rule
    lacks_line: int
    lacks_column: int


def read_rule(text: str, path: Path) -> Loaded:
    """Return the rule in the text of `<cause>/<id>.yaml`; raises RuleError with every problem."""
    reader = Reader(file=str(path), source=text)
    root = parse_yaml(text, reader.file)
    fields = reader.mapping(root, "rule", _REQUIRED, _OPTIONAL)
    loaded = _RuleFile(reader, root, fields).read(path) if fields else None
    if loaded is None or reader.problems:
        raise RuleError(reader.problems)
    return loaded


class _RuleFile:
    """The fields of one file; those that are missing have been noted as problems."""

    def __init__(self, reader: Reader, root: YamlNode, fields: dict[str, YamlNode]) -> None:
        self._reader = reader
        self._root = root
        self._fields = fields
        self._is_beside = "beside" in fields
        self._totals = _TOTALS_BESIDE if self._is_beside else _TOTALS

    def read(self, path: Path) -> Loaded | None:
        reader, fields = self._reader, self._fields
        texts = {name: self._text(name) for name in ("title", "why", "advice")}
        rule_id = self._id(path)
        cause, subcause = self._cause(path)
        group = self._one_of("group", groups.BY_ID)
        at_most = self._one_of("at_most", get_args(Severity)) or "critical"
        grade = self._one_of("grade", get_args(Grade))
        owner = self._one_of("owner", get_args(Owner))
        params = self._params()
        kinds: dict[str, Kind] = {
            param.name: "text" if isinstance(param.value, str) else "number" for param in params
        }
        needs = self._columns("needs")
        lacks = self._columns("lacks")
        when = self._expression("when", kinds, "truth")
        claim = self._expression("claim", kinds, "number")
        share = self._expression("share", kinds, "number")
        beside = self._expression("beside", kinds, "number")
        self._check_amount(group)
        self._check_columns(needs, lacks, [when, claim, share, beside])
        self._check_params(params, [when, claim, share, beside])
        back = self._reach("lookback_s", LOOKBACK_S, LOOKBACK_MOST_S)
        ahead = self._reach("lookahead_s", LOOKAHEAD_S, LOOKAHEAD_MOST_S)
        self._check_reach(back, [when, claim, share, beside])
        says_text = self._says(params)
        refs = self._refs()
        cases = read_cases(reader, fields["cases"]) if "cases" in fields else ()
        if reader.problems:
            return None
        rule = Rule(
            id=cast("str", rule_id),
            title=cast("str", texts["title"]),
            cause=cause,
            subcause=subcause,
            group=group or "",
            needs=needs,
            lacks=lacks,
            grade=cast("Grade", grade),
            params=params,
            when=when,
            claim=claim,
            share=share,
            says=cast("str", says_text),
            why=cast("str", texts["why"]),
            advice=cast("str", texts["advice"]),
            owner=cast("Owner", owner),
            refs=refs,
            cases=cases,
            file=str(path),
            beside=beside,
            at_most=cast("Severity", at_most),
            lookback_s=back,
            lookahead_s=ahead,
        )
        at = fields.get("lacks", self._root)
        return Loaded(rule=rule, lacks_line=at.line, lacks_column=at.column)

    def _text(self, name: str) -> str | None:
        return self._reader.text(self._fields[name], name) if name in self._fields else None

    def _one_of(self, name: str, known: Iterable[str]) -> str | None:
        node = self._fields.get(name)
        return self._reader.one_of(node, name, known) if node else None

    def _columns(self, name: str) -> tuple[str, ...]:
        node = self._fields.get(name)
        return self._reader.words(node, name, evidence.BY_NAME) if node else ()

    def _id(self, path: Path) -> str | None:
        name = self._text("id")
        if name is None:
            return None
        node = self._fields["id"]
        if not _ID.fullmatch(name) or len(name) > _MAX_ID:
            self._reader.wrong(node, "`id` has to be short, in lower case, with single underscores")
        elif name != path.stem:
            self._reader.wrong(node, f"`id` has to equal the name of the file, {path.stem}")
        return name

    def _cause(self, path: Path) -> tuple[str, str]:
        reader = self._reader
        open_to_rules = [
            cause.slug
            for cause in causes.CAUSES
            if (self._is_beside or not cause.root_only) and cause.slug != "unattributed"
        ]
        cause = self._one_of("cause", open_to_rules)
        if cause is None:
            return "", ""
        folder = path.absolute().parent.name
        if cause != folder:
            message = f"`cause` has to equal the folder of the file, {folder}; move one of them"
            reader.wrong(self._fields["cause"], message)
        one = causes.BY_SLUG[cause]
        known = {**one.subcauses, **(one.beside if self._is_beside else {})}
        subcause = self._one_of("subcause", known)
        return cause, subcause or ""

    def _params(self) -> tuple[Param, ...]:
        reader = self._reader
        found: list[Param] = []
        if "params" not in self._fields:
            return ()
        for key, node in reader.pairs(self._fields["params"], "params"):
            taken = key.text in evidence.BY_NAME or key.text in self._totals
            if not _ID.fullmatch(key.text) or taken:
                reader.wrong(
                    key, "a parameter is named in lower case, and not as a column or total"
                )
                continue
            fields = reader.mapping(node, f"params.{key.text}", ("value", "reason"))
            if len(fields) < 2:
                continue
            value_node = fields["value"]
            quoted = value_node.kind == "scalar" and not value_node.plain
            read = reader.text if quoted else reader.number
            value = read(value_node, "value")
            reason = reader.text(fields["reason"], "reason")
            if value is not None and reason is not None:
                found.append(Param(name=key.text, value=value, reason=reason))
        return tuple(found)

    def _expression(self, name: str, params: dict[str, Kind], kind: Kind) -> Expression | None:
        node = self._fields.get(name)
        if node is None or not self._reader.is_kind(node, name, "scalar"):
            return None
        try:
            return parse(node.text, params, kind)
        except ExpressionError as error:
            line, column = place(self._reader.source, node, error.offset)
            self._reader.wrong_at(line, column, f"`{name}`: {error.message}")
            return None

    def _check_amount(self, group: str | None) -> None:
        given = [name for name in ("claim", "share", "beside") if name in self._fields]
        if len(given) != 1:
            message = "a rule has either a `claim` or a `share`, or tells something `beside`"
            self._reader.wrong(self._root, message)
            return
        if given == ["beside"]:
            for name in ("group", "lacks"):
                if name in self._fields:
                    message = f"a rule beside the ledger has no `{name}`: it claims nothing"
                    self._reader.wrong(self._fields[name], message)
            return
        if "at_most" in self._fields:
            message = "`at_most` is for rules beside the ledger; a claim is as grave as its share"
            self._reader.wrong(self._fields["at_most"], message)
        if "group" not in self._fields:
            self._reader.wrong(self._root, "`rule` lacks `group`")
        witness = groups.BY_ID[group].witness if group else ""
        if given == ["share"] and group and not witness:
            message = f"group {group} has no witness to share out; write a `claim` in seconds"
            self._reader.wrong(self._fields["share"], message)
        if given == ["claim"] and witness:
            message = f"group {group} shares out {witness}; write a `share` of it, 0 to 1"
            self._reader.wrong(self._fields["claim"], message)

    def _check_columns(
        self, needs: tuple[str, ...], lacks: tuple[str, ...], used: list[Expression | None]
    ) -> None:
        reader = self._reader
        for name in sorted(set(needs) & set(lacks)):
            reader.wrong(self._fields["lacks"], f"`{name}` cannot be needed and lacking at once")
        columns = {name for expression in used if expression for name in expression.columns}
        for name in sorted(columns & set(lacks)):
            reader.wrong(self._fields["lacks"], f"`{name}` is computed on, so it cannot be lacking")
        for name in sorted(columns - set(needs) - set(lacks) - _FREE):
            reader.wrong(
                self._fields.get("needs", self._root),
                f"`{name}` is computed on; list it under `needs`",
            )

    def _check_params(self, params: tuple[Param, ...], used: list[Expression | None]) -> None:
        named = {name for expression in used if expression for name in expression.params}
        for param in params:
            if param.name not in named and not self._reader.problems:
                self._reader.wrong(self._fields["params"], f"no expression uses ${param.name}")

    def _reach(self, name: str, default: float, most: float) -> float:
        """Return how far a rule looks around a window, in seconds."""
        if name not in self._fields:
            return default
        node = self._fields[name]
        value = self._reader.number(node, name)
        if value is not None and not 0 <= value <= most:
            self._reader.wrong(node, f"`{name}` is at most {most:g}: live counters wait no longer")
        return default if value is None else float(value)

    def _check_reach(self, back_s: float, used: list[Expression | None]) -> None:
        columns = {column for one in used if one is not None for column in one.columns}
        for name in LONG_COLUMNS:
            if name in columns and back_s < LOOKBACK_MOST_S:
                message = f"`{name}` is told from a minute: add `lookback_s: {LOOKBACK_MOST_S:g}`"
                self._reader.wrong(self._fields.get("lookback_s", self._root), message)

    def _says(self, params: tuple[Param, ...]) -> str | None:
        text = self._text("says")
        if text is None:
            return None
        node = self._fields["says"]
        samples = {column.name: _sample(column.name) for column in evidence.OBSERVED}
        samples |= {**self._totals, **{param.name: param.value for param in params}}
        try:
            found = says.fields(text)
            for field in found:
                says.check(field, samples)
        except says.TemplateError as error:
            line, column = place(self._reader.source, node, error.offset)
            self._reader.wrong_at(line, column, f"`says`: {error.message}")
            return None
        if not found:
            total = "beside_s" if self._is_beside else "idle_s"
            self._reader.wrong(
                node, f"`says` gives no number; name at least {{{total}:.1f}} or {{share:.0%}}"
            )
        return text

    def _refs(self) -> tuple[str, ...]:
        node = self._fields.get("refs")
        if node is None:
            return ()
        found: list[str] = []
        for item in self._reader.items(node, "refs"):
            url = self._reader.text(item, "refs")
            if url is not None and not _URL.fullmatch(url):
                self._reader.wrong(item, "`refs` are https:// addresses of public documents")
            elif url is not None:
                found.append(url)
        if node.kind == "sequence" and not node.items:
            self._reader.wrong(node, "`refs` is empty; say where a reader can check the rule")
        return tuple(found)


def _sample(column: str) -> float | int | str:
    if column_kind(column) == "text":
        return "text"
    return 1.5 if evidence.BY_NAME[column].type == "DOUBLE" else 1
