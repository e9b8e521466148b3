"""The one sentence: it must name the right thing, and never claim more than the evidence."""

from __future__ import annotations

import dataclasses

import pytest

import report_cases as cases
from report_build import diagnosis, finding, gpu, row
from whyidle_rules.diagnosis import Diagnosis


def waiting_run(
    late: dict[int, float], *, ranks: int = 4, cause: tuple[str, str] = ("host_pause", "gc")
) -> Diagnosis:
    """Each rank in `late` holds up every other rank for so many seconds of a run of 10 s."""
    gpus = []
    ledger = []
    for rank in range(ranks):
        waits = {str(one): s for one, s in late.items() if one != rank}
        own_s = late.get(rank, 0.0)
        gpus.append(
            gpu(rank, 10.0, empty_s=own_s, spinning_s=sum(waits.values()), waited_for=waits)
        )
        if own_s:
            ledger.append(row(*cause, own_s, rank=rank))
        ledger += [
            row("collective", "late_rank", 0.0, s, where="rank", rank=int(one), root=cause)
            for one, s in waits.items()
        ]
    return diagnosis(gpus, ledger)


def test_sleeper_names_the_late_rank_and_not_the_collective_that_was_felt() -> None:
    assert cases.sleeper().headline == (
        "GPUs were idle 96 % of the time: ranks 0, 1 and 3 spent 3.04 s each waiting in "
        "collectives for rank 2, which was late because the launching thread did something that "
        "nothing recorded (host pause); fixing it returns at most 12.1 GPU-seconds, 92 % of all "
        "GPU time."
    )


def test_inferred_waits_read_probably_and_the_node_is_named_when_there_are_several() -> None:
    assert cases.many_ranks().headline == (
        "GPUs were idle 33 % of the time: all 63 other ranks spent 18.0 min each waiting in "
        "collectives for rank 12 (gpu-01), which was late, probably because data came slowly over "
        "NFS (storage); fixing it returns at most 19.2 GPU-hours, 30 % of all GPU time."
    )


def test_a_late_rank_whose_own_seconds_are_inferred_is_told_as_probable() -> None:
    sure = waiting_run({1: 3.0}, ranks=64)
    assert "probably" not in sure.headline
    ledger = [
        dataclasses.replace(one, grade="inferred") if one.root.where == "self" else one
        for one in sure.ledger
    ]
    assert "which was late, probably because Python" in diagnosis(sure.gpus, ledger).headline


def test_an_inferred_finding_makes_it_probable_too() -> None:
    sure = waiting_run({1: 3.0})
    gc = finding("gc", "host_pause", "gc", 3.0, title="t", says="s", advice="a", grade="inferred")
    said = diagnosis(sure.gpus, sure.ledger, findings=[gc]).headline
    assert "probably because Python collected garbage" in said


def test_the_same_cause_on_every_rank_is_one_cause() -> None:
    # Alone, each rank's loading is smaller than the one wait on rank 0.
    gpus = [gpu(rank, 10.0, empty_s=3.0 if rank else 4.0) for rank in range(4)]
    ledger = [row("cpu_preprocessing", "main_thread", 2.0, rank=rank) for rank in range(4)]
    ledger += [row("host_pause", "gc", 2.0 if rank == 0 else 1.0, rank=rank) for rank in range(4)]
    assert diagnosis(gpus, ledger).headline == (
        "GPUs were idle 32 % of the time, most of it because the trainer loaded its data itself, "
        "between its own steps (CPU preprocessing) on all 4 ranks; fixing it returns at most "
        "8.00 GPU-seconds, 20 % of all GPU time."
    )


def test_two_late_ranks_are_both_named() -> None:
    said = waiting_run({1: 2.0, 2: 1.5}).headline
    assert ": ranks 0-3 spent up to 3.50 s each waiting in collectives for ranks 1 and 2, " in said
    assert "which were late because Python collected garbage (host pause)" in said


def test_ranks_that_take_turns_are_no_culprits() -> None:
    said = waiting_run(dict.fromkeys(range(8), 0.5), ranks=8).headline
    assert (
        ": ranks 0-7 spent 3.50 s each waiting in collectives for one or another of all 8 ranks, "
        "which was late because" in said
    )


def test_all_ranks_of_a_small_run_take_turns_too() -> None:
    said = waiting_run(dict.fromkeys(range(3), 1.0), ranks=3).headline
    assert "waiting in collectives for one or another of all 3 ranks, which was late" in said


