"""Ageing: how fast counts of accesses should fade, measured while it goes.

Where popularity stays, a long memory tells rows apart best; where it drifts, a short one follows. So a few thousand
sampled rows keep exact counts under each of several half-lives. For each half-life there is the count that a row
needs to be among as many rows as the cache holds; an access to a row that has it would have been a hit. The
half-life with the most such hits is the one to use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io.compile import kernel

HALF_LIVES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""The choice, in accesses per row of the arena."""

_AT_FIRST = 4
_MOST_SAMPLED = 4096
_REVIEW = 0.5  # accesses per row between two reviews
_SCORE_KEPT = 0.8  # of the hits and accesses counted before, at each review
_MARGIN = 0.002  # of the accesses; a change must promise so much


class Ageing:
    """The half-life for the rows of one arena. Deterministic; memory is bounded, whatever the number of rows.

    Args:
        n_frames: frames of the arena; fewer than its rows when accesses are counted.
    """

    def __init__(self, n_frames: int) -> None:
        self._n_frames = n_frames
        self._tables: list[int] = []
        self._choice = _AT_FIRST
        self._now = 0  # accesses so far
        self._reviewed = 0
        self._reset()

    @property
    def half_life(self) -> float:
        """The half-life that serves best so far, in accesses to the arena."""
        return HALF_LIVES[self._choice] * self._n_rows

    def add_table(self, n_rows: int) -> None:
        """Sample this table's rows too (its number is the next one); what was counted so far is forgotten."""
        self._tables.append(n_rows)
        self._reset()

    def touched(self, table: int, rows: NDArray[np.int64]) -> None:
        """Count an access of each of `rows`."""
        seen = _count(
            rows,
            self._shift,
            int(self._offsets[table]),
            self._now / self._n_rows,
            self._counts,
            self._last,
            self._rates,
            self._needed,
            self._hits,
        )
        self._accesses += seen
        self._now += len(rows)
        if self._now - self._reviewed >= _REVIEW * self._n_rows:
            self._reviewed = self._now
            self._review()

    def _reset(self) -> None:
        self._n_rows = sum(self._tables)
        self._shift = 0  # one row in 2**shift is sampled
        while self._n_rows >> self._shift > _MOST_SAMPLED:
            self._shift += 1
        sampled = [-(-n_rows >> self._shift) for n_rows in self._tables]
        self._offsets: NDArray[Any] = np.concatenate([[0], np.cumsum(sampled, dtype=np.int64)])
        n_sampled = int(self._offsets[-1])
        self._rates: NDArray[np.float64] = 1 / np.array(HALF_LIVES)
        self._counts: NDArray[np.float32] = np.zeros((n_sampled, len(HALF_LIVES)), np.float32)
        self._last: NDArray[np.float64] = np.zeros(n_sampled, np.float64)
        self._needed: NDArray[np.float64] = np.zeros(len(HALF_LIVES), np.float64)
        self._hits: NDArray[np.float64] = np.zeros(len(HALF_LIVES), np.float64)
        self._accesses = 0.0
        self._now = 0
        self._reviewed = 0

    def _review(self) -> None:
        best = int(np.argmax(self._hits))
        if self._accesses and self._hits[best] - self._hits[self._choice] > _MARGIN * self._accesses:
            self._choice = best
        self._hits *= _SCORE_KEPT
        self._accesses *= _SCORE_KEPT
        n_sampled = len(self._last)
        kept = n_sampled - self._n_frames * n_sampled // self._n_rows
        idle = self._now / self._n_rows - self._last
        for number, rate in enumerate(self._rates):
            faded = self._counts[:, number] * np.exp2(-rate * idle)
            self._needed[number] = np.partition(faded, kept)[kept] if kept < n_sampled else np.inf


@kernel
def _count(
    rows: NDArray[np.int64],
    shift: int,
    offset: int,
    now: float,
    counts: NDArray[np.float32],
    last: NDArray[np.float64],
    rates: NDArray[np.float64],
    needed: NDArray[np.float64],
    hits: NDArray[np.float64],
) -> int:
    seen = 0
    mask = np.int64((1 << shift) - 1)
    for i in range(len(rows)):
        row = rows[i]
        block = row >> shift
        # In each block of 2**shift rows the sampled one is at a scattered place, so that no pattern of rows evades it.
        if row & mask != ((block * np.int64(0x9E3779B1)) >> np.int64(11)) & mask:
            continue
        seen += 1
        place = offset + block
        idle = now - last[place]
        last[place] = now
        for number in range(len(rates)):
            faded = counts[place, number] * 2.0 ** (-rates[number] * idle)
            hits[number] += faded > 0 and faded >= needed[number]
            counts[place, number] = faded + 1.0
    return seen
