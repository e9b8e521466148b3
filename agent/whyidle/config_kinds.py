"""What a setting may be: how the text of a file or of the environment becomes its value."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from whyidle.strict_yaml import YamlNode

_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
# Between the items of a list in an environment variable, as in PATH.
_SEPARATOR = ":"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of value. `read` raises ValueError with a sentence that follows the setting's name."""

    says: str
    read: Callable[[str], object]
    many: bool = False
    # Words such as `true` mean something only where they stand without quotes.
    plain: bool = False
    # How a value of None is written.
    nothing: str = "null"

    def of_yaml(self, node: YamlNode) -> object:
        """Return the value of a node that says something; raises ValueError."""
        if not self.many:
            return self._scalar(node)
        if node.kind != "sequence":
            raise ValueError(f"has to be a list of {self.says}, such as [a, b]")
        return tuple(self._scalar(item) for item in node.items)

    def of_text(self, text: str) -> object:
        """Return the value of an environment variable; raises ValueError."""
        if not self.many:
            return self.read(text)
        return tuple(self.read(item) for item in text.split(_SEPARATOR) if item)

    def _scalar(self, node: YamlNode) -> object:
        if node.kind != "scalar" or node.reads_as_nothing:
            raise ValueError(f"has to be {self.says}")
        if self.plain and not node.plain:
            raise ValueError(f"has to be {self.says}, without quotes")
        return self.read(node.text)


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"has to be true or false, not {text!r}")
    return text == "true"


def positive(text: str) -> float:
    """Return a positive decimal number; raises ValueError."""
    value = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"has to be a positive number, not {text!r}")
    return value


def _absolute(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute() or "\0" in text:
        raise ValueError(f"has to be a path from /, not {text!r}")
    return path


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(
            f"has to be of letters, digits, dots, dashes and underscores, not {text!r}"
        )
    return text


def _address(text: str) -> str | None:
    if text == "off":
        return None
    host, colon, port = text.rpartition(":")
    # No address in front of the port stands for all of them, as with other exporters.
    if (
        not colon
        or (host and not _HOST.fullmatch(host))
        or not port.isdecimal()
        or not 0 < int(port) < 65536
    ):
        raise ValueError(
            f"has to be an address and a port such as 127.0.0.1:19836 or :19836, or off, "
            f"not {text!r}"
        )
    return text


def _url(text: str) -> str:
    if not _URL.fullmatch(text):
        raise ValueError(
            f"has to be an address such as http://localhost:9400/metrics, not {text!r}"
        )
    return text


def _collector(text: str) -> str:
    from whyidle.collect import ALL  # only where a collector is named: the import is not small

    names = [collector.name for collector in ALL]
    if text not in names:
        near = difflib.get_close_matches(text, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(names))}"
        raise ValueError(f"names no collector with {text!r}; {hint}")
    return text


FLAG = Kind(says="true or false", read=_flag, plain=True)
POSITIVE = Kind(says="a positive number", read=positive, plain=True)
NAME = Kind(says="a name", read=_name)
PATH = Kind(says="a path from /", read=_absolute)
FOLDER = Kind(says="a folder, as a path from /", read=_absolute)
FOLDERS = Kind(says="folders, as paths from /", read=_absolute, many=True)
URL = Kind(says="an http address", read=_url)
ADDRESS = Kind(says="an address and a port, or off", read=_address, nothing="off")
COLLECTORS = Kind(says="names of collectors", read=_collector, many=True)
