"""A backend that behaves as a given device: another one moves the bytes, the model says when each request is over.

The other backend must be the faster one; where it is not, its time counts. `then` runs, and a call returns, when both
are through: so whoever waits for rows waits as long as it would on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from dsa.io.backends.base import Backend, Bytes, File
from dsa.io.backends.clocks import Clock, LoopClock
from dsa.io.backends.device_models import DeviceModel
from dsa.io.backends.device_queues import DeviceTime, Places, queue_of
from dsa.io.extents import Extents, check_placement

_ROOM_PER_FILE_BYTES = 1 << 36
_NONE = np.empty(0, np.int64)


class EmulatedBackend(Backend):
    """`inner`, as slow as the model.

    Files lie on the device one behind the other, in the order in which they are first used. What only changes names or
    lengths takes no time.

    Args:
        inner: moves the bytes; shut down together with this one.
        model: the device.
        seed: of everything random in it; the same calls at the same times then take the same time.
        clock: the running loop's by default (see clocks.py for virtual time).
    """

    name: ClassVar[str] = "emulated"

    def __init__(self, inner: Backend, model: DeviceModel, *, seed: int = 0, clock: Clock | None = None) -> None:
        super().__init__(inner.counters)
        self.inner = inner
        self.model = model
        self._clock = clock or LoopClock()
        self._queue = queue_of(model, seed)
        self._places: dict[Path, int] = {}

    @property
    def time(self) -> DeviceTime:
        """What the device spent its time on."""
        return self._queue.time

    def _place(self, path: Path) -> int:
        return self._places.setdefault(path, len(self._places) * _ROOM_PER_FILE_BYTES)

    def _submit(self, write: bool, path: Path, offsets: Places, lengths: Places) -> int:
        return self._queue.submit(self._clock.now(), write, offsets + self._place(path), lengths)

    async def _until_over(self, ticket: int) -> None:
        while not self._queue.over(ticket, self._clock.now()):
            await self._clock.sleep_until(self._queue.expected_s(ticket))

    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        return self.inner.open(path, create=create, writable=writable, direct=direct)

    def close(self, file: File) -> None:
        self.inner.close(file)

    async def read(self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None) -> None:
        wanted = check_placement(extents, buffer.nbytes)
        ticket = self._submit(False, file.path, wanted.offsets, wanted.lengths)
        try:
            with self._clock.holding():
                await self.inner.read(file, extents, buffer)
            await self._until_over(ticket)
        finally:
            self._queue.forget(ticket)
        if then is not None:
            with self._clock.holding():  # in the inner backend's thread, as it runs there after a read
                await self.inner.read(file, Extents(_NONE, _NONE, _NONE), buffer, then)

    async def write(self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None) -> None:
        length = np.array([buffer.nbytes] if buffer.nbytes else [], np.int64)
        ticket = self._submit(True, file.path, np.full(len(length), offset, np.int64), length)
        try:
            with self._clock.holding():
                await self.inner.write(file, offset, buffer, before)
            await self._until_over(ticket)
        finally:
            self._queue.forget(ticket)

    async def _spend(self, seconds: float) -> None:
        self.time.sync_s += seconds
        await self._clock.sleep_until(self._clock.now() + seconds)

    async def sync(self, file: File) -> None:
        with self._clock.holding():
            await self.inner.sync(file)
        await self._spend(self.model.sync_s)

    async def truncate(self, file: File, length: int) -> None:
        with self._clock.holding():
            await self.inner.truncate(file, length)

    async def punch(self, file: File, offset: int, length: int) -> bool:
        with self._clock.holding():
            return await self.inner.punch(file, offset, length)

    async def write_whole(self, path: Path, parts: Sequence[Bytes]) -> None:
        lengths = np.array([sum(part.nbytes for part in parts)], np.int64)
        ticket = self._submit(True, path, np.zeros(1, np.int64), lengths)
        try:
            with self._clock.holding():
                await self.inner.write_whole(path, parts)
            await self._until_over(ticket)
        finally:
            self._queue.forget(ticket)
        await self._spend(self.model.sync_s)

    async def replace(self, source: Path, target: Path) -> None:
        with self._clock.holding():
            await self.inner.replace(source, target)

    async def sync_directory(self, path: Path) -> None:
        with self._clock.holding():
            await self.inner.sync_directory(path)
        await self._spend(self.model.sync_s)

    async def remove(self, path: Path) -> None:
        with self._clock.holding():
            await self.inner.remove(path)

    def shut_down(self, timeout_s: float) -> None:
        self.inner.shut_down(timeout_s)
