"""The commands `diagnose` and `whyidle`.

Results go to stdout, progress and complaints to stderr. Exit codes: 0 nothing found, 1 findings, 2
could not run. Heavy imports wait until a command needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from whyidle.errors import UserError
from whyidle_rules import diagnose_cli

if TYPE_CHECKING:
    pass

INTERRUPTED = 130
_QUERY_INTERRUPTED = "Query interrupted"
# The module of the keeper that `whyidle agent` starts.
KEEPER = "whyidle_rules.live.keeper"
_CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def main(argv: Sequence[str] | None = None) -> int:
    """Run `whyidle`."""
    parser = whyidle_parser()
    return _guarded(lambda: _dispatch(_parsed(parser, argv)))


def diagnose_main(argv: Sequence[str] | None = None) -> int:
    """Run `diagnose`."""
    parser = diagnose_parser()
    return _guarded(lambda: _dispatch(parser.parse_args(argv)))


def whyidle_parser() -> argparse.ArgumentParser:
    """Return the parser of `whyidle` with all of its commands."""
    parser: argparse.ArgumentParser = _Parser(
        prog="whyidle", description="Tells why GPUs are idle.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    diagnose_cli.add_options(
        commands.add_parser(
            "diagnose",
            help="explain a recorded run",
            description=diagnose_cli.ABOUT,
            allow_abbrev=False,
        )
    )
    from whyidle import commands as agent
    from whyidle_rules import doctor_cli, rules_cli

    agent.add_parsers(commands, agent.Above(keeper=KEEPER, check=_check_rules))
    _sample_options(
        commands.add_parser(
            "sample-trace",
            help="write traces as the 8 Hz recording that the agent would have made",
            description="Write profiler traces as the recording that the agent would have made of "
            "the same seconds, to compare what samples can tell with what is exact.",
            allow_abbrev=False,
        )
    )
    rules_cli.add_parser(commands)
    doctor_cli.add_parser(commands)
    return parser


def diagnose_parser() -> argparse.ArgumentParser:
    """Return the parser of `diagnose`."""
    parser: argparse.ArgumentParser = _Parser(
        prog="diagnose", description=diagnose_cli.ABOUT, allow_abbrev=False
    )
    diagnose_cli.add_options(parser)
    return parser


def _check_rules(folders: Sequence[Path]) -> None:
    """Raise UserError if the rules of the site, or of these folders, are not good."""
    from whyidle_rules.rule_load import load_rules

    load_rules(folders)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the complaint and leave with 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


def _sample_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", metavar="SOURCE", help="trace, folder or glob")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", required=True, help="recording to write"
    )
    parser.add_argument(
        "--hz", type=_rate, default=8.0, help="windows a second, 0.1 to 1000 (default: 8)"
    )
    parser.set_defaults(run=_sample)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0.1 and 1000")
    return value


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse; what is unknown to a command is that command's complaint, and its help says more."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        name = f"{parser.prog} {args.command}"
        listed = " ".join(unknown)
        parser.exit(2, f"{name}: unrecognized arguments: {listed}; see {name} --help.\n")
    return args


def _dispatch(args: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _guarded(run: Callable[[], int]) -> int:
    """Turn failures that a user can act on into one line and an exit code."""
    _open_what_is_closed()
    try:
        try:
            code = run()
        finally:  # --help leaves this way too
            sys.stdout.flush()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted.\n")
        return INTERRUPTED
    except RuntimeError as error:
        # What DuckDB makes of Ctrl-C while it binds a query.
        if str(error) != _QUERY_INTERRUPTED:
            raise
        sys.stderr.write("interrupted.\n")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`| head`): nothing is wrong.
        _drop_output()
        return 0
    except OSError as error:
        if error.errno not in _CANNOT_WRITE or error.filename is not None:
            raise
        reason = (error.strerror or type(error).__name__).lower()
        sys.stderr.write(f"the output cannot be written: {reason}; send it somewhere else.\n")
        _drop_output()
        return 2
    return code


def _open_what_is_closed() -> None:
    """Give us a place to write to where whoever started us closed it (`>&-`)."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - lives as long as the process
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def _drop_output() -> None:
    """Let what is still in the buffer of stdout go nowhere, or Python fails on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sample(args: argparse.Namespace) -> int:
    from whyidle_rules import sources
    from whyidle_rules.trace.sample import write

    files = write(sources.trace_files(args.source), args.output, args.hz)
    used = [file for file in files if file.devices]
    for file in files:
        if file.refusal:
            sys.stderr.write(f"{file.path}: {file.refusal}; left out.\n")
    sys.stdout.write(f"{args.output}: {len(used)} trace(s), sampled {args.hz:g} times a second.\n")
    return 0
