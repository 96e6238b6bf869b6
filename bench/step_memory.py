"""Optimizers in limited memory: what bench.step_limited is run with, one after the other."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.device_files import drop_cache
from bench.memory_limit import MemoryLimit
from bench.step_limited import MOMENT_FILES
from bench.step_samples import DSA, MEMMAP, MEMMAP_RANDOM, StepCase, sample
from bench.step_scale import WIDTH, Scale
from bench.step_training import frame_bytes

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 900.0
_STATE_OVER_LIMIT = 2.7
_CACHE_OF_LIMIT = 4  # the rest is for the program, the index and the buffers
_DSA_TURN = 4


def measure(
    case: StepCase, scale: Scale, directory: Path, shared_memory: Path, backend: str, tell: Callable[[str], None]
) -> None:
    """Fill the case. The weights lie in shared memory, the state below `directory`; both are removed at the end.

    Raises:
        CannotLimit: there can be no memory cgroup here.
        RuntimeError: one of the programs failed; the case has the ways before it.
    """
    rows = scale.limited_rows
    limit_bytes = scale.limit_bytes or int(rows * 8 * WIDTH / _STATE_OVER_LIMIT)
    frames = min(limit_bytes // _CACHE_OF_LIMIT // frame_bytes(WIDTH), rows)
    case.table_rows = case.in_use = rows
    case.width, case.batch_rows, case.distribution, case.cache = WIDTH, scale.batch_rows, "uniform", frames / rows
    place, weights = directory / "limited", shared_memory / f"{directory.name}-weights"
    place.mkdir()
    arguments = ["--weights", str(weights), "--directory", str(place), "--rows", str(rows), "--width", str(WIDTH)]
    arguments += ["--batch-rows", str(scale.batch_rows), "--cache", str(frames), "--backend", backend]
    arguments += ["--turnovers", str(scale.limited_turnovers), "--warm-bytes", str(limit_bytes)]
    batches = scale.limited_batches
    plan = (
        (MEMMAP, "memmap", min(scale.limited_plain_rows, scale.batch_rows), batches, 1),
        (MEMMAP_RANDOM, "memmap-random", min(scale.limited_random_rows, scale.batch_rows), batches, 1),
        (DSA, "dsa", scale.batch_rows, batches * _DSA_TURN, _DSA_TURN),
    )
    try:
        with MemoryLimit.open(limit_bytes) as limit:
            write_numbers(weights, rows * WIDTH)
            for file in MOMENT_FILES:
                write_numbers(place / file, rows * WIDTH)
            for way, name, update_rows, count, turn in plan:
                tell(f"{rows:,} rows in {limit_bytes >> 20:,} MiB: {way}")
                if way == DSA:
                    for file in MOMENT_FILES:
                        (place / file).unlink()
                command = [sys.executable, "-m", "bench.step_limited", name, *arguments]
                command += ["--update-rows", str(update_rows), "--batches", str(count), "--turn", str(turn)]
                found = json.loads(limit.run(command, _TIMEOUT_S, cwd=_ROOT))
                for updated, spent_s in zip(found["rows"], found["seconds"], strict=True):
                    case.add(way, sample(updated, WIDTH, spent_s))
    finally:
        weights.unlink(missing_ok=True)
        shutil.rmtree(place)


def write_numbers(path: Path, count: int) -> None:
    """A file of so many small float32 numbers, written in full, and not in the page cache of a disk."""
    chunk = np.random.default_rng(6).random(min(count, 1 << 21), np.float32) * np.float32(1e-3)
    with path.open("wb", buffering=0) as file:
        for at in range(0, count, len(chunk)):
            file.write(chunk[: count - at].data)
        os.fsync(file.fileno())
    drop_cache(path)
