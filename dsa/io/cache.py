"""Frames: a bounded arena of records in RAM, which row each holds, who pins it and what must be written. Pure.

One arena serves all tables whose records have the same size. All work on rows is done by numba kernels over arrays;
nothing here does I/O, and every method is called under the engine's lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io.compile import kernel
from dsa.io.eviction import FILLING, FREE, LEASED, Policy

NO_FRAME = -1
DONE_FRAME = -2
RECENT = 32  # a flag beside those of eviction.py: leased since write-behind's hand last passed, or chose it
_FADE = 4  # a batch that needs fewer frames than those before takes a quarter off
_LEAST_COLD = 512  # the policy looks through as many frames for these as for fewer
FRAME_OVERHEAD_BYTES = 40  # the bookkeeping of a frame, counted against the cache's bytes

Rows = NDArray[np.int64]
Frames = NDArray[np.int32]


@kernel
def _pin_resident(
    rows: Rows,
    frame_of: Frames,
    pins: NDArray[np.int32],
    flags: NDArray[np.uint8],
    table: int,
    idle_dirty: NDArray[np.int64],
    frames: Frames,
) -> tuple[int, int]:
    """Pin each row that has a frame and has none in `frames` yet; how many are still without, how many first pins."""
    missing, fresh, dirty = 0, 0, 0
    for i in range(len(rows)):
        if frames[i] == -1:
            frame = frame_of[rows[i]]
            if frame >= 0:
                if pins[frame] == 0:
                    fresh += 1
                    dirty += flags[frame] & 1
                pins[frame] += 1
                frames[i] = frame
            else:
                missing += 1
    idle_dirty[table] -= dirty
    return missing, fresh


@kernel
def _assign(
    rows: Rows,
    frames: Frames,
    victims: Frames,
    table: int,
    frame_of: Frames,
    row_of: Rows,
    table_of: NDArray[np.int16],
    pins: NDArray[np.int32],
    flags: NDArray[np.uint8],
    taken: NDArray[np.int64],
) -> int:
    """Give the first rows without a frame the frames in `victims`, pinned and filling; `taken`: their positions."""
    n = 0
    for i in range(len(rows)):
        if n == len(victims):
            break
        if frames[i] == -1:
            frame = victims[n]
            frames[i] = frame
            frame_of[rows[i]] = frame
            row_of[frame] = rows[i]
            table_of[frame] = table
            pins[frame] = 1
            flags[frame] = 2  # FILLING
            taken[n] = i
            n += 1
    return n


@kernel
def _unpin(
    frames: Frames,
    pins: NDArray[np.int32],
    flags: NDArray[np.uint8],
    table_of: NDArray[np.int16],
    idle_dirty: NDArray[np.int64],
) -> int:
    """Take one pin off each frame (negative numbers: none there); the number of frames that none pins any more."""
    idle = 0
    for i in range(len(frames)):
        frame = frames[i]
        if frame >= 0:
            pins[frame] -= 1
            if pins[frame] == 0:
                idle += 1
                idle_dirty[table_of[frame]] += flags[frame] & 1
    return idle


@kernel
def _any_flag(frames: Frames, flags: NDArray[np.uint8], mask: int) -> bool:
    found = False
    for i in range(len(frames)):
        if frames[i] >= 0 and flags[frames[i]] & mask:
            found = True
            break
    return found


@kernel
def _lease(frames: Frames, flags: NDArray[np.uint8], version: NDArray[np.uint32]) -> int:
    """Raise versions, mark dirty and leased; the number of frames that were clean."""
    fresh = 0
    for i in range(len(frames)):
        frame = frames[i]
        fresh += not flags[frame] & 1
        flags[frame] |= 1 | 8 | 32  # DIRTY | LEASED | RECENT
        version[frame] += np.uint32(1)
    return fresh


@kernel
def _clear(frames: Frames, flags: NDArray[np.uint8], mask: int) -> None:
    for i in range(len(frames)):
        flags[frames[i]] &= ~np.uint8(mask)


@kernel
def _collect(
    table: int,
    table_of: NDArray[np.int16],
    flags: NDArray[np.uint8],
    pins: NDArray[np.int32],
    urgent: bool,
    unpinned_only: bool,
    hand: int,
    out: Frames,
) -> tuple[int, int]:
    """Mark up to len(out) dirty frames of the table, that nobody leases or writes, as being written.

    One that was leased since the hand last passed is passed once more, unless it is urgent: a row that is updated
    often is written seldom, and does not keep a cold one waiting.
    """
    n, f, count = 0, hand, len(flags)
    for _ in range(count if urgent else 2 * count):
        if n == len(out):
            break
        flag = flags[f] & ~np.uint8(32)
        # DIRTY alone: not filling, not being written (rule 3), not leased (rule 7), not free
        if flag == 1 and table_of[f] == table and not (unpinned_only and pins[f] > 0):
            if flags[f] == flag or urgent:
                flags[f] = flag | np.uint8(4)  # WRITING
                out[n] = f
                n += 1
            else:
                flags[f] = flag
        f = f + 1 if f + 1 < count else 0
    return n, f


@kernel
def _take_cold(
    chosen: Frames,
    flags: NDArray[np.uint8],
    pins: NDArray[np.int32],
    table_of: NDArray[np.int16],
    table: int,
    out: Frames,
    n: int,
) -> tuple[int, int]:
    """Mark more of the chosen frames as being written, up to len(out), if they still are the table's and nobody has
    touched them since; how many there are in `out` then, and how many of the chosen ones were looked at."""
    i = 0
    while i < len(chosen) and n < len(out):
        frame = chosen[i]
        if flags[frame] == 1 and pins[frame] == 0 and table_of[frame] == table:  # DIRTY alone, not RECENT
            flags[frame] |= np.uint8(4)  # WRITING
            out[n] = frame
            n += 1
        i += 1
    return n, i


@kernel
def _written(
    frames: Frames,
    versions: NDArray[np.uint32],
    flags: NDArray[np.uint8],
    pins: NDArray[np.int32],
    now: NDArray[np.uint32],
    table: int,
    idle_dirty: NDArray[np.int64],
) -> int:
    """End the write of the frames; clean are those whose version is still the one copied (rule 2)."""
    cleaned = 0
    for i in range(len(frames)):
        frame = frames[i]
        flags[frame] &= ~np.uint8(4)
        if now[frame] == versions[i]:
            flags[frame] &= ~np.uint8(1)
            idle_dirty[table] -= pins[frame] == 0
            cleaned += 1
    return cleaned


@kernel
def _evict(victims: Frames, row_of: Rows, table_of: NDArray[np.int16], table: int, frame_of: Frames) -> None:
    for i in range(len(victims)):
        frame = victims[i]
        if table_of[frame] == table:
            frame_of[row_of[frame]] = -1


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
        self.table_of = np.full(n_frames, -1, np.int16)
        self.pins = np.zeros(n_frames, np.int32)
        self.pinned = 0  # frames with a pin
        self.flags = np.full(n_frames, FREE, np.uint8)
        self.version = np.zeros(n_frames, np.uint32)
        self.policy = Policy(n_frames)
        self.frame_of: list[Frames] = []  # per table of the arena: row -> frame
        self.dirty: list[int] = []  # per table: frames that hold what the log does not
        self.idle_dirty = np.zeros(0, np.int64)  # per table: those of the dirty ones that nobody pins
        self.writing: list[int] = []  # per table: those of the dirty ones that are being written
        self._brought: list[int] = []  # per table: the rows that a batch brought in, of late
        self._next_fresh = 0  # frames from here on were never used
        self._hands: list[int] = []
        self._cold: list[Frames] = []  # per table: frames that write-behind is to take next, while they stay as cold

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
        return len(self.frame_of) - 1

    @property
    def roomy(self) -> bool:
        """Whether every row of every table has room: then no frame is ever given up."""
        return self.policy.roomy

    def brings(self, table: int, rows: int) -> None:
        """A batch needs frames for so many rows that have none; what lately was the most fades."""
        before = self._brought[table]
        self._brought[table] = max(rows, before - before // _FADE)

    def short_of(self) -> int:
        """How many frames more should be clean: a batch's worth that can be given up, or soon can, is enough.

        So a dirty row that is not about to go is left alone, and what is updated often is written seldom.
        """
        there = self.n_frames - self.pinned - int(self.idle_dirty.sum()) + sum(self.writing)
        return sum(self._brought) - there

    def pin_resident(self, table: int, rows: Rows, frames: Frames) -> int:
        """Pin those of `rows` that have a frame, note it in `frames`; how many have none."""
        state = (self.frame_of[table], self.pins, self.flags, table, self.idle_dirty)
        missing, fresh = _pin_resident(rows, *state, frames)
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
                _evict(chosen, self.row_of, self.table_of, number, frame_of)
            victims = np.concatenate([victims, chosen])
        self._next_fresh += fresh
        taken = np.empty(len(victims), np.int64)
        state = (self.frame_of[table], self.row_of, self.table_of, self.pins, self.flags)
        n = _assign(rows, frames, victims, table, *state, taken)
        self.pinned += int(n)
        if n:
            self.policy.filled(table, rows[taken], victims)
        return taken

    def filled(self, frames: Frames) -> None:
        """The frames' bytes are there."""
        _clear(frames, self.flags, FILLING)

    def filling(self, frames: Frames) -> bool:
        """Whether any of the frames still waits for its bytes."""
        return bool(_any_flag(frames, self.flags, FILLING))

    def lease(self, table: int, rows: Rows, frames: Frames) -> None:
        """Give the frames (pinned, filled) to one step: versions rise, they count as dirty from now on (rule 2)."""
        self.dirty[table] += int(_lease(frames, self.flags, self.version))
        self.policy.touched(table, rows, frames)

    def end_lease(self, frames: Frames) -> None:
        """The step is done with the frames."""
        _clear(frames, self.flags, LEASED)

    def stay_leased(self, frames: Frames) -> None:
        """The frames (distinct) have another lease that goes on."""
        self.flags[frames] |= LEASED

    def unpin(self, frames: Frames) -> None:
        """Take one pin off each (negative numbers: none there)."""
        self.pinned -= int(_unpin(frames, self.pins, self.flags, self.table_of, self.idle_dirty))

    def collect(self, table: int, limit: int, *, unpinned_only: bool, urgent: bool = True) -> Frames:
        """Up to `limit` dirty frames to write; they count as being written until `written`.

        Args:
            urgent: take those that come first; else those that the policy would give up first, or, where there is
                room for every row and the policy knows nothing, spare those that were leased lately.
        """
        if unpinned_only and not self.roomy:
            return self._collect_cold(table, limit)
        out = np.empty(limit, np.int32)
        args = (self.table_of, self.flags, self.pins, urgent, unpinned_only, self._hands[table], out)
        n, self._hands[table] = _collect(table, *args)
        self.writing[table] += int(n)
        return out[:n]

    def _collect_cold(self, table: int, limit: int) -> Frames:
        """The next frames that the policy would give up first; it is asked for some segments' worth at a time."""
        out = np.empty(limit, np.int32)
        n, left = _take_cold(self._cold[table], self.flags, self.pins, self.table_of, table, out, 0)
        if n < limit:
            chosen = self.policy.cold_dirty(max(limit, _LEAST_COLD), self.flags, self.pins, self.table_of, table)
            _clear(chosen, self.flags, RECENT)
            self._cold[table] = chosen
            n, left = _take_cold(chosen, self.flags, self.pins, self.table_of, table, out, n)
        self._cold[table] = self._cold[table][left:]
        self.writing[table] += n
        return out[:n]

    def written(self, table: int, frames: Frames, versions: NDArray[np.uint32]) -> None:
        """The write of the frames is over; clean are those whose version is the one that was copied."""
        self.writing[table] -= len(frames)
        state = (self.flags, self.pins, self.version, table, self.idle_dirty)
        self.dirty[table] -= int(_written(frames, versions, *state))

    def reset(self) -> None:
        """Forget every row; nothing may be in flight, pinned or leased."""
        for frame_of in self.frame_of:
            frame_of[:] = NO_FRAME
        self.row_of[:] = -1
        self.table_of[:] = -1
        self.pins[:] = 0
        self.pinned = 0
        self.flags[:] = FREE
        self.dirty = [0] * len(self.frame_of)
        self.idle_dirty[:] = 0
        self.writing = [0] * len(self.frame_of)
        self._brought = [0] * len(self.frame_of)
        self._next_fresh = 0
        self._cold = [np.empty(0, np.int32) for _ in self.frame_of]
        policy = Policy(self.n_frames)
        for frame_of in self.frame_of:
            policy.add_table(len(frame_of))
        self.policy = policy

    def let_go(self) -> None:
        """Give the frames' memory back: nobody will read or write a record any more."""
        self.memory, self.words = self.memory[:0].copy(), self.words[:0].copy()

    def count(self, mask: int) -> int:
        """Number of frames with any of the flags."""
        return int(np.count_nonzero(self.flags & mask))

    def moments(self, dtype: Any) -> NDArray[Any]:
        """The frames as numbers: [n_frames, record_bytes / itemsize] of `dtype`, the same memory."""
        return self.memory.view(dtype)
