"""Loops over frames: what an arena keeps about each frame, and the compiled passes over it. Pure.

Frames lie in no order, and the processor cannot guess the next one: the passes of a step ask for its books, and for a
row's place, some frames ahead of their own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsa.io.compile import kernel
from dsa.io.native import prefetch

# What a step asks of a frame is side by side: frames lie in no order, so each field elsewhere is another cache line.
BOOKS = np.dtype(
    {
        "names": ["pins", "version", "table_of", "flags"],
        "formats": [np.int32, np.uint32, np.int16, np.uint8],
        "offsets": [0, 4, 8, 10],
        "itemsize": 16,
    }
)

_BOOKS_BYTES = BOOKS.itemsize

Rows = NDArray[np.int64]
Frames = NDArray[np.int32]

_AHEAD = 32  # frames whose books are on their way at once


@kernel
def _ask_for_books(books: int, frame: int) -> None:
    """Have a frame's books brought near; `books`: an address in those of frame 0. A negative number does no harm."""
    prefetch(books + np.int64(frame) * _BOOKS_BYTES)


@kernel
def pin_resident(
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
    places, books = frame_of.ctypes.data, pins.ctypes.data
    count = len(rows)
    for i in range(count):
        if i + 2 * _AHEAD < count:
            prefetch(places + rows[i + 2 * _AHEAD] * frame_of.itemsize)
        if i + _AHEAD < count:
            _ask_for_books(books, frame_of[rows[i + _AHEAD]])
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
def assign(
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
def release(
    frames: Frames,
    ended: int,
    pins: NDArray[np.int32],
    flags: NDArray[np.uint8],
    table_of: NDArray[np.int16],
    idle_dirty: NDArray[np.int64],
) -> int:
    """Take one pin and the flags `ended` off each frame (negative numbers: none there); the number of frames that none
    pins any more."""
    idle = 0
    books = pins.ctypes.data
    for i in range(len(frames)):
        if i + _AHEAD < len(frames):
            _ask_for_books(books, frames[i + _AHEAD])
        frame = frames[i]
        if frame >= 0:
            flags[frame] &= ~np.uint8(ended)
            pins[frame] -= 1
            if pins[frame] == 0:
                idle += 1
                idle_dirty[table_of[frame]] += flags[frame] & 1
    return idle


@kernel
def any_flag(frames: Frames, flags: NDArray[np.uint8], mask: int) -> bool:
    found = False
    for i in range(len(frames)):
        if frames[i] >= 0 and flags[frames[i]] & mask:
            found = True
            break
    return found


@kernel
def lease(frames: Frames, flags: NDArray[np.uint8], version: NDArray[np.uint32]) -> int:
    """Raise versions, mark dirty and leased; the number of frames that were clean."""
    fresh = 0
    books = version.ctypes.data
    for i in range(len(frames)):
        if i + _AHEAD < len(frames):
            _ask_for_books(books, frames[i + _AHEAD])
        frame = frames[i]
        fresh += not flags[frame] & 1
        flags[frame] |= 1 | 8 | 32  # DIRTY | LEASED | RECENT
        version[frame] += np.uint32(1)
    return fresh


@kernel
def clear(frames: Frames, flags: NDArray[np.uint8], mask: int) -> int:
    """Take the flags off; the number of frames that had one of them."""
    had = 0
    for i in range(len(frames)):
        had += flags[frames[i]] & np.uint8(mask) != 0
        flags[frames[i]] &= ~np.uint8(mask)
    return had


@kernel
def collect(
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
def take_cold(
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
def written(
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
def evict(victims: Frames, row_of: Rows, table_of: NDArray[np.int16], table: int, frame_of: Frames) -> None:
    for i in range(len(victims)):
        frame = victims[i]
        if table_of[frame] == table:
            frame_of[row_of[frame]] = -1
