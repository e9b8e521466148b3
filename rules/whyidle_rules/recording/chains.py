"""What the stages of a pipeline waited of which nobody told, but the bytes of their links.

Bytes tell neither its schedule nor its micro-batches: what all stages wait alike may be the bubble
of the schedule or the sending.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from whyidle_rules.intervals import Ints
from whyidle_rules.recording.columns import Columns
from whyidle_rules.recording.jobs import SLOW, Job
from whyidle_rules.recording.series import Floats
from whyidle_rules.recording.waits import USUAL_BINS, lately


def tell(job: Job, row: int, at: Ints, columns: Columns) -> None:
    """Make the communication of a stage sends and receives, and split its waiting.

    `at` is the bin of each window. What one stage waits more than the one that waits least, it
    waits for that one: since that has more to compute, or since it stood empty.
    """
    own = columns["spinning_s"]
    share = job.wait[row][at]
    known = ~np.isnan(share)
    wait = own * np.nan_to_num(share)
    slow = _slow(job, row)[at]
    columns["coll_s"] = np.where(known, 0.0, columns["coll_s"])
    columns["comm_s"] = np.where(known, 0.0, columns["comm_s"])
    for name, values in (
        ("p2p_s", own),
        ("bubble_even_s", own - wait),
        ("bubble_imbalance_s", wait * slow),
        ("bubble_late_s", wait * (1.0 - slow)),
    ):
        columns[name] = np.where(known, values, np.nan)


def _slow(job: Job, row: int) -> Floats:
    """Return which share of a member's wait the late one computed more, by bin."""
    worked = lately(job.working, USUAL_BINS)
    waited = lately((job.spin[row] * np.nan_to_num(job.wait[row]))[None, :], USUAL_BINS)[0]
    every = np.arange(worked.shape[1])
    more = worked[np.maximum(job.late, 0), every] - worked[row]
    return np.asarray(np.clip(more / np.maximum(waited, 1e-9), 0.0, 1.0))


def roots(
    found: Mapping[int, Mapping[tuple[int, str, str], float]], subcause: str
) -> dict[int, dict[tuple[int, str, str], float]]:
    """Return of what the members' waits arose from, that which is of a kind of bubble."""
    slow = subcause == "stage_imbalance"
    return {
        number: {root: weight for root, weight in weights.items() if (root[1:] == SLOW) == slow}
        for number, weights in found.items()
    }
