"""Where a parameter's update is carried out: in the cache's frames, staged on a device, or on copies of its rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa.errors import ConfigError
from dsa.optim.gradients import SparseGradient
from dsa.optim.kernels import Hyperparameters, Kernel, choose_kernel

_KNOWN = ("cpu", "cuda", "meta")


def device_of_update(param: Tensor, staging: str, kernel: str) -> torch.device | None:
    """The device on which the parameter's moments are staged; None: they are updated in their frames.

    Args:
        staging: "auto" stages what is on CUDA, "on" also what is on the CPU (by a device made of the CPU, for tests),
            "off" nothing.

    Raises:
        ConfigError: the device cannot be staged to, cannot hold sparse gradients, or `kernel` does not run there.
    """
    choose_kernel(kernel, param)
    kind = param.device.type
    if kind not in _KNOWN:
        missing = _missing(param.device)
        if missing is not None:
            raise ConfigError(
                f"a parameter is on {param.device}, where torch lacks what sparse gradients need ({missing}): keep it "
                "on the CPU or on CUDA"
            )
        if staging == "on":
            raise ConfigError(
                f"staging='on', and a parameter is on {param.device}: the double buffer needs CUDA's streams and "
                "pinned memory; with staging='auto' the update is done on the CPU"
            )
    if kind == "cuda" and staging != "off":
        return param.device
    if kind == "cpu" and staging == "on":
        if kernel not in ("auto", "reference"):
            raise ConfigError(
                f"kernel={kernel!r} updates in the cache's frames, staging='on' on the device: use kernel='auto'"
            )
        return param.device
    return None


def check_updates(pairs: Iterable[tuple[str, Tensor]], staging: str, kernel: str) -> None:
    """Refuse parameters that cannot be updated where they are.

    Raises:
        ConfigError: see `device_of_update`.
    """
    for _, param in pairs:
        device_of_update(param, staging, kernel)


@functools.cache
def _missing(device: torch.device) -> str | None:
    """What torch says when a sparse tensor is made and coalesced there; None where it can."""
    try:
        rows = torch.zeros(1, 2, dtype=torch.int64, device=device)
        values = torch.ones(2, 1, device=device)
        torch.sparse_coo_tensor(rows, values, (1, 1), device=device).coalesce().indices().cpu()
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return None


def update_in_frames(
    kernel: Kernel,
    moments: NDArray[np.floating[Any]],
    frames: NDArray[np.int32],
    param: Tensor,
    gradient: SparseGradient,
    hyper: Hyperparameters,
) -> None:
    """`Kernel.update`; for parameters on accelerators other than CUDA, on copies of their rows on the CPU."""
    if param.device.type in _KNOWN:
        kernel.update(moments, frames, param, gradient, hyper)
    else:
        update_on_copies(kernel, moments, frames, param, gradient, hyper)


def update_on_copies(
    kernel: Kernel,
    moments: NDArray[np.floating[Any]],
    frames: NDArray[np.int32],
    param: Tensor,
    gradient: SparseGradient,
    hyper: Hyperparameters,
) -> None:
    """The update on the CPU of a parameter that is elsewhere: its rows are copied there and back; the host waits."""
    if gradient.values.numel() == 0:
        return
    weights = param.detach()
    some = weights.index_select(0, gradient.rows).cpu()
    copied = SparseGradient(torch.arange(len(some), device="cpu"), gradient.dense().values.cpu())
    kernel.update(moments, frames, some, copied, hyper)
    weights.index_copy_(0, gradient.rows, some.to(weights.device))
