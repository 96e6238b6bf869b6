"""The row-wise Adam update: `reference` (torch operations), `exact` (fused, the same bits), `fast` (fused, 1 ulp)."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa.errors import ConfigError
from dsa.io.native import address_of, address_of_own
from dsa.optim import fused, roots, workers
from dsa.optim.gradients import SparseGradient

SCRATCH_BYTES = 16 << 20  # for the roots that torch takes, or for gathered weights
_HALVES = (torch.bfloat16, torch.float16)
_local = threading.local()


@dataclass(frozen=True)
class Hyperparameters:
    """One parameter's hyperparameters for one step; `step` counts this one (1 for the first).

    `lr` may be a tensor of one element: its bias is then corrected in its own precision, as torch does.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    step: int

    @property
    def step_size(self) -> float:
        """The learning rate with both bias corrections, in torch's order of operations."""
        bias_correction1 = 1 - self.beta1**self.step
        bias_correction2 = 1 - self.beta2**self.step
        return float(self.lr * math.sqrt(bias_correction2) / bias_correction1)


class Kernel(Protocol):
    """One way to carry out the update."""

    name: str

    def update(
        self,
        moments: NDArray[np.floating[Any]],
        frames: NDArray[np.int32],
        param: Tensor,
        gradient: SparseGradient,
        hyper: Hyperparameters,
    ) -> None:
        """Carry out torch.optim.SparseAdam's step on some rows, in place in `moments` and `param`.

        Args:
            moments: [frames, at least 2 * width], fp64 for an fp64 parameter, else fp32: exp_avg, then exp_avg_sq.
            frames: [k], distinct; where each row's moments are.
            param: the whole parameter, any strides; bf16 and fp16 rows are cast to fp32 and rounded back.
            gradient: of k rows, its sign already turned where a maximum is sought.
            hyper: lr, betas, eps, step.
        """


def reference_step(
    old: Tensor, values: Tensor, beta1: float, beta2: float, eps: float, step_size: float
) -> tuple[Tensor, Tensor]:
    """SparseAdam's operations on both moments of some rows, on the device that they are on.

    Args:
        old: [k, 2 * width], fp32 or fp64: exp_avg, then exp_avg_sq.
        values: [k, width]: the gradient, in a dtype of its own.

    Returns:
        The new moments, as `old`, and what is to be added to the weights, [k, width].
    """
    width = values.shape[1]
    exp_avg, exp_avg_sq = old[:, :width], old[:, width:]
    grad = values.to(old.dtype)
    exp_avg_update = grad.sub(exp_avg).mul_(1 - beta1)
    exp_avg_sq_update = grad.pow(2).sub_(exp_avg_sq).mul_(1 - beta2)
    new = torch.cat((exp_avg + exp_avg_update, exp_avg_sq + exp_avg_sq_update), 1)
    numer = exp_avg_update.add_(exp_avg)
    denom = exp_avg_sq_update.add_(exp_avg_sq).sqrt_().add_(eps)
    return new, -step_size * numer.div_(denom)


def add_to_rows(param: Tensor, rows: Tensor, change: Tensor) -> None:
    """Add `change`, fp32 or fp64 [k, width], to rows of the parameter, in its own precision, and round once."""
    weights = param.detach()
    shape = (len(rows), *weights.shape[1:])
    updated = weights.index_select(0, rows).to(change.dtype).add_(change.view(shape))
    weights.index_copy_(0, rows, updated.to(weights.dtype))


class ReferenceKernel:
    """torch.optim.SparseAdam's own operations, in its order, on gathered rows; any device."""

    name = "reference"

    def update(
        self,
        moments: NDArray[np.floating[Any]],
        frames: NDArray[np.int32],
        param: Tensor,
        gradient: SparseGradient,
        hyper: Hyperparameters,
    ) -> None:
        """See `Kernel.update`."""
        gradient = gradient.dense()
        rows, values = gradient.rows, gradient.values
        if values.numel() == 0:
            return
        width = values.shape[1]
        old = torch.from_numpy(moments[frames, : 2 * width]).to(param.device)
        new, change = reference_step(old, values, hyper.beta1, hyper.beta2, hyper.eps, hyper.step_size)
        add_to_rows(param, rows, change)
        moments[frames, : 2 * width] = new.cpu().numpy()


