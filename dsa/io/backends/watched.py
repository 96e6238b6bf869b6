"""A limit of time in front of any backend: a device that answers nothing for so long is an error, not a hang."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dsa.errors import DeviceError
from dsa.io.backends.base import Backend, Bytes, Extents, File
from dsa.io.backends.iothreads import done

_T = TypeVar("_T")
SLOW_REQUEST_S = 0.02
SLOW_BYTES_PER_S = 1e6


class WatchedBackend(Backend):
    """Does everything by `inner`; where that answers nothing for too long, what waits raises DeviceError (ETIMEDOUT).

    Too long is `limit_s`, and what the call would take on a very slow device: one that is only slow fails nothing.
    The call itself cannot be taken back, and its buffer stays in use. So such an error must be final: nothing that it
    may still touch is used again.
    """

    def __init__(self, inner: Backend, limit_s: float) -> None:
        super().__init__(inner.counters)
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]  # what it is known by
        self._limit_s = limit_s
        self._answers = 0
        self._unsynced_bytes = 0

    async def _answered(
        self,
        call: Awaitable[_T],
        what: str,
        path: Path,
        offset: int | None = None,
        length: int | None = None,
        allowance_s: float = 0.0,
    ) -> _T:
        task = asyncio.ensure_future(call)
        try:
            answers = -1
            while not task.done() and answers != self._answers:
                answers = self._answers
                await done(task, self._limit_s + allowance_s)
        except asyncio.CancelledError:
            if isinstance(task, asyncio.Task):
                task.cancel()
            while not task.done():  # it ends when its bytes have stopped to move, and only then may this one
                with contextlib.suppress(asyncio.CancelledError):
                    await done(task)
            _look_at(task)
            raise
        if task.done():
            self._answers += 1
            return task.result()
        task.add_done_callback(_look_at)
        raise DeviceError(errno.ETIMEDOUT, f"{what} (nothing answered for {self._limit_s:g} s)", path, offset, length)

    async def read(self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None) -> None:
        first = int(extents.offsets[0]) if len(extents) else None
        length = int(extents.lengths.sum())
        allowance_s = len(extents) * SLOW_REQUEST_S + length / SLOW_BYTES_PER_S
        call = self.inner.begin_read(file, extents, buffer, then)
        await self._answered(call, "read", file.path, first, length, allowance_s)

    async def write(self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None) -> None:
        call = self.inner.begin_write(file, offset, buffer, before)
        allowance_s = buffer.nbytes / SLOW_BYTES_PER_S
        self._unsynced_bytes += buffer.nbytes
        await self._answered(call, "write", file.path, offset, buffer.nbytes, allowance_s)

    async def sync(self, file: File) -> None:
        # The system may have kept all of it in its cache until now.
        allowance_s = self._unsynced_bytes / SLOW_BYTES_PER_S
        await self._answered(self.inner.sync(file), "sync", file.path, allowance_s=allowance_s)
        self._unsynced_bytes = 0

    async def truncate(self, file: File, length: int) -> None:
        await self._answered(self.inner.truncate(file, length), "truncate", file.path, 0, length)

    async def punch(self, file: File, offset: int, length: int) -> bool:
        return await self._answered(self.inner.punch(file, offset, length), "punch", file.path, offset, length)

    async def write_whole(self, path: Path, parts: Sequence[Bytes]) -> None:
        length = sum(part.nbytes for part in parts)
        allowance_s = (length + self._unsynced_bytes) / SLOW_BYTES_PER_S
        await self._answered(self.inner.write_whole(path, parts), "write", path, 0, length, allowance_s)

    async def replace(self, source: Path, target: Path) -> None:
        await self._answered(self.inner.replace(source, target), f"rename to {target}", source)

    async def sync_directory(self, path: Path) -> None:
        await self._answered(self.inner.sync_directory(path), "sync of the directory", path)

    async def remove(self, path: Path) -> None:
        await self._answered(self.inner.remove(path), "remove", path)

    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        return self.inner.open(path, create=create, writable=writable, direct=direct)

    def close(self, file: File) -> None:
        self.inner.close(file)

    def shut_down(self, timeout_s: float) -> None:
        self.inner.shut_down(timeout_s)


def _look_at(task: asyncio.Future[Any]) -> None:
    """Its outcome comes too late to matter; asked for, so that asyncio does not log that nobody did."""
    if not task.cancelled():
        task.exception()
