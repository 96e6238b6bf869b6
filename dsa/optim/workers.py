"""Nogil loops over rows, on all cores that torch may use, for one release of the GIL.

Torch's OpenMP threads spin for milliseconds after each of its parallel operations, and a Python thread that is woken
beside them, or beside a busy interpreter, waits as long. So a loop is not given to threads of our own where that can be
helped, but run as a parallel region of the OpenMP runtime that torch has loaded, by those same threads, which need no
GIL. Where no such runtime is found (macOS, Windows), Python threads run the same loop.

A loop is a `region`: a compiled function of one address, that of an int64 array, its cells. It claims parts of the
rows until none is left, so any number of threads may run it, and a slow one is left less to do.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from numba import types
from numpy.typing import NDArray

from dsa.io.compile import callback
from dsa.io.native import address_of_own

PART_ELEMENTS = 1 << 13  # numbers in one claimed part of the rows
PARALLEL_ELEMENTS = 1 << 16  # fewer than these do not pay for a second core

_PID = os.getpid()
_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_Run = Callable[[int, int, int], None]


class Region:
    """A compiled region: its address, and that as a function of C, which gives the GIL back while it runs."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled  # owns the code
        self.address: int = compiled.address
        self.call: Callable[[int], None] = _PROTOTYPE(self.address)


def region(function: Callable[[int], None]) -> Region:
    """Compile a region now. Cached on disk where that is possible."""
    return Region(callback(function, types.void(types.int64)))


def threads_for(elements: int) -> int:
    """The threads that work on so many numbers: all that torch may use, or this one alone.

    A forked child works alone: OpenMP's threads stayed in its parent, and their runtime does not know it.
    """
    return torch.get_num_threads() if elements >= PARALLEL_ELEMENTS and os.getpid() == _PID else 1


def run(loop: Region, cells: NDArray[Any], elements: int) -> None:
    """Run a region over its cells, in as many threads as torch may use and as pay; returns when all have ended.

    Args:
        loop: a compiled region.
        cells: what it works on; the first is its claim counter, 0.
        elements: how many numbers there are to work on.
    """
    workers = threads_for(elements)
    address = address_of_own(cells)
    if workers == 1:
        loop.call(address)
    else:
        _run_parallel(loop.address, address, workers)


def _call(region_address: int, cells_address: int) -> None:
    _PROTOTYPE(region_address)(cells_address)  # ctypes gives the GIL back meanwhile


def _openmp() -> _Run | None:
    """A parallel region of the OpenMP runtime that torch has loaded; the entry point is one that GNU's, Intel's and
    LLVM's runtimes share."""
    if not sys.platform.startswith("linux"):
        return None
    for name, mode in ((None, ctypes.DEFAULT_MODE), ("libgomp.so.1", os.RTLD_NOLOAD | os.RTLD_LAZY)):
        try:
            parallel = ctypes.CDLL(name, mode=mode).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.restype = None
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]

        def run_parallel(region_address: int, cells_address: int, workers: int, parallel: Any = parallel) -> None:
            parallel(region_address, cells_address, workers, 0)

        return run_parallel
    return None


class Crew:
    """Python threads that run regions beside the calling one; started when first needed."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._size = 0
        self._lock = threading.Lock()

    def run(self, region_address: int, cells_address: int, workers: int) -> None:
        """Run a region in `workers` threads, this one included. Returns only when all have ended, also when the
        caller is interrupted: nothing is written behind its back."""
        with self._lock:
            while self._size < workers - 1:
                name = f"dsa-kernel-{self._size}"
                threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()
                self._size += 1
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(workers - 1):
            self._calls.put((region_address, cells_address, ended))
        _call(region_address, cells_address)
        interrupt: BaseException | None = None
        pending = workers - 1
        while pending:
            try:
                ended.get()
                pending -= 1
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    while True:
        region_address, cells_address, ended = calls.get()
        _call(region_address, cells_address)
        ended.put(None)


_run_parallel: _Run = _openmp() or Crew().run
