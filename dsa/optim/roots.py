"""Which square root torch's own is on this CPU: found once a process and dtype, by comparing bits.

Where torch is built with MKL, its vectorised root is that of MKL's vector mathematics, which is not correctly rounded.
The same function can be called from compiled code, a few rows at a time, while they are in the processor's cache.
Elsewhere torch's root is the processor's. Where it is neither, only torch itself can take it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# What torch calls it with: high accuracy, denormal numbers as they are, no errors.
_MODE = 0x2 | 0x140000 | 0x100
_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_NAMES = {"float32": ("vmsSqrt_64", "vmsSqrt"), "float64": ("vmdSqrt_64", "vmdSqrt")}
_SERIAL_ELEMENTS = 2032  # torch gives the square roots of 2048 and more numbers to its threads
_RANDOM = 1 << 16
_log = logging.getLogger("dsa")


@dataclass(frozen=True)
class Root:
    """One way to take square roots.

    Args:
        name: "vml" (a function of MKL), "hardware" (the processor's, correctly rounded) or "torch".
        address: of the function; 0 where there is none.
        mode: what the function is called with besides.
    """

    name: str
    address: int = 0
    mode: int = 0


HARDWARE = Root("hardware")
TORCH = Root("torch")


@functools.cache
def root_of(real: Any) -> Root:
    """The root that gives torch's bits.

    Args:
        real: numpy type, float32 or float64.
    """
    numbers = _numbers(np.dtype(real))
    expected = _by_torch(numbers)
    found = next(
        (root for root in (*_functions(np.dtype(real).name), HARDWARE) if _same(root, numbers, expected)), TORCH
    )
    _log.info("torch's square root of %s is: %s", np.dtype(real).name, found.name)
    return found


def take_roots(squares: torch.Tensor, threads: int) -> None:
    """Torch's own square root in place, in one call; with one thread, in the calling one."""
    if threads > 1:
        squares.sqrt_()
    else:
        torch._foreach_sqrt_(torch.split(squares, _SERIAL_ELEMENTS))


def _functions(dtype: str) -> list[Root]:
    """MKL's functions in the library that torch has loaded, or in those that it needs."""
    if not sys.platform.startswith("linux"):
        return []
    try:
        path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return []
    found = [getattr(library, name, None) for name in _NAMES[dtype]]
    return [Root("vml", ctypes.cast(each, ctypes.c_void_p).value or 0, _MODE) for each in found if each is not None]


def _numbers(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Numbers of all magnitudes, those at the edges among them."""
    draws = np.random.default_rng(0)
    limits = np.finfo(dtype)
    powers = draws.uniform(limits.minexp - limits.nmant, limits.maxexp, _RANDOM // 2)
    edges = [0, -0.0, limits.tiny, limits.tiny / 3, limits.smallest_subnormal, limits.max, np.inf, np.nan, -1, -np.inf]
    with np.errstate(over="ignore", under="ignore"):
        spread = np.exp2(powers).astype(dtype)
    return np.concatenate([np.array(edges, dtype), draws.random(_RANDOM // 2, dtype), spread])


def _lengths(count: int) -> list[slice]:
    """The numbers in pieces of every length up to some hundred, and then long ones: each with another tail."""
    found, first, length = [], 0, 1
    while first < count:
        found.append(slice(first, first + length))
        first += length
        length = length + 1 if length < 200 else _SERIAL_ELEMENTS - 7
    return found


def _by_torch(numbers: NDArray[Any]) -> NDArray[Any]:
    roots = torch.from_numpy(numbers.copy())
    for piece in _lengths(len(numbers)):
        roots[piece].sqrt_()
    return roots.numpy()


def _same(root: Root, numbers: NDArray[Any], expected: NDArray[Any]) -> bool:
    roots = numbers.copy()
    if root.address:
        function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(
            root.address
        )
        for piece in _lengths(len(roots)):
            some = roots[piece]
            function(len(some), some.ctypes.data, some.ctypes.data, root.mode)
    else:
        with np.errstate(invalid="ignore"):
            np.sqrt(roots, out=roots)
    bits = f"u{roots.itemsize}"
    agree = (roots.view(bits) == expected.view(bits)) | (np.isnan(roots) & np.isnan(expected))
    return bool(agree.all())
