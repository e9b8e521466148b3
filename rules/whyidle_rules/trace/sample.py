"""A trace as the agent would have recorded it: 8 Hz windows instead of exact intervals.

Used to judge what can be known from samples against what is exact. GPM counts an SM as active while
a warp is resident on it, so a kernel of a grid smaller than the chip fills that share of the SMs,
and a larger one all of them; kernels that run together add up, to at most all.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt

from whyidle.errors import UserError
from whyidle.layout import SEGMENT, Identity, stem
from whyidle.manifest import RECORDING, write_manifest
from whyidle.segment import new_segment
from whyidle_rules import intervals
from whyidle_rules.intervals import Ints
from whyidle_rules.trace.columns import NO_VALUE, Columns
from whyidle_rules.trace.device import DeviceTrace
from whyidle_rules.trace.load import FileTrace, read_columns
from whyidle_rules.trace.names import Gpu
from whyidle_rules.trace.sample_host import tables

HERTZ = 8.0
_NAMESPACE = uuid.UUID("6d3c1c9e-6d0f-4d0e-9a53-6f6b5bb3a1f0")  # of identities made up for traces

Floats = npt.NDArray[np.float64]
Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One GPU's windows; ratios are None where the trace lacks the grids or the occupancies."""

    edges: Ints
    gr_active: Floats
    sm_active: Floats | None
    sm_occupancy: Floats | None
    pcie_rx_bytes: Ints
    pcie_tx_bytes: Ints


def sample(
    columns: Columns,
    device: DeviceTrace,
    number: int,
    sm_count: int | None,
    base_ns: int,
    hz: float,
) -> Samples:
    """Sample the GPU that the file numbers `number`; the last window is the shorter rest."""
    rows = np.flatnonzero(np.frombuffer(columns.gpu_device, dtype=np.int32) == number)
    start = np.frombuffer(columns.gpu_start, dtype=np.int64)[rows] + base_ns
    end = np.frombuffer(columns.gpu_end, dtype=np.int64)[rows] + base_ns
    kind = np.frombuffer(columns.gpu_kind, dtype=np.int8)[rows]
    begin, finish = device.parts.begin, device.parts.end
    step = max(1, round(1e9 / hz))
    edges = np.append(np.arange(begin, finish, step, dtype=np.int64), finish)
    kernel = kind <= Gpu.POINT_TO_POINT
    resident = intervals.union(start[kernel], end[kernel])
    lengths = np.maximum(edges[1:] - edges[:-1], 1).astype(np.float64)
    busy = intervals.covered_ns(resident, edges[:-1], edges[1:])
    blocks = np.frombuffer(columns.gpu_blocks, dtype=np.int64)[rows][kernel]
    occupancy = np.frombuffer(columns.gpu_occupancy, dtype=np.int8)[rows][kernel]
    size = np.frombuffer(columns.gpu_bytes, dtype=np.int64)[rows]
    filled = None
    if sm_count and (blocks != NO_VALUE).all():
        fill = np.minimum(blocks / sm_count, 1.0)
        filled = _resident(start[kernel], end[kernel], fill, edges) / lengths
    warps = None
    if (occupancy != NO_VALUE).all():
        warps = _resident(start[kernel], end[kernel], occupancy / 100.0, edges) / lengths
    from_host = (kind == Gpu.COPY_H2D) | (kind == Gpu.COPY_H2D_PAGEABLE)
    return Samples(
        edges=edges,
        gr_active=busy / lengths,
        sm_active=filled,
        sm_occupancy=warps,
        pcie_rx_bytes=_moved(start, end, size, from_host, edges),
        pcie_tx_bytes=_moved(start, end, size, kind == Gpu.COPY_D2H, edges),
    )


def _resident(start: Ints, end: Ints, share: Floats, edges: Ints) -> Floats:
    """Integrate the sum of shares, at most 1 at any time, over each window; nanoseconds."""
    if len(start) == 0:
        return np.zeros(len(edges) - 1)
    times = np.concatenate((start, end))
    changes = np.concatenate((share, -share))
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.clip(np.cumsum(changes[order]), 0.0, 1.0)
    total = np.concatenate(([0.0], np.cumsum(level[:-1] * np.diff(times))))
    # Relative to the first edge, so that float64 keeps nanoseconds.
    at_edges = np.interp(edges - edges[0], times - edges[0], total)
    return np.asarray(np.diff(at_edges))


def _moved(start: Ints, end: Ints, size: Ints, rows: npt.NDArray[np.bool_], edges: Ints) -> Ints:
    """Return the bytes copied in each window; a copy across an edge is split by time."""
    rows = rows & (size > 0)
    if not rows.any():
        return np.zeros(len(edges) - 1, dtype=np.int64)
    start, end, size = start[rows], np.maximum(end[rows], start[rows] + 1), size[rows]
    rate = size / (end - start)
    times = np.concatenate((start, end))
    order = np.argsort(times, kind="stable")
    level = np.cumsum(np.concatenate((rate, -rate))[order])
    times = times[order]
    total = np.concatenate(([0.0], np.cumsum(level[:-1] * np.diff(times))))
    at_edges = np.interp(edges - edges[0], times - edges[0], total)
    return np.asarray(np.diff(np.rint(at_edges)), dtype=np.int64)


