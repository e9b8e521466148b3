"""The keeper as a process: `python -m whyidle.keeper_process`, started by the supervisor."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import duckdb

from whyidle.child import Progress, Step, prepare, take_lock
from whyidle.clock import NS_PER_S, SystemClock
from whyidle.host import LiveHost
from whyidle.keeper import Keeper, Retention
from whyidle.keeper_live import KeeperLive, MakeEvaluator, add_options
from whyidle.layout import SAMPLER_LOCK, identify
from whyidle.runner import describe

LOG = logging.getLogger("whyidle.keeper")
# How often it looks for a finished piece; they come once a minute.
LOOK_S = 5.0
NICE = 10


def main(argv: Sequence[str] | None = None, make_evaluator: MakeEvaluator | None = None) -> int:
    """Keep a recording until told to stop; then take over what the sampler left.

    With an evaluator, idle time is charged to causes meanwhile.
    """
    parser = argparse.ArgumentParser(prog="whyidle.keeper_process")
    parser.add_argument("recording", type=Path)
    parser.add_argument("--node", default=None)
    parser.add_argument("--root", default="/")
    parser.add_argument("--merge-at-end", action="store_true")
    parser.add_argument("--retain-s", type=float, default=None)
    parser.add_argument("--retain-bytes", type=int, default=None)
    parser.add_argument("--free-bytes", type=int, default=None)
    add_options(parser)
    options = parser.parse_args(argv)
    waiter = prepare("keeper")
    if os.getpriority(os.PRIO_PROCESS, 0) < NICE:  # a service may have it so, and deny the call
        os.nice(NICE)
    clock = SystemClock(waiter.wait_s)
    host = LiveHost(options.root, clock)
    identity = identify(host, options.node)
    # A keeper whose supervisor was killed may still be taking over its last pieces.
    lock = identity.folder(options.recording) / ".keeper.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    while take_lock(lock) is None and not waiter.stopping():
        waiter.wait_s(0.2)
    keeper = Keeper(
        options.recording,
        identity,
        host,
        pid=os.getpid(),
        retention=Retention(
            age_s=options.retain_s,
            size_bytes=options.retain_bytes,
            free_bytes=options.free_bytes,
        ),
    )
    live = KeeperLive(options, identity, host, make_evaluator)
    look_ns = int(min(LOOK_S, options.settle_every_s) * NS_PER_S)
    failed = False
    progress = Progress()
    while not waiter.stopping():
        live.look()
        failed = _try(keeper, drain=False, said=failed)
        progress.done(Step.CYCLE)
        clock.sleep_until(clock.mono_ns() + look_ns)
    # Stopped alone, the keeper leaves the newest piece to the sampler that still writes it; none
    # can begin one in the meantime.
    alone = take_lock(lock.with_name(SAMPLER_LOCK))
    live.close(ended=alone is not None, merge=options.merge_at_end)
    failed = _try(keeper, drain=alone is not None, said=False)
    if alone is not None:
        os.close(alone)
    if options.merge_at_end and not failed:
        keeper.merge(everything=True)
    return 1 if failed else 0


def _try(keeper: Keeper, *, drain: bool, said: bool) -> bool:
    """Run a cycle; say once that it failed, and that it works again. Return whether it failed."""
    try:
        keeper.cycle(drain=drain)
    except (OSError, duckdb.Error) as error:
        if not said:
            LOG.error("cannot write segments, the spool is kept: %s", describe(error))
        return True
    if said:
        LOG.info("segments are written again")
    return False


if __name__ == "__main__":
    sys.exit(main())
