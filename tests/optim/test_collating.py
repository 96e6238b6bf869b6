"""Rows found by a loader's workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from dsa import DiskSparseAdam, collate_with_rows
from dsa.errors import ConfigError


def rows_of(batch: torch.Tensor) -> dict[str, Any]:
    return {"weight": batch}


def key_of(batch: torch.Tensor) -> dict[Any, Any]:
    return {0: batch}


def halves(batch: torch.Tensor) -> dict[str, Any]:
    return {"weight": batch / 2}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loop_gets_plain_batches_and_their_rows_are_announced(tmp_path: Path, workers: int) -> None:
    table = torch.nn.Embedding(50, 3, sparse=True)
    samples = [[i % 7, i % 11, i % 7] for i in range(40)]
    loader = DataLoader(
        [torch.tensor(sample) for sample in samples],  # type: ignore[arg-type]
        batch_size=8,
        num_workers=workers,
        collate_fn=collate_with_rows(default_collate, rows_of),
    )
    with DiskSparseAdam(table.named_parameters(), state_dir=tmp_path / "state") as opt:
        seen = []
        for batch in opt.lookahead(loader, depth=2):
            opt.zero_grad()
            table(batch).sum().backward()
            opt.step()
            seen += batch.tolist()
        assert seen == samples
        assert opt.statistics().announced_share == 1.0


def test_rows_are_sorted_and_unique() -> None:
    made = collate_with_rows(default_collate, rows_of)([torch.tensor([5, 1]), torch.tensor([1, 9])])
    assert made.rows["weight"].rows.tolist() == [1, 5, 9]
    assert made.batch.tolist() == [[5, 1], [1, 9]]


@pytest.mark.parametrize(("rows", "word"), [(key_of, "name"), (halves, "integers")])
def test_what_a_worker_cannot_announce_is_refused(rows: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        collate_with_rows(default_collate, rows)([torch.tensor([5, 1])])


def test_a_rows_function_goes_before_the_rows_that_came(tmp_path: Path) -> None:
    table = torch.nn.Embedding(50, 3, sparse=True)
    collate = collate_with_rows(default_collate, rows_of)
    loader = DataLoader([torch.tensor([1]), torch.tensor([2])], collate_fn=collate)  # type: ignore[arg-type]
    asked = []

    def rows(batch: torch.Tensor) -> dict[Any, Any]:
        asked.append(batch.tolist())
        return {table: batch}

    with DiskSparseAdam(table.named_parameters(), state_dir=tmp_path / "state") as opt:
        assert [batch.tolist() for batch in opt.lookahead(loader, rows)] == [[[1]], [[2]]]
    assert asked == [[[1]], [[2]]]
