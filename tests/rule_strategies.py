"""Random rule sets and random evidence for the properties of the allocator."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from rule_make import Row, make_rule
from whyidle_rules import evidence, groups
from whyidle_rules.rule import Rule

QUARTER_NS = 4  # claims are quarters of columns, so that their nanoseconds are whole
EMPTY = [
    column.name
    for column in evidence.OBSERVED
    if column.exclusive and column.name not in ("coll_s", "comm_s", "p2p_s")
]
SPINNING = ["coll_s", "comm_s", "p2p_s"]
PARTS = {"copy_h2d_pageable_s": "copy_h2d_s"}
OPEN = ["gap_s", "launch_late_s"]  # columns that make no promise
CLAIMING = [group.id for group in groups.GROUPS if not group.witness]
FABRICS = ["nvlink", "ib", "roce", "tcp"]


@st.composite
def split(draw: st.DrawFn, whole: int, names: list[str]) -> dict[str, int]:
    """Give whole quarters of nanoseconds to some of the names, never more than there are."""
    left = whole // QUARTER_NS
    shares: dict[str, int] = dict.fromkeys(names, 0)
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        shares[name] = draw(st.one_of(st.just(left), st.integers(0, left)))
        left -= shares[name]
    return {name: share * QUARTER_NS for name, share in shares.items()}


@st.composite
def faithful_row(draw: st.DrawFn) -> Row:
    """Return a window whose columns keep what their meanings promise; all of them are known."""
    lengths = st.integers(0, 2_000).map(lambda n: n * 1_000)
    empty, spinning, working = draw(lengths), draw(lengths), draw(lengths)
    found = draw(split(empty, EMPTY))
    found |= draw(split(spinning, SPINNING))
    found["copy_h2d_pageable_s"] = draw(st.integers(0, found["copy_h2d_s"]))
    found["coll_wait_s"] = draw(st.integers(0, found["coll_s"]))
    found["coll_transfer_s"] = found["coll_s"] - found["coll_wait_s"]
    found |= {name: draw(lengths) for name in OPEN}
    found |= {"empty_s": empty, "spinning_s": spinning, "working_s": working}
    found["d_s"] = empty + spinning + working
    row: Row = {name: ns / 1e9 for name, ns in found.items()}
    row["data_workers"] = draw(st.integers(0, 2))
    row["coll_transport"] = draw(st.sampled_from(FABRICS))
    row["late_rank"] = draw(st.integers(0, 3))
    return row


WILD = st.one_of(
    st.none(),
    st.just(0.0),
    st.floats(0, 1e-3),
    st.floats(-1.0, 10.0),
    st.sampled_from([1e-9, 4e-10, 5e-10, 1e7, 1e30, -1e30]),
)


@st.composite
def wild_row(draw: st.DrawFn) -> Row:
    """Return a window of which nothing is promised."""
    row: Row = {column.name: draw(WILD) for column in evidence.OBSERVED if column.type == "DOUBLE"}
    row["data_workers"] = draw(st.one_of(st.none(), st.integers(-1, 3)))
    row["coll_transport"] = draw(st.sampled_from([None, "other", *FABRICS]))
    return row


CONDITIONS = [
    "",
    "gap_s > 0.001",
    "coll_transport = 'ib'",
    "data_workers > 0 AND gc_s >= 0",
    "data_workers = 0 OR sync_s > 0",
    "greatest(gap_s, 0.0005) < 0.001",
]


@st.composite
def faithful_rules(draw: st.DrawFn) -> list[Rule]:
    """Return rules of any groups; members of one group split the columns that they share.

    Few columns and groups are used at a time, so that rules meet.
    """
    rules: list[Rule] = []
    quarters: dict[tuple[str, str], int] = {}
    pool = draw(st.sampled_from(["empty", "empty", "spinning"]))
    exclusive = EMPTY if pool == "empty" else SPINNING
    columns = draw(st.lists(st.sampled_from(exclusive), min_size=1, max_size=3, unique=True))
    chosen = [group.id for group in groups.GROUPS if group.pool == pool and not group.witness]
    for number in range(draw(st.integers(2, 6))):
        group = draw(st.sampled_from(chosen))
        column = draw(st.sampled_from([*columns, *OPEN]))
        mine = draw(st.integers(1, 4))
        if column in exclusive:
            mine = min(mine, 4 - quarters.get((group, column), 0))
            quarters[group, column] = quarters.get((group, column), 0) + mine
        if mine:
            condition = draw(st.sampled_from(["", "", *CONDITIONS]))
            claim = f"{column} * {mine / 4}"
            rules.append(make_rule(f"rule{number}", group, claim, when=condition))
    return rules + draw(share_rules())


@st.composite
def share_rules(draw: st.DrawFn) -> list[Rule]:
    """Return up to two members of the input group whose shares sum to at most 1."""
    shares = ["0.5", "CASE WHEN gap_s > 0.0005 THEN 0.5 ELSE 0.25 END", "0.5 * data_workers / 2"]
    chosen = draw(st.lists(st.sampled_from(shares), max_size=2))
    return [
        make_rule(f"share{number}", "input", share=share, when=draw(st.sampled_from(CONDITIONS)))
        for number, share in enumerate(chosen)
    ]


CLAIMS: list[Callable[[str], str]] = [
    lambda name: name,
    lambda name: f"{name} * 0.3",
    lambda name: f"{name} * 3 - gap_s",
    lambda name: f"{name} / gap_s",
    lambda name: f"CASE WHEN gap_s > 0.001 THEN {name} ELSE empty_s END",
    lambda name: f"least({name}, launch_late_s) + sync_s",
    lambda name: "d_s * 0.5",
]


@st.composite
def wild_rules(draw: st.DrawFn) -> list[Rule]:
    """Return rules of which nothing is promised, some of them speaking where others are blind."""
    rules: list[Rule] = []
    for number in range(draw(st.integers(1, 7))):
        group = groups.BY_ID[draw(st.sampled_from([*CLAIMING, "input"]))]
        name = draw(st.sampled_from([*EMPTY, *SPINNING, *OPEN, "coll_wait_s", *PARTS]))
        amount = draw(st.sampled_from(CLAIMS))(name)
        condition = draw(st.sampled_from(CONDITIONS))
        is_share = bool(group.witness)
        used = make_rule("x", "pause", amount, when=condition).reads
        spare = [other for other in ("coll_wait_s", "gc_s") if other not in used]
        rules.append(
            make_rule(
                f"rule{number}",
                group.id,
                claim="" if is_share else amount,
                share=amount if is_share else "",
                when=condition,
                needs=draw(st.lists(st.sampled_from(["logging_s", "profiler_s"]), max_size=1)),
                lacks=draw(st.lists(st.sampled_from(spare), max_size=1)) if spare else [],
            )
        )
    return rules
