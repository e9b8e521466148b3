"""The probe in processes without torch: it starts, forks and dies without anybody noticing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from probe_kit import environment, pages, python_of, read_page, script, train, trained
from whyidle.run_command import site_folder

# The hooks are imported to see that every Python can: without torch they hook nothing.
WORK = """
import whyidle_probe, whyidle_probe.torch_hooks
with whyidle_probe.phase("evaluation"):
    pass
for _ in range(3):
    whyidle_probe.step()
print("trained")
"""


def test_phases_and_steps_that_are_told(tmp_path: Path) -> None:
    read = trained(
        tmp_path,
        """
        import gc, threading, time, whyidle_probe
        with whyidle_probe.phase("evaluation"):
            time.sleep(0.02)
            with whyidle_probe.phase("logging"):
                time.sleep(0.03)
        with whyidle_probe.phase("tokens"):
            pass
        def save():
            with whyidle_probe.phase("checkpoint_save"):
                time.sleep(0.01)
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        gc.collect()
        for _ in range(4):
            time.sleep(0.011)
            whyidle_probe.step()
        whyidle_probe.phase("setup").__enter__()
        """,
        more={"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
    )
    header, totals = read.header, read.totals
    assert (header.rank, header.world_size, header.local_rank) == (3, 8, 1)
    assert header.python == ".".join(map(str, sys.version_info[:3]))
    assert header.torch is None
    evaluation, logging = totals.phase_ns[3], totals.phase_ns[5]
    assert evaluation is not None
    assert logging is not None
    # What is inside belongs to the innermost phase alone.
    assert 15_000_000 < evaluation < 29_000_000 < logging < 200_000_000
    assert header.phases[0] == "tokens"
    background = totals.phase_background_ns[1]
    assert background is not None
    assert background > 9_000_000
    assert totals.phase_ns[1] == 0
    assert totals.gc_count is not None
    assert totals.gc_count >= 1
    assert totals.gc_full_count is not None
    assert totals.gc_full_count >= 1
    assert (totals.steps, totals.closed_ns) == (4, None)
    # Only a trainer with torch has optimizers that somebody counts.
    assert totals.optimizer_steps is None
    assert totals.phase == 6  # it died in there
    assert totals.phase_since_ns is not None
    kinds = [kind for kind in read.kinds() if kind != "gc"]
    assert kinds == ["logging", "evaluation", "tokens", "checkpoint_save", *["step"] * 4]
    assert totals.hook_errors == 0


def test_more_names_than_there_is_room_for_are_one(tmp_path: Path) -> None:
    read = trained(
        tmp_path,
        """
        import whyidle_probe
        for number in range(10):
            with whyidle_probe.phase("part %d " % number + "x" * 40):
                pass
        """,
    )
    assert [name[:6] for name in read.header.phases] == [f"part {n}" for n in range(8)]
    assert {len(name) for name in read.header.phases} == {30}
    assert read.kinds()[-2:] == ["other", "other"]


def test_every_python_that_is_here(tmp_path: Path) -> None:
    found = {f"3.{minor}": python_of(f"3.{minor}") for minor in range(9, 15)}
    here = {version: python for version, python in found.items() if python is not None}
    here["{}.{}".format(*sys.version_info[:2])] = sys.executable
    for version, python in here.items():
        folder = tmp_path / version
        folder.mkdir()
        done = train(tmp_path, WORK, folder=folder, python=python)
        assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
        (read,) = pages(folder)
        assert read.totals.steps == 3
        assert read.header.python is not None
        assert read.header.python.startswith(f"{version}.")


def test_nothing_happens_unless_it_is_asked_for(tmp_path: Path) -> None:
    code = "import sys; print(sorted(n for n in sys.modules if 'whyidle' in n), sys.meta_path[0])"
    for value in ("", "0", "true"):
        env = environment(tmp_path, {"WHYIDLE_PROBE": value})
        got = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert got.stdout.startswith("[] "), got.stdout
        assert "whyidle" not in got.stdout
    assert list(tmp_path.iterdir()) == []


def test_on_it_loads_little_opens_nothing_and_makes_no_page(tmp_path: Path) -> None:
    code = (
        "import sys, os, threading\n"
        "print(sorted(n for n in sys.modules if 'whyidle' in n))\n"
        "held = [f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd') if int(n) > 2]\n"
        "print(threading.active_count(), [path for path in held if os.path.exists(path)])\n"
    )
    got = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    modules, rest = got.stdout.splitlines()
    names = ["", ".api", ".finder", ".guard"]
    assert modules == str([f"whyidle_probe{name}" for name in names])
    assert rest == "1 []"
    assert list(tmp_path.iterdir()) == []


def test_the_sitecustomize_behind_it_is_loaded_too(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import builtins\nbuiltins.greeting = __file__\n")
    path = os.pathsep.join((str(site_folder()), str(other)))
    code = "import sys; print(greeting, sys.modules['sitecustomize'].__file__, sys.path[1])"
    for value in ("0", "1"):
        env = environment(tmp_path, {"PYTHONPATH": path, "WHYIDLE_PROBE": value})
        got = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        mine = str(other / "sitecustomize.py")
        assert got.stdout.split() == [mine, mine, str(other)]


def test_a_sitecustomize_that_fails_is_reported_as_ever_and_the_probe_starts(
    tmp_path: Path,
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("raise RuntimeError('of the site')\n")
    path = os.pathsep.join((str(site_folder()), str(other)))
    done = train(tmp_path, WORK, more={"PYTHONPATH": path})
    assert done.stdout == "trained\n"
    assert "RuntimeError: of the site" in done.stderr
    assert len(pages(tmp_path / "pages")) == 1


def _full(tmp_path: Path) -> Path:
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    return folder


def test_a_full_folder_costs_the_page_and_leaves_a_mark(tmp_path: Path) -> None:
    folder = _full(tmp_path)
    try:
        done = train(tmp_path, WORK, folder=folder)
        assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
        (left,) = folder.iterdir()
        assert left.stat().st_size == 0
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_limit_on_file_sizes_costs_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(script(tmp_path, WORK))],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")


@pytest.mark.parametrize("kind", ["missing", "file", "readonly", "loop", "empty"])
def test_a_folder_that_cannot_be_used_costs_the_page(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "odd"
    if kind == "file":
        folder.write_text("no folder")
    elif kind == "readonly":
        folder = Path("/proc/self")  # nobody, not even root, can make files there
    elif kind == "loop":
        folder.symlink_to(folder)
    done = train(tmp_path, WORK, folder="" if kind == "empty" else folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")


def test_sigkill_leaves_a_page_that_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    body = """
    import time, whyidle_probe
    for _ in range(5):
        whyidle_probe.step()
    whyidle_probe.phase("checkpoint_save").__enter__()
    print("in", flush=True)
    time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, str(script(tmp_path, body))],
        env=environment(folder),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"in\n"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    (read,) = pages(folder)
    assert (read.header.pid, read.totals.steps, read.totals.phase) == (process.pid, 5, 1)
    assert read.totals.closed_ns is None
    # Who comes next takes it away: its process is dead.
    done = train(tmp_path, WORK)
    assert done.returncode == 0
    (after,) = pages(folder)
    assert after.header.pid != process.pid


