"""The processes of a node: which one launched work on which GPU, and who loads data for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import numpy as np

from whyidle.clock import NS_PER_S
from whyidle.collect.process_kind import DATA_WORKER, TRAINER
from whyidle_rules.recording.series import Columns, fetch

Identity = tuple[int, int]  # pid, start on the boot clock
_NEVER = 1 << 62
# A process is seen once a second: after its last row it lived for half of that, on average.
_UNSEEN_NS = NS_PER_S // 2

# Kernel functions in which a task waits for a file to be read or written, whatever its state:
# FUSE requests and some network file systems sleep interruptibly, state S.
_IO_CHANNELS = (
    "^(folio_wait|wait_on_page|io_schedule|request_wait_answer|fuse_|rpc_wait|nfs|ceph_|"
    "cl_sync_io|osc_|ptlrpc|ll_|balance_dirty|jbd2|xfs_|ext4_|blk_|wait_on_commit|__bio|bio_|"
    "submit_bio|filemap_|netfs_|cifs|smb|beegfs|FhgfsOps|mmfs|netfs)"
)
_FUSE_CHANNELS = "^(request_wait_answer|fuse_)"
# Where a task waits for a socket of the network; one with a timeout polls.
_SOCKET_CHANNELS = "^(sk_wait_data|sk_stream_wait|wait_woken|inet_csk_wait|tcp_)"
# Where it waits for any of some descriptors: a worker for its next task or, with a timeout, for
# the network, a trainer for its DataLoader or anything else.
_POLL_CHANNELS = "^(poll_schedule_timeout|do_poll|do_sys_poll|do_select|ep_poll|do_epoll_wait)"
# Where it waits for another thread of its process, or for the interpreter.
_LOCK_CHANNELS = "^(futex_|do_futex)"

# What a reading found of a thread. Where channels can be read, a sleeper without one woke up while
# it was looked at: no draw.
_FOUND = f"""
  CASE WHEN state IS NOT NULL AND NOT (state = 'S' AND wait_channel IS NULL AND channels)
  THEN coalesce(state = 'D' OR regexp_matches(wait_channel, '{_IO_CHANNELS}'), false)::INTEGER END
    AS io,
  coalesce(regexp_matches(wait_channel, '{_FUSE_CHANNELS}'), false)::INTEGER AS fuse,
  coalesce(state = 'R', false)::INTEGER AS runs,
  coalesce(state IN ('T', 't'), false)::INTEGER AS stopped,
  coalesce(regexp_matches(wait_channel, '{_SOCKET_CHANNELS}'), false)::INTEGER AS in_socket,
  coalesce(regexp_matches(wait_channel, '{_POLL_CHANNELS}'), false)::INTEGER AS in_poll,
  coalesce(regexp_matches(wait_channel, '{_LOCK_CHANNELS}'), false)::INTEGER AS in_lock,
  channels::INTEGER AS channels,
  (state IN ('S', 'D', 'I', 'T', 't'))::INTEGER AS waits
"""
_QUERY = f"""
SELECT number, mono_ns, {_FOUND},
  coalesce(main_run_ns::DOUBLE, user_ns::DOUBLE + system_ns::DOUBLE) AS run_ns,
  user_ns::DOUBLE + system_ns::DOUBLE AS cpu_ns,
  main_run_delay_ns::DOUBLE AS ready_ns, blkio_delay_ns::DOUBLE AS blkio_ns,
  read_bytes::DOUBLE AS read_bytes, write_bytes::DOUBLE AS write_bytes,
  rchar_bytes::DOUBLE AS rchar_bytes, wchar_bytes::DOUBLE AS wchar_bytes
FROM process JOIN (SELECT unnest($pids) AS pid, unnest($starts) AS start_ns,
    unnest($numbers) AS number, unnest($channels) AS channels) USING (pid, start_ns)
WHERE node = $node AND boot_id = $boot AND mono_ns BETWEEN $since AND $until
"""
_THREADS = f"""
SELECT pid, start_ns, tid, mono_ns, {_FOUND}, run_ns::DOUBLE AS run_ns,
  run_delay_ns::DOUBLE AS ready_ns, NULL::DOUBLE AS blkio_ns
FROM (SELECT *, bool_or(wait_channel IS NOT NULL) OVER (PARTITION BY pid, start_ns, tid) AS channels
  FROM process_thread
  WHERE node = $node AND boot_id = $boot AND mono_ns BETWEEN $since AND $until
    AND pid IS NOT NULL AND start_ns IS NOT NULL AND tid IS NOT NULL)
