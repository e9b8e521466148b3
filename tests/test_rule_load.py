from __future__ import annotations

from pathlib import Path

import pytest

from rule_make import RULE_TEXT, write_rule
from whyidle_rules.rule_load import BUILTIN, load_rules
from whyidle_rules.rule_yaml import RuleError


def lines(*overlays: Path, site: Path) -> list[str]:
    with pytest.raises(RuleError) as caught:
        load_rules(overlays, site=site)
    return str(caught.value).splitlines()


def test_rules_come_by_id_and_later_ones_replace_earlier_ones(tmp_path: Path) -> None:
    site, mine = tmp_path / "site", tmp_path / "mine"
    builtin = {rule.id for rule in load_rules(site=site)}
    write_rule(site)
    text = RULE_TEXT.replace("id: slow_thing", "id: gc").replace("A thing is slow", "Ours")
    write_rule(site, text, "host_pause/gc")
    write_rule(mine, RULE_TEXT.replace("A thing is slow", "Mine"))
    rules = load_rules([mine], site=site)
    assert [rule.id for rule in rules] == sorted(builtin | {"slow_thing"})
    by_id = {rule.id: rule for rule in rules}
    assert by_id["gc"].title == "Ours"
    assert by_id["slow_thing"].title == "Mine"
    assert by_id["slow_thing"].file == str(mine / "host_pause" / "slow_thing.yaml")
    assert by_id["logging"].file == str(BUILTIN / "host_pause" / "logging.yaml")


def test_an_overlay_may_be_one_file(tmp_path: Path) -> None:
    path = write_rule(tmp_path)
    (tmp_path / "host_pause" / "broken.yaml").write_text("- nothing", encoding="utf-8")
    assert "slow_thing" in {rule.id for rule in load_rules([path], site=tmp_path / "none")}


def test_problems_of_all_files_come_at_once(tmp_path: Path) -> None:
    first = write_rule(tmp_path, RULE_TEXT.replace("grade: measured", "grade: x"))
    second = write_rule(tmp_path, "a: 1\na: 2", "storage/other")
    found = lines(tmp_path, site=tmp_path / "none")
    assert found == [
        f"{first}:7:8: `grade` cannot be 'x'; it is one of measured, observed, inferred",
        f"{second}:2:1: `a` is given twice",
    ]


def test_what_is_out_of_place_is_named(tmp_path: Path) -> None:
    write_rule(tmp_path, RULE_TEXT, "slow_thing")
    (tmp_path / "host_pause").mkdir()
    (tmp_path / "host_pause" / "other.yml").write_text("a: 1", encoding="utf-8")
    (tmp_path / "host_pause" / ".hidden.yaml").write_text("a: 1", encoding="utf-8")
    (tmp_path / "host_pause" / "README.md").write_text("about", encoding="utf-8")
    missing = tmp_path / "missing"
    assert lines(tmp_path, missing, site=tmp_path / "none") == [
        f"{tmp_path}/host_pause/other.yml: a rule file ends in .yaml; rename it",
        f"{missing}: there is no such rule file or folder; name one that exists",
        f"{tmp_path}/slow_thing.yaml: move it into a folder named after its cause",
    ]


def test_two_files_of_one_folder_cannot_share_an_id(tmp_path: Path) -> None:
    first = write_rule(tmp_path)
    text = RULE_TEXT.replace("cause: host_pause", "cause: lifecycle").replace(
        "subcause: gc", "subcause: startup"
    )
    second = write_rule(tmp_path, text, "lifecycle/slow_thing")
    found = lines(tmp_path, site=tmp_path / "none")
    assert found == [f"{second}: {first} has the same id; rename one of them"]


def test_a_folder_whose_reading_fails_is_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    write_rule(site)
    whole = Path.iterdir

    def denied(self: Path) -> object:
        if self == site:
            raise PermissionError(13, "Permission denied")
        return whole(self)

    monkeypatch.setattr(Path, "iterdir", denied)
    message = f"{site}: cannot be read (Permission denied); check permissions"
    assert lines(site=site) == [message]


def fallback(tmp_path: Path, text: str) -> list[str]:
    path = write_rule(tmp_path, text)
    return [line.removeprefix(f"{path}:") for line in lines(tmp_path, site=tmp_path / "none")]


def test_a_rule_that_lacks_a_column_stands_in_for_rules_of_its_own_cause(tmp_path: Path) -> None:
    text = RULE_TEXT.replace("needs: [gc_s]", "needs: [gc_s]\nlacks: [coll_transport]")
    assert fallback(tmp_path, text) == [
        "7:8: no rule of group pause needs `coll_transport`, so none is stood in for"
    ]
    text = RULE_TEXT.replace("needs: [gc_s]", "needs: [gc_s]\nlacks: [compile_s]")
    assert {rule.id for rule in load_rules([write_rule(tmp_path, text)], site=tmp_path / "none")}
    text = text.replace("cause: host_pause", "cause: hardware")
    path = write_rule(
        tmp_path, text.replace("subcause: gc", "subcause: xid"), "hardware/slow_thing"
    )
    found = lines(path, site=tmp_path / "none")
    assert found == [f"{path}:7:8: compile needs `compile_s` too and has another cause"]
