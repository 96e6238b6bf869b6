"""The whole update, summing of duplicates included, against torch.optim.SparseAdam's, step by step in one run.

    python -m bench.kernels [--rows 256 8192 65536] [--table 1000000] [--width 128] [--repeats 15]

Prints, for each batch size, the time of each and how many times faster than SparseAdam it is: of the medians, and of
the fastest repeats, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from dsa.optim import gradients
from dsa.optim.kernels import Hyperparameters, Kernel, choose_kernel, warm_up


def contender(kernel: Kernel, param: torch.nn.Parameter) -> Callable[[torch.Tensor, int], None]:
    """One kernel's step on its own weights and moments, which are all in RAM."""
    width = param.shape[1]
    moments = np.zeros((len(param), 2 * width), np.float32)
    moments[:] = 0  # touched
    warm_up(kernel, param.dtype)

    def step(grad: torch.Tensor, count: int) -> None:
        param.grad = grad
        found = gradients.unique_rows("table", param, False)
        if found is None:
            raise RuntimeError("the benchmark gave no gradient")
        frames = found.rows.to(torch.int32).numpy()
        hyper = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, count)
        kernel.update(moments, frames, param, found, hyper)

    return step


def oracle(param: torch.nn.Parameter) -> Callable[[torch.Tensor, int], None]:
    """torch.optim.SparseAdam's step."""
    optimizer = torch.optim.SparseAdam([param])

    def step(grad: torch.Tensor, count: int) -> None:
        param.grad = grad
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 8192, 65536])
    parser.add_argument("--table", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.sparse.check_sparse_tensor_invariants.disable()
    torch.manual_seed(0)
    start = torch.randn(options.table, options.width) * 0.1
    steps = {"SparseAdam": oracle(torch.nn.Parameter(start.clone()))}
    for name in ("exact", "fast"):
        param = torch.nn.Parameter(start.clone())
        steps[name] = contender(choose_kernel(name, param), param)
    gradients.warm_up(torch.float32)
    count = 0
    for rows in options.rows:
        times: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(options.repeats + 2):
            count += 1
            index = torch.randint(0, options.table, (1, rows))
            values = torch.randn(rows, options.width)
            for name, step in steps.items():
                grad = torch.sparse_coo_tensor(index, values, start.shape)
                begin = time.perf_counter()
                step(grad, count)
                if repeat >= 2:
                    times[name].append(time.perf_counter() - begin)
        medians = {name: statistics.median(some) for name, some in times.items()}
        least = {name: min(some) for name, some in times.items()}
        for name in steps:
            print(
                f"{rows:6d} rows  {name:10s} median {medians[name] * 1e3:8.2f} ms, "
                f"{medians['SparseAdam'] / medians[name]:5.2f} times; "
                f"least {least[name] * 1e3:8.2f} ms, {least['SparseAdam'] / least[name]:5.2f} times"
            )


if __name__ == "__main__":
    main()
