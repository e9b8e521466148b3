"""The reference of metrics: docs/metrics.md is made of what the families declare."""

from __future__ import annotations

from collections.abc import Iterable

from whyidle.metrics_families import SAMPLED, Family
from whyidle.metrics_own import INFO, LEDGER, SELF


def markdown() -> str:
    """Return all families as tables of Markdown."""
    gpu = [INFO, *(family for family in SAMPLED if family.name.startswith("whyidle_gpu_"))]
    node = [family for family in SAMPLED if family.name.startswith("whyidle_node_")]
    agent = [family for family in SAMPLED if family.name.startswith("whyidle_agent_")]
    return "\n".join(
        (
            *_part("The ledger", LEDGER),
            *_part("GPUs", gpu, peer="DCGM exporter"),
            *_part("Node", node, peer="node_exporter"),
            *_part("The agent itself", (*agent, *SELF)),
        )
    )


def _part(title: str, families: Iterable[Family], *, peer: str = "") -> list[str]:
    more = (f" {peer} |", " --- |") if peer else ("", "")
    lines = [f"### {title}", ""]
    lines += [
        f"| series | labels | type | meaning |{more[0]}",
        f"| --- | --- | --- | --- |{more[1]}",
    ]
    for family in families:
        by = getattr(family, "by", "")
        labels = ", ".join(f"`{name}`" for name in (*family.labels, *((by,) if by else ())))
        cells = [f"`{family.series}`", labels, family.kind, family.meaning]
        if peer:
            cells.append(", ".join(f"`{name}`" for name in family.peer.split(", ") if name))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]
