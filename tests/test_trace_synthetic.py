"""Traces whose truth is known from how they were made: parts, waits, and the price of the stall."""

from __future__ import annotations

import functools
import gzip
import json
import random
from decimal import Decimal
from pathlib import Path

import pytest

import independent
from trace_run import Json, diagnose, diagnosis, gpus_by_rank, roots
from world.trace_fixtures import DDP_NAME, fixtures
from world.trace_groups import SCENARIOS, scenario
from world.trace_scenarios import Scenario
from world.trace_text import Dialect, trace_text, write
from world.trace_truth import Truth, truth
from world.traces import Rank

FIXTURES = Path(__file__).parents[1] / "fixtures" / "traces"
MICROSECOND = 1e-6
# DESIGN section 8: of idle seconds, the share that must reach the right cause.
RIGHT = 0.95

DIALECTS = {
    "plain": Dialect(),
    "minified": Dialect(minified=True, metadata_last=True),
    "old": Dialect(old_names=True, clock="whole"),
    "epoch": Dialect(clock="epoch"),
    "no_args": Dialect(collective_args=False),
    "unlaunched": Dialect(unlaunched_ratio=0.05),
    "no_steps": Dialect(steps=False),
    "rocm": Dialect(rocm=True, flows=False),
    "clocks": Dialect(clock_offsets_ns=(0, 37_000_000, -2_500_000_000, 411_000)),
}


@functools.cache
def _ranks(name: str, stalled: bool, quantum_ns: int = 1) -> tuple[Rank, ...]:
    return scenario(name).run(stalled=stalled, quantum_ns=quantum_ns)


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[Json]:
    """Return a function that diagnoses a scenario once, with its stall or without."""

    @functools.cache
    def one(name: str, stalled: bool) -> Json:
        folder = tmp_path_factory.mktemp(name)
        write(_ranks(name, stalled), folder, Dialect(), zipped=False)
        return diagnosis(folder)

    return functools.partial(one)


def _check_parts(gpu: Json, expected: Truth, tolerance_s: float) -> None:
    parts = gpu["trace"]
    for name in ("window", "compute", "exposed_comm", "exposed_copy", "idle"):
        difference = parts[f"{name}_s"] - getattr(expected, f"{name}_ns") / 1e9
        assert abs(difference) <= tolerance_s, (gpu["rank"], name, parts, expected)


@pytest.mark.parametrize("one", SCENARIOS, ids=lambda one: one.name)
def test_parts_equal_the_truth(one: Scenario, diagnosed: functools.partial[Json]) -> None:
    found = gpus_by_rank(diagnosed(one.name, True))
    assert set(found) == set(range(one.ranks))
    for rank in _ranks(one.name, True):
        _check_parts(found[rank.index], truth(rank), MICROSECOND)


def _check_waits(gpu: Json, expected: Truth) -> None:
    expected_s = {str(late): waited / 1e9 for late, waited in expected.waited_ns.items()}
    waited = gpu["waited_for"]
    for late in expected_s.keys() | waited.keys():
        difference = waited.get(late, 0.0) - expected_s.get(late, 0.0)
        assert abs(difference) <= 10 * MICROSECOND, (gpu["rank"], waited, expected_s)


@pytest.mark.parametrize("one", SCENARIOS, ids=lambda one: one.name)
def test_waits_equal_the_truth(one: Scenario, diagnosed: functools.partial[Json]) -> None:
    found = gpus_by_rank(diagnosed(one.name, True))
    for rank in _ranks(one.name, True):
        _check_waits(found[rank.index], truth(rank))


@pytest.mark.parametrize("one", SCENARIOS, ids=lambda one: one.name)
def test_a_rank_held_up_is_told_why_in_its_own_ledger(
    one: Scenario, diagnosed: functools.partial[Json]
) -> None:
    found = gpus_by_rank(diagnosed(one.name, True))
    for rank in _ranks(one.name, True):
        held_s = sum(truth(rank).labelled_ns.values()) / 1e9
        if held_s:
            seconds = found[rank.index]["causes"].get(one.roots[0][0], 0.0)
            # Gaps of microseconds between launches may have the same cause.
            assert RIGHT * held_s <= seconds <= held_s / RIGHT + 1e-3, (rank.index, held_s)


