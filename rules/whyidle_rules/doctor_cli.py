"""`whyidle doctor`: what this node can and cannot show, why, what to type, which rules are blind.

Exit codes: 0 all that is on this machine works, 1 something can be mended, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whyidle_rules.cli_options import add_colour, add_rules_dir, wants_colour

if TYPE_CHECKING:
    from whyidle.doctor import Examination

SCHEMA = "whyidle.doctor/1"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor`; `run` carries it out."""
    about = (
        "say what whyidle can and cannot see on this node, why, what to type to mend it, and which "
        "rules are blind without it"
    )
    parser = subparsers.add_parser("doctor", help=about, description=about, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="name all blind rules")
    add_colour(parser)
    add_rules_dir(parser, "also look at the rules in DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine this node and print what was found."""
    from whyidle.clock import SystemClock
    from whyidle.doctor import examine
    from whyidle_rules.rule_load import load_rules

    rules = load_rules(args.rules_dir)
    found = examine("/", SystemClock())
    blind = blind_rules(found, rules)
    if args.json:
        json.dump(as_json(found, blind), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print(args, found, blind)
    return 1 if found.wrong else 0


def blind_rules(found: Examination, rules: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """Return the rules that are blind for what does not work or is not there, by its name."""
    from whyidle_rules.doctor_columns import blind

    working = {
        finding.name for finding in found.findings if finding.state in ("works", "idle", "partly")
    }
    return {
        finding.name: blind(finding.name, working, rules)
        for finding in found.findings
        if finding.state not in ("works", "idle")
    }


def as_json(found: Examination, blind: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return what was found as plain values; fields are added, never renamed."""
    return {
        "schema": SCHEMA,
        "node": found.node,
        "kernel": found.kernel,
        "driver": found.driver,
        "gpus": list(found.gpus),
        "user_id": found.user_id,
        "sources": [
            {
                "name": finding.name,
                "section": finding.section,
                "shows": finding.shows,
                "state": finding.state,
                "why": finding.why or None,
                "fix": finding.fix or None,
                "rows": finding.rows,
                "tables": list(finding.tables),
                "blind_rules": list(blind.get(finding.name, ())),
            }
            for finding in found.findings
        ],
        "can_be_mended": len(found.wrong),
    }


def _print(
    args: argparse.Namespace, found: Examination, blind: Mapping[str, Sequence[str]]
) -> None:
    from whyidle_rules.doctor_text import Style, render
    from whyidle_rules.report.pen import needs_ascii

    style = Style(
        width=shutil.get_terminal_size((100, 24)).columns,
        colour=wants_colour(args),
        ascii_only=needs_ascii(sys.stdout.encoding or "ascii"),
        verbose=args.verbose,
    )
    sys.stdout.write(render(found, blind, style))
