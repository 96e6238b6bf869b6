"""The regions of the fused kernels: a step on each row in one pass, the sum of its duplicate gradients included.

The arithmetic is torch's, operation by operation, in the precision of the moments; every scalar comes in that
precision, so nothing is promoted, and nothing is contracted. SparseAdam's numerator, `update + old exp_avg`, is the
sum that becomes the new exp_avg, and likewise below the root: so the weights are moved by the new moments.

Rows are taken in blocks, small enough to stay near the processor: moments first, then the block's square roots, then
weights. Where torch alone can take its roots, a region is run twice instead, for moments and for weights.

All take the same cells, which describe flat arrays by their addresses: one compiled version serves every layout. Weight
`j` of row `r` is at `r * row_stride + j * column_stride`. Half-precision numbers (bf16 and fp16) come as their bits: a
table holds the float32 of each.

Rows lie far apart, and the processor cannot guess the next one: each loop asks for rows some way ahead of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io.compile import kernel
from dsa.io.native import at_address, call_on_array, carray, claim, prefetch
from dsa.optim.workers import PART_ELEMENTS, Region, region

# What each cell holds: addresses (of the block's first row; of weights and moments: of the whole), sizes in items.
CLAIMED, COUNT, PART_ROWS, WIDTH, FACTORS = 0, 1, 2, 3, 4
MOMENTS, STRIDE, FRAMES = 5, 6, 7
VALUES, ORDER, BEGINS, ENDS, NEGATE = 8, 9, 10, 11, 12  # no ORDER: row i's gradient is value i
WEIGHTS, ROW_STRIDE, COLUMN_STRIDE, ROWS = 13, 14, 15, 16
TABLE, BF16 = 17, 18
PHASE, ROOTS, FUNCTION, MODE = 19, 20, 21, 22  # no FUNCTION: the processor's own root
CELLS = 23

BOTH, ONLY_MOMENTS, ONLY_WEIGHTS = 0, 1, 2  # phases; in all but the first, squares and roots are in memory at ROOTS

# What each factor is, in float64; each is then rounded to the precision of the moments, as torch does.
RATE1, RATE2, EPS, MINUS_STEP_SIZE = 0, 1, 2, 3

# In a block; MKL gives the roots of somewhat more than 8192 numbers to threads of its own, which then spin.
BLOCK_ELEMENTS = 1 << 11
_AHEAD_ELEMENTS = 1 << 10  # rows with so many numbers are on their way at once
_LINE_BYTES = 64
_ANY = 1 << 48  # arrays over bare addresses have no length of their own

Real = NDArray[np.floating[Any]]
Bits = NDArray[np.uint16]


def part_rows(width: int) -> int:
    """The rows in a part that one thread claims."""
    return max(1, PART_ELEMENTS // width)


@kernel
def _ask_for(array: Any, first: int, items: int) -> None:
    """Have the lines that hold these items brought near."""
    start = array.ctypes.data + first * array.itemsize
    for line in range(start, start + items * array.itemsize, _LINE_BYTES):
        prefetch(line)


@kernel
def _sum_run(values: Real, order: NDArray[np.int64], begin: int, end: int, negate: bool, total: Real) -> None:
    """The sum of a run's values from the left, as torch does it."""
    width = len(total)
    place = order[begin] * width
    value = values[place : place + width]
    if negate:
        for j in range(width):
            total[j] = -value[j]
    else:
        for j in range(width):
            total[j] = value[j]
    for at in range(begin + 1, end):
        place = order[at] * width
        value = values[place : place + width]
        if negate:
            for j in range(width):
                total[j] -= value[j]
        else:
            for j in range(width):
                total[j] += value[j]


@kernel
def _move(exp_avg: Real, exp_avg_sq: Real, grad: Real, rate1: Any, rate2: Any, square: Real) -> None:
    for j in range(len(grad)):
        old = exp_avg[j]
        exp_avg[j] = old + (grad[j] - old) * rate1
    for j in range(len(grad)):
        old = exp_avg_sq[j]
        exp_avg_sq[j] = old + (grad[j] * grad[j] - old) * rate2
    for j in range(len(grad)):
        square[j] = exp_avg_sq[j]


