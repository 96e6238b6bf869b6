"""Compiles, or loads from the cache, the engine's numba code: by running all of it once on a table of a few rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsa.io.bookkeeping import Bookkeeping
from dsa.io.cache import Arena
from dsa.io.extents import aligned, check_placement, plan
from dsa.io.jobs import Table
from dsa.io.kernels_on_rows import gather_records, scatter_records
from dsa.io.layout import RecordLayout, checked_gather, checked_scatter, segment_layout, zero_frames
from dsa.io.memory import allocate
from dsa.io.segments import Segments
from dsa.io.staged import StagedBatches
from dsa.io.window import Kind, Window

_ROWS = 8
_done: set[Any] = set()


def warm_up() -> None:
    """Have everything compiled that steps, reads, writes and cleaning call; once a process."""
    for slot_dtype in (np.int32, np.int64):
        if slot_dtype not in _done:
            _run_once(slot_dtype)
            _done.add(slot_dtype)


def _run_once(slot_dtype: Any) -> None:
    record = RecordLayout(4, "float32")
    arena = Arena(allocate((_ROWS // 2, record.record_bytes), np.uint8))
    slots = np.full(_ROWS, -1, slot_dtype)
    segments = Segments(segment_layout(record.record_bytes, _ROWS, 8192), slots, np.zeros(_ROWS, np.uint32))
    frame_of = allocate(_ROWS, np.int32)
    frame_of[:] = -1
    table = Table(0, "", _ROWS, record, arena, arena.add_table(frame_of), segments)
    books = Bookkeeping(Window(8, 1000))
    books.tables, books.arenas = [table], [arena]
    words = np.zeros((_ROWS, record.record_bytes // 8), np.uint64)
    for start in (0, 4, 0, 4):
        rows = np.arange(start, start + 4, dtype=np.int64)
        books.announce(Kind.ANNOUNCED, {0: rows})
        step = books.begin({0: rows}, lasting=True)
        books.bring()
        while (fill := books.next_fill()) is not None:
            zero_frames(arena.words, fill.frames)
            extents = plan(np.maximum(fill.slots, 0) * 64, 32, merge_gap_bytes=0, max_request_bytes=4096, alignment=1)
            aligned(check_placement(extents.extents, extents.buffer_bytes), 0, 1)
            numbers = np.zeros(len(fill.rows), np.int32)
            checked_scatter(words.reshape(-1), extents.positions // 8, 4, fill.rows, fill.checks, words, numbers)
            books.filled(fill)
        for piece in step.batch.pieces:
            positions = books.ready(piece)
            if positions is not None:
                books.lease(piece, positions)
                books.commit(piece, positions)
        books.end_step()
        books.draining = True
        while (write := books.next_write(0.0)) is not None:
            records = np.empty((len(write.rows), record.record_bytes // 8), np.uint64)
            checked_gather(arena.words, write.frames, write.rows, records, write.checks)
            books.copied(write)
            books.written(write)
    records = np.empty((4, record.record_bytes // 8), np.uint64)
    staged = StagedBatches(books)
    books.announce(Kind.ANNOUNCED, {0: rows})
    books.next_fill()
    job = staged.next(frozenset((0,)), 1 << 20)
    if job is not None:
        staged.gathered(job)
        leases = staged.take(job, books.begin({0: rows}, lasting=True))
        gather_records(arena.words, leases[0].frames, records)
        scatter_records(records, leases[0].at, arena.words, leases[0].frames)
        staged.back(leases)
        books.end_step()
    segments.still_live(rows, 0)
    empty = np.empty(0, np.int64)
    segments.written(segments.allocate(cleaning=True), empty, np.empty(0, np.uint32), 0, empty)
    segments.rebuild(len(segments), np.zeros(0, np.bool_))
