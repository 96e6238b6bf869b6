"""The policies that DSA's own is measured against, replayed exactly: how many of a trace's accesses are hits.

A trace is an array of rows, batch after batch, the rows of a batch sorted and unique; `starts` holds where each batch
begins, and the end. Accesses from batch `measured` on are counted.

`lru`, `clock`, `sieve` and `s3_fifo` see one access after the other, as published; `foreknown` is Belady's rule under
a window of known batches, with true frequencies beyond it, and the top rows by true frequency are `ideal_lfu`.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from dsa.io.compile import kernel

Rows = NDArray[np.int32]
Starts = NDArray[np.int64]


@kernel
def lru(rows: Rows, starts: Starts, measured: int, n_rows: int, n_frames: int) -> int:
    """Hits of least recently used."""
    older = np.full(n_rows + 1, -1, np.int32)
    newer = np.full(n_rows + 1, -1, np.int32)
    held = np.zeros(n_rows, np.bool_)
    end = n_rows  # the ring's anchor: newer[end] is the oldest, older[end] the newest
    older[end] = newer[end] = end
    size = hits = 0
    first = starts[measured]
    for i in range(len(rows)):
        row = rows[i]
        if held[row]:
            hits += i >= first
            newer[older[row]] = newer[row]
            older[newer[row]] = older[row]
        else:
            held[row] = True
            size += 1
            if size > n_frames:
                gone = newer[end]
                held[gone] = False
                newer[end] = newer[gone]
                older[newer[gone]] = end
                size -= 1
        older[row] = older[end]
        newer[row] = end
        newer[older[end]] = row
        older[end] = row
    return hits


@kernel
def clock(rows: Rows, starts: Starts, measured: int, n_rows: int, n_frames: int) -> int:
    """Hits of CLOCK with one reference bit."""
    frame_of = np.full(n_rows, -1, np.int32)
    row_of = np.full(n_frames, -1, np.int32)
    used = np.zeros(n_frames, np.bool_)
    hand = hits = 0
    first = starts[measured]
    for i in range(len(rows)):
        row = rows[i]
        if frame_of[row] >= 0:
            used[frame_of[row]] = True
            hits += i >= first
            continue
        while used[hand]:
            used[hand] = False
            hand = (hand + 1) % n_frames
        if row_of[hand] >= 0:
            frame_of[row_of[hand]] = -1
        row_of[hand] = row
        frame_of[row] = hand
        hand = (hand + 1) % n_frames
    return hits


@kernel
def sieve(rows: Rows, starts: Starts, measured: int, n_rows: int, n_frames: int) -> int:
    """Hits of SIEVE: a queue by age, a hand that moves from old to young and clears marks."""
    older = np.full(n_rows + 1, -1, np.int32)
    younger = np.full(n_rows + 1, -1, np.int32)
    held = np.zeros(n_rows, np.bool_)
    marked = np.zeros(n_rows + 1, np.bool_)
    end = n_rows  # the ring's anchor: younger[end] is the oldest, older[end] the youngest
    older[end] = younger[end] = end
    hand = end
    size = hits = 0
    first = starts[measured]
    for i in range(len(rows)):
        row = rows[i]
        if held[row]:
            marked[row] = True
            hits += i >= first
            continue
        if size == n_frames:
            while hand == end or marked[hand]:
                marked[hand] = False
                hand = younger[hand]
            gone = hand
            hand = younger[gone]
            younger[older[gone]] = younger[gone]
            older[younger[gone]] = older[gone]
            held[gone] = False
        else:
            size += 1
        held[row] = True
        marked[row] = False
        older[row] = older[end]
        younger[row] = end
        younger[older[end]] = row
        older[end] = row
    return hits


@kernel
def s3_fifo(rows: Rows, starts: Starts, measured: int, n_rows: int, n_frames: int) -> int:
    """Hits of S3-FIFO: a small queue of a tenth, a main queue, and a ghost queue as long as the main one."""
    small_size = max(n_frames // 10, 1)
    main_size = max(n_frames - small_size, 1)
    small = np.zeros(n_frames + 1, np.int32)
    main = np.zeros(n_frames + 1, np.int32)
    count = np.zeros(n_rows, np.uint8)
    held = np.zeros(n_rows, np.bool_)
    ghost = np.full(n_rows, -(1 << 60), np.int64)  # when the row became a ghost
    ghosts = np.int64(0)
    small_head = small_n = main_head = main_n = hits = 0
    first = starts[measured]
    for i in range(len(rows)):
        row = rows[i]
        if held[row]:
            count[row] = min(count[row] + 1, 3)
            hits += i >= first
            continue
        while small_n + main_n >= n_frames:
            if small_n >= small_size or main_n == 0:
                gone = small[small_head]
                small_head = (small_head + 1) % len(small)
                small_n -= 1
                if count[gone] > 1:
                    count[gone] = 0
                    main[(main_head + main_n) % len(main)] = gone
                    main_n += 1
                else:
                    held[gone] = False
                    ghosts += 1
                    ghost[gone] = ghosts
            else:
                gone = main[main_head]
                main_head = (main_head + 1) % len(main)
                if count[gone] > 0:
                    count[gone] -= 1
                    main[(main_head + main_n - 1) % len(main)] = gone
                else:
                    held[gone] = False
                    main_n -= 1
        held[row] = True
        count[row] = 0
        if ghosts - ghost[row] < main_size:
            ghost[row] = -(1 << 60)
            main[(main_head + main_n) % len(main)] = row
            main_n += 1
        else:
            small[(small_head + small_n) % len(small)] = row
            small_n += 1
    return hits


@kernel
def next_batches(rows: Rows, starts: Starts, n_rows: int) -> Rows:
    """For each access the batch that touches its row next; the number of batches where none does."""
    n_batches = len(starts) - 1
    coming = np.full(n_rows, n_batches, np.int32)
    found = np.empty(len(rows), np.int32)
    for batch in range(n_batches - 1, -1, -1):
        for i in range(starts[batch], starts[batch + 1]):
            found[i] = coming[rows[i]]
            coming[rows[i]] = batch
    return found


@kernel
def _known_merit(due: int, place: float) -> float:
    """Above every frequency, and higher the sooner; rows of one batch are accessed in ascending order."""
    return 2.0 - (due + place) / 2.0**24


@kernel
def foreknown(
    rows: Rows,
    starts: Starts,
    measured: int,
    n_rows: int,
    n_frames: int,
    coming: Rows,
    window: int,
    shares: NDArray[np.float64],
    phase_batches: int,
    held: bool,
) -> int:
    """Hits of a policy that knows the next `window` batches, and beyond them the true frequencies.

    Gives up the row least frequent of those that the window does not touch; then the one that it touches last.

    Args:
        coming: from `next_batches`.
        shares: true frequencies, a line of n_rows for each phase of `phase_batches` batches.
        held: the rows of a batch keep their frames until the batch is over, as DSA's do; else each access is on its
            own, as in the classical setting.
    """
    in_cache = np.zeros(n_rows, np.bool_)
    due = np.zeros(n_rows, np.int32)
    merit = np.zeros(n_rows, np.float64)  # of what is in the cache; the least goes first
    pinned = np.full(n_rows, -1, np.int32)
    heap = [(0.0, np.int64(0))]
    heap.pop()
    aside = [(0.0, np.int64(0))]
    aside.pop()
    size = hits = 0
    phase = -1
    for batch in range(len(starts) - 1):
        now = batch // phase_batches
        if now != phase or len(heap) > 4 * n_frames + (1 << 16):
            # Merits of a new phase; or the heap is full of entries that no longer hold.
            phase = now
            share = shares[min(phase, len(shares) - 1)]
            heap.clear()
            for row in range(n_rows):
                if in_cache[row]:
                    merit[row] = _known_merit(due[row], row / n_rows) if due[row] <= batch + window else share[row]
                    heap.append((merit[row], np.int64(row)))
            heapq.heapify(heap)
        low, high = starts[batch], starts[batch + 1]
        if held:
            for i in range(low, high):
                pinned[rows[i]] = batch
        for i in range(low, high):
            row = rows[i]
            hit = in_cache[row]
            if hit:
                hits += batch >= measured
            elif size < n_frames:
                size += 1
            else:
                while True:
                    value, gone = heapq.heappop(heap)
                    if not in_cache[gone] or merit[gone] != value:
                        continue
                    if value <= 1.0 and due[gone] <= batch + window:
                        # The window has reached it since: merit only grows, so what was not popped is no worse.
                        merit[gone] = _known_merit(due[gone], gone / n_rows)
                        heapq.heappush(heap, (merit[gone], gone))
                        continue
                    if pinned[gone] == batch:
                        aside.append((value, gone))
                        continue
                    in_cache[gone] = False
                    break
            in_cache[row] = True
            due[row] = coming[i]
            worth = _known_merit(due[row], row / n_rows) if due[row] <= batch + window else share[row]
            if not hit or merit[row] != worth:
                merit[row] = worth
                heapq.heappush(heap, (worth, np.int64(row)))
        for value, row in aside:
            if merit[row] == value:
                heapq.heappush(heap, (value, row))
        aside.clear()
    return hits


@kernel
def ideal_lfu(
    rows: Rows, starts: Starts, measured: int, n_frames: int, shares: NDArray[np.float64], phase_batches: int
) -> int:
    """Hits of the cache that holds the truly most frequent rows at every moment, and nothing else."""
    hits = 0
    phase = -1
    top = np.zeros(shares.shape[1], np.bool_)
    for batch in range(measured, len(starts) - 1):
        now = batch // phase_batches
        if now != phase:
            phase = now
            order = np.argsort(-shares[min(phase, len(shares) - 1)])
            top[:] = False
            top[order[:n_frames]] = True
        for i in range(starts[batch], starts[batch + 1]):
            hits += top[rows[i]]
    return hits
