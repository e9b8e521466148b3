"""Groups of rules: who may claim which idle seconds, and in which order.

A group gets at most what its witness shows and what the groups before it left over. Its members
share that out in absolute fractions; a part that no member can show stays with `leftover`. Groups
without a witness get the sum of what their members claim. Precedence orders groups only: the most
specific first, so that a late launch never takes the second in which the trainer waited for data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pool = Literal["empty", "spinning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group; `witness` is an SQL expression over the evidence, in seconds, or '' for none."""

    id: str
    pool: Pool
    meaning: str
    witness: str = ""
    leftover: str = "no_evidence"


GROUPS: tuple[Group, ...] = (
    Group(id="hardware", pool="empty", meaning="The GPU or its driver failed."),
    Group(id="no_job", pool="empty", meaning="No job had the GPU, or its server no request."),
    Group(id="checkpoint", pool="empty", meaning="A checkpoint was saved or loaded."),
    Group(
        id="input",
        pool="empty",
        meaning="The trainer waited for its DataLoader.",
        witness="data_wait_s",
        leftover="data_wait",
    ),
    Group(
        id="peers",
        pool="empty",
        meaning="The launching thread waited for other ranks in a collective.",
    ),
    Group(
        id="neighbours",
        pool="empty",
        meaning="The launching thread waited for a message of another pipeline stage.",
    ),
    Group(id="copy", pool="empty", meaning="Only copies between host and GPU ran."),
    Group(id="pause", pool="empty", meaning="The host did something else that was recorded."),
    Group(id="phase", pool="empty", meaning="The job was starting or evaluating."),
    Group(id="sync", pool="empty", meaning="The host had waited for the GPU."),
    Group(id="launch", pool="empty", meaning="The host launched late."),
    # Nobody's fault and nobody's claim: a group without members says why the seconds stay over.
    Group(
        id="queue",
        pool="empty",
        meaning="The next kernel had long been launched.",
        witness="queued_s",
        leftover="kernel_gap",
    ),
    Group(id="collective", pool="spinning", meaning="Only collectives ran."),
    Group(id="pipeline", pool="spinning", meaning="Only sends and receives between stages ran."),
    Group(
        id="communication",
        pool="spinning",
        meaning="Only communication of an unknown kind ran.",
        witness="comm_s",
        leftover="communication",
    ),
)

BY_ID: dict[str, Group] = {group.id: group for group in GROUPS}
