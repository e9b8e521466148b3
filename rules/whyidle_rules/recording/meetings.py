"""Calls that all members of a group made: how far clocks of nodes are apart, and who came last.

A collective ends nowhere before all members have come, and then for all within what it takes. So
each one that ranks of two nodes wait for bounds how far their clocks are apart: the end on one node
lies after the arrival on the other; and its ends are as good as one moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import duckdb
import numpy as np

from whyidle_rules.intervals import Ints
from whyidle_rules.recording.flight import calls_of
from whyidle_rules.recording.series import Floats, fetch
from whyidle_rules.recording.spans import Machine, wall_offsets

Who = tuple[str, str, int, int]  # node, boot id, pid, start
_Key = tuple["int | str", int, int]  # group, whether a backward pass, number

# Fewer meetings of two nodes say too little of their clocks.
MEETINGS_LEAST = 5
# Steps of this many ranks' own pace say as much.
STEPS_LEAST = 20
# Operations that end for nobody before all have come; others, such as broadcast, end earlier.
_COMMON = "('all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', 'barrier', 'backward')"
# A call of these ends for who waits on the host; on GPUs it is only queued, but for barriers.
_WAITED = "(g.backend IN ('gloo', 'mpi') OR c.operation = 'barrier')"

_QUERY = f"""
SELECT c.node, c.boot_id, c.pid, c.start_ns, g.group_key, g.size, c.number,
  (c.operation = 'backward')::INTEGER AS backward,
  -- In a backward pass the rank came when it began to wait.
  CASE WHEN c.operation = 'backward' THEN greatest(c.called_ns, c.ended_ns - c.wait_ns)
    ELSE c.called_ns END AS came_ns,
  c.called_ns, c.ended_ns, ({_WAITED})::INTEGER AS waited
