"""Adam's moments in two memmaps, m and v: gather a batch's rows, change them, scatter them back.

    python -m bench.device_memmap M V --width 128 --rows 8192 --batches 5 --warm-bytes 1000000 [--advice random]

Run by bench.device in a memory cgroup smaller than the files; prints one JSON object: rows, and seconds of each batch.
"""

from __future__ import annotations

import argparse
import json
import mmap
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float32]


def open_moments(path: Path, width: int, advice: str) -> Numbers:
    """The file as float32 [rows, width], writable."""
    n_rows = path.stat().st_size // (4 * width)
    mapped: np.memmap[tuple[int, int], np.dtype[np.float32]] = np.memmap(path, np.float32, "r+", shape=(n_rows, width))
    if advice == "random":
        raw: mmap.mmap = mapped._mmap  # type: ignore[attr-defined]
        raw.madvise(mmap.MADV_RANDOM)
    return mapped


def update(m: Numbers, v: Numbers, rows: NDArray[np.int64], gradient: Numbers) -> None:
    """The moments' part of a step."""
    first, second = m[rows], v[rows]
    first += (gradient - first) * np.float32(0.1)
    second += (gradient * gradient - second) * np.float32(0.001)
    m[rows] = first
    v[rows] = second


def fill_memory(path: Path, nbytes: int) -> None:
    """Read so much of the file's end that the page cache is as full as it may be."""
    with path.open("rb", buffering=0) as file:
        file.seek(max(path.stat().st_size - nbytes, 0))
        while file.read(1 << 20):
            pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("m", type=Path)
    parser.add_argument("v", type=Path)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--warm-bytes", type=int, default=0)
    parser.add_argument("--advice", choices=["normal", "random"], default="normal")
    options = parser.parse_args()
    m, v = (open_moments(path, options.width, options.advice) for path in (options.m, options.v))
    fill_memory(options.m, options.warm_bytes // 2)
    fill_memory(options.v, options.warm_bytes // 2)
    random = np.random.default_rng(11)
    gradient = random.standard_normal((options.rows, options.width), np.float32)
    seconds = []
    for _ in range(options.batches):
        rows = np.sort(random.choice(len(m), options.rows, replace=False))
        began = time.perf_counter()
        update(m, v, rows, gradient)
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"rows": options.rows, "seconds": seconds}))


if __name__ == "__main__":
    main()
