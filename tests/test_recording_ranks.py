"""Ranks beside each other: waiting, transfer, a rank that is gone, stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import duckdb
import pytest

from recording_kit import make_row
from recording_rows import (
    BOOT,
    HERE,
    Machine,
    Rows,
    clocks,
    connect,
    gpu,
    holds,
    listed,
    s,
    start_of,
    windows,
)
from whyidle.clock import NS_PER_S
from whyidle.schema import (
    NetLink,
    NvLink,
    Probe,
    ProbeInfo,
    ProcessInfo,
    RdmaInfo,
    RdmaPort,
    RdmaTraffic,
    RunInfo,
)
from whyidle.table import Row, replaced, table_of
from whyidle_rules.diagnosis import Diagnosis
from whyidle_rules.recording import engine
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

SECONDS = 30
COMPUTES = (1.0, 0.95)  # resident, share of SMs
POLLS = (1.0, 0.1)
EMPTY = (0.0, 0.0)
Second = Sequence[tuple[float, float]]  # the eight windows of a second


@pytest.fixture(scope="module")
def rules() -> Sequence[Rule]:
    return load_rules()


def uuid_of(rank: int) -> str:
    return f"GPU-{rank}"


def rank_rows(
    rank: int,
    second: Second,
    *then: Second,
    world: int = 2,
    seconds: int = SECONDS,
    nvlink_bytes: int | None = None,
) -> list[Row]:
    """Return a rank that does one thing after the other, a second each, and says its rank."""
    uuid = uuid_of(rank)
    made = [gpu(uuid, rank, name="H100")]
    for number in range(seconds):
        for place, (busy, sm) in enumerate((second, *then)[number % (1 + len(then))]):
            made += windows(
                [busy],
                uuid=uuid,
                at=number + place / 8,
                sm_active_ratio=sm,
                nvlink_tx_bytes=nvlink_bytes,
                nvlink_rx_bytes=nvlink_bytes,
                tensor_active_ratio=0.5 if sm > 0.5 else 0.0,
            )
    made.append(
        make_row(
            RunInfo,
            mono_ns=s(0),
            rank=rank,
            world_size=world,
            uuid=uuid,
            gpu=rank,
            communicates=True,
        )
    )
    return made


def job(*ranks: list[Row], more: Sequence[Row] = ()) -> list[Row]:
    return [*clocks(0, SECONDS), *more, *(row for rank in ranks for row in rank)]


def sums(con: duckdb.DuckDBPyConnection, rank: int, *columns: str) -> list[float | None]:
    picked = ", ".join(f"sum({column})" for column in columns)
    return list(
        con.execute(f"SELECT {picked} FROM evidence WHERE uuid = ?", [uuid_of(rank)]).fetchall()[0]
    )


def diagnosed(rows: Rows, rules: Sequence[Rule]) -> Diagnosis:
    con = connect(rows)
    return diagnose(con, ["x"], rules, spans(con, None, None))


LATE = [EMPTY] * 4 + [COMPUTES] * 4
WAITING = [POLLS] * 4 + [COMPUTES] * 4


def test_a_rank_that_polls_while_the_other_is_empty_waits_for_it(rules: Sequence[Rule]) -> None:
    rows = job(rank_rows(0, WAITING), rank_rows(1, LATE))
    con = connect(rows)
    engine.fill(con)
    wait, moved, gone = sums(con, 0, "coll_wait_s", "coll_transfer_s", "coll_gone_s")
    # Polling is told as 0.85 of 0.87 of the chip; of each half second a twentieth is equal.
    polled = 0.5 * 0.85 / 0.87
    assert wait == pytest.approx(SECONDS * (polled - 0.025), rel=0.01)
    assert moved == pytest.approx(SECONDS * 0.025, rel=0.05)
    assert gone == 0
    assert con.execute(
        "SELECT DISTINCT late_rank FROM evidence WHERE coll_wait_s > 0"
    ).fetchall() == [(1,)]
    found = diagnosed(rows, rules)
    waits = [row for row in found.ledger if row.subcause == "late_rank"]
    assert {(row.root.where, row.root.rank) for row in waits} == {("rank", 1)}
    assert found.gpus[0].waited_for == {"1": pytest.approx(SECONDS * (polled - 0.025), rel=0.01)}
    assert found.gpus[1].waited_for == {}


def test_in_long_steps_a_rank_that_began_late_has_not_more_to_compute(
    rules: Sequence[Rule],
) -> None:
    """It stands empty for the first half of six seconds; the other waits in the second half."""
    empty, computes, polls = [EMPTY] * 8, [COMPUTES] * 8, [POLLS] * 8
    late = rank_rows(1, empty, empty, empty, computes, computes, computes)
    waiting = rank_rows(0, computes, computes, computes, polls, polls, polls)
    found = diagnosed(job(waiting, late), rules)
    roots: dict[str, float] = {}
    for row in found.ledger:
        if row.subcause == "late_rank":
            assert row.root.rank == 1
            roots[row.root.cause] = roots.get(row.root.cause, 0.0) + row.idle_s
    assert sum(roots.values()) > 0.4 * SECONDS
    assert roots.get("slow_compute", 0.0) < 0.05 * sum(roots.values()), roots


def test_ranks_that_have_more_to_compute_in_turns_are_each_named_for_that(
    rules: Sequence[Rule],
) -> None:
    longer, shorter = [COMPUTES] * 8, [COMPUTES] * 4 + [POLLS] * 4
    first = rank_rows(0, longer, longer, longer, shorter, shorter, shorter)
    second = rank_rows(1, shorter, shorter, shorter, longer, longer, longer)
    found = diagnosed(job(first, second), rules)
    roots: dict[tuple[int | None, str], float] = {}
    for row in found.ledger:
        if row.subcause == "late_rank":
            who = (row.root.rank, row.root.cause)
            roots[who] = roots.get(who, 0.0) + row.idle_s
    whole = sum(roots.values())
    assert whole > 0.3 * SECONDS
    for rank in range(2):
        assert roots[rank, "slow_compute"] > 0.45 * whole, roots


def test_what_all_ranks_spend_at_once_is_transfer_as_far_as_bytes_went() -> None:
    second = [POLLS] * 2 + [COMPUTES] * 6
    links = [
        make_row(
            NvLink, mono_ns=s(1), uuid=uuid_of(rank), link=0, speed_bytes_per_s=100_000_000_000
        )
        for rank in range(2)
    ]
    # 2 x 50 GB a second and GPU, over 2 x 100 GB/s: half of the line rate.
    much = 6_250_000_000
    con = connect(job(*(rank_rows(r, second, nvlink_bytes=much) for r in range(2)), more=links))
    engine.fill(con)
    wait, moved, comm = sums(con, 0, "coll_wait_s", "coll_transfer_s", "comm_s")
    assert wait == 0
    polled = 0.25 * 0.85 / 0.87
    assert moved == pytest.approx(SECONDS * polled, rel=0.01)
    assert comm == pytest.approx(0, abs=0.01)
    little = much // 50
    con = connect(job(*(rank_rows(r, second, nvlink_bytes=little) for r in range(2)), more=links))
    engine.fill(con)
    moved, comm = sums(con, 0, "coll_transfer_s", "comm_s")
    assert moved is not None and comm is not None
    # A hundredth of the line rate can have lasted a thirtieth of the time, not a quarter.
    assert moved == pytest.approx(SECONDS * 0.01 / 0.3 * 0.25, rel=0.2)
    assert moved + comm == pytest.approx(SECONDS * polled, rel=0.01)


def test_a_rank_without_a_process_is_gone_and_not_late(rules: Sequence[Rule]) -> None:
    process = [*holds(7, uuid=uuid_of(0), until=SECONDS), *listed(0, SECONDS)]
    rows = job(
        rank_rows(0, [POLLS] * 7 + [COMPUTES]),
        rank_rows(1, [EMPTY] * 8),
        more=[*process, *_alive(7)],
    )
    con = connect(rows)
    engine.fill(con)
    wait, gone = sums(con, 0, "coll_wait_s", "coll_gone_s")
    assert wait == 0
    assert gone is not None and gone > 0.75 * SECONDS
    found = diagnosed(rows, rules)
    hang = [row for row in found.ledger if row.subcause == "hang"]
    assert hang and {row.root.rank for row in hang} == {1}


def _alive(pid: int) -> list[Row]:
    from recording_rows import Act, process

    return process(pid, [(SECONDS, Act(run=0.5))])


def test_ranks_that_poll_for_long_without_a_byte_hang() -> None:
    second = [POLLS] * 8
    computing = [COMPUTES] * 8
    ranks = []
    for rank in range(2):
        rows = rank_rows(rank, computing, seconds=6, nvlink_bytes=50_000_000)
        for number in range(6, SECONDS):
            for place, (busy, sm) in enumerate(second):
                rows += windows(
                    [busy],
                    uuid=uuid_of(rank),
                    at=number + place / 8,
                    sm_active_ratio=sm,
                    nvlink_tx_bytes=0,
                    nvlink_rx_bytes=0,
                )
        ranks.append(rows)
    con = connect(job(*ranks))
    engine.fill(con)
    gone, moved = sums(con, 0, "coll_gone_s", "coll_transfer_s")
    assert gone is not None and gone > 0.85 * (SECONDS - 8)
    assert moved is not None and moved < 2.5


@pytest.mark.parametrize(
    ("pause_s", "after_s", "hangs"), [(14, 0, True), (6, 0, False), (14, 4, False)]
)
def test_a_rank_that_stands_still_until_the_end_never_came(
    pause_s: int, after_s: int, hangs: bool, rules: Sequence[Rule]
) -> None:
    """One that goes on, or stood still for seconds only, made a pause of which nothing is known."""
    before = SECONDS - pause_s - after_s
    computes, polls, empty = [COMPUTES] * 8, [POLLS] * 8, [EMPTY] * 8
    waiting = rank_rows(0, *[computes] * before, *[polls] * pause_s, *[computes] * after_s)
    still = rank_rows(1, *[computes] * before, *[empty] * pause_s, *[computes] * after_s)
    found = diagnosed(job(waiting, still), rules)
    roots: dict[tuple[str, str], float] = {}
    for row in found.ledger:
        if row.subcause == "late_rank":
            assert row.root.rank == 1
            name = (row.root.cause, row.root.subcause)
            roots[name] = roots.get(name, 0.0) + row.idle_s
    whole = sum(roots.values())
    assert whole > 0.8 * pause_s
    hung = roots.get(("collective", "hang"), 0.0)
    assert hung > 0.9 * whole if hangs else hung == 0, roots


def test_with_a_rank_missing_waiting_and_transfer_are_not_told_apart(
    rules: Sequence[Rule],
) -> None:
    rows = job(rank_rows(0, WAITING, world=3), rank_rows(1, LATE, world=3))
    con = connect(rows)
    engine.fill(con)
    assert sums(con, 0, "coll_wait_s", "coll_transfer_s") == [None, None]
    found = diagnosed(rows, rules)
    assert {row.subcause for row in found.ledger if row.cause == "collective"} == {"exposed"}


def test_a_rank_told_twice_is_said_and_nobody_is_blamed(rules: Sequence[Rule]) -> None:
    rows = job(rank_rows(0, WAITING), [*rank_rows(1, LATE)[:-1], *_told_again(0, uuid_of(1))])
    found = diagnosed(rows, rules)
    assert any("same rank" in unseen.why for unseen in found.not_seen)
    assert not any(row.subcause == "late_rank" for row in found.ledger)


def _told_again(rank: int, uuid: str) -> list[Row]:
    return [
        make_row(
            RunInfo, mono_ns=s(0), rank=rank, world_size=2, uuid=uuid, gpu=1, communicates=True
        )
    ]


def test_nodes_are_set_side_by_side_by_wall_time(rules: Sequence[Rule]) -> None:
    """The other node's monotonic clock reads 500 s less at the same time."""
    there: Machine = ("n1", BOOT[::-1])
    behind_ns = 500 * NS_PER_S
    here = [*clocks(0, SECONDS), *rank_rows(0, WAITING)]
    away = _shifted([*rank_rows(1, LATE)], behind_ns)
    away += _shifted(clocks(0, SECONDS), behind_ns, wall=False)
    rows: Mapping[Machine, Sequence[Row]] = {HERE: here, there: away}
    found = diagnosed(rows, rules)
    assert {gpu_row.waited_for.get("1") is not None for gpu_row in found.gpus[:1]} == {True}
    waits = sum(row.idle_s for row in found.ledger if row.subcause == "late_rank")
    assert waits == pytest.approx(SECONDS * 0.463, rel=0.02)


