"""How one report is drawn: its width, its characters, its colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rich.style import Style
from rich.table import Table
from rich.text import Text

from whyidle.causes import BY_SLUG
from whyidle_rules.report.cells import cut
from whyidle_rules.report.rounding import apportion
from whyidle_rules.report.words import clean

# Narrower than this nothing lines up; wider than this the eye loses the line.
MIN_COLUMNS = 40
MAX_COLUMNS = 160
MAX_PROSE_COLUMNS = 110

# Stands for a space at which no line may break. `clean` lets no private character through, so it
# can never come out of a recording; `text.render_text` turns it back into a space.
GLUE = "\ue000"
_UNITS = frozenset(
    {"%", "ms", "s", "min", "h", "B", "KiB", "MiB", "GiB", "TiB", "GPU", "GPUs"}
    | {"GPU-seconds", "GPU-minutes", "GPU-hours"}
)

STYLE_TITLE = Style(bold=True)
STYLE_DIM = Style(dim=True)
STYLE_WORKING = Style(color="green")
STYLE_EMPTY = Style(dim=True)
STYLE_SPINNING = Style(color="blue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters that are not letters."""

    working: str
    empty: str
    spinning: str
    bar: str
    sliver: str
    ellipsis: str
    bullet: str


UNICODE = Glyphs(
    working="█", empty="·", spinning="▒", bar="█", sliver="▏", ellipsis="…", bullet="•"
)
ASCII = Glyphs(working="#", empty=".", spinning="~", bar="#", sliver="", ellipsis="...", bullet="-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pen:
    """What every part of the report needs to draw itself."""

    columns: int
    verbose: bool
    ascii_only: bool

    @property
    def glyphs(self) -> Glyphs:
        """The characters that the output can carry."""
        return ASCII if self.ascii_only else UNICODE

    def clean(self, text: str) -> str:
        """Make `text` harmless, and ASCII where nothing else can be printed."""
        return clean(text, ascii_only=self.ascii_only)

    def short(self, text: str, cells: int, *, keep: Literal["middle", "end"] = "middle") -> str:
        """Clean a name and cut it to `cells`."""
        return cut(self.clean(text), cells, ellipsis=self.glyphs.ellipsis, keep=keep)

    def prose(self, text: str, style: Style | None = None) -> Text:
        """Clean a sentence; numbers stay with their unit, ranks with theirs."""
        words = self.clean(text).split(" ")
        glued = words[0]
        for before, word in pairwise(words):
            is_unit = before[-1:].isdigit() and word.rstrip(".,;:)") in _UNITS
            joined = is_unit or (before in {"rank", "ranks"} and word[:1].isdigit())
            glued += (GLUE if joined else " ") + word
        return Text(glued, style=style or "")

    def phrase(self, *parts: tuple[str, Style | None]) -> Text:
        """Clean pieces of one sentence, each with its style; empty ones are left out."""
        text = Text()
        for words, style in parts:
            piece = self.prose(words, style)
            if piece and text and piece.plain[0] not in ":,;.":
                text.append(" ")
            text.append_text(piece)
        return text

    def unbroken(self, text: str) -> str:
        """Clean words that must stay on one line; for `Text`, not for `prose`."""
        return self.clean(text).replace(" ", GLUE)

    def bar(self, share: float, cells: int, style: Style) -> Text:
        """Draw a part of a whole; a part too small for a cell still leaves a sliver."""
        full = min(max(round(share * cells), 0), cells)
        drawn = self.glyphs.bar * full
        if not drawn and share > 0:
            drawn = self.glyphs.sliver
        return Text(drawn, style=style)

    def split(self, parts: Sequence[float], cells: int) -> Text:
        """Draw working, empty and spinning as one bar of `cells`."""
        glyphs = self.glyphs
        looks = (
            (glyphs.working, STYLE_WORKING),
            (glyphs.empty, STYLE_EMPTY),
            (glyphs.spinning, STYLE_SPINNING),
        )
        text = Text()
        for (glyph, style), count in zip(looks, apportion(parts, cells), strict=True):
            text.append(glyph * count, style=style)
        return text


def colour(cause: str) -> Style:
    """Return the colour of a cause; one that this version does not know has none."""
    known = BY_SLUG.get(cause)
    return Style(color=known.colour) if known else Style()


def grid(*columns: tuple[str, int | None]) -> Table:
    """Return an indented table without lines; each column is (justify, width or None to wrap)."""
    table = Table.grid(padding=(0, 2, 0, 0), collapse_padding=True)
    table.add_column(width=0)
    for justify, width in columns:
        table.add_column(
            justify="right" if justify == "right" else "left",
            width=width,
            no_wrap=width is not None,
            overflow="crop" if width is not None else "fold",
        )
    return table


def needs_ascii(encoding: str | None) -> bool:
    """Say whether an output encoding cannot carry the characters of the report."""
    glyphs = UNICODE
    try:
        f"{glyphs.working}{glyphs.spinning}{glyphs.sliver}{glyphs.ellipsis}{glyphs.bullet}".encode(
            encoding or "ascii"
        )
    except (UnicodeEncodeError, LookupError):
        return True
    # Names of nodes and files may hold anything, so a code page that only knows the bars is no use.
    return not (encoding or "").lower().replace("-", "").startswith("utf")
