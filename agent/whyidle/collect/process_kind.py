"""What a process does for a training job, told from outside.

The names are those that PyTorch gives since 2.5 (pt_data_worker, pt_data_pin, pt_elastic) and that
NCCL and gloo give their threads; before 2.5 a worker is known by its parentage and command line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

TRAINER = "trainer"
DATA_WORKER = "data_worker"
HELPER = "helper"

WORKER_COMM = "pt_data_worker"
_SPAWNED = ("multiprocessing.spawn", "--multiprocessing-fork")
_FORKSERVER = "multiprocessing.forkserver"
# They descend from a trainer like its workers do and load no data.
_NO_WORKERS = ("resource_tracker", "resource_sharer", "compile_worker", "semaphore_tracker")
# Beginnings of thread names (15 characters at most) and the family that they tell of.
_THREADS = (
    ("NCCL ", "nccl"),
    ("gloo_", "gloo"),
    ("pt_autograd_", "autograd"),
    ("pt_data_pin", "data_pin"),
    ("pt_gloo_", "gloo"),
    ("pt_nccl_", "nccl"),
)
# Threads that only a rank has.
_OF_A_RANK = frozenset({"nccl", "gloo", "autograd"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a process; `threads` are families of thread names."""

    comm: str
    command: str | None
    has_gpu: bool
    threads: frozenset[str] = frozenset()


def families(comms: Iterable[str]) -> frozenset[str]:
    """Return the families that thread names tell of."""
    found = set()
    for comm in comms:
        for beginning, family in _THREADS:
            if comm.startswith(beginning):
                found.add(family)
    return frozenset(found)


def kind_of(
    facts: Facts, *, parent: Facts | None, parent_kind: str | None, named_sibling: bool
) -> str | None:
    """Return trainer, data_worker or helper; None where too little is known.

    `named_sibling`: another child of the same parent is called pt_data_worker, so this PyTorch
    names its workers and a child without the name is none.
    """
    command = facts.command or ""
    if facts.comm == WORKER_COMM:
        return DATA_WORKER
    if facts.has_gpu:
        return TRAINER
    if any(word in command for word in _NO_WORKERS):
        return HELPER
    if _FORKSERVER in command:
        # The server is a child of the trainer and its own children are the workers.
        forked = parent is not None and _FORKSERVER in (parent.command or "")
        return DATA_WORKER if forked and not named_sibling else HELPER
    if parent_kind == TRAINER and parent is not None and not named_sibling:
        if any(word in command for word in _SPAWNED):
            return DATA_WORKER
        if facts.command is not None and facts.command == parent.command:
            return DATA_WORKER
    if facts.threads & _OF_A_RANK:
        return TRAINER
    return None if facts.command is None and facts.comm == "" else HELPER
