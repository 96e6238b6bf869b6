"""The regions of the fused kernels: gradient and moments in one pass, weights in another, or both in one.

The arithmetic is torch's, operation by operation, in the precision of the moments; every scalar comes in that
precision, so nothing is promoted, and nothing is contracted. SparseAdam's numerator, `update + old exp_avg`, is the
sum that becomes the new exp_avg, and likewise below the root: so the second pass reads the new moments, and only the
roots need scratch memory.

All take the same cells, which describe flat arrays by their addresses: one compiled version serves every layout. Weight
`j` of row `r` is at `r * row_stride + j * column_stride`. Half-precision numbers (bf16 and fp16) come as their bits: a
table holds the float32 of each. All code that a region uses is in this file, since a change to another one would not
make numba compile it anew.

Rows lie far apart, and the processor cannot guess the next one: each loop asks for rows some way ahead of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io.compile import kernel
from dsa.optim.native import at_address, carray, claim, prefetch
from dsa.optim.workers import PART_ELEMENTS, region

# What each cell holds: addresses (of the block's first row; of weights and moments: of the whole), sizes in items.
CLAIMED, COUNT, PART_ROWS, WIDTH, FACTORS = 0, 1, 2, 3, 4
MOMENTS, STRIDE, FRAMES, VALUES, ROOTS = 5, 6, 7, 8, 9
WEIGHTS, ROW_STRIDE, COLUMN_STRIDE, ROWS = 10, 11, 12, 13
TABLE, BF16 = 14, 15
CELLS = 16

# What each factor is, in float64; each is then rounded to the precision of the moments, as torch does.
RATE1, RATE2, EPS, MINUS_STEP_SIZE = 0, 1, 2, 3

_AHEAD = 4  # rows; the memory of so many is on its way at once
_LINE_BYTES = 64
_ANY = 1 << 48  # arrays over bare addresses have no length of their own

Real = NDArray[np.floating[Any]]
Bits = NDArray[np.uint16]


def new_cells(rows: int, width: int) -> NDArray[np.int64]:
    """Cells for a loop over so many rows, the rest still to be filled in."""
    cells = np.zeros(CELLS, np.int64)
    cells[COUNT], cells[WIDTH], cells[PART_ROWS] = rows, width, max(1, PART_ELEMENTS // width)
    return cells


@kernel
def _ask_for(array: Any, first: int, items: int) -> None:
    """Have the lines that hold these items brought near, for writing."""
    start = array.ctypes.data + first * array.itemsize
    for line in range(start, start + items * array.itemsize, _LINE_BYTES):
        prefetch(line)


@kernel
def _move(exp_avg: Real, exp_avg_sq: Real, grad: Real, rate1: Any, rate2: Any) -> None:
    for j in range(len(grad)):
        old = exp_avg[j]
        exp_avg[j] = old + (grad[j] - old) * rate1
    for j in range(len(grad)):
        old = exp_avg_sq[j]
        exp_avg_sq[j] = old + (grad[j] * grad[j] - old) * rate2


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
def moments_region(real: Any, values: Any) -> Any:
    """First pass of the exact kernel: moments moved, each new exp_avg_sq left in the roots.

    Args:
        real: numpy type of the moments.
        values: numpy type of the gradient; uint16 for half precision.
    """
    half = values is np.uint16

    def move_moments(address: int) -> None:
        cells = carray(at_address(address), CELLS, np.int64)
        count, part_rows, width, stride = cells[COUNT], cells[PART_ROWS], cells[WIDTH], cells[STRIDE]
        factors = carray(at_address(cells[FACTORS]), 4, np.float64)
        rate1, rate2 = real(factors[RATE1]), real(factors[RATE2])
        moments = carray(at_address(cells[MOMENTS]), _ANY, real)
        frames = carray(at_address(cells[FRAMES]), _ANY, np.int32)
        gradient = carray(at_address(cells[VALUES]), _ANY, values)
        roots = carray(at_address(cells[ROOTS]), _ANY, real)
        table = carray(at_address(cells[TABLE]), 1 << 16, np.float32)
        grad = np.empty(width, real)
        first = claim(address) * part_rows
        while first < count:
            last = min(first + part_rows, count)
            for i in range(first, last):
                if i + _AHEAD < last:
                    _ask_for(moments, np.int64(frames[i + _AHEAD]) * stride, 2 * width)
                at = np.int64(frames[i]) * stride
                exp_avg = moments[at : at + width]
                exp_avg_sq = moments[at + width : at + 2 * width]
                if half:
                    _unpack(gradient, i * width, 1, table, grad)
                    _move(exp_avg, exp_avg_sq, grad, rate1, rate2)
                else:
                    _move(exp_avg, exp_avg_sq, gradient[i * width : (i + 1) * width], rate1, rate2)
                root = roots[i * width : (i + 1) * width]
                for j in range(width):
                    root[j] = exp_avg_sq[j]
            first = claim(address) * part_rows

    return region(move_moments)


@functools.cache
def weights_region(real: Any, weight: Any) -> Any:
    """Second pass of the exact kernel: weights moved by the new moments and the roots.

    Args:
        real: numpy type of the moments.
        weight: numpy type of the weights; uint16 for half precision.
    """
    half = weight is np.uint16

    def move_weights(address: int) -> None:
        cells = carray(at_address(address), CELLS, np.int64)
        count, part_rows, width, stride = cells[COUNT], cells[PART_ROWS], cells[WIDTH], cells[STRIDE]
        row_stride, column_stride, bf16 = cells[ROW_STRIDE], cells[COLUMN_STRIDE], cells[BF16] != 0
        factors = carray(at_address(cells[FACTORS]), 4, np.float64)
        eps, minus_step_size = real(factors[EPS]), real(factors[MINUS_STEP_SIZE])
        moments = carray(at_address(cells[MOMENTS]), _ANY, real)
        frames = carray(at_address(cells[FRAMES]), _ANY, np.int32)
        roots = carray(at_address(cells[ROOTS]), _ANY, real)
        weights = carray(at_address(cells[WEIGHTS]), _ANY, weight)
        rows = carray(at_address(cells[ROWS]), _ANY, np.int64)
        table = carray(at_address(cells[TABLE]), 1 << 16, np.float32)
        copy = np.empty(width, real)
        first = claim(address) * part_rows
        while first < count:
            last = min(first + part_rows, count)
            for i in range(first, last):
                if i + _AHEAD < last:
                    _ask_for(moments, np.int64(frames[i + _AHEAD]) * stride, width)
                    if column_stride == 1:
                        _ask_for(weights, rows[i + _AHEAD] * row_stride, width)
                at = np.int64(frames[i]) * stride
                exp_avg = moments[at : at + width]
                root = roots[i * width : (i + 1) * width]
                place = rows[i] * row_stride
                if half:
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
            first = claim(address) * part_rows

    return region(move_weights)


@functools.cache
def fast_region(real: Any, weight: Any) -> Any:
    """The only pass of the fast kernel, with the processor's own square root; the gradient is in the weights' dtype.

    Args:
        real: numpy type of the moments.
        weight: numpy type of weights and gradient; uint16 for half precision.
    """
    half = weight is np.uint16

    def move_all(address: int) -> None:
        cells = carray(at_address(address), CELLS, np.int64)
        count, part_rows, width, stride = cells[COUNT], cells[PART_ROWS], cells[WIDTH], cells[STRIDE]
        row_stride, column_stride, bf16 = cells[ROW_STRIDE], cells[COLUMN_STRIDE], cells[BF16] != 0
        factors = carray(at_address(cells[FACTORS]), 4, np.float64)
        rate1, rate2 = real(factors[RATE1]), real(factors[RATE2])
        eps, minus_step_size = real(factors[EPS]), real(factors[MINUS_STEP_SIZE])
        moments = carray(at_address(cells[MOMENTS]), _ANY, real)
        frames = carray(at_address(cells[FRAMES]), _ANY, np.int32)
        gradient = carray(at_address(cells[VALUES]), _ANY, weight)
        weights = carray(at_address(cells[WEIGHTS]), _ANY, weight)
        rows = carray(at_address(cells[ROWS]), _ANY, np.int64)
        table = carray(at_address(cells[TABLE]), 1 << 16, np.float32)
        grad, root, copy = np.empty(width, real), np.empty(width, real), np.empty(width, real)
        first = claim(address) * part_rows
        while first < count:
            last = min(first + part_rows, count)
            for i in range(first, last):
                if i + _AHEAD < last:
                    _ask_for(moments, np.int64(frames[i + _AHEAD]) * stride, 2 * width)
                    if column_stride == 1:
                        _ask_for(weights, rows[i + _AHEAD] * row_stride, width)
                at = np.int64(frames[i]) * stride
                exp_avg = moments[at : at + width]
                exp_avg_sq = moments[at + width : at + 2 * width]
                if half:
                    _unpack(gradient, i * width, 1, table, grad)
                    _move(exp_avg, exp_avg_sq, grad, rate1, rate2)
                else:
                    _move(exp_avg, exp_avg_sq, gradient[i * width : (i + 1) * width], rate1, rate2)
                for j in range(width):
                    root[j] = np.sqrt(exp_avg_sq[j])
                place = rows[i] * row_stride
                if half:
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
            first = claim(address) * part_rows

    return region(move_all)
