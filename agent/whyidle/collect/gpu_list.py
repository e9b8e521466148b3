"""The GPUs that the collectors of GPUs ask about, and how they take NVML's refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from whyidle.collect.collector import NoData
from whyidle.host import Answer, Argument, Host, NvmlError, NvmlUnavailableError

# "Not supported" and "function not found": this GPU or this driver has no such value.
ABSENT = frozenset({3, 13})
# What a list of an answer is: a tuple, or a list where a journal gave it. A constant, because the
# union of the two types is made anew wherever it is written out.
LISTS: Final = (tuple, list)
# Lost, reset required, not found: the GPU answers nothing else either.
_GONE = frozenset({15, 16, 28})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU, or a MIG device with the uuid of its parent; `index` is None once it is lost."""

    uuid: str
    index: int | None
    parent: str | None


def parse(answer: Answer) -> tuple[Gpu, ...]:
    """Return the GPUs of an answer to "gpus"."""
    if not isinstance(answer, LISTS):
        raise ValueError(f"gpus: {answer!r} is no list")
    found = []
    for item in answer:
        if not isinstance(item, LISTS) or len(item) != 3:
            raise ValueError(f"gpus: {item!r} is not (uuid, index, parent)")
        uuid, index, parent = item
        found.append(
            Gpu(
                uuid=str(uuid),
                index=index if isinstance(index, int) else None,
                parent=None if parent is None else str(parent),
            )
        )
    return tuple(found)


class Gpus:
    """Every GPU that was ever seen: a lost one stays in the list, so that it shows as lost.

    MIG devices that have gone are forgotten: they were taken apart on purpose.
    """

    __slots__ = ("_known", "_last", "_listed")

    def __init__(self) -> None:
        self._known: dict[str, Gpu] = {}
        self._listed: tuple[Gpu, ...] = ()
        self._last: Answer = None

    def ask(self, host: Host) -> tuple[Gpu, ...]:
        """Return the GPUs; raises NoData without NVML, NvmlError if none was ever listed."""
        try:
            answer = host.nvml("gpus")
        except NvmlUnavailableError as why:
            raise NoData(str(why)) from None
        except NvmlError:
            if not self._known:
                raise
            return self._listed
        if answer is not self._last:
            self._take(parse(answer))
            self._last = answer
        if not self._known:
            raise RuntimeError(
                "the driver shows no GPU: look at the permissions of /dev/nvidia* and at nvidia-smi"
            )
        return self._listed

    def _take(self, listed: tuple[Gpu, ...]) -> None:
        known = {gpu.uuid: gpu for gpu in listed}
        for uuid, gpu in self._known.items():
            if uuid not in known and gpu.parent is None:
                known[uuid] = Gpu(uuid=uuid, index=None, parent=None)
        self._known = known
        self._listed = tuple(known.values())


def value(host: Host, call: str, uuid: str, *args: Argument) -> Answer:
    """Return NVML's answer, None where this GPU or driver has no such value; raises NvmlError."""
    try:
        return host.nvml(call, uuid, *args)
    except NvmlError as error:
        if error.code in ABSENT:
            return None
        raise


def is_gone(error: NvmlError) -> bool:
    """Return whether an error is of the GPU, not of the one value that was asked."""
    return error.code in _GONE or error.call == "HandleByUUID"


def whole(answer: Answer) -> int | None:
    """Return an answer that is a whole number; None for any other, as a refused field's code."""
    return answer if isinstance(answer, int) and not isinstance(answer, bool) else None


def number(answer: Answer) -> float | None:
    """Return an answer that is a number; None for any other."""
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return float(answer)
    return None


def text(answer: Answer) -> str | None:
    """Return an answer that is text; None for any other."""
    return answer if isinstance(answer, str) else None


def refused(answer: Answer) -> int | None:
    """Return NVML's code of a part of an answer that was refused, such as 4: no permission."""
    if isinstance(answer, LISTS) and len(answer) == 1:
        return whole(answer[0])
    return None
