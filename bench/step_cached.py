"""Steps with everything in cache: beside SparseAdam's, and what a small one costs at least."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.step_samples import CACHED, DSA, FAST, RAM, StepCase, sample
from bench.step_scale import WIDTH, Scale
from bench.step_training import InRam, OnDisk
from bench.step_workload import Draws

_FIXED_DRAWS = 256
_UNCOUNTED = 5


def rounds(scale: Scale, distribution: str, depth: int, ram: InRam, exact: OnDisk, fast: OnDisk) -> list[StepCase]:
    """A case for each size of a batch; what counts is the time of step() alone.

    So it is SparseAdam's with its sort of the look-ups, and DSA's without, which sorts where it announces: that is
    among the parts of the time as "loader and announcing".

    With a frame for every row nothing is written behind before the disk is idle or a checkpoint comes.

    Raises:
        RuntimeError: a row was not in the cache.
    """
    rows, blocks = len(ram.work.tables[0][1]), scale.cached_blocks
    draws = Draws(rows, distribution, seed=1)
    found = [StepCase(CACHED, 8 * WIDTH, {}, rows, WIDTH, rows, size, distribution, steps=0) for size, _ in blocks]
    for number in range(scale.rounds):
        turns = [[draws.batch(size) for _ in range(steps + 1)] for size, steps in blocks]
        beyond = [[draws.batch(size) for _ in range(depth)] for size, _ in blocks]
        ways: list[tuple[InRam | OnDisk, str]] = [(ram, RAM), (exact, DSA), (fast, FAST)]
        for trainer, way in ways[:: 1 if number % 2 else -1]:
            if isinstance(trainer, OnDisk):
                trainer.train_on(
                    [batch for block in zip(turns, beyond, strict=True) for part in block for batch in part]
                )
            for case, turn, rest in zip(found, turns, beyond, strict=True):
                if isinstance(trainer, OnDisk):
                    trainer.take(1)
                    taken = trainer.take(len(turn) - 1)  # each step announces a batch of the same size
                    trainer.take(len(rest))
                else:
                    trainer.take(turn[:1])
                    taken = trainer.take(turn[1:])
                if taken.misses:
                    raise RuntimeError(f"{taken.misses} rows were not in a cache that has frames for all")
                case.add(way, sample(taken.rows, WIDTH, taken.step_s))
                if way == DSA:
                    case.add_parts(taken.parts_s())
                    case.steps += len(turn) - 1
            if isinstance(trainer, OnDisk):
                trainer.settle()
    return found


def fixed(disk: OnDisk, alone_steps: int, busy_steps: int) -> dict[str, Sequence[float]]:
    """Seconds of cached steps of 256 rows, alone and beside a busy Python thread."""
    draws = Draws(len(disk.work.tables[0][1]), "uniform", seed=5)
    found: dict[str, Sequence[float]] = {"alone": _step_times(disk, draws, alone_steps)}
    with busy_thread():
        found["busy"] = _step_times(disk, draws, busy_steps)
    disk.settle()
    return found


def _step_times(disk: OnDisk, draws: Draws, count: int) -> list[float]:
    disk.train_on([draws.batch(_FIXED_DRAWS) for _ in range(count + _UNCOUNTED)])
    disk.take(_UNCOUNTED)
    return [disk.take(1).step_s for _ in range(count)]


@contextmanager
def busy_thread() -> Iterator[None]:
    """Another thread that runs Python code all the time, as a DataLoader without workers does."""
    ended = threading.Event()

    def work() -> None:
        number = 1
        while not ended.is_set():
            for _ in range(1000):
                number = number * 3 % 1_000_003

    thread = threading.Thread(target=work, name="busy")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
