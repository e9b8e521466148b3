"""`whyidle rules list|check|test|explain`: looks at rules and tries them, without a recording."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whyidle import causes
from whyidle.errors import UserError
from whyidle_rules import groups
from whyidle_rules.cli_options import add_rules_dir

if TYPE_CHECKING:
    from whyidle_rules.rule import Rule

# DuckDB and YAML cost 0.2 s, so they are imported by the commands that need them.


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `rules` with its four commands; `run` carries them out."""
    about = "list, check, test and explain the rules that charge idle seconds to causes"
    parser = subparsers.add_parser("rules", help=about, description=about)
    parser.set_defaults(run=run)
    commands = parser.add_subparsers(dest="rules_command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    add_rules_dir(
        common,
        "also read rules from DIR/<cause>/<id>.yaml; they add to the others or replace them "
        "by id, as those in /etc/whyidle/rules.d do (may be given again)",
    )
    for name, text in (
        ("list", "one line per rule: id, cause, group, grade, needed evidence"),
        ("check", "read all rules and say what is wrong with them, as file:line:column"),
        ("test", "run the cases of the rules beside all other rules"),
        ("explain", "everything about one rule, in words"),
    ):
        command = commands.add_parser(name, parents=[common], help=text, description=text)
        if name == "explain":
            command.add_argument("rule", metavar="ID", help="id of the rule")
        if name in ("check", "test"):
            command.add_argument(
                "paths",
                metavar="PATH",
                type=Path,
                nargs="*",
                help="rule files or folders, read like --rules-dir; only these are reported on",
            )


def run(args: argparse.Namespace) -> int:
    """Carry out the command; 0 is fine, 1 means problems were found, UserError could not run."""
    from whyidle_rules.rule_load import load_rules
    from whyidle_rules.rule_yaml import RuleError

    paths = list(getattr(args, "paths", []))
    try:
        rules = load_rules([*args.rules_dir, *paths])
    except RuleError as error:
        if args.rules_command != "check":
            raise
        _say(str(error))
        return 1
    chosen = _chosen(rules, paths)
    if args.rules_command == "list":
        _say(_table(chosen))
        return 0
    if args.rules_command == "check":
        return _check(rules, chosen)
    if args.rules_command == "test":
        return _test(rules, chosen)
    _say(explain(_find(rules, args.rule), rules))
    return 0


def _chosen(rules: Sequence[Rule], paths: Sequence[Path]) -> list[Rule]:
    """Return the rules whose files lie under one of the paths; all of them without paths."""
    if not paths:
        return list(rules)
    tops = [path.resolve() for path in paths]
    chosen: list[Rule] = []
    for rule in rules:
        file = Path(rule.file).resolve()
        if any(top == file or top in file.parents for top in tops):
            chosen.append(rule)
    return chosen


def _find(rules: Sequence[Rule], rule_id: str) -> Rule:
    from whyidle_rules.expression_parser import suggest

    for rule in rules:
        if rule.id == rule_id:
            return rule
    hint = suggest(rule_id, [rule.id for rule in rules])
    raise UserError(f"There is no rule {rule_id!r}{hint}; `whyidle rules list` names them all.")


def _check(rules: Sequence[Rule], chosen: Sequence[Rule]) -> int:
    from whyidle_rules.case import check_query

    check_query(rules)
    cases = sum(len(rule.cases) for rule in chosen)
    _say(f"{_count(len(chosen), 'rule')} with {_count(cases, 'case')}: no problem found")
    return 0


def _test(rules: Sequence[Rule], chosen: Sequence[Rule]) -> int:
    from whyidle_rules.case import run_cases

    results = run_cases(rules, {rule.id for rule in chosen})
    failed = [result for result in results if not result.passed]
    for result in failed:
        _say(
            f"{result.rule.file}: case `{result.case.name}`: {result.rule.id} was granted "
            f"{result.granted_s:g} s, not {result.case.grants_s:g} s"
        )
    passed = len(results) - len(failed)
    _say(f"{_count(len(chosen), 'rule')}: {_count(passed, 'case')} passed, {len(failed)} failed")
    return 1 if failed else 0


def _table(rules: Sequence[Rule]) -> str:
    header = ("ID", "CAUSE", "GROUP", "GRADE", "NEEDS")
    order = [*(group.id for group in groups.GROUPS), ""]
    rows = [
        (
            rule.id,
            f"{rule.cause}/{rule.subcause}",
            rule.group or "beside",
            rule.grade,
            ", ".join([*rule.needs, *(f"no {name}" for name in rule.lacks)]),
        )
        for rule in sorted(rules, key=lambda rule: (order.index(rule.group), rule.id))
    ]
    widths = [max(len(row[at]) for row in [header, *rows]) for at in range(len(header))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )


def explain(rule: Rule, rules: Sequence[Rule]) -> str:
    """Return everything that a rule says about itself beside all rules, as plain text."""
    from whyidle_rules.compile import open_rules
    from whyidle_rules.compile_levels import amount_sql, cited_columns, quoted

    lines = [f"{rule.id}: {rule.title}", ""]
    clause = causes.clause(rule.cause, rule.subcause)
    if rule.beside:
        lines += _entry("cause", f"{rule.cause}/{rule.subcause}: {clause}")
        lines += _entry("group", "none: told beside the ledger, where it claims no seconds")
    else:
        group = groups.BY_ID[rule.group]
        witness = f", which shares out {group.witness}" if group.witness else ""
        lines += _entry("cause", f"{rule.cause}/{rule.subcause}: the GPU is idle because {clause}")
        takes = f"{group.id}{witness}; takes {group.pool} seconds. {group.meaning}"
        lines += _entry("group", takes)
    lines += _entry("grade", rule.grade)
    lines += _entry("owner", rule.owner)
    lines += _entry("needs", ", ".join(rule.needs) or "nothing beyond the lengths of the window")
    if rule.lacks:
        lines += _entry("lacks", f"{', '.join(rule.lacks)}: speaks only where that is unknown")
    for param in rule.params:
        lines += _entry(f"${param.name}", f"{param.value}: {param.reason}")
    if rule.when:
        lines += _entry("when", rule.when.text)
    kind = "beside" if rule.beside else "claim" if rule.claim else "share"
    lines += _entry(kind, rule.amount.text)
    lines += _entry("compiled", amount_sql(rule))
    if (cited := " + ".join(map(quoted, cited_columns(rule)))) and not rule.beside:
        lines += _entry("at most", cited)
    if rule.id in open_rules(rules):
        text = "other groups may claim the same seconds, so missing evidence holds this rule back"
        lines += _entry("open", text)
    lines += _entry("says", rule.says)
    lines += _entry("why", rule.why)
    lines += _entry("advice", rule.advice)
    for url in rule.refs:
        lines += _entry("see", url)
    for case in rule.cases:
        verb = "tells" if rule.beside else "granted"
        granted = f"{verb} {case.grants_s:g} s" if case.grants_s else "silent"
        lines += _entry("case", f"{case.name}: {granted}")
    lines += _entry("file", rule.file)
    return "\n".join(lines)


def _entry(name: str, text: str) -> list[str]:
    indent = " " * 12
    wrapped = textwrap.wrap(
        text, 100 - len(indent), break_long_words=False, break_on_hyphens=False
    ) or [""]
    return [f"{name:<11} {wrapped[0]}", *(indent + line for line in wrapped[1:])]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _say(text: str | Iterable[str]) -> None:
    sys.stdout.write(f"{text}\n")
