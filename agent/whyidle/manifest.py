"""manifest.json: what a recording is, for people and for a first look; readers can do without."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whyidle.schema import VERSION

NAME = "manifest.json"
RECORDING = "whyidle.recording/1"
PARQUET = "whyidle.parquet/1"
# Nobody writes a bigger one; whatever else is called manifest.json is not ours.
LIMIT_BYTES = 1 << 20


def write_manifest(folder: Path, kind: str, more: Mapping[str, Any]) -> None:
    """Write the manifest of a recording or an export, whole or not at all. Raises OSError."""
    said = {"format": kind, "schema_version": VERSION, **more}
    part = folder / f"{NAME}.part"
    part.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    part.rename(folder / NAME)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return a manifest of ours, None where there is none that can be read."""
    path = folder / NAME
    try:
        if path.stat().st_size > LIMIT_BYTES:
            return None
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(said, dict) or not str(said.get("format", "")).startswith("whyidle."):
        return None
    return said