def _empty_or_waiting_s(ranks: tuple[Rank, ...]) -> float:
    parts = [truth(rank) for rank in ranks]
    waited = sum(sum(part.waited_ns.values()) for part in parts)
    return (waited + sum(part.idle_ns + part.exposed_copy_ns for part in parts)) / 1e9


def _exposed_s(ranks: tuple[Rank, ...]) -> float:
    return sum(truth(rank).exposed_comm_ns for rank in ranks) / 1e9


def _price_s(one: Scenario) -> float:
    """Return what the stall cost: how much the run without it is idle less, on all ranks.

    Transfers that the stall uncovers (nothing is left to hide them behind) are left out: they are
    transfers, and are to be told as such. Between pipeline stages all waiting is in sends.
    """
    pair = [_ranks(one.name, stalled) for stalled in (True, False)]
    measure = _exposed_s if one.name == "pipeline" else _empty_or_waiting_s
    return measure(pair[0]) - measure(pair[1])


@pytest.mark.parametrize(
    "one", [one for one in SCENARIOS if one.culprits], ids=lambda one: one.name
)
def test_the_stall_is_charged_to_its_root(
    one: Scenario, diagnosed: functools.partial[Json]
) -> None:
    price_s = _price_s(one)
    assert price_s > 0
    with_it, without = roots(diagnosed(one.name, True)), roots(diagnosed(one.name, False))
    keys = with_it.keys() | without.keys()
    grown = {key: with_it.get(key, 0.0) - without.get(key, 0.0) for key in keys}
    right = {
        (cause, subcause, rank): seconds
        for (cause, subcause, rank), seconds in grown.items()
        if (cause, subcause) in one.roots and (rank is None or rank in one.culprits)
    }
    told = {key: round(seconds, 6) for key, seconds in grown.items() if abs(seconds) > 1e-5}
    assert sum(right.values()) == pytest.approx(price_s, rel=1 - RIGHT), (price_s, told)
    assert max(right, key=lambda key: right[key])[:2] == one.roots[0], told
    accused = sum(
        seconds
        for (cause, subcause, rank), seconds in grown.items()
        if seconds > 0
        and (cause, subcause, rank) not in right
        and cause != "unattributed"
        and (cause, subcause) != ("collective", "transfer")
    )
    assert accused <= (1 - RIGHT) * price_s, (price_s, told)


def test_a_healthy_run_accuses_nobody(diagnosed: functools.partial[Json]) -> None:
    found = diagnosed("healthy", True)
    blamed = sum(row["idle_s"] for row in found["ledger"] if row["cause"] != "unattributed")
    assert blamed <= 0.01 * found["totals"]["gpu_s"], found["ledger"]
    assert all(finding["severity"] == "info" for finding in found["findings"])


def test_a_healthy_run_ends_with_0(tmp_path: Path) -> None:
    write(_ranks("healthy", True), tmp_path, Dialect(), zipped=False)
    assert diagnose(tmp_path).code == 0


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS.keys())
def test_every_dialect_tells_the_same(dialect: Dialect, tmp_path: Path) -> None:
    whole = dialect.clock == "whole"
    ranks = _ranks("loads_itself", True, 1000 if whole else 1)
    write(ranks, tmp_path, dialect, zipped=dialect.minified)
    found = diagnosis(tmp_path)
    by_rank = gpus_by_rank(found)
    for rank in ranks:
        expected = truth(rank)
        # Microseconds since 1970 with decimals do not fit a double: 0.25 us an edge.
        slack = 1e-3 * expected.window_ns / 1e9 if dialect.clock == "epoch" else MICROSECOND
        _check_parts(by_rank[rank.index], expected, slack)
        _check_waits(by_rank[rank.index], expected)
    top = max(
        (row for row in found["root_causes"] if row["cause"] != "unattributed"),
        key=lambda row: float(row["idle_s"]),
    )
    assert (top["cause"], top["subcause"], top["rank"]) == ("cpu_preprocessing", "main_thread", 1)


