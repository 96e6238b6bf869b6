from __future__ import annotations

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from dsa.errors import UsageError
from dsa.optim.hooks import watch
from dsa.optim.row_sets import TableDirectory


class RecordingAnnouncer:
    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int]]] = []

    def announce_hook(self, table: int, rows: NDArray[np.int64]) -> None:
        assert rows.dtype == np.int64
        assert (np.diff(rows) > 0).all()
        self.calls.append((table, rows.tolist()))

    def union(self) -> dict[int, set[int]]:
        rows: dict[int, set[int]] = {}
        for table, found in self.calls:
            rows.setdefault(table, set()).update(found)
        return rows


class Model(nn.Module):
    """Two tables, one of them a bag; `twin` is the module `nodes` again."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Embedding(50, 3, sparse=True, padding_idx=0)
        self.words = nn.EmbeddingBag(20, 3, sparse=True, mode="sum")
        self.twin = self.nodes

    def forward(self, nodes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return torch.add(self.nodes(nodes).sum(), self.words(words).sum())


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def tables(model: Model) -> TableDirectory:
    return TableDirectory(model.named_parameters())


@pytest.fixture
def announcer() -> RecordingAnnouncer:
    return RecordingAnnouncer()


NODES = torch.tensor([[9, 4], [4, 0]])
WORDS = torch.tensor([[3, 1, 3]])


def test_rows_are_announced_before_forward_looks_them_up(
    model: Model, tables: TableDirectory, announcer: RecordingAnnouncer
) -> None:
    watch(model, announcer, tables)
    model(NODES, WORDS)
    assert announcer.calls == [(0, [4, 9]), (1, [1, 3])]


def test_what_is_announced_is_what_gets_a_gradient(
    model: Model, tables: TableDirectory, announcer: RecordingAnnouncer
) -> None:
    watch(model, announcer, tables)
    model(NODES, WORDS).backward()
    for number, parameter in enumerate(model.parameters()):
        assert parameter.grad is not None
        assert set(parameter.grad.coalesce().indices()[0].tolist()) == announcer.union()[number]


def test_six_lookups_in_one_forward_pass(model: Model, tables: TableDirectory, announcer: RecordingAnnouncer) -> None:
    watch(model, announcer, tables)
    for start in range(1, 7):
        model.nodes(torch.arange(start, start + 3))
    assert announcer.union() == {0: {1, 2, 3, 4, 5, 6, 7, 8}}


def test_a_keyword_input_counts(model: Model, tables: TableDirectory, announcer: RecordingAnnouncer) -> None:
    watch(model, announcer, tables)
    model.nodes(input=torch.tensor([8], dtype=torch.int32))
    model.words(torch.tensor([5, 6, 5]), offsets=torch.tensor([0, 1]))
    assert announcer.calls == [(0, [8]), (1, [5, 6])]


def test_nothing_is_announced_where_nothing_will_be_stepped(
    model: Model, tables: TableDirectory, announcer: RecordingAnnouncer
) -> None:
    watch(model, announcer, tables)
    model.eval()
    model(NODES, WORDS)
    model.train()
    with torch.no_grad():
        model(NODES, WORDS)
    with torch.inference_mode():
        model(NODES, WORDS)
    model.requires_grad_(False)
    model(NODES, WORDS)
    model.requires_grad_(True)
    model.nodes(torch.empty(0, dtype=torch.int64))
    model.nodes(torch.tensor([0, 0]))
    assert announcer.calls == []


def test_forward_itself_refuses_bad_rows(model: Model, tables: TableDirectory, announcer: RecordingAnnouncer) -> None:
    watch(model, announcer, tables)
    for bad in (torch.tensor([50]), torch.tensor([-1])):
        with pytest.raises(IndexError):
            model.nodes(bad)
    with pytest.raises(RuntimeError, match="scalar type"):
        model.nodes(torch.tensor([1.0]))
    with pytest.raises(TypeError):
        model.nodes()
    assert announcer.calls == []


def test_a_shared_module_has_one_hook(model: Model, tables: TableDirectory, announcer: RecordingAnnouncer) -> None:
    watch(model, announcer, tables)
    model.twin(torch.tensor([3]))
    assert announcer.calls == [(0, [3])]


def test_remove_and_with(model: Model, tables: TableDirectory, announcer: RecordingAnnouncer) -> None:
    handle = watch(model, announcer, tables)
    handle.remove()
    handle.remove()
    model(NODES, WORDS)
    assert announcer.calls == []
    with watch(model, announcer, tables):
        model.nodes(torch.tensor([3]))
    model(NODES, WORDS)
    assert announcer.calls == [(0, [3])]


def test_only_managed_weights_are_watched(model: Model, announcer: RecordingAnnouncer) -> None:
    watch(model, announcer, TableDirectory([("words", model.words.weight)]))
    model(NODES, WORDS)
    assert announcer.calls == [(0, [1, 3])]


def test_a_weight_exchanged_later_is_not_announced(
    model: Model, tables: TableDirectory, announcer: RecordingAnnouncer
) -> None:
    watch(model, announcer, tables)
    model.nodes.weight = nn.Parameter(torch.zeros(50, 3))
    model(NODES, WORDS)
    assert announcer.calls == [(1, [1, 3])]


def test_a_model_without_managed_lookups_is_refused(tables: TableDirectory, announcer: RecordingAnnouncer) -> None:
    for other in (nn.Linear(2, 2), Model()):
        with pytest.raises(UsageError, match=r"no nn\.Embedding or nn\.EmbeddingBag"):
            watch(other, announcer, tables)


def test_copies_of_a_watched_model_announce_nothing(
    model: Model, tables: TableDirectory, announcer: RecordingAnnouncer
) -> None:
    watch(model, announcer, tables)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        other(NODES, WORDS)
    assert announcer.calls == []


def test_a_watched_model_keeps_no_announcer_alive(model: Model, tables: TableDirectory) -> None:
    announcer = RecordingAnnouncer()
    gone = weakref.ref(announcer)
    watch(model, announcer, tables)
    del announcer
    gc.collect()
    assert gone() is None
    model(NODES, WORDS)
