"""Secrets on command lines: masked wherever an option's name tells, and nothing else is."""

from __future__ import annotations

import pytest

from whyidle.collect.process_job import listed_variables, parse_environ
from whyidle.collect.process_secrets import mask_command
from whyidle.collect.process_text import parse_command


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("train.py --api-key=abc --lr 0.1", "train.py --api-key=*** --lr 0.1"),
        ("train.py --hf_token hf_abc --x", "train.py --hf_token *** --x"),
        ("train.py --token --lr 0.1", "train.py --token --lr 0.1"),
        ("env WANDB_API_KEY=abc python x.py", "env WANDB_API_KEY=*** python x.py"),
        ("x PASSWORD=a=b,c", "x PASSWORD=***"),
        ("x -password secret", "x -password ***"),
        ("x s3://user:pw@host/b --url=https://u:p@h", "x s3://***@host/b --url=https://***@h"),
        ("x --opts=lr=1,secret=abc", "x --opts=lr=1,secret=***"),
        # What is no secret stays.
        ("x --tokenizer-path /t --max-tokens 512", "x --tokenizer-path /t --max-tokens 512"),
        ("x --keyframes=5 --author me", "x --keyframes=5 --author me"),
        ("python -c import os", "python -c import os"),
    ],
)
def test_a_command_line_is_masked(command: str, wanted: str) -> None:
    data = command.replace(" ", "\0").encode() + b"\0"
    masked = mask_command(data)
    assert masked.replace(b"\0", b" ").decode().strip() == wanted
    assert mask_command(masked) == masked
    assert parse_command(data) == wanted


def test_of_an_environment_only_what_is_looked_at_is_left() -> None:
    data = b"RANK=3\0WANDB_API_KEY=abc\0WORLD_SIZE=8\0HOME=/root\0AWS_SECRET=RANK=5\0"
    assert listed_variables(data) == b"RANK=3\0WORLD_SIZE=8"
    assert parse_environ(listed_variables(data)) == parse_environ(data)