@kernel
def _take_roots(squares: Real, function: int, mode: int) -> None:
    if function == 0:
        for j in range(len(squares)):
            squares[j] = np.sqrt(squares[j])
    else:
        start = squares.ctypes.data
        for first in range(0, len(squares), BLOCK_ELEMENTS):
            count = min(BLOCK_ELEMENTS, len(squares) - first)
            call_on_array(function, count, start + first * squares.itemsize, mode)


@kernel
def _step(weight: Real, exp_avg: Real, root: Real, eps: Any, minus_step_size: Any) -> None:
    for j in range(len(root)):
        weight[j] += minus_step_size * (exp_avg[j] / (root[j] + eps))


@kernel
def _unpack(source: Bits, first: int, stride: int, table: Real, target: Real) -> None:
    for j in range(len(target)):
        target[j] = table[source[first + j * stride]]


@kernel
def _pack(bits: NDArray[np.uint32], bf16: bool, target: Bits, first: int, stride: int) -> None:
    """Round float32 (its bits) to half precision, ties to even, as the hardware does."""
    for j in range(len(bits)):
        b = np.int64(bits[j])
        sign = (b >> 16) & 0x8000
        size = b & 0x7FFFFFFF
        if bf16:
            half = 0x7FC0 if size > 0x7F800000 else (size + 0x7FFF + ((size >> 16) & 1)) >> 16
        elif size > 0x7F800000:
            half = 0x7E00
        elif size >= 0x47800000:
            half = 0x7C00
        elif size >= 0x38800000:  # a normal fp16; the carry of rounding may make it infinite
            half = (size - 0x38000000 + 0xFFF + ((size >> 13) & 1)) >> 13
        else:  # a subnormal fp16: whole multiples of 2**-24
            drop = 126 - (size >> 23)
            if drop > 24:
                half = 0
            else:
                whole = (size & 0x7FFFFF) | 0x800000
                half = whole >> drop
                rest = whole - (half << drop)
                tie = 1 << (drop - 1)
                if rest > tie or (rest == tie and half & 1):
                    half += 1
        target[first + j * stride] = np.uint16(sign | half)


