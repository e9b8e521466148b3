"""Tables of trainers that publish a counter page: what they say of themselves.

Identity is (pid, start_ns), as of process. Totals leave out what is going on: add the time since
`waiting_since_ns` or `phase_since_ns` to have it in.
"""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import counter, gauge, key, label, table


@table
class Probe:
    """Totals of a trainer. Batches are those that its main thread fetched for steps."""

    TABLE: ClassVar[str] = "probe"

    mono_ns: int = key("When the page was read.", unit="ns")
    pid: int = key("Process id in the namespace of the agent.")
    start_ns: int = key("When the process started, boot clock.", unit="ns")
    steps: int | None = counter(
        "Steps of the first optimizer after a batch; NULL before the first one that is counted."
    )
    optimizer_steps: int | None = counter("Steps of all torch optimizers.")
    last_step_ns: int | None = gauge("When the last step ended, monotonic.", unit="ns")
    batches: int | None = counter("Batches fetched for steps, all DataLoaders.")
    data_wait_ns: int | None = counter(
        "The main thread in next() of a DataLoader, for steps.", unit="ns"
    )
    outside_wait_ns: int | None = counter(
        "The same outside of steps: in a phase, or without gradients as in evaluation.", unit="ns"
    )
    waiting_since_ns: int | None = gauge(
        "Since when it has been in next(), monotonic; NULL when it is not.", unit="ns"
    )
    phase: str | None = label("Phase that the main thread is in; NULL in none.")
    phase_since_ns: int | None = gauge("Since when, monotonic.", unit="ns")
    checkpoint_save_ns: int | None = counter("The main thread saving checkpoints.", unit="ns")
    checkpoint_load_ns: int | None = counter("The main thread loading checkpoints.", unit="ns")
    evaluation_ns: int | None = counter("The main thread in evaluation, if it tells.", unit="ns")
    other_phases_ns: int | None = counter("The main thread in any other phase.", unit="ns")
    background_save_ns: int | None = counter("Other threads saving checkpoints.", unit="ns")
    gc_ns: int | None = counter("Pauses of Python's garbage collector.", unit="ns")
    gc_count: int | None = counter("How many.")
    gc_full_count: int | None = counter("How many of the oldest generation.")
    hook_errors: int | None = counter("What the probe failed at, and kept to itself.")
    coll_wait_ns: int | None = counter(
        "The main thread waiting for collectives that it had called, and for gradients that DDP "
        "reduces on CPUs; NULL: the probe is older than that.",
        unit="ns",
    )
    message_wait_ns: int | None = counter("The same for sends and receives.", unit="ns")
    coll_waiting_since_ns: int | None = gauge(
        "Since when it has been waiting for other ranks, monotonic; NULL when it is not.", unit="ns"
    )
    coll_waiting_for: str | None = label("In which operation.")


@table
class ProbeEvent:
    """A step, phase or pause that ended, from the ring of a page; gaps in `sequence` are lost."""

    TABLE: ClassVar[str] = "probe_event"

    mono_ns: int = key("When the page was read.", unit="ns")
    pid: int = key("Process id in the namespace of the agent.")
    start_ns: int = key("When the process started, boot clock.", unit="ns")
    sequence: int = key("Number of the record in its page, from 1.")
    kind: str = label(
        "Step, gc, data_wait, data_setup, or the name of a phase such as checkpoint_save."
    )
    background: bool = label("Whether it was in another thread than the main one.")
    begin_ns: int = gauge("When it began, monotonic.", unit="ns")
    end_ns: int = gauge("When it ended, monotonic.", unit="ns")
    step: int | None = gauge("Steps so far; one record may stand for several short steps.")
    data_wait_ns: int | None = gauge("Of a step: waited for data.", unit="ns")
    batches: int | None = gauge("Of a step: batches fetched.")


@table
class ProbeInfo:
    """Who publishes a page; written when it is first seen, when it changes, and once a minute."""

    TABLE: ClassVar[str] = "probe_info"

    mono_ns: int = key("When the page was read.", unit="ns")
    pid: int = key("Process id in the namespace of the agent.")
    start_ns: int = key("When the process started, boot clock.", unit="ns")
    page: str | None = label("Path of the page.")
    opened_ns: int | None = gauge("When it was made, monotonic.", unit="ns")
    closed_ns: int | None = gauge("When its process ended in good order, monotonic.", unit="ns")
    inner_pid: int | None = label("Process id in its own namespace.")
    rank: int | None = label("Global rank, from its launcher or torch.distributed.")
    world_size: int | None = label("Ranks of the job.")
    local_rank: int | None = label("Rank on its node.")
    python: str | None = label("Version of Python.")
    torch: str | None = label("Version of torch.")
    loaders: int | None = gauge("DataLoaders that it has used.")
    pipeline_stage: int | None = label("Stage of a pipeline that it runs, from 0.")
    pipeline_stages: int | None = label("Stages of that pipeline.")
    pipeline_batches: int | None = label("Micro-batches of a step.")
    pipeline_schedule: str | None = label("1f1b, gpipe, interleaved or other.")
    pipeline_virtual: int | None = label("Stages that it runs, of an interleaved schedule.")


