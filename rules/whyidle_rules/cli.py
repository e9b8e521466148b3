"""The commands `diagnose` and `whyidle`.

Results go to stdout, progress and complaints to stderr. Exit codes: 0 nothing found, 1 findings, 2
could not run. Heavy imports wait until a command needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from whyidle.errors import UserError

if TYPE_CHECKING:
    from whyidle_rules.diagnosis import Diagnosis
    from whyidle_rules.rule import Rule
    from whyidle_rules.trace.load import FileTrace

INTERRUPTED = 130
# The module of the keeper that `whyidle agent` starts.
KEEPER = "whyidle.keeper_process"
_CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def main(argv: Sequence[str] | None = None) -> int:
    """Run `whyidle`."""
    parser = whyidle_parser()
    return _guarded(lambda: _dispatch(parser.parse_args(argv)))


def diagnose_main(argv: Sequence[str] | None = None) -> int:
    """Run `diagnose`."""
    parser = diagnose_parser()
    return _guarded(lambda: _diagnose(parser.parse_args(argv)))


def whyidle_parser() -> argparse.ArgumentParser:
    """Return the parser of `whyidle` with all of its commands."""
    parser: argparse.ArgumentParser = _Parser(
        prog="whyidle", description="Tells why GPUs are idle.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _diagnose_options(
        commands.add_parser(
            "diagnose", help="explain a recorded run", description=_ABOUT, allow_abbrev=False
        )
    )
    from whyidle import commands as agent
    from whyidle_rules import rules_cli

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
    return parser


def diagnose_parser() -> argparse.ArgumentParser:
    """Return the parser of `diagnose`."""
    parser: argparse.ArgumentParser = _Parser(
        prog="diagnose", description=_ABOUT, allow_abbrev=False
    )
    _diagnose_options(parser)
    return parser


_ABOUT = (
    "Explain why the GPUs of a run were idle: every idle GPU-second is charged to a cause and to "
    "the rank where it arose. SOURCE is a PyTorch profiler trace (.json, .json.gz) or a folder "
    "with one trace per rank. Exit code: 0 nothing worth a warning, 1 findings, 2 could not run."
)


def _check_rules(folders: Sequence[Path]) -> None:
    """Raise UserError if the rules of the site, or of these folders, are not good."""
    from whyidle_rules.rule_load import load_rules

    load_rules(folders)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one sentence."""

    def error(self, message: str) -> NoReturn:
        """Print the complaint and leave with 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help.\n")


def _diagnose_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="+", metavar="SOURCE", help="trace, folder or glob")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show every rank and every finding"
    )
    parser.add_argument(
        "--colour",
        choices=("auto", "always", "never"),
        default="auto",
        help="colours in the report (default: auto, on a terminal without NO_COLOR)",
    )
    parser.add_argument(
        "--rules-dir",
        metavar="DIR",
        action="append",
        type=Path,
        default=[],
        help="also use the rules in DIR; a rule of the same id replaces a built-in one",
    )
    parser.set_defaults(run=_diagnose)


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


def _diagnose(args: argparse.Namespace) -> int:
    # numpy's BLAS would start a thread for each core. Nothing here multiplies matrices, and files
    # are read in forked processes, for which threads are a hazard.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from whyidle_rules import sources
    from whyidle_rules.trace.load import load

    paths = sources.trace_files(args.source)
    rules: list[Rule] = []
    with _progress(paths) as progress:
        files = load(paths, progress, meanwhile=lambda: rules.extend(_get_ready(args.rules_dir)))
    return _diagnose_traces(args, files, rules)


def _get_ready(rules_dir: Sequence[Path]) -> tuple[Rule, ...]:
    """Load the rules and what runs them: 0.15 s of imports, beside the reading of traces."""
    with _interrupt_later():
        from whyidle_rules import rule_load
        from whyidle_rules.trace import diagnose

        assert diagnose
    return rule_load.load_rules(rules_dir)


@contextmanager
def _interrupt_later() -> Iterator[None]:
    """Hold Ctrl-C back for the length of imports: initialising DuckDB's module swallows it."""
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread()
    if not ours or before is not signal.default_int_handler:
        yield
        return
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _diagnose_traces(
    args: argparse.Namespace, files: Sequence[FileTrace], rules: Sequence[Rule]
) -> int:
    from whyidle_rules import database
    from whyidle_rules.trace.diagnose import diagnose
    from whyidle_rules.trace.run import assemble

    run = assemble(files)
    if len(run.refused) == len(run.files):
        raise UserError(_all_refused(run.refused))
    with database.memory() as con:
        found = diagnose(con, [Path(source) for source in args.source], run, rules)
    if found.totals.gpu_s <= 0:
        # Neither healthy nor ill: a script must not take it for either.
        first = run.files[0]
        damage = f" ({'; '.join(first.problems)})" if first.problems else ""
        raise UserError(f"{first.path}{damage}: {found.headline}")
    if args.json:
        json.dump(found.to_json(), sys.stdout, allow_nan=False, indent=1)
        sys.stdout.write("\n")
    else:
        _print_report(args, found)
    return 1 if any(finding.severity != "info" for finding in found.findings) else 0


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


def _print_report(args: argparse.Namespace, found: Diagnosis) -> None:
    from whyidle_rules.report.pen import needs_ascii
    from whyidle_rules.report.text import render_text

    terminal = sys.stdout.isatty()
    colour = args.colour == "always" or (
        args.colour == "auto" and terminal and not os.environ.get("NO_COLOR")
    )
    width = shutil.get_terminal_size((100, 24)).columns
    encoding = sys.stdout.encoding or "ascii"
    text = render_text(
        found,
        width=width,
        colour=colour,
        verbose=args.verbose,
        ascii_only=needs_ascii(encoding),
    )
    sys.stdout.write(text)


def _all_refused(refused: Sequence[FileTrace]) -> str:
    first = refused[0]
    more = f" (and so {len(refused) - 1} more)" if len(refused) > 1 else ""
    return (
        f"{first.path}: {first.refusal}{more}; diagnose needs a trace that torch.profiler exported."
    )


@contextmanager
def _progress(paths: Sequence[Path]) -> Iterator[Callable[[int], None]]:
    """Show a bar of bytes on stderr, if that is a terminal and there is enough to wait for."""
    total = sum(path.stat().st_size for path in paths if path.is_file())
    if not sys.stderr.isatty() or total < 4 << 20:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # its refresh thread would be alive at the fork
    )
    with bar:
        task = bar.add_task("reading", total=total)

        def advance(size: int) -> None:
            bar.advance(task, size)
            bar.refresh()

        yield advance
