"""Declarations of tables: bad ones fail at import, and everything else derives from good ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import duckdb
import pytest

from whyidle import schema
from whyidle.schema import TABLES
from whyidle.table import ddl, gauge, key, label, table, table_of
from whyidle.tables_doc import markdown, tables

ROOT = Path(__file__).parents[1]


def declare(**columns: tuple[Any, Any]) -> Any:
    """Declare a table with these columns beside mono_ns: annotation and field of each."""
    body: dict[str, Any] = {
        "__doc__": "A row.",
        "__module__": __name__,
        "TABLE": "x",
        "__annotations__": {
            "TABLE": ClassVar[str],
            "mono_ns": int,
            **{name: annotation for name, (annotation, _) in columns.items()},
        },
        "mono_ns": key("When.", unit="ns"),
        **{name: field for name, (_, field) in columns.items()},
    }
    return table(type("X", (), body))


def test_a_good_declaration_makes_a_frozen_row() -> None:
    made = declare(size_bytes=(int | None, gauge("Size.", unit="bytes")))
    row = made(mono_ns=1, size_bytes=None)
    with pytest.raises(AttributeError):
        row.mono_ns = 2
    spec = table_of(made)
    assert [(c.name, c.type, c.nullable, c.kind) for c in spec.columns] == [
        ("mono_ns", "BIGINT", False, "key"),
        ("size_bytes", "BIGINT", True, "gauge"),
    ]
    assert spec.column("size_bytes").comment == "Size. [bytes] (gauge)"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"size": (int, gauge("Size.", unit="bytes"))}, "is called ..._bytes"),
        ({"size_miles": (int, gauge("Size.", unit="miles"))}, "see UNITS"),
        ({"size_bytes": (int, gauge("Size."))}, "declares none"),
        ({"names": (list, label("Names."))}, "is no column type"),
        ({"names": (int | str, label("Names."))}, "is no column type"),
    ],
)
def test_a_bad_declaration_fails(columns: dict[str, tuple[Any, Any]], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        declare(**columns)


def test_tables_are_sorted_named_once_and_documented() -> None:
    names = [row.__name__ for row in TABLES]
    assert names == sorted(names)
    assert len({table_of(row).name for row in TABLES}) == len(TABLES)
    assert set(names) <= set(schema.__all__)
    for row in TABLES:
        spec = table_of(row)
        assert spec.meaning.endswith((".", ")", "…")), spec.name
        for column in spec.columns:
            assert column.meaning, f"{spec.name}.{column.name}"
            assert column.meaning[0].isupper() or column.meaning.split()[0].isascii()
        # The views of a recording have these two in front.
        assert not {"node", "boot_id"} & {column.name for column in spec.columns}


def test_the_statements_make_a_table_that_explains_itself() -> None:
    con = duckdb.connect(":memory:")
    for row in TABLES:
        for statement in ddl(table_of(row)):
            con.execute(statement)
    comments = con.execute(
        "SELECT count(*), count(comment) FROM duckdb_columns() WHERE NOT internal"
    ).fetchone()
    con.close()
    assert comments is not None
    assert comments[0] == comments[1] > 200


def test_the_reference_page_is_what_the_declarations_say() -> None:
    page = ROOT / "docs" / "tables.md"
    assert page.read_text(encoding="utf-8") == markdown(tables()), (
        "run: whyidle tables --markdown > docs/tables.md"
    )
