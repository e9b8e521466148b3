"""whyidle doctor: every source judged, every sentence with what to type, one screen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recording_kit import make_row
from trees import BEGIN_NS, host_of, write
from vgpu import Standin, a100, h100, standin
from whyidle.clock import SystemClock, VirtualClock
from whyidle.collect import ALL
from whyidle.collect.collector import Collector, NoData, Problem
from whyidle.doctor import (
    Examination,
    Finding,
    Outcome,
    examine,
    examine_collectors,
    judge,
    run_once,
)
from whyidle.doctor_advice import ABOUT, ADVICE, SECTIONS, advise
from whyidle.doctor_checks import CHECKS, Rows
from whyidle.host import Host, NvmlError
from whyidle.schema import ClockReading, Cpu, Gds, GpuActivity, GpuInfo
from whyidle_rules import evidence
from whyidle_rules.doctor_columns import COLUMNS, EVERYTHING, INSTEAD, blind
from whyidle_rules.doctor_text import Style, render
from whyidle_rules.rule_load import load_rules

RULES = load_rules(site=Path(__file__).with_name("no-such-folder"))
WIDE = Style(width=100, colour=False, ascii_only=False)
UUID = "GPU-00000000-0000-4000-8000-000000000000"


def outcome(*found: object, runs: int = 2) -> Outcome:
    """What a collector gave: rows and problems, or an exception."""
    made = Outcome()
    for _ in range(runs):

        def collect(host: Host) -> Iterator[object]:
            for item in found:
                if isinstance(item, Exception):
                    raise item
                yield item

        run_once(collect, host_of(Path("/nowhere")), made)
    return made


def row() -> Cpu:
    return make_row(Cpu, mono_ns=1)


@pytest.mark.parametrize(
    ("name", "found", "state", "why"),
    [
        ("cpu", [row()], "works", ""),
        ("nfs", [NoData("no NFS is mounted")], "absent", "no NFS is mounted"),
        ("process", [NoData("no process is watched: x")], "idle", "no job runs now"),
        ("xid", [], "idle", ""),
        (
            "gpu_activity",
            [row(), Problem(subject="a", message="no GPM", kind="no_data")],
            "works",
            "no GPM",
        ),
        ("cpu", [row(), Problem(subject="sda", message="EIO")], "partly", "sda: EIO"),
        ("cpu", [Problem(subject="", message="EIO")], "broken", "EIO"),
        ("cpu", [PermissionError(13, "Permission denied", "x")], "refused", "Permission denied: x"),
        ("cpu", [ValueError("bad")], "broken", "ValueError: bad"),
        (
            "xid",
            [NoData("the kernel log may not be read: give the agent CAP_SYSLOG")],
            "refused",
            "the kernel log may not be read: give the agent CAP_SYSLOG",
        ),
        ("pressure", [NoData("it was built without PSI or needs psi=1 at boot")], "off", None),
        (
            "gpu_info",
            [NvmlError(9, "Init", "Driver Not Loaded")],
            "refused",
            "the NVIDIA driver is not loaded",
        ),
        (
            "gpu_info",
            [NvmlError(18, "Init", "Driver/library version mismatch")],
            "broken",
            "the driver in the kernel and its library are of two versions",
        ),
        (
            "gpu_state",
            [row(), Problem(subject=UUID, message="NVML PowerUsage: GPU is lost (15)")],
            "broken",
            None,
        ),
    ],
)
def test_states(name: str, found: list[object], state: str, why: str | None) -> None:
    finding = judge(name, outcome(*found))
    assert finding.state == state
    assert why is None or finding.why == why


def test_who_did_not_run_twice_is_late() -> None:
    assert judge("gpu_state", outcome(row(), runs=1)).state == "late"
    assert judge("gpu_state", Outcome()).state == "late"


def test_every_piece_of_advice_says_what_to_type_or_that_nothing_is_missing() -> None:
    for advice in ADVICE:
        assert advice.fix or advice.state in ("idle", "absent"), advice.pattern.pattern
    assert advise("cpu", "") is None
    assert advise("cpu", "something new") is None


def test_every_source_has_a_place_on_the_screen() -> None:
    assert {collector.name for collector in ALL} <= set(ABOUT)
    for section, shows in [*ABOUT.values(), *((c.section, c.shows) for c in CHECKS)]:
        assert section in SECTIONS
        assert len(shows) <= 44, shows


def test_columns_and_sources_exist() -> None:
    sources = {*ABOUT, *(check.name for check in CHECKS)}
    assert set(COLUMNS) | set(INSTEAD) | EVERYTHING <= sources
    for columns in COLUMNS.values():
        assert set(columns) <= set(evidence.BY_NAME)


def test_rules_that_are_blind() -> None:
    assert set(blind("gpu_activity", (), RULES)) == {rule.id for rule in RULES}
    assert "quota_throttled" in blind("cgroup_cpu", (), RULES)
    assert "gc" in blind("probe", (), RULES)
    assert "xid" in blind("xid", (), RULES)
    assert blind("xid", ("gpu_event",), RULES) == (), "the other witness tells"
    assert blind("numa", (), RULES) == ()


# Switches


def look(name: str, root: Path, rows: Rows | None = None) -> Any:
    check = next(check for check in CHECKS if check.name == name)
    return check.look(host_of(root), rows or {})


def test_a_gpu_without_its_driver(tmp_path: Path) -> None:
    assert look("driver", tmp_path) is None
    gpu = "sys/bus/pci/devices/0000:19:00.0"
    write(tmp_path, {f"{gpu}/vendor": "0x10de\n", f"{gpu}/class": "0x030200\n"})
    told = look("driver", tmp_path)
    assert (told.state, "0000:19:00.0" in told.why) == ("refused", True)
    assert look("driver", tmp_path, {"gpu_info": [make_row(GpuInfo)]}) is None
    write(tmp_path, {f"{gpu}/class": "0x040300\n"})
    assert look("driver", tmp_path) is None, "the sound of a graphics card"


def test_gpm(tmp_path: Path) -> None:
    def activity(uuid: str, source: str) -> GpuActivity:
        return make_row(GpuActivity, uuid=uuid, source=source)

    assert look("gpm", tmp_path) is None
    rows = {"gpu_activity": [activity("a", "gpm"), activity("b", "gpm"), activity("b", "nvml")]}
    assert look("gpm", tmp_path, rows).state == "works"
    rows = {"gpu_activity": [activity("a", "gpm"), activity("b", "nvml")]}
    told = look("gpm", tmp_path, rows)
    assert (told.state, told.why[:10]) == ("partly", "1 of 2 GPU")


def test_delay_accounting(tmp_path: Path) -> None:
    assert look("delay_accounting", tmp_path) is None
    write(tmp_path, {"proc/sys/kernel/task_delayacct": "0\n"})
    assert "task_delayacct=1" in look("delay_accounting", tmp_path).fix
    write(tmp_path, {"proc/sys/kernel/task_delayacct": "1\n"})
    assert look("delay_accounting", tmp_path).state == "works"


def test_process_ids_of_a_container(tmp_path: Path) -> None:
    rows = {"gpu_info": [make_row(GpuInfo)]}
    assert look("process_ids", tmp_path) is None, "without GPUs it does not matter"
    assert "hostPID" in look("process_ids", tmp_path, rows).fix
    write(tmp_path, {"proc/2/comm": "kthreadd\n"})
    assert look("process_ids", tmp_path, rows).state == "works"


def test_clocks(tmp_path: Path) -> None:
    def told(synchronised: bool | None) -> Any:
        reading = make_row(ClockReading, synchronised=synchronised)
        return look("time_service", tmp_path, {"clock": [reading]})

    assert look("time_service", tmp_path) is told(None) is None
    assert told(True).state == "works"
    assert "chrony" in told(False).fix


def test_statistics_of_gds(tmp_path: Path) -> None:
    def told(io_stats: bool | None) -> Any:
        return look("gds_statistics", tmp_path, {"gds": [make_row(Gds, io_stats=io_stats)]})

    assert look("gds_statistics", tmp_path) is told(None) is None
    assert told(True).state == "works"
    assert "rw_stats_enabled" in told(False).fix


# The machine


def test_a_source_that_hangs_takes_no_other_along() -> None:
    release = threading.Event()

    def stuck(host: Host) -> list[Cpu]:
        release.wait(30)
        return []

    collectors = [
        Collector(name="gpu_state", lane="slow", make=lambda: stuck, thread="nvml"),
        Collector(name="gpu_info", lane="slow", make=lambda: lambda host: [row()], thread="nvml"),
        Collector(name="cpu", lane="slow", make=lambda: lambda host: [row()]),
    ]
    found = examine_collectors(
        lambda: host_of(Path("/nowhere"), clock=VirtualClock(BEGIN_NS)),
        SystemClock(),
        collectors=collectors,
        deadline_s=0.6,
    )
    states = {name: judge(name, result).state for name, result in found.items()}
    release.set()
    assert states == {"gpu_state": "late", "gpu_info": "late", "cpu": "works"}


def test_this_machine() -> None:
    found = examine("/", SystemClock())
    states = {finding.name: finding.state for finding in found.findings}
    assert {collector.name for collector in ALL} <= set(states)
    assert [states[name] for name in ("cpu", "vmstat", "process", "mount")] == ["works"] * 4
    assert found.node and found.kernel
    assert "broken" not in states.values(), [f for f in found.findings if f.state == "broken"]


_MAIN = "from whyidle_rules.cli import main; raise SystemExit(main())"


def doctor(node: Standin, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _MAIN, "doctor", *words],
        env={**os.environ, **node.env, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def sources(node: Standin) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    done = doctor(node, "--json")
    assert (done.returncode, done.stderr) in ((0, ""), (1, ""))
    said = json.loads(done.stdout)
    assert done.returncode == (1 if said["can_be_mended"] else 0)
    return {source["name"]: source for source in said["sources"]}, said


def test_a_node_with_gpus(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=2, profile=h100) as node:
        found, said = sources(node)
        assert (said["schema"], said["gpus"]) == (
            "whyidle.doctor/1",
            ["NVIDIA H100 80GB HBM3"] * 2,
        )
        names = ("gpu_activity", "gpu_state", "gpu_info", "gpu_nvlink", "gpu_total", "gpm")
        assert [found[name]["state"] for name in names] == ["works"] * 6
        assert found["gpu_activity"]["rows"] == 2
        assert found["gpu_activity"]["blind_rules"] == []
        node.state.gpus[1].gpm(code=4)
        found, _ = sources(node)
        refused = found["gpu_activity"]
        assert (refused["state"], "(4)" in refused["why"]) == ("partly", True)
        assert "NVreg_RestrictProfilingToAdminUsers=0" in refused["fix"]
        screen = doctor(node).stdout
        assert "2 x NVIDIA H100 80GB HBM3" in screen
        assert "To mend" in screen and "options nvidia" in screen
        assert max(map(len, screen.splitlines())) <= 100


def test_older_gpus_are_said_to_show_less(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=2, profile=a100) as node:
        found, _ = sources(node)
        assert found["gpu_activity"]["state"] == "works"
        assert found["gpm"]["state"] == "partly"
        assert "WHYIDLE_DCGM_URL" in found["gpm"]["fix"]
        assert "collective_exposed" in found["gpm"]["blind_rules"]


def test_no_gpu_that_may_be_seen(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=0) as node:
        found, _ = sources(node)
        assert found["gpu_info"]["state"] == "refused"
        assert "/dev/nvidia*" in found["gpu_info"]["fix"]


# The screen


def examination(*findings: Finding) -> Examination:
    return Examination(
        node="gpu01", kernel="6.1", user_id=0, gpus=(), driver=None, findings=findings
    )


def test_the_screen() -> None:
    found = examination(
        Finding(name="gpu_state", section="GPUs", shows="power", state="works"),
        Finding(name="nfs", section="Storage", shows="NFS", state="absent", why="none (no x)"),
        Finding(
            name="delays",
            section="Job",
            shows="waits",
            state="off",
            why="the kernel does not count",
            fix="sudo sysctl a=1    # from then on",
        ),
        Finding(name="other", section="Node", shows="x", state="late", why="hangs"),
        Finding(name="another", section="Node", shows="y", state="late", why="hangs"),
    )
    text = render(found, {"delays": [f"rule{n}" for n in range(8)], "another": ["z"]}, WIDE)
    assert text == (
        "What whyidle sees on this node\n"
        "gpu01 · no GPU seen · no NVIDIA driver · kernel 6.1 · as root\n"
        "\n"
        "GPUs\n"
        "  ✓ gpu_state         power\n"
        "\n"
        "Job\n"
        "  ! delays            waits                                         off, see below\n"
        "\n"
        "Storage\n"
        "  · nfs               NFS                                           none\n"
        "\n"
        "Node\n"
        "  ! other             x                                             no answer, see below\n"
        "  ! another           y                                             no answer, see below\n"
        "\n"
        "To mend\n"
        "  ! delays            the kernel does not count\n"
        "                      $ sudo sysctl a=1\n"
        "                        # from then on\n"
        f"{'':22}blind without it: rule0, rule1, rule2, rule3, rule4, rule5 and 2 more\n"
        "  ! other             hangs (also: another)\n"
        "                      blind without it: z\n"
        "\n"
        "1 work, 3 can be mended, 1 are not on this machine.\n"
    )


def test_text_of_others_cannot_steer_the_terminal() -> None:
    found = examination(
        Finding(name="a\x1b[2J", section="Node", shows="x", state="broken", why="\x1b]0;pwn\x07")
    )
    plain = render(found, {}, WIDE)
    assert "\x1b" not in plain and "\x07" not in plain
    coloured = render(found, {}, Style(width=100, colour=True, ascii_only=False))
    assert "\x1b[2J" not in coloured and "\x1b]0" not in coloured and "\x1b[33m" in coloured


def test_ascii_and_narrow_screens() -> None:
    found = examination(
        Finding(name="a", section="Node", shows="é" * 60, state="refused", why="w " * 100)
    )
    text = render(found, {}, Style(width=40, colour=False, ascii_only=True))
    assert text.isascii()
    assert all(len(line) <= 80 for line in text.splitlines())
