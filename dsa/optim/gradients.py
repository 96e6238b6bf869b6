"""From a parameter's sparse gradient to sorted unique rows and their summed values, with the bits of `coalesce()`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa.errors import UsageError
from dsa.io.devices import host_memory
from dsa.io.native import address_of_own
from dsa.optim import fused, workers
from dsa.optim.sorting import Sorted, sort


@dataclass(frozen=True)
class Runs:
    """Which values belong to each row: those at `order[begins[i]:ends[i]]` to row i, to be summed in this order.

    Args:
        order: int64 [n], places in the values, on the host.
        begins, ends: int64 [k], each run's; none is empty.
        negate: the sum is that of the negated values.
    """

    order: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    negate: bool


@dataclass(frozen=True)
class SparseGradient:
    """The rows of one parameter that a step changes, and the gradient of each.

    Args:
        rows: int64 [k], ascending and distinct, on the parameter's device.
        values: [n, width], contiguous, in the gradient's own dtype; width is the product of the parameter's other
            dimensions (1 where there are none). Value i is that of row i, where there are no runs.
        runs: fp32 and fp64 on the host only: which values are to be summed for each row.
        host: the rows on the host, where they are elsewhere too; there when `await_host` returns, and not checked yet.
    """

    rows: Tensor
    values: Tensor
    runs: Runs | None = None
    host: Tensor | None = None

    def at(self, positions: NDArray[np.int64] | slice) -> SparseGradient:
        """The gradient at some positions of its rows."""
        if self.runs is not None:
            runs = self.runs
            rows = self.rows[positions if isinstance(positions, slice) else torch.from_numpy(positions)]
            some = Runs(runs.order, runs.begins[positions], runs.ends[positions], runs.negate)
            return SparseGradient(rows, self.values, some)
        chosen = positions if isinstance(positions, slice) else torch.from_numpy(positions).to(self.rows.device)
        return SparseGradient(self.rows[chosen], self.values[chosen])

    def dense(self) -> SparseGradient:
        """The same with one value a row, [k, width]: itself, or with all runs summed."""
        return self if self.runs is None else SparseGradient(self.rows, _sums(self.values, self.runs))


def unique_rows(name: str, param: Tensor, maximize: bool, announced: Sorted | None = None) -> SparseGradient | None:
    """The gradient of `param` by rows, duplicates summed to the bits that torch's own `coalesce()` gives.

    Args:
        name: what messages call the parameter.
        param: any dense parameter; its `.grad` is not changed.
        maximize: negate the gradient, before duplicates are summed.
        announced: the look-ups that were announced, sorted; of use where the gradient has the same ones.

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
    indices, values = grad._indices()[0], grad._values()
    count, width = indices.shape[0], math.prod(param.shape[1:])
    if count == 0 or width == 0:
        return SparseGradient(indices.new_empty(0), values.new_empty(0, width))
    if grad.device.type == "cuda":
        return _by_coalescing(param, grad, maximize)
    if grad.is_coalesced() and _ascending(indices):
        sums = -values if maximize else values
        _check_range(name, param, int(indices[0]), int(indices[-1]))
        # Rows are kept beyond the step (policies hear of them late), and these are the user's to change after it.
        rows = indices.clone(memory_format=torch.contiguous_format)
        return SparseGradient(rows, sums.reshape(count, width).contiguous())
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        indices = indices.contiguous()
        found = announced if announced is not None and announced.is_of(indices) else sort(indices)
        _check_range(name, param, int(found.rows[0]), int(found.rows[-1]))
        runs = Runs(found.order, found.starts[:-1], found.starts[1:], maximize)
        return SparseGradient(torch.from_numpy(found.rows), values.reshape(count, width).contiguous(), runs)
    _check_range(name, param, int(indices.min()), int(indices.max()))
    grad._coalesced_(False)  # of this detached alias only: it may say so falsely
    whole = (-grad if maximize else grad).coalesce()
    return SparseGradient(whole.indices()[0].contiguous(), whole.values().reshape(-1, width).contiguous())


def _by_coalescing(param: Tensor, grad: Tensor, maximize: bool) -> SparseGradient:
    """By torch's own coalesce(); the rows' copy to the host is begun, and checked there (`rows_on_host`)."""
    whole = (-grad if maximize else grad).coalesce()
    rows = whole.indices()[0].contiguous()
    host, _ = host_memory(rows.shape, rows.dtype, pin=rows.is_cuda)
    host.copy_(rows, non_blocking=True)
    return SparseGradient(rows, whole.values().reshape(-1, math.prod(param.shape[1:])).contiguous(), host=host)


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
        _check_range(name, param, int(rows[0]), int(rows[-1]))
    return gradient, rows


def warm_up(dtype: torch.dtype) -> None:
    """Compile, or load from the cache, all that `unique_rows` and its sums need for parameters of `dtype`."""
    if dtype in (torch.float32, torch.float64):
        found = sort(torch.zeros(2, dtype=torch.int64, device="cpu"))
        runs = Runs(found.order, found.starts[:-1], found.starts[1:], False)
        SparseGradient(torch.from_numpy(found.rows), torch.ones(2, 1, dtype=dtype, device="cpu"), runs).dense()


def _sums(values: Tensor, runs: Runs) -> Tensor:
    """The sum of each run, [k, width], with the bits of torch's coalesce()."""
    count, width = len(runs.begins), values.shape[1]
    sums = values.new_empty(count, width)
    if count == 0:
        return sums
    begins, ends = np.ascontiguousarray(runs.begins), np.ascontiguousarray(runs.ends)
    cells = np.zeros(fused.CELLS, np.int64)
    cells[fused.COUNT], cells[fused.PART_ROWS], cells[fused.WIDTH] = count, fused.part_rows(width), width
    cells[fused.VALUES], cells[fused.ORDER] = values.data_ptr(), address_of_own(runs.order)
    cells[fused.BEGINS], cells[fused.ENDS] = address_of_own(begins), address_of_own(ends)
    cells[fused.NEGATE], cells[fused.ROOTS] = runs.negate, sums.data_ptr()
    summing = fused.sums_region(np.float64 if values.dtype == torch.float64 else np.float32)
    workers.run(summing, cells, count * width)
    return sums


def _ascending(indices: Tensor) -> bool:
    return bool((indices[1:] > indices[:-1]).all())


def _check_range(name: str, param: Tensor, least: int, most: int) -> None:
    if least < 0 or most >= param.shape[0]:
        raise UsageError(
            f"the gradient of {name} has rows {least} to {most}, the parameter has {len(param)}: "
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
