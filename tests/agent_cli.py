"""The agent's commands as a program of their own, for tests: python agent_cli.py record ..."""

from __future__ import annotations

import argparse
import sys

from whyidle import commands
from whyidle.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(prog="whyidle")
    commands.add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args()
    try:
        return int(args.run(args))
    except UserError as error:
        sys.stderr.write(f"whyidle: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
