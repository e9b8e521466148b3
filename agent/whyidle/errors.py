"""Failures that a user can act on: one sentence, exit code 2, no traceback."""

from __future__ import annotations


class UserError(Exception):
    """Says in one sentence what is wrong, where, and what to do next.

    The command line prints the sentence to stderr and exits with 2. Anything else that escapes is a
    bug of ours and keeps its traceback.
    """
