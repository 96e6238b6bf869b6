"""Lookahead changes no number: shuffling, negatives drawn in collate and dropout are the same at every depth."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dsa import DiskSparseAdam

N_ROWS, PAIRS, BATCH, EPOCHS = 60, 96, 8, 3
DEPTHS = (0, 1, 3, 20)
pytestmark = pytest.mark.usefixtures("one_thread")


def with_negatives(pairs: list[Tensor]) -> Tensor:
    """The pairs with corrupted ones beside them, drawn from all three global generators."""
    batch = torch.stack(pairs)
    wrong = batch.clone()
    wrong[:, 0] = torch.randint(0, N_ROWS, (len(batch),))
    wrong[0, 1] = int(np.random.randint(0, N_ROWS))
    wrong[1, 1] = random.randrange(N_ROWS)
    return torch.stack([batch, wrong])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(N_ROWS, 6, sparse=True)
        self.drop = nn.Dropout(0.4)

    def forward(self, batch: Tensor) -> Tensor:
        heads, tails = self.drop(self.emb(batch[..., 0])), self.drop(self.emb(batch[..., 1]))
        score = (heads * tails).sum(-1)
        return nn.functional.softplus(score[1] - score[0]).mean()


def train(state_dir: Path, workers: int, depth: int) -> tuple[list[float], Tensor]:
    """The losses of three epochs, and the weights after them."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    model = Model()
    pairs = torch.randint(0, N_ROWS, (PAIRS, 2))
    loader: Any = DataLoader(list(pairs), BATCH, shuffle=True, num_workers=workers, collate_fn=with_negatives)
    opt = DiskSparseAdam(model.named_parameters(), lr=0.05, state_dir=state_dir, cache=4000, kernel="reference")
    batches = opt.lookahead(loader, rows=lambda batch: {model.emb: batch}, depth=depth)
    losses = []
    with warnings.catch_warnings():
        # A worker is a fork of a process with threads; Python 3.12 warns of any such.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
        for _ in range(EPOCHS):
            for batch in batches:
                opt.zero_grad()
                loss = model(batch)
                loss.backward()
                opt.step()
                losses.append(loss.item())
    assert opt.statistics().announced_share == 1.0
    opt.close()
    return losses, model.emb.weight.detach()


@pytest.mark.parametrize("workers", [0, 2])
def test_losses_are_the_same_at_every_depth(tmp_path: Path, workers: int) -> None:
    runs = {depth: train(tmp_path / str(depth), workers, depth) for depth in DEPTHS}
    losses, weights = runs[0]
    assert len(losses) == EPOCHS * PAIRS // BATCH
    assert len(set(losses)) == len(losses)
    for depth, (others, other_weights) in runs.items():
        assert others == losses, f"depth {depth}"
        assert torch.equal(other_weights, weights), f"depth {depth}"


def test_the_disk_optimizer_follows_sparse_adam_where_nothing_is_drawn_twice(tmp_path: Path) -> None:
    """Without lookahead both draw from one stream: the same losses as with torch's own optimizer."""

    def losses(optimizer: Any, model: Model) -> list[float]:
        torch.manual_seed(5)
        found = []
        for batch in DataLoader(list(torch.arange(2 * PAIRS).view(-1, 2) % N_ROWS), BATCH, shuffle=True):
            optimizer.zero_grad()
            loss = model(torch.stack([batch, batch.flip(1).roll(1, 0)]))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.manual_seed(4)
    disk, ram = Model(), Model()
    ram.load_state_dict(disk.state_dict())
    with DiskSparseAdam(disk.named_parameters(), state_dir=tmp_path / "s", kernel="reference") as opt:
        right = losses(torch.optim.SparseAdam(ram.parameters()), ram)
        with opt.watch(disk):
            assert losses(opt, disk) == right
