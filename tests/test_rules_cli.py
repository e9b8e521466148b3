from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from rule_make import RULE_TEXT, write_rule
from whyidle.errors import UserError
from whyidle_rules import rules_cli
from whyidle_rules.rule_load import load_rules


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    rules_cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["rules", *map(str, arguments)])
    assert args.run is rules_cli.run
    code: int = rules_cli.run(args)
    return code


def test_list_names_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ID", "CAUSE", "GROUP", "GRADE", "NEEDS"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert set(rows) == {rule.id for rule in load_rules()}
    assert rows["gc"] == ["gc", "host_pause/gc", "pause", "measured", "gc_s"]
    assert "no coll_transport" in next(line for line in lines if line.startswith("transfer "))
    assert all(line == line.rstrip() for line in lines)


def test_explain_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "launch_bound") == 0
    out = capsys.readouterr().out
    words = " ".join(out.split())
    rule = next(rule for rule in load_rules() if rule.id == "launch_bound")
    for text in (rule.title, rule.says, rule.why, rule.advice, rule.params[0].reason, *rule.refs):
        assert " ".join(text.split()) in words
    assert "host_pause/launch_bound: the GPU is idle because the host launched" in words
    assert "$long_gap_s 0.005" in words
    assert '"gap_s" < CAST($launch_bound__long_gap_s AS DOUBLE)' in words
    for case in rule.cases:
        assert case.name in words
    assert f"file {rule.file}" in words
    assert " open " not in words


def test_explain_tells_that_a_rule_is_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RULE_TEXT.replace("claim: gc_s", "claim: empty_s / 2")
    assert run("explain", "slow_thing", "--rules-dir", write_rule(tmp_path, text)) == 0
    assert "missing evidence holds this rule back" in " ".join(capsys.readouterr().out.split())


def test_an_unknown_rule_is_a_sentence() -> None:
    with pytest.raises(UserError, match=r"no rule 'lunch_bound'; did you mean `launch_bound`\?; "):
        run("explain", "lunch_bound")


def test_check_counts_rules_and_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = load_rules()
    cases = sum(len(rule.cases) for rule in rules)
    assert run("check") == 0
    assert f"{len(rules)} rules with {cases} cases: no problem found" in capsys.readouterr().out
    assert run("check", write_rule(tmp_path)) == 0
    assert capsys.readouterr().out == "1 rule with 2 cases: no problem found\n"


def test_check_prints_problems_and_finds_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rule(tmp_path, RULE_TEXT.replace("grade: measured", "grade: x"))
    assert run("check", "--rules-dir", tmp_path) == 1
    assert capsys.readouterr().out.startswith(f"{path}:7:8: `grade` cannot be 'x'")


@pytest.mark.parametrize("command", ["list", "test", "explain"])
def test_other_commands_cannot_run_on_broken_rules(command: str, tmp_path: Path) -> None:
    path = write_rule(tmp_path, "a: 1\na: 2")
    arguments = [command, *(["gc"] if command == "explain" else []), "--rules-dir", str(tmp_path)]
    with pytest.raises(UserError, match=f"{path}:2:1: `a` is given twice"):
        run(*arguments)


def test_test_runs_the_cases_of_the_given_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rule(tmp_path)
    assert run("test", tmp_path) == 0
    assert capsys.readouterr().out == "1 rule: 2 cases passed, 0 failed\n"
    write_rule(tmp_path, RULE_TEXT.replace("grants: 0.5", "grants: 0.75"))
    assert run("test", path) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: case `it speaks`: slow_thing was granted 0.5 s, not 0.75 s",
        "1 rule: 1 case passed, 1 failed",
    ]


def test_test_without_paths_runs_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("test") == 0
    assert capsys.readouterr().out.endswith(" cases passed, 0 failed\n")


def test_help_needs_neither_duckdb_nor_yaml() -> None:
    code = (
        "import argparse, sys; from whyidle_rules import rules_cli;"
        "rules_cli.add_parser(argparse.ArgumentParser().add_subparsers());"
        "print(sorted({'duckdb', 'yaml', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout == "[]\n", found.stderr