def _shifted(rows: Sequence[Row], by_ns: int, *, wall: bool = True) -> list[Row]:
    """Return rows of a machine whose monotonic clock is behind."""

    moved = []
    for row in rows:
        names = {column.name for column in table_of(type(row)).columns}
        times = [n for n in ("mono_ns", "t0_ns", "t1_ns", "boot_ns") if n in names]
        values = {n: getattr(row, n) - by_ns for n in times if getattr(row, n) is not None}
        moved.append(replaced(row, **values))
    assert wall in (True, False)
    return moved


def told_of(rank: int, stage: int, *, stages: int = 2, batches: int = 4) -> list[Row]:
    """Return a process with a page that tells its stage, on the GPU of that rank."""
    pid = 100 + rank
    from recording_rows import Act, process

    start = start_of(0.0)
    pages = [
        make_row(Probe, mono_ns=s(n / 2), pid=pid, start_ns=start, steps=n, data_wait_ns=0,
                 outside_wait_ns=0)
        for n in range(2 * SECONDS + 1)
    ]  # fmt: skip
    info = make_row(
        ProbeInfo,
        mono_ns=s(0),
        pid=pid,
        start_ns=start,
        rank=rank,
        world_size=stages,
        pipeline_stage=stage,
        pipeline_stages=stages,
        pipeline_batches=batches,
        pipeline_schedule="1f1b",
    )
    held = holds(pid, uuid=uuid_of(rank), until=SECONDS)
    return [*pages, info, *held, *process(pid, [(SECONDS, Act(run=0.5))])]


