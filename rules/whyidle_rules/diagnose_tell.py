"""What every `diagnose` does, whatever it reads: load rules before, print the answer after."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from whyidle_rules.cli_options import wants_colour

if TYPE_CHECKING:
    from whyidle_rules.diagnosis import Diagnosis
    from whyidle_rules.rule import Rule


def get_ready(rules_dir: Sequence[Path]) -> tuple[Rule, ...]:
    """Load the rules and what runs them: 0.15 s of imports, beside the reading of traces."""
    with interrupt_later():
        from whyidle_rules import rule_load
        from whyidle_rules.trace import diagnose

        assert diagnose
    return rule_load.load_rules(rules_dir)


@contextmanager
def interrupt_later() -> Iterator[None]:
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


def tell(args: argparse.Namespace, found: Diagnosis) -> int:
    """Print a diagnosis as it was asked for; return the exit code."""
    from whyidle_rules.price import priced

    found = priced(found, args.gpu_hour_cost)
    if args.json:
        json.dump(found.to_json(), sys.stdout, allow_nan=False, indent=1)
        sys.stdout.write("\n")
    else:
        _print_report(args, found)
    return 1 if any(finding.severity != "info" for finding in found.findings) else 0


def _print_report(args: argparse.Namespace, found: Diagnosis) -> None:
    from whyidle_rules.report.pen import needs_ascii
    from whyidle_rules.report.text import render_text

    width = shutil.get_terminal_size((100, 24)).columns
    encoding = sys.stdout.encoding or "ascii"
    text = render_text(
        found,
        width=width,
        colour=wants_colour(args),
        verbose=args.verbose,
        ascii_only=needs_ascii(encoding),
    )
    sys.stdout.write(text)
