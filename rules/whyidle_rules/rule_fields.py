"""Typed fields of a YAML mapping: values come out, problems are collected with their places."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from whyidle_rules.expression_parser import suggest
from whyidle_rules.rule_yaml import Problem, YamlNode

# Decimal numbers as JSON writes them: YAML would read 012 as ten, 1:30 as ninety and 1_0 as ten.
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_KINDS = {"scalar": "a value", "sequence": "a list", "mapping": "a mapping"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads values of one file; what is wrong with them goes to `problems`."""

    file: str
    source: str
    problems: list[Problem] = field(default_factory=list)

    def wrong(self, node: YamlNode, message: str) -> None:
        """Note a problem at a value."""
        self.wrong_at(node.line, node.column, message)

    def wrong_at(self, line: int, column: int, message: str) -> None:
        """Note a problem at a place."""
        problem = Problem(file=self.file, line=line, column=column, message=message)
        self.problems.append(problem)

    def is_kind(self, node: YamlNode, name: str, kind: str) -> bool:
        """Say whether a value is a scalar, sequence or mapping, or note that it is not."""
        if node.kind != kind:
            self.wrong(node, f"`{name}` has to be {_KINDS[kind]}, not {_KINDS[node.kind]}")
        return node.kind == kind

    def text(self, node: YamlNode, name: str) -> str | None:
        """Return text that any YAML reader takes for text, without blanks around it."""
        if not self.is_kind(node, name, "scalar"):
            return None
        text = node.text.strip()
        if not text:
            self.wrong(node, f"`{name}` is empty")
        elif not node.reads_as_text:
            self.wrong(node, f"`{name}` has to be text; put {text} in quotes if it is meant so")
        elif not all(char.isprintable() or char == "\n" for char in text):
            self.wrong(node, f"`{name}` holds control characters")
        else:
            return text
        return None

    def number(self, node: YamlNode, name: str) -> float | int | None:
        """Return a decimal number; one with a point or an exponent is a float."""
        if not self.is_kind(node, name, "scalar"):
            return None
        match = _NUMBER.fullmatch(node.text) if node.plain else None
        if match is None:
            self.wrong(node, f"`{name}` has to be a plain decimal number, not {node.text[:40]!r}")
            return None
        if match.group(2) is None and match.group(3) is None and len(node.text) < 20:
            return int(node.text)
        if not math.isfinite(float(node.text)):
            self.wrong(node, f"`{name}` is too large")
            return None
        return float(node.text)

    def one_of(self, node: YamlNode, name: str, known: Iterable[str]) -> str | None:
        """Return one of the known words."""
        if not self.is_kind(node, name, "scalar"):
            return None
        words = list(known)
        if node.text in words:
            return node.text
        hint = suggest(node.text, words) or f"; it is one of {', '.join(words)}"
        self.wrong(node, f"`{name}` cannot be {node.text[:40]!r}{hint}")
        return None

    def items(self, node: YamlNode, name: str) -> tuple[YamlNode, ...]:
        """Return the elements of a list."""
        return node.items if self.is_kind(node, name, "sequence") else ()

    def words(self, node: YamlNode, name: str, known: Iterable[str]) -> tuple[str, ...]:
        """Return a list of known words, none of them twice."""
        words = list(known)
        found: list[str] = []
        for item in self.items(node, name):
            word = self.one_of(item, name, words)
            if word in found:
                self.wrong(item, f"`{word}` is listed twice under `{name}`")
            elif word is not None:
                found.append(word)
        return tuple(found)

    def mapping(
        self, node: YamlNode, name: str, required: Iterable[str], optional: Iterable[str] = ()
    ) -> dict[str, YamlNode]:
        """Return the values of a mapping by key; unknown and missing keys are problems."""
        if not self.is_kind(node, name, "mapping"):
            return {}
        must, may = list(required), list(optional)
        found: dict[str, YamlNode] = {}
        for key, value in node.pairs:
            if key.text in must or key.text in may:
                found[key.text] = value
            else:
                hint = suggest(key.text, [*must, *may])
                self.wrong(key, f"`{name}` has no key `{key.text[:40]}`{hint}")
        missing = [key for key in must if key not in found]
        if missing:
            names = ", ".join(f"`{key}`" for key in missing)
            self.wrong(node, f"`{name}` lacks {names}")
        return found

    def pairs(self, node: YamlNode, name: str) -> Iterator[tuple[YamlNode, YamlNode]]:
        """Yield keys and values of a mapping whose keys are free."""
        if self.is_kind(node, name, "mapping"):
            yield from node.pairs
