"""Policy: which frames an arena gives up.

Rows that a known batch touches go last, the one that is touched latest first (Belady's rule as far as one knows);
before them go the rows that no known batch touches, the least frequent first. A row's frequency is a decayed count
of its accesses, kept as its logarithm in one byte, for rows without a frame as well: so a row that comes back is
known for what it is, and decay, which multiplies every count by the same factor, subtracts one from every byte.

Victims are chosen among a run of frames behind a moving hand, a fixed number of them for each victim wanted: so the
cost of a victim does not grow with the arena. A small arena is looked through whole, and the choice is exact.

An arena with a frame for every row never gives one up: there the policy learns nothing, and its calls cost nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.errors import UsageError
from dsa.io.ageing import Ageing
from dsa.io.choosing import NOBODY, SEQUENCE_BITS, choose
from dsa.io.compile import kernel
from dsa.io.foresight import Foresight
from dsa.io.native import prefetch

DIRTY = 1
FILLING = 2
WRITING = 4
LEASED = 8
FREE = 16
BARRED = DIRTY | FILLING | WRITING | LEASED | FREE
"""A frame with any of these flags cannot be given up."""

_BASE = 1.04  # a step of the byte is a factor of so much
_ONE = 60  # the byte of a single access just now: counts from 0.1 to 2,100 have a byte
_LOOK = 32  # frames looked at for each victim
_LEAST_LOOK = 1 << 14
_AHEAD = 16  # rows whose bytes are on their way at once
_UNKNOWN = np.int32(-1)
_ANYWHERE: NDArray[np.int16] = np.zeros(0, np.int16)  # no table in particular


def _bumps() -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """For each byte the one after an access: its floor, and the chance of one more in units of 2**-32."""
    code = np.arange(256)
    count = np.where(code > 0, _BASE ** (code - _ONE), 0.0)
    bumped = np.minimum(_ONE + np.log(count + 1) / np.log(_BASE), 255.0)
    floor = np.floor(bumped)
    return floor.astype(np.uint8), ((bumped - floor) * 2**32).astype(np.uint32)


_BUMP_FLOOR, _BUMP_CHANCE = _bumps()


class Policy:
    """The choice of victims in one arena. Deterministic: the same calls give the same victims.

    Memory: 3 bytes a row, 5 bytes a frame, 15 bytes for each row of each known batch, and 200 KB.

    Args:
        n_frames: frames of the arena.
    """

    def __init__(self, n_frames: int) -> None:
        self.n_frames = n_frames
        self._foresights: list[Foresight] = []
        self._codes: list[NDArray[np.uint8]] = []
        self._frame_code: NDArray[np.uint8] = np.zeros(n_frames, np.uint8)
        self._frame_due: NDArray[np.int32] = np.full(n_frames, _UNKNOWN, np.int32)
        self._ageing = Ageing(n_frames)
        self._progress = 0.0  # the share of all bytes that the present round of decay has reached
        self._random: NDArray[np.uint32] = np.array([2463534242], np.uint32)
        self._hand = 0
        self._writing_hand = 0
        self._n_rows = 0
        self._unheeded: dict[tuple[int, int], int] = {}  # batches announced while every row had a frame: their rows

    def add_table(self, n_rows: int) -> int:
        """Make room for a table of `n_rows` rows; returns its number, counting from 0."""
        self._foresights.append(Foresight(n_rows))
        self._codes.append(np.zeros(n_rows, np.uint8))
        self._ageing.add_table(n_rows)
        self._n_rows += n_rows
        return len(self._codes) - 1

    def known(self, table: int, sequence: int, rows: NDArray[Any], frames: NDArray[np.int32]) -> None:
        """A batch was announced.

        Args:
            sequence: higher than that of every batch announced for this table before.
            rows: int32 or int64, sorted, unique.
            frames: the frame of each row, -1 where it has none.

        Raises:
            UsageError: rows or sequence are not as said; nothing is changed.
        """
        self._same_length(len(rows), frames)
        if self.roomy:
            self._unheeded[table, sequence] = len(rows)
            return
        foresight = self._foresights[table]
        foresight.announce(sequence, rows)
        _set_due(foresight.next_use(rows), frames, self._frame_due)

    def filled(self, table: int, rows: NDArray[Any], frames: NDArray[np.int32]) -> None:
        """From now on these frames hold these rows (sorted or not)."""
        self._same_length(len(rows), frames)
        if self.roomy:
            return
        _set_due(self._foresights[table].next_use(rows), frames, self._frame_due)
        self._frame_code[frames] = self._codes[table][rows]

    def touched(self, table: int, rows: NDArray[Any], frames: NDArray[np.int32]) -> None:
        """A step had these rows (unique, sorted or not) in these frames: one access each."""
        self._same_length(len(rows), frames)
        if self.roomy:
            return
        wanted = np.ascontiguousarray(rows, np.int64)
        self._ageing.touched(table, wanted)
        _bump(
            wanted,
            frames,
            self._codes[table],
            self._frame_code,
            self._random,
            _BUMP_FLOOR,
            _BUMP_CHANCE,
        )
        self._decay(len(rows))

    def ended(self, table: int, sequence: int, frames: NDArray[np.int32]) -> None:
        """A known batch is over: stepped or dropped, in any order.

        Args:
            frames: for each of its rows, in the order in which they were announced, the frame that holds the row
                now; -1 where none does.

        Raises:
            UsageError: the batch is not known, or has another number of rows; nothing is changed.
        """
        if (table, sequence) in self._unheeded:
            self._same_length(self._unheeded[table, sequence], frames)
            del self._unheeded[table, sequence]
            return
        foresight = self._foresights[table]
        rows = foresight.rows(sequence).astype(np.int64)
        self._same_length(len(rows), frames)
        foresight.retire(sequence)
        _set_due(foresight.next_use(rows), frames, self._frame_due)

    def victims(self, count: int, flags: NDArray[np.uint8], pins: NDArray[np.int32]) -> NDArray[np.int32]:
        """Frames to give up, best first: distinct, none with a flag of BARRED or a pin.

        Args:
            count: so many are wanted; fewer come only where there are no more.
            flags: the flags of each frame.
            pins: how often each frame is pinned.

        Returns:
            int32, at most `count` frames. They stay candidates until their flags or pins say otherwise.
        """
        chosen, self._hand, _ = self._coldest(count, self._hand, flags, BARRED, 0, pins, _ANYWHERE, -1)
        return chosen

    def coldest(self, count: int, flags: NDArray[np.uint8], pins: NDArray[np.int32]) -> NDArray[np.int32]:
        """What `victims` would give were every frame clean; the hand stays where it is."""
        return self._coldest(count, self._hand, flags, BARRED & ~(DIRTY | WRITING), 0, pins, _ANYWHERE, -1)[0]

    def worst_victim(self, count: int, flags: NDArray[np.uint8], pins: NDArray[np.int32]) -> int:
        """The key of the last of so many frames that `victims` would give up now: the more, the greater the loss.

        NOBODY where there are fewer; nothing is given up, the hand stays where it is.
        """
        return self._coldest(count, self._hand, flags, BARRED, 0, pins, _ANYWHERE, -1)[2]

    def cold_dirty(
        self,
        count: int,
        flags: NDArray[np.uint8],
        pins: NDArray[np.int32] | None,
        table_of: NDArray[np.int16],
        table: int,
        below: int = NOBODY,
    ) -> NDArray[np.int32]:
        """Dirty frames of a table to write, those first that would be given up first were they clean.

        So a row that is updated often is written seldom, and what is to go soon is clean when its frame is wanted.

        Args:
            count, flags: as `victims`; frames that are leased, or being filled or written, are left out.
            pins: None: pinned ones too.
            table_of: the table of each frame.
            below: none at all unless the keys of all `count` are below this one, which `worst_victim` tells.
        """
        hand = self._writing_hand
        chosen, self._writing_hand, last = self._coldest(count, hand, flags, BARRED, DIRTY, pins, table_of, table)
        return chosen if last < below or below == NOBODY else chosen[:0]

    def _coldest(
        self,
        count: int,
        hand: int,
        flags: NDArray[np.uint8],
        mask: int,
        wanted: int,
        pins: NDArray[np.int32] | None,
        table_of: NDArray[np.int16],
        table: int,
    ) -> tuple[NDArray[np.int32], int, int]:
        """The frames, best first; where the hand is then; and the key of the last one (NOBODY: there are fewer)."""
        if count <= 0:
            return np.zeros(0, np.int32), hand, -1
        oldest, newest = self._known_span()
        look = min(self.n_frames, max(_LEAST_LOOK, _LOOK * count))
        chosen, hand, last = choose(
            count,
            look,
            hand,
            flags,
            mask,
            wanted,
            np.zeros(0, np.int32) if pins is None else pins,
            table_of,
            table,
            self._frame_code,
            self._frame_due,
            oldest & SEQUENCE_BITS,
            newest - oldest + 1,
        )
        return chosen, int(hand), int(last)

    def _known_span(self) -> tuple[int, int]:
        """The lowest and the highest number of a known batch; (0, -1) where none is known."""
        oldest, newest = 0, -1
        for foresight in self._foresights:
            if len(foresight):
                first, last = foresight.span
                oldest, newest = (first, last) if newest < 0 else (min(oldest, first), max(newest, last))
        return oldest, newest

    @property
    def roomy(self) -> bool:
        """Whether the arena has a frame for every row, and so never gives one up."""
        return self.n_frames >= self._n_rows

    def _same_length(self, n_rows: int, frames: NDArray[np.int32]) -> None:
        if len(frames) != n_rows:
            raise UsageError(f"{n_rows} rows came with {len(frames)} frames: each row needs one, or -1")

    def _decay(self, accesses: int) -> None:
        """Go on subtracting one from every byte: once round in as many accesses as a count takes to lose one step."""
        round_accesses = self._ageing.half_life * np.log2(_BASE)
        left = accesses / round_accesses
        while left > 0:
            stop = min(self._progress + left, 1.0)
            left -= stop - self._progress
            for codes in (*self._codes, self._frame_code):
                n = len(codes)
                _subtract_one(codes[int(n * self._progress) : int(n * stop)])
            self._progress = 0.0 if stop == 1.0 else stop
            if left < 1e-9:
                break


@kernel
def _set_due(next_use: NDArray[np.int64], frames: NDArray[np.int32], frame_due: NDArray[np.int32]) -> None:
    for i in range(len(frames)):
        frame = frames[i]
        if frame >= 0:
            never = next_use[i] == np.iinfo(np.int64).max
            frame_due[frame] = _UNKNOWN if never else np.int32(next_use[i] & SEQUENCE_BITS)


@kernel
def _bump(
    rows: NDArray[np.int64],
    frames: NDArray[np.int32],
    codes: NDArray[np.uint8],
    frame_code: NDArray[np.uint8],
    random: NDArray[np.uint32],
    bump_floor: NDArray[np.uint8],
    bump_chance: NDArray[np.uint32],
) -> None:
    state = random[0]
    count, row_places, frame_places = len(rows), codes.ctypes.data, frame_code.ctypes.data
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(row_places + rows[i + _AHEAD])
            prefetch(frame_places + np.int64(frames[i + _AHEAD]))
        state ^= np.uint32(state << np.uint32(13))
        state ^= np.uint32(state >> np.uint32(17))
        state ^= np.uint32(state << np.uint32(5))
        code = codes[rows[i]]
        bumped = bump_floor[code]
        if state < bump_chance[code]:
            bumped += np.uint8(1)
        codes[rows[i]] = bumped
        if frames[i] >= 0:
            frame_code[frames[i]] = bumped
    random[0] = state


@kernel
def _subtract_one(codes: NDArray[np.uint8]) -> None:
    for i in range(len(codes)):
        codes[i] -= np.uint8(codes[i] > 0)
