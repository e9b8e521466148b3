"""In-process probe for the trainer: standard library only, Python 3.9 and later.

It publishes how long the trainer waits for data, its steps and phases into a small shared file that
the agent reads. It never raises into the trainer, never waits, opens no socket, starts no thread.

    whyidle run -- python train.py          # nothing to change, or:
    import whyidle_probe
    whyidle_probe.start()                   # at the top of the script
    with whyidle_probe.phase("evaluation"): ...
"""

from __future__ import annotations

from whyidle_probe.api import page_path, phase, pipeline, start, step

__all__ = ["page_path", "phase", "pipeline", "start", "step"]
