"""A real Prometheus scrapes a node while what its GPU does is changed; figures are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from live_kit import NODE, Prometheus, child, free_port, keeper, program, prometheus, sampler, until
from vgpu.device.serve import virtual_gpus
from whyidle.store import Recording

BEFORE_S, AFTER_S = 12.0, 4.0
# A trainer of short steps that begins to save checkpoints when told to by a line on its input.
TRAINER = """
import select, sys, time
import whyidle_probe
from vgpu.client import connect
whyidle_probe.start()
gpu = connect(0)
saving = False
while True:
    if not saving and select.select([sys.stdin], [], [], 0)[0]:
        saving = True
    for _ in range(8):
        gpu.launch(10.0, kind="gemm")
    gpu.synchronize()
    if saving:
        with whyidle_probe.phase("checkpoint_save"):
            time.sleep(0.1)
    whyidle_probe.step()
"""
NS = 1_000_000_000
POOLS = ("empty", "spinning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was scraped, by series; what was settled; what diagnose says of it."""

    scraped: dict[str, list[dict[str, Any]]]
    killed_ns: int
    changed_ns: int
    recording: Path
    resets: dict[str, list[float]]


def series(found: Prometheus) -> dict[str, list[dict[str, Any]]]:
    names = [f"whyidle_gpu_{pool}_seconds_total" for pool in ("idle", "working", *POOLS)]
    names.append("whyidle_ledger_settled_monotonic_seconds")
    return {name: found.query(f"{name}[5m]") for name in names}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    program("prometheus")
    folder = tmp_path_factory.mktemp("run")
    recording, pages, port = folder / "recording", folder / "pages", free_port()
    pages.mkdir()
    gpu = folder / "gpu"
    gpu.mkdir()
    with virtual_gpus(gpu, gpus=2) as node:
        env = {**node.env, "WHYIDLE_PROBE_DIR": str(pages)}
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER],
            stdin=subprocess.PIPE,
            env={**os.environ, **env},
        )
        assert trainer.stdin is not None
        try:
            with (
                prometheus(folder / "prometheus", {"whyidle": port}) as found,
                child(keeper(recording, port), env) as first,
                child(keeper(recording, port), env),  # waits for the first one's lock
                child(sampler(recording, "--probe-dir", str(pages)), env),
            ):
                query = "whyidle_gpu_working_seconds_total > 1"
                until(lambda: bool(found.query(query)), "some work is settled")
                time.sleep(BEFORE_S / 2)
                first.kill()
                killed_ns = time.monotonic_ns()
                time.sleep(BEFORE_S / 2)
                changed_ns = time.monotonic_ns()
                trainer.stdin.write(b"save\n")
                trainer.stdin.flush()
                query = 'whyidle_gpu_idle_seconds_total{gpu="0", cause="storage"} > 1.5'
                until(lambda: bool(found.query(query)), "the change is charged", 60)
                time.sleep(AFTER_S)
                scraped = series(found)
                resets = {
                    name: [float(one["value"][1]) for one in found.query(f"resets({name}[5m])")]
                    for name in scraped
                }
        finally:
            trainer.kill()
            trainer.communicate()
    yield Run(
        scraped=scraped,
        killed_ns=killed_ns,
        changed_ns=changed_ns,
        recording=recording,
        resets=resets,
    )


def settled(recording: Path, query: str) -> list[tuple[Any, ...]]:
    with Recording([recording / "_ledger"]) as opened:
        return opened.con.execute(query).fetchall()


def ns(text: str) -> int:
    return round(float(text) * NS)


def test_counters_at_every_scrape_are_the_settled_rows_to_the_nanosecond(run: Run) -> None:
    rows = settled(run.recording, "SELECT mono_ns, uuid, pool, cause, idle_ns FROM settled")
    work = settled(run.recording, "SELECT mono_ns, uuid, working_ns FROM settled_gpu")
    (stamp,) = run.scraped["whyidle_ledger_settled_monotonic_seconds"]
    reached = {at: ns(value) for at, value in stamp["values"]}
    assert len(reached) > 15
    compared = grown = 0
    for name, found in run.scraped.items():
        pool = name.removeprefix("whyidle_gpu_").removesuffix("_seconds_total")
        if pool not in ("idle", "working", *POOLS):
            continue
        for one in found:
            uuid, cause = one["metric"]["uuid"], one["metric"].get("cause")
            for at, value in one["values"]:
                if at not in reached:
                    continue  # a GPU was known before the first interval was settled
                end_ns = reached[at]
                if pool == "working":
                    expected = sum(r[2] for r in work if r[0] <= end_ns and r[1] == uuid)
                else:
                    expected = sum(
                        r[4]
                        for r in rows
                        if r[0] <= end_ns
                        and r[1] == uuid
                        and r[3] == cause
                        and (pool == "idle" or r[2] == pool)
                    )
                assert ns(value) == expected, (name, one["metric"], at)
                compared += 1
                grown += expected > 0
    assert compared > 500 and grown > 50


