"""From a parameter's sparse gradient to sorted unique rows and their summed values, with the bits of `coalesce()`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa.errors import UsageError


@dataclass(frozen=True)
class SparseGradient:
    """The rows of one parameter that a step changes, and the gradient of each.

    Args:
        rows: int64 [k], ascending and distinct, on the parameter's device.
        values: [k, width], contiguous, in the gradient's own dtype; width is the product of the parameter's other
            dimensions (1 where there are none).
    """

    rows: Tensor
    values: Tensor


def unique_rows(name: str, param: Tensor, maximize: bool) -> SparseGradient | None:
    """The gradient of `param` by rows, duplicates summed to the bits that torch's own `coalesce()` gives.

    Args:
        name: what messages call the parameter.
        param: any dense parameter; its `.grad` is not changed.
        maximize: negate the gradient, before duplicates are summed.

    Returns:
        None where there is no gradient; no rows where the gradient is empty.

    Raises:
        UsageError: the gradient is dense, complex, of another shape, or has more than one sparse dimension.
    """
    grad = param.grad
    if grad is None:
        return None
    _check(name, param, grad)
    grad = grad.detach()
    whole = (-grad if maximize else grad).coalesce()
    rows = whole.indices()[0].contiguous()
    width = math.prod(param.shape[1:])
    return SparseGradient(rows, whole.values().reshape(len(rows), width).contiguous())


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
