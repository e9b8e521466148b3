from __future__ import annotations

import random
from pathlib import Path

import pytest

from rule_make import RULE_TEXT, write_rule
from whyidle.errors import UserError
from whyidle_rules.rule import Rule
from whyidle_rules.rule_read import read_rule
from whyidle_rules.rule_yaml import RuleError

PATH = Path("rules/host_pause/slow_thing.yaml")


def read(text: str, path: Path = PATH) -> Rule:
    return read_rule(text, path).rule


def problems(text: str, path: Path = PATH) -> list[str]:
    with pytest.raises(RuleError) as caught:
        read(text, path)
    assert isinstance(caught.value, UserError)
    return str(caught.value).splitlines()


def test_a_rule_is_read_as_written() -> None:
    rule = read(RULE_TEXT)
    assert (rule.id, rule.cause, rule.subcause, rule.group) == (
        "slow_thing",
        "host_pause",
        "gc",
        "pause",
    )
    assert rule.needs == ("gc_s",)
    assert rule.claim is not None
    assert rule.claim.text == "gc_s"
    assert rule.when is not None
    assert rule.when.params == ("least_s",)
    assert rule.share is None
    assert [(param.name, param.value) for param in rule.params] == [("least_s", 0.01)]
    assert rule.file == str(PATH)
    speaks, silent = rule.cases
    assert (speaks.name, speaks.grants_s, silent.grants_s) == ("it speaks", 0.5, 0.0)
    assert speaks.rows[0]["gc_s"] == 0.5
    assert speaks.rows[0]["d_s"] == 1.0, "the sum of its parts"
    assert speaks.rows[0]["sync_s"] == 0.0, "unnamed: 0"
    assert speaks.rows[0].get("coll_transport") is None


