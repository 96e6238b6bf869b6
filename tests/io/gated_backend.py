"""A backend whose reads, writes and syncs a test holds back, lets through one by one, counts, and makes fail."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dsa.errors import DeviceError
from dsa.io.backends.base import Backend, Bytes, Extents, File

LIMIT_S = 20.0
"""No test waits longer than this for anything: what does not come by then does not come."""

KINDS = ("read", "write", "sync")


class GatedBackend(Backend):
    """Everything is done by `inner`; requests of a kind that is held wait in front of it, in the order they came."""

    name = "gated"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner.counters)
        self.inner = inner
        self.submitted = dict.fromkeys(KINDS, 0)
        self.completed = dict.fromkeys(KINDS, 0)
        self._held = dict.fromkeys(KINDS, False)
        self._waiting: dict[str, deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]] = {
            kind: deque() for kind in KINDS
        }
        self._errors: dict[str, deque[int]] = {kind: deque() for kind in KINDS}
        self._changed = threading.Condition()

    # What a test does.

    def hold(self, kind: str) -> None:
        """Requests of the kind wait from now on."""
        with self._changed:
            self._held[kind] = True

    def let_through(self, kind: str, count: int = 1) -> None:
        """Let the `count` oldest go on, which must be waiting."""
        with self._changed:
            assert len(self._waiting[kind]) >= count, f"{len(self._waiting[kind])} {kind} requests wait, not {count}"
            for _ in range(count):
                self._release(kind)

    def open_gate(self, kind: str) -> None:
        """Hold nothing of the kind any more."""
        with self._changed:
            self._held[kind] = False
            while self._waiting[kind]:
                self._release(kind)

    def fail_next(self, kind: str, errno_: int) -> None:
        """The next request of the kind fails with the error number, once it is let through."""
        with self._changed:
            self._errors[kind].append(errno_)

    def waiting(self, kind: str) -> int:
        """How many requests are held back."""
        with self._changed:
            return len(self._waiting[kind])

    def await_waiting(self, kind: str, count: int) -> None:
        """Wait until so many are held back."""
        self._await(lambda: len(self._waiting[kind]) >= count, f"{count} {kind} requests held back")

    def await_completed(self, kind: str, count: int) -> None:
        """Wait until so many have completed in all."""
        self._await(lambda: self.completed[kind] >= count, f"{count} {kind} requests completed")

    def _await(self, come: Callable[[], bool], what: str) -> None:
        with self._changed:
            came = self._changed.wait_for(come, LIMIT_S)
        assert came, f"within {LIMIT_S} s there were not {what}: submitted {self.submitted}, done {self.completed}"

    def _release(self, kind: str) -> None:
        loop, ticket = self._waiting[kind].popleft()
        loop.call_soon_threadsafe(lambda: ticket.done() or ticket.set_result(None))

    # What the engine calls.

    async def _pass(self, kind: str, file: File, offset: int | None, length: int | None) -> None:
        ticket: asyncio.Future[None] | None = None
        with self._changed:
            self.submitted[kind] += 1
            if self._held[kind]:
                loop = asyncio.get_running_loop()
                ticket = loop.create_future()
                self._waiting[kind].append((loop, ticket))
            self._changed.notify_all()
        if ticket is not None:
            await ticket
        with self._changed:
            errno_ = self._errors[kind].popleft() if self._errors[kind] else 0
        if errno_:
            raise DeviceError(errno_, kind, file.path, offset, length)

    def _done(self, kind: str) -> None:
        with self._changed:
            self.completed[kind] += 1
            self._changed.notify_all()

    async def read(self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None) -> None:
        await self._pass("read", file, int(extents.offsets[0]), int(np.sum(extents.lengths)))
        await self.inner.read(file, extents, buffer, then)
        self._done("read")

    async def write(self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None) -> None:
        await self._pass("write", file, offset, len(buffer))
        await self.inner.write(file, offset, buffer, before)
        self._done("write")

    async def sync(self, file: File) -> None:
        await self._pass("sync", file, None, None)
        await self.inner.sync(file)
        self._done("sync")

    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        return self.inner.open(path, create=create, writable=writable, direct=direct)

    def close(self, file: File) -> None:
        self.inner.close(file)

    async def truncate(self, file: File, length: int) -> None:
        await self.inner.truncate(file, length)

    async def punch(self, file: File, offset: int, length: int) -> bool:
        return await self.inner.punch(file, offset, length)

    async def write_whole(self, path: Path, parts: Sequence[Bytes]) -> None:
        await self.inner.write_whole(path, parts)

    async def replace(self, source: Path, target: Path) -> None:
        await self.inner.replace(source, target)

    async def sync_directory(self, path: Path) -> None:
        await self.inner.sync_directory(path)

    async def remove(self, path: Path) -> None:
        await self.inner.remove(path)

    def shut_down(self, timeout_s: float) -> None:
        self.inner.shut_down(timeout_s)
