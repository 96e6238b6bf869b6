"""DSA's backends, by themselves: batches of records read at random, records written at random."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.device_files import aligned_buffer, draw
from bench.device_samples import Sample
from dsa.config import IOConfig
from dsa.io.backends import Backend, Extents, File, open_backend
from dsa.io.backends.ring import WRITE, Ring
from dsa.io.backends.ringloop import WHOLE
from dsa.io.extents import plan
from dsa.io.layout import round_up


class Rig:
    """A backend with a file open, and a loop to run it on.

    Args:
        name: the backend's.
        direct: ask for direct I/O; whether the backend does it shows in `direct`.

    Raises:
        ConfigError: the backend cannot work here, and why.
    """

    def __init__(self, name: str, path: Path, config: IOConfig, *, direct: bool = True) -> None:
        self.name = name
        self._config = config
        self._backend: Backend = open_backend(name, config)
        self._loop = asyncio.new_event_loop()
        self._ring: Ring | None = None
        self._memory = aligned_buffer(0)
        self._file: File = self._backend.open(path, direct=direct)
        self._size_bytes = path.stat().st_size
        self._random = np.random.default_rng(sum(name.encode()))

    @property
    def direct(self) -> bool:
        """Whether the file's bytes move past the page cache."""
        return self._file.alignment > 1

    def request_bytes(self, record_bytes: int) -> int:
        """What is moved for one record: whole units of the file's alignment."""
        return round_up(record_bytes, self._file.alignment)

    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        if len(self._memory) != nbytes:
            self._memory = aligned_buffer(nbytes)
        return self._memory

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(coroutine)

    def read(self, record_bytes: int, batch_rows: int, batches: int) -> Sample:
        """Read batches of records at random places, one batch after the other, nothing in flight between two."""
        unit = self.request_bytes(record_bytes)
        chosen = [draw(self._random, self._size_bytes // unit, batch_rows) * unit for _ in range(batches)]
        buffer = self._buffer(unit * batch_rows)
        nbytes = 0
        began, cpu = time.perf_counter(), time.process_time()
        for offsets in chosen:
            wanted = plan(offsets, record_bytes, merge_gap_bytes=0, max_request_bytes=unit, alignment=unit)
            self._run(self._backend.read(self._file, wanted.extents, buffer))
            nbytes += wanted.buffer_bytes
        return Sample(batches * batch_rows, nbytes, time.perf_counter() - began, time.process_time() - cpu)

    def write(self, record_bytes: int, batch_rows: int, batches: int) -> Sample:
        """Write records at random places, as many in flight as the backend keeps; DSA itself never writes so."""
        unit = self.request_bytes(record_bytes)
        chosen = [draw(self._random, self._size_bytes // unit, batch_rows) * unit for _ in range(batches)]
        buffer = self._buffer(unit * batch_rows)
        move: Callable[[NDArray[np.int64], NDArray[np.uint8], int], None]
        move = self._write_by_ring if self.name == "uring" else self._write_each
        began, cpu = time.perf_counter(), time.process_time()
        for offsets in chosen:
            move(offsets, buffer, unit)
        if not self.direct:
            self._run(self._backend.sync(self._file))
        rows = batches * batch_rows
        return Sample(rows, rows * unit, time.perf_counter() - began, time.process_time() - cpu)

    def _write_each(self, offsets: NDArray[np.int64], buffer: NDArray[np.uint8], unit: int) -> None:
        async def write_all() -> None:
            places = enumerate(offsets.tolist())
            await asyncio.gather(
                *(self._backend.write(self._file, offset, buffer[i * unit : (i + 1) * unit]) for i, offset in places)
            )

        self._run(write_all())

    def _write_by_ring(self, offsets: NDArray[np.int64], buffer: NDArray[np.uint8], unit: int) -> None:
        """The backend writes whole segments; its ring, of which this thread makes one, takes any number of places."""
        if self._ring is None:
            depth = self._config.queue_depth
            self._ring = Ring(depth, max(depth // 2, 1), self._config.stall_timeout_s)
        extents = Extents(offsets, np.full(len(offsets), unit), np.arange(len(offsets)) * unit)
        arrays = (extents.at, extents.offsets, extents.lengths)
        outcome = self._ring.transfer(WRITE, self._file.fd, buffer, *arrays, self._file.alignment)
        if outcome.status != WHOLE:
            raise OSError(outcome.errno, f"request {outcome.request} of a random write failed")

    def close(self) -> None:
        """End what an interrupt left running; close file, ring and backend."""
        self._end_tasks()
        if self._ring is not None:
            self._ring.close()
        self._backend.close(self._file)
        self._backend.shut_down(3.0)
        self._loop.close()

    def _end_tasks(self) -> None:
        while left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            # An interrupt that a task was hit by comes out once more where that task was waited for.
            with contextlib.suppress(KeyboardInterrupt):
                self._run(_ended(left))
            for task in left:
                if task.done() and not task.cancelled():
                    task.exception()  # or the task says that nobody asked for it

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks)
