"""The batches announced and not yet ended, oldest first. Pure.

A batch is known (its rows are remembered) or held (its rows have frames and pins). What becomes of its pins is
decided in bookkeeping.py; here is only the order: which batch a step uses up, which is brought in next, which is
forgotten when the window is full.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsa.io.cache import DONE_FRAME, NO_FRAME, Frames, Rows


class Kind(enum.Enum):
    """Who announced a batch, and so when it ends."""

    ANNOUNCED = "announced"  # used up by one step, first in first out
    AHEAD = "ahead"  # a lookahead's: ends at the first step after it was handed out
    HOOK = "hook"  # a forward pass's: ends at the next step
    STEP = "step"  # the rows of the step that is running, or of a read


@dataclass
class Piece:
    """The rows of one table in a batch and, where they are held, their frames."""

    table: int
    rows: Rows
    frames: Frames = field(init=False)
    held: bool = False  # some frame of it may be pinned
    unframed: int = field(init=False)  # rows that still need a frame
    remaining: int = field(init=False)  # rows that are not done
    asked: bool = False  # dirty frames were ordered to be written for it
    waits: bool = False  # it takes no frames until they are

    def __post_init__(self) -> None:
        self.frames = np.empty(0, np.int32)
        self.unframed = self.remaining = len(self.rows)

    def open(self) -> None:
        """Make room for frame numbers: from here on the piece can be held."""
        if len(self.frames) != len(self.rows):
            self.frames = np.full(len(self.rows), NO_FRAME, np.int32)
        self.held = True

    def forget_frames(self) -> None:
        """Be known again: none of its rows has a frame that it pins."""
        self.frames = np.empty(0, np.int32)
        self.held = self.asked = self.waits = False
        self.unframed = self.remaining = len(self.rows)

    def take_over(self, other: Piece) -> bool:
        """Have the pins of another piece, where that is of the same rows and all of them have frames; whether it is."""
        whole = other.held and other.unframed == 0 and other.table == self.table and not self.held
        if not (whole and np.array_equal(other.rows, self.rows)):
            return False
        self.frames, self.held, self.unframed = other.frames, True, 0
        other.forget_frames()
        return True

    def finish(self, positions: NDArray[np.int64]) -> None:
        """The rows at these positions are done."""
        self.frames[positions] = DONE_FRAME
        self.remaining -= len(positions)


@dataclass
class Batch:
    """The sorted unique rows of one step, by table."""

    sequence: int
    kind: Kind
    pieces: list[Piece]
    handed_out: bool = False
    forgotten: bool = False  # the window was full: only its place in the order is left
    more_places: int = 0  # a forgotten batch may stand for others that were forgotten right after it
    brought_rows: int = 0  # rows that had to be brought into frames for it, and of these
    new_rows: int = 0  # those that were never written

    @property
    def rows(self) -> int:
        """Rows over all tables."""
        return sum(len(piece.rows) for piece in self.pieces)

    @property
    def held(self) -> bool:
        """Whether any of its rows may be pinned."""
        return any(piece.held for piece in self.pieces)

    @property
    def complete(self) -> bool:
        """Whether all its rows have frames."""
        return all(piece.unframed == 0 for piece in self.pieces)


class Window:
    """Batches in the order in which steps will use them up.

    Args:
        most_batches, most_rows: what the window remembers at most; a batch beyond that is forgotten (one batch is
            always remembered).
    """

    def __init__(self, most_batches: int, most_rows: int) -> None:
        self._most_batches = most_batches
        self._most_rows = most_rows
        self._batches: dict[int, Batch] = {}  # in the order of announcement
        self._fifo: deque[int] = deque()  # of Kind.ANNOUNCED, oldest first
        self._handed: deque[int] = deque()  # of Kind.AHEAD, handed out and not ended
        self._hooks: deque[int] = deque()
        self._late: deque[Batch] = deque()  # ended before a step came; they count as announced until the next one
        self._late_rows = 0
        self._next = 0
        self.known_rows = 0
        self.forgotten_batches = 0

    def __len__(self) -> int:
        return len(self._batches)

    def new(self, kind: Kind, rows_by_table: Mapping[int, Rows]) -> Batch:
        """A batch with the next sequence number, not yet in the window."""
        pieces = [Piece(table, rows) for table, rows in rows_by_table.items() if len(rows)]
        self._next += 1
        return Batch(self._next, kind, pieces)

    def add(self, batch: Batch) -> None:
        """Append; a full window forgets the batch's rows, and the batch stays as a place in the order."""
        full = self.known_rows + batch.rows > self._most_rows or len(self._batches) >= self._most_batches
        if batch.kind is not Kind.HOOK and full and self._batches:
            batch.forgotten, batch.pieces = True, []
            self.forgotten_batches += 1
            last = self._batches[self._fifo[-1]] if self._fifo else None
            if batch.kind is Kind.ANNOUNCED and last is not None and last.forgotten:
                last.more_places += 1  # so that announcements which no step follows leave nothing growing
                return
        self._batches[batch.sequence] = batch
        self.known_rows += batch.rows
        if batch.kind is Kind.ANNOUNCED:
            self._fifo.append(batch.sequence)
        elif batch.kind is Kind.HOOK:
            self._hooks.append(batch.sequence)

    def get(self, sequence: int) -> Batch | None:
        """The batch, unless it has ended."""
        return self._batches.get(sequence)

    def hand_out(self, sequence: int) -> None:
        """Note that the batch is given to the training loop: the next step uses it up."""
        batch = self._batches.get(sequence)
        if batch is not None and not batch.handed_out:
            batch.handed_out = True
            self._handed.append(sequence)

    def oldest_hooks(self, keep: int) -> list[Batch]:
        """Hook announcements beyond the newest `keep`, or beyond the rows that the window may remember."""
        over: list[Batch] = []
        rows = 0
        for count, sequence in enumerate(reversed(self._hooks)):
            batch = self._batches[sequence]
            rows += batch.rows
            if count >= keep or (count > 0 and rows > self._most_rows):
                over.append(batch)
        return over[::-1]

    def remove(self, batch: Batch, *, late: bool = False) -> None:
        """Take the batch out; `late`: its rows still count as announced for the next step."""
        if self._batches.pop(batch.sequence, None) is None:
            return
        self.known_rows -= batch.rows
        for queue in (self._fifo, self._handed, self._hooks):
            if batch.sequence in queue:
                queue.remove(batch.sequence)
        if late and not batch.forgotten:
            self._late.append(batch)
            self._late_rows += batch.rows
            while self._late_rows > self._most_rows:
                self._late_rows -= self._late.popleft().rows

    def used_by_step(self) -> tuple[list[Batch], list[Batch]]:
        """The batches that a step beginning now uses up, out of the window; and those that ended before it came."""
        late, self._late, self._late_rows = list(self._late), deque(), 0
        used = [self._batches[sequence] for sequence in [*self._handed, *self._hooks]]
        if self._fifo:
            used.append(self._batches[self._fifo[0]])
        for batch in used:
            if batch.more_places:
                batch.more_places -= 1
            else:
                self.remove(batch)
        return used, late

    def in_order(self) -> Iterator[Batch]:
        """All batches in the order in which their rows are to be brought in."""
        first = [*self._hooks, *self._handed]
        for sequence in first:
            yield self._batches[sequence]
        for sequence, batch in self._batches.items():
            if sequence not in first and not batch.forgotten:
                yield batch

    def is_ahead(self, batch: Batch) -> bool:
        """Whether the batch is for a step after the next one."""
        if batch.kind is Kind.ANNOUNCED:
            return batch.sequence != self._fifo[0]
        return batch.kind is Kind.AHEAD and not batch.handed_out

    def clear(self) -> list[Batch]:
        """Empty the window; the batches that were in it."""
        batches = list(self._batches.values())
        self._batches.clear()
        for queue in (self._fifo, self._handed, self._hooks, self._late):
            queue.clear()
        self._late_rows = self.known_rows = 0
        return batches
