"""Jobs of processes: every launcher's variables, mixtures of them, and nothing else of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from job import Proc, put
from trees import gather, host_of
from whyidle.collect.process import PROCESS
from whyidle.collect.process_job import Job, job_of_cgroup, parse_environ
from whyidle.schema import ProcessInfo

SECRET = "hunter2"


def environ(**values: str) -> bytes:
    return b"".join(f"{name}={value}".encode() + b"\0" for name, value in values.items())


def test_torchrun() -> None:
    found = parse_environ(
        environ(
            RANK="9", LOCAL_RANK="1", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8", GROUP_RANK="1",
            TORCHELASTIC_RUN_ID="run-7", TORCHELASTIC_RESTART_COUNT="2", JOB_NAME="llama",
        )
    )  # fmt: skip
    assert found == Job(
        rank=9,
        local_rank=1,
        world_size=16,
        local_world_size=8,
        node_rank=1,
        restarts=2,
        job="run-7",
        job_name="llama",
    )


def test_torchruns_own_rank_is_believed_before_the_launchers() -> None:
    found = parse_environ(
        environ(
            SLURM_PROCID="1", SLURM_LOCALID="0", SLURM_NTASKS="2", SLURM_JOB_ID="77",
            RANK="9", LOCAL_RANK="1", WORLD_SIZE="16", TORCHELASTIC_RUN_ID="none",
        )
    )  # fmt: skip
    assert found == Job(rank=9, local_rank=1, world_size=16, job="77")


def test_what_another_launcher_counts_is_not_mixed_in() -> None:
    """One Slurm task a node starts torchrun: its counts are of nodes, not of ranks."""
    found = parse_environ(environ(SLURM_PROCID="1", SLURM_LOCALID="0", SLURM_NTASKS="2", RANK="9"))
    assert (found.rank, found.local_rank, found.world_size) == (9, None, None)


def test_a_script_that_passes_slurms_rank_on() -> None:
    found = parse_environ(
        environ(RANK="5", SLURM_PROCID="5", SLURM_LOCALID="1", SLURM_NTASKS="8", SLURM_NODEID="2")
    )
    assert (found.rank, found.local_rank, found.world_size, found.node_rank) == (5, 1, 8, 2)


def test_slurm() -> None:
    found = parse_environ(
        environ(
            SLURM_PROCID="3", SLURM_LOCALID="3", SLURM_NTASKS="16", SLURM_NTASKS_PER_NODE="8",
            SLURM_NODEID="0", SLURM_JOB_ID="4711", SLURM_STEP_ID="0", SLURM_JOB_NAME="pretrain",
            SLURM_RESTART_COUNT="1",
        )
    )  # fmt: skip
    assert found == Job(
        rank=3,
        local_rank=3,
        world_size=16,
        local_world_size=8,
        node_rank=0,
        restarts=1,
        job="4711",
        job_name="pretrain",
        job_step="0",
    )
    assert parse_environ(environ(SLURM_NTASKS_PER_NODE="8(x2)")).local_world_size is None
    assert parse_environ(environ(SLURM_JOBID="9", SLURM_STEPID="batch")) == Job(
        job="9", job_step="batch"
    )


@pytest.mark.parametrize(
    ("values", "place"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                # Open MPI sets this one too.
                "PMIX_RANK": "3",
            },
            (3, 1, 8, 2),
        ),
        (
            {"PMI_RANK": "4", "PMI_SIZE": "8", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"},
            (4, 0, 8, 4),
        ),
        (
            {
                "MV2_COMM_WORLD_RANK": "6",
                "MV2_COMM_WORLD_SIZE": "8",
                "MV2_COMM_WORLD_LOCAL_RANK": "2",
                "MV2_COMM_WORLD_LOCAL_SIZE": "4",
            },
            (6, 2, 8, 4),
        ),
        ({"PMIX_RANK": "2", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, (2, None, 4, None)),
        ({"WORLD_SIZE": "4"}, (None, None, 4, None)),
    ],
    ids=["openmpi", "mpich", "mvapich", "pmix", "size only"],
)
def test_other_launchers(
    values: dict[str, str], place: tuple[int | None, int | None, int | None, int | None]
) -> None:
    found = parse_environ(environ(**values))
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == place


def test_jobs_of_other_schedulers() -> None:
    assert parse_environ(environ(PBS_JOBID="12.pbs", PBS_JOBNAME="n")).job_name == "n"
    assert parse_environ(environ(LSB_JOBID="13", LSB_JOBNAME="m")) == Job(job="13", job_name="m")
    assert parse_environ(environ(FLUX_JOB_ID="f3")).job == "f3"
    assert parse_environ(environ(TORCHELASTIC_RUN_ID="none")) == Job()
    assert parse_environ(environ(TORCHELASTIC_RUN_ID="run-1")).job == "run-1"


def test_pods() -> None:
    named = environ(POD_NAME="llama-worker-0", POD_NAMESPACE="team-a", HOSTNAME="other")
    assert parse_environ(named) == Job(pod="llama-worker-0", pod_namespace="team-a")
    inside = environ(HOSTNAME="llama-worker-1", KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert parse_environ(inside) == Job(pod="llama-worker-1")
    assert parse_environ(environ(HOSTNAME="node7")) == Job(), "a machine's name is no pod"
    assert parse_environ(environ(JOB_COMPLETION_INDEX="3")).node_rank == 3
    assert parse_environ(environ(PET_NODE_RANK="2")).node_rank == 2


def test_an_environment_is_hostile_input() -> None:
    assert parse_environ(b"RANK=-1\0WORLD_SIZE=two\0LOCAL_RANK=\0=\0\0\xff\xfe=1\0X") == Job()
    assert parse_environ(b"RANK=\xd9\xa3\0") == Job(), "digits of another script are no rank"
    assert len(parse_environ(environ(JOB_NAME="x" * 100_000)).job_name or "") == 256


def test_nothing_else_is_taken() -> None:
    found = parse_environ(
        environ(
            AWS_SECRET_ACCESS_KEY=SECRET, WANDB_API_KEY=SECRET, RANK="1", MASTER_ADDR=SECRET,
            SLURM_JOB_USER=SECRET, RANK_SECRET=SECRET,
        )
    )  # fmt: skip
    assert found == Job(rank=1)


def test_jobs_of_cgroups() -> None:
    assert job_of_cgroup("/system.slice/slurmstepd.scope/job_4/step_0/user/task_0") == "4"
    assert job_of_cgroup("/slurm/uid_20821/job_11/step_batch") == "11"
    uid = "0f1e2d3c-aaaa-bbbb-cccc-0123456789ab"
    pod = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    systemd = f"/kubepods.slice/kubepods-burstable.slice/{pod}/cri-containerd-1.scope"
    assert job_of_cgroup(systemd) == uid
    assert job_of_cgroup(f"/kubepods/besteffort/pod{uid}/c") == uid
    assert job_of_cgroup("/user.slice/user-1000.slice") is None


def test_rows_tell_the_job(tmp_path: Path) -> None:
    trainer = Proc(
        pid=100,
        parent=1,
        comm="python3",
        environ={
            "RANK": "3",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "pretrain",
            "SLURM_STEP_ID": "0",
            "SLURM_NODEID": "1",
            "POD_NAME": "p-0",
            "POD_NAMESPACE": "ns",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TOKEN": SECRET,
        },
    )
    put(tmp_path, [trainer])
    host = host_of(tmp_path, watched=lambda: {"gpu": (100,), "commands": ()})
    rows, _ = gather(PROCESS.make(), host)
    (info,) = (row for row in rows if isinstance(row, ProcessInfo))
    assert (info.rank, info.local_rank, info.world_size, info.local_world_size) == (3, 1, 4, 2)
    assert (info.job, info.job_name, info.job_step) == ("7", "pretrain", "0")
    assert (info.node_rank, info.restarts) == (1, 0)
    assert (info.pod, info.pod_namespace) == ("p-0", "ns")
    assert SECRET not in repr(rows)