class ExactKernel:
    """One fused pass with the square root that torch's own is: the bits of `ReferenceKernel`; CPU only."""

    name = "exact"

    def update(
        self,
        moments: NDArray[np.floating[Any]],
        frames: NDArray[np.int32],
        param: Tensor,
        gradient: SparseGradient,
        hyper: Hyperparameters,
    ) -> None:
        """See `Kernel.update`."""
        _update_fused(moments, frames, param, gradient, hyper, exact=True)


class FastKernel:
    """The same pass with the processor's own root: the moments of `ReferenceKernel` to the bit, its weights to 1 ulp a
    step; CPU only."""

    name = "fast"

    def update(
        self,
        moments: NDArray[np.floating[Any]],
        frames: NDArray[np.int32],
        param: Tensor,
        gradient: SparseGradient,
        hyper: Hyperparameters,
    ) -> None:
        """See `Kernel.update`."""
        _update_fused(moments, frames, param, gradient, hyper, exact=False)


_KERNELS: dict[str, Kernel] = {each.name: each for each in (ReferenceKernel(), ExactKernel(), FastKernel())}


def choose_kernel(name: str, param: Tensor) -> Kernel:
    """The kernel of that name for `param`; "auto" is `reference` for CUDA and `exact` elsewhere.

    Parameters on other accelerators are updated on the CPU (see placement.py).

    Raises:
        ConfigError: no kernel has that name, or it does not run on the parameter's device.
    """
    on_cpu = param.device.type not in ("cuda", "meta")
    if name == "auto":
        return _KERNELS["exact" if on_cpu else "reference"]
    if name not in _KERNELS:
        raise ConfigError(f"kernel must be 'auto', 'exact', 'fast' or 'reference', got {name!r}")
    if name != "reference" and not on_cpu:
        raise ConfigError(f"kernel={name!r} runs on the CPU, a parameter is on {param.device}: use kernel='auto'")
    return _KERNELS[name]


def warm_up(kernel: Kernel, dtype: torch.dtype) -> None:
    """Compile, or load from the cache, all that `kernel` needs for parameters of `dtype`."""
    param = torch.zeros(2, 3, dtype=dtype, device="cpu")
    moments = np.zeros((2, 6), np.float64 if dtype == torch.float64 else np.float32)
    rows = torch.arange(2, device="cpu")
    hyper = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 1)
    gradient = SparseGradient(rows, torch.ones_like(param))
    kernel.update(moments, rows.to(torch.int32).numpy(), param, gradient, hyper)


