"""Options that several commands have: colours, and folders with rules of one's own."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def add_colour(parser: argparse.ArgumentParser) -> None:
    """Add --colour."""
    parser.add_argument(
        "--colour",
        choices=("auto", "always", "never"),
        default="auto",
        help="colours (default: auto, on a terminal without NO_COLOR)",
    )


def wants_colour(args: argparse.Namespace) -> bool:
    """Return whether to print in colours, to stdout as it is."""
    if args.colour == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return bool(args.colour == "always")


def add_rules_dir(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --rules-dir, which may be given again."""
    parser.add_argument(
        "--rules-dir", metavar="DIR", action="append", type=Path, default=[], help=text
    )
