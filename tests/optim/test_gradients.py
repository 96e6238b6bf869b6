"""Rows and sums of sparse gradients: the bits of torch's coalesce(), and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.errors import UsageError
from dsa.optim.gradients import unique_rows

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    with torch.sparse.check_sparse_tensor_invariants(False):
        yield
    torch.set_num_threads(threads)


def compare_with_coalesce(rows: torch.Tensor, values: torch.Tensor, length: int, maximize: bool) -> None:
    param = torch.zeros(length, *values.shape[1:], dtype=values.dtype)
    param.grad = torch.sparse_coo_tensor(rows[None], values, param.shape)
    expected = (-param.grad if maximize else param.grad).coalesce()
    found = unique_rows("table", param, maximize)
    assert found is not None
    found = found.dense()
    assert torch.equal(found.rows, expected.indices()[0])
    assert found.values.shape == (len(found.rows), values[0].numel() if len(values) else param[0].numel())
    assert found.values.is_contiguous()
    assert found.rows.is_contiguous()
    assert found.values.dtype == values.dtype
    sums = expected.values().reshape(found.values.shape)
    assert torch.equal(found.values.double().view(torch.int64), sums.double().view(torch.int64))  # signs of zero too
    assert param.grad.is_coalesced() is (len(rows) < 2 and param.grad.is_coalesced())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (129,), (3, 5)])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_bits_of_coalesce(dtype: torch.dtype, shape: tuple[int, ...], maximize: bool, count: int) -> None:
    rows = torch.randint(0, 60, (count,))
    compare_with_coalesce(rows, torch.randn(count, *shape).to(dtype), 60, maximize)


@pytest.mark.parametrize("count", [8_000, 40_000])
@pytest.mark.parametrize("length", [3, 300, 1_000_000])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_of_coalesce_in_large_batches(count: int, length: int, threads: int) -> None:
    """Many duplicates, and counts on both sides of where torch changes its sort."""
    torch.set_num_threads(threads)
    rows = torch.randint(0, length, (count,))
    compare_with_coalesce(rows, torch.randn(count, 20) * 10.0 ** torch.randint(-6, 6, (count, 1)), length, False)


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.integers(0, 9), max_size=60),
    width=st.integers(1, 9),
    seed=st.integers(0, 1000),
    maximize=st.booleans(),
)
def test_bits_of_coalesce_for_any_rows(rows: list[int], width: int, seed: int, maximize: bool) -> None:
    values = torch.randn(len(rows), width, generator=torch.Generator().manual_seed(seed))
    values = values * 10.0 ** (seed % 7)
    values[values.abs() < 0.1] = 0.0
    compare_with_coalesce(torch.tensor(rows, dtype=torch.int64), values, 10, maximize)


def test_opposite_values_sum_to_the_zero_that_torch_gives() -> None:
    compare_with_coalesce(torch.tensor([1, 1]), torch.tensor([[1.0], [-1.0]]), 3, True)


@pytest.mark.parametrize("maximize", [False, True])
def test_a_coalesced_gradient_is_taken_as_it_is(maximize: bool) -> None:
    values = torch.randn(3, 4)
    param = torch.zeros(9, 4)
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1, 4, 8]]), values, param.shape, is_coalesced=True)
    found = unique_rows("table", param, maximize)
    assert found is not None
    assert found.rows.tolist() == [1, 4, 8]
    assert torch.equal(found.values, -values if maximize else values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_says_falsely_that_it_is_coalesced_is_sorted(dtype: torch.dtype) -> None:
    param = torch.zeros(9, 1, dtype=dtype)
    values = torch.tensor([[1.0], [2.0], [4.0]], dtype=dtype)
    param.grad = torch.sparse_coo_tensor(torch.tensor([[5, 2, 5]]), values, param.shape, is_coalesced=True)
    found = unique_rows("table", param, False)
    assert found is not None
    assert found.rows.tolist() == [2, 5]
    assert found.dense().values.flatten().tolist() == [2.0, 5.0]
    assert param.grad.is_coalesced()  # the caller's own tensor is as it was


def test_the_gradient_of_an_embedding_summed_over_its_output() -> None:
    """Its values are one number, expanded."""
    embedding = torch.nn.Embedding(20, 6, sparse=True)
    embedding(torch.tensor([3, 3, 7])).sum().backward()
    found = unique_rows("weight", embedding.weight, False)
    assert found is not None
    assert found.rows.tolist() == [3, 7]
    assert found.dense().values[:, 0].tolist() == [2.0, 1.0]


def test_no_gradient_is_none() -> None:
    assert unique_rows("table", torch.zeros(3, 2), False) is None


def refused(param: torch.Tensor, grad: torch.Tensor) -> str:
    param.grad = grad
    with pytest.raises(UsageError) as caught:
        unique_rows("node_emb.weight", param, False)
    assert "node_emb.weight" in str(caught.value)
    return str(caught.value)


def test_a_dense_gradient_is_refused() -> None:
    assert "sparse=True" in refused(torch.zeros(3, 2), torch.zeros(3, 2))


@pytest.mark.parametrize("coalesced", [False, True])
def test_more_than_one_sparse_dimension_is_refused(coalesced: bool) -> None:
    grad = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 1]]), torch.ones(2), (3, 2))
    assert "2 sparse dimensions" in refused(torch.zeros(3, 2), grad.coalesce() if coalesced else grad)


def test_a_complex_gradient_is_refused() -> None:
    param = torch.zeros(3, 2, dtype=torch.complex64)
    grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2, dtype=torch.complex64), (3, 2))
    assert "complex64" in refused(param, grad)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("rows", [[0, 3], [-1, 2], [3, 0]])
def test_rows_that_the_parameter_does_not_have_are_refused(rows: list[int], flag: bool) -> None:
    grad = torch.sparse_coo_tensor(
        torch.tensor([rows]), torch.ones(2, 2), (3, 2), check_invariants=False, is_coalesced=flag
    )
    assert f"rows {min(rows)} to {max(rows)}, the parameter has 3" in refused(torch.zeros(3, 2), grad)


def test_a_gradient_of_another_shape_is_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(5, 2))
    param.grad = torch.sparse_coo_tensor(torch.tensor([[4]]), torch.ones(1, 2), (5, 2))
    param.data = torch.zeros(3, 2)
    with pytest.raises(UsageError, match=r"table has shape \(5, 2\), the parameter \(3, 2\)"):
        unique_rows("table", param, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("coalesced", [False, True])
def test_a_part_of_a_gradient_has_the_sums_of_its_rows(dtype: torch.dtype, maximize: bool, coalesced: bool) -> None:
    param = torch.zeros(40, 5, dtype=dtype)
    param.grad = torch.sparse_coo_tensor(
        torch.randint(0, 40, (1, 300)), torch.randn(300, 5).to(dtype), param.shape, check_invariants=False
    )
    if coalesced:
        param.grad = param.grad.coalesce()
    found = unique_rows("table", param, maximize)
    assert found is not None
    whole = found.dense()
    assert (found.runs is not None) == (dtype in (torch.float32, torch.float64) and not coalesced)
    positions = np.array([0, 3, 4, len(found.rows) - 1])
    for some in (positions, slice(2, 9), slice(0)):
        part = found.at(some)
        assert torch.equal(part.rows, whole.rows[some])
        assert torch.equal(part.dense().values, whole.values[some])
        assert torch.equal(part.dense().rows, part.rows)
    again = found.at(positions).at(np.array([1, 3]))
    assert torch.equal(again.dense().values, whole.values[positions[[1, 3]]])
