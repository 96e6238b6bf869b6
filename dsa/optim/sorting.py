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

from dsa.optim import workers
from dsa.optim.native import address_of_own, at_address, carray

# The cells of both regions: rows as they come or are ordered, how many (distinct) ones, what is found or to be tried.
_LOOKED_UP, _COUNT, _STARTS, _ROWS, _FOUND, _ORDER, _CELLS = range(7)
_ANY = 1 << 48  # arrays over bare addresses have no length of their own


@dataclass(frozen=True)
class Sorted:
    """The look-ups of a batch as torch sorts them.

    Args:
        rows: int64 [k], the distinct rows, ascending.
        order: int64 [n], the place of each look-up in the batch.
        starts: int64 [k + 1], where each row's run begins in `order`, and n.
    """

    rows: NDArray[np.int64]
    order: NDArray[np.int64]
    starts: NDArray[np.int64]

    @staticmethod
    def of_rows(rows: NDArray[np.int64]) -> Sorted:
        """The distinct rows alone, ascending: the order of the look-ups is not known."""
        nothing = np.empty(0, np.int64)
        return Sorted(rows, nothing, nothing)

    @property
    def ordered(self) -> bool:
        """Whether the order of the look-ups is known."""
        return len(self.order) > 0

    def is_of(self, looked_up: Tensor) -> bool:
        """Whether these are the very look-ups (int64 [n], contiguous, on the host), each at its place.

        Then, and only then, they are these rows when taken in this order.
        """
        count = looked_up.shape[0]
        if count != len(self.order) or count == 0:
            return count == len(self.order) == len(self.rows)
        cells = np.zeros(_CELLS, np.int64)
        cells[_LOOKED_UP], cells[_COUNT] = looked_up.data_ptr(), len(self.rows)
        cells[_ORDER], cells[_STARTS], cells[_ROWS] = map(address_of_own, (self.order, self.starts, self.rows))
        _compare_region().call(address_of_own(cells))
        return bool(cells[_FOUND])


def sort(looked_up: Tensor) -> Sorted:
    """Sort int64 [n] on the host, as `coalesce()` does."""
    ordered, order = looked_up.sort(0)
    count = ordered.shape[0]
    room = np.empty(2 * count + 1, np.int64)
    start = address_of_own(room)
    cells = np.zeros(_CELLS, np.int64)
    cells[_LOOKED_UP], cells[_COUNT], cells[_STARTS], cells[_ROWS] = ordered.data_ptr(), count, start + 8 * count, start
    _runs_region().call(address_of_own(cells))
    found = int(cells[_FOUND])
    return Sorted(room[:found], order.numpy(), room[count : count + found + 1])


@functools.cache
def _runs_region() -> workers.Region:
    def find_runs(address: int) -> None:
        cells = carray(at_address(address), _CELLS, np.int64)
        count = cells[_COUNT]
        ordered = carray(at_address(cells[_LOOKED_UP]), _ANY, np.int64)
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


@functools.cache
def _compare_region() -> workers.Region:
    def compare(address: int) -> None:
        cells = carray(at_address(address), _CELLS, np.int64)
        looked_up = carray(at_address(cells[_LOOKED_UP]), _ANY, np.int64)
        order = carray(at_address(cells[_ORDER]), _ANY, np.int64)
        starts = carray(at_address(cells[_STARTS]), _ANY, np.int64)
        rows = carray(at_address(cells[_ROWS]), _ANY, np.int64)
        for i in range(cells[_COUNT]):
            for at in range(starts[i], starts[i + 1]):
                if looked_up[order[at]] != rows[i]:
                    return
        cells[_FOUND] = 1

    return workers.region(compare)
