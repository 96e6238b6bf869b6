"""The three kernels against torch.optim.SparseAdam and against each other, bit for bit where that is promised."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dsa.errors import ConfigError
from dsa.optim import kernels, roots, workers
from dsa.optim.gradients import SparseGradient, unique_rows
from dsa.optim.kernels import Hyperparameters, choose_kernel

REAL = [torch.float32, torch.float64]
HALF = [torch.bfloat16, torch.float16]
WIDTHS = [1, 3, 7, 100, 128, 129]


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield
    torch.set_num_threads(threads)


def bits(tensor: Any) -> np.ndarray[Any, Any]:
    """The bit patterns, with every NaN the same: which NaN an operation gives is nobody's promise."""
    array = tensor.detach().contiguous()
    if array.dtype in HALF:
        array = array.float()
    array = torch.where(array.isnan(), torch.full_like(array, float("nan")), array)
    return array.numpy().view(np.int64 if array.dtype == torch.float64 else np.int32)


class Table:
    """A parameter with its moments in frames of a permuted order, inside a wider array."""

    def __init__(self, param: torch.Tensor) -> None:
        self.param = param
        self.width = param[0].numel()
        real = np.float64 if param.dtype == torch.float64 else np.float32
        arena = np.zeros((len(param) + 3, 2 * self.width + 5), real)
        self.moments = arena[:, : 2 * self.width + 1]
        self.frame_of = np.random.default_rng(0).permutation(len(param) + 3)[: len(param)].astype(np.int32)

    def step(self, name: str, grad: torch.Tensor, hyper: Hyperparameters) -> None:
        self.param.grad = grad
        found = unique_rows("table", self.param, False)
        assert found is not None
        frames = self.frame_of[found.rows.numpy()]
        kernel = choose_kernel(name, self.param)
        kernel.update(self.moments, frames, self.param, found, hyper)

    @property
    def exp_avg(self) -> torch.Tensor:
        return torch.from_numpy(self.moments[self.frame_of, : self.width])

    @property
    def exp_avg_sq(self) -> torch.Tensor:
        return torch.from_numpy(self.moments[self.frame_of, self.width : 2 * self.width])


def gradient(shape: torch.Size, dtype: torch.dtype, count: int, scale: float = 1.0) -> torch.Tensor:
    rows = torch.randint(0, shape[0], (1, count))
    values = (torch.randn(count, *shape[1:]) * scale).to(dtype)
    return torch.sparse_coo_tensor(rows, values, shape)


def hyper_of(step: int) -> Hyperparameters:
    """Other values at every step, betas of 0 among them."""
    beta1 = (0.9, 0.0, 0.5)[step % 3]
    beta2 = (0.999, 0.9, 0.0)[step % 7 % 3]
    return Hyperparameters(1e-3 * (1 + step % 5), beta1, beta2, (1e-8, 1e-3)[step % 2], step)


def compare_with_sparse_adam(
    name: str, start: torch.Tensor, gradients: list[torch.Tensor], threads: int = 2, empty_too: bool = False
) -> Table:
    """Run both on the same gradients; weights and both moments must agree to the bit after every step."""
    torch.set_num_threads(threads)
    table = Table(
        start.clone().as_strided(start.size(), start.stride()) if not start.is_contiguous() else start.clone()
    )
    oracle = torch.nn.Parameter(start.detach().clone(memory_format=torch.contiguous_format))
    optimizer = torch.optim.SparseAdam([oracle])
    for step, grad in enumerate(gradients, 1):
        hyper = hyper_of(step)
        optimizer.param_groups[0].update(lr=hyper.lr, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps)
        oracle.grad = grad.clone()
        optimizer.step()
        table.step(name, grad, hyper)
        state = optimizer.state[oracle]
        np.testing.assert_array_equal(bits(table.exp_avg.view(oracle.shape)), bits(state["exp_avg"]))
        np.testing.assert_array_equal(bits(table.exp_avg_sq.view(oracle.shape)), bits(state["exp_avg_sq"]))
        np.testing.assert_array_equal(bits(table.param), bits(oracle))
    return table


@pytest.mark.parametrize("name", ["reference", "exact"])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("width", WIDTHS)
def test_bits_of_sparse_adam(name: str, dtype: torch.dtype, width: int) -> None:
    start = torch.randn(60, width, dtype=dtype)
    compare_with_sparse_adam(name, start, [gradient(start.shape, dtype, 70) for _ in range(40)])


