"""Writes the generated blocks of README.md and docs/: what the product says about itself.

A block stands between `<!-- generated: NAME -->` and `<!-- end -->`; `BLOCKS` makes each.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from reported import REPORTS
from whyidle import causes, config_doc, metrics_doc
from whyidle_rules import cli, database, evidence, groups, sources
from whyidle_rules.diagnosis import Diagnosis
from whyidle_rules.report.text import render_text
from whyidle_rules.rule_load import load_rules
from whyidle_rules.trace.diagnose import diagnose
from whyidle_rules.trace.load import read
from whyidle_rules.trace.run import assemble

ROOT = Path(__file__).parents[1]
FIXTURE = "fixtures/traces/ddp-4-ranks-rank-1-loads-itself"
WIDTH = 80
NOWHERE = Path(__file__).with_name("no-such-folder")  # no rules of the site that runs the tests

BLOCK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_TEXT_MAX = 64  # of a text in the example of the JSON contract


def demo() -> str:
    """Return what `make demo` prints, up to its first finding."""
    paragraphs = render_text(_found(), width=WIDTH + 16, colour=False, verbose=False).split("\n\n")
    first = next(n for n, text in enumerate(paragraphs) if text.startswith("Findings"))
    return _fenced("\n\n".join([*paragraphs[: first + 1], "  [...]"]), "text")


def diagnose_help() -> str:
    """Return the options of `diagnose`."""
    return _fenced(help_text(cli.diagnose_parser()), "text")


def whyidle_help() -> str:
    """Return the commands of `whyidle`."""
    return _fenced(help_text(cli.whyidle_parser()), "text")


def help_text(parser: argparse.ArgumentParser) -> str:
    """Return the help of a parser; argparse's own looks another way in each Python."""
    actions = [one for one in parser._actions if one.help != argparse.SUPPRESS]
    named = [one for one in actions if not one.option_strings]
    usage = " ".join(["usage:", parser.prog, "[OPTION ...]", *map(_usage, named)])
    lines = [usage, "", *textwrap.wrap(parser.description or "", WIDTH), ""]
    for action in named:
        if isinstance(action, argparse._SubParsersAction):
            rows = [(str(one.dest), str(one.help)) for one in action._choices_actions]
            lines += [f"{action.metavar}:", *_rows(rows), ""]
        else:
            lines += [*_rows([(str(action.metavar or action.dest), _help(action))]), ""]
    options = [(_option(one), _help(one)) for one in actions if one.option_strings]
    return "\n".join([*lines, "options:", *_rows(options)])


