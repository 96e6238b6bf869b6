"""The portable `aiofiles` backend: a seek and a read per extent, on any system that Python runs on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

import numpy as np
from aiofiles.threadpool import wrap

from dsa.config import IOConfig
from dsa.errors import DeviceError
from dsa.io.backends.base import Bytes, File
from dsa.io.backends.iothreads import IOThreads, ended
from dsa.io.backends.posix_files import LocalFiles, descriptor, open_descriptor, reported
from dsa.io.extents import Extents, check_placement

_MOST_READ_THREADS = 16
# Descriptors that an open file has for reading: each has a position of its own, so as many reads run at once.
_MOST_READ_HANDLES = 8
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Handle(Executor):
    """One aiofiles handle, used by one transfer at a time, and the executor that carries out its calls.

    Being the executor it sees each call's future, so that a call in flight can be waited for even when the coroutine
    that awaited it was cancelled.
    """

    def __init__(self, threads: IOThreads, raw: io.FileIO) -> None:
        self._threads = threads
        self._latest: Future[Any] | None = None
        self.raw = raw
        self.file = wrap(raw, executor=self)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future = self._threads.submit(fn, *args, **kwargs)
        self._latest = future
        return future

    async def finish(self, call: Coroutine[Any, Any, _T]) -> _T:
        """The outcome of a call of `file`; a cancellation is held back until the thread has ended it."""
        try:
            return await call
        except asyncio.CancelledError:
            if self._latest is not None and not self._latest.done():
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await ended(self._latest)
            raise


@dataclass
class _Handles:
    """The handles of an open file: those for reading that are free, all of them, and the one for writing."""

    free: asyncio.LifoQueue[_Handle]
    readers: list[_Handle]
    writer: _Handle | None
    writing: asyncio.Lock


class AiofilesBackend(LocalFiles):
    """Reads and writes through aiofiles: slower than the others by far, and at home everywhere.

    Args:
        config: `queue_depth` bounds the reads at once (8 a file and 16 in all at most).
        raw: what makes the file object of a descriptor and a mode; tests put failing ones in its place.
    """

    name: ClassVar[str] = "aiofiles"

    def __init__(self, config: IOConfig, *, raw: Callable[[int, str], io.FileIO] = io.FileIO) -> None:
        self._raw = raw
        self._readers = IOThreads("dsa-read", min(config.queue_depth, _MOST_READ_THREADS))
        self._writer = IOThreads("dsa-write", 1)
        self._handles = min(config.queue_depth, _MOST_READ_HANDLES)
        super().__init__(self._readers, self._writer)

    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        file = super().open(path, create=create, writable=writable)
        handles = _Handles(asyncio.LifoQueue(), [], None, asyncio.Lock())
        file.extra = handles
        try:
            for _ in range(self._handles):
                handle = _Handle(self._readers, self._raw(open_descriptor(path, os.O_RDONLY), "r"))
                handles.readers.append(handle)
                handles.free.put_nowait(handle)
            if writable:
                handles.writer = _Handle(self._writer, self._raw(open_descriptor(path, os.O_RDWR), "r+"))
        except BaseException:
            self.close(file)
            raise
        return file

    def close(self, file: File) -> None:
        handles: _Handles = file.extra
        with contextlib.ExitStack() as stack:
            stack.callback(super().close, file)
            for handle in (*handles.readers, handles.writer):
                if handle is not None:
                    stack.enter_context(reported("close", file.path))
                    stack.callback(handle.raw.close)

    async def read(self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None) -> None:
        view = _view(buffer)
        if view.readonly:
            raise ValueError("the buffer to read into is read-only")
        descriptor(file, "read")
        wanted = check_placement(extents, view.nbytes)
        self.counters.read_requests += len(wanted)
        self.counters.read_bytes += int(wanted.lengths.sum())
        await ended(asyncio.ensure_future(self._read(file, wanted, view, then)))

    async def _read(self, file: File, extents: Extents, view: memoryview, then: Callable[[], None] | None) -> None:
        todo = deque(zip(extents.offsets.tolist(), extents.lengths.tolist(), extents.at.tolist(), strict=True))
        workers = min(self._handles, len(extents))
        tasks = [asyncio.ensure_future(self._read_some(file, todo, view)) for _ in range(workers)]
        failure: BaseException | None = None
        for task in tasks:
            try:
                await ended(task)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure
        if then is not None:
            await ended(self._readers.submit(then))

    async def _read_some(self, file: File, todo: deque[tuple[int, int, int]], view: memoryview) -> None:
        handles: _Handles = file.extra
        handle = await handles.free.get()
        try:
            while todo:
                offset, length, at = todo.popleft()
                await _move("read", handle, handle.file.readinto, file.path, offset, view[at : at + length])
        except BaseException:
            todo.clear()  # after a failure the rest would be read for nothing
            raise
        finally:
            handles.free.put_nowait(handle)

    async def write(self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None) -> None:
        view = _view(buffer)
        if offset < 0:
            raise ValueError(f"a file has no byte {offset}")
        descriptor(file, "write")
        if view.nbytes:
            self.counters.write_requests += 1
            self.counters.write_bytes += view.nbytes
        await ended(asyncio.ensure_future(self._write(file, offset, view, before)))

    async def _write(self, file: File, offset: int, view: memoryview, before: Callable[[], None] | None) -> None:
        handles: _Handles = file.extra
        async with handles.writing:
            if before is not None:
                await ended(self._writer.submit(before))
            if handles.writer is None:
                raise DeviceError(errno.EBADF, "write", file.path, offset, view.nbytes)
            await _move("write", handles.writer, handles.writer.file.write, file.path, offset, view)


async def _move(
    what: str,
    handle: _Handle,
    transfer: Callable[[memoryview], Coroutine[Any, Any, int | None]],
    path: Path,
    offset: int,
    view: memoryview,
) -> None:
    """Move all of `view`, continuing what moved in part."""
    while len(view):
        with reported(what, path, offset, len(view)):
            try:
                await handle.finish(handle.file.seek(offset))
                moved = await handle.finish(transfer(view))
            except InterruptedError:
                continue
        if not moved:
            what = f"{what} (the file ends there)" if what == "read" else f"{what} (nothing was taken)"
            raise DeviceError(0, what, path, offset, len(view))
        offset += moved
        view = view[moved:]


def _view(buffer: Bytes) -> memoryview:
    if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
        raise ValueError(f"a buffer must be contiguous bytes, not {buffer.dtype} with strides {buffer.strides}")
    return buffer.reshape(-1).data
