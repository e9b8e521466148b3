"""How a job is shared out, by the options of its command line."""

from __future__ import annotations

import pytest

from whyidle.collect.process_layout import parse_layout
from whyidle_rules.recording.layout import Layout, layout

MEGATRON = [
    *("python", "pretrain_gpt.py", "--num-layers", "32", "--hidden-size", "4096"),
    *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=4"),
    *("--num-layers-per-virtual-pipeline-stage", "4", "--micro-batch-size", "1"),
    *("--global-batch-size", "64", "--data-path", "/data/secret", "--wandb-key", "12345"),
]


def line(words: list[str]) -> bytes:
    return b"\0".join(word.encode() for word in words) + b"\0"


def test_only_options_that_share_out_a_job_are_kept() -> None:
    assert parse_layout(line(MEGATRON)) == (
        "--global-batch-size=64 --micro-batch-size=1 --num-layers=32"
        " --num-layers-per-virtual-pipeline-stage=4 --pipeline-model-parallel-size=4"
        " --tensor-model-parallel-size=2"
    )


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], None),
        (["--micro-batch-size"], None),
        (["--micro-batch-size", "x"], None),
        (["--micro-batch-size", "-1"], None),
        (["--micro-batch-size", "1" * 30], None),
        (["--micro_batch_size=8"], "--micro-batch-size=8"),
        (["--micro-batch-size", "8", "--micro-batch-size", "4"], "--micro-batch-size=4"),
    ],
)
def test_what_is_no_number_is_none(words: list[str], kept: str | None) -> None:
    assert parse_layout(line(["train.py", *words])) == kept


def test_megatron_numbers_stages_outermost_and_counts_micro_batches() -> None:
    """16 ranks: 4 stages of 2 x tensor, 2 x data; 64 samples are 32 micro-batches for each."""
    options = parse_layout(line(MEGATRON))
    assert layout(options, 0, 16) == Layout(stage=0, stages=4, batches=32, virtual=2)
    assert layout(options, 11, 16) == Layout(stage=2, stages=4, batches=32, virtual=2)


@pytest.mark.parametrize(
    ("options", "world", "told"),
    [
        ("--pipe-parallel-size=2 --gradient-accumulation-steps=8", 4, (1, 2, 8, 1)),
        ("--pipeline-model-parallel-size=1 --gradient-accumulation-steps=8", 4, None),
        ("--pipeline-model-parallel-size=2", 4, None),
        ("--pipeline-model-parallel-size=3 --gradient-accumulation-steps=8", 4, None),
        (
            "--pipeline-model-parallel-size=2 --global-batch-size=9 --micro-batch-size=2",
            4,
            None,
        ),
        (
            "--pipeline-model-parallel-size=2 --gradient-accumulation-steps=4"
            " --num-layers-per-virtual-pipeline-stage=5 --num-layers=12",
            4,
            None,
        ),
        ("--pipeline-model-parallel-size=2 --gradient-accumulation-steps=999999999", 4, None),
        ("--x --pipeline-model-parallel-size=a", 4, None),
    ],
)
def test_what_does_not_come_out_even_is_not_told(
    options: str, world: int, told: tuple[int, int, int, int] | None
) -> None:
    found = layout(options, world - 1, world)
    if told is None:
        assert found is None
    else:
        assert found is not None
        assert (found.stage, found.stages, found.batches, found.virtual) == told


@pytest.mark.parametrize(("rank", "world"), [(None, 4), (4, 4), (0, None), (0, 0), (-1, 4)])
def test_a_rank_that_is_none_has_no_place(rank: int | None, world: int | None) -> None:
    options = "--pipeline-model-parallel-size=2 --gradient-accumulation-steps=8"
    assert layout(options, rank, world) is None
