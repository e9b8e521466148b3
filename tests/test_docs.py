"""The documentation says what the product does: generated blocks, examples, names, links."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from docs_blocks import BLOCK, BLOCKS, ROOT, help_text, rewritten
from recording_kit import sample
from whyidle.clock import NS_PER_S, VirtualClock
from whyidle.collect import ALL
from whyidle.store import Recording
from whyidle_rules import cli, diagnosis
from whyidle_rules.expression import FUNCTIONS
from whyidle_rules.rule_read import _OPTIONAL, _REQUIRED
from world.machine import Machine

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
REWRITE = "WHYIDLE_WRITE_DOCS"


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def examples(path: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(path), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_generated_blocks_are_up_to_date(path: Path) -> None:
    page = text(path)
    made = rewritten(page)
    if os.environ.get(REWRITE) == "1":
        path.write_text(made, encoding="utf-8")
        page = made
    assert page == made, f"run: {REWRITE}=1 .venv/bin/python -m pytest tests/test_docs.py"


def test_every_block_stands_in_one_place() -> None:
    found = sorted(match[2] for path in PAGES for match in BLOCK.finditer(text(path)))
    assert found == sorted(BLOCKS)
    marks = sum(text(path).count("<!-- generated:") for path in PAGES)
    assert marks == len(BLOCKS), "a mark without its end"


def _anchors(page: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(path)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), target
        assert not anchor or anchor in _anchors(text(there)), target


def _commands(path: Path) -> list[list[str]]:
    lines = [line for block in examples(path, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


def test_commands_can_be_given_as_they_are_written() -> None:
    parsers = {"diagnose": cli.diagnose_parser(), "whyidle": cli.whyidle_parser()}
    seen = set()
    for words in _commands(README):
        name = Path(words[0]).name
        if name in parsers:
            parsers[name].parse_args(words[1:])  # leaves the test where it cannot be parsed
            seen.add(name)
    assert seen == set(parsers)


def test_make_targets_exist() -> None:
    makefile = text(ROOT / "Makefile")
    told = set(re.findall(r"\bmake ([a-z-]+)", " ".join(re.findall(r"`[^`]+`", text(README)))))
    told |= {words[1] for words in _commands(README) if words[0] == "make"}
    assert told >= {"demo", "test"}
    for target in told:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_paths_that_contributors_are_sent_to_exist() -> None:
    _, _, section = text(README).partition("## Contributing")
    for path in re.findall(r"`((?:agent|rules|tests|fixtures|docs|\.ci)/[^`]*)`", section):
        assert (ROOT / path.replace("<cause>/", "")).exists(), path


def test_the_example_rule_is_a_good_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rule,) = examples(README, "yaml")
    (where,) = re.findall(r"in `my-rules/(\S+\.yaml)`:", text(README))
    path = tmp_path / where
    path.parent.mkdir()
    path.write_text(rule)
    for command, said in (
        ("check", "1 rule with 2 cases: no problem found\n"),
        ("test", "1 rule: 2 cases passed, 0 failed\n"),
    ):
        code = cli.main(["rules", command, str(tmp_path)])
        assert (code, capsys.readouterr().out) == (0, said)


def test_python_examples_are_python() -> None:
    for source in examples(README, "python"):
        compile(source, "README.md", "exec")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    clock = VirtualClock(100 * NS_PER_S)
    machine = Machine(5, clock=clock)
    sample(folder, ALL, dict.fromkeys(ALL, machine).__getitem__, machine, clock, 20)
    return folder


@pytest.mark.parametrize("query", examples(README, "sql"), ids=["busy", "processes", "ticks"])
def test_queries_answer(query: str, recording: Path) -> None:
    with Recording([recording]) as opened:
        found = opened.con.sql(query)
        rows = found.fetchall()
        assert len(rows) > 1
        # The numbers are there: each column is known in some row.
        for place, column in enumerate(found.columns):
            assert any(row[place] is not None for row in rows), column
        if "busy_ratio" in found.columns:
            assert all(0 <= row[-1] <= 1 for row in rows)


def test_every_field_of_the_contract_is_explained() -> None:
    _, _, section = text(README).partition("\n## JSON\n")
    section = section.partition("\n## ")[0]
    told = set(re.findall(r"`(\w+)`", section))
    for one in (
        diagnosis.Diagnosis,
        diagnosis.Run,
        diagnosis.Totals,
        diagnosis.LedgerRow,
        diagnosis.Root,
        diagnosis.RootCause,
        diagnosis.GpuLedger,
        diagnosis.TracePartition,
        diagnosis.StepPartition,
        diagnosis.Finding,
        diagnosis.NotSeen,
        diagnosis.Quality,
    ):
        names = {field.name for field in fields(one)}
        assert names <= told, (one.__name__, names - told)
    (example,) = examples(ROOT / "docs" / "json.md", "json")
    assert json.loads(example)["schema"] == diagnosis.SCHEMA


def test_every_field_of_a_rule_is_explained() -> None:
    page = text(ROOT / "docs" / "rules.md")
    _, _, section = page.partition("\n## Fields\n")
    section = section.partition("\n## ")[0]
    told = set(re.findall(r"`(\w+)`", section))
    assert {*_REQUIRED, *_OPTIONAL} <= told
    assert set(FUNCTIONS) <= told


def test_help_is_drawn_from_the_parser() -> None:
    drawn = help_text(cli.diagnose_parser())
    for option in ("--json", "-v, --verbose", "--colour auto|always|never", "--rules-dir DIR"):
        assert f"\n  {option} " in drawn
    assert max(map(len, drawn.splitlines())) <= 80
