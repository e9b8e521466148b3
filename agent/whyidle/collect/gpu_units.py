"""Units of NVML's answers, and what is said once of what a GPU does not offer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from whyidle.clock import NS_PER_S
from whyidle.collect.collector import Problem
from whyidle.collect.gpu_list import LISTS, number, whole
from whyidle.host import Answer

# Its ends, in ns of the monotonic clock, and what its metrics say.
GpmWindow: TypeAlias = tuple[int, int, tuple[Answer, ...]]
MIB = 1 << 20
KIB = 1 << 10
# GPM has no finer truth than a ten-thousandth, and the digits below would cost 6 bytes a value.
_STEPS = 10_000
# More than the parts of the GPUs of any node; what is beyond is said again.
_NOTES_LIMIT = 4096


def percent(answer: Answer) -> float | None:
    """Return percent as a ratio."""
    found = answer if type(answer) is float else number(answer)
    return None if found is None else round(found * 100) / _STEPS


def percents(answers: Sequence[Answer]) -> list[float | None]:
    """Return percent as ratios: a call for each would cost three times as much."""
    return [
        round(answer * 100) / _STEPS if type(answer) is float else percent(answer)
        for answer in answers
    ]


def bytes_of_rate(answer: Answer, window_ns: int) -> int | None:
    """Return the bytes that a rate in MiB/s makes over a window."""
    found = number(answer)
    return None if found is None else round(found * MIB * window_ns / NS_PER_S)


def bytes_of_rates(answers: Sequence[Answer], window_ns: int) -> list[int | None]:
    """Return the bytes that rates in MiB/s make over a window."""
    return [
        round(answer * MIB * window_ns / NS_PER_S)
        if type(answer) is float
        else bytes_of_rate(answer, window_ns)
        for answer in answers
    ]


def kib(answer: Answer) -> int | None:
    """Return KiB as bytes."""
    found = whole(answer)
    return None if found is None else found * KIB


def pair(answer: Answer) -> tuple[Answer, Answer]:
    """Return the two parts of an answer that has two."""
    if isinstance(answer, LISTS) and len(answer) == 2:
        return answer[0], answer[1]
    return None, None


def parts(answer: Answer, count: int) -> tuple[Answer, ...]:
    """Return the parts of an answer that has `count` of them; as many None for any other."""
    if isinstance(answer, LISTS) and len(answer) == count:
        return tuple(answer)
    return (None,) * count


def gpm_window(call: str, answer: Answer, count: int) -> GpmWindow:
    """Return t0, t1 and so many values of a window of GPM, None for those that it lacks.

    Values beyond are left out: older journals have more. Raises ValueError for anything else.
    """
    if isinstance(answer, LISTS) and len(answer) == 3:
        t0, t1 = whole(answer[0]), whole(answer[1])
        values = tuple(answer[2]) if isinstance(answer[2], LISTS) else ()
        if t0 is not None and t1 is not None and len(values) >= count:
            return t0, t1, values[:count]
    raise ValueError(f"{call}: {answer!r} is not (t0, t1, {count} values)")


class Notes:
    """What a GPU or driver does not offer: said once, until it is otherwise."""

    __slots__ = ("_said",)

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def once(self, subject: str, message: str) -> Iterator[Problem]:
        """Yield the note if it is news."""
        if self._said.get(subject) == message:
            return
        if len(self._said) >= _NOTES_LIMIT:
            self._said.clear()
        self._said[subject] = message
        yield Problem(subject=subject, message=message, kind="no_data")

    def forget(self, subject: str) -> None:
        """Say it again when it comes back."""
        self._said.pop(subject, None)
