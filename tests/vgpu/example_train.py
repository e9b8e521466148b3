"""An ordinary training script on the virtual GPU. What was added for that is marked `# vgpu`.

    python -m vgpu.example_train --data FOLDER --steps 50
    torchrun --nproc-per-node 2 -m vgpu.example_train --data FOLDER    (ranks meet on the GPU only)

With `--workers` it loads through torch's DataLoader; without, a prefetching thread stands in for
it. The "loss" is computed from the data alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from vgpu.client import connect  # vgpu

BATCH_BYTES = 1 << 20
CHECKPOINT_BYTES = 8 << 20


class Files:
    """A map-style dataset: the files of a folder, decoded for `decode_ms` of CPU each."""

    def __init__(self, folder: Path, decode_ms: float) -> None:
        self._paths, self._decode_ms = sorted(folder.iterdir()), decode_ms

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> bytes:
        data = self._paths[index % len(self._paths)].read_bytes()
        end = time.thread_time() + self._decode_ms / 1000
        digest = hashlib.sha256(data).digest()
        while time.thread_time() < end:
            hashlib.sha256(digest * 1024)
        return digest


def prefetch(files: Files, steps: int, depth: int = 2) -> Iterator[bytes]:
    """Batches in order, `depth` of them ahead of the trainer."""
    ready: queue.Queue[bytes] = queue.Queue(depth)

    def work() -> None:
        for step in range(steps):
            ready.put(files[step])

    threading.Thread(target=work, daemon=True).start()
    for _ in range(steps):
        yield ready.get()


def batches(files: Files, steps: int, workers: int) -> Iterator[bytes]:
    """From torch's DataLoader where it is installed and workers are asked for."""
    if workers == 0:
        yield from prefetch(files, steps)
        return
    loading = importlib.import_module("torch.utils.data")  # optional
    order = [step % len(files) for step in range(steps)]
    yield from loading.DataLoader(files, sampler=order, batch_size=None, num_workers=workers)


def main() -> None:
    """The training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--decode-ms", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    files, loss, ms = Files(options.data, options.decode_ms), b"", options.step_ms
    gpu = connect(memory_bytes=1 << 30)  # vgpu
    world, last = gpu.group("world", rank, size), gpu.event()  # vgpu
    for batch in batches(files, options.steps, options.workers):
        gpu.copy(BATCH_BYTES)  # vgpu
        for _ in range(8):  # vgpu
            gpu.launch(ms * 0.1, kind="gemm")  # vgpu
        if size > 1:  # vgpu
            gpu.all_reduce(ms * 0.1, world)  # vgpu
        gpu.launch(ms * 0.2, kind="optimizer")  # vgpu
        last.synchronize()  # vgpu: as reading the loss of the step before
        last = gpu.event()  # vgpu
        loss = hashlib.sha256(loss + batch).digest()
    gpu.synchronize()  # vgpu
    if options.checkpoint:
        options.checkpoint.write_bytes(bytes(CHECKPOINT_BYTES))
    sys.stdout.write(f"loss {loss.hex()}\n")


if __name__ == "__main__":
    main()
