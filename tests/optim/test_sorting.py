"""Look-ups sorted when they are announced: of use for those very ones only, and then with torch's own order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dsa import DiskSparseAdam, collate_with_rows
from dsa.optim import books
from dsa.optim.sorting import Sorted, sort


def a_list_of_rows(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": batch}


@given(st.lists(st.integers(0, 20), max_size=60))
def test_rows_runs_and_order_are_those_of_torch(rows: list[int]) -> None:
    looked_up = torch.tensor(rows, dtype=torch.int64)
    found = sort(looked_up, recognizable=True)
    assert found.rows.tolist() == sorted(set(rows))
    assert np.array_equal(found.order, looked_up.sort(0).indices.numpy())
    lengths = np.diff(found.starts)
    assert np.array_equal(np.repeat(found.rows, lengths), looked_up.sort(0).values.numpy())
    assert found.is_of(looked_up.clone())


@given(st.lists(st.integers(0, 4), max_size=8), st.lists(st.integers(0, 4), max_size=8))
def test_it_is_of_the_same_look_ups_at_the_same_places_only(one: list[int], other: list[int]) -> None:
    found = sort(torch.tensor(one, dtype=torch.int64), recognizable=True)
    assert found.is_of(torch.tensor(other, dtype=torch.int64)) == (one == other)


@pytest.mark.parametrize("change", ["another row", "two exchanged", "one more often", "one fewer"])
def test_a_large_batch_with_one_difference_is_another(change: str) -> None:
    looked_up = torch.randint(0, 500, (5000,), generator=torch.Generator().manual_seed(1))
    found = sort(looked_up, recognizable=True)
    other = looked_up.clone()
    if change == "another row":
        other[77] = 501
    elif change == "two exchanged":
        other[0], other[1] = looked_up[1], looked_up[0]
        assert other[0] != other[1]
    elif change == "one more often":
        other[5] = other[6] = looked_up[7]
    else:
        other = other[:-1].contiguous()
    assert found.is_of(looked_up)
    assert not found.is_of(other)


def test_a_workers_order_is_the_training_processs_own() -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(0, 50, (3000,), generator=generator) for _ in range(4)]
    loader = DataLoader(
        batches,  # type: ignore[arg-type]
        batch_size=1,
        num_workers=2,
        collate_fn=collate_with_rows(_only, a_list_of_rows),
    )
    for batch, made in zip(batches, loader, strict=True):
        here = sort(batch)
        assert made.rows["weight"].is_of(batch)
        for name in ("rows", "order", "starts"):
            assert np.array_equal(getattr(made.rows["weight"], name), getattr(here, name))


def _only(samples: list[torch.Tensor]) -> torch.Tensor:
    return samples[0]


def test_a_batch_that_changes_after_it_was_announced_is_another() -> None:
    looked_up = torch.tensor([5, 2, 5, 9])
    found = sort(looked_up, recognizable=True)
    looked_up[0] = 7  # a loader may use its memory again
    assert found.is_of(torch.tensor([5, 2, 5, 9]))
    assert not found.is_of(looked_up)


def test_look_ups_that_were_not_kept_are_not_recognized() -> None:
    looked_up = torch.tensor([5, 2, 5])
    assert not sort(looked_up).is_of(looked_up)


def test_rows_without_an_order_are_the_order_of_nothing() -> None:
    found = Sorted.of_rows(np.array([3, 7]))
    assert not found.ordered
    assert not found.is_of(torch.tensor([3, 7]))
    assert not found.is_of(torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize(("look_ups", "ordered"), [(1, 12), (2, 6)])
def test_the_order_is_looked_for_while_it_is_of_use(tmp_path: Path, look_ups: int, ordered: int) -> None:
    # A batch is announced two steps ahead; what looks a table up twice is given another order by torch.
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, 40, (look_ups, 25), generator=generator) for _ in range(12)]
    embedding = torch.nn.Embedding(40, 3, sparse=True)
    with DiskSparseAdam(embedding.parameters(), state_dir=tmp_path / "s", cache=1 << 20) as optimizer:
        announcer = optimizer._books.announcer
        known = []
        for batch in optimizer.lookahead(batches, rows=lambda batch: {embedding: batch}, depth=2):
            announced = announcer.handed_out[0]
            assert announced.rows.tolist() == batch.unique().tolist()
            known.append(announced.ordered)
            optimizer.zero_grad()
            sum(embedding(rows).pow(2).sum() for rows in batch).backward()
            optimizer.step()
    assert known == [True] * ordered + [False] * (12 - ordered)


def test_an_order_that_was_of_no_use_is_tried_again_now_and_then(tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(40, 3, sparse=True)
    batches = [torch.randint(0, 40, (25,)) for _ in range(600)]
    with DiskSparseAdam(embedding.parameters(), state_dir=tmp_path / "s", cache=1 << 20) as optimizer:
        announcer = optimizer._books.announcer
        for _ in range(4):
            announcer.order_was_of_use(0, False)
        known = []
        for batch in optimizer.lookahead(batches, rows=lambda batch: {embedding: batch}, depth=0):
            known.append(announcer.handed_out[0].ordered)
            optimizer.zero_grad()
            embedding(batch).sum().backward()
            optimizer.step()
    first = known.index(True)
    assert 200 < first < 300
    assert all(known[first:])  # it was of use


@pytest.mark.parametrize("workers", [False, True])
def test_beyond_so_many_look_ups_no_order_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: bool
) -> None:
    monkeypatch.setattr(books, "MOST_LOOK_UPS", 100)
    embedding = torch.nn.Embedding(400, 3, sparse=True)
    batches = [torch.randint(0, 400, (30,), generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
    batches[6] = torch.arange(101)
    loader: Any = batches
    rows: Any = lambda batch: {embedding: batch}  # noqa: E731
    if workers:
        loader, rows = DataLoader(batches, batch_size=1, collate_fn=collate_with_rows(_only, a_list_of_rows)), None
    with DiskSparseAdam(embedding.named_parameters(), state_dir=tmp_path / "s", cache=1 << 20) as optimizer:
        announcer = optimizer._books.announcer
        known = []
        for batch in optimizer.lookahead(loader, rows=rows, depth=5):
            assert sum(len(kept.order) for _, found in announcer._sorted.values() for kept in found.values()) <= 100
            assert announcer.handed_out[0].rows.tolist() == batch.unique().tolist()
            known.append(announcer.handed_out[0].ordered)
            optimizer.zero_grad()
            embedding(batch).sum().backward()
            optimizer.step()
    # Three of the first six make 90; as one of them goes, the next one to come is ordered. The seventh is too large.
    assert known[:7] == [True, True, True, False, False, False, False]
    assert any(known[7:])


def test_what_is_kept_with_the_rows_is_no_larger_than_they_are() -> None:
    # The window keeps rows as long as a batch is known, which is longer than anybody needs the rest.
    found = sort(torch.arange(1000) % 10, recognizable=True)
    assert len(found.rows) == 10
    assert found.rows.base is None
