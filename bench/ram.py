"""Peak memory of training with the state on disk, against the bound of 64 MiB + 16 bytes a row.

    python -m bench.ram [--rows 10000000] [--touched 5000000] [--dim 16] [--batch 8192] [--cache 64MiB]
    python -m bench.ram --limit [--steps 100000] [--batch 256] ...

Two processes of their own run the same batches: one that has imported torch, numba and the compiled kernels and holds
the model and a batch (the baseline), one that trains. What the trainer's peak (VmHWM) has beyond the baseline's peak
and the cache is printed beside the bound; the exit status is 1 where it is over.

With --limit the trainer runs in a memory cgroup of just that size: the baseline's private memory (the libraries' pages
are shared with the rest of the system), the cache and the bound. It would be killed where it took more. Needs root.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.memory_limit import CannotLimit, MemoryLimit, ProgramFailed
from dsa.io.cache_budget import cache_bytes

MIB = 1 << 20
_TIMEOUT_S = 3600.0


def peak_bytes() -> int:
    """The most memory that this process has had resident."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError("/proc/self/status has no VmHWM: this needs Linux")
    return int(found.group(1)) * 1024


def private_bytes() -> int:
    """The memory that is this process's own now: no page of it is a file's."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError("/proc/self/status has no RssAnon: this needs Linux")
    return int(found.group(1)) * 1024


def run(options: argparse.Namespace) -> None:
    """One process: its peak, the cache's bytes and the distinct rows that steps touched, on one line."""
    import torch

    from dsa import DiskSparseAdam

    torch.sparse.check_sparse_tensor_invariants.disable()
    training = options.role == "train"

    def step(param: torch.nn.Parameter, optimizer: DiskSparseAdam | None, rows: torch.Tensor) -> None:
        values = torch.full((len(rows), options.dim), 0.5)
        param.grad = torch.sparse_coo_tensor(rows[None], values, param.shape)
        if optimizer is not None:
            optimizer.step()

    with tempfile.TemporaryDirectory(dir=options.folder) as small:
        # The baseline has compiled, or loaded, everything, and has run a step.
        param = torch.nn.Parameter(torch.zeros(100, options.dim))
        with DiskSparseAdam([("small", param)], state_dir=small) as optimizer:
            step(param, optimizer, torch.arange(50))
    param = torch.nn.Parameter(torch.ones(options.rows, options.dim))
    batch = torch.arange(options.batch) * (options.rows // options.batch)
    if not training:
        for _ in range(3):
            step(param, None, batch)
            if param.grad is not None:
                param.grad.coalesce()
        print(peak_bytes(), private_bytes(), 0, 0)
        return
    # Every row of the first `touched`, spread over the table, in an order that is no order on disk.
    stride, count = options.rows // options.touched, options.touched
    with tempfile.TemporaryDirectory(dir=options.folder) as state_dir:
        optimizer = DiskSparseAdam([("weight", param)], state_dir=state_dir, cache=options.cache)
        jump = 7_368_787  # a prime: i -> i * jump % count visits every i once unless count is a multiple of it
        for number in range(options.steps or -(-count // options.batch)):
            start = number * options.batch % count
            order = torch.arange(start, min(start + options.batch, count))
            rows = order * jump % count * stride
            step(param, optimizer, rows)
        optimizer.checkpoint()
        statistics = optimizer.statistics()
        optimizer.close()
        print(peak_bytes(), statistics.cache_bytes, statistics.live_records, statistics.state_bytes_on_disk)


def measure(options: argparse.Namespace, role: str, limit_bytes: int | None = None) -> list[int]:
    """What a process of that role prints, in so much memory."""
    command = [sys.executable, "-m", "bench.ram", "--role", role]
    for name in ("rows", "touched", "dim", "batch", "steps", "cache", "folder"):
        value = getattr(options, name)
        command += [f"--{name}", str(value)] if value is not None else []
    if limit_bytes is None:
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    else:
        with MemoryLimit.open(limit_bytes) as limit:
            found = limit.run(command, _TIMEOUT_S)
    return [int(word) for word in found.split()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--touched", type=int, default=5_000_000, help="distinct rows that are updated")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, help="rows of a step (8192; with --limit 256)")
    parser.add_argument("--steps", type=int, help="(as many as touch each row once; with --limit 100,000)")
    parser.add_argument("--limit", action="store_true", help="train in a memory cgroup of just that size")
    parser.add_argument("--cache", default="64MiB")
    parser.add_argument("--folder", help="where the state is put while this runs")
    parser.add_argument("--role", choices=["baseline", "train"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        run(options)
        return 0
    options.batch = options.batch or (256 if options.limit else 8192)
    options.steps = options.steps or (100_000 if options.limit else None)
    baseline, private, _, _ = measure(options, "baseline")
    bound, limit_bytes = 64 * MIB + 16 * options.rows, None
    if options.limit:
        limit_bytes = private + cache_bytes(options.cache, sys.maxsize) + bound
        print(f"in a memory cgroup of {limit_bytes / MIB:,.1f} MiB: {private / MIB:,.1f} MiB of the baseline's own")
    try:
        peak, cache, live, on_disk = measure(options, "train", limit_bytes)
    except (CannotLimit, ProgramFailed) as error:
        print(error, file=sys.stderr)
        return 1
    extra = peak - baseline - cache
    print(f"{options.rows:,} rows of {options.dim}, {live:,} distinct ones updated, {on_disk / MIB:,.0f} MiB on disk")
    print(f"peak {peak / MIB:,.1f} MiB; baseline {baseline / MIB:,.1f} MiB, cache {cache / MIB:,.1f} MiB")
    print(f"beyond them {extra / MIB:,.1f} MiB, bound {bound / MIB:,.1f} MiB")
    if options.steps is not None:
        print(f"{options.steps:,} steps of {options.batch:,} rows")
    if live != options.touched:
        print(f"only {live} of {options.touched} rows were updated", file=sys.stderr)
        return 1
    return int(extra > bound)


if __name__ == "__main__":
    sys.exit(main())
