"""Dumps of PyTorch's flight recorder: the last collectives of each rank, those in C++ too.

torch writes one for each rank when a collective times out, or when it is asked for one, so that
nothing here ever holds a trainer up. They tell when each rank's host called a collective, by its
number, and which calls have not ended: so who has not come, and to what. DDP's reducer calls its
collectives in C++, where the probe does not see them.

Dumps are pickles, or JSON, and hostile input: a pickle that names anything to import is refused,
and what has not the type that it should have is left out.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp (version 2.x of its format), as written by
TORCH_NCCL_DUMP_ON_TIMEOUT to TORCH_NCCL_DEBUG_INFO_TEMP_FILE, or by _dump_fr_trace_json.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import duckdb
import msgspec

from whyidle.errors import UserError
from whyidle_rules.diagnosis import FlightHang, NotSeen
from whyidle_rules.recording.series import Columns, fetch

FILES_MOST = 65_536
# A dump of 2,000 calls with their stacks takes 2 MB.
FILE_BYTES_MOST = 64 << 20
CALLS_MOST = 2_000_000
_WORD_MOST = 128
_INTEGER_MOST = 1 << 62
TABLE = "flight_call"
_ALL_RANKS = "default_pg"
_COLUMNS = "rank BIGINT, group_name VARCHAR, size BIGINT, number BIGINT, came_wall_ns BIGINT"
_NOTHING = "0 AS rank, '' AS group_name, 0 AS size, 0 AS number, 0 AS came_wall_ns"
# Others, such as broadcast, end for some ranks before all have come.
_COMMON = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_RANK = re.compile(r"(\d{1,9})$")
_RANKS = re.compile(r"\d{1,9}")
# What torch calls an operation in C++, without its backend, and what its functions are called.
_PLAIN = re.compile(r"^_?(.*?)(_base|_single|_barrier|_coalesced|_sparse|_into_tensor)*$")


class Call(NamedTuple):
    """A collective that a rank called; `came_wall_ns` is by the system clock of its machine."""

    rank: int
    group: str
    ranks: tuple[int, ...]
    number: int
    operation: str
    came_wall_ns: int
    ended: bool


@dataclass(slots=True)
class Read:
    """What was read: calls, when the dump of each rank was written, and what was left out."""

    calls: list[Call] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)
    bad_calls: int = 0


class _Plain(pickle.Unpickler):
    """Reads numbers, words, lists and dictionaries, and imports nothing."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"wants {module_name}.{global_name} imported")


def read(sources: Sequence[Path]) -> Read:
    """Return the calls of dumps, files or folders of them; raises UserError where none is one."""
    found = Read()
    for path in _paths(sources):
        rank = _RANK.search(path.name.removesuffix(".json").removesuffix(".pickle"))
        if rank is None:
            found.bad[path.name] = "its name does not end in a rank"
            continue
        try:
            _take(int(rank[1]), path.stat().st_mtime_ns, _load(path), found)
        except OSError as error:
            found.bad[path.name] = error.strerror or str(error)
        except Exception as error:  # noqa: BLE001 - whatever is in a file may fail in any way
            found.bad[path.name] = f"is no dump of a flight recorder: {error}"[:200]
    if not found.ranks:
        why = next(iter(found.bad.values()), "holds no file")
        raise UserError(
            f"{sources[0]}: {why}; name the files that torch wrote, one a rank "
            "(TORCH_NCCL_DEBUG_INFO_TEMP_FILE), such as /tmp/nccl_trace_rank_0."
        )
    return found


def _paths(sources: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += sorted(path for path in source.iterdir() if path.is_file())
        elif source.is_file():
            found.append(source)
        else:
            raise UserError(f"{source}: is not there; name the dumps of the job, one a rank.")
        if len(found) > FILES_MOST:
            raise UserError(f"{source}: has over {FILES_MOST:,} files; name the dumps of one job.")
    return found


def _load(path: Path) -> object:
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MOST + 1)
    if len(data) > FILE_BYTES_MOST:
        raise ValueError(f"has over {FILE_BYTES_MOST >> 20} MiB")
    if data[:1] == b"{":
        return msgspec.json.decode(data)
    return _Plain(io.BytesIO(data)).load()


def _take(rank: int, written_ns: int, dump: object, found: Read) -> None:
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise ValueError("has no entries")
    groups = dump.get("pg_config")
    members = {
        name: _ranks(config.get("ranks"))
        for name, config in (groups.items() if isinstance(groups, dict) else ())
        if isinstance(name, str) and isinstance(config, dict)
    }
    if rank in found.ranks:
        raise ValueError(f"is a second dump of rank {rank}")
    found.ranks[rank] = written_ns
    for entry in dump["entries"]:
        call = _call(rank, entry, members)
        if call is not None:
            found.calls.append(call)
        elif not (isinstance(entry, dict) and entry.get("is_p2p") is True):
            found.bad_calls += 1
        if len(found.calls) >= CALLS_MOST:
            raise ValueError(f"is behind {CALLS_MOST:,} calls of others")


