"""Errors of the driver and the PCIe link in the evidence of a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from recording_kit import make_row
from recording_rows import UUID, Act, clocks, connect, gpu, holds, listed, process, s, windows
from whyidle.schema import GpuEvent, GpuState
from whyidle.table import Row
from whyidle_rules.recording import engine
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule_load import load_rules

SECONDS = 20
LANES_4_X16_BYTES_PER_S = 1.969e9 * 16 * 0.85


def story(busy: list[float], more: list[Row], **window: Any) -> list[Row]:
    trainer = process(7, [(SECONDS, Act(run=1.0))])
    info = gpu(max_pcie_generation=4, max_pcie_width=16)
    held = [*holds(7, until=SECONDS), *listed(0, SECONDS)]
    return [*clocks(0, SECONDS), info, *trainer, *held, *windows(busy, **window), *more]


def xid(number: int, at: float) -> Row:
    return make_row(GpuEvent, mono_ns=s(at), uuid=UUID, kind="xid", xid=number, source="kmsg")


def total(rows: list[Row], *columns: str) -> list[float | None]:
    con = connect(rows)
    engine.fill(con)
    picked = ", ".join(f"sum({column})" for column in columns)
    return list(con.execute(f"SELECT {picked} FROM evidence").fetchall()[0])


def test_after_a_fatal_error_the_gpu_is_empty_for_it_until_it_computes_again() -> None:
    busy = [1.0] * 40 + [0.0] * 80 + [1.0] * 40  # empty from second 5 to 15
    found = total(story(busy, [xid(79, 5.0)]), "xid_s", "empty_s", "main_run_s")
    assert found[0] == pytest.approx(10, abs=0.2)
    assert found[1] == 10
    assert (found[2] or 0) < 0.3  # what the process did meanwhile is not the cause


def test_an_error_of_the_jobs_own_is_not_the_hardwares() -> None:
    busy = [1.0] * 40 + [0.0] * 120
    assert total(story(busy, [xid(31, 5.0)]), "xid_s")[0] in (None, 0)


def link(generation: int, width: int) -> list[Row]:
    return [
        make_row(
            GpuState,
            mono_ns=s(second),
            uuid=UUID,
            nvml_return=0,
            pcie_generation=generation,
            pcie_width=width,
        )
        for second in range(SECONDS + 1)
    ]


@pytest.mark.parametrize(("generation", "reduced"), [(4, 0), (2, 1)])
def test_copies_that_fill_the_link_are_told_from_the_rest(generation: int, reduced: int) -> None:
    full = {4: 1.969e9, 2: 0.5e9}[generation] * 16 * 0.85
    rows = story(
        [0.5] * (8 * SECONDS),
        link(generation, 16),
        pcie_rx_bytes=round(full * 0.9 / 8),
        pcie_tx_bytes=0,
    )
    con = connect(rows)
    engine.fill(con)
    ratio, copies, ran, down = con.execute(
        "SELECT avg(pcie_ratio), sum(pcie_copy_s), sum(main_run_s), avg(pcie_reduced::INTEGER)"
        " FROM evidence"
    ).fetchall()[0]
    assert ratio == pytest.approx(0.9, abs=0.01)
    assert down == reduced
    # Half of the time is empty, less the first moments; copies last longer than that.
    assert copies == pytest.approx(SECONDS / 2, rel=0.1)
    assert ran == pytest.approx(0, abs=0.3)


def test_copies_that_leave_the_link_room_take_nothing() -> None:
    rows = story(
        [0.5] * (8 * SECONDS),
        link(4, 16),
        pcie_rx_bytes=round(LANES_4_X16_BYTES_PER_S * 0.2 / 8),
        pcie_tx_bytes=0,
    )
    copies, ran = total(rows, "pcie_copy_s", "main_run_s")
    assert copies == 0
    assert ran is not None and ran > 5


def answers(codes: list[int], uuid: str = UUID) -> list[Row]:
    """Return NVML's answer, a second each."""
    return [
        make_row(GpuState, mono_ns=s(second), uuid=uuid, nvml_return=code)
        for second, code in enumerate(codes)
    ]


