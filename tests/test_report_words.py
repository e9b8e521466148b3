"""Words and numbers of the report."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from whyidle_rules.diagnosis import Totals
from whyidle_rules.report import words
from whyidle_rules.report.cells import cut
from whyidle_rules.report.pen import needs_ascii
from whyidle_rules.report.rounding import apportion, figures

positive = st.floats(min_value=0, max_value=1e9, allow_nan=False)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1e-9, "<0.001 ms"),
        (0.000_123, "0.123 ms"),
        (0.287, "287 ms"),
        (0.9994, "999 ms"),
        (0.9997, "1.00 s"),
        (3.0354, "3.04 s"),
        (119.4, "119 s"),
        (119.6, "2.00 min"),
        (3600.0, "60.0 min"),
        (7200.0, "2.00 h"),
        (3.6e7, "10,000 h"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
        (1.797e308, "unknown"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 GPU-seconds"),
        (0.012, "0.012 GPU-seconds"),
        (9.105, "9.11 GPU-seconds"),
        (168.0, "168 GPU-seconds"),
        (600.0, "10.0 GPU-minutes"),
        (69_000.0, "19.2 GPU-hours"),
    ],
)
def test_gpu_time(seconds: float, text: str) -> None:
    assert words.gpu_time(seconds) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.0, "0 %"),
        (0.0004, "<0.1 %"),
        (0.0123, "1.2 %"),
        (0.0996, "10 %"),
        (0.126, "13 %"),
        (0.994, "99 %"),
        (0.9999, ">99 %"),
        (1.0, "100 %"),
        (math.nan, "unknown"),
    ],
)
def test_percent(ratio: float, text: str) -> None:
    assert words.percent(ratio) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([3, 0, 1], "ranks 0, 1 and 3"),
        ([0, 1], "ranks 0 and 1"),
        (range(7), "ranks 0-6"),
        ([0, 1, 2, 5], "ranks 0-2 and 5"),
        ([5, 5], "rank 5"),
        (range(0, 64, 2), "32 ranks"),
    ],
)
def test_rank_list(ranks: list[int], text: str) -> None:
    assert words.rank_list(ranks) == text


@pytest.mark.parametrize(("count", "text"), [(1, "1 GPU"), (0, "0 GPUs"), (1024, "1,024 GPUs")])
def test_plural(count: int, text: str) -> None:
    assert words.plural(count, "GPU") == text


def test_size_is_in_binary_units() -> None:
    assert words.size(512) == "512 B"
    assert words.size(9_876_543_210) == "9.20 GiB"
    assert words.size(2.0**80) == "1,070,000,000 PiB"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain name-1.2", "plain name-1.2"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b2J", "\\x9b2J"),
        ("a\r\nb\tc", "a b c"),
        ("a\u2028b\u00a0c", "a b c"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("bad\udc80byte", "bad\\udc80byte"),
        ("private\ue000use", "private\\ue000use"),
        ("nul\x00", "nul\\x00"),
        ("z" + "\u0301" * 9, "z\u0301\u0301"),
        ("star\ufe0f", "star"),
        ("北京", "北京"),
        ("[red]x[/red]", "[red]x[/red]"),
    ],
)
def test_clean(text: str, safe: str) -> None:
    assert words.clean(text) == safe


def test_clean_writes_everything_in_ascii_where_asked() -> None:
    assert words.clean("北京 ü", ascii_only=True) == "\\u5317\\u4eac \\xfc"


def test_clean_bounds_the_length() -> None:
    assert len(words.clean("x" * 10_000_000)) == words.MAX_CHARS + 3


@given(st.text())
def test_clean_text_is_one_printable_line_and_stays_as_it_is(text: str) -> None:
    safe = words.clean(text)
    assert not any(unicodedata.category(char) in {"Cc", "Cf", "Cs", "Co"} for char in safe)
    assert words.clean(safe) == safe
    assert words.clean(text, ascii_only=True).isascii()


@given(st.text(), st.integers(min_value=3, max_value=40))
def test_cut_fits(text: str, cells: int) -> None:
    assert cell_len(cut(words.clean(text), cells)) <= cells
    assert cell_len(cut(words.clean(text), cells, keep="end")) <= cells


def test_cut_keeps_what_tells_names_apart() -> None:
    assert cut("gpu-node-rack07-slot12-blue", 15) == "gpu-nod…12-blue"
    assert cut("/data/run/rank-0.json.gz", 15, keep="end") == "…rank-0.json.gz"
    assert cut("北京北京北京", 7) == "北…京"


def test_unknown_causes_keep_their_own_words() -> None:
    assert words.title("from_the_future") == "from the future"
    assert words.clause("storage", "tape_read") == "tape read"
    assert words.title_inside("cpu_preprocessing") == "CPU preprocessing"
    assert words.title_inside("host_pause") == "host pause"


@given(st.lists(positive, min_size=1, max_size=30), st.integers(min_value=0, max_value=10_000))
def test_apportioned_parts_sum_and_stay_next_to_their_value(parts: list[float], total: int) -> None:
    units = apportion(parts, total)
    whole = math.fsum(parts)
    if whole < 1e-300:
        assert units == [0] * len(parts)
        return
    assert sum(units) == total
    for unit, part in zip(units, parts, strict=True):
        assert abs(unit - part / whole * total) < 1 + 1e-6


def _number(text: str) -> float:
    """Read a printed figure back; "<1 %" was rounded to nothing, ">99 %" to everything."""
    number = text.split(" ")[0].replace(",", "")
    if number.startswith(">"):
        return 100.0
    return 0.0 if number.startswith("<") else float(number)


@given(
    st.lists(positive, min_size=1, max_size=30),
    st.floats(min_value=0, max_value=1e9),
    st.integers(min_value=0, max_value=10),
)
def test_printed_parts_add_up_to_the_printed_total(
    parts: list[float], working_s: float, keep: int
) -> None:
    idle_s = math.fsum(parts)
    gpu_s = idle_s + working_s
    if idle_s < 1e-6:
        return
    totals = Totals(gpu_s=gpu_s, working_s=working_s, empty_s=idle_s, spinning_s=0.0, idle_s=idle_s)
    digits = figures(totals)
    for rows in (digits.parts(parts), digits.parts(parts, keep=keep)):
        total = digits.idle()
        assert math.isclose(sum(_number(row.time) for row in rows), _number(total.time))
        shares = sum(_number(row.share) for row in rows)
        assert math.isclose(shares, _number(total.share), abs_tol=1e-9)
    assert digits.working + digits.empty + digits.spinning == 1000


@pytest.mark.parametrize(
    ("encoding", "needed"),
    [
        ("utf-8", False),
        ("UTF8", False),
        ("utf-16", False),
        ("ascii", True),
        ("latin-1", True),
        ("cp437", True),
        ("nonsense", True),
        (None, True),
    ],
)
def test_needs_ascii(encoding: str | None, needed: bool) -> None:
    assert needs_ascii(encoding) is needed
