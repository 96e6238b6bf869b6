"""The `uring` backend: some io_urings for reads and some for writes, each in an I/O thread of its own.

A read of any number of extents is one hand-over to the thread and one call outside the GIL, and `then` follows in the
same thread; so is a write.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np

from dsa.config import MIB, IOConfig
from dsa.errors import ClosedError, ConfigError, DeviceError, ForkedError
from dsa.io.backends.base import Bytes, File
from dsa.io.backends.direct import DirectFiles, check_alignment
from dsa.io.backends.iothreads import IOThreads, ended
from dsa.io.backends.posix_files import LocalFiles, descriptor
from dsa.io.backends.ring import READ, WRITE, Ring
from dsa.io.backends.ringloop import BROKEN, STALLED, WHOLE
from dsa.io.extents import Extents, check_placement

# A segment is one request; only longer writes are cut.
_MOST_WRITE_BYTES = 8 * MIB
# One system call submits and collects so many requests: the device is kept busy by those that stay in flight.
_WAKE_SHARE = 2
# Rings with a thread each: while one's records are checked and copied, or a segment is filled from frames, another
# keeps the device busy; and a few long reads of a cleaning need not wait behind many short ones.
_READERS, _WRITERS = 3, 2


class UringBackend(LocalFiles):
    """Files opened with `direct=True` bypass the page cache where their file system really does that.

    A device that answers nothing for `stall_timeout_s` is a `DeviceError`. If it still holds requests then, which
    nobody can take back, that ring is given up: its later transfers fail at once, and the memory of the one that
    failed must not be used again (the backend keeps it alive).

    Args:
        config: `queue_depth` requests are in flight at most in each ring, three for reads and two for writes;
            `stall_timeout_s`.

    Raises:
        ConfigError: io_uring cannot be used here; the message says why.
    """

    name: ClassVar[str] = "uring"

    def __init__(self, config: IOConfig) -> None:
        self._direct = DirectFiles()
        self._readers = [_RingThread("dsa-uring-read", READ, config) for _ in range(_READERS)]
        self._writers = [_RingThread("dsa-uring-write", WRITE, config) for _ in range(_WRITERS)]
        super().__init__(*(each.threads for each in (*self._readers, *self._writers)))
        try:
            for each in (*self._readers, *self._writers):
                each.start()
        except OSError as error:
            self.shut_down(config.stall_timeout_s)
            raise ConfigError(f"it needs io_uring: {error.strerror}") from error

    @property
    def rings(self) -> tuple[Ring, Ring]:
        """The first ring for reads and the first one for writes; their `faults` are the test hook."""
        reads, writes = self._readers[0].ring, self._writers[0].ring
        if reads is None or writes is None:
            raise ClosedError("the rings were never made")
        return reads, writes

    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        file = super().open(path, create=create, writable=writable, direct=direct)
        if direct:
            self._direct.turn(file)
        return file

    async def read(self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None) -> None:
        await ended(self.begin_read(file, extents, buffer, then))

    async def write(self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None) -> None:
        await ended(self.begin_write(file, offset, buffer, before))

    def begin_read(
        self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None
    ) -> asyncio.Future[None]:
        _check_buffer(buffer)
        descriptor(file, "read")
        if not buffer.flags.writeable:
            raise ValueError("the buffer to read into is read-only")
        wanted = check_placement(extents, buffer.nbytes)
        check_alignment(file, wanted, buffer)
        self.counters.read_requests += len(wanted)
        self.counters.read_bytes += int(wanted.lengths.sum())
        return _least_busy(self._readers).submit(file, wanted, buffer, None, then)

    def begin_write(
        self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None
    ) -> asyncio.Future[None]:
        _check_buffer(buffer)
        descriptor(file, "write")
        if offset < 0:
            raise ValueError(f"a file has no byte {offset}")
        at = np.arange(0, buffer.nbytes, _MOST_WRITE_BYTES, dtype=np.int64)
        extents = Extents(at + offset, np.minimum(buffer.nbytes - at, _MOST_WRITE_BYTES), at)
        check_alignment(file, extents, buffer)
        self.counters.write_requests += len(extents)
        self.counters.write_bytes += buffer.nbytes
        return _least_busy(self._writers).submit(file, extents, buffer, before, None)

    def shut_down(self, timeout_s: float) -> None:
        for each in (*self._readers, *self._writers):
            each.close()
        super().shut_down(timeout_s)


def _least_busy(choices: list[_RingThread]) -> _RingThread:
    """The one with the fewest requests to make, the first one of several."""
    return min(choices, key=lambda each: each.requests)


def _check_buffer(buffer: Bytes) -> None:
    if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
        raise ValueError(f"a buffer must be contiguous bytes, not {buffer.dtype} with strides {buffer.strides}")


class _RingThread:
    """A thread, and the ring that it made and alone uses."""

    def __init__(self, name: str, op: int, config: IOConfig) -> None:
        self.threads = IOThreads(name, 1)
        self._what = "read" if op == READ else "write"
        self._op = op
        self._config = config
        self.ring: Ring | None = None
        self.requests = 0  # of the transfers submitted and not ended; counted on the loop

    def start(self) -> None:
        """Make the ring, and move some bytes with it.

        Raises:
            OSError: it cannot be made, or does not work.
        """
        self.threads.submit(self._start).result()

    def _start(self) -> None:
        depth = self._config.queue_depth
        wake = max(depth // _WAKE_SHARE, 1)
        self.ring = ring = Ring(depth, wake, self._config.stall_timeout_s)
        ends = os.pipe()
        try:
            os.write(ends[1], b"12345678")
            place = np.zeros(1, np.int64)
            outcome = ring.transfer(READ, ends[0], np.zeros(8, np.uint8), place, place, place + 8, 1)
        finally:
            for fd in ends:
                os.close(fd)
        if outcome.status != WHOLE:
            number = outcome.errno
            raise OSError(number, f"the trial of io_uring_enter failed: {os.strerror(number)} (errno {number})")

    def submit(
        self,
        file: File,
        extents: Extents,
        buffer: Bytes,
        before: Callable[[], None] | None,
        then: Callable[[], None] | None,
    ) -> asyncio.Future[None]:
        """Move the extents in the ring's thread, `before` and `then` in the same one."""
        work = self.threads.start(self._move, file, extents, buffer, before, then)
        count = max(len(extents), 1)
        self.requests += count
        work.add_done_callback(functools.partial(self._ended, count))
        return work

    def _ended(self, requests: int, work: asyncio.Future[None]) -> None:
        self.requests -= requests

    def _move(
        self,
        file: File,
        extents: Extents,
        buffer: Bytes,
        before: Callable[[], None] | None,
        then: Callable[[], None] | None,
    ) -> None:
        ring = self.ring
        if ring is None or ring.closed:
            raise DeviceError(0, f"{self._what} (not tried: an earlier one is stuck in the device)", file.path)
        if before is not None:
            before()
        outcome = ring.transfer(self._op, file.fd, buffer, extents.at, extents.offsets, extents.lengths, file.alignment)
        if outcome.status != WHOLE:
            number, what = outcome.errno, self._what
            if outcome.status == STALLED:
                what += f" (nothing answered for {self._config.stall_timeout_s:g} s)"
            elif outcome.status == BROKEN:
                what += " (by io_uring_enter)"
            elif not number:
                what += " (the file ends there)" if self._op == READ else " (nothing was taken)"
            start = int(extents.offsets[outcome.request])
            moved = outcome.moved_bytes
            raise DeviceError(number, what, file.path, start + moved, int(extents.lengths[outcome.request]) - moved)
        if then is not None:
            then()

    def close(self) -> None:
        """Close the ring, in its thread and after what was submitted."""
        with contextlib.suppress(ClosedError, ForkedError):
            self.threads.submit(self._close)

    def _close(self) -> None:
        if self.ring is not None:
            self.ring.close()