def _ranks(told: object) -> tuple[int, ...]:
    """Return the members of a group: a list, or the text of one."""
    if isinstance(told, str):
        return tuple(map(int, _RANKS.findall(told[: 1 << 20])))
    if isinstance(told, list | tuple):
        return tuple(rank for rank in told if type(rank) is int and rank >= 0)
    return ()


def _call(rank: int, entry: Any, members: Mapping[str, tuple[int, ...]]) -> Call | None:
    """Return a collective; None for sends and receives, and for what is none."""
    if not isinstance(entry, dict) or entry.get("is_p2p") is True:
        return None
    group, name = entry.get("process_group"), entry.get("profiling_name")
    number, came = entry.get("collective_seq_id"), entry.get("time_created_ns")
    if not isinstance(group, list | tuple) or len(group) != 2 or not isinstance(name, str):
        return None
    key, about = group
    if not isinstance(key, str) or not isinstance(about, str):
        return None
    if type(number) is not int or type(came) is not int:
        return None
    if not (0 <= number < _INTEGER_MOST and 0 < came < _INTEGER_MOST):
        return None
    return Call(
        rank=rank,
        group=_word(f"{key} ({about})" if about not in ("", "undefined") else key),
        # Gloo's groups have no name where their members are told.
        ranks=members.get(key, members.get("", ()) if about == _ALL_RANKS else ()),
        number=number,
        operation=operation(name),
        came_wall_ns=came,
        ended=entry.get("retired") is True or entry.get("state") == "completed",
    )


def operation(name: str) -> str:
    """Return the name of the function of what torch calls, say, nccl:_all_gather_base."""
    plain = _PLAIN.match(_word(name.rpartition(":")[2].lower()))
    assert plain is not None
    return "barrier" if name.endswith("barrier") else plain[1] or "collective"


def _word(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text[:_WORD_MOST])


def hangs(found: Read) -> list[FlightHang]:
    """Return the collectives that some ranks wait in and others have not called."""
    by_group: dict[tuple[str, tuple[int, ...]], list[Call]] = defaultdict(list)
    for call in found.calls:
        by_group[call.group, call.ranks].append(call)
    told = []
    for (group, ranks), calls in sorted(by_group.items()):
        newest: dict[int, Call] = {}
        for call in calls:
            if call.rank not in newest or call.number > newest[call.rank].number:
                newest[call.rank] = call
        waiting = [call for call in calls if not call.ended]
        if not waiting:
            continue
        # The first one that has not ended is what the later ones wait for too.
        number = min(call.number for call in waiting)
        here = [call for call in waiting if call.number == number]
        since = min(call.came_wall_ns for call in here)
        behind = {rank for rank, call in newest.items() if call.number < number}
        # A dump from before they waited says nothing of who has come since.
        older = {rank for rank in behind if found.ranks[rank] < since}
        missing = sorted(behind - older)
        unknown = sorted(older | set(ranks) - found.ranks.keys())
        others = sorted({call.operation for call in here})
        if missing or unknown or len(others) > 1:
            told.append(
                FlightHang(
                    group=group,
                    number=number,
                    operations=others,
                    waiting=sorted(call.rank for call in here),
                    missing=missing,
                    unknown=unknown,
                    last={rank: newest[rank].number for rank in missing},
                    since_wall_ns=since,
                )
            )
    return told


def put(con: duckdb.DuckDBPyConnection, found: Read | None) -> None:
    """Make the table of calls that end for nobody before all have come, of what was read."""
    con.execute(f"CREATE TABLE IF NOT EXISTS {TABLE} ({_COLUMNS})")
    calls = [call for call in (found.calls if found else ()) if call.operation in _COMMON]
    for begin in range(0, len(calls), 50_000):
        columns = zip(
            *(
                (call.rank, call.group, len(call.ranks), call.number, call.came_wall_ns)
                for call in calls[begin : begin + 50_000]
            ),
            strict=True,
        )
        con.execute(
            f"INSERT INTO {TABLE} SELECT unnest(?), unnest(?), unnest(?), unnest(?), unnest(?)",
            [list(column) for column in columns],
        )


def calls_of(con: duckdb.DuckDBPyConnection) -> Columns:
    """Return rank, group_name, size, number and came_wall_ns of the calls that were put there."""
    there = con.execute(
        "SELECT count(*) FROM duckdb_tables() WHERE table_name = $name", {"name": TABLE}
    ).fetchone()
    source = TABLE if there and there[0] else f"(SELECT {_NOTHING}) WHERE false"
    return fetch(con, f"SELECT * FROM {source} ORDER BY ALL")


def left_out(found: Read) -> list[NotSeen]:
    """Return what of the dumps was not used, and why."""
    told = [
        NotSeen(what=f"calls in {name}", why=why, rules=[])
        for name, why in sorted(found.bad.items())[:8]
    ]
    if found.bad_calls:
        why = f"{found.bad_calls:,} entries are none that a flight recorder writes"
        told.append(NotSeen(what="some calls in flight recorder dumps", why=why, rules=[]))
    return told