def test_stages_that_wait_in_turns_pay_for_the_schedule() -> None:
    """Two even stages, seven micro-batches: each waits an eighth of a step, by the book."""
    spread = [COMPUTES] * 4 + [POLLS] + [COMPUTES] * 3
    more = [row for rank in range(2) for row in told_of(rank, rank, batches=7)]
    con = connect(job(*(rank_rows(rank, spread) for rank in range(2)), more=more))
    engine.fill(con)
    schedule, imbalance, late, coll = sums(
        con, 0, "bubble_schedule_s", "bubble_imbalance_s", "bubble_late_s", "coll_s"
    )
    assert coll == 0
    spinning = SECONDS / 8  # one window of eight
    assert schedule is not None and imbalance is not None and late is not None
    assert schedule + imbalance + late == pytest.approx(spinning, rel=0.05)
    assert schedule > 0.95 * spinning


@pytest.mark.parametrize(
    ("polled", "batches", "booked"),
    [(0.11, 4, 0.18), (0.0, 4, 0.0), (0.02, 4, 0.02), (0.11, 16, 0.11)],
    ids=[
        "too little for the schedule",
        "no spinning at all",
        "hardly any",
        "what the schedule has",
    ],
)
def test_what_a_schedule_needs_is_booked_where_some_of_it_is_seen(
    polled: float, batches: int, booked: float
) -> None:
    """Each window holds the same bit of a step: a fill of 0.9 that computing might have, or not."""
    # As the most full windows have it, computing fills 0.9; in the others some of it is polling.
    share = 2 * polled
    full, part = (1.0, 0.9), (1.0, 0.9 * (1 - share) + 0.08 * share)
    spread = [full, part] * 4
    more = [row for rank in range(2) for row in told_of(rank, rank, batches=batches)]
    con = connect(job(*(rank_rows(rank, spread) for rank in range(2)), more=more))
    engine.fill(con)
    spun, parts, whole, schedule = sums(
        con, 0, "spinning_s", "working_s + spinning_s + empty_s", "d_s", "bubble_schedule_s"
    )
    assert spun == pytest.approx(SECONDS * booked, rel=0.06, abs=0.05)
    assert parts == pytest.approx(whole)
    assert schedule is not None and spun is not None and schedule <= spun + 1e-9
    # Another job of the same ranks and kernels without a pipeline keeps the least.
    con = connect(job(*(rank_rows(rank, spread) for rank in range(2))))
    engine.fill(con)
    assert sums(con, 0, "spinning_s") == [pytest.approx(SECONDS * polled, rel=0.06, abs=0.05)]


