"""GPU windows of a recording: which there are, how busy, and what lies between them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recording_kit import make_row
from recording_rows import BOOT, HERE, WINDOW_NS, connect, gpu, s, windows
from whyidle.clock import NS_PER_S
from whyidle.schema.gpu import GpuActivity
from whyidle.table import Row
from whyidle_rules.recording import windows as loader
from whyidle_rules.recording.windows import Gpu


def load(rows: Sequence[Row], since: int | None = None, until: int | None = None) -> list[Gpu]:
    with connect(rows) as con:
        return loader.load(con, since, until)


def one(rows: Sequence[Row]) -> Gpu:
    found = load(rows)
    assert len(found) == 1
    return found[0]


def edges(found: Gpu) -> list[tuple[float, float]]:
    """Return the windows in seconds of the story."""
    return [
        ((t0 - s(0)) / NS_PER_S, (t1 - s(0)) / NS_PER_S)
        for t0, t1 in zip(found.t0.tolist(), found.t1.tolist(), strict=True)
    ]


def window(t0: float | None, t1: float | None, busy: float | None, **more: object) -> Row:
    return make_row(
        GpuActivity,
        mono_ns=s(t1 if t1 is not None else 0),
        uuid="GPU-0",
        source="gpm",
        t0_ns=None if t0 is None else s(t0),
        t1_ns=None if t1 is None else s(t1),
        gr_active_ratio=busy,
        **more,
    )


def used(at: float, ratio: float | None, source: str = "nvml") -> Row:
    """Return what the driver itself says, without a window."""
    return make_row(
        GpuActivity, mono_ns=s(at), uuid="GPU-0", source=source, utilization_ratio=ratio
    )


def test_windows_are_the_gpus_own() -> None:
    found = one([*windows([0.5, 0.25], sm_active_ratio=0.2), gpu(index=3, name="NVIDIA H100")])
    assert edges(found) == [(0, 0.125), (0.125, 0.25)]
    assert found.busy.tolist() == [0.5, 0.25]
    assert found.sm.tolist() == [0.2, 0.2]
    assert (found.node, found.boot_id, found.machine) == ("n0", BOOT, HERE)
    assert (found.index, found.name, found.source) == (3, "NVIDIA H100", "gpm")
    assert found.unknown_ns == 0
    assert found.length.tolist() == [WINDOW_NS] * 2


def test_without_a_description_a_gpu_counts_all_the_same() -> None:
    found = one(windows([1.0]))
    assert (found.index, found.name) == (None, None)


def test_time_between_windows_is_told_as_unknown() -> None:
    found = one([window(0, 1, 0.1), window(1.25, 2, 0.2), window(2, 3, 0.3), window(5, 6, 0.4)])
    assert edges(found) == [(0, 1), (1.25, 2), (2, 3), (5, 6)]
    assert found.unknown_ns == round(2.25 * NS_PER_S)


def test_windows_come_in_any_order_and_never_share_a_moment() -> None:
    found = one([window(2, 3, 0.3), window(0, 1, 0.1), window(0.5, 2.5, 0.2)])
    # The second one begins where the first ends, the third where the second does.
    assert edges(found) == [(0, 1), (1, 2.5), (2.5, 3)]
    assert found.busy.tolist() == [0.1, 0.2, 0.3]


def test_a_window_inside_another_one_or_without_length_is_left_out() -> None:
    found = one([window(0, 2, 0.1), window(0.5, 2, 0.9), window(3, 3, 0.9), window(5, 4, 0.9)])
    assert edges(found) == [(0, 2)]


@pytest.mark.parametrize(("told", "taken"), [(1.5, 1.0), (-0.1, 0.0), (float("inf"), 1.0)])
def test_a_ratio_is_at_most_all_and_at_least_nothing(told: float, taken: float) -> None:
    assert one([window(0, 1, told)]).busy.tolist() == [taken]


def test_an_unknown_ratio_is_no_window() -> None:
    found = one([window(0, 1, 0.5), window(1, 2, None), window(2, 3, float("nan"))])
    assert edges(found) == [(0, 1)]
    assert load([window(0, 1, None)]) == []


def test_a_window_without_an_edge_is_left_out() -> None:
    found = one([window(None, 1, 0.5), window(1, 2, 0.25), window(2, None, 0.1)])
    assert edges(found) == [(1, 2)]


def test_without_gpm_utilization_stands_for_the_time_since_the_reading_before() -> None:
    found = one([used(0, 0.9), used(1, 0.5), used(1.5, 0.25), used(4, 0.1), used(5, 0.2)])
    # The first has no beginning, and 2.5 s are more than a reading may stand for.
    assert edges(found) == [(0, 1), (1, 1.5), (4, 5)]
    assert found.busy.tolist() == [0.5, 0.25, 0.2]
    assert found.unknown_ns == round(2.5 * NS_PER_S)
    assert found.source == "nvml"
    assert found.sm.tolist() != found.sm.tolist()  # NaN: not measured


def test_with_gpm_utilization_beside_it_makes_no_windows() -> None:
    found = one([*windows([0.5] * 8), used(0.5, 0.99), used(1, 0.99)])
    assert found.busy.tolist() == [0.5] * 8
    assert edges(found)[-1] == (0.875, 1)


def test_a_gpu_that_is_split_is_its_parts() -> None:
    rows = [
        *windows([0.5], uuid="GPU-0"),
        *windows([0.1], uuid="MIG-1"),
        *windows([0.2], uuid="MIG-2"),
        gpu("GPU-0", 0),
        gpu("MIG-1", 0, parent_uuid="GPU-0"),
        gpu("MIG-2", 0, parent_uuid="GPU-0"),
    ]
    assert [found.uuid for found in load(rows)] == ["MIG-1", "MIG-2"]


def test_a_range_holds_the_windows_that_end_in_it() -> None:
    rows = windows([0.1, 0.2, 0.3, 0.4])
    found = load(rows, s(0.125), s(0.375))
    assert found[0].busy.tolist() == [0.2, 0.3]
    assert load(rows, s(0.5), None) == []
    assert load(rows, None, s(0)) == []


def test_a_gpu_can_be_cut_to_a_range() -> None:
    whole = one([window(0, 1, 0.1), window(2, 3, 0.2), window(4, 5, 0.3)])
    cut = whole.between(s(1), s(5))
    assert edges(cut) == [(2, 3), (4, 5)]
    assert (cut.busy.tolist(), cut.unknown_ns) == ([0.2, 0.3], NS_PER_S)
    assert len(whole.between(s(5), s(9)).t0) == 0


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "read"])
def test_a_part_knows_when_kernels_ran_last_before_it(cut: bool) -> None:
    rows = windows([0.1, 0.2, 0.0, 0.0, 0.5])

    def part(since: int) -> Gpu:
        return one(rows).between(since, s(9)) if cut else load(rows, since, s(9))[0]

    assert part(s(0.5)).busy_before_ns == s(0.25)
    assert part(s(0.125)).busy_before_ns == s(0.125)
    assert part(s(0)).busy_before_ns is None


def test_gpus_come_by_node_and_index() -> None:
    own = [
        *windows([1.0], uuid="GPU-b"),
        *windows([1.0], uuid="GPU-a"),
        gpu("GPU-b", 0),
        gpu("GPU-a", 1),
    ]
    with connect({("n1", BOOT): own, ("n0", BOOT): own}) as con:
        found = loader.load(con, None, None)
    assert [(g.node, g.uuid) for g in found] == [
        ("n0", "GPU-b"),
        ("n0", "GPU-a"),
        ("n1", "GPU-b"),
        ("n1", "GPU-a"),
    ]


def test_a_node_that_booted_again_has_windows_of_both_boots() -> None:
    other = "00000000-0c5e-4a5d-9e0b-2f6d1c7a8b90"
    with connect({HERE: windows([0.5]), ("n0", other): windows([0.25])}) as con:
        found = loader.load(con, None, None)
    assert sorted(g.busy.tolist() for g in found) == [[0.25], [0.5]]


def test_only_megabytes_over_nvlink_make_a_gpu_linked() -> None:
    assert not one(windows([1.0, 1.0], nvlink_tx_bytes=500_000, nvlink_rx_bytes=500_000)).linked
    assert one(windows([1.0, 1.0], nvlink_tx_bytes=600_000, nvlink_rx_bytes=500_000)).linked
    assert not one(windows([1.0])).linked


@pytest.mark.parametrize("t1", [3602.0, 5e9, -5e9])
def test_a_window_longer_than_an_hour_is_damage(t1: float) -> None:
    begin = 1.0 if t1 > 0 else t1 - 4000
    found = one([window(0, 1, 0.5), window(begin, t1, 0.5)])
    assert edges(found) == [(0, 1)]