def test_a_cause_that_explains_part_of_the_waiting_says_so() -> None:
    run = waiting_run({1: 4.0})
    ledger = []
    for one in run.ledger:
        half = dataclasses.replace(
            one, idle_s=one.idle_s / 4, empty_s=one.empty_s / 4, spinning_s=one.spinning_s / 4
        )
        root = dataclasses.replace(one.root, cause="storage", subcause="nfs_read")
        most = dataclasses.replace(
            one,
            idle_s=one.idle_s * 0.75,
            empty_s=one.empty_s * 0.75,
            spinning_s=one.spinning_s * 0.75,
            root=root,
        )
        ledger += [half, most]
    said = diagnosis(run.gpus, ledger).headline
    assert "waiting in collectives for rank 1, which was late, mostly because data came" in said
    assert "fixing it returns at most 12.0 GPU-seconds, 30 % of all GPU time" in said


def test_jitter_is_not_told_as_waiting() -> None:
    run = waiting_run({1: 3.0}, ranks=5)
    gpus = [
        dataclasses.replace(one, waited_for={"1": 0.02}) if one.rank == 4 else one
        for one in run.gpus
    ]
    said = diagnosis(gpus, run.ledger).headline
    assert ": ranks 0, 2 and 3 spent 3.00 s each waiting in collectives for rank 1" in said


def test_slow_compute_speaks_of_the_late_rank() -> None:
    said = waiting_run({1: 3.0}, cause=("slow_compute", "more_work")).headline
    assert "for rank 1, which was late because it computed longer than its peers" in said


def test_waiting_for_a_pipeline_stage_is_not_called_a_collective() -> None:
    run = waiting_run({1: 3.0})
    ledger = [
        dataclasses.replace(one, cause="pipeline_bubble", subcause="late_upstream")
        if one.cause == "collective"
        else one
        for one in run.ledger
    ]
    assert "waiting in the pipeline for rank 1" in diagnosis(run.gpus, ledger).headline


def test_a_late_rank_without_a_wait_matrix_is_told_by_the_sum() -> None:
    run = waiting_run({1: 3.0})
    gpus = [dataclasses.replace(one, waited_for={}) for one in run.gpus]
    said = diagnosis(gpus, run.ledger).headline
    assert ": other GPUs spent 9.00 GPU-seconds waiting in collectives for rank 1, which" in said


def test_waiting_for_a_rank_outside_says_which_recording_would_tell() -> None:
    said = diagnosis(
        [gpu(0, 10.0, spinning_s=4.0)],
        [row("collective", "late_rank", 0.0, 4.0, where="outside", node=None)],
    ).headline
    assert said == (
        "The GPU was idle 40 % of the time, almost all of it waiting for a rank that was not "
        "recorded; that is 4.00 GPU-seconds, 40 % of all GPU time, and recordings of all ranks "
        "would tell more."
    )


def test_exposed_communication_of_a_lone_rank_promises_nothing() -> None:
    said = diagnosis(
        [gpu(0, 10.0, spinning_s=4.0)], [row("collective", "exposed", 0.0, 4.0, rank=0)]
    ).headline
    assert said == (
        "The GPU was idle 40 % of the time, almost all of it in collectives with nothing beside "
        "them; that is 4.00 GPU-seconds, 40 % of all GPU time, and recordings of all ranks would "
        "tell waiting from transfer."
    )


def test_what_a_fix_returns_comes_from_the_rule_where_it_knows_better() -> None:
    assert cases.own_loading().headline == (
        "GPUs were idle 39 % of the time, most of it because the trainer loaded its data itself, "
        "between its own steps (CPU preprocessing) on both ranks; that cost 0.574 GPU-seconds, "
        "29 % of all GPU time, and fixing it returns at most 0.550 GPU-seconds."
    )


def test_a_promise_above_the_cost_is_not_repeated() -> None:
    run = waiting_run({1: 3.0})
    gc = finding("gc", "host_pause", "gc", 3.0, title="t", says="s", advice="a", returned_s=900.0)
    said = diagnosis(run.gpus, run.ledger, findings=[gc]).headline
    assert "fixing it returns at most 12.0 GPU-seconds, 30 %" in said


@pytest.mark.parametrize(
    ("idle_s", "starts"),
    [
        (0.0, "GPUs were busy: working 100.0 % of the time and never idle."),
        (0.001, "GPUs were busy: working >99.9 % of the time, idle <0.1 % (0.002 GPU-seconds), "),
        (0.199, "GPUs were busy: working 98.0 % of the time, idle 2.0 % (0.398 GPU-seconds), "),
        (0.2, "GPUs were idle 2.0 % of the time, almost all of it because"),
    ],
)
def test_healthy_runs_are_called_busy(idle_s: float, starts: str) -> None:
    gpus = [gpu(rank, 10.0, empty_s=idle_s) for rank in range(2)]
    ledger = [row("host_pause", "gc", idle_s, rank=rank) for rank in range(2) if idle_s]
    assert diagnosis(gpus, ledger).headline.startswith(starts)


