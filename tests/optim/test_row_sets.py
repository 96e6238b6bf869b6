from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsa.errors import ConfigError, UsageError
from dsa.optim.row_sets import TableDirectory, resolve, sorted_unique


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Embedding(100, 4, sparse=True)
        self.relations = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 1)


@pytest.fixture
def model() -> TwoTables:
    return TwoTables()


@pytest.fixture
def tables(model: TwoTables) -> TableDirectory:
    return TableDirectory((name, p) for name, p in model.named_parameters() if not name.startswith("head"))


def test_a_module_a_parameter_and_a_name_mean_the_same_table(model: TwoTables, tables: TableDirectory) -> None:
    for key in (model.relations, model.relations.weight, "relations.weight"):
        rows = resolve({key: [7, 3, 7]}, tables)
        assert list(rows) == [1]
        assert rows[1].dtype == np.int64
        assert rows[1].tolist() == [3, 7]


def test_two_keys_of_one_table_are_united(model: TwoTables, tables: TableDirectory) -> None:
    rows = resolve({model.nodes: [5, 1], "nodes.weight": torch.tensor([[5, 99]]), model.relations: 2}, tables)
    assert {number: got.tolist() for number, got in rows.items()} == {0: [1, 5, 99], 1: [2]}


@pytest.mark.parametrize(
    "rows",
    [
        [4, 2, 4],
        (2, 4),
        range(2, 6, 2),
        np.array([[4, 2], [2, 4]], dtype=np.int16),
        np.array([4, 2], dtype=np.uint64),
        torch.tensor([4, 2, 2]),
        torch.tensor([[2], [4]], dtype=torch.int32),
        torch.tensor([4, 0, 2, 0])[::2],
        [torch.tensor(2), torch.tensor(4)],
    ],
)
def test_every_form_of_integer_rows_is_taken(rows: object, tables: TableDirectory) -> None:
    assert resolve({"nodes.weight": rows}, tables)[0].tolist() == [2, 4]  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "rows", [[], (), range(0), np.empty((0, 3), np.int64), torch.tensor([]), torch.tensor([]).long()]
)
def test_no_rows_are_an_empty_set(rows: object, tables: TableDirectory) -> None:
    got = resolve({"nodes.weight": rows}, tables)[0]  # type: ignore[dict-item]
    assert got.dtype == np.int64
    assert got.shape == (0,)


@pytest.mark.parametrize(
    "rows",
    [
        [1.0],
        [True],
        ["1"],
        [[1], [1, 2]],
        [1, 2**70],
        {1, 2},
        None,
        np.array([1.0]),
        torch.tensor([1.5]),
        torch.tensor([True]),
        torch.tensor([1.0], dtype=torch.bfloat16),
    ],
)
def test_rows_that_are_no_integers_are_refused(rows: object, tables: TableDirectory) -> None:
    with pytest.raises(ConfigError, match=r"nodes\.weight"):
        resolve({"nodes.weight": rows}, tables)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("rows", "wrong"), [([3, 100], 100), ([-1, 3], -1), (np.array([2**63 + 1], np.uint64), 2**63 + 1)]
)
def test_a_row_out_of_range_names_table_row_and_bound(rows: object, wrong: int, tables: TableDirectory) -> None:
    with pytest.raises(ConfigError, match=rf"row {wrong} of 'nodes\.weight' is out of range: the table has 100 rows"):
        resolve({"nodes.weight": rows}, tables)  # type: ignore[dict-item]


def test_unknown_keys_say_what_there_is(model: TwoTables, tables: TableDirectory) -> None:
    with pytest.raises(ConfigError, match=r"'nodes'.*nodes\.weight, relations\.weight"):
        resolve({"nodes": [1]}, tables)
    with pytest.raises(UsageError, match=r"\(1, 4\).*nodes\.weight"):
        resolve({model.head.weight: [0]}, tables)
    with pytest.raises(UsageError, match=r"Linear has no parameter that this optimizer manages"):
        resolve({model.head: [0]}, tables)
    with pytest.raises(UsageError, match=r"2 managed parameters \(nodes\.weight, relations\.weight\)"):
        resolve({model: [0]}, tables)
    with pytest.raises(ConfigError, match="not int"):
        resolve({3: [0]}, tables)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="not Tensor"):
        resolve(torch.tensor([1]), tables)  # type: ignore[arg-type]


def test_the_rows_are_a_copy(tables: TableDirectory) -> None:
    mine = np.array([1, 2, 3])
    got = resolve({"nodes.weight": mine}, tables)[0]
    mine[:] = 0
    assert got.tolist() == [1, 2, 3]


@settings(deadline=None)
@given(st.lists(st.integers(0, 40)))
def test_sorted_unique_is_numpys(rows: list[int]) -> None:
    given_rows = np.array(rows, dtype=np.int64)
    np.testing.assert_array_equal(sorted_unique(given_rows), np.unique(given_rows))
    assert given_rows.tolist() == rows


def test_memory_does_not_grow_with_the_table() -> None:
    huge = torch.empty(50_000_000, 1, device="meta")
    tables = TableDirectory([("huge", huge)])
    ids = np.random.default_rng(0).integers(0, 50_000_000, 8192)
    tracemalloc.start()
    try:
        resolve({"huge": ids}, tables)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * ids.nbytes
