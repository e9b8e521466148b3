"""`whyidle agent --check`, and what the options of `whyidle agent` refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from whyidle_rules import cli


def check(file: Path, *words: str) -> int:
    return cli.main(["agent", "--check", "--config", str(file), *words])


def test_a_good_file_is_shown_with_what_is_in_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHYIDLE_KEEP_DAY", "3")
    file = tmp_path / "agent.yaml"
    file.write_text("keep: {days: 3}\n")
    assert check(file, "--free-gb", "2") == 0
    said = capsys.readouterr()
    first, _, *rows = said.out.splitlines()
    assert first == f"{file} is good; in effect:"
    assert [row.split() for row in rows if row.startswith("keep.")] == [
        ["keep.days", "3", f"{file}:1"],
        ["keep.gb", "10", "default"],
        ["keep.free_gb", "2", "command", "line"],
    ]
    assert said.err == "$WHYIDLE_KEEP_DAY is no setting; did you mean $WHYIDLE_KEEP_DAYS?\n"


def test_a_bad_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("keep: {dais: 3}\njournal: maybe\n")
    assert check(file) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"{file}:1:8: there is no setting `keep.dais`; did you mean `keep.days`?\n"
        f"{file}:2:10: `journal` has to be true or false, not 'maybe'\n"
    )


def test_rules_that_are_not_there_are_refused_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(f"rules: {{dirs: [{tmp_path}/none]}}\n")
    assert check(file) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path}/none: there is no such rule file or folder; name one that exists\n"
    )


def test_a_web_configuration_that_is_bad_is_refused_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web = tmp_path / "web.yaml"
    web.write_text("tls_server: {}\n")
    file = tmp_path / "agent.yaml"
    file.write_text(f"metrics: {{web_config: {web}}}\n")
    assert check(file) == 2
    assert capsys.readouterr().err.startswith(f"{web}:1:1: ")


@pytest.mark.parametrize("option", ["--keep-days", "--keep-gb", "--free-gb"])
@pytest.mark.parametrize("value", ["x", "0", "-1", "nan", "inf", "1e400"])
def test_what_is_no_positive_number_is_said(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["agent", f"{option}={value}"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        f"whyidle agent: argument {option}: has to be a positive number, not {value!r}; "
        "see whyidle agent --help.\n"
    )
