"""The nogil loops of the fused kernels: gradient and moments in one pass, weights in another, or both in one.

The arithmetic is torch's, operation by operation, in the precision of the moments; every scalar comes in that
precision, so nothing is promoted, and nothing is contracted. SparseAdam's numerator, `update + old exp_avg`, is the
sum that becomes the new exp_avg, and likewise below the root: so the second pass reads the new moments, and only the
roots need scratch memory.

Arrays are flat, and begin at the first row of the block: one compiled version serves every layout. `stride` is the
items from one frame to the next; weight `j` of row `r` is at `r * row_stride + j * column_stride`. Half-precision
numbers (bf16 and fp16) come as their bits: `table` holds the float32 of each, `bf16` says how to round back.

Rows lie far apart, and the processor cannot guess the next one: each loop asks for rows some way ahead of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io.compile import kernel
from dsa.optim.native import prefetch

_AHEAD = 4  # rows; the memory of so many is on its way at once
_LINE_BYTES = 64

Real = NDArray[np.floating[Any]]
Bits = NDArray[np.uint16]
Frames = NDArray[np.int32]
Rows = NDArray[np.int64]


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


@kernel
def update_moments(
    moments: Real,
    stride: int,
    frames: Frames,
    values: Real,
    width: int,
    first: int,
    last: int,
    rate1: Any,
    rate2: Any,
    roots: Real,
) -> None:
    """Move the moments of rows `first` to `last` and leave each new exp_avg_sq in `roots`, side by side."""
    for i in range(first, last):
        if i + _AHEAD < last:
            _ask_for(moments, np.int64(frames[i + _AHEAD]) * stride, 2 * width)
        at = np.int64(frames[i]) * stride
        exp_avg = moments[at : at + width]
        exp_avg_sq = moments[at + width : at + 2 * width]
        _move(exp_avg, exp_avg_sq, values[i * width : (i + 1) * width], rate1, rate2)
        root = roots[i * width : (i + 1) * width]
        for j in range(width):
            root[j] = exp_avg_sq[j]


@kernel
def update_moments_half(
    moments: Real,
    stride: int,
    frames: Frames,
    values: Bits,
    width: int,
    first: int,
    last: int,
    rate1: Any,
    rate2: Any,
    roots: Real,
    table: Real,
) -> None:
    """`update_moments` for a gradient in half precision."""
    grad = np.empty(width, moments.dtype)
    for i in range(first, last):
        if i + _AHEAD < last:
            _ask_for(moments, np.int64(frames[i + _AHEAD]) * stride, 2 * width)
        at = np.int64(frames[i]) * stride
        exp_avg = moments[at : at + width]
        exp_avg_sq = moments[at + width : at + 2 * width]
        _unpack(values, i * width, 1, table, grad)
        _move(exp_avg, exp_avg_sq, grad, rate1, rate2)
        root = roots[i * width : (i + 1) * width]
        for j in range(width):
            root[j] = exp_avg_sq[j]


@kernel
def update_weights(
    moments: Real,
    stride: int,
    frames: Frames,
    weights: Real,
    row_stride: int,
    column_stride: int,
    rows: Rows,
    width: int,
    first: int,
    last: int,
    eps: Any,
    minus_step_size: Any,
    roots: Real,
) -> None:
    """Move the weights of rows `first` to `last` by their moments and the roots."""
    for i in range(first, last):
        if i + _AHEAD < last:
            _ask_for(moments, np.int64(frames[i + _AHEAD]) * stride, width)
            if column_stride == 1:
                _ask_for(weights, rows[i + _AHEAD] * row_stride, width)
        at = np.int64(frames[i]) * stride
        exp_avg = moments[at : at + width]
        root = roots[i * width : (i + 1) * width]
        place = rows[i] * row_stride
        if column_stride == 1:
            weight = weights[place : place + width]
            for j in range(width):
                weight[j] += minus_step_size * (exp_avg[j] / (root[j] + eps))
        else:
            for j in range(width):
                weights[place + j * column_stride] += minus_step_size * (exp_avg[j] / (root[j] + eps))


@kernel
def update_weights_half(
    moments: Real,
    stride: int,
    frames: Frames,
    weights: Bits,
    row_stride: int,
    column_stride: int,
    rows: Rows,
    width: int,
    first: int,
    last: int,
    eps: Any,
    minus_step_size: Any,
    roots: Real,
    table: Real,
    bf16: bool,
) -> None:
    """`update_weights` for a parameter in half precision."""
    weight = np.empty(width, np.float32)
    bits = weight.view(np.uint32)
    for i in range(first, last):
        if i + _AHEAD < last:
            _ask_for(moments, np.int64(frames[i + _AHEAD]) * stride, width)
            if column_stride == 1:
                _ask_for(weights, rows[i + _AHEAD] * row_stride, width)
        at = np.int64(frames[i]) * stride
        exp_avg = moments[at : at + width]
        root = roots[i * width : (i + 1) * width]
        place = rows[i] * row_stride
        _unpack(weights, place, column_stride, table, weight)
        for j in range(width):
            weight[j] += minus_step_size * (exp_avg[j] / (root[j] + eps))
        _pack(bits, bf16, weights, place, column_stride)


@kernel
def update_fast(
    moments: Real,
    stride: int,
    frames: Frames,
    values: Real,
    weights: Real,
    row_stride: int,
    column_stride: int,
    rows: Rows,
    width: int,
    first: int,
    last: int,
    rate1: Any,
    rate2: Any,
    eps: Any,
    minus_step_size: Any,
) -> None:
    """Moments and weights of rows `first` to `last` in one pass, with the processor's own square root."""
    for i in range(first, last):
        if i + _AHEAD < last:
            _ask_for(moments, np.int64(frames[i + _AHEAD]) * stride, 2 * width)
            if column_stride == 1:
                _ask_for(weights, rows[i + _AHEAD] * row_stride, width)
        at = np.int64(frames[i]) * stride
        exp_avg = moments[at : at + width]
        exp_avg_sq = moments[at + width : at + 2 * width]
        _move(exp_avg, exp_avg_sq, values[i * width : (i + 1) * width], rate1, rate2)
        place = rows[i] * row_stride
        if column_stride == 1:
            weight = weights[place : place + width]
            for j in range(width):
                weight[j] += minus_step_size * (exp_avg[j] / (np.sqrt(exp_avg_sq[j]) + eps))
        else:
            for j in range(width):
                change = minus_step_size * (exp_avg[j] / (np.sqrt(exp_avg_sq[j]) + eps))
                weights[place + j * column_stride] += change


