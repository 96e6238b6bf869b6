"""The `threads` backend: I/O threads that each run one long loop over pread or pwrite, outside the GIL.

A transfer costs two hand-overs of the GIL a thread, whatever the number of extents: that is why a read is cut into
parts of many extents each, and why the last part to end also runs `then`.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from dsa.config import IOConfig
from dsa.errors import ConfigError, DeviceError
from dsa.io.backends.base import Bytes, File
from dsa.io.backends.direct import DirectFiles, check_alignment
from dsa.io.backends.iothreads import IOThreads, ended
from dsa.io.backends.posix_files import LocalFiles, descriptor
from dsa.io.compile import kernel
from dsa.io.extents import Extents, check_placement

_MOST_READ_THREADS = 32
# What a request costs beside its bytes, in bytes: so that parts of small extents and of long ones take equally long.
_REQUEST_COST_BYTES = 8192
# macOS refuses transfers of 2 GiB and more, Linux shortens them.
_MOST_AT_ONCE_BYTES = 1 << 30
# So often is a transfer repeated that stops short of the next aligned offset.
_TRIES = 64
_EINTR = errno.EINTR


@dataclass(frozen=True)
class SystemCalls:
    """Addresses of the C functions that move bytes; tests put failing ones in their place.

    Args:
        pread, pwrite: `ssize_t (int, void *, size_t, off_t)`.
        errno_location: `int *(void)`, where those leave the error number of the calling thread.
    """

    pread: int
    pwrite: int
    errno_location: int

    @classmethod
    def of_libc(cls) -> SystemCalls:
        """The system's own.

        Raises:
            ConfigError: it has none of them, or they cannot address a large file.
        """
        if os.name != "posix" or sys.maxsize < 2**63 - 1:
            raise ConfigError(f"it needs a 64-bit POSIX system with pread, and this is {sys.platform}")
        libc = ctypes.CDLL(None)
        try:
            where = "__error" if sys.platform == "darwin" else "__errno_location"
            found = [ctypes.cast(libc[name], ctypes.c_void_p).value for name in ("pread", "pwrite", where)]
        except AttributeError as error:
            raise ConfigError(f"the C library lacks a function: {error}") from error
        return cls(*[address or 0 for address in found])


def _define_call(context: Any, transfer: Any, errno_at: Any, fd: Any, memory: Any, nbytes: Any, offset: Any) -> Any:
    """Call the function at address `transfer`; what it returns, or the negative error number."""
    word, number = ir.IntType(64), ir.IntType(32)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        transfer, errno_at, fd, memory, nbytes, offset = args
        call = ir.FunctionType(word, [number, word, word, word]).as_pointer()
        result = builder.call(builder.inttoptr(transfer, call), [builder.trunc(fd, number), memory, nbytes, offset])
        # Read right behind the call, in this thread, before anything else can change it.
        where = ir.FunctionType(number.as_pointer(), []).as_pointer()
        failure = builder.sext(builder.load(builder.call(builder.inttoptr(errno_at, where), [])), word)
        return builder.select(builder.icmp_signed("<", result, ir.Constant(word, 0)), builder.neg(failure), result)

    return types.int64(*[types.int64] * 6), generate


_call: Callable[..., int] = intrinsic(_define_call)


@kernel
def _move(
    transfer: int,
    errno_at: int,
    fd: int,
    memory: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    at: NDArray[np.int64],
    alignment: int,
) -> tuple[int, int, int]:
    """Move every extent whole: (-1, 0, 0), or the index of the first that failed, the errno and the bytes moved of it.

    A short transfer is continued from an aligned offset. The errno is 0 where the system moved nothing, or never
    reaches the next such offset, and reported nothing: at the end of the file.
    """
    for i in range(len(offsets)):
        done, tries = 0, 0
        while done < lengths[i]:
            nbytes = min(lengths[i] - done, _MOST_AT_ONCE_BYTES)
            result = _call(transfer, errno_at, fd, memory + at[i] + done, nbytes, offsets[i] + done)
            if result > 0:
                reached = done + result
                if reached < lengths[i]:
                    reached -= reached % alignment
                tries = 0 if reached > done else tries + 1
                done = reached
                if tries == _TRIES:
                    return i, 0, done
            elif result != -_EINTR:
                return i, -result, done
    return -1, 0, 0


class ThreadsBackend(LocalFiles):
    """Reads on several I/O threads, writes on one of their own, so that no read queues behind a write.

    Args:
        config: `queue_depth` bounds the number of reading threads (32 at most).
        calls: the functions that move bytes; None: the system's.

    Raises:
        ConfigError: the platform has no pread.
    """

    name: ClassVar[str] = "threads"

    def __init__(self, config: IOConfig, *, calls: SystemCalls | None = None) -> None:
        self._calls = calls or SystemCalls.of_libc()
        none = np.empty(0, np.int64)
        _move(self._calls.pread, self._calls.errno_location, -1, 0, none, none, none, 1)  # compiles or loads
        self._direct = DirectFiles()
        self._readers = IOThreads("dsa-read", min(config.queue_depth, _MOST_READ_THREADS))
        self._writer = IOThreads("dsa-write", 2)
        super().__init__(self._readers, self._writer)

    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        file = super().open(path, create=create, writable=writable, direct=direct)
        if direct:
            self._direct.turn(file)
        return file

    async def read(self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None) -> None:
        memory = _address(buffer)
        if not buffer.flags.writeable:
            raise ValueError("the buffer to read into is read-only")
        descriptor(file, "read")
        wanted = check_placement(extents, buffer.nbytes)
        check_alignment(file, wanted, buffer)
        self.counters.read_requests += len(wanted)
        self.counters.read_bytes += int(wanted.lengths.sum())
        parts = _cut(wanted, len(self._readers))
        reading = _Reading(self._calls, file, memory, buffer, len(parts), then)
        for i, part in enumerate(parts):
            try:
                self._readers.submit(reading.run, part)
            except BaseException as error:
                reading.part_ended(error, len(parts) - i)
                break
        await ended(reading.done)

    async def write(self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None) -> None:
        memory = _address(buffer)
        if offset < 0:
            raise ValueError(f"a file has no byte {offset}")
        descriptor(file, "write")
        extents = Extents(*(np.array([value], np.int64) for value in (offset, buffer.nbytes, 0)))
        check_alignment(file, extents, buffer)
        if buffer.nbytes:
            self.counters.write_requests += 1
            self.counters.write_bytes += buffer.nbytes
        await ended(self._writer.submit(self._write, file, extents, buffer, memory, before))

    def _write(
        self, file: File, extents: Extents, buffer: Bytes, memory: int, before: Callable[[], None] | None
    ) -> None:
        if before is not None:
            before()
        _move_extents(self._calls.pwrite, self._calls.errno_location, "write", file, memory, extents)


class _Reading:
    """One read, cut into parts that run in any threads; `done` follows the last of them and `then`."""

    def __init__(
        self,
        calls: SystemCalls,
        file: File,
        memory: int,
        buffer: Bytes,
        parts: int,
        then: Callable[[], None] | None,
    ) -> None:
        self.done: Future[None] = Future()
        self._calls = calls
        self._file = file
        self._memory = memory
        self._buffer = buffer  # kept alive until the last part has ended
        self._left = parts
        self._then = then
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def run(self, extents: Extents) -> None:
        failure: BaseException | None = None
        try:
            if self._failure is None:  # after a failure the rest would be read for nothing
                _move_extents(self._calls.pread, self._calls.errno_location, "read", self._file, self._memory, extents)
        except BaseException as error:
            failure = error
        self.part_ended(failure)

    def part_ended(self, failure: BaseException | None, parts: int = 1) -> None:
        """Count parts off; the last one runs `then` and reports the first failure."""
        with self._lock:
            self._left -= parts
            last = self._left == 0
            self._failure = self._failure or failure
        if not last:
            return
        try:
            if self._failure is None and self._then is not None:
                self._then()
        except BaseException as error:
            self._failure = error
        if self._failure is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(self._failure)


def _move_extents(transfer: int, errno_at: int, what: str, file: File, memory: int, extents: Extents) -> None:
    failed, number, done = _move(
        transfer, errno_at, file.fd, memory, extents.offsets, extents.lengths, extents.at, file.alignment
    )
    if failed >= 0:
        if not number:
            what = f"{what} (the file ends there)" if what == "read" else f"{what} (nothing was taken)"
        place = int(extents.offsets[failed]) + done
        raise DeviceError(number, what, file.path, place, int(extents.lengths[failed]) - done)


def _address(buffer: Bytes) -> int:
    if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
        raise ValueError(f"a buffer must be contiguous bytes, not {buffer.dtype} with strides {buffer.strides}")
    return int(buffer.ctypes.data)


def _cut(extents: Extents, threads: int) -> list[Extents]:
    """Parts that take about equally long, at least one; two extents or fewer stay together."""
    parts = min(threads, (len(extents) + 1) // 2)
    if parts <= 1:
        return [extents]
    cost = np.cumsum(extents.lengths + _REQUEST_COST_BYTES)
    bounds = np.searchsorted(cost, cost[-1] * np.arange(1, parts) // parts, side="right")
    edges = np.unique([0, *bounds.tolist(), len(extents)]).tolist()
    return [
        Extents(extents.offsets[low:high], extents.lengths[low:high], extents.at[low:high])
        for low, high in itertools.pairwise(edges)
    ]
