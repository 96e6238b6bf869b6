"""Frames: a bounded arena of records in RAM, which row each holds, who pins it and what must be written. Pure.

One arena serves all tables whose records have the same size. All work on rows is done by numba kernels over arrays;
nothing here does I/O, and every method is called under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io import frame_passes
from dsa.io.eviction import DIRTY, FILLING, FREE, LEASED, WRITING, Policy
from dsa.io.frame_passes import BOOKS
from dsa.io.frame_passes import Frames as Frames
from dsa.io.frame_passes import Rows as Rows

NO_FRAME = -1
DONE_FRAME = -2
RECENT = 32  # a flag beside those of eviction.py: leased since write-behind's hand last passed, or chose it
_FADE = 4  # a batch that needs fewer frames than those before takes a quarter off
_SMALL_PART = 4  # of what a batch brings in
_TIGHT = 8  # a batch that lacks more than this part of the frames that nobody pins is choosy,
_MUCH = 4  # where more than this part of those that it should take are dirty
_LEAST_COLD = 512  # the policy looks through as many frames for these as for fewer
FRAME_OVERHEAD_BYTES = 40  # the bookkeeping of a frame, counted against the cache's bytes


class Arena:
    """`n_frames` frames of `record_bytes` each, shared by the tables whose records have that size.

    Args:
        memory: uint8 [n_frames, record_bytes], page-aligned, touched; the frames' bytes.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        n_frames = len(memory)
        self.memory = memory
        self.words: NDArray[np.uint64] = memory.view(np.uint64)
        self.n_frames = n_frames
        self.row_of = np.full(n_frames, -1, np.int64)
        books = np.zeros(n_frames, BOOKS)
        self.table_of: NDArray[np.int16] = books["table_of"]
        self.pins: NDArray[np.int32] = books["pins"]
        self.flags: NDArray[np.uint8] = books["flags"]
        self.version: NDArray[np.uint32] = books["version"]
        self.table_of[:] = -1
        self.flags[:] = FREE
        self.pinned = 0  # frames with a pin
        self._n_filling = 0  # frames that wait for their bytes
        self.policy = Policy(n_frames)
        self.frame_of: list[Frames] = []  # per table of the arena: row -> frame
        self.dirty: list[int] = []  # per table: frames that hold what the log does not
        self.idle_dirty = np.zeros(0, np.int64)  # per table: those of the dirty ones that nobody pins
        self.writing: list[int] = []  # per table: those of the dirty ones that are being written
        self._brought: list[int] = []  # per table: the rows that a batch brought in, of late
        self._next_fresh = 0  # frames from here on were never used
        self._hands: list[int] = []
        self._overdue: list[Frames] = []  # per table: dirty frames that should be given up before clean ones
        self._since: list[int] = []  # per table: rows brought in since such frames were looked for
        self._cold: list[Frames] = []  # per table: frames that write-behind is to take next, while they stay as cold
        self._to_order = False  # batches ahead have what they need written, so that none is kept ready
        self._ordered: Frames = np.empty(0, np.int32)  # what the last of them has

    def add_table(self, frame_of: Frames) -> int:
        """Let a table use the arena; `frame_of` int32 [n_rows], all NO_FRAME. The table's number in the arena."""
        self.policy.add_table(len(frame_of))
        self.frame_of.append(frame_of)
        self.dirty.append(0)
        self.idle_dirty = np.append(self.idle_dirty, 0)
        self.writing.append(0)
        self._brought.append(0)
        self._hands.append(0)
        self._cold.append(np.empty(0, np.int32))
        self._overdue.append(np.empty(0, np.int32))
        self._since.append(0)
        return len(self.frame_of) - 1

    @property
    def roomy(self) -> bool:
        """Whether every row of every table has room: then no frame is ever given up."""
        return self.policy.roomy

    def brings(self, table: int, rows: int) -> None:
        """A batch needs frames for so many rows that have none; what lately was the most fades."""
        before = self._brought[table]
        self._brought[table] = max(rows, before - before // _FADE)
        self._since[table] += rows

    def wants_writing(self, table: int, segment_rows: int) -> bool:
        """Whether a segment of the table's dirty frames should be written for the frames' sake (or may be: `look`).

        A batch's worth of frames that can be given up, or soon can, is enough, where these are the ones that should be.
        So a dirty row that is not about to go is left alone, and what is updated often is written seldom. While batches
        ahead order what they need, nothing is kept ready.
        """
        if self._on_order():
            return False
        if self._may_be_overdue(table, segment_rows) or self.overdue(table) >= segment_rows:
            return True
        there = self.n_frames - self.pinned - int(sum(self.idle_dirty.tolist())) + sum(self.writing)
        return sum(self._brought) > there

    def order(self, needed: int, segment_rows: Sequence[int]) -> bool:
        """Have dirty frames written that a batch ahead should take rather than clean ones; whether it should wait.

        In a cache of a few batches these are rows of the steps just gone. Were as many clean frames as a batch needs
        kept ready, such rows would hardly ever go: a batch held would cost the hits of two.

        Args:
            needed: frames that the batch lacks.
            segment_rows: of each table. Whole segments are ordered, so only where much of one is needed.
        """
        if not self._tight(needed):
            return False
        cold = self.policy.coldest(needed, self.flags, self.pins)
        late = cold[self.flags[cold] & (DIRTY | WRITING) == DIRTY]
        found = []
        if len(late) * _MUCH > needed:
            counts = np.bincount(self.table_of[late], minlength=len(segment_rows)).tolist()
            for table, (count, rows) in enumerate(zip(counts, segment_rows, strict=True)):
                if count * _MUCH > max(len(late), rows):
                    whole = max(round(count / rows), 1) * rows
                    chosen = self.policy.cold_dirty(whole, self.flags, self.pins, self.table_of, table)
                    frame_passes.clear(chosen, self.flags, RECENT)
                    self._overdue[table] = chosen
                    found.append(chosen)
        self._to_order = bool(found)
        self._ordered = np.concatenate([self._ordered[:0], *found])
        return self._to_order

    def ordered(self, table: int) -> bool:
        """Whether the table has frames to be written for a batch that waits, and a write that began would take some."""
        return self._to_order and self.overdue(table) > 0 and self.idle_dirty[table] > self.writing[table]

    def waited_for(self) -> bool:
        """Whether frames that were ordered last are being written, or about to be."""
        if any(self.ordered(table) for table in range(len(self.frame_of))):
            return True
        return bool(frame_passes.any_flag(self._ordered, self.flags, WRITING))

    def keep_ready(self) -> None:
        """A batch that was not ahead lacked frames: from now on a batch's worth is kept ready again."""
        self._to_order = False

    def _on_order(self) -> bool:
        """Whether batches ahead have what they need written, so that nothing is kept ready for them."""
        return self._to_order and self._tight(sum(self._brought))

    def _tight(self, needed: int) -> bool:
        """Whether so many frames are much of what nobody pins."""
        return not self.roomy and self._next_fresh == self.n_frames and _TIGHT * needed > self.n_frames - self.pinned

    def overdue(self, table: int) -> int:
        """How many of the table's frames are known to be dirty, and such as should be given up before clean ones."""
        return len(self._overdue[table])

    def look(self, table: int, segment_rows: int) -> None:
        """Find a segment's worth of them, where there may be one.

        There may be when half as many rows have come in, for these are often the first that should go again. Were they
        left dirty as long as there are clean frames, rows that are of use would be given up instead: after a
        checkpoint, which leaves all frames clean, a whole cache of them. Not while batches ahead order what they need.
        """
        if self._on_order() or not self._may_be_overdue(table, segment_rows):
            return
        needed = sum(self._brought) - sum(self.writing) - (self.n_frames - self._next_fresh)
        cold = np.empty(0, np.int32)
        if needed > 0:
            worst = self.policy.worst_victim(needed, self.flags, self.pins)
            cold = self.policy.cold_dirty(segment_rows, self.flags, self.pins, self.table_of, table, below=worst)
        if len(cold) == segment_rows:
            frame_passes.clear(cold, self.flags, RECENT)
            self._overdue[table] = cold
        self._since[table] = 0

    def _may_be_overdue(self, table: int, segment_rows: int) -> bool:
        # A few rows of a small table are not worth writing, and reading again, by themselves.
        return self._since[table] >= max(segment_rows // 2, sum(self._brought) // _SMALL_PART)

    def pin_resident(self, table: int, rows: Rows, frames: Frames) -> int:
        """Pin those of `rows` that have a frame, note it in `frames`; how many have none."""
        state = (self.frame_of[table], self.pins, self.flags, table, self.idle_dirty)
        missing, fresh = frame_passes.pin_resident(rows, *state, frames)
        self.pinned += int(fresh)
        return int(missing)

    def take(self, table: int, rows: Rows, frames: Frames, wanted: int) -> NDArray[np.int64]:
        """Give up to `wanted` of the rows without a frame one, pinned and filling; their positions in `rows`.

        Only frames that are unpinned, clean, not being filled and not being written are given up (rule 6).
        """
        fresh = min(wanted, self.n_frames - self._next_fresh)
        victims = np.arange(self._next_fresh, self._next_fresh + fresh, dtype=np.int32)
        if fresh < wanted:
            chosen = self.policy.victims(wanted - fresh, self.flags, self.pins)
            for number, frame_of in enumerate(self.frame_of):
                frame_passes.evict(chosen, self.row_of, self.table_of, number, frame_of)
            victims = np.concatenate([victims, chosen])
        self._next_fresh += fresh
        taken = np.empty(len(victims), np.int64)
        state = (self.frame_of[table], self.row_of, self.table_of, self.pins, self.flags)
        n = frame_passes.assign(rows, frames, victims, table, *state, taken)
        self.pinned += int(n)
        self._n_filling += int(n)
        if n:
            self.policy.filled(table, rows[taken], victims)
        return taken

    def filled(self, frames: Frames) -> None:
        """The frames' bytes are there."""
        self._n_filling -= int(frame_passes.clear(frames, self.flags, FILLING))

    def filling(self, frames: Frames) -> bool:
        """Whether any of the frames still waits for its bytes."""
        return self._n_filling > 0 and bool(frame_passes.any_flag(frames, self.flags, FILLING))

    def lease(self, table: int, frames: Frames) -> None:
        """Give the frames (pinned, filled) to one step: versions rise, they count as dirty from now on (rule 2)."""
        self.dirty[table] += int(frame_passes.lease(frames, self.flags, self.version))

    def end_lease(self, frames: Frames) -> None:
        """The step is done with the frames."""
        frame_passes.clear(frames, self.flags, LEASED)

    def end_step(self, frames: Frames) -> None:
        """The step is done with the frames, and takes its pins off them (negative numbers: none there)."""
        self._release(frames, LEASED)

    def stay_leased(self, frames: Frames) -> None:
        """The frames (distinct) have another lease that goes on."""
        self.flags[frames] |= LEASED

    def unpin(self, frames: Frames) -> None:
        """Take one pin off each (negative numbers: none there)."""
        self._release(frames, 0)

    def _release(self, frames: Frames, ended: int) -> None:
        state = (self.pins, self.flags, self.table_of, self.idle_dirty)
        self.pinned -= int(frame_passes.release(frames, ended, *state))

    def collect(self, table: int, limit: int, *, unpinned_only: bool, urgent: bool = True) -> Frames:
        """Up to `limit` dirty frames to write; they count as being written until `written`.

        Args:
            urgent: take those that come first; else those that the policy would give up first, or, where there is
                room for every row and the policy knows nothing, spare those that were leased lately.
        """
        if unpinned_only and not self.roomy:
            return self._collect_cold(table, limit)
        self._overdue[table] = self._overdue[table][:0]
        out = np.empty(limit, np.int32)
        args = (self.table_of, self.flags, self.pins, urgent, unpinned_only, self._hands[table], out)
        n, self._hands[table] = frame_passes.collect(table, *args)
        self.writing[table] += int(n)
        return out[:n]

    def _collect_cold(self, table: int, limit: int) -> Frames:
        """The next frames that the policy would give up first; it is asked for some segments' worth at a time."""
        out = np.empty(limit, np.int32)
        args = (self.flags, self.pins, self.table_of, table, out)
        n, left = frame_passes.take_cold(self._overdue[table], *args, 0)
        self._overdue[table] = self._overdue[table][left:]
        n, left = frame_passes.take_cold(self._cold[table], *args, n)
        if n < limit:
            chosen = self.policy.cold_dirty(max(limit, _LEAST_COLD), self.flags, self.pins, self.table_of, table)
            frame_passes.clear(chosen, self.flags, RECENT)
            self._cold[table] = chosen
            n, left = frame_passes.take_cold(chosen, *args, n)
        self._cold[table] = self._cold[table][left:]
        self.writing[table] += n
        return out[:n]

    def written(self, table: int, frames: Frames, versions: NDArray[np.uint32]) -> None:
        """The write of the frames is over; clean are those whose version is the one that was copied."""
        self.writing[table] -= len(frames)
        state = (self.flags, self.pins, self.version, table, self.idle_dirty)
        self.dirty[table] -= int(frame_passes.written(frames, versions, *state))

    def reset(self) -> None:
        """Forget every row; nothing may be in flight, pinned or leased."""
        for frame_of in self.frame_of:
            frame_of[:] = NO_FRAME
        self.row_of[:] = -1
        self.table_of[:] = -1
        self.pins[:] = 0
        self.pinned = self._n_filling = 0
        self.flags[:] = FREE
        self.dirty = [0] * len(self.frame_of)
        self.idle_dirty[:] = 0
        self.writing = [0] * len(self.frame_of)
        self._brought = [0] * len(self.frame_of)
        self._next_fresh = 0
        self._cold = [np.empty(0, np.int32) for _ in self.frame_of]
        self._overdue = [np.empty(0, np.int32) for _ in self.frame_of]
        self._since = [0] * len(self.frame_of)
        self._to_order = False
        self._ordered = np.empty(0, np.int32)
        policy = Policy(self.n_frames)
        for frame_of in self.frame_of:
            policy.add_table(len(frame_of))
        self.policy = policy

    def let_go(self) -> None:
        """Give the frames' memory back: nobody will read or write a record any more."""
        self.memory, self.words = self.memory[:0].copy(), self.words[:0].copy()

    def moments(self, dtype: Any) -> NDArray[Any]:
        """The frames as numbers: [n_frames, record_bytes / itemsize] of `dtype`, the same memory."""
        return self.memory.view(dtype)