def write(paths: Sequence[Path], out: Path, hz: float = HERTZ) -> list[FileTrace]:
    """Write the traces as one recording into `out`; returns what was read. Raises UserError."""
    try:
        return _write(paths, out, hz)
    except (OSError, duckdb.IOException) as error:
        reason = (getattr(error, "strerror", None) or str(error).splitlines()[0]).lower()
        raise UserError(f"{out}: it cannot be written ({reason}); name another with -o.") from error


def _write(paths: Sequence[Path], out: Path, hz: float) -> list[FileTrace]:
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: this folder is not empty; name a new one with -o.")
    files = []
    written = 0
    for path in paths:
        file, columns = read_columns(path)
        files.append(file)
        if columns is not None and file.devices:
            _write_file(out, file, columns, hz)
            written += 1
    if not written:
        raise UserError(f"{paths[0]}: no GPU work is in it, so there is nothing to sample.")
    write_manifest(out, RECORDING, {"made_from": "profiler traces", "hz": hz})
    return files


def _write_file(out: Path, file: FileTrace, columns: Columns, hz: float) -> None:
    # Ranks of one node share its folder, as they would have shared the agent.
    node = file.node or f"rank{file.rank if file.rank is not None else file.path.name[:64]}"
    identity = Identity(node=_safe(node), boot_id=str(uuid.uuid5(_NAMESPACE, node)))
    folder = identity.folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    begin = min(device.parts.begin for device in file.devices)
    name = stem(max(begin, 0), max(begin, 0) + len(list(folder.iterdir())) * 1_000_000)
    uuids: list[str] = []
    with new_segment(folder / f"{name}{SEGMENT}", identity) as con:
        for device in file.devices:
            number = columns.devices.index(device.device)
            described = file.gpus.get(device.device)
            sms = described.sm_count if described else None
            identity_of_gpu = f"GPU-{uuid.uuid5(_NAMESPACE, f'{file.path.name}/{device.device}')}"
            uuids.append(identity_of_gpu)
            samples = sample(columns, device, number, sms, file.base_ns, hz)
            _insert(con, "gpu_activity", _activity(samples, identity_of_gpu))
            _insert(con, "run_info", _info(file, device, identity_of_gpu))
            _insert(con, "trace_step", _steps(file, device))
        end = max(device.parts.end for device in file.devices)
        pid = 1 + len(list(folder.iterdir()))  # of each file its own
        for table, values in tables(file, columns, uuids, begin, end, pid).items():
            _insert(con, table, values)


def _safe(node: str) -> str:
    kept = "".join(
        char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in node
    )
    return kept.strip("._-")[:200] or "unknown"


def _activity(samples: Samples, identity: str) -> dict[str, Values]:
    count = len(samples.edges) - 1
    columns: dict[str, Values] = {
        "mono_ns": samples.edges[1:],
        "uuid": np.full(count, identity),
        "source": np.full(count, "trace"),
        "t0_ns": samples.edges[:-1],
        "t1_ns": samples.edges[1:],
        "gr_active_ratio": samples.gr_active,
        "pcie_rx_bytes": samples.pcie_rx_bytes,
        "pcie_tx_bytes": samples.pcie_tx_bytes,
    }
    if samples.sm_active is not None:
        columns["sm_active_ratio"] = samples.sm_active
    if samples.sm_occupancy is not None:
        columns["sm_occupancy_ratio"] = samples.sm_occupancy
    return columns


def _info(file: FileTrace, device: DeviceTrace, identity: str) -> dict[str, Any]:
    described = file.gpus.get(device.device)
    return {
        "mono_ns": device.parts.begin,
        "rank": file.rank,
        "world_size": file.world_size,
        "gpu": device.device,
        "uuid": identity,
        "communicates": device.parts.exposed_comm > 0 or len(device.comm.start) > 0,
        "gpu_name": described.name if described else None,
        "source": file.path.name,
        "t0_ns": device.parts.begin,
        "t1_ns": device.parts.end,
    }


def _steps(file: FileTrace, device: DeviceTrace) -> dict[str, Values]:
    steps = device.steps
    return {
        "mono_ns": np.array([parts.begin for _, parts in steps], dtype=np.int64),
        "rank": np.array([-1 if file.rank is None else file.rank] * len(steps), dtype=np.int64),
        "step": np.array([str(number) for number, _ in steps], dtype=object),
        "t1_ns": np.array([parts.end for _, parts in steps], dtype=np.int64),
        "compute_ns": np.array([parts.compute for _, parts in steps], dtype=np.int64),
        "exposed_comm_ns": np.array([parts.exposed_comm for _, parts in steps], dtype=np.int64),
        "exposed_copy_ns": np.array([parts.exposed_copy for _, parts in steps], dtype=np.int64),
        "idle_ns": np.array([parts.idle for _, parts in steps], dtype=np.int64),
    }


def _insert(con: Any, table: str, columns: dict[str, Any]) -> None:
    """Insert columns of one length, or one row of plain values, into a table of the segment."""
    names = ", ".join(columns)
    first = next(iter(columns.values()))
    if not isinstance(first, np.ndarray):
        marks = ", ".join("?" for _ in columns)
        con.execute(f"INSERT INTO seg.{table} ({names}) VALUES ({marks})", list(columns.values()))
        return
    if len(first) == 0:
        return
    con.register("incoming", {name: np.asarray(values) for name, values in columns.items()})
    picked = ", ".join("nullif(rank, -1)" if name == "rank" else name for name in columns)
    con.execute(f"INSERT INTO seg.{table} ({names}) SELECT {picked} FROM incoming")
    con.unregister("incoming")
