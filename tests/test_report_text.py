"""The terminal report: golden screens, hostile strings, and what must hold for any diagnosis.

`WHYIDLE_WRITE_EXPECTED=1 pytest tests/test_report_text.py` writes the screens anew; read the
difference before you commit it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from report_build import diagnosis, finding, gpu, row
from report_cases import CASES
from whyidle.causes import CAUSES
from whyidle_rules.diagnosis import Diagnosis, GpuLedger, Grade, LedgerRow, NotSeen, Quality
from whyidle_rules.report.text import render_text

EXPECTED = Path(__file__).parent / "expected"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    case: str
    width: int
    verbose: bool = False
    ascii_only: bool = False

    @property
    def path(self) -> Path:
        flags = "-verbose" * self.verbose + "-ascii" * self.ascii_only
        return EXPECTED / f"{self.case}-{self.width}{flags}.txt"


SCREENS = (
    Screen(case="healthy", width=80),
    Screen(case="sleeper", width=100),
    Screen(case="sleeper", width=60),
    Screen(case="sleeper", width=200, verbose=True),
    Screen(case="many_ranks", width=80),
    Screen(case="many_ranks", width=120, verbose=True),
    Screen(case="no_gpu_events", width=80),
    Screen(case="all_unattributed", width=80),
    Screen(case="own_loading", width=100, verbose=True),
    Screen(case="mixed", width=100),
    Screen(case="hostile", width=80),
    Screen(case="hostile", width=100, verbose=True, ascii_only=True),
)


def render(d: Diagnosis, width: int = 100, **options: bool) -> str:
    return render_text(
        d,
        width=width,
        colour=options.get("colour", False),
        verbose=options.get("verbose", False),
        ascii_only=options.get("ascii_only", False),
    )


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: screen.path.stem)
def test_screen(screen: Screen) -> None:
    text = render(
        CASES[screen.case](), screen.width, verbose=screen.verbose, ascii_only=screen.ascii_only
    )
    if os.environ.get("WHYIDLE_WRITE_EXPECTED"):
        screen.path.write_text(text, encoding="utf-8")
    assert text == screen.path.read_text(encoding="utf-8")


def test_every_screen_is_expected_and_every_expectation_is_a_screen() -> None:
    assert {path.name for path in EXPECTED.glob("*.txt")} == {s.path.name for s in SCREENS}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [1, 40, 60, 61, 79, 100, 133, 200, 10_000])
def test_lines_fit(case: str, width: int) -> None:
    for verbose in (False, True):
        text = render(CASES[case](), width, verbose=verbose)
        assert max(map(cell_len, text.split("\n"))) <= max(min(width, 160), 40)
        assert text.endswith("\n") and not text.endswith("\n\n")


@pytest.mark.parametrize("case", CASES)
def test_colour_adds_colours_and_nothing_else(case: str) -> None:
    d = CASES[case]()
    coloured = render(d, colour=True)
    assert "\x1b[" in coloured
    bare = "\n".join(line.rstrip() for line in _COLOUR.sub("", coloured).split("\n"))
    assert "\x1b" not in bare
    assert bare == render(d)


def test_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    d = CASES["sleeper"]()
    plain, coloured = render(d), render(d, colour=True)
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, "20")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "JPY_PARENT_PID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TERM", "dumb")
    assert render(d) == plain
    assert render(d, colour=True) == coloured


def test_many_gpus_show_the_extremes_the_middle_and_the_culprit() -> None:
    gpus = [
        gpu(rank, 100.0, spinning_s=10.0 + rank / 2, waited_for={"20": 9.0})
        for rank in range(64)
        if rank != 20
    ]
    gpus.append(gpu(20, 100.0, empty_s=20.0))
    ledger = [row("collective", "transfer", 0.0, one.spinning_s, rank=one.rank) for one in gpus]
    d = diagnosis(gpus, [*ledger, row("host_pause", "gc", 20.0, rank=20)])
    found = re.findall(r"^  (?:rank |… )(\d+)( more)?", render(d), re.MULTILINE)
    ranks = [int(number) for number, more in found if not more]
    assert ranks == [63, 62, 61, 60, 59, 31, 30, 20, 4, 3, 2, 1, 0]
    hidden = [int(number) for number, more in found if more]
    assert sum(hidden) + len(ranks) == 64
    assert f"{sum(hidden)} GPUs not shown" in render(d)
    assert "others waited 567 GPU-seconds for it" in render(d)
    assert len(re.findall(r"^  rank ", render(d, verbose=True), re.MULTILINE)) == 64


def test_few_gpus_are_all_shown_in_the_order_of_ranks() -> None:
    gpus = [gpu(rank, 10.0, empty_s=rank / 2) for rank in range(16)]
    ledger = [row("host_pause", "gc", rank / 2, rank=rank) for rank in range(1, 16)]
    text = render(diagnosis(gpus, ledger))
    ranks = [int(found) for found in re.findall(r"^  rank (\d+) ", text, re.MULTILINE)]
    assert ranks == list(range(16))


def test_findings_come_by_what_fixing_them_returns() -> None:
    small_but_waited_for = finding(
        "late", "storage", "nfs_read", 1.0, title="Late", says="", advice="", returned_s=50.0
    )
    others = [
        finding(f"r{n}", "host_pause", "gc", 2.0 + n, title=f"Title {n}", says="", advice="")
        for n in range(6)
    ]
    d = diagnosis(
        [gpu(0, 100.0, empty_s=60.0)],
        [row("host_pause", "gc", 60.0, rank=0)],
        findings=[*others, small_but_waited_for],
    )
    text = render(d)
    shown = re.findall(r"CRITICAL (Late|Title \d)", text)
    assert shown == ["Late", "Title 5", "Title 4", "Title 3", "Title 2"]
    assert "2 smaller ones with --verbose" in text
    assert len(re.findall("CRITICAL", render(d, verbose=True))) == 7


def test_small_causes_are_summed_and_spelled_out_when_asked_for() -> None:
    pairs = [(cause.slug, sub) for cause in CAUSES for sub in cause.subcauses][:20]
    ledger = [row(*pair, 1.0 + n, rank=0) for n, pair in enumerate(pairs)]
    d = diagnosis([gpu(0, 300.0, empty_s=210.0)], ledger)
    assert "12 smaller causes" in render(d)
    assert "smaller causes" not in render(d, verbose=True)


def test_causes_too_small_to_chase_are_summed() -> None:
    tiny = [("storage", "offload"), ("host_pause", "compile"), ("lifecycle", "startup")]
    ledger = [row("host_pause", "gc", 9.91, rank=0), *(row(*pair, 0.03, rank=0) for pair in tiny)]
    text = render(diagnosis([gpu(0, 20.0, empty_s=10.0)], ledger))
    assert re.search(r"0\.09 s +0\.4 % +3 smaller causes", text)
    assert "Storage" not in text


def test_a_single_small_cause_is_named_rather_than_counted() -> None:
    ledger = [row("host_pause", "gc", 9.99, rank=0), row("storage", "offload", 0.01, rank=0)]
    text = render(diagnosis([gpu(0, 20.0, empty_s=10.0)], ledger))
    assert "smaller causes" not in text
    assert re.search(r"0\.01 s +<?0\.1 % .* Storage", text)


def test_files_of_different_days_are_not_one_long_run() -> None:
    one_run = dataclasses.replace(CASES["sleeper"]().run, begin_ns=0, end_ns=3_400_000_000)
    d = dataclasses.replace(CASES["sleeper"](), run=one_run)
    assert ", 3.40 s long." in render(d)
    days = dataclasses.replace(one_run, end_ns=55 * 10**15)
    assert ", each up to 3.29 s long." in render(dataclasses.replace(d, run=days))


def test_ranks_that_were_not_seen_are_counted() -> None:
    d = diagnosis([gpu(0, 1.0), gpu(1, 1.0)], [], job={"world_size": 64})
    assert "Trace of 2 GPUs (ranks 0 and 1 of 64) on node" in render(d)


def test_gpus_that_would_read_the_same_are_named_by_their_files() -> None:
    gpus = [
        dataclasses.replace(gpu(0, 1.0, empty_s=0.5), source=f"/traces/{name}.json")
        for name in ("before", "after")
    ]
    text = render(diagnosis(gpus, [row("host_pause", "gc", 1.0, rank=0)]))
    assert "  rank 0 before.json  " in text and "  rank 0 after.json " in text


def test_no_idle_time_shows_no_ledger() -> None:
    text = render(diagnosis([gpu(0, 10.0), gpu(1, 10.0)], []))
    assert "never idle" in text and "arose" not in text


@pytest.mark.parametrize("case", sorted(set(CASES) - {"hostile"}))
def test_json_is_strict_and_loses_nothing(case: str) -> None:
    d = CASES[case]()
    text = json.dumps(d.to_json(), allow_nan=False)
    values = json.loads(text)
    assert values == d.to_json()
    assert next(iter(values)) == "schema"


def test_json_refuses_numbers_that_json_does_not_have() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json.dumps(CASES["hostile"]().to_json(), allow_nan=False)


NAMES = st.one_of(st.text(max_size=12), st.sampled_from(["node-1", "a.b.c", "\x1b[31m", "[red]"]))
PAIRS = st.one_of(
    st.sampled_from([(cause.slug, sub) for cause in CAUSES for sub in cause.subcauses]),
    st.tuples(NAMES, NAMES),
)
RANKS = st.one_of(st.none(), st.integers(min_value=0, max_value=2_000_000))
# Whole microseconds up to about a month, so that sums of parts are exact.
TIMES = st.one_of(st.just(0), st.integers(min_value=0, max_value=3 * 10**12))
GRADES: st.SearchStrategy[Grade | None] = st.sampled_from(
    ["measured", "observed", "inferred", None]
)


@st.composite
def gpu_with_rows(draw: st.DrawFn) -> tuple[GpuLedger, list[LedgerRow]]:
    rows = [
        row(
            *draw(PAIRS),
            draw(TIMES) / 1e6,
            draw(TIMES) / 1e6,
            grade=draw(GRADES),
            where=draw(st.sampled_from(["self", "rank", "outside"])),
            node=draw(st.one_of(st.none(), NAMES)),
            rank=draw(RANKS),
            root=draw(st.one_of(st.none(), PAIRS)),
        )
        for _ in range(draw(st.integers(min_value=0, max_value=4)))
    ]
    causes: dict[str, float] = {}
    waited_for: dict[str, float] = {}
    for one in rows:
        causes[one.cause] = causes.get(one.cause, 0.0) + one.idle_s
        if one.root.where == "rank":
            key = str(one.root.rank)
            waited_for[key] = waited_for.get(key, 0.0) + one.spinning_s
    empty_s = sum(one.empty_s for one in rows)
    spinning_s = sum(one.spinning_s for one in rows)
    one_gpu = gpu(
        draw(RANKS),
        draw(TIMES) / 1e6 + empty_s + spinning_s,
        empty_s=empty_s,
        spinning_s=spinning_s,
        node=draw(NAMES),
        index=draw(st.integers(min_value=0, max_value=15)),
        causes=causes,
        waited_for=waited_for,
        underfilled_s=draw(st.one_of(st.none(), TIMES.map(lambda us: us / 1e6))),
    )
    return one_gpu, rows


EVIDENCE = st.dictionaries(
    st.one_of(NAMES, st.sampled_from(["wait_s", "read_bytes", "busy_ratio", "late_ns"])),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), NAMES, st.lists(NAMES)),
    max_size=10,
)


@st.composite
def diagnoses(draw: st.DrawFn) -> Diagnosis:
    parts = draw(st.lists(gpu_with_rows(), max_size=6))
    # Copies of one GPU make a run long enough to hide some of them.
    copies = draw(st.sampled_from([1, 1, 5])) if len(parts) < 5 else 1
    parts = parts * copies
    findings = [
        finding(
            draw(NAMES),
            *draw(PAIRS),
            draw(TIMES) / 1e6,
            title=draw(NAMES),
            says=draw(st.text(max_size=200)),
            advice=draw(NAMES),
            returned_s=draw(st.one_of(st.none(), TIMES.map(lambda us: us / 1e6))),
            severity=draw(st.sampled_from(["info", "warning", "critical"])),
            owner=draw(st.one_of(NAMES, st.sampled_from(["application", "hardware"]))),
            evidence=draw(EVIDENCE),
            grade=draw(GRADES),
            ranks=draw(st.lists(st.integers(min_value=0, max_value=99), max_size=8)),
            why=draw(NAMES),
        )
        for _ in range(draw(st.integers(min_value=0, max_value=7)))
    ]
    return diagnosis(
        [one for one, _ in parts],
        [one for _, rows in parts for one in rows],
        kind=draw(st.sampled_from(["recording", "trace"])),
        source=draw(st.lists(NAMES, min_size=1, max_size=4)),
        findings=findings,
        not_seen=draw(
            st.lists(
                st.builds(NotSeen, what=NAMES, why=NAMES, rules=st.lists(NAMES, max_size=9)),
                max_size=10,
            )
        ),
        quality=draw(
            st.builds(
                Quality,
                missed_ticks=st.one_of(st.none(), st.integers(min_value=0)),
                gaps_s=st.one_of(st.none(), st.floats(min_value=0, max_value=1e9)),
                clock_error_ns=st.one_of(st.none(), st.integers(min_value=0, max_value=10**15)),
                agent_cpu_ratio=st.one_of(st.none(), st.floats(min_value=0, max_value=1)),
            )
        ),
        job=draw(st.one_of(st.none(), st.dictionaries(NAMES, st.one_of(NAMES, st.integers())))),
    )


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    d=diagnoses(),
    width=st.integers(min_value=-5, max_value=220),
    verbose=st.booleans(),
    ascii_only=st.booleans(),
)
def test_any_diagnosis_renders(d: Diagnosis, width: int, verbose: bool, ascii_only: bool) -> None:
    plain = render(d, width, verbose=verbose, ascii_only=ascii_only)
    assert all(char == "\n" or char.isprintable() for char in plain)
    assert max(map(cell_len, plain.split("\n"))) <= max(min(width, 160), 40)
    assert not ascii_only or plain.isascii()
    coloured = render(d, width, verbose=verbose, ascii_only=ascii_only, colour=True)
    bare = "\n".join(line.rstrip() for line in _COLOUR.sub("", coloured).split("\n"))
    assert bare == plain
    assert d.headline.isprintable() and d.headline.endswith(".")
