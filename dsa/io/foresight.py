"""Foresight: which of the announced batches touches a row next.

The known batches of a row form a chain, in the order of their announcement: the table of rows names the first of them
(2 bytes a row), each (batch, row) entry names its row, its batch, and the entries after and before it (14 bytes). The
last one names itself as the one after, and the first one names the last as the one before. So a batch joins at the
end with one entry to look up a row, and the oldest one leaves with none, however many batches know the row. The rows of
a batch are sorted, with a mark for every few of them, so that a look-up takes one or two cache lines.

Batches are named by recycled slots, not by their sequence numbers, so nothing here wraps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.errors import UsageError
from dsa.io.compile import kernel
from dsa.io.native import prefetch

NEVER = np.iinfo(np.int64).max
"""What `Foresight.next_use` says of a row that no known batch touches."""

_NONE = 0xFFFF
MOST_BATCHES = _NONE
"""So many batches can be known at once (a slot takes 16 bits)."""

_FIRST_ENTRIES = 4096
_AHEAD = 16  # rows whose entries are on their way at once
_MARKED = 4  # entries are handed out in units of so many, with one mark each


class Foresight:
    """The known batches of one table: announced, not yet retired.

    Memory: 2 bytes a row, and 15 bytes for each row of each known batch.

    Args:
        n_rows: rows of the table; at most 2**32.
    """

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self._first: NDArray[np.uint16] = np.full(n_rows, _NONE, np.uint16)
        self._slots: dict[int, int] = {}  # sequence -> slot; in ascending order of sequence
        self._newest = -1
        self._free_slots: list[int] = []
        self._sequences: NDArray[np.int64] = np.zeros(0, np.int64)
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._lengths: NDArray[np.int64] = np.zeros(0, np.int64)
        self._shifts: NDArray[np.int64] = np.zeros(0, np.int64)  # the mark of a row is its number >> shift
        self._rows: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._slot_of: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self._after: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._before: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._marks: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._gaps: list[tuple[int, int]] = []  # free (start, length) of the entries, in order, never adjacent

    def __len__(self) -> int:
        """The number of known batches."""
        return len(self._slots)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._slots

    @property
    def span(self) -> tuple[int, int]:
        """The lowest and the highest known sequence number; there must be one."""
        return next(iter(self._slots)), next(reversed(self._slots))

    def rows(self, sequence: int) -> NDArray[np.uint32]:
        """The rows of a known batch, ascending: a view that is good until the next `announce` or `retire`.

        Raises:
            UsageError: the batch is not known.
        """
        slot = self._slot(sequence)
        start = int(self._starts[slot])
        return self._rows[start : start + int(self._lengths[slot])]

    def announce(self, sequence: int, rows: NDArray[Any]) -> None:
        """Make a batch known.

        Args:
            sequence: its number, higher than that of every batch announced before.
            rows: int32 or int64, sorted, unique, within the table.

        Raises:
            UsageError: sequence or rows are not as said, or MOST_BATCHES are known already; nothing is changed.
        """
        wanted = np.ascontiguousarray(rows, np.int64)
        if sequence <= self._newest:
            raise UsageError(f"batch {sequence} is announced after batch {self._newest}: number batches in order")
        if not ascending(wanted, self.n_rows):
            raise UsageError(f"rows of batch {sequence} must be sorted, unique and in 0 to {self.n_rows - 1}")
        if len(self._slots) == MOST_BATCHES:
            raise UsageError(f"batch {sequence}: {MOST_BATCHES} batches are known already; end some first")
        slot = self._take_slot()
        start = self._take_entries(len(wanted))
        self._newest = sequence
        self._slots[sequence] = slot
        self._sequences[slot] = sequence
        self._starts[slot] = start
        self._lengths[slot] = len(wanted)
        self._shifts[slot] = self._shift(len(wanted))
        _append(slot, wanted, self._first, *self._entries())

    def retire(self, sequence: int) -> None:
        """Forget a known batch, in any order.

        Raises:
            UsageError: the batch is not known.
        """
        slot = self._slot(sequence)
        _remove(slot, self._first, *self._entries())
        del self._slots[sequence]
        self._free_slots.append(slot)
        self._give_entries(int(self._starts[slot]), int(self._lengths[slot]))

    def next_use(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """The lowest known sequence number that touches each of `rows` (in any order); NEVER where none does."""
        found: NDArray[np.int64] = np.empty(len(rows), np.int64)
        _look_up(np.ascontiguousarray(rows, np.int64), self._first, self._sequences, found)
        return found

    def _entries(self) -> tuple[NDArray[Any], ...]:
        places = self._starts, self._lengths, self._shifts, self._marks
        return *places, self._rows, self._slot_of, self._after, self._before

    def _shift(self, length: int) -> int:
        marks = max(-(-length // _MARKED), 1)
        shift = 0
        while (self.n_rows - 1) >> shift >= marks:
            shift += 1
        return shift

    def _slot(self, sequence: int) -> int:
        slot = self._slots.get(sequence)
        if slot is None:
            newest = next(reversed(self._slots), None)
            raise UsageError(f"batch {sequence} is not known; known are {len(self._slots)} batches up to {newest}")
        return slot

    def _take_slot(self) -> int:
        if not self._free_slots:
            had = len(self._starts)
            now = min(max(2 * had, 16), MOST_BATCHES)
            for name in ("_sequences", "_starts", "_lengths", "_shifts"):
                wider = np.zeros(now, np.int64)
                wider[:had] = getattr(self, name)
                setattr(self, name, wider)
            self._free_slots.extend(range(now - 1, had - 1, -1))
        return self._free_slots.pop()

    def _take_entries(self, count: int) -> int:
        if not count:
            return 0
        count = -(-count // _MARKED) * _MARKED
        for number, (start, length) in enumerate(self._gaps):
            if length >= count:
                if length == count:
                    del self._gaps[number]
                else:
                    self._gaps[number] = (start + count, length - count)
                return start
        had = len(self._rows)
        more = max(count, had // 4 // _MARKED * _MARKED, _FIRST_ENTRIES)
        self._rows = np.concatenate([self._rows, np.zeros(more, np.uint32)])
        self._slot_of = np.concatenate([self._slot_of, np.zeros(more, np.uint16)])
        self._after = np.concatenate([self._after, np.zeros(more, np.uint32)])
        self._before = np.concatenate([self._before, np.zeros(more, np.uint32)])
        self._marks = np.concatenate([self._marks, np.zeros(more // _MARKED, np.uint32)])
        self._give_entries(had, more)
        return self._take_entries(count)

    def _give_entries(self, start: int, length: int) -> None:
        if not length:
            return
        length = -(-length // _MARKED) * _MARKED
        gaps = self._gaps
        place = len(gaps)
        while place and gaps[place - 1][0] > start:
            place -= 1
        if place < len(gaps) and gaps[place][0] == start + length:
            length += gaps.pop(place)[1]
        if place and sum(gaps[place - 1]) == start:
            start, before = gaps[place - 1][0], gaps.pop(place - 1)[1]
            length += before
            place -= 1
        gaps.insert(place, (start, length))


@kernel
def ascending(rows: NDArray[np.int64], n_rows: int) -> bool:
    """Whether `rows` are sorted, unique and in 0 to n_rows - 1."""
    previous = np.int64(-1)
    for row in rows:
        if row <= previous:
            return False
        previous = row
    return bool(previous < n_rows)


@kernel
def _find(
    slot: int,
    row: int,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    shifts: NDArray[np.int64],
    marks: NDArray[np.uint32],
    entry_rows: NDArray[np.uint32],
) -> int:
    """The entry of `row` in the batch of `slot`, which has one."""
    start = starts[slot]
    mark = start // _MARKED + (row >> shifts[slot])
    low = start + np.int64(marks[mark])
    if entry_rows[low] == row:
        return int(low)
    # Invariant: the entry lies in (low, high].
    high = low + 1
    end = start + lengths[slot] - 1
    step = 1
    while high < end and entry_rows[high] < row:
        low = high
        high = min(high + step, end)
        step *= 2
    while high - low > 1:
        middle = (low + high) >> 1
        if entry_rows[middle] < row:
            low = middle
        else:
            high = middle
    return int(high)


@kernel
def _append(
    slot: int,
    rows: NDArray[np.int64],
    first: NDArray[np.uint16],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    shifts: NDArray[np.int64],
    marks: NDArray[np.uint32],
    entry_rows: NDArray[np.uint32],
    slot_of: NDArray[np.uint16],
    after: NDArray[np.uint32],
    before: NDArray[np.uint32],
) -> None:
    start = starts[slot]
    shift = shifts[slot]
    marked = 0  # marks below this one are set
    count = len(rows)
    firsts, mark_places = first.ctypes.data, marks.ctypes.data
    row_places, before_places = entry_rows.ctypes.data, before.ctypes.data
    for i in range(count):
        # Each place is known from the one before: a row's first batch, the mark in it, the entry. So three stages.
        if i + 3 * _AHEAD < count:
            prefetch(firsts + rows[i + 3 * _AHEAD] * first.itemsize)
        if i + 2 * _AHEAD < count:
            coming = rows[i + 2 * _AHEAD]
            known = first[coming]
            if known != _NONE:
                prefetch(mark_places + (starts[known] // _MARKED + (coming >> shifts[known])) * marks.itemsize)
        if i + _AHEAD < count:
            coming = rows[i + _AHEAD]
            known = first[coming]
            if known != _NONE:
                place = starts[known] + np.int64(marks[starts[known] // _MARKED + (coming >> shifts[known])])
                prefetch(row_places + place * entry_rows.itemsize)
                prefetch(before_places + place * before.itemsize)
        row = rows[i]
        while marked <= row >> shift:
            marks[start // _MARKED + marked] = i
            marked += 1
        entry = start + i
        entry_rows[entry] = row
        slot_of[entry] = slot
        after[entry] = entry
        head = first[row]
        if head == _NONE:
            first[row] = slot
            before[entry] = entry
            continue
        head_entry = _find(head, row, starts, lengths, shifts, marks, entry_rows)
        tail_entry = before[head_entry]
        before[entry] = tail_entry
        after[tail_entry] = entry
        before[head_entry] = entry


@kernel
def _remove(
    slot: int,
    first: NDArray[np.uint16],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    shifts: NDArray[np.int64],
    marks: NDArray[np.uint32],
    entry_rows: NDArray[np.uint32],
    slot_of: NDArray[np.uint16],
    after: NDArray[np.uint32],
    before: NDArray[np.uint32],
) -> None:
    start = starts[slot]
    for entry in range(start, start + lengths[slot]):
        row = np.int64(entry_rows[entry])
        behind = after[entry]
        ahead = before[entry]
        if first[row] == slot:
            if behind == entry:
                first[row] = _NONE
            else:
                first[row] = slot_of[behind]
                before[behind] = ahead  # the last one: whoever is first names it
        elif behind == entry:
            after[ahead] = ahead
            before[_find(first[row], row, starts, lengths, shifts, marks, entry_rows)] = ahead
        else:
            after[ahead] = behind
            before[behind] = ahead


@kernel
def _look_up(
    rows: NDArray[np.int64], first: NDArray[np.uint16], sequences: NDArray[np.int64], found: NDArray[np.int64]
) -> None:
    for i in range(len(rows)):
        slot = first[rows[i]]
        found[i] = NEVER if slot == _NONE else sequences[slot]
