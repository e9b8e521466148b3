"""What the rules cost: loading them, and allocating windows of synthetic evidence on one thread.

Goals: 10,000 windows in 80 ms with compilation, 300,000 windows in a second.
`python tests/bench/bench_rules.py [--windows N ...]`
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from whyidle_rules import database, evidence
from whyidle_rules.allocate import allocate
from whyidle_rules.rule_load import load_rules

EXCLUSIVE = [column.name for column in evidence.OBSERVED if column.exclusive]


def column_sql(column: evidence.Column) -> str:
    """Return a value for window `i`: pieces of 0.1 ms, a third of them each kind of time."""
    if column.name == "window_id":
        return "i"
    if column.name in ("working_s", "empty_s", "spinning_s"):
        kind = ("working_s", "empty_s", "spinning_s").index(column.name)
        return f"CASE WHEN i % 3 = {kind} THEN 1e-4 ELSE 0 END"
    if column.name == "gap_s":
        return "(i % 100) * 1e-4"
    if column.exclusive:
        kind = EXCLUSIVE.index(column.name)
        return f"CASE WHEN hash(i) % {len(EXCLUSIVE)} = {kind} THEN 1e-4 ELSE 0 END"
    if column.type == "DOUBLE":
        return "0.0"
    return "NULL" if column.type == "VARCHAR" else "0"


def best_ms(call: Callable[[], object], times: int = 5) -> tuple[float, float]:
    """Return milliseconds of the first and of the best call."""
    took: list[float] = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        took.append((time.perf_counter() - begin) * 1e3)
    return took[0], min(took)


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, nargs="*", default=[0, 10_000, 300_000])
    args = parser.parse_args()
    first, best = best_ms(load_rules)
    rules = load_rules()
    sys.stdout.write(f"load {len(rules)} rules: first {first:.1f} ms, best {best:.1f} ms\n")
    for windows in args.windows:
        with database.memory() as con:
            con.execute(evidence.ddl("evidence"))
            columns = ", ".join(
                f"CAST({column_sql(column)} AS {column.type})" for column in evidence.COLUMNS
            )
            con.execute(f"INSERT INTO evidence SELECT {columns} FROM range({windows}) t(i)")
            first, best = best_ms(lambda con=con: allocate(con, rules))  # type: ignore[misc]
            sys.stdout.write(f"{windows} windows: first {first:.1f} ms, best {best:.1f} ms\n")


if __name__ == "__main__":
    main()
