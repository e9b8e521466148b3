"""The page of metrics: what is on it, what is not, and that everything on it is declared."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from recording_kit import make_row, sample
from settle_kit import UUIDS, charged
from whyidle.causes import CAUSES
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect import ALL
from whyidle.ledger_counts import Counts
from whyidle.metrics import PAIRS, Choice, Pages, State
from whyidle.metrics_families import SAMPLED
from whyidle.metrics_own import FAMILIES, IDLE
from whyidle.metrics_recent import KEYS_LIMIT, Recent, scaled
from whyidle.schema import TABLES, BlockDevice, GpuActivity, GpuInfo, Tick
from whyidle.settle import Settling
from whyidle.spool_read import piece_of
from whyidle.spool_tail import SpoolTail
from whyidle.table import table_of
from world.machine import IDENTITY, Machine

NOW_NS = 500 * NS_PER_S
WALL_NS = 1_767_225_600 * NS_PER_S
Found = dict[str, dict[tuple[tuple[str, str], ...], float]]


def state(**values: object) -> State:
    plain = State(version="1.2.3", mono_ns=NOW_NS, wall_ns=WALL_NS)
    return replace(plain, **values)  # type: ignore[arg-type]


def settled(intervals: int = 3) -> Counts:
    counts = Counts()
    for number in range(intervals):
        begin, end = (300 + 30 * number) * NS_PER_S, (330 + 30 * number) * NS_PER_S
        found = charged(begin, end)
        counts.settle(begin, end, found.gpus, found.causes)
    return counts


def text(of: State, choice: Choice | None = None, accept: str = "") -> str:
    return Pages(of, choice)(accept)[0].decode()


def parsed(of: State, choice: Choice | None = None) -> Found:
    """Return the values of a page, by series and labels; each series is there once."""
    found: Found = {}
    for family in read_text(text(of, choice)):
        for one in family.samples:
            labels = tuple(sorted(one.labels.items()))
            into = found.setdefault(one.name, {})
            assert labels not in into, (one.name, labels)
            into[labels] = one.value
    return found


def test_every_cause_is_there_at_nothing_from_when_a_gpu_is_known() -> None:
    page = parsed(state(counts=Counts(), settling=Settling(), gpus={"GPU-a": "0"}))
    causes = {cause.slug for cause in CAUSES if not cause.root_only}
    for pool in ("idle", "empty", "spinning"):
        found = page[f"whyidle_gpu_{pool}_seconds_total"]
        assert {dict(labels)["cause"] for labels in found} == causes
        assert set(found.values()) == {0.0}
        assert all(dict(labels)["gpu"] == "0" for labels in found)
    assert list(page["whyidle_gpu_working_seconds_total"].values()) == [0.0]


def test_what_is_not_known_is_not_there() -> None:
    without_rules = text(state(gpus={"GPU-a": "0"}))
    assert "whyidle_gpu_" not in without_rules
    assert "whyidle_ledger" not in without_rules
    nothing_yet = parsed(state(counts=Counts(), settling=Settling()))
    assert not any(name.startswith("whyidle_gpu_") for name in nothing_yet)
    assert "whyidle_ledger_lag_seconds" not in nothing_yet
    # Rules that fail from the start have charged nothing: 0 would say that no time was idle.
    failing = Settling(failing=True, failures=2, settled=2)
    broken = parsed(state(counts=Counts(), settling=failing, gpus={"GPU-a": "0"}))
    assert not any(name.startswith("whyidle_gpu_") for name in broken)
    assert broken["whyidle_ledger_failing"] == {(): 1.0}


def test_counters_are_the_counts_to_the_nanosecond() -> None:
    counts = settled()
    counts.total = {part: ns + 8_000_000 * NS_PER_S for part, ns in counts.total.items()}
    page = parsed(state(counts=counts, settling=Settling()))
    for uuid in UUIDS:
        causes: dict[str, int] = {}
        for part, ns in counts.total.items():
            if part.uuid == uuid and part.cause is not None:
                causes[part.cause] = causes.get(part.cause, 0) + ns
        shown = {
            dict(labels)["cause"]: round(value * NS_PER_S)
            for labels, value in page["whyidle_gpu_idle_seconds_total"].items()
            if dict(labels)["uuid"] == uuid
        }
        assert {cause: ns for cause, ns in shown.items() if ns} == causes
    idle, empty, spinning = (
        sum(round(value * NS_PER_S) for value in page[f"whyidle_gpu_{pool}_seconds_total"].values())
        for pool in ("idle", "empty", "spinning")
    )
    assert idle == empty + spinning > 0


def test_subcauses_and_jobs_are_there_when_asked_for() -> None:
    counts = settled()
    plain = parsed(state(counts=counts, settling=Settling()))
    fine = parsed(state(counts=counts, settling=Settling()), Choice(subcause=True, job=True))
    assert not any(name.startswith("whyidle_job") for name in plain)
    idle = fine["whyidle_gpu_idle_seconds_total"]
    pairs = {(dict(labels)["cause"], dict(labels)["subcause"]) for labels in idle}
    assert pairs == set(PAIRS)
    assert sum(idle.values()) == pytest.approx(
        sum(plain["whyidle_gpu_idle_seconds_total"].values())
    )
    jobs = fine["whyidle_job_gpu_idle_seconds_total"]
    assert {dict(labels)["job_id"] for labels in jobs} == {"job0"}
    assert {dict(labels)["uuid"] for labels in jobs} == {"GPU-b"}
    of_b = [v for k, v in plain["whyidle_gpu_idle_seconds_total"].items() if ("uuid", "GPU-b") in k]
    assert sum(jobs.values()) == pytest.approx(sum(of_b))


def recent_of_machine(folder: Path, seconds: float) -> tuple[Recent, VirtualClock]:
    clock = VirtualClock(100 * NS_PER_S)
    machine = Machine(5, clock=clock)
    sample(folder, ALL, dict.fromkeys(ALL, machine).__getitem__, machine, clock, seconds)
    recent = Recent()
    recent.take(SpoolTail(IDENTITY.folder(folder) / "spool").look())
    return recent, clock


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> State:
    """Everything that a node may show at once."""
    recent, clock = recent_of_machine(tmp_path_factory.mktemp("sampled"), 30)
    return state(
        mono_ns=clock.now_ns,
        counts=settled(),
        settling=Settling(settled=3, windows=1440, took_ns=NS_PER_S // 4),
        gpus={uuid: recent.index(uuid) for uuid in recent.active_gpus(clock.now_ns)},
        sampled=recent.values(clock.now_ns),
        runs=recent.runs.copy(),
        newest_ns=recent.newest_ns,
        answers={200: 5},
        failed_connections={"refused": 0, "late": 1, "broken": 0},
        reload_failed=False,
    )


@pytest.mark.parametrize("choice", [Choice(), Choice(subcause=True, job=True)], ids=["", "fine"])
def test_everything_on_a_page_is_declared(page: State, choice: Choice) -> None:
    declared = {family.series: family for family in FAMILIES}
    assert len(declared) == len({family.name for family in FAMILIES})
    for family in read_text(text(page, choice)):
        for one in family.samples:
            known = declared[one.name]
            assert family.type == known.kind
            labels = set(known.labels)
            if by := getattr(known, "by", ""):
                labels.add(by)
            if choice.subcause and known is IDLE:
                labels.add("subcause")
            assert set(one.labels) == labels, one.name
    shown = {sample.name for family in read_text(text(page, choice)) for sample in family.samples}
    assert len(shown) > 30


def test_openmetrics_is_spoken_too(page: State) -> None:
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1"
    body, kind = Pages(page)(accept)
    assert kind.startswith("application/openmetrics-text")
    both = []
    openmetrics = read_openmetrics(body.decode())  # type: ignore[no-untyped-call]
    for found in (openmetrics, read_text(text(page))):
        samples = [one for family in found for one in family.samples]
        both.append({(one.name, tuple(sorted(one.labels.items()))): one.value for one in samples})
    assert both[0] == both[1]


def test_promtool_finds_nothing_to_say(page: State) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    for choice in (Choice(), Choice(subcause=True, job=True)):
        said = subprocess.run(
            [promtool, "check", "metrics"],
            input=text(page, choice),
            text=True,
            capture_output=True,
            check=False,
        )
        assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_a_page_is_made_once_for_a_state(page: State, monkeypatch: pytest.MonkeyPatch) -> None:
    from whyidle import metrics

    made: list[State] = []
    real = metrics.families

    def counting(of: State, choice: Choice) -> object:
        made.append(of)
        return real(of, choice)

    monkeypatch.setattr(metrics, "families", counting)
    pages = Pages(page)
    assert [pages("")[0] for _ in range(5)] == [pages("")[0]] * 5
    assert len(made) == 1
    pages.publish(replace(page, version="2"))
    assert b'version="2"' in pages("")[0]
    assert len(made) == 2


def test_families_are_columns_of_declared_tables() -> None:
    tables = {table_of(row).name: table_of(row) for row in TABLES}
    for family in SAMPLED:
        spec = tables[family.table]
        keys = [column.name for column in spec.columns if column.kind == "key"]
        assert set(family.keys) <= set(keys)
        rest = {"gpu"} if family.labels[:1] == ("gpu",) else set()
        assert len(family.labels) == len(family.keys) + len(rest)
        assert bool(family.by) == (len(family.columns) > 1)
        for name, _ in family.columns:
            column = spec.column(name)
            if family.way == "newest":
                assert column.kind == family.kind, (family.name, name)
            unit = {"bytes": "bytes", "ratio": "ratio", "ns": "seconds", "ms": "seconds"}
            if column.unit in unit:
                assert family.name.endswith(unit[column.unit]), family.name


# The sampled part.


def activity(t1_s: float, ratio: float | None, *, length_s: float = 0.125) -> GpuActivity:
    t1 = int(t1_s * NS_PER_S)
    return make_row(
        GpuActivity,
        mono_ns=t1,
        uuid="GPU-a",
        source="gpm",
        t0_ns=t1 - int(length_s * NS_PER_S),
        t1_ns=t1,
        sm_active_ratio=ratio,
        pcie_tx_bytes=1000,
    )


def test_ratios_are_means_over_windows_and_bytes_are_sums() -> None:
    recent = Recent()
    info = make_row(GpuInfo, mono_ns=1, uuid="GPU-a", gpu=3, name="H100")
    recent.take(
        [piece_of([info, activity(1, 1.0, length_s=0.3), activity(1.1, 0.0, length_s=0.1)])]
    )
    values = recent.values(2 * NS_PER_S)
    assert values["whyidle_gpu_sm_active_ratio"] == {("3", "GPU-a"): pytest.approx(0.75)}
    assert values["whyidle_gpu_pcie_transmit_bytes"] == {("3", "GPU-a"): 2000}
    recent.take([piece_of([activity(1.2, 0.5)])])
    values = recent.values(2 * NS_PER_S)
    assert values["whyidle_gpu_sm_active_ratio"] == {("3", "GPU-a"): 0.5}
    assert values["whyidle_gpu_pcie_transmit_bytes"] == {("3", "GPU-a"): 3000}
    # No window since: a mean of none is not known.
    assert "whyidle_gpu_sm_active_ratio" not in {
        k for k, v in recent.values(2 * NS_PER_S).items() if v
    }


def test_what_is_stale_goes_away() -> None:
    recent = Recent()
    recent.take([piece_of([activity(1, 1.0)])])
    assert recent.active_gpus(2 * NS_PER_S) == ["GPU-a"]
    assert recent.active_gpus(20 * NS_PER_S) == []
    assert not any(recent.values(20 * NS_PER_S).values())


def test_labels_are_bounded() -> None:
    recent = Recent()
    disks = [
        make_row(BlockDevice, mono_ns=NS_PER_S, device=f"sd{number}")
        for number in range(KEYS_LIMIT + 50)
    ]
    recent.take([piece_of(disks)])
    assert len(recent.values(NS_PER_S)["whyidle_node_disk_read_bytes"]) == KEYS_LIMIT


def test_runs_of_collectors_are_accounted_for() -> None:
    ticks = [
        make_row(
            Tick, mono_ns=second, collector="cpu", lane="normal", began_ns=second, missed=missed
        )
        for second, missed in ((1, 0), (2, 3))
    ]
    recent = Recent()
    recent.take([piece_of(ticks), piece_of([make_row(Tick, mono_ns=9, collector="cpu", missed=2)])])
    assert recent.runs.runs["cpu"] == 2
    assert recent.runs.missed["cpu"] == 5
    assert recent.newest_ns == 9


def test_values_are_in_base_units() -> None:
    assert scaled(312_100, 1e-3) == 312.1
    assert scaled(1980, 1e6) == 1.98e9
    assert scaled(7, 1.0) == 7.0


def test_a_tail_yields_each_row_once(tmp_path: Path) -> None:
    clock = VirtualClock(100 * NS_PER_S)
    machine = Machine(5, clock=clock)
    tail = SpoolTail(IDENTITY.folder(tmp_path) / "spool")
    assert tail.look() == []
    seen = 0
    for _ in range(4):
        sample(tmp_path, ALL, dict.fromkeys(ALL, machine).__getitem__, machine, clock, 7)
        seen += sum(piece.counts["tick"] for piece in tail.look())
        assert tail.look() == []
    from whyidle.store import Recording

    with Recording([tmp_path]) as opened:
        (ticks,) = opened.con.execute("SELECT count(*) FROM tick").fetchall()[0]
    assert seen == ticks