ORDER BY pid, start_ns, tid, mono_ns
"""
_THREAD_KEYS = ("pid", "start_ns", "tid")

NO_ROWS = Columns(of={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Proc:
    """A process, and when it lived on the monotonic clock.

    `channels` says whether the kernel told where it slept. `rows` are those of table process, once
    they are read (`read`).
    """

    identity: Identity
    kind: str | None
    parent_pid: int | None
    begin_ns: int
    end_ns: int
    info: Mapping[str, Any]
    channels: bool = False
    rows: Columns = NO_ROWS


@dataclass(slots=True, kw_only=True)
class Node:
    """All processes of a node in one boot, and the GPUs that they had."""

    procs: dict[Identity, Proc] = field(default_factory=dict)
    # Rows of table process_thread, by thread.
    threads: dict[Identity, list[Columns]] = field(default_factory=dict)
    on_gpu: dict[str, set[Identity]] = field(default_factory=dict)
    listed: bool = False  # whether the driver lists processes here at all
    dated: bool = False  # whether it is known when processes started
    # From when to when the driver listed processes of which there is no reading.
    unread: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def launchers(self, uuid: str) -> list[Proc]:
        """Return the processes that had a GPU, in order of their beginning."""
        found = [self.procs[who] for who in self.on_gpu.get(uuid, ()) if who in self.procs]
        return sorted(found, key=lambda proc: proc.begin_ns)

    def workers(self, trainer: Proc) -> list[Proc]:
        """Return the DataLoader workers that descend from a process."""
        pid = trainer.identity[0]
        parents = {proc.identity[0]: proc.parent_pid for proc in self.procs.values()}

        def descends(proc: Proc) -> bool:
            above = proc.parent_pid
            for _ in range(4):  # a forkserver stands between; nobody nests deeper
                if above is None or above == pid:
                    return above == pid
                above = parents.get(above)
            return False

        return [
            proc
            for proc in self.procs.values()
            if proc.kind == DATA_WORKER and descends(proc) and proc.end_ns > trainer.begin_ns
        ]

    def around(self, uuid: str) -> list[Proc]:
        """Return the processes that had a GPU, and the workers of each."""
        own = self.launchers(uuid)
        return [*own, *(worker for proc in own for worker in self.workers(proc))]


def load(
    con: duckdb.DuckDBPyConnection,
    node: str,
    boot_id: str,
    since_ns: int = -_NEVER,
    until_ns: int = _NEVER,
) -> Node:
    """Return what the recording knows of a node's processes in [since, until]."""
    at = {"node": node, "boot": boot_id, "since": since_ns, "until": until_ns}
    here = {"node": node, "boot": boot_id}
    boot_minus_mono = _one(
        con,
        "SELECT median(boot_ns::HUGEINT - mono_ns)::DOUBLE FROM clock WHERE node = $node"
        " AND boot_id = $boot",
        here,
    )
    infos = {
        (int(row[0]), int(row[1])): dict(zip(_INFO, row[2:], strict=True))
        for row in con.execute(
            f"SELECT pid, start_ns, {', '.join(f'arg_max({n}, mono_ns)' for n in _INFO)}"
            " FROM process_info WHERE node = $node AND boot_id = $boot AND pid IS NOT NULL"
            " AND start_ns IS NOT NULL GROUP BY ALL",
            here,
        ).fetchall()
    }
    closed = _closed(con, here)
    found = Node(dated=boot_minus_mono is not None)
    for pid, start_ns, first, last, kind, parent, channels in con.execute(
        "SELECT pid, start_ns, min(mono_ns), max(mono_ns), arg_max(kind, mono_ns),"
        " arg_max_null(parent_pid, mono_ns), bool_or(wait_channel IS NOT NULL) FROM process"
        " WHERE node = $node AND boot_id = $boot AND mono_ns BETWEEN $since AND $until"
        " AND pid IS NOT NULL AND start_ns IS NOT NULL GROUP BY ALL ORDER BY pid, start_ns",
        at,
    ).fetchall():
        who = (int(pid), int(start_ns))
        info = infos.get(who, {})
        began = first if boot_minus_mono is None else int(start_ns) - int(boot_minus_mono)
        found.procs[who] = Proc(
            identity=who,
            kind=kind or info.get("kind"),
            parent_pid=parent,
            begin_ns=min(began, first),
            # A process says when Python ends, and is gone a moment later.
            end_ns=max(last, closed[who]) if who in closed else last + _UNSEEN_NS,
            info=info,
            channels=channels,
        )
    for (pid, start_ns, _), rows in fetch(con, _THREADS, at).groups(*_THREAD_KEYS).items():
        found.threads.setdefault((int(pid), int(start_ns)), []).append(rows)
    _gpus(con, found, here, boot_minus_mono)
    return found


