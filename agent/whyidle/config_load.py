"""Reads the configuration: command line before environment, environment before file.

What is not understood is refused with its place, all of it at once.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from whyidle.config import ENVIRONMENT, Config, settings
from whyidle.strict_yaml import Problem, ProblemsError, YamlNode, parse_yaml, read_text

FILE = Path("/etc/whyidle/agent.yaml")
# Variables of ours that are no settings: the probe's, and those of the tests.
_OTHERS = frozenset({"PROBE", "PROBE_DIR", "PROBE_WORKERS", "CI", "WRITE_DOCS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration, the file it is from, and where each value that was given comes from."""

    config: Config
    file: Path | None
    sources: Mapping[str, str]
    # Variables that look like settings and are none; the environment belongs to others too.
    warnings: tuple[str, ...] = ()


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    given: Mapping[str, object] | None = None,
    *,
    default: Path = FILE,
) -> Loaded:
    """Return the configuration of a file, of the environment, and of values that were given.

    `file` has to exist; without one, `default` is read where it exists. `given` holds values of the
    command line by field. Raises ProblemsError with everything that is wrong, each with its place.
    """
    problems: list[Problem] = []
    found: dict[str, object] = {}
    sources: dict[str, str] = {}
    path = file if file is not None else _if_there(default, problems)
    if path is not None:
        for name, (value, line) in _of_file(path, problems).items():
            found[name] = value
            sources[name] = f"{path}:{line}"
    variables = os.environ if environ is None else environ
    for name, value in _of_environment(variables, problems).items():
        found[name] = value
        sources[name] = settings()[name].variable
    for name, value in (given or {}).items():
        found[name] = value
        sources[name] = "command line"
    if problems:
        raise ProblemsError(problems)
    config = Config(**found)  # type: ignore[arg-type]
    return Loaded(config=config, file=path, sources=sources, warnings=_unknown(variables))


def _if_there(path: Path, problems: list[Problem]) -> Path | None:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        # A file that cannot be seen must not look like one that is not there.
        message = f"cannot be read ({error.strerror}); check its permissions"
        problems.append(Problem(file=str(path), message=message))
        return None
    return path


def _of_file(path: Path, problems: list[Problem]) -> dict[str, tuple[object, int]]:
    if not path.exists():
        problems.append(Problem(file=str(path), message="there is no such file; name another one"))
        return {}
    try:
        text = read_text(path, what="configuration")
        if not _has_content(text):
            return {}
        root = parse_yaml(text, str(path), what="configuration")
    except ProblemsError as error:
        problems += error.problems
        return {}
    found: dict[str, tuple[object, int]] = {}
    _walk(root, "", {one.key: name for name, one in settings().items()}, found, str(path), problems)
    return found


def _has_content(text: str) -> bool:
    """Whether there is more than comments: an example in which nothing is switched on is fine."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())


def _walk(
    node: YamlNode,
    prefix: str,
    names: Mapping[str, str],
    found: dict[str, tuple[object, int]],
    file: str,
    problems: list[Problem],
) -> None:
    """Take the values of a mapping and of the sections in it."""

    def complain(where: YamlNode, message: str) -> None:
        problems.append(Problem(file=file, line=where.line, column=where.column, message=message))

    if node.kind != "mapping":
        if not node.reads_as_nothing:
            inside = f"`{prefix[:-1]}`" if prefix else "the configuration"
            complain(node, f"{inside} has to be a mapping of settings")
        return
    for key, value in node.pairs:
        dotted = prefix + key.text
        name = names.get(dotted)
        if name in found:
            complain(key, f"`{dotted}` is given twice")
        elif name is not None:
            # null, or nothing at all, stands for the default.
            if not value.reads_as_nothing:
                try:
                    found[name] = (settings()[name].kind.of_yaml(value), key.line)
                except ValueError as error:
                    complain(value, f"`{dotted}` {error}")
        elif any(known.startswith(f"{dotted}.") for known in names):
            _walk(value, f"{dotted}.", names, found, file, problems)
        else:
            complain(key, f"there is no setting `{dotted}`{_hint(dotted, prefix, names)}")


def _hint(key: str, prefix: str, names: Mapping[str, str]) -> str:
    """Return what may have been meant: a setting or section beside it, or one anywhere."""
    beside = {known[len(prefix) :].split(".")[0] for known in names if known.startswith(prefix)}
    near = difflib.get_close_matches(key[len(prefix) :], beside, 1)
    if near:
        return f"; did you mean `{prefix}{near[0]}`?"
    last = {known.rsplit(".", 1)[-1]: known for known in names}
    anywhere = [last[word] for word in difflib.get_close_matches(key.rsplit(".", 1)[-1], last, 1)]
    if anywhere:
        return f"; did you mean `{anywhere[0]}`?"
    return f"; here can stand {', '.join(f'`{prefix}{one}`' for one in sorted(beside))}"


def _of_environment(environ: Mapping[str, str], problems: list[Problem]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, setting in settings().items():
        text = environ.get(setting.variable)
        if text is None:
            continue
        try:
            found[name] = setting.kind.of_text(text)
        except ValueError as error:
            problems.append(Problem(file=f"${setting.variable}", message=str(error)))
    return found


def _unknown(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = [one.variable for one in settings().values()]
    strangers = [
        name
        for name in sorted(environ)
        if name.startswith(ENVIRONMENT)
        and name not in known
        and name.removeprefix(ENVIRONMENT) not in _OTHERS
    ]
    return tuple(f"${name} is no setting{_near(name, known)}" for name in strangers)


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.8)  # all of them begin alike
    return f"; did you mean ${near[0]}?" if near else ""


Loader: TypeAlias = Callable[[], Loaded]
