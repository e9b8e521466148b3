"""What fixing each root cause returns: GPU-hours, and money where the price of one is known.

A root cause returns at most the time that GPUs stood idle for it, those of other ranks included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whyidle_rules.diagnosis import Diagnosis, Finding, RootCause
from whyidle_rules.ledger import UNATTRIBUTED
from whyidle_rules.report.headline import told_root
from whyidle_rules.report.returned import S_PER_HOUR
from whyidle_rules.report.words import money

# Beyond this no GPU is sold, and sums stop being numbers that anybody reads.
PRICE_MOST = 1e6


def parse_price(text: str) -> float:
    """Return the price of a GPU-hour; raises ValueError with what to write instead."""
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price <= PRICE_MOST:
        raise ValueError(f"{text!r} is no price of a GPU-hour: write a number above 0, such as 2.5")
    return price


def priced(found: Diagnosis, gpu_hour_cost: float | None) -> Diagnosis:
    """Return a diagnosis that says what each root cause returns, in whatever currency."""
    return replace(
        found,
        root_causes=[_root(row, gpu_hour_cost) for row in found.root_causes],
        findings=[_finding(row, gpu_hour_cost) for row in found.findings],
        headline=_headline(found, gpu_hour_cost),
        gpu_hour_cost=gpu_hour_cost,
    )


def returned(gpu_s: float, gpu_hour_cost: float | None) -> dict[str, float | None]:
    """Return GPU-hours and money for some GPU-seconds; money is None without a price."""
    hours = gpu_s / S_PER_HOUR
    return {
        "gpu_hours_returned": hours,
        "money_returned": None if gpu_hour_cost is None else hours * gpu_hour_cost,
    }


def _root(row: RootCause, cost: float | None) -> RootCause:
    # Nobody can fix what is not known.
    if row.cause == UNATTRIBUTED:
        return row
    return replace(row, what_if={"gpu_s_returned": row.idle_s, **returned(row.idle_s, cost)})


def _finding(row: Finding, cost: float | None) -> Finding:
    told: Mapping[str, Any] | None = row.what_if
    if told is None or told.get("gpu_s_returned") is None:
        return row
    return replace(row, what_if={**told, **returned(float(told["gpu_s_returned"]), cost)})


def _headline(found: Diagnosis, cost: float | None) -> str:
    if cost is None:
        return found.headline
    told = told_root(found)
    if told is None:
        return found.headline
    named, gpu_s = told
    at = f"at {money(cost)} a GPU-hour"
    worth = money(gpu_s / S_PER_HOUR * cost)
    more = f"; {at} that is {worth}" if named else f"; {at} all idle time cost {worth}"
    return f"{found.headline.removesuffix('.')}{more}."
