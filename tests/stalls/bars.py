"""The bars that a recorded stall is held against: which ones apply, and how high they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Least share of a stall that goes to its cause: kinds on which nothing was tuned reach 95 and 85 %
# in the end; these are held from the start.
RIGHT_WITH_PROBE, RIGHT_WITHOUT_PROBE = 0.90, 0.75
# Most of the wall time of a healthy run that is blamed on anything.
CONTROL = 0.01
# Most of the idle time of a confuser that goes to a cause that it is not due to.
CONFUSER = 0.02
# Most of a mixture that is off, per cause.
MIXTURE = 0.10
# Most of a stall that goes to a wrong cause.
WRONG = 0.10
# Idle time that is seen and was not, or was and is not told of, of the wall time. A stretch is cut
# by whole windows of 125 ms. Of spinning the least is booked and the most is told (underfilled):
# where each window holds the same bit of communication, nothing tells it from kernels that fill the
# chip a little less, and to book it would be to accuse those.
SEEN = 0.02
# Of the seconds that ranks are said to have waited for another: least share charged to the rank
# that was waited for, and to what held that one up.
ROOT_RANK, ROOT_CAUSE = 0.95, 0.90
# Most of all GPUs' wall time that is charged as waiting to ranks that nobody waited for so long.
ACCUSED = 0.01
# With less of the wall time due to a rank, waiting for it is not worth a share.
DUE = 0.03


def bars(truth: Mapping[str, Any], window: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the bars for a stretch."""
    if truth["role"] == "control" or window["name"] == "calm":
        return ("seen", "blamed")
    if not window["causes"]:
        return ("seen", "confused")
    if truth["role"] == "mixture":
        return ("seen", "mixture", "wrong")
    return ("seen", "right", "wrong", *(("confused",) if truth["role"] == "confuser" else ()))


def limit(bar: str, *, probe: bool) -> float:
    """The bar's height; `right` is a least, all others are a most."""
    return {
        "seen": SEEN,
        "right": RIGHT_WITH_PROBE if probe else RIGHT_WITHOUT_PROBE,
        "wrong": WRONG,
        "blamed": CONTROL,
        "confused": CONFUSER,
        "mixture": MIXTURE,
    }[bar]


def root_bars(due_share: float, *, probe: bool) -> tuple[str, ...]:
    """Names of the bars for where waiting arose; `due_share`: of wall, due to a late rank."""
    if due_share < DUE:
        return ("accused",)
    return ("root_rank", "root_cause") if probe else ("root_rank",)


def root_limit(bar: str) -> float:
    """The bar's height; `accused` is a most, the others are a least."""
    return {"root_rank": ROOT_RANK, "root_cause": ROOT_CAUSE, "accused": ACCUSED}[bar]
