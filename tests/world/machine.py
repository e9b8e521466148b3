"""A simulated node that answers the Host questions: seeded, in virtual time, everything a counter.

Two GPUs with a trainer each, data workers that are replaced now and then, disks, a link, a cgroup
with a CPU quota. All answers are functions of the clock, so that the same run can be had again.
"""

from __future__ import annotations

import errno
import random
import stat
from collections.abc import Callable

from whyidle.clock import NS_PER_S, Clock, VirtualClock
from whyidle.host import Answer, Argument, Event, Stat
from whyidle.layout import Identity

IDENTITY = Identity(node="sim0", boot_id="01234567-89ab-cdef-0123-456789abcdef")
CGROUP = "system.slice/slurmstepd.scope/job_7"
# Data workers live so long, as those of an epoch do.
EPOCH_NS = 40 * NS_PER_S
WORKERS = 3


class Machine:
    """The node. `clock` moves a little with each question, as reading takes time."""

    def __init__(self, seed: int = 0, *, gpus: int = 2, clock: VirtualClock | None = None) -> None:
        self._clock = clock if clock is not None else VirtualClock(1000 * NS_PER_S)
        self._random = random.Random(seed)
        self._busy = [self._random.uniform(0.2, 0.95) for _ in range(gpus)]
        self.uuids = [f"GPU-{number:08x}-sim" for number in range(gpus)]
        self._gpm_ns: dict[str, int] = {}
        self._files: dict[str, Callable[[int], str]] = {
            "proc/sys/kernel/hostname": lambda now: f"{IDENTITY.node}\n",
            "proc/sys/kernel/random/boot_id": lambda now: f"{IDENTITY.boot_id}\n",
            "proc/sys/kernel/task_delayacct": lambda now: "0\n",
            "proc/self/statm": lambda now: "9000 5000 2000 800 0 3000 0\n",
            "proc/stat": _proc_stat,
            "proc/vmstat": _vmstat,
            "proc/diskstats": _diskstats,
            "proc/net/dev": _net_dev,
            "sys/class/net/eth0/operstate": lambda now: "up\n",
            "sys/class/net/eth0/speed": lambda now: "25000\n",
            f"sys/fs/cgroup/{CGROUP}/cpu.max": lambda now: "400000 100000\n",
            f"sys/fs/cgroup/{CGROUP}/cpu.stat": _cpu_stat,
        }
        for number, resource in enumerate(("cpu", "io", "memory")):
            self._files[f"proc/pressure/{resource}"] = _pressure(number + 1)

    @property
    def clock(self) -> Clock:
        """The machine's virtual clock."""
        return self._clock

    def processes(self) -> dict[int, int]:
        """Return parent by pid: the command, a trainer for each GPU, and its workers of now."""
        epoch = self._clock.now_ns // EPOCH_NS
        found = {100: 1}
        for gpu in range(len(self.uuids)):
            trainer = 200 + gpu
            found[trainer] = 100
            for worker in range(WORKERS):
                # Pids come round again after five epochs.
                found[1000 + gpu * 100 + int(epoch % 5) * 10 + worker] = trainer
        return found

    def read(self, path: str) -> str:
        """Return a file's text of now."""
        self._clock.advance(self._random.randrange(1_000, 6_000))
        made = self._files.get(path)
        if made is not None:
            return made(self._clock.now_ns)
        parts = path.split("/")
        if parts[0] == "proc" and len(parts) == 3 and parts[1].isdigit():
            return self._process(int(parts[1]), parts[2], path)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    def read_bytes(self, path: str, *, keep: bool = True) -> bytes:
        """Return a file's bytes of now."""
        return self.read(path).encode()

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names in a directory."""
        if path == "proc":
            return tuple(sorted([*map(str, self.processes()), "stat", "vmstat"]))
        if path == "run/whyidle/probe":
            return ()  # the service's folder is there, and no trainer has the probe
        if path == "sys/class/net":
            return ("eth0", "lo")
        inside = {p[len(path) + 1 :].split("/")[0] for p in self._files if p.startswith(f"{path}/")}
        if not inside:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return tuple(sorted(inside))

    def link(self, path: str) -> str:
        """Return where a path leads to: there are no links here."""
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    def stat(self, path: str) -> Stat:
        """Return what lstat says; only the link's device is a directory that is asked for."""
        if path != "sys/class/net/eth0/device":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return Stat(mode=stat.S_IFDIR | 0o755, size_bytes=0, user_id=0, device=1, inode=2)

    def nvml(self, call: str, *args: Argument) -> Answer:
        """Answer in the vocabulary of whyidle.nvml."""
        self._clock.advance(self._random.randrange(20_000, 60_000))
        if call == "gpus":
            return tuple((uuid, index, None) for index, uuid in enumerate(self.uuids))
        if call in ("DriverVersion", "NVMLVersion"):
            return "580.95.05"
        if call == "xids":
            return ()
        gpu = self.uuids.index(str(args[0]))
        now = self._clock.now_ns
        if call == "gpm":
            return self._gpm(gpu, now)
        answers: dict[str, Answer] = {
            "gpm_worked": True,
            "gpm_pipes": None,
            "UtilizationRates": (round(self._busy[gpu] * 100), 30),
            "MemoryInfo": (80 << 30, 1 << 30, 30 << 30, 49 << 30),
            "Processes": ((200 + gpu, 40 << 30),) if "compute" in args else (),
            "ProcessUtilization": (),
            "CudaComputeCapability": (9, 0),
            "Name": "NVIDIA H100 80GB HBM3",
            "PciBusId": f"00000000:{0x19 + gpu:02X}:00.0",
            "Serial": "165012",
            "FieldValues": tuple(now // 1000 * (number + 1) for number in range(len(args) - 1)),
        }
        return answers.get(call, now // NS_PER_S % 1000)

    def ask(self, question: str, *args: Argument) -> Answer:
        """Answer what is no file."""
        clock = self._clock
        if question == "clock":
            clock.advance(3_000)
            return (clock.now_ns, clock.boot_ns(), clock.wall_ns(), 3_000, 120_000, 9_000, True)
        if question == "watched":
            return {"gpu": tuple(range(200, 200 + len(self.uuids))), "commands": (100,)}
        raise KeyError(question)

    def events(self, source: str) -> tuple[Event, ...]:
        """Report nothing."""
        return ()

    def forget(self, prefix: str) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Hold nothing."""

    def _gpm(self, gpu: int, now: int) -> Answer:
        before = self._gpm_ns.get(self.uuids[gpu])
        if before is not None and now - before < 100_000_000:
            return None
        self._gpm_ns[self.uuids[gpu]] = now
        if before is None:
            return None
        busy = min(100.0, self._busy[gpu] * 100 * self._random.uniform(0.5, 1.2))
        shares = [busy, busy * 0.9, busy * 0.4, busy * 0.5, busy * 0.3, busy * 0.1]
        rates = [busy * 10, busy * 20, busy * 100, busy * 100]
        return (before, now, tuple(shares + rates))

    def _process(self, pid: int, name: str, path: str) -> str:
        parent = self.processes().get(pid)
        if parent is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        now = self._clock.now_ns
        epoch = now // EPOCH_NS
        # The start tells the epochs of one pid apart; the job's own processes began long ago.
        start_ns = epoch * EPOCH_NS if pid >= 1000 else 5 * NS_PER_S
        ran = max(0, now - start_ns) * (pid % 7 + 1) // 10
        comm = "pt_data_worker" if pid >= 1000 else "python3"
        ticks = [parent, pid, pid, 0, -1, 0, ran // 10**6, 0, ran // 10**9, 0]
        ticks += [ran // 10**7, ran // 10**8, 0, 0, 20, 0, 8, 0, start_ns // 10**7, 10**9, 2000]
        texts = {
            "stat": f"{pid} ({comm}) S {' '.join(map(str, ticks))} {'0 ' * 13}17 {pid % 4} "
            f"{'0 ' * 12}0\n",
            "schedstat": f"{ran} {ran // 20} {ran // 10**6}\n",
            "io": f"rchar: {ran}\nwchar: {ran // 9}\nsyscr: 1\nsyscw: 1\nread_bytes: {ran // 2}\n"
            f"write_bytes: {ran // 10}\ncancelled_write_bytes: 0\n",
            "status": f"Name:\t{comm}\nUid:\t1000\t1000\t1000\t1000\nVmRSS:\t{2000 + pid} kB\n"
            "Threads:\t20\nCpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n"
            f"voluntary_ctxt_switches:\t{ran // 10**6}\n"
            f"nonvoluntary_ctxt_switches:\t{ran // 10**7}\n",
            "wchan": "futex_do_wait" if pid % 2 else "0",
            "cgroup": f"0::/{CGROUP}\n",
            "comm": f"{comm}\n",
            "cmdline": "python3\0train.py\0",
            "environ": f"RANK={pid % 100}\0LOCAL_RANK={pid % 100}\0WORLD_SIZE=16\0",
        }
        if name not in texts:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return texts[name]


def _proc_stat(now: int) -> str:
    t = now // 10**7
    line = f"{t * 2} 0 {t // 3} {t} {t // 50} 0 {t // 90} 0 0 0"
    return f"cpu  {line}\ncpu0 {line}\ncpu1 {line}\nctxt {t}\nprocs_running 3\nprocs_blocked 1\n"


def _vmstat(now: int) -> str:
    t = now // 10**8
    names = ["nr_dirty", "nr_writeback", "pgmajfault", "workingset_refault_file", "pswpin"]
    names += ["pswpout", "allocstall_normal", "pgscan_direct", "oom_kill"]
    return "".join(f"{name} {t * (number + 1)}\n" for number, name in enumerate(names))


def _diskstats(now: int) -> str:
    t = now // 10**6
    fields = f"{t} 0 {t * 16} {t % 2**32} {t // 2} 0 {t * 8} {t * 3 % 2**32} 2 {t} {t * 5 % 2**32}"
    fields += " 0 0 0 0 7 9"
    return "".join(f" 259 {n} nvme{n}n1 {fields}\n" for n in range(2))


def _net_dev(now: int) -> str:
    t = now // 1000
    numbers = f"{t} {t // 1000} 0 1 0 0 0 0 {t * 2} {t // 900} 0 0 0 0 0 0"
    head = "Inter-|   Receive                    |  Transmit\n face |bytes packets|bytes packets\n"
    return f"{head}    lo: {numbers}\n  eth0: {numbers}\n"


def _pressure(share: int) -> Callable[[int], str]:
    def text(now: int) -> str:
        total = now // 1000 * share // 10
        tail = "avg10=0.00 avg60=0.00 avg300=0.00 total="
        return f"some {tail}{total}\nfull {tail}{total // 2}\n"

    return text


def _cpu_stat(now: int) -> str:
    periods = now // 10**8
    return (
        f"usage_usec {now // 2000}\nuser_usec {now // 3000}\nsystem_usec {now // 6000}\n"
        f"nr_periods {periods}\nnr_throttled {periods // 4}\nthrottled_usec {periods * 9000}\n"
    )
