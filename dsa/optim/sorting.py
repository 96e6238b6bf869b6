"""Look-ups in the order of their rows: once for a batch that is announced, and of use again when its gradient comes.

The sort is torch's own: below 2**15 rows it is not stable on every processor, and the sum of three duplicates depends
on their order, so any other sort would give other bits than `coalesce()`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsa.io.native import address_of_own, at_address, carray
from dsa.optim import workers

# The cells of the region: look-ups in order, how many, where runs begin and their rows, how many of these.
_ORDERED, _COUNT, _STARTS, _ROWS, _FOUND, _CELLS = range(6)
_ANY = 1 << 48  # arrays over bare addresses have no length of their own


@dataclass(frozen=True)
class Sorted:
    """The look-ups of a batch as torch sorts them.

    Args:
        rows: int64 [k], the distinct rows, ascending.
        order: int64 [n], the place of each look-up in the batch.
        starts: int64 [k + 1], where each row's run begins in `order`, and n.
        looked_up: int64 [n], a copy of the look-ups as they came, by which they are recognized; empty: not kept.
    """

    rows: NDArray[np.int64]
    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    looked_up: NDArray[np.int64]

    @staticmethod
    def of_rows(rows: NDArray[np.int64]) -> Sorted:
        """The distinct rows alone, ascending: the order of the look-ups is not known."""
        nothing = np.empty(0, np.int64)
        return Sorted(rows, nothing, nothing, nothing)

    @property
    def ordered(self) -> bool:
        """Whether the order of the look-ups is known."""
        return len(self.order) > 0

    def is_of(self, looked_up: Tensor) -> bool:
        """Whether these are the very look-ups (int64 [n], on the host), each at its place."""
        return (self.ordered or not len(self.rows)) and bool(np.array_equal(looked_up.numpy(), self.looked_up))


def sort(looked_up: Tensor, *, recognizable: bool = False) -> Sorted:
    """Sort int64 [n] on the host, as `coalesce()` does.

    Args:
        recognizable: keep a copy of them for `is_of`.
    """
    ordered, order = looked_up.sort(0)
    count = ordered.shape[0]
    rows, starts = np.empty(count + 1, np.int64), np.empty(count + 1, np.int64)  # of one more: both have an address
    cells = np.zeros(_CELLS, np.int64)
    cells[_ORDERED], cells[_COUNT] = ordered.data_ptr(), count
    cells[_STARTS], cells[_ROWS] = address_of_own(starts), address_of_own(rows)
    _runs_region().call(address_of_own(cells))
    found = int(cells[_FOUND])
    # The rows are kept longer than the rest, and so in memory that is no larger than they are.
    kept = looked_up.numpy().copy() if recognizable else rows[:0].copy()
    return Sorted(rows[:found].copy(), order.numpy(), starts[: found + 1], kept)


@functools.cache
def _runs_region() -> workers.Region:
    def find_runs(address: int) -> None:
        cells = carray(at_address(address), _CELLS, np.int64)
        count = cells[_COUNT]
        ordered = carray(at_address(cells[_ORDERED]), _ANY, np.int64)
        starts = carray(at_address(cells[_STARTS]), _ANY, np.int64)
        rows = carray(at_address(cells[_ROWS]), _ANY, np.int64)
        found = 0
        for i in range(count):
            if i == 0 or ordered[i] != ordered[i - 1]:
                starts[found], rows[found] = i, ordered[i]
                found += 1
        starts[found] = count
        cells[_FOUND] = found

    return workers.region(find_runs)
