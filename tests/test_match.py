from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from trace_make import ALLREDUCE, US, Event, collective, device
from whyidle_rules.trace.comm import CommKernels
from whyidle_rules.trace.match import Matched, match

SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
BROADCAST = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

# What one rank recorded of a collective: its number, when it came and left, in microseconds.
Part = tuple[int, float, float]
# Nanoseconds that were waited, by collective and rank.
Told = dict[int, dict[int, int]]


def comm(parts: Sequence[Part], *, numbered: bool = False, **how: Any) -> CommKernels | None:
    how = {"group": "g" if numbered else None, **how}
    events: list[Event] = [
        collective(came, left - came, number if numbered else None, **how)
        for number, came, left in parts
    ]
    return device(events).comm


def told(found: Matched, ranks: Sequence[Sequence[Part]]) -> Told:
    """Return waits by collective and rank; every row must be of one collective."""
    out: Told = {}
    for instance, rows in enumerate(found.rows.tolist()):
        numbers = {
            ranks[gpu][row][0] for gpu, row in zip(found.gpus, rows, strict=True) if row >= 0
        }
        assert len(numbers) == 1, (instance, numbers)
        (number,) = numbers
        assert number not in out
        waits = found.wait_ns[instance].tolist()
        out[number] = {
            gpu: waits[place] for place, gpu in enumerate(found.gpus) if rows[place] >= 0
        }
        late = int(found.late[instance])
        if late >= 0:
            assert waits[late] == 0
    return out


def expected(ranks: Sequence[Sequence[Part]]) -> Told:
    """Return waits as the arrivals make them, of collectives that two ranks or more recorded."""
    arrivals: dict[int, dict[int, float]] = {}
    for rank, parts in enumerate(ranks):
        for number, came, _ in parts:
            arrivals.setdefault(number, {})[rank] = came
    out = {}
    for number, came_by in arrivals.items():
        if len(came_by) > 1:
            last = max(came_by.values())
            out[number] = {rank: round((last - came) * US) for rank, came in came_by.items()}
    return out


def job(seed: int, ranks: int, count: int = 40, spread: int = 1000) -> list[list[Part]]:
    """Return parts of ranks that come at random, about two spreads apart, and leave together."""
    chance = random.Random(seed)
    out: list[list[Part]] = [[] for _ in range(ranks)]
    for number in range(count):
        base = number * 2.0 * (1000 + spread) + chance.randrange(spread)
        came = [base + chance.randrange(900) for _ in range(ranks)]
        left = max(came) + 40
        for rank in range(ranks):
            out[rank].append((number, came[rank], left))
    return out


@pytest.mark.parametrize("numbered", [True, False])
def test_the_last_to_come_waits_for_nobody(numbered: bool) -> None:
    ranks = [[(1, 100.0, 190.0)], [(1, 130.0, 190.0)], [(1, 150.0, 190.0)]]
    (found,) = match([comm(parts, numbered=numbered, ranks=(0, 1, 2)) for parts in ranks], 3)
    assert found.gpus == [0, 1, 2]
    assert found.wait_ns.tolist() == [[50 * US, 20 * US, 0]]
    assert found.late.tolist() == [2]
    assert found.complete.tolist() == [True]


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("offset_us", [0, 1_234_567])
def test_profiles_that_begin_apart(numbered: bool, shift: int, offset_us: int) -> None:
    whole = job(1, 3)
    ranks = [
        whole[0],
        whole[1][shift:],
        [(n, came + offset_us, left + offset_us) for n, came, left in whole[2][: 40 - shift]],
    ]
    (found,) = match([comm(parts, numbered=numbered, ranks=(0, 1, 2)) for parts in ranks], 3)
    truth = expected([whole[0], whole[1][shift:], whole[2][: 40 - shift]])
    if numbered or shift == 0:
        assert told(found, ranks) == truth
    else:
        # Of two ranks that both miss a collective, nobody knows; the others are all there.
        assert told(found, ranks).items() <= truth.items()
        assert len(told(found, ranks)) >= 40 - shift
    assert found.complete.sum() == 40 - 2 * shift


@pytest.mark.parametrize("lost", [5, 20, 34])
def test_a_lost_record_never_makes_wrong_pairs(lost: int) -> None:
    ranks = job(2, 2)
    del ranks[1][lost]
    (by_number,) = match([comm(parts, numbered=True) for parts in ranks], 2)
    assert told(by_number, ranks) == expected(ranks)
    (by_order,) = match([comm(parts) for parts in ranks], 2)
    found = told(by_order, ranks)
    assert found.items() <= expected(ranks).items()
    assert len(found) >= max(lost, 39 - lost)


