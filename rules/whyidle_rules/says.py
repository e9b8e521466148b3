"""Templates of what rules say: names in braces with a plain number format, checked when loaded."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass

from whyidle_rules.expression_parser import suggest

# Thousands separator, up to six digits, and f, g, d or %; a width could ask for a gigabyte.
_SPEC = re.compile(r",?(\.[0-6])?[fgd%]?")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A {name:spec} of a template, and the character at which its braces open."""

    name: str
    spec: str
    offset: int


class TemplateError(Exception):
    """What is wrong in a template, and at which character of it."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


def fields(template: str) -> list[Field]:
    """Return the fields of a template; only {name} and {name:spec} pass, or TemplateError."""
    found: list[Field] = []
    at = 0
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise TemplateError(f"{error} (write {{{{ for a brace)", 0) from error
    for literal, name, spec, conversion in pieces:
        at += len(literal) + literal.count("{") + literal.count("}")
        if name is None:
            continue
        if conversion or not _NAME.fullmatch(name):
            raise TemplateError(f"`{{{name}}}`: only {{name}} or {{name:format}} is allowed", at)
        if not _SPEC.fullmatch(spec or ""):
            raise TemplateError(f"`{spec}` is not a format; one is `.1f`, `,d`, `.0%` or `.3g`", at)
        found.append(Field(name=name, spec=spec or "", offset=at))
        at += len(name) + 2 + (len(spec) + 1 if spec else 0)
    return found


def check(field: Field, samples: Mapping[str, float | int | str]) -> None:
    """Raise TemplateError if a field has no sample value or a format that does not fit it."""
    if field.name not in samples:
        hint = suggest(field.name, samples)
        raise TemplateError(f"nothing is called `{field.name}`{hint}", field.offset)
    try:
        _text(samples[field.name], field.spec)
    except ValueError as error:
        raise TemplateError(f"`{{{field.name}:{field.spec}}}`: {error}", field.offset) from error


def render(template: str, values: Mapping[str, object]) -> str:
    """Fill a checked template; None becomes "unknown", a missing name raises KeyError."""
    parts: list[str] = []
    for literal, name, spec, _ in string.Formatter().parse(template):
        parts.append(literal)
        if name is not None:
            parts.append(_text(values[name], spec or ""))
    return "".join(parts)


def _text(value: object, spec: str) -> str:
    if value is None:
        return "unknown"
    if spec.endswith("d") and isinstance(value, float) and value.is_integer():
        value = int(value)  # a whole number that came through a DOUBLE
    return format(value, spec)