def test_traces_without_ranks_are_parted_all_the_same(tmp_path: Path) -> None:
    ranks = _ranks("loads_itself", True)
    write(ranks, tmp_path, Dialect(distributed_info=False), zipped=False)
    windows = sorted(gpu["trace"]["window_s"] for gpu in diagnosis(tmp_path)["gpus"])
    expected = sorted(truth(rank).window_ns / 1e9 for rank in ranks)
    assert windows == pytest.approx(expected, abs=MICROSECOND)


@pytest.mark.parametrize("args", [True, False], ids=["numbered", "unnumbered"])
def test_profiles_that_begin_at_different_steps_are_matched(args: bool, tmp_path: Path) -> None:
    ranks = scenario("sleep").run()
    late = next(event.begin_ns for event in ranks[1].events if event.name == "ProfilerStep#5")
    ranks[1].events[:] = [event for event in ranks[1].events if event.begin_ns >= late]
    write(ranks, tmp_path, Dialect(collective_args=args), zipped=False)
    found = gpus_by_rank(diagnosis(tmp_path))
    expected = independent.wait_matrix(independent.read(path) for path in tmp_path.iterdir())
    for rank, row in expected.items():
        waited = found[rank]["waited_for"]
        for peer in range(4):
            difference = waited.get(str(peer), 0.0) - row.get(peer, 0) / 1e9
            assert abs(difference) <= 100 * MICROSECOND, (rank, waited, row)


@pytest.mark.parametrize("args", [True, False], ids=["numbered", "unnumbered"])
def test_ranks_of_two_runs_never_wait_for_each_other(args: bool, tmp_path: Path) -> None:
    """Both have a rank 0 or 1 of 4, the same group and numbers, and are two hours apart."""
    two_hours_ns = 7_200_000_000_000
    apart = Dialect(collective_args=args, clock_offsets_ns=(0, two_hours_ns, 0, 0))
    write(_ranks("sleep", True)[:1], tmp_path, apart, zipped=False)
    write(_ranks("loads_itself", True)[1:2], tmp_path, apart, zipped=False)
    found = diagnosis(tmp_path)
    assert [gpu["waited_for"] for gpu in found["gpus"]] == [{}, {}], found["headline"]


def test_waiting_is_not_told_from_transfer_where_ranks_are_missing(tmp_path: Path) -> None:
    write(_ranks("sleep", True)[:2], tmp_path, Dialect(), zipped=False)
    found = diagnosis(tmp_path)
    for gpu in found["gpus"]:
        # The two were equally early: whoever was late is not here.
        assert sum(gpu["waited_for"].values()) < 100 * MICROSECOND
    exposed = [row for row in found["ledger"] if row["cause"] == "collective"]
    assert {row["subcause"] for row in exposed if row["idle_s"] > 0.001} == {"exposed"}
    assert any("ranks 2 and 3" in entry["what"] for entry in found["not_seen"])


COMMUNICATING = (
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
    "void ncclDevRedOpFull<FuncPreMulSum<float>>(int)",
    "void deep_ep::internode::dispatch<false, 4, false>(int4*, float*)",
    "void ep::internode::combine<true, 8>(int4*, float*)",
    "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)",
    "void deep_ep::intranode::cached_notify_combine<8>(void**, int*)",
    "nvshmemi_barrier_all_kernel(int)",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
    "void vllm::cross_device_reduce_2stage<__half, 4>(vllm::RankData*, vllm::RankSignals)",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8>(AllReduceParams)",
    "void one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16*)",
    "void two_shot_all_reduce_kernel<float, 16, 4>(float**, float*)",
    "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)",
    "void multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
)
COMPUTING = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>, "
    "cutlass::gemm::collective::CollectiveMma<int>, CollectiveMainloop>>(int)",
    "void cub::CUB_200700::DispatchReduceByKey<float*, float*>(float*, float*)",
    "void cub::CUB_200700::DeviceReduceKernel<cub::Policy, float*>(float*)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
    "at::native::MeanOps<float>>>(at::native::ReduceOp<float>)",
)


