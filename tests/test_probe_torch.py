"""The probe in real torch trainers: every kind of DataLoader, and steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from probe_kit import pages
from probe_torch_kit import torch_trained
from whyidle_probe import layout as at

pytest.importorskip("torch", reason="needs torch, which the tests do not install by themselves")


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
