"""Rows of a counter page that has been read and whose process is known: pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whyidle import probe_groups as groups_of
from whyidle import probe_page as page
from whyidle.collect.probe_owner import Owner
from whyidle.schema import Probe, ProbeCall, ProbeEvent, ProbeGroup, ProbeInfo, ProbeLoader

_SAVE, _LOAD, _EVALUATION = 1, 2, 3
_WORKERS, _ITERABLE, _PIN_MEMORY, _PERSISTENT, _SHARED = 1, 2, 4, 8, 16


def info_row(
    mono_ns: int, owner: Owner, header: page.Header, totals: page.Process, path: str
) -> ProbeInfo:
    """Return who publishes the page."""
    return ProbeInfo(
        mono_ns=mono_ns,
        pid=owner.pid,
        start_ns=owner.start_ns,
        page="/" + path,
        opened_ns=header.opened_ns,
        closed_ns=totals.closed_ns,
        inner_pid=header.pid,
        rank=header.rank,
        world_size=header.world_size,
        local_rank=header.local_rank,
        python=header.python,
        torch=header.torch,
        loaders=totals.loaders_seen,
        pipeline_stage=totals.pipeline_stage,
        pipeline_stages=totals.pipeline_stages,
        pipeline_batches=totals.pipeline_batches,
        pipeline_schedule=totals.pipeline_schedule,
        pipeline_virtual=totals.pipeline_virtual,
    )


def probe_row(
    mono_ns: int,
    owner: Owner,
    header: page.Header,
    totals: page.Process,
    loaders: Sequence[page.Loader],
    groups: Sequence[groups_of.Group] | None,
) -> Probe:
    """Return the totals of the process; those of its DataLoaders and groups are summed up.

    `groups` is None for a page that has none, as older probes write them.
    """
    kinds = totals.phase_ns
    stuck = [item for item in groups or () if item.waiting_since_ns]
    longest = min(stuck, key=lambda item: item.waiting_since_ns or 0, default=None)
    waiting = [item.waiting_since_ns for item in loaders if item.waiting_since_ns]
    name = page.phase_name(header, totals.phase) if totals.phase else None
    return Probe(
        mono_ns=mono_ns,
        pid=owner.pid,
        start_ns=owner.start_ns,
        steps=totals.steps,
        optimizer_steps=totals.optimizer_steps,
        last_step_ns=totals.last_step_ns,
        batches=_sum([item.batches for item in loaders]),
        data_wait_ns=_sum([item.wait_ns for item in loaders]),
        outside_wait_ns=_sum([item.outside_wait_ns for item in loaders]),
        waiting_since_ns=min(waiting, default=None),
        phase=name,
        phase_since_ns=totals.phase_since_ns,
        checkpoint_save_ns=kinds[_SAVE],
        checkpoint_load_ns=kinds[_LOAD],
        evaluation_ns=kinds[_EVALUATION],
        other_phases_ns=_sum(kinds[_EVALUATION + 1 :]),
        background_save_ns=totals.phase_background_ns[_SAVE],
        gc_ns=totals.gc_ns,
        gc_count=totals.gc_count,
        gc_full_count=totals.gc_full_count,
        hook_errors=totals.hook_errors,
        coll_wait_ns=None if groups is None else _sum([g.wait_ns for g in groups]),
        message_wait_ns=None if groups is None else _sum([g.message_wait_ns for g in groups]),
        coll_waiting_since_ns=longest.waiting_since_ns if longest else None,
        coll_waiting_for=longest.operation if longest else None,
    )


# A sum of hostile numbers must still fit into a column.
_LIMIT = (1 << 63) - 1


def _sum(parts: Sequence[int | None]) -> int | None:
    if None in parts:
        return None
    total = sum(parts)  # type: ignore[arg-type] # there is no None in it
    return total if total <= _LIMIT else None


def loader_row(mono_ns: int, owner: Owner, place: int, item: page.Loader) -> ProbeLoader:
    """Return the row of a DataLoader."""
    flags = item.flags or 0
    return ProbeLoader(
        mono_ns=mono_ns,
        pid=owner.pid,
        start_ns=owner.start_ns,
        place=place,
        loader=item.serial,
        iterable=bool(flags & _ITERABLE),
        pin_memory=bool(flags & _PIN_MEMORY),
        persistent_workers=bool(flags & _PERSISTENT),
        shared=bool(flags & _SHARED),
        workers=item.workers,
        queue_capacity=item.capacity,
        queue_depth=item.ready,
        tasks_outstanding=item.outstanding,
        unpinned=item.unpinned,
        batch_size=item.batch_size,
        arrived_ns=item.arrived_ns,
        waiting_since_ns=item.waiting_since_ns or None,
        batches=item.batches,
        wait_ns=item.wait_ns,
        outside_batches=item.outside_batches,
        outside_wait_ns=item.outside_wait_ns,
        background_batches=item.background_batches,
        background_wait_ns=item.background_wait_ns,
        empty_arrivals=item.empty_arrivals if flags & _WORKERS else None,
        depth_sum=item.ready_sum if flags & _WORKERS else None,
        iterators=item.iterators,
        setup_ns=item.setup_ns,
        finish_ns=item.end_ns,
        finished=item.ends,
    )


def event_rows(mono_ns: int, owner: Owner, records: Iterator[page.Record]) -> Iterator[ProbeEvent]:
    """Yield the rows of ring records."""
    for record in records:
        steps, wait_ns, batches = record.values
        is_step = record.kind == "step"
        yield ProbeEvent(
            mono_ns=mono_ns,
            pid=owner.pid,
            start_ns=owner.start_ns,
            sequence=record.sequence,
            kind=record.kind,
            background=record.background,
            begin_ns=record.begin_ns,
            end_ns=record.end_ns,
            step=None if record.kind == "gc" else steps,
            data_wait_ns=wait_ns if is_step else None,
            batches=batches if is_step else None,
        )


def group_row(mono_ns: int, owner: Owner, item: groups_of.Group) -> ProbeGroup:
    """Return the row of a process group."""
    return ProbeGroup(
        mono_ns=mono_ns,
        pid=owner.pid,
        start_ns=owner.start_ns,
        place=item.serial or 0,
        group_key=item.key,
        size=item.size,
        group_rank=item.rank,
        backend=item.backend,
        calls=item.calls,
        messages=item.messages,
        moved_bytes=item.moved_bytes,
        waits=item.waits,
        wait_ns=item.wait_ns,
        message_wait_ns=item.message_wait_ns,
        waiting_since_ns=item.waiting_since_ns,
        arrived_ns=item.arrived_ns,
        operation=item.operation,
        backwards=item.backwards,
    )


def call_row(mono_ns: int, owner: Owner, call: groups_of.Call) -> ProbeCall:
    """Return the row of a recorded call."""
    return ProbeCall(
        mono_ns=mono_ns,
        pid=owner.pid,
        start_ns=owner.start_ns,
        sequence=call.sequence,
        place=call.group,
        operation=call.operation,
        background=call.background,
        number=call.number,
        called_ns=call.called_ns,
        ended_ns=call.ended_ns,
        wait_ns=call.wait_ns,
        size_bytes=call.size_bytes,
    )
