"""The settings as a table for the documentation, as an example file, and as they are in effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from whyidle.config import Config, Setting, settings
from whyidle.config_load import Loaded

_WIDTH = 78


def markdown() -> str:
    """Return a table of all settings."""
    rows = ["| setting | default | what it is | why this default |", "| --- | --- | --- | --- |"]
    for setting, default in _defaults():
        restart = "" if setting.reloads else " (a change needs a restart)"
        cells = (
            f"`{setting.key}`",
            f"`{default}`",
            f"{setting.meaning}; {setting.kind.says}{restart}",
            setting.reason,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def example() -> str:
    """Return a file in which every setting stands with its default, switched off."""
    lines = [
        "# Settings of the whyidle agent, with their defaults: take the # away to change one.",
        "# `whyidle agent --check` tells whether the file is good, and `systemctl reload",
        "# whyidle-agent` brings it into effect.",
    ]
    section = ""
    for setting, default in _defaults():
        head, _, last = setting.key.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"#{head}:"]
        elif not head:
            lines.append("")
        indent = "  " if head else ""
        mark = f"#{indent}#" if head else "#"
        lines += [f"{mark} {line}" for line in _wrapped(setting)]
        lines.append(f"#{indent}{last}: {default}")
    return "\n".join(lines) + "\n"


def in_effect(loaded: Loaded) -> str:
    """Return every setting, its value and where that comes from."""
    rows = [
        (
            setting.key,
            _text(getattr(loaded.config, name), setting.kind.nothing),
            loaded.sources.get(name, "default"),
        )
        for name, setting in settings().items()
    ]
    key, value = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "".join(f"{row[0]:<{key}}  {row[1]:<{value}}  {row[2]}\n" for row in rows)


def _defaults() -> Iterator[tuple[Setting, str]]:
    default = Config()
    for one in fields(Config):
        yield settings()[one.name], _text(getattr(default, one.name))


def _text(value: object, nothing: str = "null") -> str:
    """Return a value as it is written in the file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    if value is None:
        return nothing
    return str(value) if isinstance(value, str | Path) else repr(value)


def _wrapped(setting: Setting) -> list[str]:
    words = f"{setting.meaning[0].upper()}{setting.meaning[1:]}. Why so: {setting.reason}.".split()
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > _WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
