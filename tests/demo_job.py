"""The job of `make demo`: it trains, and every now and then it stops for a checkpoint.

It needs no torch: steps and phases are told to the probe by hand, as any trainer may.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import whyidle_probe
from vgpu.client import connect

STEP_KERNELS_MS = (6.0, 9.0, 12.0, 9.0, 6.0)
CHECKPOINT_EVERY_S = 3.0
CHECKPOINT_BYTES = 48 << 20


def save(folder: Path) -> None:
    """Write a checkpoint and wait until it is on the disk."""
    with whyidle_probe.phase("checkpoint_save"), (folder / "model.ckpt").open("wb") as file:
        for _ in range(CHECKPOINT_BYTES >> 20):
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.015)  # a slow disk, whatever this machine has


def main() -> None:
    """Train for so many seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    whyidle_probe.start()
    end = time.monotonic() + options.seconds
    next_save = time.monotonic() + CHECKPOINT_EVERY_S
    with connect(memory_bytes=1 << 30) as gpu:
        while time.monotonic() < end:
            for length_ms in STEP_KERNELS_MS:
                gpu.launch(length_ms)
            gpu.synchronize()
            whyidle_probe.step()
            if time.monotonic() >= next_save:
                save(options.folder)
                next_save = time.monotonic() + CHECKPOINT_EVERY_S


if __name__ == "__main__":
    main()