FROM probe_call c JOIN (
  SELECT node, boot_id, pid, start_ns, place, max(group_key) AS group_key, max(size) AS size,
    any_value(backend) AS backend
  FROM probe_group GROUP BY ALL HAVING count(*) = count(group_key) AND count(DISTINCT group_key) = 1
) g USING (node, boot_id, pid, start_ns, place)
WHERE c.operation IN {_COMMON} AND c.called_ns IS NOT NULL AND c.ended_ns IS NOT NULL
ORDER BY g.group_key, backward, c.number
"""
_STEPS = """
SELECT node, boot_id, pid, start_ns, step, max(end_ns) AS end_ns FROM probe_event
WHERE kind = 'step' AND step IS NOT NULL AND end_ns IS NOT NULL GROUP BY ALL
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Wall minus monotonic time of machines, brought together by what ranks did together.

    `error_ns` is the most that two of them may still be apart, None where nothing but the clocks
    themselves relates them.
    """

    offsets: Mapping[Machine, int]
    error_ns: int | None

    @property
    def related(self) -> set[Machine]:
        """The machines whose times can be set side by side."""
        return set(self.offsets)

    def offset(self, machine: Machine) -> int:
        """Return wall minus monotonic time; 0 for a machine that stands alone."""
        return self.offsets.get(machine, 0)


def relate(con: duckdb.DuckDBPyConnection, machines: Iterable[Machine]) -> Clocks:
    """Return the clocks of machines; the first of them keeps its own."""
    offsets = wall_offsets(con)
    ordered = sorted(machines)
    if len(ordered) < 2:
        return Clocks(offsets=offsets, error_ns=None)
    found = dict(offsets)
    errors: list[int] = []
    bounds, steps = _bounds(con, offsets), None
    placed = ordered[:1]
    for machine in ordered[1:]:
        best: tuple[int, int] | None = None
        for other in placed:
            told = bounds.get((other, machine))
            if told is not None and (best is None or told[1] < best[1]):
                shift = offsets.get(other, 0) - found.get(other, 0)
                best = (told[0] + shift, told[1])
        if best is None and machine not in offsets:
            steps = _paces(con) if steps is None else steps
            best = _by_steps(steps, placed, machine, found)
        if best is not None:
            found[machine] = offsets.get(machine, 0) - best[0]
            found.setdefault(ordered[0], 0)
            errors.append(best[1])
        placed.append(machine)
    whole = len(errors) == len(ordered) - 1
    return Clocks(offsets=found, error_ns=max(errors) if whole else None)


def _bounds(
    con: duckdb.DuckDBPyConnection, offsets: Mapping[Machine, int]
) -> dict[tuple[Machine, Machine], tuple[int, int]]:
    """Return how far the second machine's clock is ahead of the first's, and the error, ns."""
    rows = fetch(con, f"SELECT * FROM ({_QUERY}) WHERE waited = 1")
    met: dict[tuple[int, int, int], dict[Machine, tuple[int, int, int]]] = defaultdict(dict)
    for node, boot, key, backward, number, came, ended in zip(
        *(rows[name].tolist() for name in ("node", "boot_id", "group_key", "backward", "number")),
        *(rows[name].tolist() for name in ("came_ns", "ended_ns")),
        strict=True,
    ):
        at, machine = met[key, backward, number], (node, boot)
        wall, took = offsets.get(machine, 0), int(ended) - int(came)
        last, left, least = at.get(machine, (-(1 << 62), 1 << 62, took))
        # Of a machine's ranks the last to come and the first to leave bound the most.
        at[machine] = (max(last, int(came) + wall), min(left, int(ended) + wall), min(least, took))
    apart: dict[tuple[Machine, Machine], list[tuple[int, int, int, int]]] = defaultdict(list)
    for at in met.values():
        took = min(least for _, _, least in at.values())
        for one, (came, left, _) in at.items():
            for other, (other_came, other_left, _) in at.items():
                if one != other:
                    told = (other_came - left, other_left - came, other_left - left, took)
                    apart[one, other].append(told)
    return {
        pair: _ahead(np.array(told, dtype=np.int64))
        for pair, told in apart.items()
        if len(told) >= MEETINGS_LEAST
    }


def _ahead(told: Ints) -> tuple[int, int]:
    """Return how far a clock is ahead and the error, ns; rows are bounds, ends apart, duration.

    Arrivals bound it whatever happens; ends tell it better, and some of them are late, as a thread
    wakes up when it gets a CPU: the middle one counts, with what most differ from it by.
    """
    low, high = int(told[:, 0].max()), int(told[:, 1].min())
    middle = float(np.median(told[:, 2]))
    spread = float(np.percentile(np.abs(told[:, 2] - middle), 90))
    error = round(spread + float(np.median(told[:, 3])))
    if low > high:  # clocks that drift while it runs leave no room
        return (low + high) // 2, (low - high) // 2 + 1
    ahead = round(min(max(middle, low), high))
    return ahead, max(1, min(error, (high - low) // 2 + abs(ahead - (low + high) // 2)))


def _paces(con: duckdb.DuckDBPyConnection) -> dict[Machine, list[dict[int, int]]]:
    """Return when steps ended, by number, of each process of a machine."""
    found: dict[Machine, list[dict[int, int]]] = defaultdict(list)
    rows = fetch(con, _STEPS)
    for (node, boot, _, _), own in rows.groups("node", "boot_id", "pid", "start_ns").items():
        pace = dict(zip(own["step"].astype(int).tolist(), own["end_ns"].tolist(), strict=True))
        found[node, boot].append(pace)
    return found


def _by_steps(
    paces: Mapping[Machine, list[dict[int, int]]],
    placed: Sequence[Machine],
    machine: Machine,
    offsets: Mapping[Machine, int],
) -> tuple[int, int] | None:
    """Return how far a clock that was never read is ahead: ranks of a job step together."""
    best: tuple[int, int] | None = None
    for other in placed:
        for mine in paces.get(machine, ()):
            for theirs in paces.get(other, ()):
                shared = sorted(set(mine) & set(theirs))
                if len(shared) < STEPS_LEAST:
                    continue
                apart = np.array([mine[n] - theirs[n] - offsets.get(other, 0) for n in shared])
                low, middle, high = np.percentile(apart, (5, 50, 95))
                told = (round(middle), round(high - low) + 1)
                if best is None or told[1] < best[1]:
                    best = told
    return best


class Meetings:
    """Who came when to the calls of each group, on one clock."""

    __slots__ = ("_clocks", "_error_ns", "_met")

    def __init__(self, con: duckdb.DuckDBPyConnection, clocks: Clocks) -> None:
        self._clocks = clocks
        self._error_ns = clocks.error_ns
        rows = fetch(con, _QUERY)
        self._met: dict[_Key, list[tuple[Who, int, int, int]]] = defaultdict(list)
        names = ("node", "boot_id", "pid", "start_ns", "group_key", "backward", "number", "size")
        for node, boot, pid, start, key, backward, number, size, came, ended in zip(
            *(rows[name].tolist() for name in (*names, "came_ns", "ended_ns")), strict=True
        ):
            wall = clocks.offset((node, boot))
            who = (node, boot, int(pid), int(start))
            self._met[key, backward, number].append(
                (who, int(came) + wall, int(ended) + wall, int(size or 0))
            )

    def learn(self, con: duckdb.DuckDBPyConnection, ranks: Mapping[int, Who]) -> None:
        """Add the calls of flight recorder dumps, which know ranks and wall clocks alone."""
        rows, own = calls_of(con), wall_offsets(con)
        names = ("rank", "group_name", "size", "number", "came_wall_ns")
        for rank, group, size, number, came in zip(
            *(rows[name].tolist() for name in names), strict=True
        ):
            who = ranks.get(int(rank))
            if who is not None and who[:2] in own:
                at = int(came) - own[who[:2]] + self._clocks.offset(who[:2])
                self._met[f"{group}/{size}", 0, int(number)].append((who, at, at, int(size)))

    def lateness(
        self, members: Sequence[frozenset[Who]], first_bin: int, size: int, bin_ns: int
    ) -> Floats | None:
        """Return how long others waited for each member, by bin; None where no call tells.

        `members` are the processes of each. Calls count that all members of their group are known
        to have come to; the last one is charged with what it came later than the one before it.
        """
        place = {who: row for row, own in enumerate(members) for who in own}
        found = np.zeros((len(members), size))
        told = False
        for calls in self._met.values():
            came = sorted((at, place[who], who[:2]) for who, at, _, _ in calls if who in place)
            if len(came) < 2 or len(came) != calls[0][3]:
                continue
            (before, _, _), (last, row, _) = came[-2:]
            if len({machine for _, _, machine in came}) > 1 and (
                self._error_ns is None or last - before <= self._error_ns
            ):
                continue
            number = last // bin_ns - first_bin
            if 0 <= number < size:
                found[row, number] += (last - before) / 1e9
                told = True
        return found if told else None
