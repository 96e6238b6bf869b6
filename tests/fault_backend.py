"""A backend that fails, stalls or is slow where a test says so; everything else is done by the one inside."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import dsa.io.engine
from dsa.config import IOConfig
from dsa.errors import DeviceError
from dsa.io.backends import ThreadsBackend
from dsa.io.backends.base import Backend, Bytes, Extents, File


@dataclass
class Fault:
    """What happens to the requests of a kind whose path holds `path`: an errno, or no answer at all."""

    kind: str
    errno: int
    path: str = ""
    skip: int = 0
    times: int = 1 << 30


class FaultBackend(Backend):
    """Kinds: read, write, sync, truncate, punch, write_whole, replace, sync_directory, remove, open."""

    name = "faulty"

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner.counters)
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.write_delay_s = 0.0
        self.most_in_flight: Counter[str] = Counter()
        self.stalled = threading.Event()
        self.cancelled: list[str] = []
        self._in_flight: Counter[str] = Counter()
        self._faults: list[Fault] = []
        self._stalls: list[tuple[str, str]] = []

    # What a test does.

    def fail(self, kind: str, errno_: int, path: str = "", *, skip: int = 0, times: int = 1 << 30) -> None:
        """Requests of the kind fail from now on, after `skip` that go well."""
        self._faults.append(Fault(kind, errno_, path, skip, times))

    def stall(self, kind: str, path: str = "") -> None:
        """Requests of the kind get no answer from now on; `stalled` is set with the first."""
        self._stalls.append((kind, path))

    def heal(self) -> None:
        """Everything goes well again."""
        self._faults.clear()
        self._stalls.clear()

    # In front of every request.

    def _strike(self, kind: str, path: Path, offset: int | None, length: int | None) -> None:
        self.calls[kind] += 1
        for fault in self._faults:
            if fault.kind != kind or fault.path not in str(path) or not fault.times:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            fault.times -= 1
            raise DeviceError(fault.errno, kind, path, offset, length)

    async def _pass(self, kind: str, path: Path, offset: int | None = None, length: int | None = None) -> None:
        self._strike(kind, path, offset, length)
        for stalled, part in self._stalls:
            if stalled == kind and part in str(path):
                self.stalled.set()
                await self._never(kind)
        if kind in ("write", "write_whole") and self.write_delay_s:
            await asyncio.sleep(self.write_delay_s)

    async def _never(self, kind: str) -> None:
        while True:  # a request with the system cannot be taken back: whoever is cancelled goes on waiting
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.cancelled.append(kind)

    async def read(self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None) -> None:
        await self._pass("read", file.path, int(extents.offsets[0]), int(np.sum(extents.lengths)))
        await self.inner.read(file, extents, buffer, then)

    async def write(self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None) -> None:
        self._in_flight["write"] += 1
        self.most_in_flight["write"] = max(self.most_in_flight["write"], self._in_flight["write"])
        try:
            await self._pass("write", file.path, offset, len(buffer))
            await self.inner.write(file, offset, buffer, before)
        finally:
            self._in_flight["write"] -= 1

    async def sync(self, file: File) -> None:
        await self._pass("sync", file.path)
        await self.inner.sync(file)

    async def truncate(self, file: File, length: int) -> None:
        await self._pass("truncate", file.path, 0, length)
        await self.inner.truncate(file, length)

    async def punch(self, file: File, offset: int, length: int) -> bool:
        await self._pass("punch", file.path, offset, length)
        return await self.inner.punch(file, offset, length)

    async def write_whole(self, path: Path, parts: Sequence[Bytes]) -> None:
        await self._pass("write_whole", path, 0, sum(len(part) for part in parts))
        await self.inner.write_whole(path, parts)

    async def replace(self, source: Path, target: Path) -> None:
        await self._pass("replace", source)
        await self.inner.replace(source, target)

    async def sync_directory(self, path: Path) -> None:
        await self._pass("sync_directory", path)
        await self.inner.sync_directory(path)

    async def remove(self, path: Path) -> None:
        await self._pass("remove", path)
        await self.inner.remove(path)

    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        self._strike("open", path, None, None)
        return self.inner.open(path, create=create, writable=writable, direct=direct)

    def close(self, file: File) -> None:
        self.inner.close(file)

    def shut_down(self, timeout_s: float) -> None:
        self.inner.shut_down(timeout_s)


def install(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[FaultBackend], object] | None = None
) -> list[FaultBackend]:
    """Every optimizer made from now on has such a backend, `prepare`d first; those made so far are in the list."""
    made: list[FaultBackend] = []

    def open_faulty(name: str, config: IOConfig) -> FaultBackend:
        made.append(FaultBackend(ThreadsBackend(config)))
        if prepare is not None:
            prepare(made[-1])
        return made[-1]

    monkeypatch.setattr(dsa.io.engine, "open_backend", open_faulty)
    return made