@pytest.mark.parametrize("name", ["reference", "exact"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(name: str, threads: int) -> None:
    start = torch.randn(4000, 100)
    grads = [gradient(start.shape, start.dtype, 3500) for _ in range(4)]
    assert grads[0].coalesce().values().numel() > workers.PARALLEL_ELEMENTS
    compare_with_sparse_adam(name, start, grads, threads)


def test_bits_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 7 * 129 * 4)
    monkeypatch.setattr(roots, "root_of", lambda real: roots.TORCH)
    start = torch.randn(60, 129)
    compare_with_sparse_adam("exact", start, [gradient(start.shape, start.dtype, 70) for _ in range(10)])


def test_scratch_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "root_of", lambda real: roots.TORCH)
    start = torch.zeros(2000, 8192)
    table = Table(start)
    table.step("exact", gradient(start.shape, start.dtype, 2500), hyper_of(1))
    assert kernels._local.scratch.numel() * 4 <= kernels.SCRATCH_BYTES


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "one dimension": lambda: torch.randn(60),
    "one dimension, strided": lambda: torch.randn(60, 3)[:, 1],
    "transposed": lambda: torch.randn(7, 60).t(),
    "sliced columns": lambda: torch.randn(60, 20)[:, 3:10],
    "every second column": lambda: torch.randn(60, 20)[:, 1::2],
    "every second row": lambda: torch.randn(120, 7)[1::2],
    "one column of many": lambda: torch.randn(60, 9)[:, 4:5],
    "three dimensions": lambda: torch.randn(60, 3, 5),
    "three dimensions, rows strided": lambda: torch.randn(60, 2, 3, 5)[:, 1],
    "three dimensions, no common stride": lambda: torch.randn(60, 5, 3).transpose(1, 2),
    "four dimensions, rows last": lambda: torch.randn(3, 2, 5, 60).permute(3, 0, 1, 2),
}


