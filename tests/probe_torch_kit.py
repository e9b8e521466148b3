"""Real torch trainers for the tests of the probe."""

from __future__ import annotations

from pathlib import Path

from probe_kit import Read, trained

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