def test_back_to_back_exchanges_with_one_grid_are_told_apart_by_order() -> None:
    # Ten at a time without a gap: the end of each is nearer to its neighbour than to a step.
    ranks: list[list[Part]] = [[], []]
    for step in range(6):
        begin = step * 20_000.0
        for inner in range(10):
            number = step * 10 + inner
            late = 150 if inner == 0 else 0
            left = begin + late + (inner + 1) * 200 + (step * 7 + inner * 13) % 17
            for rank in (0, 1):
                last = ranks[rank][-1][2] if inner else begin + late * rank
                ranks[rank].append((number, last, left))
    kernels = [comm(parts, name=SEND_RECV) for parts in ranks]
    (found,) = match(kernels, 2)
    assert told(found, ranks) == expected(ranks)
    assert {gpus[0] for gpus in told(found, ranks).values()} == {0, 150 * US}


def test_two_groups_on_one_stream_number_are_not_mixed() -> None:
    first, second = job(3, 2, spread=5000), job(4, 2, spread=5000)
    ranks = [*first, *second]
    found = match([comm(parts) for parts in ranks], 4)
    assert sorted(group.gpus for group in found) == [[0, 1], [2, 3]]
    waits = {tuple(group.gpus): told(group, ranks) for group in found}
    assert waits[0, 1] == expected(first)
    assert waits[2, 3] == {
        number: {rank + 2: wait for rank, wait in by_rank.items()}
        for number, by_rank in expected(second).items()
    }
    # Which of the four ranks make up a group is not known, so nobody can say that it is whole.
    assert not any(group.complete.any() for group in found)


def test_groups_of_one_name_and_other_ranks_are_two() -> None:
    first, second = job(3, 2), job(4, 2)
    kernels = [
        *(comm(parts, numbered=True, group="tp", ranks=(0, 1)) for parts in first),
        *(comm(parts, numbered=True, group="tp", ranks=(2, 3)) for parts in second),
    ]
    found = match(kernels, 4)
    assert sorted(group.gpus for group in found) == [[0, 1], [2, 3]]
    assert all(group.complete.all() for group in found)


def test_a_group_with_a_rank_missing_is_not_complete() -> None:
    ranks = job(5, 2)
    (found,) = match([comm(parts, numbered=True, ranks=(0, 1, 2, 3)) for parts in ranks], None)
    assert not found.complete.any()
    assert told(found, ranks) == expected(ranks)
    (unnamed,) = match([comm(parts) for parts in ranks], 4)
    assert not unnamed.complete.any()
    (alone,) = match([comm(parts) for parts in ranks], None)
    assert alone.complete.all()


def test_an_instance_with_a_rank_missing_is_not_complete() -> None:
    ranks = job(6, 3)
    del ranks[2][7]
    (found,) = match([comm(parts, numbered=True, ranks=(0, 1, 2)) for parts in ranks], 3)
    whole = dict(zip(told(found, ranks), found.complete.tolist(), strict=True))
    assert [number for number, complete in whole.items() if not complete] == [7]


@pytest.mark.parametrize(
    ("operation", "name"), [("broadcast", BROADCAST), ("", BROADCAST), ("gather", SEND_RECV)]
)
def test_no_wait_is_known_where_ranks_do_not_leave_together(operation: str, name: str) -> None:
    ranks = [[(1, 100.0, 190.0)], [(1, 130.0, 190.0)]]
    how = {"operation": operation, "name": name}
    (found,) = match([comm(parts, numbered=True, **how) for parts in ranks], 2)
    assert found.wait_ns.tolist() == [[-1, -1]]
    assert found.late.tolist() == [-1]


def test_sends_are_not_matched() -> None:
    ranks = [[(1, 100.0, 190.0)], [(1, 130.0, 190.0)]]
    kernels = [
        comm(parts, numbered=True, operation=operation, name=SEND_RECV)
        for parts, operation in zip(ranks, ("send", "recv"), strict=True)
    ]
    assert match(kernels, 2) == []


def test_ranks_that_do_not_take_part() -> None:
    ranks = job(7, 3)
    kernels = [comm(parts, numbered=True, ranks=(0, 1, 2)) for parts in ranks]
    (found,) = match([kernels[0], None, kernels[2]], 3)
    assert found.gpus == [0, 2]
    assert not found.complete.any()
    assert match([kernels[0], None, None], 3) == []
    assert match([], None) == []


def test_a_number_given_twice_is_not_trusted() -> None:
    ranks = job(8, 2)
    twice = [[(number // 2, came, left) for number, came, left in parts] for parts in ranks]
    (found,) = match([comm(parts, numbered=True) for parts in twice], 2)
    assert told(found, ranks) == expected(ranks)


def test_other_kernels_are_another_queue() -> None:
    ranks = job(9, 2, count=12)
    kernels = [comm(ranks[0], name=ALLREDUCE), comm(ranks[1], name=SEND_RECV)]
    assert match(kernels, 2) == []
