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
from dsa.optim import fused
from dsa.optim.workers import share_out

SCRATCH_BYTES = 8 << 20  # of each worker, for one block's roots, or for gathered weights
_HALVES = (torch.bfloat16, torch.float16)
_local = threading.local()


@dataclass(frozen=True)
class Hyperparameters:
    """One parameter's hyperparameters for one step; `step` counts this one (1 for the first)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    step: int

    @property
    def step_size(self) -> float:
        """The learning rate with both bias corrections, in torch's order of operations."""
        bias_correction1 = 1 - self.beta1**self.step
        bias_correction2 = 1 - self.beta2**self.step
        return self.lr * math.sqrt(bias_correction2) / bias_correction1


class Kernel(Protocol):
    """One way to carry out the update."""

    name: str

    def update(
        self,
        moments: NDArray[np.floating[Any]],
        frames: NDArray[np.int32],
        param: Tensor,
        rows: Tensor,
        values: Tensor,
        hyper: Hyperparameters,
    ) -> None:
        """Carry out torch.optim.SparseAdam's step on some rows, in place in `moments` and `param`.

        Args:
            moments: [frames, at least 2 * width], fp64 for an fp64 parameter, else fp32: exp_avg, then exp_avg_sq.
            frames: [k], distinct; where each row's moments are.
            param: the whole parameter, any strides; bf16 and fp16 rows are cast to fp32 and rounded back.
            rows: int64 [k], distinct.
            values: [k, width], contiguous: the gradient, its sign already turned where a maximum is sought.
            hyper: lr, betas, eps, step.
        """


class ReferenceKernel:
    """torch.optim.SparseAdam's own operations, in its order, on gathered rows; any device."""

    name = "reference"

    def update(
        self,
        moments: NDArray[np.floating[Any]],
        frames: NDArray[np.int32],
        param: Tensor,
        rows: Tensor,
        values: Tensor,
        hyper: Hyperparameters,
    ) -> None:
        """See `Kernel.update`."""
        if values.numel() == 0:
            return
        width = values.shape[1]
        old = torch.from_numpy(moments[frames, : 2 * width]).to(param.device)
        exp_avg, exp_avg_sq = old[:, :width], old[:, width:]
        grad = values.to(old.dtype)
        exp_avg_update = grad.sub(exp_avg).mul_(1 - hyper.beta1)
        exp_avg_sq_update = grad.pow(2).sub_(exp_avg_sq).mul_(1 - hyper.beta2)
        new = torch.cat((exp_avg + exp_avg_update, exp_avg_sq + exp_avg_sq_update), 1)
        numer = exp_avg_update.add_(exp_avg)
        denom = exp_avg_sq_update.add_(exp_avg_sq).sqrt_().add_(hyper.eps)
        change = -hyper.step_size * numer.div_(denom)
        weights = param.detach()
        shape = (len(rows), *weights.shape[1:])
        updated = weights.index_select(0, rows).to(old.dtype).add_(change.view(shape))
        weights.index_copy_(0, rows, updated.to(weights.dtype))
        moments[frames, : 2 * width] = new.cpu().numpy()


class ExactKernel:
    """Two fused passes with torch's own square root between them: the bits of `ReferenceKernel`; CPU only."""

    name = "exact"

    def update(
        self,
        moments: NDArray[np.floating[Any]],
        frames: NDArray[np.int32],
        param: Tensor,
        rows: Tensor,
        values: Tensor,
        hyper: Hyperparameters,
    ) -> None:
        """See `Kernel.update`."""
        _update_fused(moments, frames, param, rows, values, hyper, exact=True)


class FastKernel:
    """One fused pass: the moments of `ReferenceKernel` to the bit, its weights to 1 ulp a step; CPU only."""

    name = "fast"

    def update(
        self,
        moments: NDArray[np.floating[Any]],
        frames: NDArray[np.int32],
        param: Tensor,
        rows: Tensor,
        values: Tensor,
        hyper: Hyperparameters,
    ) -> None:
        """See `Kernel.update`."""
        _update_fused(moments, frames, param, rows, values, hyper, exact=False)


_KERNELS: dict[str, Kernel] = {each.name: each for each in (ReferenceKernel(), ExactKernel(), FastKernel())}


def choose_kernel(name: str, param: Tensor) -> Kernel:
    """The kernel of that name for `param`; "auto" is `exact` on the CPU and `reference` elsewhere.

    Raises:
        ConfigError: no kernel has that name, or it does not run on the parameter's device.
    """
    on_cpu = param.device.type == "cpu"
    if name == "auto":
        return _KERNELS["exact" if on_cpu else "reference"]
    if name not in _KERNELS:
        raise ConfigError(f"kernel must be 'auto', 'exact', 'fast' or 'reference', got {name!r}")
    if name != "reference" and not on_cpu:
        raise ConfigError(f"kernel={name!r} runs on the CPU, a parameter is on {param.device}: use kernel='auto'")
    return _KERNELS[name]


def warm_up(kernel: Kernel, dtype: torch.dtype) -> None:
    """Compile, or load from the cache, all that `kernel` needs for parameters of `dtype`."""
    param = torch.zeros(2, 3, dtype=dtype)
    moments = np.zeros((2, 6), np.float64 if dtype == torch.float64 else np.float32)
    rows = torch.arange(2)
    hyper = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 1)
    kernel.update(moments, rows.to(torch.int32).numpy(), param, rows, torch.ones_like(param), hyper)


