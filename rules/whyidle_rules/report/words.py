"""Words and numbers of the report: durations, ranks, lists, and text that may be hostile.

Names of nodes, files and kernels come out of recordings that anybody may have written, so nothing
of them reaches a terminal before `clean` has seen it.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Collection, Iterable, Sequence

from whyidle.causes import BY_SLUG

# A terminal shows a few thousand characters at once; a longer string is damage or an attack.
MAX_CHARS = 4_000
# Letters of living scripts carry at most two marks; longer stacks paint over neighbouring lines.
_MAX_MARKS = 2
_MARKS = frozenset({"Mn", "Me", "Mc"})
# Control, format (bidirectional overrides), surrogate, private and unassigned code points.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})

_DURATIONS: tuple[tuple[str, float, float], ...] = (
    ("ms", 1e-3, 1.0),
    ("s", 1.0, 120.0),
    ("min", 60.0, 7200.0),
    ("h", 3600.0, math.inf),
)
_GPU_TIMES: tuple[tuple[str, float, float], ...] = (
    ("GPU-seconds", 1.0, 600.0),
    ("GPU-minutes", 60.0, 7200.0),
    ("GPU-hours", 3600.0, math.inf),
)
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

# Pieces of a rank list that still read at a glance; more are counted instead.
MAX_RANK_PIECES = 5


def clean(text: str, *, ascii_only: bool = False) -> str:
    """Return `text` on one line with everything that could steer a terminal written as an escape.

    White space of any kind becomes one space, control and format characters become `\\x1b` or
    `\\u202e`, stacked marks are dropped. With `ascii_only` so is everything outside ASCII escaped.
    Cleaning twice changes nothing.
    """
    out: list[str] = []
    marks = 0
    for char in text[:MAX_CHARS]:
        category = unicodedata.category(char)
        marks = marks + 1 if category in _MARKS else 0
        if marks > _MAX_MARKS or _is_selector(char):
            continue
        if char.isspace():
            out.append(" ")
        elif category in _UNSAFE or (ascii_only and not char.isascii()):
            out.append(_escape(char))
        else:
            out.append(char)
    if len(text) > MAX_CHARS:
        out.append("...")
    return " ".join("".join(out).split())


def _escape(char: str) -> str:
    if char.isascii():
        return f"\\x{ord(char):02x}"
    return char.encode("ascii", "backslashreplace").decode("ascii")


def _is_selector(char: str) -> bool:
    """Variation selectors change the width of the character before them on some terminals."""
    return "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"


def shorten(text: str, chars: int) -> str:
    """Shorten cleaned `text` to `chars` characters; both ends stay, for names differ in either."""
    if len(text) <= chars:
        return text
    tail = (chars - 3) // 2
    return f"{text[: chars - 3 - tail]}...{text[-tail:]}"


def title(cause: str) -> str:
    """Return the title of a cause; a cause that this version does not know keeps its slug."""
    known = BY_SLUG.get(cause)
    return known.title if known else clean(cause).replace("_", " ")


def title_inside(cause: str) -> str:
    """Return the title for use inside a sentence: "host pause", but "CPU preprocessing"."""
    words = title(cause)
    return words if words[1:2].isupper() else words[:1].lower() + words[1:]


def clause(cause: str, subcause: str) -> str:
    """Return the clause after "because"; an unknown pair keeps its slug."""
    known = BY_SLUG.get(cause)
    if known and subcause in known.subcauses:
        return known.subcauses[subcause]
    return clean(subcause).replace("_", " ") or title_inside(cause)


def as_number(value: object) -> float | None:
    """Return a finite number as a float; None for anything else, truth values included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def figure(value: float) -> str:
    """Write a number with three significant digits and thousands separators."""
    # Rounding comes first: it may carry into the next power of ten, or past the last one.
    rounded = float(f"{value:.3g}")
    if not math.isfinite(rounded):
        return "unknown"
    if rounded == 0:
        return "0"
    if abs(rounded) < 0.001:
        return "<0.001" if rounded > 0 else ">-0.001"
    digits = 2 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{min(max(digits, 0), 3)}f}"


def duration(seconds: float) -> str:
    """Write a time in ms, s, min or h with three significant digits."""
    return _scaled(seconds, _DURATIONS)


def gpu_time(seconds: float) -> str:
    """Write GPU time, such as "9.12 GPU-seconds" or "3.40 GPU-hours"."""
    return _scaled(seconds, _GPU_TIMES)


def _scaled(seconds: float, units: Sequence[tuple[str, float, float]]) -> str:
    # Rounding first keeps 0.9997 s from reading "1,000 ms".
    rounded = float(f"{seconds:.3g}")
    if not math.isfinite(rounded):
        return "unknown"
    name, size, _ = next(unit for unit in units if abs(rounded) < unit[2])
    if rounded == 0:
        name = next(unit[0] for unit in units if unit[1] == 1.0)
    return f"{figure(rounded / size)} {name}"


def money(amount: float) -> str:
    """Write an amount of whatever currency the price was given in: 0.42, 1,280, 3.40 million."""
    if not math.isfinite(amount):
        return "an unknown amount"
    if abs(amount) >= 1e6:
        return f"{amount / 1e6:,.2f} million"
    if abs(amount) >= 1000:
        return f"{amount:,.0f}"
    return f"{amount:,.2f}" if abs(amount) >= 0.01 or amount == 0 else "less than 0.01"


def size(count: float) -> str:
    """Write a number of bytes in binary units."""
    power = 0
    while abs(count) >= 1024 and power < len(_BYTES) - 1:
        count /= 1024
        power += 1
    return f"{figure(count)} {_BYTES[power]}"


def percent(ratio: float) -> str:
    """Write a ratio as a percentage: whole from 10 %, one digit below that."""
    value = ratio * 100
    if not math.isfinite(value):
        return "unknown"
    if 0 < value < 0.1:
        return "<0.1 %"
    if 99.5 <= value < 100:
        return ">99 %"
    return f"{value:.1f} %" if 0 < round(value, 1) < 10 else f"{value:,.0f} %"


def plural(count: int, singular: str, several: str | None = None) -> str:
    """Return "1 GPU", "8 GPUs"; `several` for words that do not just take an s."""
    return f"{count:,} {singular if count == 1 else several or singular + 's'}"


def listing(items: Sequence[str], *, last: str = " and ") -> str:
    """Join words as in a sentence: "a, b and c"."""
    if len(items) < 2:
        return "".join(items)
    return ", ".join(items[:-1]) + last + items[-1]


def spans(ranks: Iterable[int]) -> list[str]:
    """Compress ranks to pieces: three or more in a row become "0-2"."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    pieces: list[str] = []
    for run in runs:
        if len(run) > 2:
            pieces.append(f"{run[0]}-{run[-1]}")
        else:
            pieces.extend(str(rank) for rank in run)
    return pieces


def rank_list(ranks: Collection[int]) -> str:
    """Return "rank 2", "ranks 0, 1 and 3", "ranks 0-6"; many scattered ones are only counted."""
    pieces = spans(ranks)
    if len(pieces) > MAX_RANK_PIECES:
        return plural(len(set(ranks)), "rank")
    word = "rank" if len(set(ranks)) == 1 else "ranks"
    return f"{word} {listing(pieces)}"
