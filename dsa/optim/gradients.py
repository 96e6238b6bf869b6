"""From a parameter's sparse gradient to sorted unique rows and their summed values, with the bits of `coalesce()`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa.errors import UsageError
from dsa.io.compile import kernel
from dsa.optim import workers
from dsa.optim.native import at_address, carray, claim
from dsa.optim.workers import region

# The cells of the summing region: its claim counter, sizes in rows and items, addresses.
_CLAIMED, _RUNS, _PART_RUNS, _WIDTH, _VALUES, _ORDER, _STARTS, _SUMS, _NEGATE, _CELLS = range(10)
_ANY = 1 << 48  # arrays over bare addresses have no length of their own


@dataclass(frozen=True)
class SparseGradient:
    """The rows of one parameter that a step changes, and the gradient of each.

    Args:
        rows: int64 [k], ascending and distinct, on the parameter's device.
        values: [k, width], contiguous, in the gradient's own dtype; width is the product of the parameter's other
            dimensions (1 where there are none).
        host: the rows on the host, where they are elsewhere too; there when `await_host` returns, and not checked yet.
    """

    rows: Tensor
    values: Tensor
    host: Tensor | None = None


def unique_rows(name: str, param: Tensor, maximize: bool) -> SparseGradient | None:
    """The gradient of `param` by rows, duplicates summed to the bits that torch's own `coalesce()` gives.

    Args:
        name: what messages call the parameter.
        param: any dense parameter; its `.grad` is not changed.
        maximize: negate the gradient, before duplicates are summed.

    Returns:
        None where there is no gradient; no rows where the gradient is empty.

    Raises:
        UsageError: the gradient is dense, complex, of another shape, has more than one sparse dimension, or has rows
            that the parameter does not have.
    """
    grad = param.grad
    if grad is None:
        return None
    _check(name, param, grad)
    grad = grad.detach()
    if grad.device.type == "cuda":
        return _by_coalescing(param, grad, maximize)
    indices, values = grad._indices()[0], grad._values()
    count, width = len(indices), math.prod(param.shape[1:])
    if count == 0 or width == 0:
        return SparseGradient(indices.new_empty(0), values.new_empty(0, width))
    if grad.is_coalesced() and _ascending(indices):
        sums = -values if maximize else values
        _check_range(name, param, indices[0], indices[-1])
        return SparseGradient(indices.contiguous(), sums.reshape(count, width).contiguous())
    # Torch's own sort: below 2**15 rows it is not stable on every processor, and sums of three depend on their order.
    ordered, order = indices.sort(0)
    _check_range(name, param, ordered[0], ordered[-1])
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return _sum_duplicates(ordered, order, values.reshape(count, width).contiguous(), maximize)
    grad._coalesced_(False)  # of this detached alias only: it may say so falsely
    whole = (-grad if maximize else grad).coalesce()
    return SparseGradient(whole.indices()[0].contiguous(), whole.values().reshape(-1, width).contiguous())


def _by_coalescing(param: Tensor, grad: Tensor, maximize: bool) -> SparseGradient:
    """By torch's own coalesce(); the rows' copy to the host is begun, and checked there (`rows_on_host`)."""
    whole = (-grad if maximize else grad).coalesce()
    rows = whole.indices()[0].contiguous()
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda).copy_(rows, non_blocking=True)
    return SparseGradient(rows, whole.values().reshape(-1, math.prod(param.shape[1:])).contiguous(), host)


def await_host(params: Iterable[Tensor]) -> None:
    """Wait, once a device, until copies to the host that `unique_rows` has begun have been made."""
    for device in {param.device for param in params if param.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def rows_on_host(
    name: str, param: Tensor, gradient: SparseGradient, maximize: bool
) -> tuple[SparseGradient, NDArray[np.int64]]:
    """The gradient's rows in memory of the host, checked; the gradient itself, mended where it said of itself what was
    not so.

    Raises:
        UsageError: it has rows that the parameter does not have.
    """
    if gradient.host is None:
        return gradient, gradient.rows.cpu().numpy()
    rows = gradient.host.numpy()
    if len(rows) > 1 and not (rows[1:] > rows[:-1]).all() and param.grad is not None:
        grad = param.grad.detach()
        grad._coalesced_(False)  # of this detached alias only: it had said so falsely
        gradient = _by_coalescing(param, grad, maximize)
        rows = gradient.rows.cpu().numpy()
    if len(rows):
        _check_range(name, param, rows[0], rows[-1])
    return gradient, rows


def warm_up(dtype: torch.dtype) -> None:
    """Compile, or load from the cache, all that `unique_rows` needs for parameters of `dtype`."""
    if dtype in (torch.float32, torch.float64):
        _sum_duplicates(torch.zeros(2, dtype=torch.int64), torch.arange(2), torch.ones(2, 1, dtype=dtype), False)


def _sum_duplicates(ordered: Tensor, order: Tensor, values: Tensor, maximize: bool) -> SparseGradient:
    count, width = values.shape
    starts = np.empty(count + 1, np.int64)
    distinct = _runs(ordered.numpy(), starts)
    sums = values.new_empty(distinct, width)
    cells = np.zeros(_CELLS, np.int64)
    cells[_RUNS], cells[_PART_RUNS], cells[_WIDTH] = distinct, max(1, workers.PART_ELEMENTS // width), width
    cells[_VALUES], cells[_ORDER], cells[_SUMS] = values.data_ptr(), order.data_ptr(), sums.data_ptr()
    cells[_STARTS], cells[_NEGATE] = starts.__array_interface__["data"][0], maximize
    summing = _sums_region(np.float64 if values.dtype == torch.float64 else np.float32)
    workers.run(summing.address, cells, distinct * width)
    return SparseGradient(ordered[torch.from_numpy(starts[:distinct])], sums)


@kernel
def _runs(ordered: NDArray[np.int64], starts: NDArray[np.int64]) -> int:
    """Where each run of equal rows starts, with the end of the last one after them; returns how many there are."""
    found = 0
    for i in range(len(ordered)):
        if i == 0 or ordered[i] != ordered[i - 1]:
            starts[found] = i
            found += 1
    starts[found] = len(ordered)
    return found


@kernel
def _sum_runs(
    values: NDArray[np.floating[Any]],
    order: NDArray[np.int64],
    starts: NDArray[np.int64],
    width: int,
    first: int,
    last: int,
    negate: bool,
    sums: NDArray[np.floating[Any]],
) -> None:
    """Sum the values of runs `first` to `last`, each in its order from the left, as torch does."""
    for run in range(first, last):
        total = sums[run * width : (run + 1) * width]
        for at in range(starts[run], starts[run + 1]):
            value = values[order[at] * width : (order[at] + 1) * width]
            if at > starts[run]:
                if negate:
                    for j in range(width):
                        total[j] -= value[j]
                else:
                    for j in range(width):
                        total[j] += value[j]
            elif negate:
                for j in range(width):
                    total[j] = -value[j]
            else:
                for j in range(width):
                    total[j] = value[j]


@functools.cache
def _sums_region(real: Any) -> Any:
    def sum_runs(address: int) -> None:
        cells = carray(at_address(address), _CELLS, np.int64)
        count, part, width, negate = cells[_RUNS], cells[_PART_RUNS], cells[_WIDTH], cells[_NEGATE] != 0
        values = carray(at_address(cells[_VALUES]), _ANY, real)
        order = carray(at_address(cells[_ORDER]), _ANY, np.int64)
        starts = carray(at_address(cells[_STARTS]), _ANY, np.int64)
        sums = carray(at_address(cells[_SUMS]), _ANY, real)
        first = claim(address) * part
        while first < count:
            _sum_runs(values, order, starts, width, first, min(first + part, count), negate, sums)
            first = claim(address) * part

    return region(sum_runs)


def _ascending(indices: Tensor) -> bool:
    return bool((indices[1:] > indices[:-1]).all())


def _check_range(name: str, param: Tensor, least: Tensor | np.int64, most: Tensor | np.int64) -> None:
    if int(least) < 0 or int(most) >= len(param):
        raise UsageError(
            f"the gradient of {name} has rows {int(least)} to {int(most)}, the parameter has {len(param)}: "
            f"the tensor was built by hand; torch.sparse.check_sparse_tensor_invariants finds where"
        )


def _check(name: str, param: Tensor, grad: Tensor) -> None:
    if grad.layout != torch.sparse_coo:
        raise UsageError(
            f"the gradient of {name} is dense ({grad.layout}): make it with sparse=True on its nn.Embedding or "
            f"nn.EmbeddingBag, or give {name} to a dense optimizer such as torch.optim.Adam"
        )
    if grad.is_complex():
        raise UsageError(f"the gradient of {name} is {grad.dtype}: complex gradients have no Adam update here")
    if grad.shape != param.shape:
        raise UsageError(
            f"the gradient of {name} has shape {tuple(grad.shape)}, the parameter {tuple(param.shape)}: "
            f"zero the gradient after the parameter is replaced or resized"
        )
    if grad.sparse_dim() != 1:
        raise UsageError(
            f"the gradient of {name} has {grad.sparse_dim()} sparse dimensions, only rows may be sparse (1): "
            f"rebuild it with sparse_coo_tensor(rows[None], values), values holding whole rows"
        )