CHANGES = [
    ("id: slow_thing", "id: slow-thing", "1:5: `id` has to be short, in lower case"),
    ("id: slow_thing", "id: slow__thing", "1:5: `id` has to be short, in lower case"),
    ("id: slow_thing", "id: thing", "1:5: `id` has to equal the name of the file, slow_thing"),
    ("id: slow_thing", "id: no", "1:5: `id` has to be text; put no in quotes"),
    ("id: slow_thing", "id:", "1:4: `id` is empty"),
    ("title: A thing", "titel: A thing", "2:1: `rule` has no key `titel`; did you mean `title`?"),
    ("title: A thing is slow", "title: yes", "2:8: `title` has to be text; put yes in quotes"),
    ("title: A thing is slow", "title: 1:30", "2:8: `title` has to be text; put 1:30 in quotes"),
    ("title: A thing is slow", "title: [a]", "2:8: `title` has to be a value, not a list"),
    ("title: A thing is slow", 'title: "\\e[31m"', "2:8: `title` holds control characters"),
    ("cause: host_pause", "cause: host_pose", "did you mean `host_pause`?"),
    ("cause: host_pause", "cause: storage", "3:8: `cause` has to equal the folder of the file"),
    ("cause: host_pause", "cause: unattributed", "3:8: `cause` cannot be 'unattributed'"),
    ("cause: host_pause", "cause: slow_compute", "3:8: `cause` cannot be 'slow_compute'"),
    ("subcause: gc", "subcause: nfs_read", "4:11: `subcause` cannot be 'nfs_read'"),
    ("group: pause", "group: pauses", "5:8: `group` cannot be 'pauses'; did you mean `pause`?"),
    ("group: pause", "group: input", "11:8: group input shares out data_wait_s; write a `share`"),
    ("claim: gc_s", "share: gc_s", "11:8: group pause has no witness to share out"),
    ("claim: gc_s", "claim: gc_s\nshare: 1", "1:1: a rule has either a `claim` or a `share`"),
    ("claim: gc_s\n", "", "1:1: a rule has either a `claim` or a `share`"),
    ("needs: [gc_s]", "needs: [gcs]", "6:9: `needs` cannot be 'gcs'; did you mean `gc_s`?"),
    ("needs: [gc_s]", "needs: [gc_s, gc_s]", "6:15: `gc_s` is listed twice under `needs`"),
    ("needs: [gc_s]", "needs: gc_s", "6:8: `needs` has to be a list, not a value"),
    ("needs: [gc_s]", "needs: []", "6:8: `gc_s` is computed on; list it under `needs`"),
    ("needs: [gc_s]", "needs: [gc_s]\nlacks: [gc_s]", "cannot be needed and lacking at once"),
    ("grade: measured", "grade: guessed", "it is one of measured, observed, inferred"),
    ("value: 0.01", "value: 012", "9:20: `value` has to be a plain decimal number, not '012'"),
    ("value: 0.01", "value: 1:30", "9:20: `value` has to be a plain decimal number"),
    ("value: 0.01", "value: 1_000", "9:20: `value` has to be a plain decimal number"),
    ("value: 0.01", "value: .5", "9:20: `value` has to be a plain decimal number"),
    ("value: 0.01", "value: .inf", "9:20: `value` has to be a plain decimal number"),
    ("value: 0.01", "value: 1e999", "9:20: `value` is too large"),
    ("value: 0.01", "value: yes", "9:20: `value` has to be a plain decimal number"),
    ("value: 0.01, reason", "reason", "9:12: `params.least_s` lacks `value`"),
    ("reason: Shorter ones do not matter.", "reason: ''", "9:34: `reason` is empty"),
    ("  least_s:", "  Least:", "9:3: a parameter is named in lower case"),
    ("  least_s:", "  gc_s:", "9:3: a parameter is named in lower case, and not as a column"),
    ("when: gc_s > $least_s", "when: gc_s > 1", "no expression uses $least_s"),
    ("when: gc_s > $least_s", "when: gc_s > $lest_s", "10:14: `when`: no parameter `lest_s`"),
    ("when: gc_s > $least_s", "when: gc_s", "10:7: `when`: this is a number; a truth is needed"),
    ("claim: gc_s", "claim: gc_z", "11:8: `claim`: no evidence column `gc_z`; did you mean `gc_s`"),
    ("claim: gc_s", "claim: >-\n  gc_s +\n  gcs", "13:3: `claim`: no evidence column `gcs`"),
    ("claim: gc_s", "claim: 'gc_s + read_text(1)'", "11:16: `claim`: no function `read_text`"),
    ("claim: gc_s", "claim: [gc_s]", "11:8: `claim` has to be a value, not a list"),
    ("claim: gc_s", "claim:", "11:7: `claim`: a value is missing before 'the end'"),
    ("{idle_s:.1f}", "{idel_s:.1f}", "12:22: `says`: nothing is called `idel_s`"),
    ("{idle_s:.1f}", "{idle_s.real}", "12:22: `says`: `{idle_s.real}`: only {name}"),
    ("{idle_s:.1f}", "long", "12:7: `says` gives no number"),
    ("why: It is slow.", "why: null", "13:6: `why` has to be text; put null in quotes"),
    ("advice: Make it fast.\n", "", "1:1: `rule` lacks `advice`"),
    ("owner: application", "owner: me", "15:8: `owner` cannot be 'me'"),
    ("refs: [https", "refs: [http", "16:8: `refs` are https:// addresses"),
    ("refs: [https://docs.python.org/3/library/gc.html]", "refs: []", "16:7: `refs` is empty"),
    ("cases:\n", "cases: []\nrest:\n", "`rule` has no key `rest`"),
    ("it is silent", "it speaks", "22:5: two cases are called `it speaks`"),
    ("grants: 0\n", "grants: 0.25\n", "no case stays silent; add one with `grants: 0`"),
    ("grants: 0.5\n", "grants: 0\n", "no case speaks; add one with `grants` above 0"),
    ("grants: 0.5\n", "grants: -1\n", "21:13: `grants` has to be 0 or more seconds"),
    ("grants: 0.5\n", "grants: half\n", "21:13: `grants` has to be a plain decimal number"),
    ("gc_s: 0.5}", "gcs: 0.5}", "19:25: no evidence column `gcs`; did you mean `gc_s`?"),
    ("gc_s: 0.5}", "gc_s: '0.5'}", "19:31: `gc_s` has to be a plain decimal number"),
    ("gc_s: 0.5}", "gc_s: -0.5}", "19:31: `gc_s` cannot be below 0"),
    ("gc_s: 0.5}", "data_workers: 0.5}", "19:39: `data_workers` has to be a whole number"),
    ("gc_s: 0.5}", "data_workers: 99999999999}", "19:39: `data_workers` is too large"),
    ("gc_s: 0.5}", "coll_transport: no}", "19:41: `coll_transport` has to be text"),
    ("gc_s: 0.5}", "window_id: 1}", "no evidence column `window_id`"),
    ("rows: [{empty_s: 1, gc_s: 0.5}]", "rows: []", "19:11: a case needs at least one row"),
    ("unnamed: 0\n    grants: 0.5", "unnamed: 1\n    grants: 0.5", "`unnamed` cannot be '1'"),
]