def test_communication_is_known_by_the_name_of_its_kernel(tmp_path: Path) -> None:
    names = [(name, 1) for name in COMMUNICATING] + [(name, 0) for name in COMPUTING]
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "pid": 0,
            "tid": 7,
            "ts": 1000 * index,
            "dur": 100 + index,
            "args": {"device": 0, "stream": 7, "correlation": index},
        }
        for index, (name, _) in enumerate(names)
    ]
    (tmp_path / "names.json").write_text(json.dumps({"traceEvents": events}))
    parts = diagnosis(tmp_path / "names.json")["gpus"][0]["trace"]
    for part, communicates in (("exposed_comm_s", 1), ("compute_s", 0)):
        expected = sum(100 + index for index, (_, kind) in enumerate(names) if kind == communicates)
        assert parts[part] == pytest.approx(expected / 1e6, abs=MICROSECOND / 2), part
    assert [independent.communicates(name) for name, _ in names] == [bool(k) for _, k in names]


def _soup(seed: int) -> Json:
    """Return a trace of overlapping, touching, nested and empty events on several streams."""
    chance = random.Random(seed)
    kinds = (
        ("kernel", "void at::native::reduce_kernel<512>(int)"),
        ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"),
        ("gpu_memset", "Memset (Device)"),
    )
    events = []
    for number in range(chance.randrange(1, 400)):
        category, name = chance.choice(kinds)
        begin_ns, dur_ns = chance.randrange(5_000_000), chance.choice((0, 1, 1000, 40_000))
        if chance.random() < 0.3:
            begin_ns, dur_ns = begin_ns // 10_000 * 10_000, 10_000
        events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 0,
                "tid": chance.choice((7, 20, 24)),
                "ts": begin_ns / 1000,
                "dur": dur_ns / 1000,
                "args": {"device": 0, "stream": 7, "correlation": number},
            }
        )
    return {"traceEvents": events, "distributedInfo": {"rank": seed, "world_size": 40}}


def test_any_overlap_is_parted_as_a_sweep_parts_it(tmp_path: Path) -> None:
    soups = {seed: json.dumps(_soup(seed)) for seed in range(40)}
    for seed, text in soups.items():
        (tmp_path / f"rank{seed}.json").write_text(text)
    found = gpus_by_rank(diagnosis(tmp_path))
    for seed, text in soups.items():
        trace = independent.trace_of(json.loads(text, parse_float=Decimal), str(seed))
        expected = independent.partition(trace.events)
        assert expected is not None
        for part in ("window", "compute", "exposed_comm", "exposed_copy", "idle"):
            difference = found[seed]["trace"][f"{part}_s"] - getattr(expected, f"{part}_ns") / 1e9
            assert abs(difference) < 1e-9, (seed, part, found[seed]["trace"], expected)


@pytest.mark.parametrize("one", SCENARIOS, ids=lambda one: one.name)
def test_the_independent_computation_agrees_with_the_truth(one: Scenario) -> None:
    traces = []
    for rank in _ranks(one.name, True):
        text = "".join(trace_text(rank, Dialect()))
        trace = independent.trace_of(json.loads(text, parse_float=Decimal), one.name)
        traces.append(trace)
        parts, expected = independent.partition(trace.events), truth(rank)
        assert parts is not None
        for name in ("window", "compute", "exposed_comm", "exposed_copy", "idle"):
            assert getattr(parts, f"{name}_ns") == getattr(expected, f"{name}_ns")
    matrix = independent.wait_matrix(traces)
    for rank in _ranks(one.name, True):
        waited = {late: ns for late, ns in truth(rank).waited_ns.items() if ns}
        assert {late: ns for late, ns in matrix[rank.index].items() if ns} == waited


def test_the_fixtures_are_what_their_generator_writes() -> None:
    made = dict(fixtures())
    kept = {str(path.relative_to(FIXTURES)) for path in FIXTURES.rglob("*.json.gz")}
    assert kept == set(made)
    for name, text in made.items():
        # Compressed bytes differ between versions of zlib; what they hold must not.
        assert gzip.decompress((FIXTURES / name).read_bytes()).decode() == text, name


def test_the_fixture_names_the_rank_that_loads_itself() -> None:
    outcome = diagnose("--json", FIXTURES / DDP_NAME)
    assert outcome.code == 1
    found = outcome.found()
    by_root = roots(found)
    assert max(by_root, key=lambda key: by_root[key]) == ("cpu_preprocessing", "main_thread", 1)
    assert "rank 1" in found["headline"]
    told = diagnose(FIXTURES / DDP_NAME)
    assert told.code == 1
    assert "rank 1" in told.stdout
