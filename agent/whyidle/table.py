"""What a table is: a frozen typed row class, declared once.

DDL with comments, the spool format, reference documentation, Prometheus families and fixture checks
derive from the class. Integers keep the unit of their source, which is the last word of the name.
Unknown is None: never 0, never a sentinel.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # typing has it since 3.11, and only type checkers read it

    def dataclass_transform(**_: object) -> object:
        """Return a decorator that does nothing."""
        return lambda decorator: decorator


Kind = Literal["key", "label", "gauge", "counter"]
AtLimit = Literal["wraps", "sticks"]
SqlType = Literal["BIGINT", "DOUBLE", "VARCHAR", "BOOLEAN"]

_SQL_TYPES: Mapping[type, SqlType] = types.MappingProxyType(
    {int: "BIGINT", float: "DOUBLE", str: "VARCHAR", bool: "BOOLEAN"}
)
# Units that names may end in; a column with a unit must end in it: nobody has to look it up.
UNITS: Mapping[str, str] = types.MappingProxyType(
    {
        "ns": "ns",
        "us": "us",
        "ms": "ms",
        "bytes": "bytes",
        "pages": "pages",
        "ratio": "ratio",
        "milliwatts": "mW",
        "millijoules": "mJ",
        "celsius": "Celsius",
        "megahertz": "MHz",
        "bits_per_s": "bit/s",
        "bytes_per_s": "byte/s",
        "transfers_per_s": "transfers/s",
    }
)


class Row(Protocol):
    """A row of a declared table; `TABLE` is its name."""

    TABLE: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column: `unit` is a key of UNITS or ''; `bits` and `at_limit` say how a counter ends.

    A ratio that is not `rounded` by its source, to four decimals, is rounded to six when it is
    written.
    """

    name: str
    type: SqlType
    nullable: bool
    kind: Kind
    unit: str
    meaning: str
    bits: int = 64
    at_limit: AtLimit = "wraps"
    rounded: bool = False

    @property
    def stored(self) -> str:
        """The SQL type in a segment, of which readers make `type`.

        DuckDB packs floating point numbers in blocks of 256 KiB only; in smaller ones a ratio takes
        8 bytes, as a decimal of four places 14 bits.
        """
        if self.unit == "ratio" and self.type == "DOUBLE":
            return f"DECIMAL(18, {4 if self.rounded else 6})"
        return self.type

    @property
    def comment(self) -> str:
        """The meaning, kind and unit in one line, as it is stored beside the column."""
        unit = f" [{UNITS[self.unit]}]" if self.unit else ""
        limit = f", {self.bits} bits, {self.at_limit}" if self.bits != 64 else ""
        return f"{self.meaning}{unit} ({self.kind}{limit})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A declared table: its name, what a row is, its columns in order and its row class."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    row: type[Row]

    def column(self, name: str) -> Column:
        """Return a column; raises KeyError."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)


_T = TypeVar("_T")


def _field(kind: Kind, meaning: str, unit: str, **more: Any) -> Any:
    return dataclasses.field(metadata={"kind": kind, "meaning": meaning, "unit": unit, **more})


def key(meaning: str, *, unit: str = "") -> Any:
    """Declare a column that tells rows of one table apart."""
    return _field("key", meaning, unit)


def label(meaning: str) -> Any:
    """Declare a column of words: it describes, and is neither summed nor averaged."""
    return _field("label", meaning, "")


def gauge(meaning: str, *, unit: str = "", rounded: bool = False) -> Any:
    """Declare a value of the moment, or of the row's own window."""
    return _field("gauge", meaning, unit, rounded=rounded)


