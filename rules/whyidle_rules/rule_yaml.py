"""The YAML of rule files: the strict one that the agent's configuration is read by, too."""

from __future__ import annotations

from whyidle.strict_yaml import (
    MAX_BYTES,
    Problem,
    YamlNode,
    parse_yaml,
    place,
    read_text,
)
from whyidle.strict_yaml import ProblemsError as RuleError

__all__ = ["MAX_BYTES", "Problem", "RuleError", "YamlNode", "parse_yaml", "place", "read_text"]
