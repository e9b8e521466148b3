"""The screen of `whyidle doctor`: a line for each source, and what to type where one is missing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from whyidle.doctor import WRONG, Examination, Finding
from whyidle.doctor_advice import SECTIONS
from whyidle_rules.report.words import clean

_NAME = 17
_SHOWS = 44
_MIN_COLUMNS, _MAX_COLUMNS = 60, 100
# Less than this of a sentence tells nothing.
_SAID_LEAST = 24
# Rules that are named; the others are counted, or the line would be all that one sees.
_RULES = 6
_MARKS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {  # unicode, ASCII, colour
        "works": ("✓", "+", "32"),
        "idle": ("✓", "+", "32"),
        "absent": ("·", "-", "2"),
        "wrong": ("!", "!", "33"),
    }
)
_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "idle": "nothing to tell now",
        "partly": "in part, see below",
        "off": "off, see below",
        "refused": "refused, see below",
        "broken": "fails, see below",
        "late": "no answer, see below",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How wide the screen is and what it can show."""

    width: int
    colour: bool
    ascii_only: bool
    verbose: bool = False

    @property
    def columns(self) -> int:
        """Cells that are used."""
        return min(max(self.width, _MIN_COLUMNS), _MAX_COLUMNS)

    def paint(self, text: str, code: str) -> str:
        """Return text in a colour."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text

    def clean(self, text: str) -> str:
        """Return text that cannot steer the terminal."""
        return clean(text, ascii_only=self.ascii_only)


def render(found: Examination, blind: Mapping[str, Sequence[str]], style: Style) -> str:
    """Return the screen, with a newline at the end."""
    lines = [*_heading(found, style)]
    for section in SECTIONS:
        inside = [finding for finding in found.findings if finding.section == section]
        if inside:
            lines += ["", style.paint(section, "1")]
            lines += [_line(finding, style) for finding in inside]
    if found.wrong:
        lines += ["", style.paint("To mend", "1")]
        for alike in _alike(found.wrong):
            rules = dict.fromkeys(rule for one in alike for rule in blind.get(one.name, ()))
            lines += _mend(alike, tuple(rules), style)
    lines += ["", _summary(found)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _heading(found: Examination, style: Style) -> Iterator[str]:
    dot = " - " if style.ascii_only else " · "
    who = "root" if found.user_id == 0 else f"user {found.user_id}"
    names = sorted(set(found.gpus))
    gpus = ", ".join(f"{found.gpus.count(name)} x {name}" for name in names) or "no GPU seen"
    driver = f"driver {found.driver}" if found.driver else "no NVIDIA driver"
    facts = dot.join([found.node, gpus, driver, f"kernel {found.kernel}", f"as {who}"])
    title = "What whyidle sees on this node"
    yield style.paint(title, "1")
    yield from textwrap.wrap(style.clean(facts), style.columns)


def _mark(finding: Finding, style: Style) -> str:
    uni, plain, code = _MARKS["wrong" if finding.state in WRONG else finding.state]
    return style.paint(plain if style.ascii_only else uni, code)


def _line(finding: Finding, style: Style) -> str:
    name = style.clean(finding.name)[:_NAME].ljust(_NAME)
    said = _WORDS.get(finding.state, "") or finding.why.partition(" (")[0].partition(":")[0]
    said = style.clean(said)
    room = style.columns - _NAME - 5
    # On a narrow screen what is wrong goes before what it would show.
    shows = textwrap.shorten(style.clean(finding.shows), min(_SHOWS, room), placeholder=" ...")
    if room >= _SHOWS + _SAID_LEAST:
        shows, room = shows.ljust(_SHOWS), room - _SHOWS - 2
    elif said:
        shows, said = said, ""
        shows = textwrap.shorten(shows, room, placeholder=" ...")
    said = textwrap.shorten(said, max(room, 12), placeholder=" ...") if said else ""
    code = {"absent": "2", "works": "2", "idle": "2"}.get(finding.state, "33")
    head = f"  {_mark(finding, style)} "
    body = f"{name} {shows}"
    dim = style.paint(body, "2") if finding.state == "absent" else body
    return f"{head}{dim}  {style.paint(said, code)}" if said else f"{head}{dim}"


def _alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Return the findings in groups that one thing mends, in the order of their first."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.why, finding.fix), []).append(finding)
    return list(groups.values())


def _mend(alike: Sequence[Finding], blind: Sequence[str], style: Style) -> Iterator[str]:
    finding = alike[0]
    indent = " " * (_NAME + 5)
    why = style.clean(finding.why) or "it does not work"
    if len(alike) > 1:
        why += f" (also: {', '.join(style.clean(other.name) for other in alike[1:])})"
    width = style.columns - len(indent)
    first, *more = textwrap.wrap(why, width) or [""]
    name = style.clean(finding.name)[:_NAME].ljust(_NAME)
    yield f"  {_mark(finding, style)} {name} {first}"
    yield from (indent + line for line in more)
    if finding.fix:
        command, mark, comment = finding.fix.partition("    # ")
        if command.startswith("add "):  # what is to be done is no command
            yield from (indent + style.paint(line, "36") for line in textwrap.wrap(command, width))
        else:
            yield indent + style.paint(f"$ {command.strip()}", "36")
        if mark:
            yield from (indent + style.paint(f"  # {line}", "2") for line in _wrap(comment, width))
    if blind:
        shown = list(blind) if style.verbose else list(blind[:_RULES])
        rest = f" and {len(blind) - len(shown)} more" if len(shown) < len(blind) else ""
        text = f"blind without it: {', '.join(shown)}{rest}"
        yield from (indent + style.paint(line, "2") for line in textwrap.wrap(text, width))


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width - 4)


def _summary(found: Examination) -> str:
    counts = {
        "work": sum(finding.state in ("works", "idle") for finding in found.findings),
        "can be mended": len(found.wrong),
        "are not on this machine": sum(finding.state == "absent" for finding in found.findings),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items()) + "."