def test_options_of_the_command_line_tell_of_a_pipeline_where_no_page_does(
    rules: Sequence[Rule],
) -> None:
    """Of eight windows two poll; two stages of four micro-batches need a fifth of the time."""
    spread = [COMPUTES] * 4 + [POLLS] * 2 + [COMPUTES] * 2
    options = "--global-batch-size=4 --micro-batch-size=1 --pipeline-model-parallel-size=2"
    infos = [
        make_row(
            ProcessInfo, mono_ns=s(0), pid=100 + rank, start_ns=start_of(0.0), kind="trainer",
            rank=rank, world_size=2, parallel_options=options,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [row for rank in range(2) for row in told_of(rank, rank)]
    kept = [row for row in told if not isinstance(row, (Probe, ProbeInfo))]
    ranks = [rank_rows(rank, spread) for rank in range(2)]
    found = diagnosed(job(*ranks, more=[*kept, *infos]), rules)
    by = {row.subcause: row.idle_s for row in found.ledger if row.cause == "pipeline_bubble"}
    # A fourth of the computing of three quarters of the time, on both.
    assert by == {"schedule": pytest.approx(2 * SECONDS * 0.1875, rel=0.05)}
    without = diagnosed(job(*ranks, more=kept), rules)
    assert not [row for row in without.ledger if row.cause == "pipeline_bubble"]


def test_a_longer_stage_is_named_as_the_root(rules: Sequence[Rule]) -> None:
    longer = [COMPUTES] * 8
    shorter = [COMPUTES] * 4 + [POLLS] * 4
    more = [row for rank in range(2) for row in told_of(rank, rank)]
    rows = job(rank_rows(0, shorter), rank_rows(1, longer), more=more)
    found = diagnosed(rows, rules)
    imbalance = [row for row in found.ledger if row.subcause == "stage_imbalance"]
    assert imbalance
    assert {(row.root.rank, row.root.cause) for row in imbalance} == {(1, "slow_compute")}


def port(at: float, *, tx: int = 0, rate: int = 400_000_000_000, device: str = "mlx5_0") -> Row:
    return make_row(
        RdmaPort, mono_ns=s(at), device=device, port=1, state="active", rate_bits_per_s=rate,
        tx_bytes=tx, rx_bytes=tx, link_downs=0,
    )  # fmt: skip


def test_bytes_over_tcp_beside_idle_rdma_ports_are_a_detour() -> None:
    second = [POLLS] * 2 + [COMPUTES] * 6
    net = [
        make_row(
            NetLink,
            mono_ns=s(n),
            namespace="",
            interface="eth0",
            rx_bytes=n * 1_000_000_000,
            tx_bytes=n * 1_000_000_000,
        )
        for n in range(SECONDS + 1)
    ]
    ports = [port(n) for n in range(SECONDS + 1)]
    info = make_row(RdmaInfo, mono_ns=s(0), device="mlx5_0", port=1, link_layer="infiniband")
    seen = [*clocks(0, SECONDS), *net, *ports, info]
    there: Machine = ("n1", BOOT[::-1])
    con = connect({HERE: [*seen, *rank_rows(0, second)], there: [*seen, *rank_rows(1, second)]})
    engine.fill(con)
    detour, moved = sums(con, 0, "coll_detour_s", "coll_transfer_s")
    assert detour == pytest.approx(SECONDS * 0.25, rel=0.1)
    assert moved == pytest.approx(0, abs=0.5)
    # The same bytes beside a job of one node are its data, or somebody else's.
    con = connect(job(*(rank_rows(r, second) for r in range(2)), more=[*net, *ports, info]))
    engine.fill(con)
    assert sums(con, 0, "coll_detour_s") == [0]


@pytest.mark.parametrize(("later", "degraded"), [(400, 0.0), (200, 0.25)], ids=["sound", "slower"])
def test_a_port_is_held_against_its_own_rate(later: int, degraded: float) -> None:
    """A slower port beside it, as for storage, is no fault."""
    second = [POLLS] * 2 + [COMPUTES] * 6
    half = SECONDS // 2
    ports = [
        port(n, tx=n * 20_000_000_000, rate=(400 if n < half else later) * 10**9)
        for n in range(SECONDS + 1)
    ]
    storage = [port(n, rate=100 * 10**9, device="mlx5_9") for n in range(SECONDS + 1)]
    traffic = [
        make_row(
            RdmaTraffic,
            mono_ns=s(n),
            device="mlx5_0",
            port=1,
            rx_bytes=n * 20_000_000_000,
            tx_bytes=n * 20_000_000_000,
        )
        for n in range(SECONDS + 1)
    ]
    more = [*ports, *storage, *traffic]
    con = connect(job(*(rank_rows(r, second) for r in range(2)), more=more))
    engine.fill(con)
    (found,) = sums(con, 0, "coll_degraded_s")
    assert found == pytest.approx(half * degraded, rel=0.15)


def test_a_long_wait_for_a_late_rank_is_no_hang() -> None:
    """No byte moves meanwhile, and the late one is there: it saves a checkpoint, say."""
    ranks = []
    for rank, second in ((0, [POLLS] * 8), (1, [EMPTY] * 8)):
        rows = rank_rows(rank, [COMPUTES] * 8, seconds=6, nvlink_bytes=0)
        for number in range(6, SECONDS):
            for place, (busy, sm) in enumerate(second):
                rows += windows(
                    [busy],
                    uuid=uuid_of(rank),
                    at=number + place / 8,
                    sm_active_ratio=sm,
                    nvlink_tx_bytes=0,
                    nvlink_rx_bytes=0,
                )
        ranks.append(rows)
    con = connect(job(*ranks))
    engine.fill(con)
    wait, gone = sums(con, 0, "coll_wait_s", "coll_gone_s")
    assert gone == 0
    assert wait is not None and wait > 0.9 * (SECONDS - 6)