@kernel
def update_fast_half(
    moments: Real,
    stride: int,
    frames: Frames,
    values: Bits,
    weights: Bits,
    row_stride: int,
    column_stride: int,
    rows: Rows,
    width: int,
    first: int,
    last: int,
    rate1: Any,
    rate2: Any,
    eps: Any,
    minus_step_size: Any,
    table: Real,
    bf16: bool,
) -> None:
    """`update_fast` for a parameter and gradient in half precision."""
    grad = np.empty(width, np.float32)
    weight = np.empty(width, np.float32)
    bits = weight.view(np.uint32)
    for i in range(first, last):
        if i + _AHEAD < last:
            _ask_for(moments, np.int64(frames[i + _AHEAD]) * stride, 2 * width)
            if column_stride == 1:
                _ask_for(weights, rows[i + _AHEAD] * row_stride, width)
        at = np.int64(frames[i]) * stride
        exp_avg = moments[at : at + width]
        exp_avg_sq = moments[at + width : at + 2 * width]
        _unpack(values, i * width, 1, table, grad)
        _move(exp_avg, exp_avg_sq, grad, rate1, rate2)
        place = rows[i] * row_stride
        _unpack(weights, place, column_stride, table, weight)
        for j in range(width):
            weight[j] += minus_step_size * (exp_avg[j] / (np.sqrt(exp_avg_sq[j]) + eps))
        _pack(bits, bf16, weights, place, column_stride)
