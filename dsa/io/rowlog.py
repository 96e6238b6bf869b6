"""The log of one table: records into frames, dirty frames into segments, live records out of mostly dead ones.

Every method moves bytes for a job of the bookkeeping and reports back under the engine's lock. A segment is written
with one request, from an aligned buffer; records are read in extents; every record is checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsa.config import IOConfig
from dsa.errors import CorruptError
from dsa.io.backends.base import Backend, Extents, File
from dsa.io.bookkeeping import Bookkeeping
from dsa.io.extents import plan
from dsa.io.jobs import CleanJob, FillJob, Table, WriteJob
from dsa.io.layout import checked_gather, checked_scatter, read_header, round_up, write_header, zero_frames
from dsa.io.memory import PAGE_BYTES, allocate

Bytes = NDArray[np.uint8]


class Buffers:
    """Page-aligned I/O buffers, lent one at a time and grown where one is too small; used on the loop only."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._idle: list[Bytes] = []

    def borrow(self, nbytes: int) -> Bytes:
        """A buffer of at least so many bytes."""
        if nbytes > self._nbytes:
            self._nbytes = nbytes
            self._idle.clear()
        return self._idle.pop() if self._idle else allocate(round_up(self._nbytes, PAGE_BYTES), np.uint8)

    def give_back(self, buffer: Bytes) -> None:
        """The buffer is not used any more."""
        if len(buffer) >= self._nbytes:
            self._idle.append(buffer)