def _update_fused(
    moments: NDArray[np.floating[Any]],
    frames: NDArray[np.int32],
    param: Tensor,
    rows: Tensor,
    values: Tensor,
    hyper: Hyperparameters,
    *,
    exact: bool,
) -> None:
    if values.numel() == 0:
        return
    weights = param.detach()
    as_rows = _two_dimensional(weights)
    if as_rows is not None:
        _update_rows(moments, frames, as_rows, rows, values, hyper, exact)
    else:  # the weights of a row have no common stride: a copy of some rows at a time has
        step = max(1, SCRATCH_BYTES // (values.shape[1] * weights.element_size()))
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            gathered = weights.index_select(0, some)
            at = torch.arange(len(some))
            flat = gathered.view(len(some), -1)
            _update_rows(moments, frames[first : first + step], flat, at, values[first : first + step], hyper, exact)
            weights.index_copy_(0, some, gathered)
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
    values: Tensor,
    hyper: Hyperparameters,
    exact: bool,
) -> None:
    width = values.shape[1]
    real = moments.dtype.type
    rate1, rate2 = real(1 - hyper.beta1), real(1 - hyper.beta2)
    eps, minus_step_size = real(hyper.eps), real(-hyper.step_size)
    half = weights.dtype in _HALVES
    if values.dtype != weights.dtype:
        values = values.to(torch.from_numpy(moments).dtype)
    half_values = values.dtype in _HALVES
    table = _floats_of_halves(weights.dtype) if half else None
    bf16 = weights.dtype == torch.bfloat16
    # One array type each, whatever came: contiguous, writable, of one dimension.
    flat, stride = _flat(moments)
    place = np.require(frames, np.int32, "CW")
    numbers = rows.contiguous().numpy()
    gradient = _numpy(values.reshape(-1))
    memory, (row_stride, column_stride) = _memory(weights)

    def fast_part(first: int, last: int) -> None:
        layout = (memory, row_stride, column_stride, numbers, width, first, last)
        factors = (rate1, rate2, eps, minus_step_size)
        if half:
            fused.update_fast_half(flat, stride, place, gradient, *layout, *factors, table, bf16)
        else:
            fused.update_fast(flat, stride, place, gradient, *layout, *factors)

    def exact_part(first: int, last: int) -> None:
        block_rows = max(1, SCRATCH_BYTES // (width * moments.itemsize))
        for start in range(first, last, block_rows):
            end = min(start + block_rows, last)
            roots, root_tensor = _scratch((end - start) * width, moments.dtype)
            block = (gradient, width, start, end, rate1, rate2, roots)
            if half_values:
                fused.update_moments_half(flat, stride, place, *block, table)
            else:
                fused.update_moments(flat, stride, place, *block)
            root_tensor.sqrt_()
            layout = (memory, row_stride, column_stride, numbers, width, start, end, eps, minus_step_size, roots)
            if half:
                fused.update_weights_half(flat, stride, place, *layout, table, bf16)
            else:
                fused.update_weights(flat, stride, place, *layout)

    mixed = half and not half_values
    share_out(exact_part if exact or mixed else fast_part, len(rows), values.numel())


def _flat(moments: NDArray[np.floating[Any]]) -> tuple[NDArray[np.floating[Any]], int]:
    """The same memory in one dimension, and the items from one row to the next."""
    if moments.flags.c_contiguous:
        return moments.reshape(-1), moments.shape[1]
    stride = moments.strides[0] // moments.itemsize
    span = (len(moments) - 1) * stride + moments.shape[1]
    flat = np.lib.stride_tricks.as_strided(moments, (span,), (moments.itemsize,))
    return flat, stride


def _memory(weights: Tensor) -> tuple[NDArray[Any], tuple[int, int]]:
    """The parameter's memory in one dimension, from its first weight to its last, and its two strides in items."""
    row_stride, column_stride = weights.stride()
    span = (weights.shape[0] - 1) * row_stride + (weights.shape[1] - 1) * column_stride + 1
    flat = weights.as_strided((span,), (1,), weights.storage_offset())
    return _numpy(flat), (row_stride, column_stride if weights.shape[1] > 1 else 1)


def _numpy(flat: Tensor) -> NDArray[Any]:
    bits = flat.view(torch.int16).numpy().view(np.uint16) if flat.dtype in _HALVES else flat.numpy()
    return bits  # type: ignore[no-any-return]


def _scratch(items: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], Tensor]:
    """This thread's scratch memory, as an array and as a tensor; it grows to the largest block so far."""
    kept: dict[np.dtype[Any], NDArray[Any]] = _local.__dict__.setdefault("scratch", {})
    whole = kept.get(dtype)
    if whole is None or len(whole) < items:
        kept.clear()
        whole = kept[dtype] = np.empty(items, dtype)
    return whole[:items], torch.from_numpy(whole[:items])


@functools.cache
def _floats_of_halves(dtype: torch.dtype) -> NDArray[np.float32]:
    """The float32 of each of the 65536 bit patterns of bf16 or fp16."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    return bits.view(dtype).to(torch.float32).numpy()  # type: ignore[no-any-return]
