from __future__ import annotations

import dataclasses

import pytest

from rule_make import make_rule
from whyidle_rules.says import TemplateError, check, fields, render

SAMPLES: dict[str, float | int | str] = {"idle_s": 1.5, "late_rank": 1, "ranks": "0-2"}


def test_numbers_are_formatted_and_unknown_is_said() -> None:
    values = {"idle_s": 1234.5678, "share": 0.1234, "late_rank": 3.0, "ranks": None, "n": 2}
    assert render("{idle_s:,.1f} s, {share:.1%}", values) == "1,234.6 s, 12.3%"
    assert render("rank {late_rank:d} of {ranks} {{ok}} {n}", values) == "rank 3 of unknown {ok} 2"


def test_a_missing_name_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError):
        render("{idle_s}", {})


def test_a_rule_fills_in_its_own_parameters() -> None:
    rule = make_rule("a", "pause", "gc_s", when="gc_s > $least_s", params={"least_s": 0.005})
    rule = dataclasses.replace(rule, says="{idle_s:.2f} s in gaps over {least_s:g} s")
    assert rule.render_says({"idle_s": 1.0}) == "1.00 s in gaps over 0.005 s"


def test_values_are_never_read_as_templates() -> None:
    assert render("on {ranks}", {"ranks": "{idle_s} {0.__class__}"}) == "on {idle_s} {0.__class__}"


REFUSED = [
    ("{}", 0, "only {name} or {name:format} is allowed"),
    ("{0}", 0, "only {name}"),
    ("ab {idle_s.real}", 3, "only {name}"),
    ("ab {{}} {idle_s[0]}", 8, "only {name}"),
    ("{idle_s!r}", 0, "only {name}"),
    ("{idle_s:{late_rank}}", 0, "is not a format"),
    ("{idle_s:>99999999}", 0, "is not a format"),
    ("{idle_s:.99999999f}", 0, "is not a format"),
    ("{idle_s:x}", 0, "is not a format"),
    ("{idle_s", 0, "expected '}'"),
    ("idle}", 0, "Single '}'"),
    ("a {idel_s}", 2, "nothing is called `idel_s`; did you mean `idle_s`?"),
    ("a {ranks:.1f}", 2, "Unknown format code 'f'"),
    ("a {idle_s:d}", 2, "Unknown format code 'd'"),
]


@pytest.mark.parametrize(("template", "offset", "message"), REFUSED)
def test_other_templates_are_refused(template: str, offset: int, message: str) -> None:
    with pytest.raises(TemplateError) as caught:
        for field in fields(template):
            check(field, SAMPLES)
    assert message in caught.value.message
    assert caught.value.offset == offset
