"""The row-wise Adam update: `reference` (torch operations), `exact` (fused, the same bits), `fast` (fused, 1 ulp)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa.errors import ConfigError


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


def choose_kernel(name: str, param: Tensor) -> Kernel:
    """The kernel of that name for `param`; "auto" is `exact` on the CPU and `reference` elsewhere.

    Raises:
        ConfigError: no kernel has that name, or it does not run on the parameter's device.
    """
    if name in ("auto", "reference"):
        return ReferenceKernel()
    raise ConfigError(f"kernel must be 'auto', 'exact', 'fast' or 'reference', got {name!r}")
