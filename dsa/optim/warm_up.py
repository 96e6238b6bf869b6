"""Compiles, or loads from the cache, all that an optimizer's steps will need."""

from __future__ import annotations

import time
from collections.abc import Iterable

from torch import Tensor

from dsa.io import warm_up as io_warm_up
from dsa.optim import gradients, kernels


def warm_up(pairs: Iterable[tuple[str, Tensor]], kernel: str) -> float:
    """Have everything compiled that steps on these parameters call, by the kernel asked for.

    Returns:
        The seconds that it took.

    Raises:
        ConfigError: the kernel does not run where a parameter is.
    """
    began = time.perf_counter()
    io_warm_up.warm_up()
    chosen = {(param.dtype, kernels.choose_kernel(kernel, param)) for _, param in pairs}
    for dtype, each in chosen:
        gradients.warm_up(dtype)
        kernels.warm_up(each, dtype)
    return time.perf_counter() - began
