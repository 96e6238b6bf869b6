"""Small numba kernels on sorted rows and slots. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io.compile import kernel


def order_by_slot(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order that sorts slots ascending; equal ones (never written) keep theirs."""
    return np.argsort(slots, kind="stable")


@kernel
def _mark_members(rows: NDArray[np.int64], others: NDArray[np.int64], found: NDArray[np.bool_]) -> int:
    """Mark which of the ascending rows are among the ascending others; how many are marked for the first time."""
    i, j, fresh = 0, 0, 0
    while i < len(rows) and j < len(others):
        if rows[i] < others[j]:
            i += 1
        elif rows[i] > others[j]:
            j += 1
        else:
            if not found[i]:
                found[i] = True
                fresh += 1
            i += 1
            j += 1
    return fresh


def count_members(rows: NDArray[np.int64], sets: Sequence[NDArray[Any]]) -> int:
    """How many of the ascending unique rows are in at least one of the ascending unique sets."""
    found = np.zeros(len(rows), np.bool_)
    return sum(int(_mark_members(rows, other, found)) for other in sets)


@kernel
def _shared(
    rows: NDArray[np.int64], others: NDArray[np.int64], at_rows: NDArray[np.int64], at_others: NDArray[np.int64]
) -> int:
    i, j, n = 0, 0, 0
    while i < len(rows) and j < len(others):
        if rows[i] < others[j]:
            i += 1
        elif rows[i] > others[j]:
            j += 1
        else:
            at_rows[n], at_others[n] = i, j
            n += 1
            i += 1
            j += 1
    return n


def shared(rows: NDArray[np.int64], others: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where ascending unique rows and ascending unique others are equal: positions in the one and in the other."""
    at_rows, at_others = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    n = _shared(rows, others, at_rows, at_others)
    return at_rows[:n], at_others[:n]


@kernel
def gather_records(words: NDArray[np.uint64], frames: NDArray[np.int32], block: NDArray[np.uint64]) -> None:
    """Copy the records in `frames` to `block`, in their order; both [records, words of a record]."""
    for i in range(len(frames)):
        block[i] = words[frames[i]]


@kernel
def scatter_records(
    block: NDArray[np.uint64], at: NDArray[np.int64], words: NDArray[np.uint64], frames: NDArray[np.int32]
) -> None:
    """Copy the records at the places `at` of the block to `frames`."""
    for i in range(len(at)):
        words[frames[i]] = block[at[i]]