@pytest.mark.parametrize(("old", "new", "message"), CHANGES, ids=range(len(CHANGES)))
def test_every_mistake_is_found_where_it_is(old: str, new: str, message: str) -> None:
    assert old in RULE_TEXT
    found = problems(RULE_TEXT.replace(old, new, 1))
    prefix = f"{PATH}:{message}" if message[0].isdigit() else message
    assert any(line.startswith(prefix) or message in line for line in found), found
    assert all(line.startswith(f"{PATH}:") for line in found)


def test_all_mistakes_come_at_once() -> None:
    text = RULE_TEXT
    for old, new in [
        ("title: A thing is slow\n", ""),
        ("grade: measured", "grade: x"),
        ("claim: gc_s", "claim: gcs"),
        ("owner: application", "owner: x"),
        ("says: The", "say: The"),
        ("grants: 0.5", "grants: x"),
    ]:
        text = text.replace(old, new, 1)
    lines = [line.removeprefix(f"{PATH}:").split(":")[0] for line in problems(text)]
    assert lines == ["1", "6", "10", "11", "14", "20"]


def test_a_rule_that_is_no_mapping_is_refused() -> None:
    assert problems("- a") == [f"{PATH}:1:1: `rule` has to be a mapping, not a list"]
    assert problems("just words") == [f"{PATH}:1:1: `rule` has to be a mapping, not a value"]


def test_null_in_a_row_is_unknown_and_other_words_for_it_are_not() -> None:
    text = RULE_TEXT.replace("gc_s: 0.5}", "gc_s: 0.5, sync_s: null, coll_transport: null}", 1)
    row = read(text).cases[0].rows[0]
    assert row["sync_s"] is None
    assert row["coll_transport"] is None
    assert problems(text.replace("sync_s: null", "sync_s: ~")) != []


def test_a_quoted_parameter_is_text() -> None:
    text = RULE_TEXT.replace("value: 0.01", "value: 'ib'").replace(
        "gc_s > $least_s", "coll_transport = $least_s"
    )
    text = text.replace("needs: [gc_s]", "needs: [gc_s, coll_transport]")
    assert read(text).params[0].value == "ib"
    assert "a text and a number do not mix" not in text


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_file_is_a_rule_or_a_list_of_problems(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    text = list(RULE_TEXT)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(text))
        text[at : at + draw.randint(0, 3)] = draw.choices("{}[]:,'\"|>&*!%@`#-? \n\t0ab\x00é", k=2)
    path = write_rule(tmp_path)
    try:
        read("".join(text), path)
    except RuleError as error:
        assert error.problems
        assert all(line.startswith(f"{path}:") for line in str(error).splitlines())