def test_a_process_that_ends_in_good_order_takes_its_page_away(tmp_path: Path) -> None:
    done = train(tmp_path, "import sys, whyidle_probe\nwhyidle_probe.step()\nsys.exit(3)")
    assert done.returncode == 3
    assert list((tmp_path / "pages").iterdir()) == []


def test_the_child_of_a_fork_has_a_page_of_its_own_and_leaves_its_parents_alone(
    tmp_path: Path,
) -> None:
    done = train(
        tmp_path,
        """
        import gc, os, whyidle_probe
        for _ in range(4):
            whyidle_probe.step()
        held = whyidle_probe.phase("evaluation")
        held.__enter__()
        if os.fork() == 0:
            gc.collect()
            assert whyidle_probe.page_path() is None
            whyidle_probe.step()
            with whyidle_probe.phase("logging"):
                held.__exit__(None, None, None)  # of the parent: nothing to the child
            os._exit(0)
        os.wait()
        held.__exit__(None, None, None)
        silent = os.fork()
        if silent == 0:
            gc.collect()
            assert whyidle_probe.page_path() is None
            os._exit(0)
        print(os.waitpid(silent, 0)[1])
        whyidle_probe.step()
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    parent, child = pages(tmp_path / "pages")
    assert (parent.totals.steps, child.totals.steps) == (5, 1)
    assert parent.header.pid != child.header.pid
    assert child.totals.phase_ns[3] == 0
    assert parent.kinds().count("evaluation") == 1
    assert [kind for kind in child.kinds() if kind not in ("gc", "step")] == ["logging"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing(tmp_path: Path, method: str) -> None:
    (tmp_path / "seen").mkdir()
    done = train(
        tmp_path,
        f"""
        import whyidle_probe
        whyidle_probe.step()
        context = multiprocessing.get_context("{method}")
        children = [context.Process(target=work, args=(n,)) for n in (2, 3)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        print([child.exitcode for child in children])
        """,
        top="""
        import multiprocessing, shutil

        def work(steps):
            import whyidle_probe
            for _ in range(steps):
                whyidle_probe.step()
            # Children that end in good order take their pages away.
            shutil.copy(whyidle_probe.page_path(), "seen")
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 0]\n", "")
    found = pages(tmp_path / "seen")
    assert sorted(read.totals.steps or 0 for read in found) == [2, 3]
    assert len({read.header.pid for read in found}) == 2
    parent = [r for r in pages(tmp_path / "pages") if r.totals.steps == 1]
    assert len(parent) == 1


def test_the_umask_does_not_hide_the_page(tmp_path: Path) -> None:
    body = "import os, whyidle_probe\nos.umask(0o077)\nwhyidle_probe.step()"
    assert train(tmp_path, body).returncode == 0
    (path,) = (tmp_path / "pages").iterdir()
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_page_that_is_read_while_it_is_written_is_never_torn(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    body = """
    import whyidle_probe
    from whyidle_probe import api
    whyidle_probe.step()
    slots = api._PROCESS.made.slots
    print("on", flush=True)
    number = 0
    while True:
        number = (number + 1) & 0x7FFFFFFF
        slots[80] = number << 32 | number
    """
    process = subprocess.Popen(
        [sys.executable, str(script(tmp_path, body))],
        env=environment(folder),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        (path,) = folder.iterdir()
        seen: set[int] = set()
        end = time.monotonic() + 30.0
        while len(seen) < 1000 and time.monotonic() < end:
            value = read_page(path).totals.phase_ns[0]
            assert value is not None
            assert value >> 32 == value & 0xFFFFFFFF
            seen.add(value)
        assert len(seen) == 1000
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
