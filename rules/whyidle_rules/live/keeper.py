"""The keeper of a node that has rules: `python -m whyidle_rules.live.keeper`.

The agent knows nothing of rules; the command above both tells it to start this module instead of
its own keeper.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# numpy's BLAS would start a thread for each core; nothing here multiplies matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from whyidle import keeper_process
from whyidle.keeper_live import Around
from whyidle.settle import Evaluator
from whyidle_rules.live.evaluator import RuleEvaluator
from whyidle_rules.rule_load import load_rules


def main(argv: Sequence[str] | None = None) -> int:
    """Keep a recording, charge its idle time by the rules and serve metrics, until told to stop."""
    return keeper_process.main(argv, make_evaluator)


def make_evaluator(around: Around) -> Evaluator:
    """Return what charges by the built-in rules, those of the site and those named. RuleError."""
    return RuleEvaluator(around, load_rules(around.rules))


if __name__ == "__main__":
    sys.exit(main())
