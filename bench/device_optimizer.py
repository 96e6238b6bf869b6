"""What the whole optimizer does on the device: append dirty records, and update rows at random in a steady state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from bench.device_samples import Sample
from dsa import DiskSparseAdam, IOConfig
from dsa.io.cache import FRAME_OVERHEAD_BYTES
from dsa.io.engine import Engine
from dsa.io.statistics import Statistics
from dsa.io.tables import TableSpec

WIDTH = 128
RECORD_BYTES = 2 * 4 * WIDTH
BATCH_ROWS = 8192
LOOKAHEAD = 4
CACHE_BATCHES = 2.5
TURNOVERS = 2.0
"""Updates, as a share of the rows, before the steady state is measured: the log has been cleaned several times over."""
_UNCOUNTED_STEPS = 4
_QUIET_S = 0.7  # longer than write-behind waits before it writes what is left early


class Appends:
    """A table whose rows are all made dirty, in frames, and then written to the log: gathered, checked, appended.

    Args:
        n_rows: rows of a round.
    """

    def __init__(self, directory: Path, n_rows: int, backend: str, config: IOConfig) -> None:
        self._rows = np.arange(n_rows, dtype=np.int64)
        self._engine = Engine(
            directory,
            [TableSpec("table", (n_rows, WIDTH), "float32", WIDTH, "float32")],
            cache_bytes=int(n_rows * (RECORD_BYTES + FRAME_OVERHEAD_BYTES) * 1.01) + (1 << 20),
            existing="discard",
            backend=backend,
            keep_generations=1,
            config=config,
        )
        for _ in range(2):  # from then on segments are written over
            self.append()

    def append(self) -> Sample:
        """Make every row dirty, and measure how long the log takes to write them."""
        engine = self._engine
        moments = engine.moments_array(0)

        def change(table: int, positions: NDArray[np.int64], frames: NDArray[np.int32]) -> None:
            moments[frames] += 1.0

        engine.step({0: self._rows}, change, (0,))
        before = self._statistics()
        began, cpu = time.perf_counter(), time.process_time()
        pipeline = engine._pipeline
        pipeline.run(pipeline.flush())
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        rows, nbytes = (after - earlier for after, earlier in zip(self._statistics(), before, strict=True))
        return Sample(rows, nbytes, seconds, cpu)

    def _statistics(self) -> tuple[int, int]:
        found = self._engine.statistics(gradient_s=0.0, compile_s=0.0, kernel="")
        return found.rows_written, found.write_bytes

    def close(self) -> None:
        """Close the engine; the directory stays."""
        self._engine.close()


class Batches:
    """Row sets drawn uniformly, as a loader would yield them."""

    def __init__(self, n_rows: int, batch_rows: int, seed: int) -> None:
        self._n_rows, self._batch_rows = n_rows, batch_rows
        self._random = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            rows = np.unique(self._random.integers(0, self._n_rows, self._batch_rows * 9 // 8 + 8))
            rows = self._random.choice(rows, min(self._batch_rows, len(rows)), replace=False)
            yield torch.from_numpy(np.sort(rows))


class SteadyUpdates:
    """DiskSparseAdam with lookahead on a big table, a tiny cache, and a log in which cleaning keeps up with writing.

    Args:
        n_rows: rows of the table.
        batch_rows: rows of a step.
    """

    def __init__(
        self, directory: Path, n_rows: int, backend: str, config: IOConfig, batch_rows: int = BATCH_ROWS
    ) -> None:
        self._weight = torch.nn.Parameter(torch.zeros(n_rows, WIDTH))
        self._values = torch.randn(batch_rows, WIDTH)
        self._batch_rows, self._n_rows = batch_rows, n_rows
        self._prepared: Statistics
        self._optimizer = DiskSparseAdam(
            [("table", self._weight)],
            state_dir=directory,
            cache=int(CACHE_BATCHES * batch_rows * (RECORD_BYTES + FRAME_OVERHEAD_BYTES)) + (1 << 16),
            existing="discard",
            backend=backend,
            io=config,
        )
        self._ahead = iter(
            self._optimizer.lookahead(Batches(n_rows, batch_rows, 17), lambda rows: {"table": rows}, depth=LOOKAHEAD)
        )

    def prepare(self) -> None:
        """Write every row once, in order, then update at random until the log is in equilibrium."""
        for first in range(0, self._n_rows, self._batch_rows):
            self._step(torch.arange(first, min(first + self._batch_rows, self._n_rows)))
        for _ in range(int(TURNOVERS * self._n_rows / self._batch_rows)):
            self._step(next(self._ahead))
        self.settle()
        self._prepared = self._optimizer.statistics()

    def _step(self, rows: torch.Tensor) -> None:
        gradient = torch.sparse_coo_tensor(
            rows[None], self._values[: len(rows)], self._weight.shape, is_coalesced=True, check_invariants=False
        )
        self._weight.grad = gradient
        self._optimizer.step()

    def measure(self, steps: int) -> Sample:
        """Steps in the steady state.

        What was prefetched or left to be written while the device was someone else's is used up by steps that do not
        count.
        """
        for _ in range(_UNCOUNTED_STEPS):
            self._step(next(self._ahead))
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._step(next(self._ahead))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        return Sample(steps * self._batch_rows, steps * self._batch_rows * RECORD_BYTES, seconds, cpu)

    def read_bytes(self) -> int:
        """Bytes that the optimizer has asked of the device so far."""
        return self._optimizer.statistics().read_bytes

    def figures(self) -> dict[str, float]:
        """How cache and log did since `prepare`: hit rate, records cleaned for each one written, log over live records.

        In equilibrium the second is what keeps the third as it is.
        """
        found, before = self._optimizer.statistics(), self._prepared
        hits, touched = found.cache_hits - before.cache_hits, found.rows_touched - before.rows_touched
        cleaned, written = found.rows_cleaned - before.rows_cleaned, found.rows_written - before.rows_written
        live_bytes = found.live_records * RECORD_BYTES
        return {
            "hit_rate": hits / max(touched, 1),
            "cleaned_per_written": cleaned / max(written, 1),
            "log_over_live_before": before.state_bytes_on_disk / max(live_bytes, 1),
            "log_over_live": found.state_bytes_on_disk / max(live_bytes, 1),
        }

    def settle(self) -> None:
        """Wait until the optimizer leaves the device alone."""
        last = -1
        while True:
            found = self._optimizer.statistics()
            now = found.read_bytes + found.write_bytes
            if now == last:
                return
            last = now
            time.sleep(_QUIET_S)

    def close(self) -> None:
        """Close the optimizer."""
        self._optimizer.close()

    def __enter__(self) -> SteadyUpdates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
