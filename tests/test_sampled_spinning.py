"""What 8 samples a second tell of communication, held against the exact traces of real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from whyidle.store import Recording
from whyidle_rules.recording import engine
from whyidle_rules.trace.load import load
from whyidle_rules.trace.sample import write

RUNS = Path(__file__).parents[1].parent / "shared" / "recorded-runs"
SETS = (
    "kineto-torchrec-4xV100/sst_long_a2a_optimizer",
    "kineto-torchrec-4xV100/sst_long_a2a_optimizer_3",
    "kineto-torchrec-4xV100/sst_long_a2a_optimizer_qcomm_trace",
    "kineto-megatron-tp8-8xA100",
    "kineto-nanogpt-ab",
    "kineto-hta-single",
    "kineto-tbplugin-resnet50-dataloader",
    "kineto-param-single",
)
POINT = 0.01  # of wall
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not RUNS.is_dir(), reason="no recorded runs beside the checkout"),
]


def exact(paths: list[Path]) -> dict[str, tuple[float, float]]:
    """Return exposed communication and window in seconds, by file and device."""
    return {
        f"{file.path.name}/{device.device}": (
            device.parts.exposed_comm / 1e9,
            device.parts.window / 1e9,
        )
        for file in load(paths, lambda _: None)
        for device in file.devices
    }


def sampled(out: Path) -> dict[str, tuple[float, float]]:
    """Return what is booked as spinning, and that with what it might be, by file and device."""
    with Recording([out]) as recording:
        engine.fill(recording.con)
        return {
            f"{source}/{gpu}": (least, least + more)
            for source, gpu, least, more in recording.con.execute(
                "SELECT r.source, r.gpu, sum(e.spinning_s), coalesce(sum(e.underfilled_s), 0)"
                " FROM evidence e JOIN run_info r ON r.uuid = e.uuid GROUP BY ALL"
            ).fetchall()
        }


@pytest.mark.parametrize("name", SETS)
def test_the_truth_lies_between_what_is_booked_and_what_may_be(name: str, tmp_path: Path) -> None:
    paths = sorted((RUNS / name).glob("*.json.gz"))
    truth = exact(paths)
    write(paths, tmp_path / "out")
    found = sampled(tmp_path / "out")
    assert set(found) == {key for key, (_, window) in truth.items() if window > 0}
    for key, (least, most) in found.items():
        spinning, window = truth[key]
        assert least <= spinning + POINT * window, f"{key}: {least} booked of {spinning} s"
        assert spinning <= most + POINT * window or most == 0, f"{key}: {most} s of {spinning} s"


def test_a_long_wait_is_found(tmp_path: Path) -> None:
    """Steps longer than windows: most of the wait for the sleeping rank is booked."""
    name = "kineto-torchrec-4xV100/sst_long_a2a_optimizer"
    paths = sorted((RUNS / name).glob("*.json.gz"))
    truth = exact(paths)
    write(paths, tmp_path / "out")
    found = sampled(tmp_path / "out")
    waiting = [key for key, (spinning, _) in truth.items() if spinning > 2.5]
    assert len(waiting) == 3
    for key in waiting:
        assert found[key][0] >= 0.85 * truth[key][0], key
