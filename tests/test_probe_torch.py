"""The probe in real torch trainers: every kind of DataLoader, steps, checkpoints, and no harm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from probe_kit import Read, environment, pages, script, train, trained
from whyidle_probe import layout as at

pytest.importorskip("torch", reason="needs torch, which the tests do not install by themselves")

TOP = """
import time, torch, whyidle_probe
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Map(Dataset):
    def __init__(self, size=16, pause_s=0.0):
        self.size, self.pause_s = size, pause_s
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        time.sleep(self.pause_s)
        return torch.full((4,), float(index))

class Stream(IterableDataset):
    def __init__(self, size=16):
        self.size = size
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, self.size, step):
            yield torch.full((4,), float(index))

def model():
    torch.manual_seed(7)
    made = torch.nn.Linear(4, 1)
    return made, torch.optim.SGD(made.parameters(), lr=0.001)

def fit(loader, pause_s=0.0, every=1):
    made, optimizer = model()
    losses = []
    for number, batch in enumerate(loader):
        loss = made(batch).pow(2).mean() / every
        loss.backward()
        if (number + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
        time.sleep(pause_s)
    return losses
"""


def torch_trained(tmp_path: Path, body: str) -> Read:
    return trained(tmp_path, body, top=TOP)


def test_a_trainer_that_loads_by_itself(tmp_path: Path) -> None:
    read = torch_trained(tmp_path, "fit(DataLoader(Map(pause_s=0.004), batch_size=4))")
    (loader,) = read.loaders
    assert (loader.workers, loader.capacity, loader.batch_size) == (0, None, 4)
    assert (loader.ready, loader.outstanding, loader.unpinned) == (None, None, None)
    assert (loader.batches, loader.outside_batches, loader.flags) == (4, 0, 0)
    assert loader.wait_ns is not None
    assert loader.wait_ns > 4 * 4 * 4_000_000
    assert (loader.iterators, loader.ends, loader.waiting_since_ns) == (1, 1, 0)
    totals = read.totals
    assert (totals.steps, totals.optimizer_steps, totals.hook_errors) == (4, 4, 0)
    assert read.header.torch is not None
    assert read.header.torch.startswith("2.")
    steps = [record.values for record in read.records if record.kind == "step"]
    batches, waits = sum(s[2] or 0 for s in steps), sum(s[1] or 0 for s in steps)
    assert (batches, waits) == (4, loader.wait_ns)
    assert steps[-1][0] == 4


def test_a_fast_loader_is_found_full_and_a_slow_one_empty(tmp_path: Path) -> None:
    read = torch_trained(
        tmp_path,
        """
        fit(DataLoader(Map(40), batch_size=2, num_workers=2, prefetch_factor=3), pause_s=0.03)
        fit(DataLoader(Map(16, pause_s=0.02), batch_size=2, num_workers=1, prefetch_factor=2))
        """,
    )
    fast, slow = read.loaders
    assert (fast.workers, fast.capacity, fast.batches, fast.ends) == (2, 6, 20, 1)
    assert (slow.workers, slow.capacity, slow.batches, slow.ends) == (1, 2, 8, 1)
    assert None not in (fast.ready_sum, fast.empty_arrivals, slow.ready_sum, slow.empty_arrivals)
    # 21 arrivals each: full but for the start and the end of the epoch.
    assert (fast.ready_sum or 0) > 60
    assert (fast.empty_arrivals or 0) <= 3
    assert (slow.empty_arrivals or 0) >= 8
    assert (slow.wait_ns or 0) > 5 * (fast.wait_ns or 0) / 3
    assert (fast.outstanding, slow.outstanding) == (0, 0)
    assert (fast.setup_ns or 0) > 0
    assert (fast.flags or 0) & at.FLAG_WORKERS
    assert len(pages(tmp_path / "pages")) == 1  # none of the workers


def test_batches_that_came_out_of_order_are_ready_too(tmp_path: Path) -> None:
    read = torch_trained(
        tmp_path,
        """
        class Late(Map):
            def __getitem__(self, index):
                time.sleep(0.4 if index == 0 else 0.0)
                return torch.zeros(4)
        iterator = iter(DataLoader(Late(4), batch_size=1, num_workers=4, prefetch_factor=1))
        next(iterator)      # three others have come meanwhile, and lie in the iterator
        next(iterator)
        """,
    )
    (loader,) = read.loaders
    assert (loader.ready, loader.outstanding) == (3, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_data_sets(tmp_path: Path, workers: int) -> None:
    read = torch_trained(
        tmp_path,
        f"""
        loader = DataLoader(Stream(), batch_size=2, num_workers={workers})
        for _ in range(2):
            fit(loader, pause_s=0.01)
        """,
    )
    (loader,) = read.loaders
    assert (loader.flags or 0) & at.FLAG_ITERABLE
    assert (loader.batches, loader.iterators, loader.ends) == (16, 2, 2)
    # The last thing that a worker sends is that it has ended.
    assert loader.ready == (workers if workers else None)
    assert loader.outstanding == (0 if workers else None)


def test_persistent_workers_begin_epochs_without_a_new_iterator(tmp_path: Path) -> None:
    read = torch_trained(
        tmp_path,
        """
        loader = DataLoader(Map(), batch_size=4, num_workers=2, persistent_workers=True)
        for _ in range(3):
            fit(loader)
        """,
    )
    (loader,) = read.loaders
    assert (loader.flags or 0) & at.FLAG_PERSISTENT
    assert (loader.serial, loader.batches, loader.iterators, loader.ends) == (1, 12, 3, 3)


def test_the_pin_memory_thread_has_a_queue_of_its_own(tmp_path: Path) -> None:
    # Without an accelerator torch pins nothing: its thread runs, and hands batches on as they are.
    read = torch_trained(
        tmp_path,
        """
        torch.accelerator.is_available = lambda: True
        torch.accelerator.current_accelerator = lambda: torch.device("meta")
        torch.accelerator.current_device_index = lambda: 0
        torch.accelerator.set_device_index = lambda index: None
        torch.utils.data._utils.pin_memory.pin_memory = lambda data, device=None: data
        fit(DataLoader(Map(24), batch_size=2, num_workers=2, pin_memory=True), pause_s=0.02)
        """,
    )
    (loader,) = read.loaders
    assert (loader.flags or 0) & at.FLAG_PIN_MEMORY
    assert (loader.batches, loader.unpinned) == (12, 0)
    assert (loader.ready_sum or 0) > 12
    assert read.totals.hook_errors == 0


def test_fetches_outside_of_steps_are_kept_apart(tmp_path: Path) -> None:
    read = torch_trained(
        tmp_path,
        """
        import threading
        train, held_out = DataLoader(Map(), batch_size=4), DataLoader(Map(8), batch_size=4)
        fit(train)
        with torch.no_grad():
            for batch in held_out: pass
        with torch.inference_mode():
            for batch in held_out: pass
        with whyidle_probe.phase("evaluation"):
            for batch in held_out: pass
        thread = threading.Thread(target=lambda: [None for _ in held_out])
        thread.start()
        thread.join()
        """,
    )
    first, second = read.loaders
    assert (first.batches, first.outside_batches, first.background_batches) == (4, 0, 0)
    assert (second.batches, second.outside_batches, second.background_batches) == (0, 6, 2)
    assert read.totals.steps == 4


def test_steps_are_those_of_the_first_optimizer_after_a_batch(tmp_path: Path) -> None:
    read = torch_trained(
        tmp_path,
        """
        fit(DataLoader(Map(), batch_size=1), every=4)       # 4 steps of 4 batches each
        one, first = model()
        two, second = model()
        first.step()                                        # the lead went: this one leads now
        for batch in DataLoader(Map(6), batch_size=2):
            first.step(); first.step(); second.step()       # a step, whatever else is called
        """,
    )
    assert read.totals.optimizer_steps == 4 + 1 + 9
    assert read.totals.steps == 4 + 3


def test_more_loaders_than_places(tmp_path: Path) -> None:
    read = torch_trained(
        tmp_path,
        """
        for _ in range(40):
            fit(DataLoader(Map(2), batch_size=1))           # each dies before the next
        kept = [DataLoader(Map(2), batch_size=1) for _ in range(12)]
        for loader in kept:
            fit(loader)
        """,
    )
    assert len(read.loaders) == at.LOADERS
    assert read.totals.loaders_seen == 52
    assert sum(loader.batches or 0 for loader in read.loaders) == 104
    assert [bool((loader.flags or 0) & at.FLAG_SHARED) for loader in read.loaders] == [
        False
    ] * 7 + [True]
    assert read.totals.hook_errors == 0


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
