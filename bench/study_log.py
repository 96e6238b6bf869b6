"""The row log of the study: the engine's requests and reports, on a backend that moves no bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from dsa.io.backends.base import Backend, Bytes, Extents, File
from dsa.io.cache import Rows
from dsa.io.extents import plan
from dsa.io.jobs import CleanJob, FillJob, WriteJob
from dsa.io.rowlog import RowLog


class NoBytes(Backend):
    """Moves nothing, at once."""

    name: ClassVar[str] = "no bytes"

    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        return File(path, -1, alignment=512, writable=writable)

    def close(self, file: File) -> None:
        pass

    async def read(self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None) -> None:
        self.counters.read_requests += len(extents)
        self.counters.read_bytes += int(extents.lengths.sum())
        if then is not None:
            then()

    async def write(self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None) -> None:
        self.counters.write_requests += 1
        self.counters.write_bytes += buffer.nbytes
        if before is not None:
            before()

    async def sync(self, file: File) -> None:
        self.counters.syncs += 1

    async def truncate(self, file: File, length: int) -> None:
        pass

    async def punch(self, file: File, offset: int, length: int) -> bool:
        return False

    async def write_whole(self, path: Path, parts: Sequence[Bytes]) -> None:
        pass

    async def replace(self, source: Path, target: Path) -> None:
        pass

    async def sync_directory(self, path: Path) -> None:
        pass

    async def remove(self, path: Path) -> None:
        pass

    def shut_down(self, timeout_s: float) -> None:
        pass


def _bytes(count: int) -> Bytes:
    """A buffer of so many bytes that takes no memory."""
    return np.broadcast_to(np.zeros(1, np.uint8), count)


class TimedLog(RowLog):
    """The row log's requests, and what it reports, without records; headers are remembered here."""

    headers: dict[int, Rows]

    async def fill(self, job: FillJob) -> None:
        if job.new:
            self.fill_new(job)
            return
        offsets, record_bytes = job.table.layout.offsets(job.slots), job.table.record.record_bytes
        reach = plan(
            offsets,
            record_bytes,
            merge_gap_bytes=self.config.merge_gap_bytes,
            max_request_bytes=self.config.max_request_bytes,
            alignment=job.table.file.alignment,
        )
        buffer = _bytes(reach.buffer_bytes)
        await self.backend.read(job.table.file, reach.extents, buffer, then=partial(self.fill_new, job))

    def fill_new(self, job: FillJob) -> None:
        with self.lock:
            self.books.filled(job)
            self.settled()

    def _copied(self, job: WriteJob) -> None:
        with self.lock:
            self.books.copied(job)

    async def write(self, job: WriteJob) -> None:
        layout = job.table.layout
        used, place = _bytes(layout.used_bytes(len(job.frames))), job.segment * layout.segment_bytes
        await self.backend.write(job.table.file, place, used, before=partial(self._copied, job))
        self.headers[job.segment] = job.rows
        with self.lock:
            self.books.written(job)
            self.settled()

    async def clean(self, job: CleanJob) -> None:
        table, layout = job.table, job.table.layout
        whole = _bytes(layout.segment_bytes)
        rows, slots = [], []
        for victim in job.victims:
            length = layout.used_bytes(len(self.headers[victim]))
            place = np.array([victim * layout.segment_bytes], np.int64)
            await self.backend.read(table.file, Extents(place, np.array([length]), np.zeros(1, np.int64)), whole)
            named = self.headers[victim]
            live = named[self.books.still_live(table, named, victim)]
            rows.append(live)
            slots.append(table.segments.locate(live)[0])
        moved = np.concatenate(rows)
        used = _bytes(layout.used_bytes(len(moved)))
        await self.backend.write(table.file, job.target * layout.segment_bytes, used)
        self.headers[job.target] = moved
        with self.lock:
            self.books.cleaned(job, moved, np.concatenate(slots), np.zeros(len(moved), np.uint32))
            self.settled()
