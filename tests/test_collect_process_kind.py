"""What a process does for a job, told from names, parentage and command lines."""

from __future__ import annotations

from whyidle.collect.process_kind import Facts, families, kind_of

TRAIN = "python train.py"


def facts(comm: str = "python3", command: str | None = TRAIN, **more: object) -> Facts:
    return Facts(comm=comm, command=command, has_gpu=bool(more.get("gpu")), threads=frozenset())


def kind(
    child: Facts,
    *,
    parent: Facts | None = None,
    parent_kind: str | None = "trainer",
    named_sibling: bool = False,
) -> str | None:
    return kind_of(
        child,
        parent=parent or facts(gpu=True),
        parent_kind=parent_kind,
        named_sibling=named_sibling,
    )


def test_a_gpu_context_makes_a_trainer() -> None:
    assert kind(facts(gpu=True), parent_kind=None) == "trainer"


def test_pytorch_names_its_workers_since_2_5() -> None:
    assert kind(facts("pt_data_worker")) == "data_worker"


def test_before_that_a_fork_of_the_trainer_is_one() -> None:
    assert kind(facts("pt_main_thread")) == "data_worker"
    assert kind(facts("pt_main_thread"), named_sibling=True) == "helper"
    assert kind(facts("sh", "sh -c nvidia-smi")) == "helper"


def test_spawned_workers_have_a_command_line_of_their_own() -> None:
    spawned = "python -c from multiprocessing.spawn import spawn_main; ... --multiprocessing-fork"
    assert kind(facts(command=spawned)) == "data_worker"


def test_a_fork_server_sits_between() -> None:
    server = facts(command="python -c from multiprocessing.forkserver import main; main(...)")
    assert kind(server) == "helper"
    assert kind(server, parent=server, parent_kind="helper") == "data_worker"


def test_trackers_and_compile_workers_load_no_data() -> None:
    tracker = "python -c from multiprocessing.resource_tracker import main;main(5)"
    inductor = "python torch/_inductor/compile_worker/__main__.py --workers=8"
    assert kind(facts(command=tracker)) == "helper"
    assert kind(facts(command=inductor)) == "helper"


def test_without_nvml_a_ranks_threads_make_a_trainer() -> None:
    found = families(["python3", "gloo_tcp_loop", "pt_autograd_0"])
    assert found == {"gloo", "autograd"}
    child = Facts(comm="python3", command=TRAIN, has_gpu=False, threads=found)
    assert kind(child, parent=facts("pt_elastic", "torchrun"), parent_kind="helper") == "trainer"


def test_what_cannot_be_looked_at_is_unknown() -> None:
    assert kind(facts("", None), parent_kind=None) is None


def test_families_of_thread_names() -> None:
    names = ["NCCL Progress 3", "NCCL UDS Servic", "pt_nccl_heartbt", "pt_data_pin", "cuda-Evt"]
    assert families(names) == {"nccl", "data_pin"}
    assert families([]) == frozenset()