def read(
    con: duckdb.DuckDBPyConnection,
    where: tuple[str, str],
    since_ns: int,
    until_ns: int,
    procs: Iterable[Proc],
) -> dict[Identity, Proc]:
    """Return processes of a machine with their rows in [since, until], by identity.

    A day of a node has six million rows, so that not all of them are read at a time.
    """
    wanted = list(procs)
    rows = fetch(
        con,
        _QUERY,
        {
            "node": where[0],
            "boot": where[1],
            "since": since_ns,
            "until": until_ns,
            "pids": [proc.identity[0] for proc in wanted],
            "starts": [proc.identity[1] for proc in wanted],
            "numbers": list(range(len(wanted))),
            "channels": [proc.channels for proc in wanted],
        },
    )
    found = {proc.identity: replace(proc, rows=rows.where(slice(0, 0))) for proc in wanted}
    for (number,), own in rows.groups("number").items():
        proc = wanted[int(number)]
        times = own["mono_ns"]
        if (times[1:] < times[:-1]).any():
            own = own.where(np.argsort(times, kind="stable"))
        found[proc.identity] = replace(proc, rows=own)
    return found


def _closed(con: duckdb.DuckDBPyConnection, here: Mapping[str, Any]) -> dict[Identity, int]:
    """Return when processes with a counter page said that they end."""
    return {
        (int(pid), int(start)): int(ns)
        for pid, start, ns in con.execute(
            "SELECT pid, start_ns, max(closed_ns) FROM probe_info"
            " WHERE node = $node AND boot_id = $boot AND closed_ns IS NOT NULL"
            " AND pid IS NOT NULL AND start_ns IS NOT NULL GROUP BY ALL",
            dict(here),
        ).fetchall()
    }


_INFO = (
    "kind", "rank", "local_rank", "world_size", "job", "cgroup", "cpus_allowed_count",
    "thread_kinds", "command", "net_namespace",
    "parallel_options",
)  # fmt: skip


def _gpus(
    con: duckdb.DuckDBPyConnection,
    node: Node,
    here: Mapping[str, Any],
    boot_minus_mono: float | None,
) -> None:
    """Learn which process had which GPU."""
    rows = con.execute(
        "SELECT uuid, pid, start_ns, min(mono_ns), max(mono_ns) FROM gpu_process"
        " WHERE node = $node AND boot_id = $boot AND pid IS NOT NULL AND start_ns IS NOT NULL"
        " AND mono_ns IS NOT NULL GROUP BY ALL",
        here,
    ).fetchall()
    for uuid, pid, start_ns, first, last in rows:
        who = (int(pid), int(start_ns))
        node.on_gpu.setdefault(uuid, set()).add(who)
        if who not in node.procs:
            began = first if boot_minus_mono is None else int(start_ns - boot_minus_mono)
            held = (min(began, first), last + _UNSEEN_NS)
            node.unread.setdefault(uuid, []).append(held)
    # Rows that it returned and the recording does not hold are lost: then nobody is known.
    node.listed = bool(
        _one(
            con,
            "SELECT count(*) > 0 AND (sum(rows) = 0 OR $any) FROM tick"
            " WHERE collector = 'gpu_process' AND rows IS NOT NULL"
            " AND node = $node AND boot_id = $boot",
            {**here, "any": bool(rows)},
        )
    )
    if rows:
        return
    # In a container without the host's processes the driver lists nobody.
    trainers = [proc for proc in node.procs.values() if proc.kind == TRAINER]
    if trainers:
        node.listed = False
    for uuid, index in con.execute(
        "SELECT DISTINCT uuid, gpu FROM gpu_info WHERE node = $node AND boot_id = $boot"
        " AND gpu IS NOT NULL",
        here,
    ).fetchall():
        own = [proc for proc in trainers if proc.info.get("local_rank") == index]
        if not own and index == 0 and all(p.info.get("local_rank") is None for p in trainers):
            own = trainers
        node.on_gpu[uuid] = {proc.identity for proc in own}


def _one(con: duckdb.DuckDBPyConnection, query: str, values: Mapping[str, Any]) -> Any:
    row = con.execute(query, dict(values)).fetchone()
    return None if row is None else row[0]
