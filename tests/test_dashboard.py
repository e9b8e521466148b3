"""Dashboard, recording and alert rules: what they ask for exists, and promtool agrees with them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import dashboard
from live_kit import program
from whyidle.causes import CAUSES
from whyidle.metrics_own import FAMILIES

ROOT = Path(__file__).parents[1]
RULES = ROOT / "prometheus" / "whyidle.rules.yml"
TESTS = ROOT / "prometheus" / "whyidle.test.yml"
REWRITE = "WHYIDLE_WRITE_DOCS"


def expressions() -> list[str]:
    """Return what the dashboard asks for."""
    return [
        target["expr"] for panel in dashboard.dashboard()["panels"] for target in panel["targets"]
    ]


def recorded() -> list[dict[str, str]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_dashboard_is_up_to_date() -> None:
    if os.environ.get(REWRITE) == "1":
        dashboard.PATH.write_text(dashboard.made(), encoding="utf-8")
    text = dashboard.PATH.read_text(encoding="utf-8")
    assert text == dashboard.made(), f"run: {REWRITE}=1 pytest tests/test_dashboard.py"


def test_causes_have_the_colours_of_the_report() -> None:
    (panel,) = [
        one for one in dashboard.dashboard()["panels"] if one["title"] == "GPUs idle, by cause"
    ]
    colours = {
        override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
    }
    assert colours == {cause.slug: cause.colour for cause in CAUSES if not cause.root_only}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_what_is_asked_for_exists() -> None:
    known = {family.series for family in FAMILIES} | {
        rule["record"] for rule in recorded() if "record" in rule
    }
    labels = {
        name for family in FAMILIES for name in (*family.labels, getattr(family, "by", ""))
    } | {"instance"}
    asked = [*expressions(), *(rule["expr"] for rule in recorded())]
    assert len(asked) > 20
    for expression in asked:
        names = re.findall(r"\b(?:[a-z_]+:)?whyidle_\w+(?::\w+)?", expression)
        assert names, expression
        assert set(names) <= known, expression
        for group in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", expression):
            assert {word.strip() for word in group.split(",") if word.strip()} <= labels, expression


def test_causes_that_alerts_name_exist() -> None:
    causes = {cause.slug for cause in CAUSES if not cause.root_only}
    named = [
        word
        for rule in recorded()
        for text in re.findall(r'cause(?:!~|=~|!=|=)"([^"]+)"', rule["expr"])
        for word in text.split("|")
    ]
    assert len(named) >= 5 and set(named) <= causes


def test_promtool_checks_and_tests_the_rules(tmp_path: Path) -> None:
    promtool = program("promtool")
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(TESTS)]):
        said = subprocess.run(
            [promtool, *command], cwd=RULES.parent, capture_output=True, text=True, check=False
        )
        assert said.returncode == 0, said.stdout + said.stderr
        assert "SUCCESS" in said.stdout + said.stderr


def test_every_alert_is_tested_with_and_without_firing() -> None:
    told = {rule["alert"] for rule in recorded() if "alert" in rule}
    fires: dict[str, set[bool]] = {}
    for test in yaml.safe_load(TESTS.read_text(encoding="utf-8"))["tests"]:
        for one in test["alert_rule_test"]:
            fires.setdefault(one["alertname"], set()).add(bool(one["exp_alerts"]))
    assert set(fires) == told
    assert {name for name, found in fires.items() if found != {True, False}} == set()


def test_queries_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    promtool = program("promtool")
    rules = [
        {"record": f"panel{number}", "expr": query.replace("$instance", ".+")}
        for number, query in enumerate(expressions())
    ]
    path = tmp_path / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    said = subprocess.run(
        [promtool, "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.parametrize("name", ["metrics.md"])
def test_the_example_web_configuration_is_one(name: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.S | re.M)
    assert len(blocks) == 2
    scrape, web = (yaml.safe_load(block) for block in blocks)
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:19836"]
    from whyidle.web_config import _BCRYPT, _TOP_KEYS

    assert set(web) <= set(_TOP_KEYS)
    assert all(_BCRYPT.fullmatch(hashed) for hashed in web["basic_auth_users"].values())
