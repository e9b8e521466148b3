"""The shape of the house: layers, doors, sizes. A broken rule here is a broken design."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "whyidle": ROOT / "agent" / "whyidle",
    "whyidle_probe": ROOT / "agent" / "whyidle_probe",
    "whyidle_rules": ROOT / "rules" / "whyidle_rules",
}
# What a package may import besides itself and the standard library; None stands for anything.
MAY_IMPORT: dict[str, frozenset[str] | None] = {
    "whyidle_probe": frozenset(),
    "whyidle": None,
    "whyidle_rules": None,
}
NEVER: dict[str, frozenset[str]] = {
    "whyidle": frozenset({"whyidle_rules", "whyidle_probe"}),
    "whyidle_rules": frozenset({"whyidle_probe"}),
    "whyidle_probe": frozenset({"whyidle", "whyidle_rules"}),
}
LINES_MAX = 400
FUNCTION_LINES_MAX = 60


def sources(package: str) -> list[Path]:
    return sorted(PACKAGES[package].rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


ALL_SOURCES = [path for package in PACKAGES for path in sources(package)]


@pytest.mark.parametrize("package", PACKAGES)
def test_layers(package: str) -> None:
    assert sources(package)
    allowed = MAY_IMPORT[package]
    for path in sources(package):
        for name in imports(ast.parse(path.read_text(encoding="utf-8"))):
            top = name.partition(".")[0]
            assert top not in NEVER[package], f"{path}: imports {name}"
            known = top in sys.stdlib_module_names or top == package
            assert allowed is None or known or top in allowed, f"{path}: imports {name}"


def test_only_the_clock_knows_the_time() -> None:
    for path in sources("whyidle"):
        found = set(imports(ast.parse(path.read_text(encoding="utf-8"))))
        assert "time" not in found or path.name == "clock.py", path


@pytest.mark.parametrize("path", ALL_SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES_MAX
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{path}: {node.name} has {lines} lines"


def test_the_source_roots_hold_only_our_packages() -> None:
    for root in ("agent", "rules"):
        inside = {
            path.name for path in (ROOT / root).iterdir() if not path.name.startswith(("_", "."))
        }
        assert inside <= set(PACKAGES), f"{root}/ makes {inside} importable"


def runtime_imports(tree: ast.AST, names: Collection[str]) -> Iterator[str]:
    """Modules that are imported with a module, or when its functions run; not for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from runtime_imports(other, names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for inside in (f"{module}.{alias.name}" for alias in node.names):
                yield inside if inside in names else module
        else:
            yield from runtime_imports(node, names)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    root = PACKAGES[package].parent
    names = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources(package)
    }
    graph = {
        name: {
            other
            for other in runtime_imports(ast.parse(path.read_text(encoding="utf-8")), names)
            if other in names and other != name
        }
        for name, path in names.items()
    }
    while graph:
        free = {name for name, others in graph.items() if not others & graph.keys()}
        assert free, f"circles of imports among {sorted(graph)}"
        graph = {name: others for name, others in graph.items() if name not in free}
