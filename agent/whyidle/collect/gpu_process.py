"""Which processes hold a context on which GPU.

Source: nvml.h, nvmlDeviceGetComputeRunningProcesses and its kin. Listing is the slowest ordinary
call (4.5 ms a GPU, holding the driver's lock), so it is made every 5 s. The driver translates pids
to the caller's namespace: in a container without the host's, nothing is listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whyidle.collect.collector import Collect, Collector, Problem
from whyidle.collect.gpu_list import LISTS, Gpus, value, whole
from whyidle.collect.process_text import parse_stat
from whyidle.host import Answer, Host, NvmlError
from whyidle.schema import GpuProcess

# Graphics contexts are left out: they do not train, and each list costs the driver the same.
CONTEXTS = ("compute", "mps")
_PERCENT = 100


def parse_processes(answer: Answer) -> dict[int, int | None]:
    """Return memory in bytes by pid; a pid that is listed twice, as on two instances, is added."""
    found: dict[int, int | None] = {}
    for item in answer if isinstance(answer, LISTS) else ():
        if not isinstance(item, LISTS) or len(item) != 2 or whole(item[0]) is None:
            raise ValueError(f"processes: {item!r} is not (pid, bytes)")
        pid, memory = int(str(item[0])), whole(item[1])
        before = found.get(pid)
        found[pid] = memory if before is None or memory is None else before + memory
    return found


def parse_utilization(answer: Answer, since_us: int) -> tuple[dict[int, float], int]:
    """Return the latest SM share by pid, and the newest timestamp: the next question's since.

    Rows over 100 % are nonsense that drivers are known to send: skipped.
    """
    latest: dict[int, tuple[int, float]] = {}
    newest = since_us
    for item in answer if isinstance(answer, LISTS) else ():
        if not isinstance(item, LISTS) or len(item) != 3:
            raise ValueError(f"process utilization: {item!r} is not (pid, percent, us)")
        pid, percent, stamp = (whole(part) for part in item)
        if pid is None or percent is None or stamp is None:
            raise ValueError(f"process utilization: {item!r} is not three whole numbers")
        newest = max(newest, stamp)
        if percent <= _PERCENT and (pid not in latest or stamp >= latest[pid][0]):
            latest[pid] = (stamp, percent / _PERCENT)
    return {pid: share for pid, (_, share) in latest.items()}, newest


def make() -> Collect:
    """Return the collector; it keeps how far the utilization of each GPU was read."""
    gpus = Gpus()
    since_us: dict[str, int] = {}

    def collect(host: Host) -> Iterator[GpuProcess | Problem]:
        listed = gpus.ask(host)
        split = {gpu.parent for gpu in listed}
        for gpu in listed:
            if gpu.uuid in split:
                continue  # its processes are listed by its MIG devices
            try:
                yield from _rows(host, gpu.uuid, since_us)
            except NvmlError as error:
                yield Problem(subject=gpu.uuid, message=str(error))

    return collect


def _rows(host: Host, uuid: str, since_us: dict[str, int]) -> Iterator[GpuProcess | Problem]:
    shares: Mapping[int, float] = {}
    try:
        answer = value(host, "ProcessUtilization", uuid, since_us.get(uuid, 0))
        shares, since_us[uuid] = parse_utilization(answer, since_us.get(uuid, 0))
    except NvmlError as error:
        yield Problem(subject=f"{uuid} ProcessUtilization", message=str(error))
    for context in CONTEXTS:
        answer = value(host, "Processes", uuid, context)
        mono_ns = host.clock.mono_ns()
        for pid, memory in parse_processes(answer).items():
            yield GpuProcess(
                mono_ns=mono_ns,
                uuid=uuid,
                pid=pid,
                start_ns=_start_ns(host, pid),
                context=context,
                memory_bytes=memory,
                sm_utilization_ratio=shares.get(pid),
            )


def _start_ns(host: Host, pid: int) -> int | None:
    try:
        return parse_stat(host.read_bytes(f"proc/{pid}/stat", keep=False)).start_ns
    except OSError:
        return None  # it has ended, or runs outside our pid namespace


GPU_PROCESS = Collector(name="gpu_process", lane="slow", make=make, thread="nvml", every_s=5.0)
