"""The collectors, in one explicit list; the order is that of the runs inside a lane."""

from __future__ import annotations

from whyidle.collect.collector import Collector

ALL: tuple[Collector, ...] = ()
