"""Makes grafana/whyidle.json: the causes and colours of the report, on a dashboard.

WHYIDLE_WRITE_DOCS=1 python -m pytest tests/test_dashboard.py    writes it anew
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from whyidle.causes import CAUSES

PATH = Path(__file__).parents[1] / "grafana" / "whyidle.json"
WORKING = "#2563eb"
POOLS = {"working": "#16a34a", "empty": "#9ca3af", "spinning": "#60a5fa"}
CHOSEN = 'instance=~"$instance"'
SOURCE = {"type": "prometheus", "uid": "${source}"}
RANGE = "[5m]"


def made() -> str:
    """Return the dashboard as text."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return {
        "title": "whyidle: why GPUs are idle",
        "uid": "whyidle",
        "tags": ["gpu", "whyidle"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [dict(panel, id=number) for number, panel in enumerate(_panels(), 1)],
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Node",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": "label_values(whyidle_build_info, instance)", "refId": "v"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def _panels() -> list[dict[str, Any]]:
    idle = f"rate(whyidle_gpu_idle_seconds_total{{{CHOSEN}}}{RANGE})"
    working = f"rate(whyidle_gpu_working_seconds_total{{{CHOSEN}}}{RANGE})"
    seen = f"(sum({idle}) + sum({working}))"
    causes = {cause.slug: cause.colour for cause in CAUSES if not cause.root_only}
    return [
        _stat("GPUs idle now", f"sum({idle})", 0, unit="none", decimals=1),
        _stat("Share of GPU time idle", f"sum({idle}) / {seen}", 6),
        _stat(
            "Of that, with a known cause",
            f'sum(rate(whyidle_gpu_idle_seconds_total{{{CHOSEN}, cause!="unattributed"}}{RANGE}))'
            f" / sum({idle})",
            12,
        ),
        _stat(
            "Ledger late by",
            f"max(whyidle_ledger_lag_seconds{{{CHOSEN}}})",
            18,
            unit="s",
            decimals=0,
        ),
        _series(
            "GPUs idle, by cause",
            [(f"sum by (cause) ({idle})", "{{cause}}")],
            at=(0, 4, 24, 9),
            colours=causes,
            stacked=True,
        ),
        _series(
            "What GPUs did",
            [
                (f"sum({working})", "working"),
                *(
                    (f"sum(rate(whyidle_gpu_{pool}_seconds_total{{{CHOSEN}}}{RANGE}))", pool)
                    for pool in ("empty", "spinning")
                ),
            ],
            at=(0, 13, 12, 8),
            colours=POOLS,
            stacked=True,
        ),
        _series(
            "Share of time idle, by GPU",
            [(f"sum by (instance, gpu) ({idle})", "{{instance}} GPU {{gpu}}")],
            at=(12, 13, 12, 8),
            unit="percentunit",
        ),
        _table(
            "Where most time is lost",
            f"topk(20, sum by (instance, gpu, cause) ({idle}) > 0.01)",
            at=(0, 21, 12, 9),
        ),
        _series(
            "SMs active, mean over GPUs of a node",
            [(f"avg by (instance) (whyidle_gpu_sm_active_ratio{{{CHOSEN}}})", "{{instance}}")],
            at=(12, 21, 12, 9),
            unit="percentunit",
        ),
        _series(
            "Power, by node",
            [(f"sum by (instance) (whyidle_gpu_power_watts{{{CHOSEN}}})", "{{instance}}")],
            at=(0, 30, 12, 8),
            unit="watt",
        ),
        _series(
            "The agent itself: CPU of a core",
            [
                (
                    f"sum by (instance, part) (rate(whyidle_agent_cpu_seconds_total{{{CHOSEN}}}"
                    f"{RANGE}))",
                    "{{instance}} {{part}}",
                )
            ],
            at=(12, 30, 12, 8),
            unit="percentunit",
        ),
    ]


def _place(at: tuple[int, int, int, int]) -> dict[str, int]:
    return dict(zip("xywh", at, strict=True))


def _target(expression: str, legend: str = "", number: int = 0, **more: Any) -> dict[str, Any]:
    letter = chr(ord("A") + number)
    return {
        "refId": letter,
        "datasource": SOURCE,
        "expr": expression,
        "legendFormat": legend,
        **more,
    }


def _stat(
    title: str, expression: str, x: int, *, unit: str = "percentunit", decimals: int = 0
) -> dict[str, Any]:
    return {
        "type": "stat",
        "title": title,
        "datasource": SOURCE,
        "gridPos": _place((x, 0, 6, 4)),
        "targets": [_target(expression)],
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "decimals": decimals,
                "color": {"mode": "fixed", "fixedColor": WORKING},
            },
            "overrides": [],
        },
        "options": {"graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}},
    }


def _series(
    title: str,
    queries: list[tuple[str, str]],
    *,
    at: tuple[int, int, int, int],
    colours: dict[str, str] | None = None,
    unit: str = "none",
    stacked: bool = False,
) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": _place(at),
        "targets": [
            _target(query, legend, number) for number, (query, legend) in enumerate(queries)
        ],
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 70 if stacked else 10,
                    "lineWidth": 0 if stacked else 1,
                    "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
                },
            },
            "overrides": [_colour(name, colour) for name, colour in (colours or {}).items()],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _colour(name: str, colour: str) -> dict[str, Any]:
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
    }


def _table(title: str, expression: str, *, at: tuple[int, int, int, int]) -> dict[str, Any]:
    return {
        "type": "table",
        "title": title,
        "datasource": SOURCE,
        "gridPos": _place(at),
        "targets": [_target(expression, instant=True, format="table")],
        "fieldConfig": {"defaults": {"unit": "percentunit"}, "overrides": []},
        "transformations": [
            {
                "id": "organize",
                "options": {"excludeByName": {"Time": True}, "renameByName": {"Value": "idle"}},
            },
            {"id": "sortBy", "options": {"sort": [{"field": "idle", "desc": True}]}},
        ],
    }
