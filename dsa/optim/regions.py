"""The parallel regions of the fused kernels: addresses and sizes out of the cells, then the loops of `fused`.

One region for each pass and pair of dtypes, compiled when it is first asked for. All take the same cells.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from dsa.optim import fused
from dsa.optim.native import at_address, claim
from dsa.optim.workers import PART_ELEMENTS, region

# What each cell holds: addresses (of the block's first row; of weights and moments: of the whole), sizes in items.
CLAIMED, COUNT, PART_ROWS, WIDTH, FACTORS = 0, 1, 2, 3, 4
MOMENTS, STRIDE, FRAMES, VALUES, ROOTS = 5, 6, 7, 8, 9
WEIGHTS, ROW_STRIDE, COLUMN_STRIDE, ROWS = 10, 11, 12, 13
TABLE, BF16 = 14, 15
CELLS = 16

# What each factor is, in float64; each is exact in the precision of the moments.
RATE1, RATE2, EPS, MINUS_STEP_SIZE = 0, 1, 2, 3

_ANY = 1 << 48  # arrays over bare addresses have no length of their own


def new_cells(rows: int, width: int) -> NDArray[np.int64]:
    """Cells for a loop over so many rows, the rest still to be filled in."""
    cells = np.zeros(CELLS, np.int64)
    cells[COUNT], cells[WIDTH], cells[PART_ROWS] = rows, width, max(1, PART_ELEMENTS // width)
    return cells


@functools.cache
def moments_region(real: type[np.floating[Any]], values: type[np.generic]) -> Any:
    """First pass of the exact kernel: moments moved, each new exp_avg_sq left in the roots."""
    half = values is np.uint16

    def move_moments(address: int) -> None:
        cells = carray(at_address(address), CELLS, np.int64)
        count, part_rows, width = cells[COUNT], cells[PART_ROWS], cells[WIDTH]
        factors = carray(at_address(cells[FACTORS]), 4, np.float64)
        rate1, rate2 = real(factors[RATE1]), real(factors[RATE2])
        moments = carray(at_address(cells[MOMENTS]), _ANY, real)
        frames = carray(at_address(cells[FRAMES]), _ANY, np.int32)
        gradient = carray(at_address(cells[VALUES]), _ANY, values)
        roots = carray(at_address(cells[ROOTS]), _ANY, real)
        first = claim(address) * part_rows
        while first < count:
            last = min(first + part_rows, count)
            if half:
                table = carray(at_address(cells[TABLE]), 1 << 16, np.float32)
                fused.update_moments_half(
                    moments, cells[STRIDE], frames, gradient, width, first, last, rate1, rate2, roots, table
                )
            else:
                fused.update_moments(moments, cells[STRIDE], frames, gradient, width, first, last, rate1, rate2, roots)
            first = claim(address) * part_rows

    return region(move_moments)


@functools.cache
def weights_region(real: type[np.floating[Any]], weight: type[np.generic]) -> Any:
    """Second pass of the exact kernel: weights moved by the new moments and the roots."""
    half = weight is np.uint16

    def move_weights(address: int) -> None:
        cells = carray(at_address(address), CELLS, np.int64)
        count, part_rows, width = cells[COUNT], cells[PART_ROWS], cells[WIDTH]
        factors = carray(at_address(cells[FACTORS]), 4, np.float64)
        eps, minus_step_size = real(factors[EPS]), real(factors[MINUS_STEP_SIZE])
        moments = carray(at_address(cells[MOMENTS]), _ANY, real)
        frames = carray(at_address(cells[FRAMES]), _ANY, np.int32)
        roots = carray(at_address(cells[ROOTS]), _ANY, real)
        weights = carray(at_address(cells[WEIGHTS]), _ANY, weight)
        rows = carray(at_address(cells[ROWS]), _ANY, np.int64)
        first = claim(address) * part_rows
        while first < count:
            last = min(first + part_rows, count)
            if half:
                table = carray(at_address(cells[TABLE]), 1 << 16, np.float32)
                fused.update_weights_half(
                    moments, cells[STRIDE], frames, weights, cells[ROW_STRIDE], cells[COLUMN_STRIDE], rows, width,
                    first, last, eps, minus_step_size, roots, table, cells[BF16] != 0,
                )  # fmt: skip
            else:
                fused.update_weights(
                    moments, cells[STRIDE], frames, weights, cells[ROW_STRIDE], cells[COLUMN_STRIDE], rows, width,
                    first, last, eps, minus_step_size, roots,
                )  # fmt: skip
            first = claim(address) * part_rows

    return region(move_weights)


@functools.cache
def fast_region(real: type[np.floating[Any]], weight: type[np.generic]) -> Any:
    """The only pass of the fast kernel; the gradient is in the weights' dtype."""
    half = weight is np.uint16

    def move_all(address: int) -> None:
        cells = carray(at_address(address), CELLS, np.int64)
        count, part_rows, width = cells[COUNT], cells[PART_ROWS], cells[WIDTH]
        factors = carray(at_address(cells[FACTORS]), 4, np.float64)
        rate1, rate2 = real(factors[RATE1]), real(factors[RATE2])
        eps, minus_step_size = real(factors[EPS]), real(factors[MINUS_STEP_SIZE])
        moments = carray(at_address(cells[MOMENTS]), _ANY, real)
        frames = carray(at_address(cells[FRAMES]), _ANY, np.int32)
        gradient = carray(at_address(cells[VALUES]), _ANY, weight)
        weights = carray(at_address(cells[WEIGHTS]), _ANY, weight)
        rows = carray(at_address(cells[ROWS]), _ANY, np.int64)
        first = claim(address) * part_rows
        while first < count:
            last = min(first + part_rows, count)
            if half:
                table = carray(at_address(cells[TABLE]), 1 << 16, np.float32)
                fused.update_fast_half(
                    moments, cells[STRIDE], frames, gradient, weights, cells[ROW_STRIDE], cells[COLUMN_STRIDE], rows,
                    width, first, last, rate1, rate2, eps, minus_step_size, table, cells[BF16] != 0,
                )  # fmt: skip
            else:
                fused.update_fast(
                    moments, cells[STRIDE], frames, gradient, weights, cells[ROW_STRIDE], cells[COLUMN_STRIDE], rows,
                    width, first, last, rate1, rate2, eps, minus_step_size,
                )  # fmt: skip
            first = claim(address) * part_rows

    return region(move_all)
