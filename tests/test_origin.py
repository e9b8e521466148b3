"""The excess rule by hand: who made whom wait, and by what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from trace_make import US, Event, call, collective, kernel, operator, span, trace_file
from whyidle_rules import database
from whyidle_rules.trace.fill import fill
from whyidle_rules.trace.gaps import Piece
from whyidle_rules.trace.origin import Charged, roots_of_waits
from whyidle_rules.trace.run import TraceRun, assemble

# Microseconds by (rank of origin, cause).
Roots = dict[tuple[int, str], float]

LOADING = "storage"
SILENT = "host_pause"
TRANSFER = "collective"
SLOW = "slow_compute"
UNKNOWN = "unattributed"


class Rank:
    """A rank that does one thing after the other; times in microseconds."""

    def __init__(self, index: int, begin: float = 0) -> None:
        self.index = index
        self.now = begin
        self.events: list[Event] = [operator(begin, 0.5)]
        self._launches = 0

    def _launch(self) -> int:
        self._launches += 1
        self.events.append(call(self.now, 0.5, self._launches))
        return self._launches

    def compute(self, length: float) -> None:
        self.events.append(kernel(self.now, length, self._launch()))
        self.now += length

    def load(self, length: float) -> None:
        self.events.append(span(self.now, length, "next_batch"))
        self.now += length

    def pause(self, length: float) -> None:
        self.now += length

    def take_part(self, until: float, number: int, group: str, ranks: Sequence[int]) -> None:
        self.events.append(
            collective(
                self.now,
                until - self.now,
                number,
                group=group,
                ranks=ranks,
                launch=self._launch(),
            )
        )


def meet(
    *ranks: Rank,
    number: int,
    group: str = "g",
    transfer: float = 10,
    beside: Mapping[int, float] | None = None,
) -> None:
    """Let ranks meet in a collective; `beside` is what a rank computes while it is in there."""
    until = max(rank.now for rank in ranks) + transfer
    for rank in ranks:
        rank.take_part(until, number, group, [one.index for one in ranks])
        if beside and rank.index in beside:
            rank.compute(beside[rank.index])
        assert rank.now <= until
        rank.now = until


def run_of(*ranks: Rank) -> TraceRun:
    return assemble([trace_file(rank.index, rank.events, len(ranks)) for rank in ranks])


def exposed_us(run: TraceRun, place: int) -> dict[int, float]:
    spin = run.gpus[place].spin
    out: Counter[int] = Counter()
    for (begin, end), kind, row in zip(
        spin.spans.tolist(), spin.kinds.tolist(), spin.kernel.tolist(), strict=True
    ):
        if kind == Piece.WAIT:
            out[row] += end - begin
    return {row: ns / US for row, ns in out.items()}


def roots(*ranks: Rank) -> list[Roots]:
    """Return what the waits of each rank arose from."""
    run = run_of(*ranks)
    with database.memory() as con:
        filled = fill(con, run)
        rows = con.execute(
            "SELECT window_id, data_wait_s, host_silent_s, coll_transfer_s FROM trace_evidence"
        ).fetchall()
    charges = {
        window: [
            Charged(LOADING, "nvme_read", round((loading or 0) * 1e9)),
            Charged(SILENT, "main_thread", round((silent or 0) * 1e9)),
            Charged(TRANSFER, "transfer", round((transfer or 0) * 1e9)),
        ]
        for window, loading, silent, transfer in rows
    }
    out: list[Roots] = []
    for place, by_kernel in enumerate(roots_of_waits(run, filled, charges)):
        waited = exposed_us(run, place)
        assert by_kernel.keys() == waited.keys()
        total: Roots = {}
        for row, found in by_kernel.items():
            assert sum(found.values()) == pytest.approx(waited[row] * US)
            for key, ns in found.items():
                assert ns >= 0
                origin = run.gpus[key.gpu].rank
                assert origin is not None
                total[origin, key.cause] = total.get((origin, key.cause), 0.0) + ns / US
        out.append({key: us for key, us in total.items() if us > 1e-6})
    return out


def pair() -> tuple[Rank, Rank]:
    """Return two ranks that have met."""
    a, b = Rank(0), Rank(1)
    for rank in (a, b):
        rank.compute(100)
    meet(a, b, number=1)
    return a, b


def test_a_stall_at_the_start_of_a_step_is_what_the_wait_at_its_end_arose_from() -> None:
    a, b = pair()
    b.load(300)
    for rank in (a, b):
        rank.compute(400)
    meet(a, b, number=2)
    # While `a` waits, `b` does nothing but compute.
    assert roots(a, b) == [{(1, LOADING): pytest.approx(300)}, {}]


def test_who_computes_longer_is_slow() -> None:
    a, b = pair()
    a.compute(200)
    b.compute(500)
    meet(a, b, number=2)
    assert roots(a, b) == [{(1, SLOW): pytest.approx(300)}, {}]


def test_a_wait_is_shared_by_what_the_late_rank_did_more_of() -> None:
    a, b = pair()
    a.load(60)
    a.pause(50)
    a.compute(200)
    b.load(160)
    b.pause(50)
    b.compute(400)
    meet(a, b, number=2)
    assert roots(a, b) == [
        {(1, LOADING): pytest.approx(100), (1, SLOW): pytest.approx(200)},
        {},
    ]


def test_what_the_waiting_rank_did_more_of_makes_the_wait_shorter_and_no_less_shared() -> None:
    a, b = pair()
    a.pause(150)
    a.compute(100)
    b.load(300)
    b.compute(250)
    meet(a, b, number=2)
    # 450 us more, of which 300 in the wait: two thirds of each.
    assert roots(a, b) == [
        {(1, LOADING): pytest.approx(200), (1, SLOW): pytest.approx(100)},
        {},
    ]


def test_computing_ahead_in_a_wait_is_charged_to_what_made_it_possible() -> None:
    a, b = pair()
    a.compute(50)
    b.load(300)
    b.compute(50)
    meet(a, b, number=2, beside={0: 200})
    b.compute(200)  # what `a` has done already
    meet(a, b, number=3)
    assert roots(a, b) == [{(1, LOADING): pytest.approx(100 + 200)}, {}]


def test_computing_more_than_the_other_was_ahead_is_slow() -> None:
    a, b = pair()
    a.compute(50)
    b.load(300)
    b.compute(50)
    meet(a, b, number=2, beside={0: 200})
    b.compute(260)
    meet(a, b, number=3)
    assert roots(a, b) == [
        {(1, LOADING): pytest.approx(100 + 200), (1, SLOW): pytest.approx(60)},
        {},
    ]


def test_what_was_ahead_is_forgotten_once_the_other_has_come_first() -> None:
    a, b = pair()
    a.compute(50)
    b.load(300)
    b.compute(50)
    meet(a, b, number=2, beside={0: 200})
    a.pause(500)
    b.compute(200)
    meet(a, b, number=3)  # `b` waits: it has caught up
    b.compute(70)
    meet(a, b, number=4)
    found = roots(a, b)
    assert found[0] == {(1, LOADING): pytest.approx(100), (1, SLOW): pytest.approx(70)}
    assert found[1] == {(0, SILENT): pytest.approx(300)}


def test_what_was_ahead_of_a_rank_is_forgotten_once_that_one_waits_longer() -> None:
    a, b, c = Rank(0), Rank(1), Rank(2)
    for rank in (a, b, c):
        rank.compute(50)
    meet(a, b, c, number=1)
    b.load(300)
    for rank in (a, b):
        rank.compute(50)
    c.load(300)
    c.compute(50)
    meet(a, b, number=1, group="ab", beside={0: 200})
    b.compute(200)
    a.pause(500)
    c.compute(900)
    meet(a, b, c, number=2)  # `b` has caught up, and came before `a`
    b.compute(70)
    meet(a, b, number=2, group="ab")
    # 100 in the first wait, 450 for `c`, and nothing that `b` does now is the loader's fault.
    found = roots(a, b, c)[0]
    assert found[1, SLOW] == pytest.approx(70)
    assert found[1, LOADING] == pytest.approx(100)


def test_a_wait_is_counted_from_the_last_meeting_of_any_group() -> None:
    a, b = pair()
    b.load(300)
    for rank in (a, b):
        rank.compute(50)
    meet(a, b, number=1, group="h")
    for rank in (a, b):
        rank.compute(50)
    b.compute(40)
    meet(a, b, number=2, group="g")
    b.pause(30)
    for rank in (a, b):
        rank.compute(50)
    meet(a, b, number=2, group="h")
    assert roots(a, b) == [
        {
            (1, LOADING): pytest.approx(300),
            (1, SLOW): pytest.approx(40),
            (1, SILENT): pytest.approx(30),
        },
        {},
    ]


def test_chains_walk_back_over_two_process_groups() -> None:
    a, b, c = Rank(0), Rank(1), Rank(2)
    for rank in (a, b, c):
        rank.compute(100)
    meet(a, b, number=1, group="ab")
    meet(b, c, number=1, group="bc")
    c.load(300)
    for rank in (a, b, c):
        rank.compute(50)
    meet(b, c, number=2, group="bc")
    meet(a, b, number=2, group="ab")
    found = roots(a, b, c)
    assert found[1] == {(2, LOADING): pytest.approx(300)}
    # `b` moved data with `c` twice, which `a` had no part in.
    assert found[0] == {(2, LOADING): pytest.approx(300), (1, TRANSFER): pytest.approx(20)}
    assert found[2] == {(1, TRANSFER): pytest.approx(10)}  # in the first one, for `ab`


def test_what_both_waited_for_is_no_excess_of_one() -> None:
    a, b, c = Rank(0), Rank(1), Rank(2)
    for rank in (a, b, c):
        rank.compute(100)
    meet(a, b, c, number=1, group="abc")
    c.load(300)
    for rank in (a, b, c):
        rank.compute(50)
    meet(b, c, number=1, group="bc", transfer=0)
    meet(a, c, number=1, group="ac", transfer=0)
    b.compute(100)
    meet(a, b, number=1, group="ab")
    found = roots(a, b, c)
    assert found[1] == {(2, LOADING): pytest.approx(300)}
    assert found[0] == {(2, LOADING): pytest.approx(300), (1, SLOW): pytest.approx(100)}


def test_before_the_first_meeting_the_host_is_asked() -> None:
    a, b = Rank(0), Rank(1)
    b.load(300)
    for rank in (a, b):
        rank.compute(100)
    meet(a, b, number=1)
    assert roots(a, b) == [{(1, LOADING): pytest.approx(300)}, {}]


def test_a_profile_that_begins_too_late_leaves_the_first_wait_unattributed() -> None:
    a, b = Rank(0), Rank(1, begin=300)
    for rank in (a, b):
        rank.compute(100)
    meet(a, b, number=1)
    assert roots(a, b) == [{(1, UNKNOWN): pytest.approx(300)}, {}]


def test_what_falls_short_before_the_first_meeting_is_unattributed() -> None:
    a, b = Rank(0), Rank(1, begin=200)
    a.compute(100)
    b.load(60)
    b.compute(140)
    meet(a, b, number=1)
    assert roots(a, b) == [
        {
            (1, LOADING): pytest.approx(60),
            (1, SLOW): pytest.approx(40),
            (1, UNKNOWN): pytest.approx(200),
        },
        {},
    ]


def test_nothing_matched_is_nothing_charged() -> None:
    a = Rank(0)
    a.compute(100)
    meet(a, number=1)
    run = run_of(a)
    with database.memory() as con:
        assert roots_of_waits(run, fill(con, run), {}) == [{}]