def test_a_lost_gpu_has_no_samples_and_is_idle_for_being_lost() -> None:
    """It computes for five seconds, is lost for ten, and is there again after a reset."""
    rows = [
        *story([1.0] * 40, answers([0] * 5 + [15] * 8 + [16] * 3 + [0] * 5)),
        *windows([1.0] * 32, at=16),
    ]
    found = total(rows, "lost_s", "empty_s", "working_s", "main_run_s", "no_process_s", "reset_s")
    assert (found[0] or 0) + (found[5] or 0) == pytest.approx(10)
    assert found[5] == pytest.approx(3)
    assert found[1] == pytest.approx(10)
    assert found[2] == pytest.approx(9)
    assert (found[3] or 0) + (found[4] or 0) == pytest.approx(0)


def test_a_gpu_that_waits_for_a_reset_is_told_from_one_that_is_gone() -> None:
    """The driver asks for a reset from 7 s on, after an error; nobody gives it one."""
    rows = story([1.0] * 40, answers([0] * 5 + [15] * 3 + [16] * 13))
    con = connect(rows)
    found = diagnose(con, ["x"], load_rules(), spans(con, None, None))
    told = {row.subcause: row.idle_s for row in found.ledger if row.cause == "hardware"}
    # From the fifth second to the first answer is the span that ends with it.
    assert told == {"gpu_lost": pytest.approx(2), "reset": pytest.approx(13)}


def test_the_time_of_a_gpu_that_never_comes_back_belongs_to_the_run() -> None:
    rows = story([1.0] * 40, answers([0] * 5 + [15] * 16))
    con = connect(rows)
    found = diagnose(con, ["x"], load_rules(), spans(con, None, None))
    (row,) = [row for row in found.ledger if row.cause == "hardware"]
    assert (row.subcause, row.grade) == ("gpu_lost", "observed")
    assert row.idle_s == pytest.approx(15)
    assert "hardware" in found.headline.lower()


def test_nobody_asks_which_process_left_a_lost_gpu_empty() -> None:
    codes = answers([0] * 5 + [15] * 16)
    con = connect([*clocks(0, SECONDS), gpu(), *windows([1.0] * 40), *codes])
    found = diagnose(con, ["x"], load_rules(), spans(con, None, None))
    assert found.totals.idle_s == pytest.approx(15)
    assert not any("which process" in unseen.what for unseen in found.not_seen)


@pytest.mark.parametrize(
    "codes",
    [[0] * 21, [0] * 5 + [15] + [0] * 15, [0] * 5 + [999] * 16, []],
    ids=["answers", "one answer", "another error", "never asked"],
)
def test_what_makes_no_gpu_lost(codes: list[int]) -> None:
    found = total(story([1.0] * 40, answers(codes)), "lost_s", "empty_s")
    assert (found[0] or 0, found[1]) == (0, 0)
    assert (found[0] is None) == (codes == [])


@pytest.mark.parametrize("how", ["uuid", "address"])
def test_an_error_of_a_gpu_is_one_of_its_mig_devices(how: str) -> None:
    device = "MIG-0"
    address = "0000:19:00.0"
    known = [
        gpu("GPU-W", 0, pci_bus_id=address),
        gpu(device, 0, parent_uuid="GPU-W", pci_bus_id=address),
    ]
    event = make_row(
        GpuEvent,
        mono_ns=s(5.0),
        uuid="GPU-W" if how == "uuid" else None,
        pci_bus_id=address,
        kind="xid",
        xid=48,
        source="kmsg",
    )
    busy = windows([1.0] * 40 + [0.0] * 120, uuid=device)
    found = total([*clocks(0, SECONDS), *known, *busy, event], "xid_s", "empty_s")
    assert found[0] == pytest.approx(15, abs=0.2)
    assert found[1] == 15


def test_a_mig_device_is_lost_with_its_gpu() -> None:
    known = [gpu("GPU-W", 0), gpu("MIG-0", 0, parent_uuid="GPU-W")]
    told = answers([0] * 5 + [15] * 16, "GPU-W")
    rows = [*clocks(0, SECONDS), *known, *windows([1.0] * 40, uuid="MIG-0"), *told]
    con = connect(rows)
    engine.fill(con, until_ns=s(SECONDS))
    assert con.execute("SELECT uuid, sum(lost_s) FROM evidence GROUP BY ALL").fetchall() == [
        ("MIG-0", pytest.approx(15))
    ]
