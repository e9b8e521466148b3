"""Traces as samples: what windows of 8 Hz hold of a timeline that is known exactly."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_make import US, Event, collective, columns, copy, kernel, span
from whyidle.errors import UserError
from whyidle.store import Recording
from whyidle_rules import intervals
from whyidle_rules.trace.columns import Columns
from whyidle_rules.trace.device import DeviceTrace, analyse
from whyidle_rules.trace.sample import HERTZ, Samples, sample, write

SMS = 132
H2D, D2H = "HtoD (Pinned -> Device)", "DtoH (Device -> Pinned)"
PAGEABLE = "HtoD (Pageable -> Device)"


def timeline(seed: int, count: int = 300) -> list[Event]:
    """Return three seconds of overlapping kernels and copies."""
    chance = random.Random(seed)
    events: list[Event] = []
    for _ in range(count):
        begin, length = chance.randrange(3_000_000), chance.choice((3, 700, 30_000))
        blocks = chance.choice((1, 8, 66, 5000))
        occupancy: dict[str, Any] = {"est. achieved occupancy %": chance.choice((0, 25, 100))}
        events.append(
            chance.choice(
                (
                    kernel(begin, length, grid=[blocks, 1, 1], **occupancy),
                    {**(c := collective(begin, length, None)), "args": c["args"] | occupancy},
                    copy(begin, length, route=H2D, bytes=chance.randrange(1 << 30)),
                    copy(begin, length, route=PAGEABLE, bytes=chance.randrange(1 << 20)),
                    copy(begin, length, route=D2H, bytes=chance.randrange(1 << 30)),
                )
            )
        )
    return events


def sampled(
    events: list[Event], *, sms: int | None = SMS, base_ns: int = 0, hz: float = HERTZ
) -> tuple[Samples, DeviceTrace, Columns]:
    filled = columns(events)
    (device,) = analyse(filled)
    device.shift(base_ns)
    return sample(filled, device, 0, sms, base_ns, hz), device, filled


def lengths(samples: Samples) -> Any:
    return np.diff(samples.edges)


def bytes_of(events: list[Event], *routes: str) -> int:
    return sum(
        event["args"]["bytes"]
        for event in events
        if event["name"] in {f"Memcpy {r}" for r in routes}
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("base_ns", [0, 1_748_736_000_000_000_001])
def test_windows_hold_what_the_timeline_holds(seed: int, base_ns: int) -> None:
    events = timeline(seed)
    samples, device, filled = sampled(events, base_ns=base_ns)
    assert samples.edges[0] == device.parts.begin
    assert samples.edges[-1] == device.parts.end
    assert (lengths(samples)[:-1] == 125_000_000).all()
    assert 0 < lengths(samples)[-1] <= 125_000_000
    kernels = intervals.merge(device.compute, intervals.union(device.comm.start, device.comm.end))
    resident_ns = (samples.gr_active * lengths(samples)).sum()
    assert resident_ns == pytest.approx(intervals.length_ns(kernels), rel=1e-12)
    for (begin, end), ratio in zip(
        np.column_stack((samples.edges[:-1], samples.edges[1:])).tolist(),
        samples.gr_active.tolist(),
        strict=True,
    ):
        inside = intervals.length_ns(intervals.clip(kernels, begin, end))
        assert ratio == pytest.approx(inside / (end - begin), abs=1e-12)
    assert samples.pcie_rx_bytes.sum() == bytes_of(events, H2D, PAGEABLE)
    assert samples.pcie_tx_bytes.sum() == bytes_of(events, D2H)
    assert (samples.pcie_rx_bytes >= 0).all()
    assert len(filled.gpu_start) == len(events)


@pytest.mark.parametrize("seed", range(5))
def test_no_more_of_the_chip_is_filled_than_is_active(seed: int) -> None:
    samples, _, _ = sampled(timeline(seed))
    for ratio in (samples.sm_active, samples.sm_occupancy):
        assert ratio is not None
        assert (ratio >= 0).all()
        assert (ratio <= samples.gr_active + 1e-9).all()
        assert ratio.sum() > 0


def test_a_small_grid_fills_its_share_and_kernels_add_up() -> None:
    second = 1_000_000
    samples, _, _ = sampled(
        [
            kernel(0, second // 8, grid=[33, 1, 1]),
            kernel(second // 8, second // 8, grid=[99, 1, 1]),
            kernel(second // 8, second // 16, grid=[66, 1, 1]),
            kernel(second // 4, second // 8, grid=[9999, 1, 1]),
            kernel(second * 3 // 8, second // 16, grid=[66, 1, 1]),
        ]
    )
    assert samples.gr_active.tolist() == pytest.approx([1, 1, 1, 1])
    assert samples.sm_active is not None
    assert samples.sm_active.tolist() == pytest.approx([0.25, 0.875, 1, 0.5])
    assert samples.sm_occupancy is None
    assert lengths(samples)[-1] == second // 16 * US


def test_a_copy_over_an_edge_is_split_by_time() -> None:
    samples, _, _ = sampled(
        [kernel(0, 1), copy(100_000, 50_000, route=H2D, bytes=1000), kernel(249_999, 1)]
    )
    assert samples.pcie_rx_bytes.tolist() == [500, 500]
    assert samples.pcie_tx_bytes.tolist() == [0, 0]


def test_what_the_trace_lacks_is_none() -> None:
    events = [kernel(0, 10), kernel(20, 10)]
    assert sampled(events, sms=None)[0].sm_active is None
    del events[1]["args"]["grid"]
    assert sampled(events)[0].sm_active is None


def recorded(
    tmp_path: Path, events: list[Event], name: str = "a_1.123456789.pt.trace.json"
) -> Path:
    trace = {
        "traceEvents": [*events, span(0, 1_500_000, "ProfilerStep#1")],
        "distributedInfo": {"rank": 3, "world_size": 8},
        "deviceProperties": [{"id": 0, "name": "H100", "numSms": SMS}],
        "baseTimeNanoseconds": 1_748_736_000_000_000_000,
    }
    path = tmp_path / name
    path.write_text(json.dumps(trace))
    return path


def test_the_recording_reads_as_any_other(tmp_path: Path) -> None:
    events = timeline(7)
    out = tmp_path / "recording"
    (file,) = write([recorded(tmp_path, events)], out)
    (device,) = file.devices
    with Recording([out]) as recording:
        assert recording.damaged == []
        assert recording.nodes == ["a"]
        found = recording.con.execute(
            "SELECT count(*), sum(gr_active_ratio * (t1_ns - t0_ns)), min(t0_ns), max(t1_ns),"
            " sum(pcie_rx_bytes)::BIGINT, sum(pcie_tx_bytes)::BIGINT, count(sm_active_ratio),"
            " count(DISTINCT uuid), any_value(source) FROM gpu_activity"
        ).fetchone()
        assert found is not None
        count, resident, begin, end, received, sent, filled, uuids, source = found
        parts = device.parts
        assert count == filled == -(-parts.window // 125_000_000)
        # As GPM's, ratios have four decimals.
        most = count * 125_000_000 * 0.000_05
        assert resident == pytest.approx(parts.compute + parts.exposed_comm, abs=most)
        assert (begin, end) == (parts.begin, parts.end)
        assert begin > 1_748_736_000_000_000_000
        assert (received, sent) == (bytes_of(events, H2D, PAGEABLE), bytes_of(events, D2H))
        assert (uuids, source) == (1, "trace")
        info = recording.con.execute(
            "SELECT rank, world_size, gpu, gpu_name, source, t0_ns, t1_ns FROM run_info"
        ).fetchall()
        assert info == [(3, 8, 0, "H100", "a_1.123456789.pt.trace.json", parts.begin, parts.end)]
        (step,) = recording.con.execute(
            "SELECT rank, step, t1_ns - mono_ns, compute_ns + exposed_comm_ns + exposed_copy_ns"
            " + idle_ns FROM trace_step"
        ).fetchall()
        assert step == (3, "1", 1_500_000_000, 1_500_000_000)


def test_ranks_of_one_node_lie_side_by_side(tmp_path: Path) -> None:
    paths = [recorded(tmp_path, timeline(n, 20), f"a_{n}.123456789.pt.trace.json") for n in (1, 2)]
    write(paths, tmp_path / "recording")
    with Recording([tmp_path / "recording"]) as recording:
        assert recording.nodes == ["a"]
        found = recording.con.execute("SELECT count(DISTINCT uuid) FROM gpu_activity").fetchone()
        assert found == (2,)


def test_what_holds_no_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps([span(0, 1, "step")]))
    out = tmp_path / "recording"
    with pytest.raises(UserError, match=r"cpu.json: no GPU work is in it"):
        write([path], out)
    assert not out.exists()
    out.write_text("")
    with pytest.raises(UserError, match=r"it cannot be written \(not a directory\); name another"):
        write([path], out)
