"""Switches the probe on where PYTHONPATH leads here and WHYIDLE_PROBE=1; else does nothing.

Python imports the first `sitecustomize` on its path and no other, so that the one which would have
been imported without us is imported here, under its own name.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


def _load_next() -> None:
    """Import the sitecustomize behind this one; what it raises, site reports as it always does."""
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100
    sys.path[:] = others
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _start_probe() -> None:
    """Load the package beside this folder by its place: nothing else there gets importable."""
    if os.environ.get("WHYIDLE_PROBE") != "1":
        return
    package = os.path.dirname(_HERE)  # noqa: PTH120
    try:
        if "whyidle_probe" not in sys.modules:
            spec = importlib.util.spec_from_file_location(
                "whyidle_probe",
                os.path.join(package, "__init__.py"),  # noqa: PTH118
                submodule_search_locations=[package],
            )
            if spec is None or spec.loader is None:
                return
            module = importlib.util.module_from_spec(spec)
            sys.modules["whyidle_probe"] = module
            spec.loader.exec_module(module)
        sys.modules["whyidle_probe"].start()
    except Exception:  # noqa: BLE001 - whatever is wrong with the probe, the trainer must start
        return


try:
    _load_next()
finally:
    _start_probe()
