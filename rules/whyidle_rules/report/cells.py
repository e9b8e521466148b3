"""Text measured in terminal cells: a CJK character takes two, a combining mark none."""

from __future__ import annotations

from typing import Literal

from rich.cells import cell_len, get_character_cell_size

# Characters without a width of their own must not pile up without bound in one cell.
_CHARS_PER_CELL = 4


def cut(
    text: str, cells: int, *, ellipsis: str = "…", keep: Literal["middle", "end"] = "middle"
) -> str:
    """Shorten cleaned `text` to at most `cells` terminal cells.

    "middle" keeps both ends (names differ in either), "end" keeps the last part (paths).
    """
    if cell_len(text) <= cells and len(text) <= _CHARS_PER_CELL * cells:
        return text
    room = max(cells - cell_len(ellipsis), 0)
    head = 0 if keep == "end" else (room + 1) // 2
    return _take(text, head) + ellipsis + _take(text[::-1], room - head)[::-1]


def _take(text: str, cells: int) -> str:
    """Return the longest beginning of `text` that fits into `cells`."""
    used = 0
    for index, char in enumerate(text):
        used += get_character_cell_size(char)
        if used > cells or index >= _CHARS_PER_CELL * cells:
            return text[:index]
    return text