def test_a_keeper_that_is_killed_goes_on_where_it_was(run: Run) -> None:
    assert len(run.resets) == 5
    for name, found in run.resets.items():
        assert found and set(found) == {0.0}, name
    settlements = settled(run.recording, "SELECT begin_ns, mono_ns, settled_ns FROM settlement")
    times = sorted(settlements)
    assert all(first[1] == second[0] for first, second in pairwise(times))
    assert times[0][2] < run.killed_ns < times[-1][2]


def test_the_change_is_charged_to_its_cause_and_to_when_it_was(run: Run) -> None:
    (saving,) = [
        one
        for one in run.scraped["whyidle_gpu_idle_seconds_total"]
        if one["metric"]["gpu"] == "0" and one["metric"]["cause"] == "storage"
    ]
    assert ns(saving["values"][0][1]) == 0  # there before it had anything to tell
    assert ns(saving["values"][-1][1]) > 1.5 * NS
    rows = settled(
        run.recording,
        "SELECT begin_ns, cause, subcause, grade, idle_ns FROM settled JOIN settlement "
        "USING (mono_ns) WHERE gpu = 0 ORDER BY 1",
    )
    early = [row for row in rows if row[0] < run.changed_ns - 2 * NS and row[1] == "storage"]
    late = [row for row in rows if row[0] > run.changed_ns + NS and row[1] == "storage"]
    assert early == []
    assert late and {row[1:4] for row in late} == {("storage", "checkpoint_write", "measured")}


def test_as_live_says_what_the_counters_said(run: Run) -> None:
    (stamp,) = run.scraped["whyidle_ledger_settled_monotonic_seconds"]
    end_ns = ns(stamp["values"][-1][1])
    (wall,) = settled(run.recording, f"SELECT wall_ns FROM settlement WHERE mono_ns = {end_ns}")
    # Half an interval later: wall time of each interval is known to some microseconds only.
    until_ns = wall[0] + NS
    until_s = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(until_ns // NS))
    fraction = f".{until_ns % NS // 1000:06}"
    found = json.loads(
        subprocess.run(
            [
                *(sys.executable, "-c", "from whyidle_rules.cli import diagnose_main as m; m()"),
                *(str(run.recording), "--as-live", "--json", "--until", f"{until_s}{fraction}Z"),
            ],
            check=True,
            capture_output=True,
        ).stdout
    )
    assert found["run"]["nodes"] == [NODE]
    said = {gpu["uuid"]: gpu for gpu in found["gpus"]}
    compared = 0
    for name, key in (
        ("whyidle_gpu_working_seconds_total", "working_s"),
        ("whyidle_gpu_idle_seconds_total", ""),
    ):
        for one in run.scraped[name]:
            gpu = said[one["metric"]["uuid"]]
            value = gpu[key] if key else gpu["causes"].get(one["metric"]["cause"], 0.0)
            assert round(value * NS) == ns(one["values"][-1][1]), one["metric"]
            compared += 1
    assert compared > 10


def test_minutes_add_up_to_the_settled_rows(run: Run) -> None:
    query = "SELECT uuid, {0}, sum({1})::BIGINT FROM {2} {3} GROUP BY ALL ORDER BY ALL"
    minutes = settled(
        run.recording,
        query.format(
            "pool, cause, subcause", "part_ns", "ledger_minute", "WHERE pool <> 'working'"
        ),
    )
    rows = settled(run.recording, query.format("pool, cause, subcause", "idle_ns", "settled", ""))
    assert minutes == rows
    working = settled(
        run.recording, query.format("pool", "part_ns", "ledger_minute", "WHERE pool = 'working'")
    )
    gpus = settled(
        run.recording,
        query.format("'working'", "working_ns", "settled_gpu", "WHERE working_ns > 0"),
    )
    assert working == gpus