def _usage(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    if isinstance(action, argparse._SubParsersAction):
        return f"{name} ..."
    return {"+": f"{name} [{name} ...]", "*": f"[{name} ...]"}.get(str(action.nargs), name)


def _option(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    choices = "|".join(map(str, action.choices)) if action.choices else ""
    return f"{names} {action.metavar or choices or action.dest.upper()}"


def _help(action: argparse.Action) -> str:
    return (action.help or "") % vars(action)


def _rows(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    indent = 4 + max(len(name) for name, _ in rows)
    for name, text in rows:
        first, *rest = textwrap.wrap(text, WIDTH - indent)
        yield f"  {name:<{indent - 2}}{first}"
        yield from (f"{'':<{indent}}{line}" for line in rest)


def cause_table() -> str:
    """Return every cause and subcause."""
    rows = []
    for cause in causes.CAUSES:
        for subcause, clause in cause.subcauses.items():
            root_only = " (never idle: why a rank came late)" if cause.root_only else ""
            rows.append((f"`{cause.slug}`", f"`{subcause}`", clause + root_only))
        for subcause, clause in cause.beside.items():
            rows.append((f"`{cause.slug}`", f"`{subcause}`", f"{clause} (beside the ledger)"))
    return _table(("cause", "subcause", "the GPU was idle because"), rows)


def rule_table() -> str:
    """Return the built-in rules."""
    order = [*(group.id for group in groups.GROUPS), ""]
    rules = sorted(load_rules(site=NOWHERE), key=lambda rule: (order.index(rule.group), rule.id))
    rows = [
        (
            f"`{rule.id}`",
            rule.title,
            f"`{rule.cause}/{rule.subcause}`",
            f"`{rule.group}`" if rule.group else "beside the ledger",
            rule.grade,
            ", ".join(
                [*(f"`{column}`" for column in rule.needs), *(f"no `{c}`" for c in rule.lacks)]
            ),
        )
        for rule in rules
    ]
    return _table(("rule", "finds", "cause", "group", "grade", "needs"), rows)


def group_table() -> str:
    """Return the groups, in the order in which they claim."""
    rows = [
        (
            f"`{group.id}`",
            group.pool,
            group.meaning,
            f"`{group.witness}`" if group.witness else "",
            f"`{group.leftover}`",
        )
        for group in groups.GROUPS
    ]
    return _table(("group", "takes from", "meaning", "witness", "left over"), rows)


def evidence_table() -> str:
    """Return the columns that rules read."""
    rows = [
        (f"`{column.name}`", column.type, column.unit, _parts(column))
        for column in evidence.COLUMNS
    ]
    return _table(("column", "type", "unit", "meaning"), rows)


def _parts(column: evidence.Column) -> str:
    return column.meaning + (f" (part of `{column.part_of}`)" if column.part_of else "")


def json_example() -> str:
    """Return the diagnosis of the demo as JSON, each list cut after its first item."""
    return _fenced(_laid_out(_short(_found().to_json()), ""), "json")


def _laid_out(value: Any, indent: str) -> str:
    """Return JSON in which whatever fits into a line is one line."""
    flat = json.dumps(value)
    if len(indent) + len(flat) < WIDTH + 16 or not isinstance(value, dict | list) or not value:
        return flat
    inner = f"{indent} "
    if isinstance(value, list):
        lines = [f"{inner}{_laid_out(one, inner)}" for one in value]
    else:
        lines = [f"{inner}{json.dumps(k)}: {_laid_out(one, inner)}" for k, one in value.items()]
    opening, closing = ("[", "]") if isinstance(value, list) else ("{", "}")
    return ",\n".join([opening + "\n" + lines[0], *lines[1:]]) + f"\n{indent}{closing}"


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value[:1]]
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, str) and len(value) > _TEXT_MAX:
        return f"{value[:_TEXT_MAX].rsplit(' ', 1)[0]} ..."
    return value


def _found() -> Diagnosis:
    """Return the diagnosis of the fixture, as it is from the root of the repository."""
    files = [read(path) for path in sources.trace_files([str(ROOT / FIXTURE)])]
    with database.memory() as con:
        return diagnose(con, [Path(FIXTURE)], assemble(files), load_rules(site=NOWHERE))


def _fenced(text: str, language: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.strip("\n").split("\n"))
    return f"```{language}\n{lines}\n```\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def reported_table() -> str:
    """Return what is said of each reported case, or why nothing is said yet."""
    rows = []
    for report in REPORTS:
        said = f"`{report.says}`" if report.says else "nobody is blamed"
        title = f"[{report.title}]({report.url})" if report.url else report.title
        rows.append((report.id, title, report.not_told or said))
    return _table(("case", "what was reported", "what is said, or why it is not told yet"), rows)


def accuracy_summary() -> str:
    """Return what docs/accuracy.md says in short: the recorded runs and its two first points."""
    runs = sum(1 for path in (ROOT / "fixtures" / "stalls").iterdir() if path.is_dir())
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    points = [line for line in page.splitlines() if line.startswith("- with")]
    return "\n".join([f"{runs} recorded runs:", "", *points, ""])


BLOCKS: dict[str, Callable[[], str]] = {
    "accuracy": accuracy_summary,
    "causes": cause_table,
    "config": config_doc.markdown,
    "demo": demo,
    "diagnose-help": diagnose_help,
    "evidence": evidence_table,
    "groups": group_table,
    "json": json_example,
    "metrics": metrics_doc.markdown,
    "reported": reported_table,
    "rules": rule_table,
    "whyidle-help": whyidle_help,
}


def rewritten(page: str) -> str:
    """Return a page with all of its blocks made anew; raises KeyError for an unknown one."""
    return BLOCK.sub(lambda block: block[1] + BLOCKS[block[2]]() + block[4], page)
