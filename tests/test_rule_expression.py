from __future__ import annotations

import math
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rule_reference import evaluate
from whyidle_rules import evidence
from whyidle_rules.case import fill, sandbox
from whyidle_rules.expression import FUNCTIONS, Expression, Kind
from whyidle_rules.expression_parser import ExpressionError, parse
from whyidle_rules.rule import Value

PARAMS: dict[str, Kind] = {"p": "number", "fabric": "text"}
VALUES: dict[str, Value] = {"p": 0.5, "fabric": "nvlink"}


def ask_duckdb(expression: Expression, row: dict[str, Value]) -> object:
    with sandbox() as con:
        fill(con, [row])
        used = {f"x__{name}": VALUES[name] for name in expression.params}
        sql = f"SELECT {expression.sql('x__')} FROM evidence"
        found = con.execute(sql, used or None).fetchone()
        assert found is not None
        value: object = found[0]
        return value


NUMBERS = [
    ("1 + 2 * 3", 7.0),
    ("(1 + 2) * 3", 9.0),
    ("-2 - -3", 1.0),
    ("10 - 4 - 3", 3.0),
    ("2 / 4", 0.5),
    ("7 % 4", 3.0),
    ("gc_s / 0", None),
    ("gc_s / (gc_s - gc_s)", None),
    ("2147483647 * 2147483647", 2147483647.0**2),
    ("data_workers * 2147483647", 8.0 * 2147483647),
    ("gc_s * $p", 0.125),
    ("GC_S", 0.25),
    ("least(gc_s, 1, $p)", 0.25),
    ("greatest(gc_s - 1, 0)", 0.0),
    ("greatest(logging_s, 0)", None),  # unknown does not become 0
    ("nullif(gc_s, 0.25)", None),
    ("abs(-1.5) + ceil(0.2) + floor(-0.2) + round(2.5) + sign(-3)", 3.5),
    (f"({' + '.join(['sign(1)'] * 12)}) * ({' + '.join(['sign(1)'] * 12)})", 144.0),
    ("CASE WHEN gc_s > 1 THEN 1 WHEN gc_s > 0.1 THEN 2 ELSE 3 END", 2.0),
    ("CASE WHEN gc_s > 1 THEN 1 END", None),
    ("CASE WHEN logging_s > 1 THEN 1 ELSE 0 END", None),  # neither does a decision on it
    ("gc_s + logging_s", None),
    ("1e3 + .5 + 1. + 2E-1", 1001.7),
]


@pytest.mark.parametrize(("text", "expected"), NUMBERS)
def test_numbers(text: str, expected: float | None) -> None:
    row: dict[str, Value] = {"gc_s": 0.25, "data_workers": 8}
    expression = parse(text, PARAMS, "number")
    assert ask_duckdb(expression, row) == expected
    assert evaluate(expression, row, VALUES) == expected


TRUTHS = [
    ("gc_s = 0.25 AND data_workers <> 0", True),
    ("gc_s > 1 OR NOT gc_s > 1", True),
    ("NOT NOT gc_s >= 0.25", True),
    ("gc_s BETWEEN 0 AND 1 AND true", True),
    ("gc_s NOT BETWEEN 0 AND 1", False),
    ("coll_transport = $fabric", True),
    ("coll_transport IN ('ib', 'nvlink')", True),
    ("coll_transport NOT IN ('ib', 'it''s')", True),
    ("coll_transport == 'NVLINK' OR coll_transport != 'nvlink'", False),
    ("logging_s > 1", None),
    ("logging_s > 1 AND gc_s > 1", False),
    ("logging_s > 1 OR gc_s < 1", True),
    ("NOT logging_s > 1", None),
    ("logging_s IN (1, 2)", None),
    ("gc_s <= 0.25 AND gc_s < 0.3 AND coll_transport >= 'a'", True),
]


@pytest.mark.parametrize(("text", "expected"), TRUTHS)
def test_truths(text: str, expected: bool | None) -> None:
    row: dict[str, Value] = {"gc_s": 0.25, "data_workers": 8, "coll_transport": "nvlink"}
    expression = parse(text, PARAMS, "truth")
    assert ask_duckdb(expression, row) is expected
    assert evaluate(expression, row, VALUES) is expected


