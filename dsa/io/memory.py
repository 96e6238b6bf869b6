"""Page-aligned memory for frames, I/O buffers and indexes, which forked children do not inherit.

Without MADV_DONTFORK a forked DataLoader worker would make training copy every cache page that it writes. In the
child the range is a hole, which the child's own allocations may fill: so the parent's memory is unmapped only by the
process that mapped it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
_MADV_DONTFORK, _MADV_HUGEPAGE = 10, 14
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """An anonymous private mapping, exposed through the array interface; unmapped when the last view is gone."""

    def __init__(self, nbytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        huge = sys.platform == "linux" and nbytes >= HUGE_PAGE_BYTES
        mapped = nbytes + HUGE_PAGE_BYTES if huge else nbytes
        start = libc.mmap(None, mapped, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if start == _MAP_FAILED or start is None:
            raise MemoryError(f"no {nbytes} bytes of memory: {os.strerror(ctypes.get_errno())}")
        address = start
        if sys.platform == "linux":
            libc.madvise(start, mapped, _MADV_DONTFORK)
        if huge:
            # The device is handed few large pieces instead of many small ones, and random frames miss no table of
            # pages. What lies before the first whole huge page is never touched. Where huge pages are off, nothing
            # changes.
            address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            libc.madvise(address, nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, _MADV_HUGEPAGE)
        self.__array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        weakref.finalize(self, _unmap, libc, start, mapped, os.getpid()).atexit = False


def _unmap(libc: ctypes.CDLL, address: int, nbytes: int, owner: int) -> None:
    if os.getpid() == owner:
        libc.munmap(address, nbytes)


def allocate(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """A zeroed, page-aligned array that forked children do not inherit (Linux; elsewhere they do).

    Pages are not touched yet: use `touch` where a page fault during training would cost.

    Raises:
        MemoryError: the system has no such range to give.
    """
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    nbytes = max(count * kind.itemsize, 1)
    rounded = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    if os.name == "posix":
        raw: NDArray[np.uint8] = np.asarray(_Mapping(rounded))
    else:
        slack = np.zeros(rounded + PAGE_BYTES, np.uint8)
        start = -slack.ctypes.data % PAGE_BYTES
        raw = slack[start : start + rounded]
    return raw[: count * kind.itemsize].view(kind).reshape(shape)


def touch(array: NDArray[Any]) -> None:
    """Write to every page of `array` (it must still be all zero), so that no later access faults."""
    raw = array.reshape(-1).view(np.uint8)
    raw[::PAGE_BYTES] = 0
