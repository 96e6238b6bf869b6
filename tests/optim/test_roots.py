"""Which square root torch's is, and that the exact kernel has torch's bits with each way of taking it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dsa.optim import fused, kernels, roots
from dsa.optim.gradients import SparseGradient, unique_rows
from dsa.optim.kernels import Hyperparameters, choose_kernel
from dsa.optim.roots import HARDWARE, TORCH, Root, root_of

REAL = [np.float32, np.float64]
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    root_of.cache_clear()
    yield
    root_of.cache_clear()
    torch.set_num_threads(threads)


def reals(real: Any, count: int, address: int) -> NDArray[Any]:
    """The memory that a root is called on."""
    return np.frombuffer((ctypes.c_char * (count * np.dtype(real).itemsize)).from_address(address), real)


def ours(real: Any, calls: list[int], wrong_at: int | None = None) -> tuple[Root, Any]:
    """A root in the place of MKL's function: torch's, but for one number of all, if that is wanted."""

    def take(count: int, source: int, target: int, mode: int) -> None:
        assert source == target
        calls.append(count)
        numbers = reals(real, count, source)
        results = torch.from_numpy(numbers.copy()).sqrt_().numpy()
        if wrong_at is not None and sum(calls) > wrong_at >= sum(calls[:-1]):
            results[wrong_at - sum(calls[:-1])] = 0.5
        numbers[:] = results

    function = _FUNCTION(take)
    return Root("vml", ctypes.cast(function, ctypes.c_void_p).value or 0, 7), function


@pytest.mark.parametrize("real", REAL)
def test_the_root_found_gives_torchs_bits_on_other_numbers(real: Any) -> None:
    root = root_of(real)
    if root is TORCH:
        pytest.skip("torch alone takes its roots here")
    numbers = np.random.default_rng(7).random(12345).astype(real) ** 9
    for length in (1, 15, 16, 17, 100, 2047, 12345):
        some = numbers[:length].copy()
        expected = torch.from_numpy(some.copy()).sqrt_().numpy()
        if root is HARDWARE:
            np.sqrt(some, out=some)
        else:
            _FUNCTION(root.address)(length, some.ctypes.data, some.ctypes.data, root.mode)
        np.testing.assert_array_equal(some, expected)


@pytest.mark.parametrize("real", REAL)
def test_a_function_with_torchs_bits_is_taken(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    root, _kept = ours(real, calls)
    monkeypatch.setattr(roots, "_functions", lambda dtype: [root])
    assert root_of(real) is root
    assert sum(calls) > 1 << 16
    assert max(calls) <= 2047  # more are given to other threads
    assert root_of(real) is root
    assert sum(calls) < 1 << 17  # it was asked for once


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("wrong_at", [0, 1, 12345, (1 << 16) + 9])
def test_a_function_that_is_wrong_once_is_not_taken(real: Any, wrong_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [ours(real, [], wrong_at) for _ in range(3)]
    (first, second, third), (right, _kept) = [root for root, _ in made], ours(real, [])
    monkeypatch.setattr(roots, "_functions", lambda dtype: [first])
    monkeypatch.setattr(roots, "HARDWARE", second)
    assert root_of(real) is TORCH
    root_of.cache_clear()
    monkeypatch.setattr(roots, "_functions", lambda dtype: [third, right])
    assert root_of(real) is right


@pytest.mark.parametrize("real", REAL)
def test_the_processors_root_is_taken_where_torch_takes_it(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "_functions", lambda dtype: [])
    monkeypatch.setattr(roots, "_by_torch", lambda numbers: np.sqrt(numbers, where=numbers >= 0, out=numbers * np.nan))
    with np.errstate(all="ignore"):
        assert root_of(real) is HARDWARE


def test_zeros_keep_their_sign() -> None:
    numbers = np.array([0.0, -0.0], np.float32)
    assert roots._same(HARDWARE, numbers, numbers)
    assert not roots._same(HARDWARE, numbers, np.abs(numbers))


@pytest.mark.parametrize("count", [1, 5000])
@pytest.mark.parametrize("threads", [1, 2])
def test_torchs_own_root_in_one_thread_or_many(count: int, threads: int) -> None:
    squares = torch.rand(count)
    expected = squares.sqrt()
    roots.take_roots(squares, threads)
    assert torch.equal(squares, expected)


def test_no_library_is_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots.sys, "platform", "win32")
    assert roots._functions("float32") == []
    monkeypatch.undo()
    monkeypatch.setattr(roots.torch, "__file__", "/nowhere/torch/__init__.py")
    assert roots._functions("float32") == []


def test_functions_that_the_library_lacks_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "_NAMES", {"float32": ("noSuchSqrt_64", "noSuchSqrt")})
    assert roots._functions("float32") == []


# The kernel with each root.


def forced(name: str, real: Any) -> Root:
    """The root of that name; "vml" is the function that was found, and where there is none, skipped."""
    if name == "vml":
        found = root_of(real)
        if found.name != "vml":
            pytest.skip("torch has no such function here")
        return found
    return {"hardware": HARDWARE, "torch": TORCH}[name]


def sparse(rows: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False)


def rows_with_runs(distinct: int, table: int) -> torch.Tensor:
    """Rows that come once, twice, three and many times, mixed."""
    chosen = torch.randperm(table)[:distinct]
    repeats = torch.tensor([1, 2, 3, 1, 40])[torch.arange(distinct) % 5]
    rows = chosen.repeat_interleave(repeats)
    return rows[torch.randperm(len(rows))]


@pytest.mark.parametrize("name", ["vml", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("width", "threads"), [(1, 1), (2, 1), (16, 1), (100, 2), (129, 2), (130, 1), (5000, 2)])
def test_each_root_gives_the_bits_of_sparse_adam(
    name: str, dtype: torch.dtype, maximize: bool, width: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = np.float64 if dtype == torch.float64 else np.float32
    root = forced(name, real)
    monkeypatch.setattr(roots, "root_of", lambda kind: root)
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 3 * width * 8)
    torch.set_num_threads(threads)
    table = 300 if width < 1000 else 20
    start = torch.randn(table, 2 * width, dtype=dtype)[:, ::2]  # strided
    oracle = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SparseAdam([oracle], lr=0.01, maximize=maximize)
    moments = np.zeros((table, 2 * width + 3), real)
    for step in range(1, 5):
        rows = rows_with_runs(table * 4 // 5, table)
        grad = sparse(rows, torch.randn(len(rows), width, dtype=dtype), start.shape)
        start.grad, oracle.grad = grad, grad.clone()
        optimizer.step()
        found = unique_rows("table", start, maximize)
        assert found is not None
        assert found.runs is not None
        frames = found.rows.to(torch.int32).numpy()
        hyper = Hyperparameters(0.01, 0.9, 0.999, 1e-8, step)
        kernel = choose_kernel("exact", start)
        half = np.arange(len(frames)) % 2 == 0  # a step in parts
        for part in (half, ~half):
            chosen = np.flatnonzero(part)
            kernel.update(moments, frames[chosen], start, found.at(chosen), hyper)
        state = optimizer.state[oracle]
        np.testing.assert_array_equal(moments[:, :width], state["exp_avg"].numpy())
        np.testing.assert_array_equal(moments[:, width : 2 * width], state["exp_avg_sq"].numpy())
        np.testing.assert_array_equal(start.numpy(), oracle.detach().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_processors_root_is_what_fast_takes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "root_of", lambda kind: HARDWARE)
    real = np.float64 if dtype == torch.float64 else np.float32
    start = torch.randn(50, 33).to(dtype)
    results = []
    for name in ("exact", "fast"):
        param, moments = start.clone(), np.zeros((50, 66), real)
        generator = torch.Generator().manual_seed(1)
        for step in range(1, 6):
            rows = torch.randint(0, 50, (90,), generator=generator)
            param.grad = sparse(rows, torch.randn(90, 33, generator=generator).to(dtype), start.shape)
            found = unique_rows("table", param, False)
            assert found is not None
            frames = found.rows.to(torch.int32).numpy()
            hyper = Hyperparameters(0.01, 0.9, 0.999, 1e-8, step)
            choose_kernel(name, param).update(moments, frames, param, found, hyper)
        results.append((param, moments))
    assert torch.equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], start)


def test_one_region_is_run_once_a_step_where_the_root_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """And twice for each of the blocks where torch takes the roots."""
    phases: list[int] = []
    run = kernels.workers.run

    def noted(loop: Any, cells: NDArray[np.int64], elements: int) -> None:
        phases.append(int(cells[fused.PHASE]))
        run(loop, cells, elements)

    monkeypatch.setattr(kernels.workers, "run", noted)
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 2 * 3 * 4)
    found = SparseGradient(torch.arange(4), torch.ones(4, 3))
    for root, expected in ((HARDWARE, [fused.BOTH]), (TORCH, [fused.ONLY_MOMENTS, fused.ONLY_WEIGHTS] * 2)):
        monkeypatch.setattr(roots, "root_of", lambda kind, root=root: root)
        phases.clear()
        moments = np.zeros((4, 6), np.float32)
        param = torch.zeros(4, 3)
        hyper = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 1)
        choose_kernel("exact", param).update(moments, np.arange(4, dtype=np.int32), param, found, hyper)
        assert phases == expected