REFUSED = [
    ("(SELECT 1)", 1, "an expression cannot hold a query"),
    ("gc_s) , (SELECT 1", 4, "`)` is not expected here"),
    ("gc_s FROM evidence", 5, "an expression cannot hold a query"),
    ("gc_s; DROP TABLE grants", 4, "`; DROP TABLE` has no meaning in an expression"),
    ("gc_s -- , 1", 5, "comments belong into the YAML, not into the expression"),
    ("gc_s /* x */ + 1", 5, "comments belong into the YAML, not into the expression"),
    ("read_text('/etc/passwd')", 0, "no function `read_text` in rules"),
    ("getenv('HOME')", 0, "no function `getenv` in rules"),
    ("sum(gc_s)", 0, "no function `sum` in rules"),
    ("absolute(gc_s)", 0, "no function `absolute` in rules"),
    ("abs(gc_s) OVER ()", 10, "window functions are not allowed"),
    ("abs()", 4, "a value is missing"),
    ("abs(1, 2)", 0, "`abs` takes 1 arguments"),
    ("least(1)", 0, "`least` takes 2 to 8 arguments"),
    ("gc_s IS NULL", 5, "IS is not allowed: list a column that must be known under `needs`"),
    ("coalesce(gc_s, 0)", 0, "COALESCE is not allowed"),
    ("cast(gc_s AS VARCHAR)", 0, "CAST is not allowed"),
    ("gc_s::VARCHAR", 4, "has no meaning"),
    ("coll_transport LIKE 'nv%'", 15, "LIKE is not allowed"),
    ("gc_sec", 0, "no evidence column `gc_sec`; did you mean `gc_s`?"),
    ("evidence.gc_s", 8, "has no meaning"),
    ('"gc_s"', 0, "has no meaning"),
    ("$q", 0, "no parameter `q` under `params`"),
    ("$1", 0, "has no meaning"),
    ("?", 0, "has no meaning"),
    ("gc_s +", 6, "a value is missing before 'the end'"),
    ("", 0, "a value is missing before 'the end'"),
    ("gc_s gc_s", 5, "`gc_s` is not expected here"),
    ("(gc_s", 5, "`)` is missing here"),
    ("gc_s > 1", 0, "this is a truth; a number is needed"),
    ("gc_s + 'x'", 7, "this is a text; a number is needed"),
    ("gc_s = 'x'", 7, "a number and a text do not mix"),
    ("CASE WHEN gc_s THEN 1 END", 10, "this is a number; a truth is needed"),
    ("CASE WHEN true THEN 1 ELSE 'x' END", 27, "a number and a text do not mix"),
    ("CASE gc_s WHEN 1 THEN 1 END", 5, "`WHEN` is missing here"),
    ("CASE WHEN true THEN 1", 21, "`END` is missing here"),
    ("gc_s NOT 1", 9, "BETWEEN or IN is missing after NOT"),
    ("gc_s IN ()", 9, "a value is missing"),
    ("1e999", 0, "this number is too large"),
    ("0x10", 0, "has no meaning"),
    ("1_000", 0, "has no meaning"),
    ("then", 0, "THEN is not expected here"),
    ("[gc_s]", 0, "has no meaning"),
    ("x -> x + 1", 0, "no evidence column `x`"),
    ("(" * 100 + "1" + ")" * 100, 32, "nested more than 32 deep"),
    ("-" + " -" * 200 + "1", None, "nested more than 32 deep"),
    ("NOT " * 100 + "true", None, "nested more than 32 deep"),
    ("1" + " + 1" * 100, None, "more than 32 terms in a row"),
    (" " * 3000, 0, "an expression has at most 2000 characters"),
    ("'open", 0, "has no meaning"),
    ("٣", 0, "has no meaning"),
]


@pytest.mark.parametrize(("text", "offset", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_expression_is_refused_at_its_place(
    text: str, offset: int | None, message: str
) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text, PARAMS, "number")
    assert message in caught.value.message
    assert offset is None or caught.value.offset == offset


def test_columns_params_and_amounts() -> None:
    text = "CASE WHEN gap_s < $p THEN least(gc_s, sync_s * data_workers) ELSE logging_s END"
    expression = parse(text, PARAMS, "number")
    assert expression.columns == ("data_workers", "gap_s", "gc_s", "logging_s", "sync_s")
    assert expression.params == ("p",)
    assert expression.amounts == ("data_workers", "gc_s", "logging_s", "sync_s")


NAMES = [column.name for column in evidence.OBSERVED if column.type == "DOUBLE"]
LEAVES = st.one_of(
    st.sampled_from(["gc_s", "sync_s", "gap_s", "data_workers", "$p", "logging_s"]),
    st.integers(0, 9).map(str),
    st.sampled_from(["0.5", "1e-3", "2.25"]),
)
TERMS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda text: f"-({text})"),
        st.tuples(st.sampled_from(["least", "greatest"]), inner, inner).map(
            lambda t: f"{t[0]}({t[1]}, {t[2]})"
        ),
        st.tuples(st.sampled_from(["abs", "sign"]), inner).map(lambda t: f"{t[0]}({t[1]})"),
        st.tuples(inner, st.sampled_from(["<", ">=", "=", "<>"]), inner, inner, inner).map(
            lambda t: f"CASE WHEN {t[0]} {t[1]} {t[2]} THEN {t[3]} ELSE {t[4]} END"
        ),
    ),
    max_leaves=10,
)
SECONDS = st.one_of(st.none(), st.integers(0, 40).map(lambda n: n / 8))


@settings(max_examples=40, deadline=None)
@given(text=TERMS, gc_s=SECONDS, sync_s=SECONDS, gap_s=SECONDS, workers=st.integers(0, 8))
def test_what_duckdb_computes_is_what_the_tree_means(
    text: str, gc_s: float | None, sync_s: float | None, gap_s: float | None, workers: int
) -> None:
    row: dict[str, Value] = {"gc_s": gc_s, "sync_s": sync_s, "gap_s": gap_s, "logging_s": None}
    row["data_workers"] = workers
    expression = parse(text, PARAMS, "number")
    ours, theirs = evaluate(expression, row, VALUES), ask_duckdb(expression, row)
    if ours is None or theirs is None:
        assert ours is theirs
    else:
        assert isinstance(ours, float)
        assert isinstance(theirs, float)
        assert math.isclose(ours, theirs, rel_tol=1e-12)


WORDS = [*FUNCTIONS, *NAMES[:6], "AND", "OR", "NOT", "CASE", "WHEN", "THEN", "END", "IN", "BETWEEN"]
PIECES = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(["(", ")", ",", "+", "-", "*", "'", "$p", "1", "0.5", "<", "=", ";", "SELECT"]),
    st.text(alphabet=string.printable, max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(PIECES, max_size=20))
def test_any_text_is_parsed_or_refused(pieces: list[str]) -> None:
    text = " ".join(pieces)
    try:
        expression = parse(text, PARAMS, "number")
    except ExpressionError as error:
        assert 0 <= error.offset <= len(text)
    else:
        assert set(expression.columns) <= set(evidence.BY_NAME)
        assert set(expression.params) <= set(PARAMS)
