"""What a process's environment at its exec, and its cgroup, say of the job that it belongs to.

Only variables on the lists below are looked at: an environment holds keys and passwords. Sources:
torchrun (torch.distributed.run), Slurm's sbatch(1) and srun(1), the manuals of Open MPI, MPICH and
MVAPICH, and what Kubernetes operators for training set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

# A name longer than this is none.
_VALUE_BYTES = 256


class _Launcher(NamedTuple):
    """Names of one launcher's variables; '' where it has none."""

    rank: str
    local_rank: str
    world_size: str
    local_world_size: str


# In the order in which they are believed: torchrun's own before the launcher's, which counts the
# processes that it started, and those may be torchrun.
_LAUNCHERS = (
    _Launcher("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    _Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
    _Launcher("PMIX_RANK", "", "", ""),
    _Launcher("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
)
_NODE_RANK = ("GROUP_RANK", "SLURM_NODEID", "PET_NODE_RANK", "NODE_RANK", "JOB_COMPLETION_INDEX")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_JOB = (
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "PBS_JOBID",
    "LSB_JOBID",
    "FLUX_JOB_ID",
    "RAY_JOB_ID",
    "TORCHELASTIC_RUN_ID",
)
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_JOB_NAME = ("SLURM_JOB_NAME", "PBS_JOBNAME", "LSB_JOBNAME", "JOB_NAME")
_POD = ("POD_NAME",)
_POD_NAMESPACE = ("POD_NAMESPACE",)
# A pod's host name is its name, and every pod has this variable.
_IN_POD = "KUBERNETES_SERVICE_HOST"
_HOSTNAME = "HOSTNAME"
_ALLOWED = frozenset(
    name.encode()
    for names in (
        *_LAUNCHERS,
        *(_NODE_RANK, _RESTARTS, _JOB, _STEP, _JOB_NAME, _POD, _POD_NAMESPACE),
        (_IN_POD, _HOSTNAME),
    )
    for name in names
    if name
)
_SLURM_JOB = re.compile(r"/job_(\d+)(?:/|$)")
_POD_UID = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f_-]{27})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job of a process; None where its environment says nothing, or nothing that is sense."""

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    restarts: int | None = None
    job: str | None = None
    job_name: str | None = None
    job_step: str | None = None
    pod: str | None = None
    pod_namespace: str | None = None


def listed_variables(data: bytes) -> bytes:
    """Return the part of an environment that is looked at, which holds no keys and passwords."""
    entries = data.split(b"\0")
    return b"\0".join([entry for entry in entries if entry.partition(b"=")[0] in _ALLOWED])


def parse_environ(data: bytes) -> Job:
    """Return the job of an environment; values that are no numbers are None."""
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and name in _ALLOWED and value:
            found[name.decode("ascii")] = value[:_VALUE_BYTES].decode("utf-8", "replace")
    place = _place(found)
    job = _first(found, _JOB)
    pod = _first(found, _POD)
    if pod is None and _IN_POD in found:
        pod = found.get(_HOSTNAME)
    return Job(
        rank=place[0],
        local_rank=place[1],
        world_size=place[2],
        local_world_size=place[3],
        node_rank=_number(_first(found, _NODE_RANK)),
        restarts=_number(_first(found, _RESTARTS)),
        job=None if job == "none" else job,  # torchrun without --rdzv-id says "none"
        job_name=_first(found, _JOB_NAME),
        job_step=_first(found, _STEP),
        pod=pod,
        pod_namespace=_first(found, _POD_NAMESPACE),
    )


def _place(found: Mapping[str, str]) -> tuple[int | None, ...]:
    """Return rank, local rank, world size and local world size.

    They are of the first launcher that gave a rank. What it did not give is taken of another one
    that gave the same rank: others count other processes.
    """
    places = [tuple(_number(found.get(name)) for name in names) for names in _LAUNCHERS]
    chosen = next((place for place in places if place[0] is not None), None)
    if chosen is None:
        return next((place for place in places if any(n is not None for n in place)), places[0])
    alike = [place for place in places if place[0] == chosen[0]]
    return tuple(
        next((place[at] for place in alike if place[at] is not None), None)
        for at in range(len(chosen))
    )


def _first(found: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((found[name] for name in names if name in found), None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def job_of_cgroup(path: str) -> str | None:
    """Return the Slurm job id or the Kubernetes pod uid in the path of a cgroup."""
    if (slurm := _SLURM_JOB.search(path)) is not None:
        return slurm[1]
    if (pod := _POD_UID.search(path)) is not None:
        return pod[1].replace("_", "-")
    return None
