"""What fixing returns: GPU-hours and money, in the headline, the report and the JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from report_build import diagnosis, gpu, row
from whyidle_rules.diagnosis import Diagnosis
from whyidle_rules.price import parse_price, priced
from whyidle_rules.report.text import render_text
from whyidle_rules.report.words import money

TRACES = Path(__file__).parents[1] / "fixtures" / "traces" / "ddp-4-ranks-rank-1-loads-itself"
HOURS = 3600.0


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from whyidle_rules.cli import main; raise SystemExit(main())"]
    return subprocess.run(
        [*command, *words], capture_output=True, text=True, timeout=120, check=False
    )


def stalled(*, unknown: float = 0.0) -> Diagnosis:
    """Ten hours of a GPU, four of them idle for its storage, `unknown` of those for no cause."""
    known = 4.0 - unknown
    ledger = [row("storage", "nfs_read", empty_s=known * HOURS)]
    if unknown:
        ledger.append(row("unattributed", "no_evidence", empty_s=unknown * HOURS, grade=None))
    return diagnosis([gpu(0, 10 * HOURS, empty_s=4 * HOURS)], ledger)


def test_a_root_cause_returns_hours_and_with_a_price_money() -> None:
    (root,) = priced(stalled(), 2.5).root_causes
    assert root.what_if == {
        "gpu_s_returned": 4 * HOURS,
        "gpu_hours_returned": 4.0,
        "money_returned": 10.0,
    }
    (root,) = priced(stalled(), None).root_causes
    assert root.what_if is not None
    assert (root.what_if["gpu_hours_returned"], root.what_if["money_returned"]) == (4.0, None)


def test_nobody_can_fix_what_is_not_known() -> None:
    roots = {one.cause: one.what_if for one in priced(stalled(unknown=1.0), 2.0).root_causes}
    assert roots["unattributed"] is None
    assert roots["storage"] is not None


def test_the_headline_says_what_the_first_fix_is_worth() -> None:
    before, after = stalled(), priced(stalled(), 2.5)
    assert after.headline == f"{before.headline[:-1]}; at 2.50 a GPU-hour that is 10.00."
    assert priced(before, None).headline == before.headline
    mostly_unknown = priced(stalled(unknown=3.0), 2.5)
    assert mostly_unknown.headline.endswith("; at 2.50 a GPU-hour all idle time cost 10.00.")


def test_a_busy_gpu_has_nothing_to_sell() -> None:
    busy = diagnosis([gpu(0, 10.0, empty_s=0.01)], [row("storage", "nfs_read", 0.01)])
    assert priced(busy, 1.0).headline == busy.headline


def test_the_report_lists_what_comes_back_only_with_a_price() -> None:
    text = render_text(priced(stalled(), 2.5), width=100, colour=False, verbose=False)
    assert "What fixing returns, at most" in text
    assert "4.00 GPU-hours, 10.00: Storage, data came slowly over NFS" in " ".join(text.split())
    without = render_text(priced(stalled(), None), width=100, colour=False, verbose=False)
    assert "What fixing returns" not in without


@pytest.mark.parametrize("text", ["x", "", "0", "-1", "nan", "inf", "1e9"])
def test_what_is_no_price_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="no price of a GPU-hour: write a number above 0"):
        parse_price(text)
    done = run("diagnose", f"--gpu-hour-cost={text}", str(TRACES))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_command_prices_findings_and_root_causes() -> None:
    done = run("diagnose", "--json", "--gpu-hour-cost", "3600", str(TRACES))
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["gpu_hour_cost"] == 3600.0
    # At that price a GPU-second costs 1.
    for one in told["root_causes"]:
        if one["what_if"] is not None:
            assert one["what_if"]["money_returned"] == pytest.approx(one["idle_s"])
    for one in told["findings"]:
        if one["what_if"] is not None:
            assert one["what_if"]["money_returned"] == pytest.approx(
                one["what_if"]["gpu_s_returned"]
            )
    assert "a GPU-hour that is" in told["headline"]


@pytest.mark.parametrize(
    ("amount", "said"),
    [
        (0.0, "0.00"),
        (0.004, "less than 0.01"),
        (12.345, "12.35"),
        (1280.4, "1,280"),
        (3_400_000.0, "3.40 million"),
        (float("nan"), "an unknown amount"),
    ],
)
def test_amounts(amount: float, said: str) -> None:
    assert money(amount) == said
