"""The table of clocks: pairing, error bound, refusal."""

from __future__ import annotations

import pytest

from trees import gather
from whyidle.clock import SystemClock, VirtualClock
from whyidle.collect.clocks import CLOCKS, parse
from whyidle.host import LiveHost
from whyidle.live import live_host


def test_a_reading() -> None:
    row = parse((10, 30, 1_700_000_000_000_000_000, 2, 16_000, 5_000, True))
    assert (row.mono_ns, row.boot_ns, row.wall_ns) == (10, 30, 1_700_000_000_000_000_000)
    assert (row.bracket_ns, row.wall_error_ns, row.wall_estimate_ns) == (2, 16_000, 5_000)
    assert row.synchronised is True


def test_where_adjtimex_is_refused_the_error_is_unknown() -> None:
    row = parse((1, 2, 3, 4, None, None, None))
    assert row.wall_error_ns is row.wall_estimate_ns is row.synchronised is None


@pytest.mark.parametrize(
    "answer", [None, (1, 2), (1, 2, 3, 4, "x", 1, True), (None, 2, 3, 4, 5, 6, True), 7]
)
def test_what_is_no_reading_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="clock"):
        parse(answer)  # type: ignore[arg-type]


def test_a_journal_gives_lists() -> None:
    host = LiveHost("/nonexistent", VirtualClock(), askers={"clock": lambda: (1, 2, 3, 4, 5, 6, 0)})
    rows, _ = gather(CLOCKS.make(), host)
    assert rows[0].synchronised is False


def test_live_readings_agree_with_the_clocks() -> None:
    clock = SystemClock()
    host = live_host("/", clock)
    collect = CLOCKS.make()
    offsets = []
    for _ in range(20):
        row = gather(collect, host)[0][0]
        assert 0 <= row.bracket_ns < 100_000_000
        assert abs(row.mono_ns - clock.mono_ns()) < 1_000_000_000
        assert row.boot_ns >= row.mono_ns - row.bracket_ns
        offsets.append((row.bracket_ns, row.wall_ns - row.mono_ns))
    host.close()
    # The best two pairings of twenty agree within their own brackets.
    (bracket_a, a), (bracket_b, b) = sorted(offsets)[:2]
    assert abs(a - b) <= bracket_a + bracket_b + 1_000_000
