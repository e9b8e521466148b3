"""The agent's part of the command line: record, run, agent, release, tables, replay, export.

Heavy imports are inside the commands that need them, so that --help stays instant.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from whyidle.clock import SystemClock
from whyidle.commands_service import Above as Above
from whyidle.commands_service import add_agent_options, add_release_options
from whyidle.errors import UserError

# What argparse's add_subparsers returns; the class has no public name.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_parsers(subparsers: Subparsers, above: Above | None = None) -> None:
    """Add every command of the agent; each sets `run`, a function of the arguments."""
    _add_record(subparsers)
    _add_run(subparsers)
    _add_agent(subparsers, above)
    _add_release(subparsers)
    _add_tables(subparsers)
    _add_replay(subparsers)
    _add_export(subparsers)


def _add(
    subparsers: Subparsers,
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int] | None = None,
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def _add_recording_options(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help=f"recording to write (default: {default})"
    )
    parser.add_argument("--node", help="name of this node (default: the kernel's hostname)")
    parser.add_argument(
        "--journal",
        action="store_true",
        help="keep what the machine answered too, for `whyidle replay` and bug reports",
    )


def _add_record(subparsers: Subparsers) -> None:
    parser = _add(
        subparsers,
        "record",
        "Record this node while a command runs; exits with the command's own exit code, or 128 + "
        "the number of the signal that ended it.",
        run_record,
    )
    _add_recording_options(parser, "./whyidle-<utc>")
    parser.add_argument("--no-probe", action="store_true", help="leave the command's Python alone")
    _add_probe_folder(parser)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- CMD ...")


def _add_probe_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--probe-dir",
        type=Path,
        metavar="DIR",
        help="where its Python processes publish counters (default: $WHYIDLE_PROBE_DIR, "
        "/run/whyidle/probe, or a folder in /dev/shm)",
    )


def _add_run(subparsers: Subparsers) -> None:
    parser = _add(
        subparsers,
        "run",
        "Run a command with the probe in its Python processes: they publish how long they wait for "
        "data, for an agent of this node to read. Nothing is recorded by this command itself.",
        run_run,
    )
    _add_probe_folder(parser)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- CMD ...")


def _add_agent(subparsers: Subparsers, above: Above | None) -> None:
    parser = _add(
        subparsers,
        "agent",
        "Record this node until stopped, as a service does. Options go before WHYIDLE_ variables, "
        "those before the file of settings.",
    )
    _add_recording_options(parser, "/var/lib/whyidle")
    add_agent_options(parser, above)


def _add_release(subparsers: Subparsers) -> None:
    parser = _add(
        subparsers,
        "release",
        "Have the agent of this node let go of the GPU devices for driver work. It goes on "
        "recording everything else.",
    )
    add_release_options(parser)


def _add_tables(subparsers: Subparsers) -> None:
    parser = _add(
        subparsers,
        "tables",
        "List the tables of a recording: columns, types, units, meanings.",
        run_tables,
    )
    parser.add_argument("--markdown", action="store_true", help="as a page of documentation")
    parser.add_argument("table", nargs="*", help="only these")


def _add_replay(subparsers: Subparsers) -> None:
    parser = _add(
        subparsers,
        "replay",
        "Make a recording of a journal: today's collectors on the answers of then.",
        run_replay,
    )
    parser.add_argument("journal", type=Path, help="a .jsonl.gz file that --journal wrote")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")


def _add_export(subparsers: Subparsers) -> None:
    parser = _add(
        subparsers,
        "export",
        "Write recordings as Parquet, partitioned by node and hour. Names of people, machines, "
        "paths and jobs are replaced by pseudonyms, of each export its own.",
        run_export,
    )
    parser.add_argument("source", nargs="+", help="recordings, or parts of them")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--redact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="replace names by pseudonyms (default); --no-redact writes them as they are",
    )


def run_record(args: argparse.Namespace) -> int:
    """Record the node for the life of a command."""
    from whyidle.record import Options, default_folder, record

    command = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not command:
        raise UserError("there is no command to record: write whyidle record -- CMD ...")
    clock = SystemClock()
    options = Options(
        recording=args.output or default_folder(clock),
        node=args.node,
        journal=args.journal,
        probe=not args.no_probe,
        probe_folders=() if args.probe_dir is None else (args.probe_dir,),
        keeper=("--merge-at-end",),
    )
    return record(options, command, clock)


def run_run(args: argparse.Namespace) -> int:
    """Become a command with the probe on."""
    from whyidle.run_command import run

    command = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not command:
        raise UserError("there is no command to run: write whyidle run -- CMD ...")
    run(command, args.probe_dir, os.environ)


def run_tables(args: argparse.Namespace) -> int:
    """Print the reference of tables."""
    from whyidle.tables_doc import markdown, tables, text

    try:
        specs = tables(args.table)
    except KeyError as error:
        name = str(error.args[0])
        near = difflib.get_close_matches(name, [spec.name for spec in tables()], 1)
        hint = f"; did you mean {near[0]}?" if near else "; whyidle tables lists all"
        raise UserError(f"there is no table {name}{hint}") from error
    sys.stdout.write((markdown(specs) if args.markdown else text(specs)).rstrip("\n") + "\n")
    return 0


def run_replay(args: argparse.Namespace) -> int:
    """Make a recording of a journal."""
    from whyidle.collect import ALL
    from whyidle.keeper import keep_at_once
    from whyidle.replay import replay

    try:
        done = replay(args.journal, args.output, ALL)
        keep_at_once(args.output, done.identity)
    except OSError as error:
        raise UserError(f"cannot write {args.output}: {error.strerror}") from error
    sys.stderr.write(f"replayed {done.runs} runs into {done.rows} rows; see {args.output}\n")
    for name, runs in done.unknown.items():
        sys.stderr.write(f"no collector {name} exists any more: {runs} runs were left out\n")
    if done.unasked:
        sys.stderr.write(f"{done.unasked} recorded answers were not asked for any more\n")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write recordings as Parquet."""
    from whyidle.parquet import export
    from whyidle.redact import Redaction
    from whyidle.store import Recording

    with Recording(args.source) as recording:
        rows = export(recording, args.output, Redaction() if args.redact else None)
        for damaged in recording.damaged:
            sys.stderr.write(f"left out {damaged.path}: {damaged.why}\n")
    sys.stderr.write(f"wrote {rows} rows into {args.output}\n")
    return 0