def counter(meaning: str, *, unit: str = "", bits: int = 64, at_limit: AtLimit = "wraps") -> Any:
    """Declare a running total, stored as the source gives it; resets and wraps are left in."""
    return _field("counter", meaning, unit, bits=bits, at_limit=at_limit)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(key, label, gauge, counter)
)
def table(cls: type[_T]) -> type[_T]:
    """Make a frozen row class of a declaration; a bad one raises TypeError at import."""
    declared = dataclass(frozen=True, kw_only=True)(cls)
    hints = typing.get_type_hints(declared)
    fields = dataclasses.fields(declared)  # type: ignore[arg-type]
    columns = tuple(_column(declared, field, hints[field.name]) for field in fields)
    meaning = " ".join((declared.__doc__ or "").split())
    if not meaning or meaning.startswith(f"{declared.__name__}("):
        raise TypeError(f"table {declared.__name__} has no docstring")
    if "mono_ns" not in {column.name for column in columns}:
        raise TypeError(f"table {declared.__name__} has no mono_ns")
    name = str(getattr(declared, "TABLE"))  # noqa: B009 - the protocol is checked here
    made = _row_class(declared, [(column.name, hints[column.name]) for column in columns])
    spec = Table(name=name, meaning=meaning, columns=columns, row=typing.cast("type[Row]", made))
    setattr(made, "__table__", spec)  # noqa: B010 - no field of a row
    return made


def _row_class(declared: type[_T], fields: list[tuple[str, Any]]) -> type[_T]:
    """Return the class of a table's rows: made in 0.6 us and read whole in 0.1, of 25 columns.

    A frozen dataclass with slots takes 1.9 and 0.4 us, and a busy node makes 200 rows a second.
    """
    return typing.cast(
        "type[_T]",
        msgspec.defstruct(
            declared.__name__,
            fields,
            module=declared.__module__,
            # Rows hold plain values, so that no cycle goes through them.
            gc=False,
            frozen=True,
            kw_only=True,
            namespace={"TABLE": getattr(declared, "TABLE"), "__doc__": declared.__doc__},  # noqa: B009
        ),
    )


def values_of(row: Row) -> tuple[Any, ...]:
    """Return the values of a row, in the order of its columns."""
    return msgspec.structs.astuple(row)  # type: ignore[arg-type]


def replaced(row: _T, **values: object) -> _T:
    """Return a row with some other values; raises TypeError for a column that it has not."""
    return msgspec.structs.replace(row, **values)  # type: ignore[type-var]


def table_of(row: type[Row]) -> Table:
    """Return the declaration of a row class; raises AttributeError for any other class."""
    spec: Table = getattr(row, "__table__")  # noqa: B009 - set by the decorator, not declared
    return spec


def _column(cls: type, field: dataclasses.Field[Any], hint: Any) -> Column:
    where = f"{cls.__name__}.{field.name}"
    members = typing.get_args(hint)
    nullable = type(None) in members
    plain: Any = next((m for m in members if m is not type(None)), None) if nullable else hint
    if plain not in _SQL_TYPES or len(members) not in (0, 2):
        raise TypeError(f"{where}: {hint!r} is no column type")
    if not field.metadata:
        raise TypeError(f"{where} is declared without key, label, gauge or counter")
    unit = field.metadata["unit"]
    if unit and (unit not in UNITS or not field.name.endswith(f"_{unit}")):
        raise TypeError(f"{where}: a column in {unit!r} is called ..._{unit}, see UNITS")
    if not unit and field.name.rsplit("_", 1)[-1] in UNITS:
        raise TypeError(f"{where} is named for a unit and declares none")
    return Column(name=field.name, type=_SQL_TYPES[plain], nullable=nullable, **field.metadata)


def quoted(text: str) -> str:
    """Return an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Return a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def ddl(spec: Table, *, schema: str = "") -> tuple[str, ...]:
    """Return the statements that create a table and its comments, in `schema` if one is named.

    No column is NOT NULL: who writes rows checks that, and older rows may lack a newer column.
    """
    name = f"{identifier(schema)}.{identifier(spec.name)}" if schema else identifier(spec.name)
    body = ", ".join(f"{identifier(column.name)} {column.stored}" for column in spec.columns)
    return (
        f"CREATE TABLE {name} ({body})",
        f"COMMENT ON TABLE {name} IS {quoted(spec.meaning)}",
        *(
            f"COMMENT ON COLUMN {name}.{identifier(column.name)} IS {quoted(column.comment)}"
            for column in spec.columns
        ),
    )