@table
class ProbeLoader:
    """A DataLoader of a trainer. Totals go on when another DataLoader takes its place."""

    TABLE: ClassVar[str] = "probe_loader"

    mono_ns: int = key("When the page was read.", unit="ns")
    pid: int = key("Process id in the namespace of the agent.")
    start_ns: int = key("When the process started, boot clock.", unit="ns")
    place: int = key("Place in the page, from 0.")
    loader: int | None = label("Number of the DataLoader in its process, from 1.")
    iterable: bool | None = label("Whether its data set is of the iterable style.")
    pin_memory: bool | None = label("Whether a thread pins its batches.")
    persistent_workers: bool | None = label("Whether workers outlive an epoch.")
    shared: bool | None = label("Whether several DataLoaders share this place: too many live.")
    workers: int | None = gauge("Worker processes; 0: the trainer loads by itself.")
    queue_capacity: int | None = gauge("Batches that may be under way or ready; NULL: no queue.")
    queue_depth: int | None = gauge(
        "Batches ready when the trainer came last; NULL: no queue. At the end of an epoch of an "
        "iterable data set a worker that has run dry counts as one."
    )
    tasks_outstanding: int | None = gauge("Batches asked of workers, after the last next().")
    unpinned: int | None = gauge("Batches that the pin-memory thread had not taken by then.")
    batch_size: int | None = gauge("Samples in a batch.")
    arrived_ns: int | None = gauge("When the trainer came last, monotonic.", unit="ns")
    waiting_since_ns: int | None = gauge(
        "Since when it has been in next(), monotonic; NULL when it is not.", unit="ns"
    )
    batches: int | None = counter("Fetched by the main thread for steps.")
    wait_ns: int | None = counter("In next() for them; without workers that is loading.", unit="ns")
    outside_batches: int | None = counter("Fetched in a phase, or without gradients.")
    outside_wait_ns: int | None = counter("In next() for those.", unit="ns")
    background_batches: int | None = counter("Fetched by other threads than the main one.")
    background_wait_ns: int | None = counter("In next() for those.", unit="ns")
    empty_arrivals: int | None = counter("Times that the trainer came and nothing was ready.")
    depth_sum: int | None = counter("Sum of queue_depth over all times that the trainer came.")
    iterators: int | None = counter("Epochs begun.")
    setup_ns: int | None = counter("In iter(): starting workers.", unit="ns")
    finish_ns: int | None = counter("In the next() that ends an epoch.", unit="ns")
    finished: int | None = counter("Epochs ended.")


@table
class ProbeGroup:
    """A process group of torch.distributed, once a second while anything is called on it.

    Counted is what Python calls: not what compiled code or DDP's reducer call on GPUs. All members
    count collectives alike, so that the number of a call names it on every rank.
    """

    TABLE: ClassVar[str] = "probe_group"

    mono_ns: int = key("When the page was read.", unit="ns")
    pid: int = key("Process id in the namespace of the agent.")
    start_ns: int = key("When the process started, boot clock.", unit="ns")
    place: int = key("Number of the group in its process, from 1.")
    group_key: int | None = label(
        "Alike on all members, by name and ranks; NULL: several groups share this place."
    )
    size: int | None = label("Members.")
    group_rank: int | None = label("Rank of this process in it.")
    backend: str | None = label("gloo, nccl, mpi, ucc or other.")
    calls: int | None = counter("Collectives.")
    messages: int | None = counter("Sends and receives.")
    moved_bytes: int | None = counter("Of the tensors given to both.", unit="bytes")
    waits: int | None = counter("Times that the main thread waited for one to end.")
    wait_ns: int | None = counter("For collectives.", unit="ns")
    message_wait_ns: int | None = counter("For sends and receives.", unit="ns")
    waiting_since_ns: int | None = gauge("Since when it waits, monotonic.", unit="ns")
    arrived_ns: int | None = gauge("When a collective was called last, monotonic.", unit="ns")
    operation: str | None = label("Which one that was.")
    backwards: int | None = counter("Backward passes of DDP on CPUs that reduced gradients.")


@table
class ProbeCall:
    """A call on a process group: each long wait, and every 2^n-th call; gaps are lost."""

    TABLE: ClassVar[str] = "probe_call"

    mono_ns: int = key("When the page was read.", unit="ns")
    pid: int = key("Process id in the namespace of the agent.")
    start_ns: int = key("When the process started, boot clock.", unit="ns")
    sequence: int = key("Number of the record in its page, from 1.")
    place: int = label("Number of the group in its process, from 1.")
    operation: str = label("all_reduce, all_gather, send, ...; backward: DDP's, on CPUs.")
    background: bool = label("Whether it was called by another thread than the main one.")
    number: int = label(
        "Which call on its group, from 1; backward passes and messages are counted apart."
    )
    called_ns: int = gauge("When it was called, monotonic: when the rank came.", unit="ns")
    ended_ns: int = gauge(
        "When it had ended for who called it, monotonic: on GPUs, when it was queued.", unit="ns"
    )
    wait_ns: int = gauge("Of that, waited.", unit="ns")
    size_bytes: int | None = gauge("Of the tensor that was given.", unit="bytes")
