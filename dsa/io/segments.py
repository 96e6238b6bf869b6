"""Where every record of a table is in its log, and which segments are free, written, live or retained. Pure.

Slots are numbered through the file: segment x slots a segment + slot. The index changes only when a write has
completed (rule 4); a segment is free again only when nothing live or retained is in it and every read that was
submitted before it fell empty has ended (rule 5).
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io.compile import kernel
from dsa.io.layout import SegmentLayout

NEVER_WRITTEN = -1
CLEANING_RESERVE = 2  # segments that only cleaning may take

FREE, OPEN, FULL, CLEANING, LIMBO, PUNCHING = range(6)
MOST_VICTIMS, MOST_VICTIM_BYTES = 8, 12 << 20  # segments cleaned at once: they are read into memory together
FAR_SEGMENTS = 4  # and a twentieth of the live records: so far may the log grow beyond its limit
SURPLUS_RESERVE = 4  # free segments that are kept as they are, to be written again

Slots = NDArray[Any]  # int32 or int64 [n_rows]
Checks = NDArray[np.uint32]


@kernel
def _locate(
    rows: NDArray[np.int64],
    slots: Slots,
    checks: Checks,
    out_slots: NDArray[np.int64],
    out_checks: Checks,
) -> None:
    for i in range(len(rows)):
        out_slots[i] = slots[rows[i]]
        out_checks[i] = checks[rows[i]]


@kernel
def _point(
    rows: NDArray[np.int64],
    first_slot: int,
    new_checks: Checks,
    slots: Slots,
    checks: Checks,
    live: NDArray[np.int32],
    slots_per_segment: int,
    expected: NDArray[np.int64],
    emptied: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Point rows at consecutive slots; VOID rows are skipped, and so is a row that is not at `expected` any more.

    Returns how many rows moved, how many were never written before, and how many segments fell empty (`emptied`).
    """
    moved, fresh, n_emptied = 0, 0, 0
    compare = len(expected) > 0
    for i in range(len(rows)):
        row = rows[i]
        if row < 0:
            continue
        old = slots[row]
        if compare and old != expected[i]:
            continue
        if old >= 0:
            segment = old // slots_per_segment
            live[segment] -= 1
            if live[segment] == 0:
                emptied[n_emptied] = segment
                n_emptied += 1
        else:
            fresh += 1
        slots[row] = first_slot + i
        checks[row] = new_checks[i]
        live[(first_slot + i) // slots_per_segment] += 1
        moved += 1
    return moved, fresh, n_emptied


@kernel
def _count_live(slots: Slots, slots_per_segment: int, live: NDArray[np.int32]) -> int:
    """Live records of each segment; the number of records in all, or -1 where a slot lies beyond the log."""
    total = 0
    for row in range(len(slots)):
        slot = slots[row]
        if slot >= 0:
            segment = slot // slots_per_segment
            if segment >= len(live):
                return -1
            live[segment] += 1
            total += 1
    return total


class Segments:
    """The location index of one table and the fate of its log's segments.

    Args:
        layout: the segment's geometry.
        slots: int32 or int64 [n_rows], the location index; checks: uint32 [n_rows].
    """

    def __init__(self, layout: SegmentLayout, slots: Slots, checks: Checks) -> None:
        self.layout = layout
        self.slots = slots
        self.checks = checks
        self.live_records = 0
        self.changed = False  # since the last commit
        self.state = np.zeros(0, np.uint8)
        self.live = np.zeros(0, np.int32)
        self.used = np.zeros(0, np.int32)  # records that were written to the segment; -1: not known
        self.retained = np.zeros(0, np.bool_)  # some generation refers to it
        self.hole = np.zeros(0, np.bool_)  # its space was given back to the file system
        self._free: list[int] = []
        self._limbo: list[tuple[int, int]] = []  # (ticket that reads must have reached, segment)

    def __len__(self) -> int:
        return len(self.state)

    @property
    def free_segments(self) -> int:
        """Segments that can be written at once."""
        return len(self._free)

    def locate(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Checks]:
        """Slots (NEVER_WRITTEN: none) and checks of the rows, as copies."""
        slots = np.empty(len(rows), np.int64)
        checks = np.empty(len(rows), np.uint32)
        _locate(rows, self.slots, self.checks, slots, checks)
        return slots, checks

    def allocate(self, *, cleaning: bool) -> int:
        """A segment to write; the log grows where none is free (a reserve of free ones is for cleaning)."""
        if len(self._free) > (0 if cleaning else CLEANING_RESERVE):
            segment = heapq.heappop(self._free)
        else:
            segment = len(self)
            self._grow_to(segment + 1)
        self.state[segment] = OPEN
        self.used[segment] = 0
        self.hole[segment] = False
        return segment

    def _grow_to(self, n_segments: int) -> None:
        extra = n_segments - len(self)
        self.state = np.concatenate([self.state, np.full(extra, FREE, np.uint8)])
        self.live = np.concatenate([self.live, np.zeros(extra, np.int32)])
        self.used = np.concatenate([self.used, np.full(extra, -1, np.int32)])
        self.retained = np.concatenate([self.retained, np.zeros(extra, np.bool_)])
        self.hole = np.concatenate([self.hole, np.zeros(extra, np.bool_)])

    def written(
        self, segment: int, rows: NDArray[np.int64], checks: Checks, ticket: int, expected: NDArray[np.int64] | None
    ) -> None:
        """A segment's write has completed: the index follows (with `expected`: only where it still says so).

        Args:
            rows: int64 [n], VOID_ROW where a slot holds nothing.
            ticket: reads submitted from now on have this number or a later one.
        """
        emptied = np.empty(len(rows), np.int64)
        nothing = np.empty(0, np.int64)
        per_segment = self.layout.slots
        index = (self.slots, self.checks, self.live, per_segment, nothing if expected is None else expected, emptied)
        moved, fresh, n_emptied = _point(rows, segment * per_segment, checks, *index)
        self.live_records += fresh
        self.changed = self.changed or moved > 0
        self.used[segment] = len(rows)
        self.state[segment] = FULL
        for number in emptied[:n_emptied]:
            self._give_up(int(number), ticket)
        self._give_up(segment, ticket)

    def abandon(self, segment: int, ticket: int) -> None:
        """A segment was allocated or chosen for cleaning and that came to nothing, or its cleaning has ended."""
        self.state[segment] = FULL
        self._give_up(segment, ticket)

    def _give_up(self, segment: int, ticket: int) -> None:
        if self.state[segment] == FULL and self.live[segment] == 0 and not self.retained[segment]:
            self.state[segment] = LIMBO
            self._limbo.append((ticket, segment))

    def reads_ended(self, oldest: int) -> None:
        """Every read with a number below `oldest` has ended: what fell empty before that can be reused (rule 5)."""
        if not self._limbo:
            return
        waiting = []
        for ticket, segment in self._limbo:
            if ticket <= oldest:
                self.state[segment] = FREE
                heapq.heappush(self._free, segment)
            else:
                waiting.append((ticket, segment))
        self._limbo = waiting

    def retain(self, retained: NDArray[np.bool_], ticket: int) -> None:
        """Set which segments generations refer to (those beyond the array: none); what that frees is given up."""
        self.retained[:] = False
        n = min(len(retained), len(self))
        self.retained[:n] = retained[:n]
        for segment in np.flatnonzero((self.state == FULL) & (self.live == 0) & ~self.retained):
            self._give_up(int(segment), ticket)

    def live_segments(self) -> NDArray[np.bool_]:
        """bool [n_segments]: those that the index points into."""
        return np.asarray(self.live > 0)

    # Cleaning.

    def limit_segments(self) -> int:
        """How many segments the log may have before cleaning must give some back: nearly twice the live records, and
        some. What is missing to twice is room for segments that fell empty and wait for reads to end (rule 5)."""
        live_bytes = self.live_records * self.layout.record_bytes
        spare = 4 + CLEANING_RESERVE
        return 19 * live_bytes // (10 * self.layout.segment_bytes) + spare + self._retained_only()

    def _retained_only(self) -> int:
        """Segments that hold nothing but what generations refer to: those wait for the generations to go."""
        return int(np.count_nonzero(self.retained & (self.live == 0)))

    def _occupied(self) -> int:
        """Segments that the present state needs, or that are on their way out."""
        free = np.count_nonzero((self.state == FREE) | (self.state == PUNCHING))
        return len(self) - int(free) - self._retained_only()

    def _solid(self) -> int:
        """Segments that take space."""
        return len(self) - int(np.count_nonzero(self.hole))

    def wants_cleaning(self) -> bool:
        """Whether the present state takes as many segments as it may, but for the reserve.

        However many are free: what it takes at a commit, the generation holds for as long as it is kept.
        """
        return self._occupied() + CLEANING_RESERVE >= self.limit_segments() - self._retained_only()

    def far_over_limit(self) -> bool:
        """Whether the log has grown past its limit by some segments: cleaning does not keep up."""
        far = FAR_SEGMENTS + self.live_records * self.layout.record_bytes // (20 * self.layout.segment_bytes)
        return self._solid() > self.limit_segments() + far

    def choose_victims(self) -> list[int]:
        """Segments whose live records together fit one segment, fewest live first; they are being cleaned from now on.

        None where cleaning would gain nothing: every segment nearly full. Those that a generation refers to as well
        are not free afterwards, but the next generation will not hold them.
        """
        candidates = np.flatnonzero((self.state == FULL) & (self.live > 0))
        if len(candidates) == 0:
            return []
        order = candidates[np.argsort(self.live[candidates], kind="stable")]
        room = self.layout.slots
        victims: list[int] = []
        most = max(2, min(MOST_VICTIMS, MOST_VICTIM_BYTES // self.layout.segment_bytes))
        for segment in order[:most]:
            live = int(self.live[segment])
            if live > room:
                break
            room -= live
            victims.append(int(segment))
        if len(victims) < 2:  # one full segment moved to another: no gain
            return []
        for segment in victims:
            self.state[segment] = CLEANING
        return victims

    def still_live(self, rows: NDArray[np.int64], segment: int) -> NDArray[np.bool_]:
        """Which of a segment's slots (with the rows that its header names) hold the row's current record."""
        slots = np.arange(len(rows), dtype=np.int64) + segment * self.layout.slots
        named = rows >= 0
        live = np.zeros(len(rows), np.bool_)
        live[named] = self.slots[rows[named]] == slots[named]
        return live

    # Opening.

    def rebuild(self, n_segments: int, retained: NDArray[np.bool_]) -> bool:
        """Work out all counts anew from the index, for a log of so many segments; False: the index points beyond it."""
        self.state = np.zeros(0, np.uint8)
        self.live = np.zeros(0, np.int32)
        self.used = np.zeros(0, np.int32)
        self.retained = np.zeros(0, np.bool_)
        self.hole = np.zeros(0, np.bool_)
        self._free, self._limbo = [], []
        self._grow_to(n_segments)
        total = int(_count_live(self.slots, self.layout.slots, self.live))
        if total < 0:
            return False
        self.live_records = total
        n = min(len(retained), n_segments)
        self.retained[:n] = retained[:n]
        busy = (self.live > 0) | self.retained
        self.state[busy] = FULL
        self._free = [int(segment) for segment in np.flatnonzero(~busy)]
        self.changed = False
        return True

    def clear(self, ticket: int) -> None:
        """Make every row one that was never written."""
        self.slots[:] = NEVER_WRITTEN
        self.checks[:] = 0
        self.live[:] = 0
        self.live_records = 0
        self.changed = True
        for segment in np.flatnonzero(self.state == FULL):
            self._give_up(int(segment), ticket)

    # Giving space back.

    def _surplus(self) -> int:
        """Free segments, not holes yet, beyond the log's limit and the reserve."""
        solid = self._solid()
        spare = sum(not self.hole[segment] for segment in self._free) - SURPLUS_RESERVE
        return max(0, min(spare, solid - self.limit_segments()))

    def cut(self) -> int:
        """Drop surplus free segments from the end of the log; how many segments are left."""
        surplus = self._surplus()
        keep = len(self)
        while keep and surplus and self.state[keep - 1] == FREE:
            keep -= 1
            surplus -= not self.hole[keep]
        if keep < len(self):
            self.state, self.live, self.used = self.state[:keep], self.live[:keep], self.used[:keep]
            self.retained, self.hole = self.retained[:keep], self.hole[:keep]
            self._free = [segment for segment in self._free if segment < keep]
            heapq.heapify(self._free)
        return keep

    def begin_punch(self) -> list[int]:
        """Surplus free segments whose space is to be given back; nobody can take them until `end_punch`."""
        surplus = self._surplus()
        chosen = sorted((segment for segment in self._free if not self.hole[segment]), reverse=True)[:surplus]
        self._free = [segment for segment in self._free if segment not in set(chosen)]
        heapq.heapify(self._free)
        for segment in chosen:
            self.state[segment] = PUNCHING
        return chosen

    def end_punch(self, segments: list[int], *, punched: bool) -> None:
        """The segments are free again; with `punched` they are holes, which cost no space until they are written."""
        for segment in segments:
            self.state[segment] = FREE
            self.hole[segment] = punched
            heapq.heappush(self._free, segment)
