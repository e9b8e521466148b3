"""Rows as values: made by name, frozen, equal by content."""

from __future__ import annotations

import copy
import pickle

import pytest

from whyidle.schema import TABLES, Vmstat
from whyidle.table import Row, replaced, table_of


@pytest.mark.parametrize("kind", TABLES)
def test_each_field_is_where_it_was_put(kind: type[Row]) -> None:
    names = [column.name for column in table_of(kind).columns]
    made = kind(**{name: index for index, name in enumerate(names)})
    assert [getattr(made, name) for name in names] == list(range(len(names)))


def test_rows_are_frozen_values() -> None:
    names = [column.name for column in table_of(Vmstat).columns]
    made, same = Vmstat(**dict.fromkeys(names, 1)), Vmstat(**dict.fromkeys(names, 1))
    assert made == same and hash(made) == hash(same)
    assert made != Vmstat(**dict.fromkeys(names, 2))
    with pytest.raises(AttributeError, match="immutable"):
        made.mono_ns = 3  # type: ignore[misc]
    assert replaced(made, mono_ns=3).mono_ns == 3
    assert copy.copy(made) == pickle.loads(pickle.dumps(made)) == made


def test_a_forgotten_or_unknown_field_is_named() -> None:
    with pytest.raises(TypeError, match="argument"):
        Vmstat(mono_ns=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no_such"):
        Vmstat(no_such=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Vmstat(1)  # type: ignore[call-arg]
