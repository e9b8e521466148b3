"""A synthetic training job as /proc shows it, for tests of what watches processes.

Everything here is made up, in the kernel's own format: a launcher, ranks with a GPU each, and
DataLoader workers below them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trees import write

LAUNCHER = 100
RANK0 = 200
RANK1 = 300


@dataclass(slots=True, kw_only=True)
class Proc:
    """A process; times in ticks of 10 ms, as the kernel prints them."""

    pid: int
    parent: int
    comm: str
    command: str = "python train.py"
    start: int = 5_000
    state: str = "S"
    user: int = 10
    read_bytes: int = 4096
    threads: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    cgroup: str = "0::/system.slice/slurmstepd.scope/job_4/step_0/user/task_0\n"
    cpus: str = "0-3,8"
    blkio: int = 0

    def stat(self) -> str:
        """The line of /proc/PID/stat: 52 fields."""
        fields = [0] * 50
        fields[0] = self.parent  # field 4
        fields[6], fields[8] = 7, 3  # minflt, majflt
        fields[10], fields[11] = self.user, 5
        fields[12], fields[13] = 2, 1  # cutime, cstime
        fields[16] = 1 + len(self.threads)
        fields[18] = self.start
        fields[35] = 2  # processor
        fields[38] = self.blkio
        return f"{self.pid} ({self.comm}) {self.state} {' '.join(map(str, fields))}\n"

    def status(self) -> str:
        """The lines of /proc/PID/status that are read, among others."""
        return (
            f"Name:\t{self.comm}\nPid:\t{self.pid}\nUid:\t1000\t1001\t1000\t1000\n"
            f"VmRSS:\t    2048 kB\nCpus_allowed_list:\t{self.cpus}\nMems_allowed_list:\t0-1\n"
            "voluntary_ctxt_switches:\t11\nnonvoluntary_ctxt_switches:\t12\n"
        )

    def files(self) -> dict[str, str | bytes]:
        """Everything of /proc/PID that is read."""
        own = f"proc/{self.pid}"
        environ = "".join(f"{name}={value}\0" for name, value in self.environ.items())
        threads = {
            f"{own}/task/{self.pid + 1 + index}/comm": name + "\n"
            for index, name in enumerate(self.threads)
        }
        return {
            f"{own}/stat": self.stat(),
            f"{own}/status": self.status(),
            f"{own}/schedstat": "1000 2000 3\n",
            f"{own}/io": (
                f"rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: {self.read_bytes}\n"
                "write_bytes: 8192\ncancelled_write_bytes: 0\n"
            ),
            f"{own}/wchan": "0" if self.state == "R" else "futex_do_wait",
            f"{own}/cmdline": self.command.replace(" ", "\0") + "\0",
            f"{own}/environ": environ,
            f"{own}/cgroup": self.cgroup,
            f"{own}/task/{self.pid}/comm": self.comm + "\n",
            **threads,
        }


def launcher() -> Proc:
    """torchrun."""
    return Proc(pid=LAUNCHER, parent=1, comm="pt_elastic", command="torchrun train.py")


def rank(pid: int, number: int) -> Proc:
    """A rank, with the threads that it has once it trains."""
    return Proc(
        pid=pid,
        parent=LAUNCHER,
        comm="python3",
        environ={"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"},
        threads=(
            "pt_autograd_0",
            "pt_nccl_watchdg",
            "NCCL Progress 1",
            "pt_data_pin",
            "cuda-EvtHandlr",
        ),
    )


def worker(pid: int, parent: int, comm: str = "pt_data_worker") -> Proc:
    """A DataLoader worker."""
    return Proc(pid=pid, parent=parent, comm=comm, environ={"RANK": "0"})


def bystanders() -> list[Proc]:
    """Processes of the node that have nothing to do with the job."""
    return [
        Proc(pid=1, parent=0, comm="systemd", command="/sbin/init"),
        Proc(pid=2, parent=0, comm="kthreadd", command=""),
        Proc(pid=50, parent=1, comm="sshd", command="sshd"),
    ]


def job() -> list[Proc]:
    """A launcher, two ranks, two workers each, and bystanders."""
    ranks = [rank(RANK0, 0), rank(RANK1, 1)]
    workers = [worker(p.pid + 50 + index, p.pid) for p in ranks for index in range(2)]
    return [*bystanders(), launcher(), *ranks, *workers]


def put(root: Path, processes: list[Proc]) -> None:
    """Write processes below `root`."""
    for process in processes:
        write(root, process.files())
