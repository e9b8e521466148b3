"""The command `diagnose`: its options, and what it does with traces and with recordings."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from whyidle.errors import UserError
from whyidle_rules.cli_options import add_colour, add_rules_dir
from whyidle_rules.diagnose_tell import get_ready, interrupt_later, tell

if TYPE_CHECKING:
    from whyidle_rules.rule import Rule
    from whyidle_rules.trace.load import FileTrace

ABOUT = (
    "Explain why the GPUs of a run were idle: every idle GPU-second is charged to a cause and to "
    "the rank where it arose. SOURCE is a recording (of `whyidle record`, of the service, or an "
    "export), or a PyTorch profiler trace (.json, .json.gz), or a folder with one trace per rank. "
    "Exit code: 0 nothing worth a warning, 1 findings, 2 could not run."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `diagnose`; sets `run`."""
    parser.add_argument(
        "source", nargs="*", metavar="SOURCE", help="recording, trace, folder or glob"
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="what the service on this node has recorded, up to now; without --since its last ten "
        "minutes",
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="leave out what was before: 90s, 10m or 2h after the start of the run, or a time of "
        "day in ISO 8601; recordings only",
    )
    parser.add_argument("--until", metavar="TIME", help="leave out what was after; like --since")
    parser.add_argument(
        "--sql",
        metavar="QUERY",
        help="print the rows of a query instead of the report; tables evidence, grants and "
        "leftovers hold how each figure was made, beside those of `whyidle tables`; recordings "
        "only",
    )
    parser.add_argument(
        "--as-live",
        action="store_true",
        help="what the metrics of the service said at the time: the ledger as it was settled, "
        "without hindsight; recordings of the service only",
    )
    _add_more(parser)
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show every rank and every finding"
    )
    add_colour(parser)
    add_rules_dir(
        parser, "also use the rules in DIR; a rule of the same id replaces a built-in one"
    )
    parser.set_defaults(run=_diagnose)


def _add_more(parser: argparse.ArgumentParser) -> None:
    """Add what a diagnosis may be told besides its sources."""
    parser.add_argument(
        "--gpu-hour-cost",
        metavar="PRICE",
        type=_price,
        help="price of an hour of one GPU, such as 2.5, in any currency: also say what fixing each "
        "root cause returns in money",
    )
    parser.add_argument(
        "--nccl-inspector",
        metavar="PATH",
        action="append",
        type=Path,
        default=[],
        help="also read what NCCL's Inspector plugin wrote (its NCCL_INSPECTOR_DUMP_DIR): exact "
        "times of collectives and their bandwidth; recordings only",
    )
    parser.add_argument(
        "--flight-recorder",
        metavar="PATH",
        action="append",
        type=Path,
        default=[],
        help="also read dumps of PyTorch's flight recorder, one a rank: which rank has not come to "
        "the collective that the others wait in; recordings only",
    )


def _price(text: str) -> float:
    """Return a price; raises what argparse tells of in a sentence."""
    from whyidle_rules.price import parse_price

    try:
        return parse_price(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _diagnose(args: argparse.Namespace) -> int:
    # numpy's BLAS would start a thread for each core. Nothing here multiplies matrices, and files
    # are read in forked processes, for which threads are a hazard.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with interrupt_later():
        from whyidle_rules import sources

    if args.live or sources.are_recordings(args.source):
        with interrupt_later():
            from whyidle_rules import diagnose_recording

        return diagnose_recording.run(args)
    for option in ("since", "until", "sql"):
        if getattr(args, option) is not None:
            raise UserError(
                f"--{option} works on recordings, and {args.source[0]} is a trace; leave it out."
            )
    for option in ("nccl_inspector", "flight_recorder"):
        if getattr(args, option):
            raise UserError(
                f"--{option.replace('_', '-')} goes with recordings, and {args.source[0]} is a "
                "trace, which has the times of collectives itself; leave it out."
            )
    if args.as_live:
        raise UserError(
            f"--as-live reads what was settled while a node recorded, and {args.source[0]} is a "
            "trace; leave it out."
        )
    from whyidle_rules.trace.load import load

    paths = sources.trace_files(args.source)
    rules: list[Rule] = []
    with _progress(paths) as progress:
        files = load(paths, progress, meanwhile=lambda: rules.extend(get_ready(args.rules_dir)))
    return _diagnose_traces(args, files, rules)


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
    return tell(args, found)


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
