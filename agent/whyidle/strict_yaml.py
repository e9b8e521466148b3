"""Strict YAML with the place of every value: what rules and the configuration are made of.

Built on PyYAML's events, so that a hostile file cannot exhaust the stack, and scalars stay the text
that was written: `no`, `1:30` and `012` mean something only where a field asks for a number. Tags,
anchors, aliases, duplicate keys and second documents are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from whyidle.errors import UserError

MAX_BYTES = 64 * 1024  # a rule with a dozen cases has 4 KB, a configuration 2 KB
_MAX_DEPTH = 16  # a case row lies 6 deep

# libyaml is ten times as fast; PyYAML may be built without it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_RESOLVER = yaml.resolver.Resolver()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Problem:
    """Something wrong with a file, at a line and column (from 1); 0 where it is no line of it."""

    file: str
    line: int = 0
    column: int = 0
    message: str

    def __str__(self) -> str:
        place = f":{self.line}:{self.column}" if self.line else ""
        text = f"{self.file}{place}: {self.message}"
        return "".join(char if char.isprintable() else "?" for char in text)


class ProblemsError(UserError):
    """All problems of all files, one a line."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlNode:
    """A value of a YAML file and where it begins.

    `plain` says that a scalar was written without quotes; `index` is its first character in the
    file. `items` are the elements of a sequence; `pairs` the keys and values of a mapping.
    """

    kind: Literal["scalar", "sequence", "mapping"]
    line: int
    column: int
    index: int
    text: str = ""
    plain: bool = False
    style: str = ""
    items: tuple[YamlNode, ...] = ()
    pairs: tuple[tuple[YamlNode, YamlNode], ...] = ()

    @property
    def reads_as_nothing(self) -> bool:
        """Whether it is what YAML calls null: `null`, `~`, or nothing at all."""
        return self.kind == "scalar" and self.plain and self.text in ("", "~", "null")

    @property
    def reads_as_text(self) -> bool:
        """Whether any YAML reader takes the scalar for text: quoted, or like nothing else."""
        if not self.plain:
            return True
        resolve: Callable[..., str] = _RESOLVER.resolve
        return resolve(yaml.ScalarNode, self.text, (True, False)) == "tag:yaml.org,2002:str"


def read_text(path: Path, *, what: str = "rule") -> str:
    """Return the text of a file that holds a `what`; raises ProblemsError if it cannot hold one."""
    try:
        if not path.is_file():
            raise _refuse(path, "this is not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _refuse(path, f"cannot be read ({error.strerror}); check its permissions") from error
    if len(data) > MAX_BYTES:
        raise _refuse(path, f"a {what} file has at most {MAX_BYTES // 1024} KiB; split it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"this is not UTF-8 text; save the {what} as UTF-8"
        raise ProblemsError(
            [Problem(file=str(path), line=line, column=1, message=message)]
        ) from error


def parse_yaml(text: str, file: str, *, what: str = "rule") -> YamlNode:
    """Return the root of the only document in a text; raises ProblemsError."""
    try:
        return _Composer(file, what).compose(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        message = f"this is not YAML: {error.problem or error.context}"
        problem = Problem(file=file, line=line, column=column, message=message)
        raise ProblemsError([problem]) from error
    except yaml.YAMLError as error:  # characters that YAML forbids come without a mark
        message = "this is not YAML: it holds characters that YAML forbids"
        raise ProblemsError([Problem(file=file, line=1, column=1, message=message)]) from error


def place(source: str, node: YamlNode, offset: int) -> tuple[int, int]:
    """Return line and column in the file of a character of a scalar's text.

    YAML folds and indents, but it never adds or drops a visible character outside of escapes; so
    the place is found by counting those.
    """
    if not node.text.strip():
        return node.line, node.column
    visible = sum(not char.isspace() for char in node.text[:offset])
    more = bool(node.text[offset:].strip())  # at the end, stay behind the last character
    at = node.index
    if node.style in ("|", ">"):
        at = source.find("\n", at) + 1
    elif not node.plain:
        at += 1
    while at < len(source) and (visible or (more and source[at].isspace())):
        visible -= not source[at].isspace()
        at += 1
    line = source.count("\n", 0, at)
    return line + 1, at - (source.rfind("\n", 0, at) + 1) + 1


def _refuse(path: Path, message: str) -> ProblemsError:
    return ProblemsError([Problem(file=str(path), message=message)])


class _Composer:
    """Makes the tree from events with a stack of its own, so that depth is ours to bound."""

    def __init__(self, file: str, what: str) -> None:
        self._file = file
        self._what = what

    def compose(self, events: Iterator[yaml.Event]) -> YamlNode:
        open_nodes: list[tuple[yaml.Event, list[YamlNode]]] = []
        root: YamlNode | None = None
        for event in events:
            self._check(event, len(open_nodes), root)
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event, []))
                continue
            if isinstance(event, yaml.ScalarEvent):
                node = self._scalar(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                node = self._collection(*open_nodes.pop())
            else:
                continue
            if open_nodes:
                open_nodes[-1][1].append(node)
            else:
                root = node
        if root is None:
            raise self._error(None, "the file is empty")
        return root

    def _check(self, event: yaml.Event, depth: int, root: YamlNode | None) -> None:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise self._error(event, "anchors and aliases are not allowed; write the value again")
        if isinstance(event, yaml.NodeEvent) and getattr(event, "tag", None):
            raise self._error(event, "tags are not allowed")
        if isinstance(event, yaml.DocumentStartEvent) and root is not None:
            message = f"a file holds one {self._what}; put the second one into its own file"
            raise self._error(event, message)
        if depth > _MAX_DEPTH:
            raise self._error(event, f"nested more than {_MAX_DEPTH} deep")

    def _scalar(self, event: yaml.ScalarEvent) -> YamlNode:
        line, column, index = _start(event)
        style = event.style or ""
        return YamlNode(
            kind="scalar",
            line=line,
            column=column,
            index=index,
            text=event.value,
            plain=style == "",
            style=style,
        )

    def _collection(self, event: yaml.Event, found: list[YamlNode]) -> YamlNode:
        line, column, index = _start(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return YamlNode(
                kind="sequence", line=line, column=column, index=index, items=tuple(found)
            )
        pairs = tuple(zip(found[0::2], found[1::2], strict=True))
        seen: set[str] = set()
        for key, _ in pairs:
            if key.kind != "scalar":
                raise self._error(key, "a key has to be a plain word")
            if key.text in seen:
                raise self._error(key, f"`{key.text}` is given twice")
            seen.add(key.text)
        return YamlNode(kind="mapping", line=line, column=column, index=index, pairs=pairs)

    def _error(self, where: yaml.Event | YamlNode | None, message: str) -> ProblemsError:
        line = column = 1
        if isinstance(where, YamlNode):
            line, column = where.line, where.column
        elif where is not None:
            line, column, _ = _start(where)
        return ProblemsError([Problem(file=self._file, line=line, column=column, message=message)])


def _start(event: yaml.Event) -> tuple[int, int, int]:
    """Return line and column from 1 and the index of an event's first character."""
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1, mark.index) if mark else (1, 1, 0)
