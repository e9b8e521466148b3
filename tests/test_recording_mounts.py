"""What a mount gave beside what a job would have read; checkpoints that go with their node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from recording_kit import make_row
from recording_rows import Act, clocks, connect, gpu, holds, listed, process, s, start_of, windows
from recording_stories import about, loader, pages, reads_from
from whyidle.schema import FileUse, Mount, NvmeController, NvmeNamespace
from whyidle.table import Row
from whyidle_rules.diagnosis import Finding
from whyidle_rules.recording.diagnose import diagnose
from whyidle_rules.recording.spans import spans
from whyidle_rules.rule import Rule
from whyidle_rules.rule_load import load_rules

SECONDS = 40
TRAINER, WORKER = 7, 8
MOMENTS = [number / 2 for number in range(2 * SECONDS + 1)]


@pytest.fixture(scope="module")
def rules() -> Sequence[Rule]:
    return load_rules()


def story(told: list[tuple[str, float, float]], busy: list[float], more: list[Row]) -> list[Row]:
    held = [*holds(TRAINER, until=SECONDS), *listed(0, SECONDS)]
    trainer = process(TRAINER, [(SECONDS, Act(run=0.2, write=0.0))])
    known = [about(TRAINER), about(WORKER, parent_pid=TRAINER)]
    page = pages(TRAINER, told, MOMENTS)
    return [*clocks(0, SECONDS), gpu(), *trainer, *known, *held, *page, *windows(busy), *more]


def found(rows: list[Row], rules: Sequence[Rule], rule: str) -> list[Finding]:
    con = connect(rows)
    told = diagnose(con, ["x"], rules, spans(con, None, None)).findings
    return [finding for finding in told if finding.rule == rule]


def reads(run: float, blocked: float, waits: float, per_s: float | None = 300e6) -> list[Row]:
    """Return a job that waits for this part of each second, its one worker reading or computing."""
    act = Act(run=run, blkio=blocked, state="D", read=per_s, asked=per_s, write=0.0)
    worker = process(WORKER, [(SECONDS, act)], kind="data_worker", parent=TRAINER)
    told = [("data_wait", float(n), n + waits) for n in range(SECONDS)]
    busy = [0.0 if place < waits * 8 else 1.0 for place in range(8)] * SECONDS
    own = loader(TRAINER, MOMENTS, workers=1)
    return story(told, busy, [*worker, *own, *reads_from(WORKER, "nfs", "/data", 0, SECONDS)])


def test_what_the_job_would_read_had_it_not_waited(rules: Sequence[Rule]) -> None:
    (finding,) = found(reads(0.0, 1.0, 0.5), rules, "supply_below_demand")
    assert finding.evidence["loader_megabytes_per_s"] == pytest.approx(300, rel=0.05)
    assert finding.evidence["wanted_megabytes_per_s"] == pytest.approx(600, rel=0.1)
    assert finding.says.startswith("/data gave 3")
    assert finding.beside_s == pytest.approx(SECONDS / 2, rel=0.15)
    assert (finding.idle_s, finding.severity) == (0.0, "info")


@pytest.mark.parametrize(
    "rows",
    [reads(0.9, 0.1, 0.5), reads(0.0, 1.0, 0.0), reads(0.0, 1.0, 0.5, None)],
    ids=["it decodes", "nobody waits", "bytes unknown"],
)
def test_storage_that_is_not_asked_for_more(rows: list[Row], rules: Sequence[Rule]) -> None:
    assert found(rows, rules, "supply_below_demand") == []


def writes(kind: str, point: str, at: float) -> Row:
    return make_row(
        FileUse, mono_ns=s(at), pid=TRAINER, start_ns=start_of(0.0), mount_id=1, kind=kind,
        mount_point=point, write_files=1,
    )  # fmt: skip


def drive(model: str) -> list[Row]:
    mount = {"mount_point": "/scratch", "kind": "block", "device": "259:0"}
    return [
        make_row(Mount, mono_ns=s(0), mount_id=1, block_device="nvme1n1", **mount),
        make_row(NvmeNamespace, mono_ns=s(0), device="nvme1n1", controllers="nvme1"),
        make_row(NvmeController, mono_ns=s(0), controller="nvme1", model=model),
    ]


def saves(*looks: Row) -> list[Row]:
    """Return a job that saves a checkpoint from second 10 to 20."""
    busy = [0.0 if 10 <= n / 8 < 20 else 1.0 for n in range(8 * SECONDS)]
    return story([("checkpoint_save", 10.0, 20.0)], busy, list(looks))


@pytest.mark.parametrize(
    ("looks", "point", "why"),
    [
        ([writes("tmpfs", "/tmp", 12)], "/tmp", "the memory of the node"),
        ([writes("overlay", "/", 12)], "/", "the container"),
        (
            [writes("block", "/scratch", 12), *drive("Amazon EC2 NVMe Instance Storage")],
            "/scratch",
            "rents its disk",
        ),
    ],
    ids=["memory", "container", "instance store"],
)
def test_a_checkpoint_that_goes_with_its_node(
    looks: list[Row], point: str, why: str, rules: Sequence[Rule]
) -> None:
    (finding,) = found(saves(*looks), rules, "checkpoint_on_node")
    assert finding.beside_s == pytest.approx(10, abs=0.3)
    assert f"to {point} alone" in finding.says and why in finding.says
    assert finding.severity == "info"


@pytest.mark.parametrize(
    "looks",
    [
        [writes("nfs", "/home", 12)],
        [writes("tmpfs", "/tmp", 12), writes("lustre", "/lustre", 15)],
        [writes("tmpfs", "/tmp", 30)],
        [writes("block", "/scratch", 12), *drive("SAMSUNG MZQL23T8HCLS")],
        [writes("block", "/scratch", 12)],
        [],
    ],
    ids=["NFS", "logs beside it", "not while it saves", "a drive of its own", "unknown", "no look"],
)
def test_a_checkpoint_that_stays_or_of_which_it_is_not_known(
    looks: list[Any], rules: Sequence[Rule]
) -> None:
    assert found(saves(*looks), rules, "checkpoint_on_node") == []
