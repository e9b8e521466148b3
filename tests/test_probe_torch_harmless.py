"""The probe in real torch trainers: checkpoints, and no harm to anything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from probe_kit import environment, pages, script, train, trained
from probe_torch_kit import TOP, torch_trained
from whyidle_probe import layout as at

pytest.importorskip("torch", reason="needs torch, which the tests do not install by themselves")


def test_checkpoints_are_phases(tmp_path: Path) -> None:
    read = torch_trained(
        tmp_path,
        """
        from torch.serialization import save
        import io, threading
        made, _ = model()
        torch.save(made.state_dict(), "a.pt")
        save(made.state_dict(), "b.pt")
        torch.load("a.pt")
        thread = threading.Thread(target=torch.save, args=(made.state_dict(), io.BytesIO()))
        thread.start()
        thread.join()
        try:
            torch.load("missing.pt")
        except FileNotFoundError as error:
            print(error.filename)
        """,
    )
    totals = read.totals
    assert (totals.phase_ns[1] or 0) > 0
    assert (totals.phase_ns[2] or 0) > 0
    assert (totals.phase_background_ns[1] or 0) > 0
    kinds = [(r.kind, r.background) for r in read.records if r.kind != "gc"]
    assert kinds == [
        *[("checkpoint_save", False)] * 2,
        ("checkpoint_load", False),
        ("checkpoint_save", True),
        ("checkpoint_load", False),
    ]
    assert (totals.phase, totals.steps, totals.optimizer_steps) == (0, None, None)


def test_distributed_checkpoints_and_ranks_without_variables(tmp_path: Path) -> None:
    read = torch_trained(
        tmp_path,
        """
        import torch.distributed as dist, torch.distributed.checkpoint as dcp, warnings
        dist.init_process_group("gloo", init_method="file://" + __file__ + ".store",
                                rank=0, world_size=1)
        made, optimizer = model()
        fit(DataLoader(Map(4), batch_size=2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": made.state_dict()}, checkpoint_id="saved")
            dcp.load({"model": made.state_dict()}, checkpoint_id="saved")
        """,
    )
    assert (read.header.rank, read.header.world_size) == (0, 1)
    kinds = [kind for kind in read.kinds() if kind.startswith("checkpoint")]
    assert "checkpoint_save" in kinds
    assert kinds[-1] == "checkpoint_load"


LOSSES = """
import hashlib, struct
for workers in (0, 2):
    for data in (Map(32), Stream(32)):
        shuffle = isinstance(data, Map)
        loader = DataLoader(data, batch_size=4, num_workers=workers, shuffle=shuffle)
        torch.manual_seed(3)
        losses = fit(loader) + fit(loader)
        print(hashlib.sha256(struct.pack(f"{len(losses)}d", *losses)).hexdigest())
"""


def test_losses_are_the_same_bit_by_bit_with_and_without(tmp_path: Path) -> None:
    got = []
    for value in ("0", "1", "1"):
        done = train(
            tmp_path,
            LOSSES,
            top=TOP.replace(", whyidle_probe", ""),
            more={"WHYIDLE_PROBE": value, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        got.append(done.stdout.split())
    assert len(got[0]) == 4
    assert got[0] == got[1] == got[2]


def test_a_compiled_step_is_compiled_as_without(tmp_path: Path) -> None:
    # What torch breaks by itself stays: it makes no whole graph of an optimizer's step.
    body = """
    from torch._dynamo.utils import counters
    made, optimizer = model()
    made(torch.ones(4)).sum().backward()
    step = torch.compile(optimizer.step, backend="eager")
    torch.save({}, "a.pt")
    for _ in range(3):
        step()
    print(dict(counters["stats"]), sum(counters["graph_break"].values()))
    print(float(made.weight.sum()))
    """
    plain = TOP.replace(", whyidle_probe", "")
    done = [train(tmp_path, body, top=plain, more={"WHYIDLE_PROBE": v}) for v in ("0", "1")]
    assert done[0].returncode == 0, done[0].stderr
    assert "'unique_graphs': 1" in done[0].stdout
    assert done[0].stdout == done[1].stdout
    # A step that is compiled is not counted: not known, which is not none.
    (read,) = pages(tmp_path / "pages")
    assert (read.totals.steps, read.totals.hook_errors) == (None, 0)


def test_errors_of_the_trainer_pass_as_they_are(tmp_path: Path) -> None:
    read = torch_trained(
        tmp_path,
        """
        class Broken(Map):
            def __getitem__(self, index):
                if index == 3:
                    raise KeyError("of the data set")
                return torch.zeros(4)
        for workers in (0, 1):
            try:
                fit(DataLoader(Broken(), batch_size=1, num_workers=workers))
            except KeyError as error:
                print(type(error).__name__)
        """,
    )
    assert [loader.batches for loader in read.loaders] == [3, 3]
    assert [loader.ends for loader in read.loaders] == [1, 1]
    assert [loader.waiting_since_ns for loader in read.loaders] == [0, 0]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_kind_publish_nothing(tmp_path: Path, method: str) -> None:
    body = f"""
    loader = DataLoader(Loading(8), batch_size=2, num_workers=2,
                        multiprocessing_context="{method}")
    torch.save(torch.ones(4), "ones.pt")
    fit(loader)
    print("trained")
    """
    top = TOP + (
        "class Loading(Map):\n"
        "    def __getitem__(self, index):\n"
        "        return torch.load('ones.pt')\n"
    )
    folder = tmp_path / "pages"
    folder.mkdir()
    done = train(tmp_path, body, top=top)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    (read,) = pages(folder)
    assert read.loaders[0].batches == 4
    assert read.totals.phase_ns[2] == 0


def test_start_after_torch_was_imported(tmp_path: Path) -> None:
    read = trained(
        tmp_path,
        "whyidle_probe.start()\nfit(DataLoader(Map(), batch_size=4))\ntorch.save({}, 'a.pt')",
        top=TOP,
        more={"WHYIDLE_PROBE": "0", "PYTHONPATH": str(Path(at.__file__).parents[1])},
    )
    assert (read.totals.steps, read.loaders[0].batches) == (4, 4)
    assert "checkpoint_save" in read.kinds()


def test_modules_keep_their_loaders_specs_and_names(tmp_path: Path) -> None:
    code = """
    import torch, inspect
    import torch.utils.data.dataloader as module
    print(type(module.__loader__).__name__, module.__spec__.loader is module.__loader__)
    print("exec_module" in vars(module.__loader__), inspect.getsource(module)[:3])
    print(torch.save.__name__, torch.save.__module__, torch.save is torch.serialization.save)
    print(list(inspect.signature(torch.load).parameters)[:2])
    """
    got = [train(tmp_path, code, more={"WHYIDLE_PROBE": value}).stdout for value in ("0", "1")]
    assert got[0] == got[1]
    assert got[0].startswith("SourceFileLoader True\nFalse")


def test_a_folder_without_room_changes_nothing(tmp_path: Path) -> None:
    body = "print(fit(DataLoader(Map(), batch_size=4, num_workers=1)))"
    alike = [
        train(tmp_path, body, top=TOP, folder=folder, more={"OMP_NUM_THREADS": "1"})
        for folder in (tmp_path / "missing", "/proc/self", None)
    ]
    assert len({done.stdout for done in alike}) == 1
    assert [done.returncode for done in alike] == [0, 0, 0]


def test_sigkill_says_what_it_was_stuck_in(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    body = """
    class Stuck(Map):
        def __getitem__(self, index):
            if index == 2:
                print("in", flush=True)
                time.sleep(60)
            return torch.zeros(4)
    fit(DataLoader(Stuck(), batch_size=1))
    """
    process = subprocess.Popen(
        [sys.executable, str(script(tmp_path, body, TOP))],
        env=environment(folder),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"in\n"
        process.kill()
        process.wait(30)
    (read,) = pages(folder)
    assert read.totals.steps == 2
    assert (read.loaders[0].waiting_since_ns or 0) > 0