@pytest.mark.parametrize("name", ["reference", "exact", "fast"])
@pytest.mark.parametrize("dtype", [*REAL, *HALF])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_nothing(name: str, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 1000)  # gathered rows come in several blocks too
    strided = LAYOUTS[layout]().to(dtype)  # .to keeps the strides of dense layouts
    whole = LAYOUTS[layout]()
    base = torch.empty(whole.untyped_storage().nbytes() // 4, dtype=dtype).fill_(7)
    strided = base.as_strided(whole.size(), whole.stride(), whole.storage_offset()).copy_(whole)
    untouched = torch.ones(len(base), dtype=torch.bool)
    untouched.as_strided(whole.size(), whole.stride(), whole.storage_offset()).fill_(False)
    plain = Table(strided.clone(memory_format=torch.contiguous_format))
    table = Table(strided)
    for step in range(1, 6):
        grad = gradient(strided.shape, dtype, 50)
        plain.step(name, grad.clone(), hyper_of(step))
        table.step(name, grad, hyper_of(step))
    np.testing.assert_array_equal(bits(table.param), bits(plain.param))
    np.testing.assert_array_equal(table.exp_avg, plain.exp_avg)
    np.testing.assert_array_equal(table.exp_avg_sq, plain.exp_avg_sq)
    assert (base[untouched] == 7).all()
    assert not torch.equal(strided.float(), whole.to(dtype).float())


@pytest.mark.parametrize("name", ["reference", "exact"])
@pytest.mark.parametrize("dtype", REAL)
def test_bits_at_the_edges_of_the_number_range(name: str, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    special = torch.tensor(
        [0.0, -0.0, tiny, -tiny, tiny / 3, tiny * 1e-6, 1e-20, 1e19, -1e30, torch.finfo(dtype).max,
         np.inf, -np.inf, np.nan],
        dtype=dtype,
    )  # fmt: skip
    start = special.repeat(40, 3)
    grads = []
    for _ in range(12):
        values = special[torch.randint(0, len(special), (50, start.shape[1]))]
        grads.append(torch.sparse_coo_tensor(torch.randint(0, 40, (1, 50)), values, start.shape))
    table = compare_with_sparse_adam(name, start, grads)
    assert table.param.isfinite().any()


@pytest.mark.parametrize("name", ["reference", "exact", "fast"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("width", [1, 7, 129])
def test_half_precision_is_float32_rounded_each_step(name: str, dtype: torch.dtype, width: int) -> None:
    start = torch.cat((torch.randn(40, width), torch.randn(20, width) * 1e-6)).to(dtype)
    table = Table(start.clone())
    oracle = torch.nn.Parameter(start.float())
    optimizer = torch.optim.SparseAdam([oracle])
    for step in range(1, 40):
        hyper = hyper_of(step)
        optimizer.param_groups[0].update(lr=hyper.lr, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps)
        grad = gradient(start.shape, dtype, 70)
        summed = grad.coalesce()
        oracle.grad = torch.sparse_coo_tensor(summed.indices(), summed.values().float(), start.shape, is_coalesced=True)
        optimizer.step()
        oracle.data.copy_(oracle.data.to(dtype).float())
        table.step(name, grad, hyper)
        state = optimizer.state[oracle]
        np.testing.assert_array_equal(bits(table.exp_avg), bits(state["exp_avg"]))
        np.testing.assert_array_equal(bits(table.exp_avg_sq), bits(state["exp_avg_sq"]))
        if name == "fast":
            np.testing.assert_array_less(ulps_apart(table.param, oracle.data.to(dtype)), 2)
            table.param.copy_(oracle.data.to(dtype))
        else:
            np.testing.assert_array_equal(bits(table.param), bits(oracle))


@pytest.mark.parametrize("dtype", HALF)
def test_rounding_to_half_precision_is_torchs(dtype: torch.dtype) -> None:
    """lr 1 and moments of 0 make the change exact: minus the sign of the gradient times 2**k, so that weights land on
    ties, in the subnormal range and beyond the largest number."""
    pattern = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    weights = pattern[pattern.isfinite()].view(-1, 1)
    for power in (0, -3, -8, -12, -20, -24, -25, 4, 14, 15):
        hyper = Hyperparameters(2.0**power, 0.0, 0.0, 1e-30, 1)
        rows, values = torch.arange(len(weights)), torch.ones_like(weights)
        values[::2] = -1
        results = []
        for name in ("reference", "exact", "fast"):
            param = weights.clone()
            moments = np.zeros((len(weights), 2), np.float32)
            choose_kernel(name, param).update(
                moments, rows.to(torch.int32).numpy(), param, SparseGradient(rows, values), hyper
            )
            results.append(bits(param))
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])


def ulps_apart(one: torch.Tensor, other: torch.Tensor) -> np.ndarray[Any, Any]:
    kind = {torch.float64: torch.int64, torch.float32: torch.int32}.get(one.dtype, torch.int16)

    def place(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        number = tensor.contiguous().view(kind).numpy().astype(np.int64)
        low = np.int64(torch.iinfo(kind).min)
        return np.where(number < 0, low - number, number)

    return np.abs(place(one) - place(other))


@pytest.mark.parametrize("dtype", REAL)
def test_fast_has_the_same_moments_and_weights_within_one_ulp(dtype: torch.dtype) -> None:
    start = torch.randn(300, 100, dtype=dtype)
    fast, exact = Table(start.clone()), Table(start.clone())
    differences = 0
    for step in range(1, 30):
        grad = gradient(start.shape, dtype, 250)
        hyper = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, step)
        exact.step("exact", grad, hyper)
        fast.step("fast", grad, hyper)
        np.testing.assert_array_equal(fast.moments, exact.moments)
        # Where a weight is smaller than its change, its ulp is smaller than that of what was added.
        large = exact.param.abs() > 2e-2
        apart = ulps_apart(fast.param[large], exact.param[large])
        assert apart.max() <= 1
        differences += int((apart > 0).sum())
        fast.param.copy_(exact.param)
    assert differences < 0.05 * 29 * start.numel()


@pytest.mark.parametrize("name", ["reference", "exact", "fast"])
def test_no_rows_change_nothing(name: str) -> None:
    table = Table(torch.randn(10, 4))
    before = table.param.clone()
    table.step(
        name, torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 4), (10, 4)), hyper_of(1)
    )
    assert torch.equal(table.param, before)
    assert not table.moments.any()


