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