def _update_fused(
    moments: NDArray[np.floating[Any]],
    frames: NDArray[np.int32],
    param: Tensor,
    gradient: SparseGradient,
    hyper: Hyperparameters,
    *,
    exact: bool,
) -> None:
    count, width = gradient.rows.shape[0], gradient.values.shape[1]
    if count * width == 0:
        return
    weights = param.detach()
    as_rows = _two_dimensional(weights)
    if as_rows is not None:
        _update_rows(moments, frames, as_rows, gradient.rows, gradient, hyper, exact)
    else:  # the weights of a row have no common stride: a copy of some rows at a time has
        step = max(1, SCRATCH_BYTES // (width * weights.element_size()))
        for first in range(0, count, step):
            some = gradient.at(slice(first, first + step))
            gathered = weights.index_select(0, some.rows)
            at = torch.arange(len(some.rows), device="cpu")
            flat = gathered.view(len(some.rows), -1)
            _update_rows(moments, frames[first : first + step], flat, at, some, hyper, exact)
            weights.index_copy_(0, some.rows, gathered)
    torch.autograd.graph.increment_version(param)


def _two_dimensional(weights: Tensor) -> Tensor | None:
    """The parameter's own memory as [rows, width], or None where its strides do not allow that."""
    if weights.dim() == 1:
        return weights.unsqueeze(1)
    if weights.dim() == 2:
        return weights
    try:
        return weights.view(len(weights), -1)
    except RuntimeError:
        return None


def _update_rows(
    moments: NDArray[np.floating[Any]],
    frames: NDArray[np.int32],
    weights: Tensor,
    rows: Tensor,
    gradient: SparseGradient,
    hyper: Hyperparameters,
    exact: bool,
) -> None:
    """Fill in the cells of a region and run it: once, or block by block where torch itself is to take the roots.

    Args:
        weights: [n, width].
        rows: which of them belong to the gradient's rows.
    """
    real: Any = moments.dtype.type
    values, runs = gradient.values, gradient.runs
    if values.dtype != weights.dtype:
        values, runs = gradient.dense().values.to(torch.float64 if real is np.float64 else torch.float32), None
    frames = np.ascontiguousarray(frames, np.int32)
    rows, values = rows.contiguous(), values.contiguous()
    count, width = rows.shape[0], values.shape[1]
    factors = np.array([1 - hyper.beta1, 1 - hyper.beta2, hyper.eps, -hyper.step_size])
    cells = np.zeros(fused.CELLS, np.int64)
    cells[fused.COUNT], cells[fused.WIDTH], cells[fused.PART_ROWS] = count, width, fused.part_rows(width)
    cells[fused.FACTORS] = address_of_own(factors)
    cells[fused.MOMENTS], cells[fused.STRIDE] = address_of(moments), moments.strides[0] // moments.itemsize
    cells[fused.FRAMES], cells[fused.ROWS], cells[fused.VALUES] = address_of(frames), rows.data_ptr(), values.data_ptr()
    if runs is not None:
        begins, ends = np.ascontiguousarray(runs.begins), np.ascontiguousarray(runs.ends)
        cells[fused.ORDER], cells[fused.NEGATE] = address_of_own(runs.order), runs.negate
        cells[fused.BEGINS], cells[fused.ENDS] = address_of_own(begins), address_of_own(ends)
    cells[fused.WEIGHTS] = weights.data_ptr()
    cells[fused.ROW_STRIDE] = weights.stride(0)
    cells[fused.COLUMN_STRIDE] = weights.stride(1) if width > 1 else 1
    if weights.dtype in _HALVES:
        cells[fused.TABLE] = address_of(_floats_of_halves(weights.dtype))
        cells[fused.BF16] = weights.dtype == torch.bfloat16
    kinds: tuple[Any, Any] = (_item(values.dtype), _item(weights.dtype))
    step = fused.step_region(real, *kinds)
    root = roots.root_of(real) if exact else roots.HARDWARE
    if root is not roots.TORCH:
        cells[fused.FUNCTION], cells[fused.MODE] = root.address, root.mode
        workers.run(step, cells, count * width)
    else:
        _run_in_phases(step, cells, moments.dtype, values.element_size())


def _run_in_phases(step: workers.Region, cells: NDArray[np.int64], real: np.dtype[Any], value_bytes: int) -> None:
    """Moments, torch's roots, weights; some rows at a time, whose roots the scratch memory holds."""
    count, width = int(cells[fused.COUNT]), int(cells[fused.WIDTH])
    block_rows = max(1, SCRATCH_BYTES // (width * real.itemsize))
    for start in range(0, count, block_rows):
        size = min(block_rows, count - start)
        squares = _scratch(size * width, torch.float64 if real == np.float64 else torch.float32)
        cells[fused.COUNT], cells[fused.ROOTS] = size, squares.data_ptr()
        for phase in (fused.ONLY_MOMENTS, fused.ONLY_WEIGHTS):
            cells[fused.CLAIMED], cells[fused.PHASE] = 0, phase
            workers.run(step, cells, size * width)
            if phase == fused.ONLY_MOMENTS:
                roots.take_roots(squares, workers.threads_for(size * width))
        cells[fused.FRAMES] += size * 4
        cells[fused.ROWS] += size * 8
        if cells[fused.ORDER]:
            cells[fused.BEGINS] += size * 8
            cells[fused.ENDS] += size * 8
        else:
            cells[fused.VALUES] += size * width * value_bytes


def _item(dtype: torch.dtype) -> type[np.generic]:
    """The numpy type that regions see memory of this dtype as: bits for half precision."""
    if dtype in _HALVES:
        return np.uint16
    return np.float64 if dtype == torch.float64 else np.float32


def _scratch(items: int, dtype: torch.dtype) -> Tensor:
    """This thread's scratch memory; it grows to the largest block so far."""
    kept: Tensor | None = getattr(_local, "scratch", None)
    if kept is None or kept.dtype != dtype or len(kept) < items:
        kept = _local.scratch = torch.empty(items, dtype=dtype, device="cpu")
    return kept[:items]


@functools.cache
def _floats_of_halves(dtype: torch.dtype) -> NDArray[np.float32]:
    """The float32 of each of the 65536 bit patterns of bf16 or fp16."""
    bits = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.uint16)
    return bits.view(dtype).to(torch.float32).numpy()