@dataclass
class RowLog:
    """Moves the bytes of the bookkeeping's jobs.

    Args:
        lock: the engine's, which latches what breaks off under it; `settled` is called under it whenever something that
            others may wait for has changed.
    """

    backend: Backend
    books: Bookkeeping
    config: IOConfig
    lock: AbstractContextManager[object]
    settled: Callable[[], None]

    def __post_init__(self) -> None:
        self._buffers = Buffers(self.config.read_chunk_bytes + 2 * self.config.merge_gap_bytes)
        self._segment_buffers = Buffers(PAGE_BYTES)
        self._cleaning_buffers = Buffers(PAGE_BYTES)
        self._growing = asyncio.Lock()
        self.punches = True  # until the file system says that it cannot

    async def fill(self, job: FillJob) -> None:
        """Bring the job's records into their frames, each one checked.

        Raises:
            CorruptError: a record does not match its check in the index.
            DeviceError: the read failed.
        """
        table = job.table
        words = table.arena.words
        if job.new:
            self.fill_new(job)
            return
        file: File = table.file
        rows, checks, frames = job.rows, job.checks, job.frames
        record_bytes = table.record.record_bytes
        offsets = table.layout.offsets(job.slots)
        reach = plan(
            offsets,
            record_bytes,
            merge_gap_bytes=self.config.merge_gap_bytes,
            max_request_bytes=self.config.max_request_bytes,
            alignment=file.alignment,
        )
        buffer = self._buffers.borrow(reach.buffer_bytes + 8)

        def arrive() -> None:
            # Records sit at whole words of the buffer: offsets in the file are, and extents begin at whole blocks
            # or at a record.
            wrong = checked_scatter(
                buffer[: len(buffer) // 8 * 8].view(np.uint64),
                reach.positions // 8,
                record_bytes // 8,
                rows,
                checks,
                words,
                frames,
            )
            if wrong >= 0:
                raise CorruptError(
                    f"table {table.name!r}: the record of row {rows[wrong]} in {file.path} at byte {offsets[wrong]} "
                    f"({record_bytes} bytes) does not match its check {checks[wrong]:08x}; go back to a generation "
                    "that verifies, or restore the directory from a copy"
                )
            self._filled(job)

        await self.backend.read(file, reach.extents, buffer, then=arrive)
        self._buffers.give_back(buffer)

    def fill_new(self, job: FillJob) -> None:
        """Make the frames of rows that were never written all zero: no I/O, from any thread."""
        zero_frames(job.table.arena.words, job.frames)
        self._filled(job)

    def _filled(self, job: FillJob) -> None:
        with self.lock:
            self.books.filled(job)
            self.settled()

    async def write(self, job: WriteJob) -> None:
        """Write the job's frames as one segment; the index follows."""
        table, layout = job.table, job.table.layout
        count = len(job.frames)
        await self._reach(table, job.segment)
        buffer = self._segment_buffers.borrow(layout.segment_bytes)
        used = buffer[: layout.used_bytes(count)]

        def fill_segment() -> None:
            records = self._records(used, table, count)
            checked_gather(table.arena.words, job.frames, job.rows, records, job.checks)
            with self.lock:
                self.books.copied(job)
            used[layout.header_bytes + count * layout.record_bytes :] = 0
            write_header(used, layout, job.segment, table.identity, job.rows)

        await self.backend.write(table.file, job.segment * layout.segment_bytes, used, before=fill_segment)
        self._segment_buffers.give_back(buffer)
        with self.lock:
            self.books.written(job)
            self.settled()

    def _records(self, segment: Bytes, table: Table, count: int) -> NDArray[np.uint64]:
        start = table.layout.header_bytes
        flat = segment[start : start + count * table.layout.record_bytes]
        return flat.view(np.uint64).reshape(count, table.layout.record_bytes // 8)

    async def _reach(self, table: Table, segment: int) -> None:
        """Make the file long enough for the segment; files are whole segments long."""
        async with self._growing:  # one at a time: a late truncate must not cut what another one has grown
            if segment >= table.file_segments:
                n_segments = len(table.segments)
                await self.backend.truncate(table.file, n_segments * table.layout.segment_bytes)
                table.file_segments = n_segments

    async def give_back(self, table: Table) -> None:
        """Give the space of free segments beyond a reserve back to the file system: at the log's end, then as holes."""
        if not self.punches:
            return
        size = table.layout.segment_bytes
        async with self._growing:
            with self.lock:
                keep = table.segments.cut()
            if keep < table.file_segments:
                table.file_segments = keep
                await self.backend.truncate(table.file, keep * size)
        with self.lock:
            chosen = table.segments.begin_punch()
        done: list[int] = []
        for segment in chosen:
            self.punches = await self.backend.punch(table.file, segment * size, size)
            if not self.punches:
                break
            done.append(segment)
        with self.lock:
            table.segments.end_punch(done, punched=True)
            table.segments.end_punch(chosen[len(done) :], punched=False)

    async def clean(self, job: CleanJob) -> None:
        """Move the live records of the job's victims into one segment; the index follows where it has not moved on.

        The victims are read in one go, each with one request.

        Raises:
            CorruptError: a victim's header, or a live record in it, does not match its check.
            DeviceError: a transfer failed.
        """
        table, layout = job.table, job.table.layout
        await self._reach(table, job.target)
        lengths = np.array([layout.segment_bytes if n < 0 else layout.used_bytes(n) for n in job.used], np.int64)
        at = np.cumsum(lengths) - lengths
        source = self._cleaning_buffers.borrow(int(lengths.sum()))
        target = self._segment_buffers.borrow(layout.segment_bytes)
        live = _Moved(layout.slots)
        order = np.argsort(job.victims)  # extents ascend
        extents = Extents(np.array(job.victims, np.int64)[order] * layout.segment_bytes, lengths[order], at[order])

        def pack() -> None:
            for victim, start, length in zip(job.victims, at, lengths, strict=True):
                self._pack(table, victim, source[start : start + length], target, live)
            used_bytes = layout.used_bytes(live.count)
            target[layout.header_bytes + live.count * layout.record_bytes : used_bytes] = 0
            write_header(target, layout, job.target, table.identity, live.rows[: live.count])

        await self.backend.read(table.file, extents, source, then=pack)
        used_bytes = layout.used_bytes(live.count)
        await self.backend.write(table.file, job.target * layout.segment_bytes, target[:used_bytes])
        self._cleaning_buffers.give_back(source)
        self._segment_buffers.give_back(target)
        with self.lock:
            part = slice(0, live.count)
            self.books.cleaned(job, live.rows[part], live.slots[part], live.checks[part])
            self.settled()

    def _pack(self, table: Table, victim: int, segment: Bytes, target: Bytes, live: _Moved) -> None:
        """Append a victim's live records, checked, to the target."""
        layout = table.layout
        named = read_header(segment, layout, victim, table.identity, table.file.path)
        with self.lock:
            positions = np.flatnonzero(self.books.still_live(table, named, victim))
            rows = named[positions]
            slots, checks = table.segments.locate(rows)
        part = slice(live.count, live.count + len(rows))
        live.rows[part], live.slots[part], live.checks[part] = rows, slots, checks
        words = layout.record_bytes // 8
        wrong = checked_scatter(
            self._records(segment, table, len(named)).reshape(-1),
            positions * words,
            words,
            rows,
            checks,
            self._records(target, table, layout.slots),
            np.arange(live.count, live.count + len(rows), dtype=np.int32),
        )
        if wrong >= 0:
            offset = int(layout.offsets(slots[wrong : wrong + 1])[0])
            raise CorruptError(
                f"table {table.name!r}: the record of row {rows[wrong]} in {table.file.path} at byte {offset} does "
                f"not match its check {checks[wrong]:08x} (found while cleaning segment {victim})"
            )
        live.count += len(rows)


class _Moved:
    """The records that a cleaning moves: row, slot where the index had it, check."""

    def __init__(self, most: int) -> None:
        self.rows = np.empty(most, np.int64)
        self.slots = np.empty(most, np.int64)
        self.checks = np.empty(most, np.uint32)
        self.count = 0
