"""The part of the command line that belongs to the service: agent and release."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from whyidle.clock import SystemClock

if TYPE_CHECKING:
    from whyidle.config_load import Loaded

BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Above:
    """What the layer above adds to the agent, which must not import it.

    `keeper` is the module of a keeper that evaluates rules; `check` raises UserError for folders of
    rules that are not good.
    """

    keeper: str
    check: Callable[[Sequence[Path]], object]


def add_agent_options(parser: argparse.ArgumentParser, above: Above | None) -> None:
    """Add the options of `whyidle agent`; what is not given is left to the configuration."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings (default: /etc/whyidle/agent.yaml, where it exists)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="say whether the settings are good, and which are in effect; record nothing",
    )
    parser.add_argument(
        "--part",
        choices=("sampler", "keeper", BOTH),
        default=BOTH,
        help="run only this part; the other one is a service of its own (default: both)",
    )
    parser.add_argument(
        "--probe-dir",
        type=Path,
        metavar="DIR",
        action="append",
        help="also read counters of trainers in DIR (always: /run/whyidle/probe, and what "
        "`whyidle run` made in /dev/shm)",
    )
    for option, what in (
        ("--keep-days", "delete older segments (default: 7)"),
        ("--keep-gb", "delete beyond this size (default: 10)"),
        ("--free-gb", "leave this much free (default: 1)"),
    ):
        parser.add_argument(option, type=_positive, metavar="NUMBER", help=what)
    parser.set_defaults(run=partial(run_agent, above=above))


def add_release_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `whyidle release`."""
    parser.add_argument("--resume", action="store_true", help="take the GPUs back")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings of the agent that is asked"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="recording of the agent that is asked"
    )
    parser.add_argument("--node", help="name of this node in it")
    parser.set_defaults(run=run_release)


def _positive(text: str) -> float:
    from whyidle.config_kinds import positive

    try:
        return positive(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _load(args: argparse.Namespace) -> Loaded:
    """Return the configuration as files, environment and command line have it; UserError."""
    from whyidle.config_load import load

    given: dict[str, object] = {
        "recording": args.output,
        "node": args.node,
        "keep_days": getattr(args, "keep_days", None),
        "keep_gb": getattr(args, "keep_gb", None),
        "free_gb": getattr(args, "free_gb", None),
        "journal": getattr(args, "journal", False) or None,
    }
    if getattr(args, "probe_dir", None):
        given["probe_folders"] = tuple(folder.absolute() for folder in args.probe_dir)
    return load(
        args.config, given={key: value for key, value in given.items() if value is not None}
    )


def run_agent(args: argparse.Namespace, above: Above | None) -> int:
    """Record the node until stopped, or check the configuration."""
    if args.check:
        return _check(args, above)
    from whyidle.service import serve
    from whyidle.supervisor import KEEPER, PARTS

    parts = PARTS if args.part == BOTH else (args.part,)
    keeper = KEEPER if above is None else above.keeper
    return serve(partial(_load, args), SystemClock(), parts, keeper)


def _check(args: argparse.Namespace, above: Above | None) -> int:
    from whyidle.config_doc import in_effect

    loaded = _load(args)
    if above is not None:
        above.check(loaded.config.rules_dirs)
    if loaded.config.metrics_web_config is not None:
        from whyidle.web_config import read_web_config

        read_web_config(loaded.config.metrics_web_config)
    for warning in loaded.warnings:
        sys.stderr.write(f"{warning}\n")
    what = f"{loaded.file} is good" if loaded.file is not None else "there is no file of settings"
    sys.stdout.write(f"{what}; in effect:\n\n{in_effect(loaded)}")
    return 0


def run_release(args: argparse.Namespace) -> int:
    """Have the agent of this node let go of the GPUs, or take them back."""
    from whyidle.host import LiveHost
    from whyidle.layout import identify
    from whyidle.release import ask, holders

    clock = SystemClock()
    config = _load(args).config
    host = LiveHost("/", clock)
    folder = identify(host, config.node).folder(config.recording)
    state = ask(folder, release=not args.resume, clock=clock)
    if args.resume:
        sys.stdout.write("the agent has taken the GPUs back.\n")
        return 0
    held = holders()
    ours = [str(pid) for pid, _ in held if pid in state.pids]
    if ours:
        sys.stderr.write(f"the agent still holds a GPU device in process {', '.join(ours)}.\n")
        return 1
    sys.stdout.write(
        "the agent has let go of the GPUs and records everything else; it takes them back when the "
        "driver was unloaded and is there again, or with: whyidle release --resume\n"
    )
    for pid, name in held:
        sys.stdout.write(f"another process has a GPU device open: {name} ({pid})\n")
    return 0
