"""One optimizer in a memory cgroup, with embedding rows whose moments take more than it: `bench.step` runs it.

    python -m bench.step_limited dsa|memmap|memmap-random --weights FILE --directory DIR --rows 4000000 ...

The weights are a file in shared memory that the parent has touched, so that they are not counted in this group: all of
its memory is for the optimizer. Prints one JSON object: rows that each turn updated, its seconds (drawing batches left
out), this process's peak memory.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.device_memmap import Numbers, fill_memory, open_moments
from bench.ram import peak_bytes
from bench.step_training import Alone, OnDisk
from bench.step_workload import Batch, Draws, distinct_rows
from dsa.optim.lookahead import MOST_AHEAD

OPTIMIZERS = ("dsa", "memmap", "memmap-random")
MOMENT_FILES = ("exp_avg", "exp_avg_sq")
_BETA1, _BETA2, _EPS, _LR = 0.9, 0.999, 1e-8, 1e-3


class MemmapAdam:
    """Sparse Adam on two memmaps, the obvious way: gather the rows, update them, scatter them back."""

    def __init__(self, weight: torch.nn.Parameter, m: Numbers, v: Numbers) -> None:
        self._weight, self._m, self._v = weight, m, v
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """One step with the weight's sparse gradient, in the order of torch.optim.SparseAdam."""
        gradient = self._weight.grad
        if gradient is None:
            return
        self._steps += 1
        whole = gradient.coalesce()
        rows, values = whole.indices()[0], whole.values()
        places: NDArray[np.int64] = rows.numpy()
        m_old, v_old = torch.from_numpy(self._m[places]), torch.from_numpy(self._v[places])
        m = m_old + (values - m_old) * (1 - _BETA1)
        v = v_old + (values * values - v_old) * (1 - _BETA2)
        self._m[places] = m.numpy()
        self._v[places] = v.numpy()
        size = _LR * math.sqrt(1 - _BETA2**self._steps) / (1 - _BETA1**self._steps)
        self._weight.index_add_(0, rows, m / (v.sqrt() + _EPS), alpha=-size)


def run_memmap(work: Alone, options: argparse.Namespace, batches: Sequence[Batch]) -> list[float]:
    """Seconds of each batch."""
    width = work.weight.shape[1]
    advice = "random" if options.optimizer == "memmap-random" else "normal"
    files = [options.directory / name for name in MOMENT_FILES]
    m, v = (open_moments(file, width, advice) for file in files)
    for file in files:
        fill_memory(file, options.warm_bytes // 2)  # as after a long training: the page cache is full of them
    return timed(work, MemmapAdam(work.weight, m, v).step, batches)


def timed(work: Alone, step: Callable[[], object], batches: Sequence[Batch]) -> list[float]:
    """Seconds of each batch's step."""
    found = []
    for batch in batches:
        work.backward(batch)
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
    return found


def run_dsa(work: Alone, options: argparse.Namespace, draws: Draws, batches: Sequence[Batch]) -> list[float]:
    """Seconds of each batch, lookahead's announcing included, once every row is on disk and the log is cleaned."""
    rows = len(work.weight)
    with OnDisk(work, options.directory / "dsa", options.cache / rows, backend=options.backend) as disk:
        disk.fill()
        warm = math.ceil(options.turnovers * rows / options.batch_rows) + 2
        first, beyond = ([draws.batch(options.batch_rows) for _ in range(count)] for count in (warm, MOST_AHEAD + 1))
        disk.train_on([*first, *batches, *beyond])
        disk.take(warm)
        return [disk.take(options.turn).loop_s for _ in range(len(batches) // options.turn)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step_limited", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    parser.add_argument("--weights", type=Path, required=True, help="float32 [rows, width]")
    parser.add_argument("--directory", type=Path, required=True, help="of the memmaps, and of DSA's state")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--batch-rows", type=int, required=True)
    parser.add_argument("--update-rows", type=int, required=True, help="the first of a batch, which are updated")
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--turn", type=int, default=1, help="batches that are timed together (DSA)")
    parser.add_argument("--cache", type=int, default=1, help="frames (DSA)")
    parser.add_argument("--backend", default="auto", help="(DSA)")
    parser.add_argument("--turnovers", type=float, default=0.0, help="updates before, as a share of the rows (DSA)")
    parser.add_argument("--warm-bytes", type=int, default=0, help="of the files, read before (memmap)")
    options = parser.parse_args()
    count = options.rows * options.width
    weight = torch.from_file(str(options.weights), shared=True, size=count).view(options.rows, options.width)
    work = Alone(options.rows, options.width, options.batch_rows, weight)
    draws = Draws(options.rows, "uniform", seed=3)
    drawn = [draws.batch(options.batch_rows) for _ in range(options.batches)]
    batches = [Batch(batch.entities[: options.update_rows], batch.relations) for batch in drawn]
    dsa = options.optimizer == "dsa"
    found = run_dsa(work, options, draws, batches) if dsa else run_memmap(work, options, batches)
    turns = range(0, len(batches), options.turn)
    rows = [distinct_rows(batches[first : first + options.turn]) for first in turns]
    print(json.dumps({"rows": rows, "seconds": found, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
