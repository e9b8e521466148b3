"""Finds rule files, reads them all and checks what shows only when they stand beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from whyidle_rules.rule import Rule
from whyidle_rules.rule_read import Loaded, read_rule
from whyidle_rules.rule_yaml import Problem, RuleError, read_text

BUILTIN = Path(__file__).parent / "builtin"
SITE = Path("/etc/whyidle/rules.d")


def load_rules(overlays: Sequence[Path] = (), *, site: Path = SITE) -> tuple[Rule, ...]:
    """Return the rules by id: the built-in ones, those of the site, then the overlays in order.

    A later rule replaces an earlier one of the same id. An overlay is a folder of
    `<cause>/<id>.yaml` or one such file. Raises RuleError with all problems of all files.
    """
    found: dict[str, Loaded] = {}
    problems: list[Problem] = []
    for root in [BUILTIN, *_if_there(site, problems), *overlays]:
        layer: dict[str, Loaded] = {}
        for path in rule_files(root, problems):
            try:
                loaded = read_rule(read_text(path), path)
            except RuleError as error:
                problems += error.problems
                continue
            other = layer.setdefault(loaded.rule.id, loaded)
            if other is not loaded:
                message = f"{other.rule.file} has the same id; rename one of them"
                problems.append(_problem(path, message))
        found |= layer
    ordered = [found[rule_id] for rule_id in sorted(found)]
    problems = problems or check_fallbacks(ordered)
    if problems:
        raise RuleError(problems)
    return tuple(loaded.rule for loaded in ordered)


def rule_files(root: Path, problems: list[Problem]) -> list[Path]:
    """Return the rule files under a folder, or the file itself; what is out of place is noted."""
    try:
        if root.is_file():
            return [root]
        if not root.is_dir():
            problems.append(
                _problem(root, "there is no such rule file or folder; name one that exists")
            )
            return []
        children = sorted(root.iterdir())
        folders = [child for child in children if child.is_dir() and child.name[0] != "."]
        files = sorted(file for folder in folders for file in folder.iterdir())
    except OSError as error:
        problems.append(_problem(root, f"cannot be read ({error.strerror}); check permissions"))
        return []
    for file in [*children, *files]:
        if file.suffix == ".yml" and not file.name.startswith("."):
            problems.append(_problem(file, "a rule file ends in .yaml; rename it"))
        elif file in children and file.suffix == ".yaml":
            problems.append(_problem(file, "move it into a folder named after its cause"))
    return [file for file in files if file.suffix == ".yaml" and not file.name.startswith(".")]


def check_fallbacks(rules: Iterable[Loaded]) -> list[Problem]:
    """Return what is wrong with rules that speak where a column is unknown.

    Such a rule takes over the seconds of the rules of its group that need the column. All of those
    must have its cause, or missing evidence would move seconds from one cause to another.
    """
    every = list(rules)
    problems: list[Problem] = []
    for loaded in every:
        rule = loaded.rule
        for column in rule.lacks:
            finer = [
                other.rule
                for other in every
                if other.rule.group == rule.group and column in other.rule.reads
            ]
            strangers = [other.id for other in finer if other.cause != rule.cause]
            message = ""
            if not finer:
                message = f"no rule of group {rule.group} needs `{column}`, so none is stood in for"
            elif strangers:
                message = f"{strangers[0]} needs `{column}` too and has another cause"
            if message:
                line, at = loaded.lacks_line, loaded.lacks_column
                problems.append(Problem(file=rule.file, line=line, column=at, message=message))
    return problems


def _if_there(root: Path, problems: list[Problem]) -> list[Path]:
    try:
        return [root] if root.exists() else []
    except (
        OSError
    ) as error:  # rules that cannot be seen must not look like rules that are not there
        problems.append(_problem(root, f"cannot be read ({error.strerror}); check permissions"))
        return []


def _problem(path: Path, message: str) -> Problem:
    return Problem(file=str(path), message=message)
