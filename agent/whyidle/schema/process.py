"""Tables of processes. Identity is (pid, start_ns): pids are used again."""

from __future__ import annotations

from typing import ClassVar

from whyidle.table import counter, gauge, key, label, table


@table
class ProcessInfo:
    """What a process is; written when it is first seen, when it changes, and once a minute."""

    TABLE: ClassVar[str] = "process_info"

    mono_ns: int = key("When it was read.", unit="ns")
    pid: int = key("Process id in the namespace of the agent.")
    start_ns: int = key("When it started, boot clock (/proc/PID/stat, starttime).", unit="ns")
    parent_pid: int | None = label("Process id of its parent.")
    kind: str | None = label(
        "trainer, data_worker, helper or NULL; from GPU contexts, parentage and thread names."
    )
    comm: str | None = label("Name of its main thread.")
    command: str | None = label("Command line, cut at 512 bytes.")
    parallel_options: str | None = label(
        "Options anywhere on it that share out a job: --pipeline-model-parallel-size=4 ..."
    )
    rank: int | None = label("Global rank (RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK ...).")
    local_rank: int | None = label("Rank on its node.")
    world_size: int | None = label("Ranks of the job.")
    local_world_size: int | None = label("Ranks of the job on its node.")
    node_rank: int | None = label("Number of its node in the job (GROUP_RANK, SLURM_NODEID ...).")
    restarts: int | None = label("Times that the job was started again.")
    job: str | None = label("Job id of the scheduler or of torchrun; else the uid of its pod.")
    job_name: str | None = label("Name of the job (SLURM_JOB_NAME, JOB_NAME ...).")
    job_step: str | None = label("Step of the Slurm job.")
    pod: str | None = label("Kubernetes pod (POD_NAME, or the host name in a pod).")
    pod_namespace: str | None = label("Namespace of the pod (POD_NAMESPACE).")
    user_id: int | None = label("Effective user id.")
    cgroup: str | None = label("Its cgroup, v2 path or that of the v1 cpu controller.")
    cpus_allowed: str | None = label("CPUs that it may use, as a list such as 0-3,8.")
    cpus_allowed_count: int | None = gauge("How many CPUs that are.")
    numa_allowed: str | None = label("Memory nodes that it may use.")
    net_namespace: str | None = label(
        "Inode number of its network namespace; empty for that of the agent."
    )
    thread_kinds: str | None = label(
        "Families of named threads, comma-separated: autograd, data_pin, gloo, nccl."
    )


@table
class ProcessThread:
    """Threads of a trainer without DataLoader workers that ran lately, other than its main one."""

    TABLE: ClassVar[str] = "process_thread"

    mono_ns: int = key("When it was read.", unit="ns")
    pid: int = key("Process id in the namespace of the agent.")
    start_ns: int = key("When the process started, boot clock.", unit="ns")
    tid: int = key("Thread id.")
    name: str | None = label("Name of the thread (comm).")
    state: str | None = label("R, S, D, T ... (/proc/PID/task/TID/stat).")
    wait_channel: str | None = label("Kernel function that it sleeps in.")
    run_ns: int | None = counter("On a CPU (schedstat).", unit="ns")
    run_delay_ns: int | None = counter("Ready, without a CPU (schedstat).", unit="ns")


@table
class Process:
    """Counters of a watched process: of a GPU's processes and all that descend from them."""

    TABLE: ClassVar[str] = "process"

    mono_ns: int = key("When it was read.", unit="ns")
    pid: int = key("Process id in the namespace of the agent.")
    start_ns: int = key("When it started, boot clock (/proc/PID/stat, starttime).", unit="ns")
    parent_pid: int | None = label("Process id of its parent.")
    kind: str | None = label("As in process_info.")
    state: str | None = label("R, S, D, T, Z ... of its main thread (/proc/PID/stat).")
    wait_channel: str | None = label("Kernel function that its main thread sleeps in.")
    user_ns: int | None = counter("CPU time in user mode, all threads (utime).", unit="ns")
    system_ns: int | None = counter("CPU time in the kernel, all threads (stime).", unit="ns")
    main_run_ns: int | None = counter("Main thread on a CPU (schedstat).", unit="ns")
    main_run_delay_ns: int | None = counter("Main thread ready, without a CPU.", unit="ns")
    blkio_delay_ns: int | None = counter(
        "Waited for block I/O (stat field 42); NULL where delay accounting is off; over-counts.",
        unit="ns",
    )
    reaped_user_ns: int | None = counter(
        "User CPU time of children that ended and were waited for (cutime).", unit="ns"
    )
    reaped_system_ns: int | None = counter("Kernel CPU time of the same (cstime).", unit="ns")
    minor_faults: int | None = counter("Page faults without I/O.")
    major_faults: int | None = counter("Page faults with I/O.")
    threads: int | None = gauge("Threads.")
    last_cpu: int | None = gauge("CPU that the main thread ran on last.")
    rss_bytes: int | None = gauge("Resident memory; read every 5 s, else NULL.", unit="bytes")
    voluntary_switches: int | None = counter("Main thread gave the CPU up; read every 5 s.")
    involuntary_switches: int | None = counter("Main thread lost the CPU; read every 5 s.")
    read_bytes: int | None = counter(
        "Read from storage (io); reaped children's are added.", unit="bytes"
    )
    write_bytes: int | None = counter("Written towards storage (io).", unit="bytes")
    rchar_bytes: int | None = counter("Asked of read(), page cache and pipes too.", unit="bytes")
    wchar_bytes: int | None = counter("Given to write(), pipes too.", unit="bytes")
