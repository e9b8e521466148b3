"""The agent as a service: readiness, the watchdog, reload, parts, and letting go of the GPUs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from service_kit import Agent, agent, run, wait_for
from vgpu import standin
from whyidle.child import Step
from whyidle.clock import NS_PER_S, SystemClock, VirtualClock
from whyidle.host import LiveHost
from whyidle.notify import Notifier
from whyidle.release import WHY, DriverWatch, holders
from whyidle.store import Recording
from whyidle.supervisor import SAMPLER_LIMITS_S, Child


def log_of(one: Agent) -> list[str]:
    return one.log.read_text().splitlines()


def pieces(recording: Path) -> list[Path]:
    """Return the pieces of the spool that nobody has taken yet."""
    return sorted(recording.rglob("*.wsp"))


def largest_gap_s(recording: Path) -> float:
    with Recording([recording]) as opened:
        assert opened.damaged == []
        gap = opened.con.execute(
            "SELECT max(mono_ns - before) / 1e9 FROM (SELECT mono_ns, lag(mono_ns) OVER "
            "(ORDER BY mono_ns) AS before FROM clock)"
        ).fetchone()
    assert gap is not None
    return float(gap[0])


def test_it_is_ready_when_it_records_and_feeds_the_watchdog(tmp_path: Path) -> None:
    recording = tmp_path / "r"
    with agent(tmp_path, "-o", str(recording), watchdog_s=20) as one:
        said = one.wait_for("READY=1")
        assert said == f"READY=1\nSTATUS=recording into {recording}"
        assert list(recording.rglob("*.wsp"))  # a block was written before it said so
        one.wait_for("WATCHDOG=1")
        heard = len(one.hear())
        one.wait_for("WATCHDOG=1", after=heard, seconds=5)
        begun = time.monotonic()
        assert one.stop() == 0
        assert time.monotonic() - begun < 5
        assert one.hear()[-1].startswith("STOPPING=1\n")
        assert one.hear().count(said) == 1
        assert f"<6>whyidle agent: recording into {recording}" in log_of(one)
    assert list(recording.rglob("*.wsp")) == []
    assert largest_gap_s(recording) < 3


def test_no_watchdog_is_fed_that_nobody_asked_for(tmp_path: Path) -> None:
    with agent(tmp_path, "-o", "r") as one:
        one.wait_for("READY=1")
        time.sleep(2.2)
        assert [text for text in one.hear() if text.startswith("WATCHDOG")] == []
        one.stop()


@pytest.mark.slow
def test_a_sampler_that_hangs_starves_the_watchdog(tmp_path: Path) -> None:
    with agent(tmp_path, "-o", "r", watchdog_s=20) as one:
        one.wait_for("READY=1")
        os.kill(one.children()["sampler_process"], signal.SIGSTOP)
        hung = one.wait_for("STATUS=whyidle.sampler_process has not told of its loop", seconds=20)
        assert hung.endswith(("10 s", "11 s"))
        heard = len(one.hear())
        time.sleep(3)
        assert [text for text in one.hear()[heard:] if "WATCHDOG" in text] == []
        os.kill(one.children()["sampler_process"], signal.SIGCONT)
        one.wait_for("WATCHDOG=1", after=heard)
        one.stop()


def test_a_child_that_keeps_ending_makes_no_progress() -> None:
    clock = VirtualClock()
    child = Child("no.such.module", (), clock, patience_s=1, limits_s={Step.LOOP: 10})
    try:
        for _ in range(12):
            clock.advance(NS_PER_S)
            child.tend()
        assert not child.ready()
        assert child.overdue() == "no.such.module has not told of its loop for 12 s"
    finally:
        child.stop()


def test_a_slow_disk_is_given_more_time_than_the_loop() -> None:
    assert SAMPLER_LIMITS_S[Step.LOOP] < 60 < SAMPLER_LIMITS_S[Step.WRITE]


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({"WATCHDOG_USEC": "20000000"}, 20.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "7"}, 20.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_for_the_process_it_names(
    variables: dict[str, str], seconds: float | None
) -> None:
    assert Notifier(variables, 7).watchdog_s == seconds


def test_a_manager_that_is_gone_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}, 7)
    notifier.ready("a")
    notifier.status("b")
    assert [record.message for record in caplog.records] in (
        ["systemd cannot be told anything: No such file or directory"],
        [],  # the log of the package may have been set up by another test
    )
    Notifier({}, 7).ready("nobody is told")


def test_a_reload_takes_a_good_file_and_refuses_a_bad_one(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(f"recording: {tmp_path}/r\nnode: n1\n")
    with agent(tmp_path, "--config", str(file)) as one:
        one.wait_for("READY=1")
        before = one.children()

        file.write_text(f"recording: {tmp_path}/r\nnode: n1\nkeep: {{dais: 3}}\n")
        heard = len(one.hear())
        one.process.send_signal(signal.SIGHUP)
        assert "MONOTONIC_USEC=" in one.wait_for("RELOADING=1", after=heard)
        why = f"{file}:3:8: there is no setting `keep.dais`; did you mean `keep.days`?"
        said = one.wait_for("READY=1", after=heard)
        assert said.startswith(f"READY=1\nSTATUS=the old configuration stays: {file}:3:8: ")
        assert f"<3>whyidle agent: the old configuration stays: {why}" in log_of(one)
        assert one.children() == before

        file.write_text(f"recording: {tmp_path}/other\nnode: n1\n")
        one.process.send_signal(signal.SIGHUP)
        wait_for(lambda: any("`recording` changed, which takes" in line for line in log_of(one)))
        assert one.children() == before

        file.write_text(f"recording: {tmp_path}/r\nnode: n1\nkeep: {{days: 3}}\n")
        one.process.send_signal(signal.SIGHUP)
        wait_for(lambda: one.children().keys() == before.keys() and one.children() != before)
        after = one.children()
        assert after["sampler_process"] == before["sampler_process"]
        arguments = Path(f"/proc/{after['keeper_process']}/cmdline").read_bytes().split(b"\0")
        assert arguments[arguments.index(b"--retain-s") + 1] == b"259200.0"
        # The keeper that left has not taken the piece that is still being written.
        assert pieces(tmp_path / "r")

        file.write_text(f"recording: {tmp_path}/r\nnode: n1\ncollectors: {{without: [vmstat]}}\n")
        one.process.send_signal(signal.SIGHUP)
        wait_for(
            lambda: one.children().get("sampler_process", 0) not in (0, before["sampler_process"])
        )
        wait_for(lambda: pieces(tmp_path / "r"))
        time.sleep(2)
        assert one.stop() == 0
    with Recording([tmp_path / "r"]) as opened:
        pids = opened.con.execute(
            "SELECT DISTINCT pid FROM agent_self WHERE part = 'sampler'"
        ).fetchall()
        quiet = opened.con.execute(
            "SELECT (SELECT max(mono_ns) FROM cpu) - (SELECT max(mono_ns) FROM vmstat)"
        ).fetchone()
    assert len(pids) == 2
    assert quiet is not None
    assert quiet[0] > 1.5e9
    assert largest_gap_s(tmp_path / "r") < 10


def test_two_parts_are_two_services(tmp_path: Path) -> None:
    recording = tmp_path / "r"
    words = ("-o", str(recording), "--node", "n1")
    with (
        agent(tmp_path / "s", *words, "--part", "sampler") as sampler,
        agent(tmp_path / "k", *words, "--part", "keeper") as keeper,
    ):
        sampler.wait_for("READY=1")
        keeper.wait_for("READY=1")
        assert set(sampler.children()) == {"sampler_process"}
        assert set(keeper.children()) == {"keeper_process"}
        time.sleep(1.5)
        assert keeper.stop() == 0  # the sampler goes on: its piece is left alone
        assert pieces(recording)
        with agent(tmp_path / "k2", *words, "--part", "keeper") as again:
            again.wait_for("READY=1")
            time.sleep(1.5)
            assert sampler.stop() == 0
            assert again.stop() == 0
    assert list(recording.rglob("*.wsp")) == []
    assert largest_gap_s(recording) < 3


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_the_gpus_are_let_go_and_taken_back(tmp_path: Path) -> None:
    recording = tmp_path / "r"
    with (
        standin(tmp_path, gpus=1) as node,
        agent(tmp_path / "a", "-o", str(recording), "--node", "n1", env=node.env) as one,
    ):
        one.wait_for("READY=1")
        before = one.children()
        wait_for(lambda: "libnvidia-ml" in maps(before["sampler_process"]))
        time.sleep(1)
        asked = ("release", "-o", str(recording), "--node", "n1")

        done = run(tmp_path, *asked)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("the agent has let go of the GPUs and records everything")
        between = one.children()
        assert between["sampler_process"] != before["sampler_process"]
        assert between["keeper_process"] == before["keeper_process"]
        one.wait_for(f"STATUS=recording into {recording}; the GPUs were released")
        time.sleep(2)
        assert "libnvidia-ml" not in maps(between["sampler_process"])
        assert run(tmp_path, *asked).returncode == 0  # once more is no harm

        done = run(tmp_path, *asked, "--resume")
        assert (done.returncode, done.stdout) == (0, "the agent has taken the GPUs back.\n")
        wait_for(lambda: "libnvidia-ml" in maps(one.children()["sampler_process"]))
        time.sleep(2)
        assert one.stop() == 0
    with Recording([recording]) as opened:
        told = opened.con.execute(
            "SELECT collector FROM collector_error WHERE message = ? GROUP BY ALL", [WHY]
        ).fetchall()
        gap = opened.con.execute(
            "SELECT max(t0_ns - before) / 1e9 FROM (SELECT t0_ns, lag(t1_ns) OVER (ORDER BY t1_ns) "
            "AS before FROM gpu_activity)"
        ).fetchone()
    assert ("gpu_activity",) in told
    assert gap is not None
    assert gap[0] > 2
    assert largest_gap_s(recording) < gap[0]  # everything else went on


def test_there_has_to_be_an_agent_to_let_go(tmp_path: Path) -> None:
    done = run(tmp_path, "release", "-o", "nowhere")
    assert done.returncode == 2
    assert done.stderr == (
        "whyidle: no agent of this node is recording into nowhere: nothing holds the GPUs; name "
        "another recording with -o\n"
    )


def test_a_driver_that_went_and_came_back_ends_a_release(tmp_path: Path) -> None:
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: 1\n")
    watch = DriverWatch(LiveHost(str(tmp_path), SystemClock()))
    assert not watch.is_back()
    version.unlink()
    assert not watch.is_back()
    assert not watch.is_back()
    version.write_text("NVRM version: 2\n")
    assert watch.is_back()


def test_processes_that_hold_a_device_are_found(tmp_path: Path) -> None:
    device = tmp_path / "nvidia0"
    with device.open("w"):
        found = dict(holders(devices=str(device)))
        assert os.getpid() in found
    assert os.getpid() not in dict(holders(devices=str(device)))
