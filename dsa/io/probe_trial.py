"""The measurements of a probe: one temporary file, random and sequential transfers for a share of the time each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from dsa.config import KIB, MIB, IOConfig
from dsa.errors import DeviceError
from dsa.io.backends import open_backend
from dsa.io.backends.base import Backend, Bytes, Extents, File
from dsa.io.backends.direct import cached_pages
from dsa.io.backends.ring import WRITE, Ring
from dsa.io.backends.ringloop import WHOLE
from dsa.io.layout import round_up
from dsa.io.loop import LoopThread
from dsa.io.memory import allocate

FIGURE_BYTES = 4 * KIB
"""Requests of this size are measured at every queue depth and with every backend."""
SIZES_BYTES = (512, KIB, 4 * KIB, 8 * KIB, 16 * KIB, 64 * KIB)
DEPTHS = (1, 4, 16, 64, 128)
FULL_DEPTH = 64
_FILL_BYTES = 4 * MIB
_FILL_SHARE = 0.25  # of the time goes to writing the file
_ROUND_BYTES = 16 * MIB
_ROUND_SHARE = 0.3  # of a measurement's time: rounds grow until one takes so long
_STALL_S = 60.0

Round = Callable[[int], Awaitable[None]]


@dataclass(frozen=True)
class Rate:
    """So many random requests a second.

    Args:
        what: "read" or "write"; writes are those of the backend that can keep several in flight.
        size_bytes: of a record; where direct I/O needs more, whole units were moved.
    """

    backend: str
    what: str
    size_bytes: int
    queue_depth: int
    per_s: float


def free_bytes(directory: Path) -> int:
    """Space that an ordinary user can still fill."""
    return shutil.disk_usage(directory).free


class Trial:
    """A context in which the trial file exists.

    Args:
        working: backends that work here, best first.
        seconds: for all measurements together.
    """

    def __init__(self, directory: Path, file_bytes: int, working: list[str], seconds: float) -> None:
        self.rates: list[Rate] = []
        self.sequential_read = 0.0
        self.sequential_write = 0.0
        self.cached = False
        self.file_bytes = file_bytes
        self._directory = directory
        self._working = working
        self._seconds = seconds
        self._random = np.random.default_rng(0)
        self._path = Path()

    def __enter__(self) -> Trial:
        try:
            fd, name = tempfile.mkstemp(prefix=".dsa-probe-", dir=self._directory)
        except OSError as error:
            raise DeviceError(error.errno or 0, "making a file for the probe", self._directory) from error
        os.close(fd)
        self._path = Path(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def run(self) -> None:
        """Measure everything.

        Raises:
            DeviceError: the device failed.
        """
        # On a thread of its own: the caller may be inside an event loop, as in a notebook.
        loop = LoopThread("dsa-probe", use_uvloop=True)
        try:
            loop.submit(self._run()).result()
        finally:
            loop.stop(_STALL_S)

    async def _run(self) -> None:
        first, *others = self._working
        await self._fill(first)
        reads = [(first, size, FULL_DEPTH) for size in SIZES_BYTES]
        reads += [(first, FIGURE_BYTES, depth) for depth in DEPTHS if depth != FULL_DEPTH]
        reads += [(name, FIGURE_BYTES, depth) for name in others for depth in (1, FULL_DEPTH)]
        # Only the ring takes several writes in one call; the other backends write one after the other.
        depth = FULL_DEPTH if first == "uring" else 1
        writes = [(size, depth) for size in SIZES_BYTES]
        writes += [(FIGURE_BYTES, 1)] if depth > 1 else []
        share_s = self._seconds * (1 - _FILL_SHARE) / (len(reads) + len(writes) + 1)
        for name, size, depth in reads:
            per_s = await self._random_reads(name, size, depth, share_s)
            self.rates.append(Rate(name, "read", size, depth, per_s))
        self.sequential_read = await self._sequential_reads(first, share_s)
        for size, depth in writes:
            per_s = await self._random_writes(first, size, depth, share_s)
            self.rates.append(Rate(first, "write", size, depth, per_s))

    # The file.

    async def _fill(self, name: str) -> None:
        """Write the file whole, as far as the time allows, and sync it: a hole would be read without the device."""
        backend = open_backend(name, IOConfig())
        try:
            file = backend.open(self._path, direct=True)
            data: list[Bytes] = [allocate(_FILL_BYTES, np.uint8) for _ in range(2)]
            for buffer in data:
                buffer[:] = self._random.integers(0, 256, _FILL_BYTES, np.uint8)  # nothing that compresses
            began, at = time.perf_counter(), 0
            while at < self.file_bytes and (at == 0 or time.perf_counter() - began < _FILL_SHARE * self._seconds):
                sizes = [min(_FILL_BYTES, self.file_bytes - at), min(_FILL_BYTES, self.file_bytes - at - _FILL_BYTES)]
                places = [(at, sizes[0]), (at + _FILL_BYTES, sizes[1])]
                await asyncio.gather(
                    *(backend.write(file, o, b[:n]) for (o, n), b in zip(places, data, strict=True) if n > 0)
                )
                at += sum(size for size in sizes if size > 0)
            await backend.sync(file)
            self.sequential_write = at / (time.perf_counter() - began)
            self.file_bytes = at
            backend.close(file)
        finally:
            backend.shut_down(_STALL_S)
        self._forget_pages()
        self.cached = self._pages_cached()

    def _forget_pages(self) -> None:
        """Have the page cache drop the file."""
        if hasattr(os, "posix_fadvise"):
            fd = os.open(self._path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def _pages_cached(self) -> bool:
        if not hasattr(os, "posix_fadvise"):
            return True
        fd = os.open(self._path, os.O_RDONLY)
        try:
            return cached_pages(fd, self.file_bytes) > 0
        except OSError:
            return True  # the system does not say
        finally:
            os.close(fd)

    # Rounds.

    async def _rate(self, share_s: float, depth: int, most: int, round_of: Round, before: Callable[[], None]) -> float:
        """Rounds of growing numbers of requests until the time is used up; requests a second in them."""
        count, done, spent = min(4 * depth, most), 0, 0.0
        while done == 0 or spent < share_s:
            before()
            began = time.perf_counter()
            await round_of(count)
            took = time.perf_counter() - began
            done += count
            spent += took
            if took < _ROUND_SHARE * share_s:
                count = min(2 * count, most)
        return done / spent

    def _places(self, count: int, length: int) -> NDArray[np.int64]:
        """Different places of the file, whole units of the length, in random order."""
        return self._random.choice(self.file_bytes // length, count, replace=False).astype(np.int64) * length

    async def _random_reads(self, name: str, size: int, depth: int, share_s: float) -> float:
        async def measure(backend: Backend, file: File) -> float:
            length, most = self._length(size, file)
            buffer = allocate(most * length, np.uint8)

            async def read(count: int) -> None:
                at = np.arange(count, dtype=np.int64) * length
                extents = Extents(self._places(count, length), np.full(count, length, np.int64), at)
                await backend.read(file, extents, buffer)

            return await self._rate(share_s, depth, most, read, self._before(file))

        return await self._with_file(name, depth, measure)

    async def _sequential_reads(self, name: str, share_s: float) -> float:
        async def measure(backend: Backend, file: File) -> float:
            length = MIB
            most = min(_ROUND_BYTES // length, self.file_bytes // length)
            buffer, next_place = allocate(most * length, np.uint8), 0

            async def read(count: int) -> None:
                nonlocal next_place
                at = np.arange(count, dtype=np.int64) * length
                places = (next_place + at) % (self.file_bytes // length * length)
                next_place = int(places[-1]) + length
                await backend.read(file, Extents(places, np.full(count, length, np.int64), at), buffer)

            return length * await self._rate(share_s, FULL_DEPTH, most, read, self._before(file))

        return await self._with_file(name, FULL_DEPTH, measure)

    async def _random_writes(self, name: str, size: int, depth: int, share_s: float) -> float:
        async def measure(backend: Backend, file: File) -> float:
            length, most = self._length(size, file)
            buffer = allocate(most * length, np.uint8)
            buffer[:] = self._random.integers(0, 256, len(buffer), np.uint8)
            ring = Ring(depth, max(depth // 4, 1), _STALL_S) if name == "uring" else None

            async def write(count: int) -> None:
                places = self._places(count, length)
                at = np.arange(count, dtype=np.int64) * length
                if ring is not None:
                    sizes = np.full(count, length, np.int64)
                    outcome = ring.transfer(WRITE, file.fd, buffer, at, places, sizes, file.alignment)
                    if outcome.status != WHOLE:
                        place = int(places[outcome.request])
                        raise DeviceError(outcome.errno, "a probe's write", self._path, place, length)
                else:
                    for place, start in zip(places.tolist(), at.tolist(), strict=True):
                        await backend.write(file, place, buffer[start : start + length])
                if file.alignment == 1:
                    await backend.sync(file)  # else only the page cache was written

            try:
                return await self._rate(share_s, depth, most, write, lambda: None)
            finally:
                if ring is not None:
                    ring.close()

        return await self._with_file(name, depth, measure)

    def _length(self, size: int, file: File) -> tuple[int, int]:
        """What a request of the size moves in this file, and how many of them a round has at most."""
        length = round_up(size, file.alignment)
        return length, max(1, min(_ROUND_BYTES, self.file_bytes) // length)

    def _before(self, file: File) -> Callable[[], None]:
        return self._forget_pages if file.alignment == 1 else lambda: None

    async def _with_file(self, name: str, depth: int, measure: Callable[[Backend, File], Awaitable[float]]) -> float:
        backend = open_backend(name, IOConfig(queue_depth=depth))
        try:
            file = backend.open(self._path, direct=True)
            try:
                return await measure(backend, file)
            finally:
                backend.close(file)
        finally:
            backend.shut_down(_STALL_S)