def test_nothing_recorded_says_what_to_record() -> None:
    assert "ProfilerActivity.CUDA" in cases.no_gpu_events().headline
    assert "`whyidle doctor`" in diagnosis([], [], kind="recording").headline
    zero = diagnosis([gpu(0, 0.0)], [])
    assert zero.headline.startswith("No GPU activity was found in the trace")


def test_all_unattributed_names_no_cause() -> None:
    assert cases.all_unattributed().headline == (
        "GPUs were idle 62 % of the time and no cause is known: what would tell the cause was not "
        "recorded; traces of every rank with CPU activity on (ProfilerActivity.CPU) would tell "
        "more."
    )


def test_mostly_unattributed_names_the_largest_known_part_beside_it() -> None:
    said = diagnosis(
        [gpu(0, 10.0, empty_s=6.0)],
        [
            row("unattributed", "unexplained", 4.0, grade=None, rank=0),
            row("storage", "nfs_read", 2.0, grade="inferred", rank=0),
        ],
        kind="recording",
    ).headline
    assert said == (
        "The GPU was idle 60 % of the time and for most of it (40 %) no cause is known: nothing "
        "that was recorded explains it; a profiler trace of a few steps would tell more; the "
        "largest known part (20 %) is probably storage."
    )


def test_an_unknown_part_is_mentioned_beside_the_largest_known_one() -> None:
    said = diagnosis(
        [gpu(0, 10.0, empty_s=6.0)],
        [
            row("unattributed", "unexplained", 2.5, grade=None, rank=0),
            row("storage", "nfs_read", 2.0, rank=0),
            row("host_pause", "gc", 1.5, rank=0),
        ],
    ).headline
    assert ", the largest known part because data came slowly over NFS (storage);" in said
    assert said.endswith("; for another 25 % of all GPU time no cause is known.")


def test_a_late_rank_is_named_even_if_why_it_was_late_is_unknown() -> None:
    said = waiting_run({1: 3.0}, cause=("unattributed", "no_evidence")).headline
    assert "waiting in collectives for rank 1, and why is not known (what would tell" in said
    assert "that is 12.0 GPU-seconds, 30 % of all GPU time; traces of every rank" in said


def test_waiting_for_data_is_a_reason_though_unattributed() -> None:
    said = diagnosis(
        [gpu(0, 10.0, empty_s=6.0)], [row("unattributed", "data_wait", 6.0, grade=None, rank=0)]
    ).headline
    assert said == (
        "The GPU was idle 60 % of the time, almost all of it (60 % of all GPU time) because the "
        "trainer waited for its DataLoader; whether that read or computed was not recorded; "
        "`whyidle record` on its nodes would tell."
    )


def test_most_on_one_rank_is_not_all_on_one_rank() -> None:
    gpus = [gpu(0, 10.0, empty_s=0.5), gpu(1, 10.0, empty_s=4.5)]
    ledger = [row("host_pause", "gc", s, rank=rank) for rank, s in ((0, 0.5), (1, 4.5))]
    assert "(host pause), mostly on rank 1;" in diagnosis(gpus, ledger).headline


def test_ranks_of_one_node_are_named_with_it() -> None:
    gpus = [gpu(r, 10.0, empty_s=3.0 if r > 3 else 0.0, node=f"n{r // 4}") for r in range(8)]
    ledger = [row("storage", "nfs_read", 3.0, rank=r, node="n1") for r in range(4, 8)]
    assert "(storage) on ranks 4-7 (n1);" in diagnosis(gpus, ledger).headline


def test_idle_without_a_single_root_cause_still_reads() -> None:
    said = diagnosis([gpu(0, 10.0, empty_s=6.0)], []).headline
    assert said == "The GPU was idle 60 % of the time and nothing says why."


def test_hostile_names_cannot_steer_a_terminal() -> None:
    said = cases.hostile().headline
    assert said.isprintable()
    assert "\u202e" not in said


def test_the_mount_that_data_comes_from_is_named() -> None:
    run = waiting_run({1: 3.0}, cause=("storage", "nfs_read"))
    mount: dict[str, object] = {"read_mount": "/mnt/data\x1b[2J"}
    told = finding(
        "nfs_read", "storage", "nfs_read", 3.0, title="", says="", advice="", evidence=mount
    )
    found = diagnosis(run.gpus, run.ledger, findings=[told]).headline
    assert "because data came slowly over NFS, /mnt/data" in found
    assert "\x1b" not in found
