"""A training job as people write them: torch's DataLoader, a model, an optimizer. Run by run.py.

    python -m stalls.train SETUP.json

Kernels go to the virtual GPU; the small model on the CPU stands for what the host does at a step,
one to two milliseconds. Everything else - workers, reading, decoding, collating, saving - is real.
"""

from __future__ import annotations

import gc
import hashlib
import http.client
import importlib
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import whyidle_probe
from stalls.marks import Marks, WorkerMarks
from stalls.scenario import Setup
from stalls.steps import Step
from vgpu.client import Event, VirtualGpu, connect
from vgpu.network import Proxy

torch: Any = importlib.import_module("torch")  # optional for the rest of the tests
BATCH_BYTES = 1 << 20
WIDTH = 64
AHEAD = {"step": 0, "lag": 1, "free": 4}


def burn(cpu_s: float) -> None:
    """Computes for so much CPU time of this thread, whatever else runs."""
    data = b"x" * 1024
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        hashlib.sha256(data * 16)


class Samples:
    """A map-style data set: the files of a folder, each decoded to a vector."""

    def __init__(self, setup: Setup, folder: Path, count: int, marks: WorkerMarks) -> None:
        self._setup, self._folder, self._count, self._marks = setup, folder, count, marks
        self._connection: http.client.HTTPConnection | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        began = time.monotonic()
        data = self._read(self._folder / f"{index % self._setup.files}.bin")
        read = time.monotonic()
        self._decode()
        sample = torch.frombuffer(bytearray(data[:WIDTH]), dtype=torch.uint8).float()
        info = torch.utils.data.get_worker_info()
        worker = info.id if info else 0
        self._marks.add(worker, read - began, time.monotonic() - read)
        return sample

    def _decode(self) -> None:
        """In the thread that asks for it, or in others, as native libraries do."""
        cpu_s, count = self._setup.decode_ms / 1000, self._setup.decode_threads
        if not count:
            burn(cpu_s)
            return
        threads = [threading.Thread(target=burn, args=(cpu_s / count,)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _read(self, path: Path) -> bytes:
        """Past the page cache where the data is on a device: as a data set larger than memory."""
        if self._setup.reader == "http":
            return self._get(path)
        file = os.open(path, os.O_RDONLY)
        try:
            if self._setup.data == "device":
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            if self._setup.reader == "mapped":
                with mmap.mmap(file, self._setup.file_bytes, prot=mmap.PROT_READ) as pages:
                    pages.madvise(mmap.MADV_RANDOM)
                    return bytes(pages)
            return os.read(file, self._setup.file_bytes)
        finally:
            os.close(file)

    def _get(self, path: Path) -> bytes:
        """From an object server, over a connection that each worker keeps open."""
        if self._connection is None:
            port = int((path.parent / "port").read_text(encoding="ascii"))
            self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request("GET", f"/{path.name}")
        return self._connection.getresponse().read()


def stream_of(samples: Samples) -> Any:
    """The same as an iterable data set, shared out among the workers."""

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            info = torch.utils.data.get_worker_info()
            first, step = (info.id, info.num_workers) if info else (0, 1)
            for index in range(first, len(samples), step):
                yield samples[index]

    return Stream()


class Threads:
    """Batches loaded by threads of the trainer itself, as many a home-grown loader does."""

    def __init__(self, setup: Setup, samples: Samples, collate: Callable[[list[Any]], Any]) -> None:
        self._setup, self._samples, self._collate = setup, samples, collate

    def __iter__(self) -> Iterator[Any]:
        setup = self._setup
        ready: queue.Queue[Any] = queue.Queue(setup.workers * setup.prefetch)

        def work(first: int) -> None:
            for batch in range(first, setup.epoch_batches, setup.workers):
                begin = batch * setup.samples
                indices = range(begin, begin + setup.samples)
                ready.put(self._collate([self._samples[index] for index in indices]))

        for first in range(setup.workers):
            threading.Thread(target=work, args=(first,), daemon=True).start()
        for _ in range(setup.epoch_batches):
            yield ready.get()


class Trainer:
    """The job: its model, its GPU, its stopwatches."""

    def __init__(self, setup: Setup, told: dict[str, Any]) -> None:
        self.setup, self.out = setup, Path(told["out"])
        self.marks, self.workers = Marks(), WorkerMarks()
        self.gpu: VirtualGpu = connect(told["gpu"], memory_bytes=1 << 30)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)
        )
        if setup.style == "gloo":  # gradients are reduced on the host: no rank goes on before
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.distributed.init_process_group("gloo")
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        world = self.gpu.group(told["group"], self.rank, self.size)
        if told["ring"]:
            Proxy(world, [(host, port) for host, port in told["ring"]])
        self.launch = Step(setup, self.gpu, world).launch
        self.held: list[list[int]] = []
        self.folder = Path()
        self._events: list[Event] = []
        self._count = 0

    def loader(self, folder: Path) -> Any:
        """The DataLoader."""
        setup = self.setup
        count = setup.epoch_batches * setup.samples
        samples = Samples(setup, folder, count, self.workers)
        if setup.loader == "threads":
            return Threads(setup, samples, self.collate)
        more: dict[str, Any] = {}
        if setup.workers:
            more = {"prefetch_factor": setup.prefetch, "persistent_workers": setup.persistent}
        return torch.utils.data.DataLoader(
            stream_of(samples) if setup.iterable else samples,
            batch_size=setup.samples,
            num_workers=setup.workers,
            collate_fn=self.collate,
            **more,
        )

    def collate(self, samples: list[Any]) -> Any:
        """Puts a batch together."""
        burn(self.setup.collate_ms / 1000)
        return torch.stack(samples)

    def begin(self, folder: Path) -> None:
        """What a job does before its first step."""
        if self.setup.style == "pipeline":  # a schedule of its own: torch's tells by itself
            setup = self.setup
            whyidle_probe.pipeline(self.rank, self.size, setup.batches, setup.schedule)
        if self.setup.list_files:
            with self.marks.phase("list"):
                for index in range(self.setup.list_files):
                    (folder / f"{index % self.setup.files}.bin").stat()
        if self.setup.load_bytes:
            with self.marks.phase("load"):
                torch.load(folder / "begin.pt")
        self.held = [[index] for index in range(self.setup.gc_objects)]

    def train(self, folder: Path, seconds: float, started: Path, stop: Path) -> None:
        """Steps for so long, counted from the first; the first rank says which one is the last."""
        self.folder = folder
        loader, end_ns = self.loader(folder), 0
        while True:
            batches = iter(loader)
            while True:
                with self.marks.phase("data"):
                    batch = next(batches, None)
                if batch is None:
                    break
                self.step(batch)
                if not end_ns:
                    end_ns = time.monotonic_ns() + int(seconds * 1e9)
                    if self.rank == 0:
                        started.touch()
                    hang_ns = end_ns + int((self.setup.hang_after_s - seconds) * 1e9)
                self.every_so_often()
                if self.setup.hang_after_s and time.monotonic_ns() >= hang_ns:
                    return
                if self.rank == 0 and time.monotonic_ns() >= end_ns and not stop.exists():
                    # No rank is further ahead than the steps that are not waited for yet.
                    last = self._count + (2 * max(AHEAD.values()) if self.size > 1 else 0)
                    stop.with_suffix(".new").write_text(str(last), encoding="ascii")
                    stop.with_suffix(".new").rename(stop)
                if stop.exists() and self._count >= int(stop.read_text(encoding="ascii")):
                    self.gpu.synchronize()
                    return

    def step(self, batch: Any) -> None:
        """Copies, launches, and waits for an earlier step."""
        setup, gpu = self.setup, self.gpu
        self.marks.launches.append(time.monotonic_ns())
        gpu.copy(BATCH_BYTES)
        self.launch(self._count)
        with self.marks.phase("compute"):
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
        gpu.launch(setup.step_ms * 0.1, kind="optimizer")
        self._events.append(gpu.event())
        if len(self._events) > AHEAD[setup.sync]:
            with self.marks.phase("sync"):
                self._events.pop(0).synchronize()
        self._count += 1
        self.marks.steps.append(time.monotonic_ns())

    def every_so_often(self) -> None:
        """What a job does besides training."""
        setup, count = self.setup, self._count
        if setup.checkpoint_every and count % setup.checkpoint_every == 0:
            self.gpu.synchronize()
            state = {"step": count, "weights": torch.zeros(setup.checkpoint_bytes // 4)}
            with self.marks.phase("checkpoint"):
                torch.save(state, self.out / f"{count}.pt")
        if setup.evaluate_every and count % setup.evaluate_every == 0:
            with self.marks.phase("evaluation"), whyidle_probe.phase("evaluation"):
                for _ in range(10):
                    self.gpu.launch(setup.evaluate_ms / 10, kind=setup.kernel)
                self.gpu.synchronize()
        if setup.gc_every and count % setup.gc_every == 0:
            with self.marks.phase("gc"):
                gc.collect()
        if setup.sleep_every and count % setup.sleep_every == 0:
            with self.marks.phase("sleep"):
                time.sleep(setup.sleep_ms / 1000)
        if setup.request_every and count % setup.request_every == 0:
            with self.marks.phase("request"):
                self._request(setup.request_ms / 1000)
        if setup.log_every and count % setup.log_every == 0:
            with self.marks.phase("log"), (self.out / "log.txt").open("ab") as log:
                log.write(b"step\n" * (setup.log_bytes // 5))
                log.flush()
                os.fsync(log.fileno())

    def _request(self, delay_s: float) -> None:
        """Asks a server, as trackers of experiments do."""
        port = int((self.folder / "port").read_text(encoding="ascii"))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", f"/0.bin?{delay_s}")
        connection.getresponse().read()
        connection.close()


def main() -> None:
    """The job; its one argument is what run.py wrote for it."""
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    setup = Setup(**told["setup"])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if setup.gc_every:
        gc.disable()  # as trainers do that choose the moment themselves
    trainer = Trainer(setup, told)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        trainer.begin(Path(told["data"]))
        trainer.train(
            Path(told["data"]), told["seconds"], Path(told["started"]), Path(told["stop"])
        )
    finally:
        trainer.marks.write(Path(told["marks"]), trainer.workers)
    if setup.hang_after_s:
        hang(setup)


def hang(setup: Setup) -> None:
    """Comes to no collective any more: gone without a word, or stuck behind a lock for ever."""
    if setup.hang == "ended":
        os._exit(1)
    threading.Event().wait()


if __name__ == "__main__":
    main()