@pytest.mark.parametrize("name", ["exact", "fast"])
def test_a_float32_gradient_of_a_half_precision_parameter_keeps_its_bits(name: str) -> None:
    start = torch.randn(20, 5).to(torch.bfloat16)
    found = SparseGradient(torch.arange(20), torch.randn(20, 5))
    moments = [np.zeros((20, 10), np.float32) for _ in range(2)]
    for kind, some in zip(("reference", name), moments, strict=True):
        param = start.clone()
        choose_kernel(kind, param).update(some, np.arange(20, dtype=np.int32), param, found, hyper_of(1))
    np.testing.assert_array_equal(moments[0], moments[1])


@pytest.mark.parametrize("name", ["reference", "exact", "fast"])
def test_frames_may_be_read_only_and_strided(name: str) -> None:
    frames = np.arange(20, dtype=np.int32)[::2]
    frames.flags.writeable = False
    param, moments = torch.zeros(10, 3), np.zeros((20, 6), np.float32)
    choose_kernel(name, param).update(
        moments, frames, param, SparseGradient(torch.arange(10), torch.ones(10, 3)), hyper_of(1)
    )
    assert (moments[::2] != 0).all()
    assert not moments[1::2].any()


@pytest.mark.parametrize("name", ["reference", "exact", "fast"])
def test_autograd_sees_that_the_weights_changed(name: str) -> None:
    param = torch.nn.Parameter(torch.ones(4, 3))
    loss = (param * param).sum()
    moments = np.zeros((4, 6), np.float32)
    choose_kernel(name, param).update(
        moments, np.arange(4, dtype=np.int32), param, SparseGradient(torch.arange(4), torch.ones(4, 3)), hyper_of(1)
    )
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_auto_is_exact_on_the_cpu_and_reference_elsewhere() -> None:
    assert choose_kernel("auto", torch.zeros(1)).name == "exact"
    assert choose_kernel("auto", torch.zeros(1, device="meta")).name == "reference"
    for name in ("exact", "fast", "reference"):
        assert choose_kernel(name, torch.zeros(1)).name == name


def test_an_unknown_kernel_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'auto', 'exact', 'fast' or 'reference', got 'turbo'"):
        choose_kernel("turbo", torch.zeros(1))


@pytest.mark.parametrize("name", ["exact", "fast"])
def test_a_cpu_kernel_is_refused_for_another_device(name: str) -> None:
    with pytest.raises(ConfigError, match=r"meta.*kernel='auto'"):
        choose_kernel(name, torch.zeros(1, device="meta"))


@pytest.mark.parametrize("run_parallel", [workers.Crew().run, workers._openmp()], ids=["threads", "openmp"])
def test_both_ways_to_run_in_parallel_give_the_same(run_parallel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if run_parallel is None:
        pytest.skip("torch has no OpenMP runtime here")
    calls = []

    def noted(region: int, cells: int, threads: int) -> None:
        calls.append(threads)
        run_parallel(region, cells, threads)

    monkeypatch.setattr(workers, "_run_parallel", noted)
    start = torch.randn(4000, 100)
    compare_with_sparse_adam("exact", start, [gradient(start.shape, start.dtype, 3500) for _ in range(3)], threads=3)
    assert calls == [3] * 3  # one pass a step


def _step(table: Table, rows: torch.Tensor, values: torch.Tensor) -> None:
    frames = np.arange(len(rows), dtype=np.int32)
    choose_kernel("exact", table.param).update(
        table.moments, frames, table.param, SparseGradient(rows, values), hyper_of(1)
    )


def _step_in_child(results: Any, table: Table, rows: torch.Tensor, values: torch.Tensor) -> None:
    torch.set_num_threads(1)  # as a DataLoader's workers do: torch's own operations hang in a forked child otherwise
    _step(table, rows, values)
    results.put(table.param.numpy())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_works_alone() -> None:
    torch.set_num_threads(2)
    rows, values = torch.arange(2000), torch.randn(2000, 100)
    here, there = Table(torch.ones(2000, 100)), Table(torch.ones(2000, 100))
    _step(here, rows, values)  # the parent's OpenMP threads have been used
    fork: Any = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    process = fork.Process(target=_step_in_child, args=(results, there, rows, values))
    process.start()
    try:
        np.testing.assert_array_equal(results.get(), here.param.numpy())
    finally:
        process.join()
    assert process.exitcode == 0