@functools.cache
def step_region(real: Any, values: Any, weight: Any) -> Region:
    """The step on some rows: all of it, or one of the two phases.

    Args:
        real: numpy type of the moments.
        values: numpy type of the gradient: `real`, or uint16 for half precision, whose duplicates are summed already.
        weight: numpy type of the weights; uint16 for half precision.
    """
    half_values, half_weights = values is np.uint16, weight is np.uint16

    def step_rows(address: int) -> None:
        cells = carray(at_address(address), CELLS, np.int64)
        count, part, width, stride, phase = cells[COUNT], cells[PART_ROWS], cells[WIDTH], cells[STRIDE], cells[PHASE]
        row_stride, column_stride, bf16 = cells[ROW_STRIDE], cells[COLUMN_STRIDE], cells[BF16] != 0
        in_runs, negate = cells[ORDER] != 0, cells[NEGATE] != 0
        factors = carray(at_address(cells[FACTORS]), 4, np.float64)
        rate1, rate2 = real(factors[RATE1]), real(factors[RATE2])
        eps, minus_step_size = real(factors[EPS]), real(factors[MINUS_STEP_SIZE])
        moments = carray(at_address(cells[MOMENTS]), _ANY, real)
        frames = carray(at_address(cells[FRAMES]), _ANY, np.int32)
        gradient = carray(at_address(cells[VALUES]), _ANY, values)
        order = carray(at_address(cells[ORDER]), _ANY, np.int64)
        begins = carray(at_address(cells[BEGINS]), _ANY, np.int64)
        ends = carray(at_address(cells[ENDS]), _ANY, np.int64)
        weights = carray(at_address(cells[WEIGHTS]), _ANY, weight)
        rows = carray(at_address(cells[ROWS]), _ANY, np.int64)
        table = carray(at_address(cells[TABLE]), 1 << 16, np.float32)
        block = max(1, BLOCK_ELEMENTS // width)
        ahead = max(4, min(_AHEAD_ELEMENTS // width, 64))
        squares = np.empty(block * width, real)
        total, copy = np.empty(width, real), np.empty(width, real)
        if phase != BOTH:
            squares = carray(at_address(cells[ROOTS]), _ANY, real)
        first = claim(address) * part
        while first < count:
            last = min(first + part, count)
            for start in range(first, last, block):
                stop = min(start + block, last)
                base = start if phase == BOTH else 0  # the row whose root comes first in `squares`
                if phase != ONLY_WEIGHTS:
                    for i in range(start, stop):
                        if i + ahead < last:
                            _ask_for(moments, np.int64(frames[i + ahead]) * stride, 2 * width)
                            if in_runs:
                                _ask_for(gradient, order[begins[i + ahead]] * width, width)
                            else:
                                _ask_for(gradient, (i + ahead) * width, width)
                        if column_stride == 1:
                            _ask_for(weights, rows[i] * row_stride, width)
                        at = np.int64(frames[i]) * stride
                        exp_avg = moments[at : at + width]
                        exp_avg_sq = moments[at + width : at + 2 * width]
                        square = squares[(i - base) * width : (i - base + 1) * width]
                        place = order[begins[i]] * width if in_runs else i * width
                        if half_values:
                            _unpack(gradient, place, 1, table, total)
                            _move(exp_avg, exp_avg_sq, total, rate1, rate2, square)
                        elif in_runs and (negate or ends[i] > begins[i] + 1):
                            _sum_run(gradient, order, begins[i], ends[i], negate, total)
                            _move(exp_avg, exp_avg_sq, total, rate1, rate2, square)
                        else:
                            _move(exp_avg, exp_avg_sq, gradient[place : place + width], rate1, rate2, square)
                if phase == BOTH:
                    _take_roots(squares[: (stop - start) * width], cells[FUNCTION], cells[MODE])
                if phase != ONLY_MOMENTS:
                    for i in range(start, stop):
                        at = np.int64(frames[i]) * stride
                        exp_avg = moments[at : at + width]
                        root = squares[(i - base) * width : (i - base + 1) * width]
                        place = rows[i] * row_stride
                        if half_weights:
                            _unpack(weights, place, column_stride, table, copy)
                            _step(copy, exp_avg, root, eps, minus_step_size)
                            _pack(copy.view(np.uint32), bf16, weights, place, column_stride)
                        elif column_stride == 1:
                            _step(weights[place : place + width], exp_avg, root, eps, minus_step_size)
                        else:
                            _step(
                                weights[place : place + width * column_stride : column_stride],
                                exp_avg, root, eps, minus_step_size,
                            )  # fmt: skip
            first = claim(address) * part

    return region(step_rows)


@functools.cache
def sums_region(real: Any) -> Region:
    """The sums of runs alone, each in its place in ROOTS.

    Args:
        real: numpy type of the gradient.
    """

    def sum_runs(address: int) -> None:
        cells = carray(at_address(address), CELLS, np.int64)
        count, part, width, negate = cells[COUNT], cells[PART_ROWS], cells[WIDTH], cells[NEGATE] != 0
        values = carray(at_address(cells[VALUES]), _ANY, real)
        order = carray(at_address(cells[ORDER]), _ANY, np.int64)
        begins = carray(at_address(cells[BEGINS]), _ANY, np.int64)
        ends = carray(at_address(cells[ENDS]), _ANY, np.int64)
        sums = carray(at_address(cells[ROOTS]), _ANY, real)
        first = claim(address) * part
        while first < count:
            for i in range(first, min(first + part, count)):
                _sum_run(values, order, begins[i], ends[i], negate, sums[i * width : (i + 1) * width])
            first = claim(address) * part

    return region(sum_runs)
