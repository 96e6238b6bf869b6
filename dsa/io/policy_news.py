"""What eviction's policies have not been told yet. Pure.

A policy is told before it is asked for anything. An announcement or a step tells it only where there is much to tell,
as where nobody asks: the training thread waits for that.
"""

from __future__ import annotations

import enum
from collections import deque

import numpy as np

from dsa.io.cache import Frames, Rows
from dsa.io.jobs import Table

_MOST = 64
_MOST_ROWS = 1 << 18  # 20 bytes each, besides what holds them anyway
_NO_FRAMES: Frames = np.empty(0, np.int32)


class _Kind(enum.Enum):
    KNOWN = "known"
    TOUCHED = "touched"
    ENDED = "ended"


class PolicyNews:
    """Batches that were announced, accesses, and batches that have ended, in their order.

    Nothing is noted of arenas with room for every row: they never give a frame up, and their policy learns nothing.
    """

    def __init__(self) -> None:
        self._untold: deque[tuple[_Kind, Table, int, Rows, Frames]] = deque()
        self._rows = 0  # in all of them

    def __len__(self) -> int:
        return len(self._untold)

    def known(self, table: Table, sequence: int, rows: Rows) -> None:
        """A batch with these rows of the table was announced."""
        self._note(_Kind.KNOWN, table, sequence, rows, _NO_FRAMES)

    def touched(self, table: Table, rows: Rows, frames: Frames) -> None:
        """A step has leased these frames, which hold these rows.

        They still do when the policy hears of it: whoever gives a frame up tells it first.
        """
        self._note(_Kind.TOUCHED, table, 0, rows, frames)

    def ended(self, table: Table, sequence: int, rows: Rows) -> None:
        """A batch of which `known` was said is over."""
        self._note(_Kind.ENDED, table, sequence, rows, _NO_FRAMES)

    def _note(self, kind: _Kind, table: Table, sequence: int, rows: Rows, frames: Frames) -> None:
        if not table.arena.roomy:
            self._untold.append((kind, table, sequence, rows, frames))
            self._rows += len(rows)

    def tell_much(self) -> None:
        """Tell the policies, where there is much: where nobody asks them, it would pile up."""
        if len(self._untold) >= _MOST or self._rows >= _MOST_ROWS:
            self.tell()

    def tell(self) -> None:
        """Tell the policies everything."""
        while self._untold:
            kind, table, sequence, rows, frames = self._untold.popleft()
            self._rows -= len(rows)
            policy, number = table.arena.policy, table.arena_table
            if kind is _Kind.TOUCHED:
                policy.touched(number, rows, frames)
            elif kind is _Kind.KNOWN:
                policy.known(number, sequence, rows, table.arena.frame_of[number][rows])
            else:
                policy.ended(number, sequence, table.arena.frame_of[number][rows])

    def forget(self) -> None:
        """Tell nobody: the policies begin anew, also where an interrupt has left one half told."""
        self._untold.clear()
        self._rows = 0
