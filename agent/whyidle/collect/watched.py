"""The processes that the collectors of processes begin from: the answer to "watched"."""

from __future__ import annotations

from collections.abc import Mapping

from whyidle.host import Answer, Host


def parse(answer: Answer) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return the pids with a GPU context, None if nobody could list them, and the commands'."""
    if not isinstance(answer, Mapping):
        raise ValueError(f"watched: {answer!r} is no answer")
    gpu = answer.get("gpu")
    return (None if gpu is None else _pids(gpu)), _pids(answer.get("commands", ()))


def _pids(answer: Answer) -> tuple[int, ...]:
    if not isinstance(answer, tuple | list):
        raise ValueError(f"watched: {answer!r} is no list of pids")
    pids = tuple(pid for pid in answer if isinstance(pid, int))
    if len(pids) != len(answer):
        raise ValueError(f"watched: {answer!r} has what is no pid")
    return pids


def watched_pids(host: Host) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Ask the host; one that was never told, as a recorded tree, watches nothing."""
    try:
        return parse(host.ask("watched"))
    except KeyError:
        return None, ()
