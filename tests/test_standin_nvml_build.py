"""The stand-in NVML library as an artefact: its layout, its symbols, its build."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vgpu import Standin, StateFile, layout, library, standin
from vgpu.ask import Asker

STRUCTURES = {
    "standin_counter": layout.Counter,
    "standin_gauges": layout.Gauges,
    "standin_link": layout.Link,
    "standin_process": layout.Process,
    "standin_mig": layout.Mig,
    "standin_gpu": layout.GpuState,
    "standin_fault": layout.FaultState,
    "standin_event": layout.Event,
    "standin_calls": layout.Calls,
    "standin_state": layout.State,
}
CONSTANTS = {
    "STANDIN_MAGIC": layout.MAGIC,
    "STANDIN_VERSION": layout.VERSION,
    "STANDIN_GPUS": layout.GPUS,
    "STANDIN_LINKS": layout.LINKS,
    "STANDIN_PROCESSES": layout.PROCESSES,
    "STANDIN_MIGS": layout.MIGS,
    "STANDIN_FAULTS": layout.FAULTS,
    "STANDIN_EVENTS": layout.EVENTS,
    "STANDIN_FUNCTIONS": layout.FUNCTIONS,
    "STANDIN_SLOTS": layout.SLOTS,
    "STANDIN_METRICS": layout.METRICS,
    "STANDIN_ABSENT": layout.ABSENT,
    "STANDIN_ANY_GPU": layout.ANY_GPU,
    "STANDIN_FOREVER": layout.FOREVER,
    "STANDIN_ACTIVITIES": layout.ACTIVITIES,
    "STANDIN_NVLINK_TX": layout.NVLINK_TX,
    "STANDIN_NVLINK_RX": layout.NVLINK_RX,
    "STANDIN_COUNTERS": layout.COUNTERS,
    "STANDIN_SAMPLED": len(layout.SAMPLED),
    **{f"STANDIN_{count.name}": int(count) for count in layout.Count},
}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Standin]:
    with standin(tmp_path, gpus=1) as made:
        yield made


def _expressions() -> dict[str, int]:
    """What C must say: every constant, size and offset."""
    wanted = dict(CONSTANTS)
    for name, structure in STRUCTURES.items():
        wanted[f"sizeof(struct {name})"] = ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            wanted[f"offsetof(struct {name}, {field})"] = getattr(structure, field).offset
            wanted[f"sizeof(((struct {name} *)0)->{field})"] = getattr(structure, field).size
    return wanted


def test_python_and_c_agree_on_every_offset(tmp_path: Path) -> None:
    wanted = _expressions()
    source = tmp_path / "layout.c"
    lines = [f'    printf("%llu\\n", (unsigned long long)({text}));' for text in wanted]
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "state.h"\nint main(void) {\n'
        + "\n".join(lines)
        + "\n    return 0;\n}\n"
    )
    program = tmp_path / "layout"
    command = [library.compiler(), f"-I{library.SOURCES}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=60)
    said = subprocess.run([program], check=True, timeout=10, capture_output=True, text=True)
    got = dict(zip(wanted, map(int, said.stdout.split()), strict=True))
    assert got == wanted


def test_the_sampled_counters_stand_in_the_order_of_the_header() -> None:
    header = (library.SOURCES / "state.h").read_text()
    names = re.findall(r"^    STANDIN_SAMPLED_([A-Z]+),", header, re.MULTILINE)
    assert [count.name.removesuffix("_MJ") for count in layout.SAMPLED] == names


def _exported(file: Path) -> set[str]:
    said = subprocess.run(
        ["nm", "-D", "--defined-only", str(file)],
        check=True,
        timeout=10,
        capture_output=True,
        text=True,
    )
    return {line.split()[-1] for line in said.stdout.splitlines()}


def test_exports_are_the_listed_functions_and_nothing_else(node: Standin) -> None:
    listed = set(re.findall(r"X\((nvml\w+)\)", (library.SOURCES / "functions.h").read_text())) | {
        "nvmlErrorString"
    }
    # An older nvml.h declares fewer.
    known = set(re.findall(r"\b(nvml\w+) *\(", (library.header() / "nvml.h").read_text()))
    assert len(listed & known) > 90
    assert _exported(node.library / library.SONAME) == listed & known


def test_a_function_left_out_is_not_found(tmp_path: Path) -> None:
    missing = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlGpmSampleGet")
    with standin(tmp_path, gpus=1, without=missing) as old, Asker(old.env) as ask:
        ask.do("h = nvmlDeviceGetHandleByIndex(0)")
        assert ask.code("nvmlDeviceGetComputeRunningProcesses_v3(h)") == 13
        assert ask.code("nvmlGpmSampleGet(h, nvmlGpmSampleAlloc())") == 13
        assert ask("nvmlDeviceGetName(h)") == "NVIDIA H100 80GB HBM3"
    assert not _exported(old.library / library.SONAME) & set(missing)


def test_a_second_build_is_the_first_one(tmp_path: Path) -> None:
    first = library.build(tmp_path)
    stamp = (first / library.SONAME).stat().st_mtime_ns
    assert library.build(tmp_path) == first
    assert (first / library.SONAME).stat().st_mtime_ns == stamp
    assert library.build(tmp_path, without=["nvmlInit_v2"]) != first


def test_without_a_compiler_the_tests_skip_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(library.Unavailable, match="needs a C compiler"):
        library.build(tmp_path)


def test_a_state_of_another_version_is_refused_by_both_sides(tmp_path: Path) -> None:
    with standin(tmp_path, gpus=1) as node:
        raw = bytearray(node.state.path.read_bytes())
        raw[layout.State.version.offset] += 1
        node.state.path.write_bytes(raw)
        with Asker(node.env, init=False) as ask:
            assert ask.code("nvmlInit()") == 9
        for content in (bytes(raw), b"short"):
            node.state.path.with_name("other").write_bytes(content)
            with pytest.raises(ValueError, match="no stand-in state"):
                StateFile(node.state.path.with_name("other"))


def test_without_a_state_the_driver_is_not_loaded(node: Standin) -> None:
    env = {"LD_LIBRARY_PATH": node.env["LD_LIBRARY_PATH"], "WHYIDLE_STANDIN_NVML": "/nowhere"}
    with Asker(env, init=False) as ask:
        assert ask.code("nvmlInit()") == 9


IN_PROCESS = """
import os, sys
from pathlib import Path
import pynvml
from vgpu import standin

for gpus in (3, 5):
    folder = Path(sys.argv[1]) / str(gpus)
    folder.mkdir()
    with standin(folder, gpus=gpus) as node:
        node.preload()
        pynvml.nvmlInit()
        node.state.gpus[-1].set(memory_used_bytes=gpus)
        last = pynvml.nvmlDeviceGetHandleByIndex(pynvml.nvmlDeviceGetCount() - 1)
        used = pynvml.nvmlDeviceGetMemoryInfo(last, pynvml.nvmlMemory_v2).used
        print(pynvml.nvmlDeviceGetCount(), used)
        pynvml.nvmlShutdown()
    assert "WHYIDLE_STANDIN_NVML" not in os.environ
"""


def test_a_process_can_use_one_node_after_another(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", IN_PROCESS, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.splitlines(), done.stderr) == (["3 3", "5 5"], "")
