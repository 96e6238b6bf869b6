"""Descriptors, names and small files through the operating system: the half of a backend that all backends share."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from dsa.errors import DeviceError
from dsa.io.backends.base import Backend, Bytes, File
from dsa.io.backends.iothreads import IOThreads, ended

_P = ParamSpec("_P")
_T = TypeVar("_T")
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
# O_BINARY: Windows would translate line ends.
_OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


@contextlib.contextmanager
def reported(what: str, path: Path, offset: int | None = None, length: int | None = None) -> Iterator[None]:
    """An operating system's error in the body becomes a `DeviceError` that names the place."""
    try:
        yield
    except DeviceError:
        raise
    except OSError as error:
        raise DeviceError(error.errno or 0, what, path, offset, length) from error


def descriptor(file: File, what: str) -> int:
    """The file's descriptor.

    Raises:
        DeviceError: the file was closed.
    """
    if file.fd < 0:
        raise DeviceError(errno.EBADF, what, file.path)
    return file.fd


def open_descriptor(path: Path, flags: int) -> int:
    """A descriptor that programs started later do not inherit, for reading here and there."""
    with reported("open", path):
        fd = os.open(path, flags | _OPEN_FLAGS, 0o666)
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice only; without it the system reads ahead for nothing
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd


def sync_names(fd: int) -> None:
    """The names in the directory are on the medium when this returns."""
    if sys.platform == "darwin":
        sync_descriptor(fd)
    else:
        os.fsync(fd)


def sync_descriptor(fd: int) -> None:
    """The file's bytes, and its length, are on the medium when this returns."""
    if sys.platform == "darwin":
        import fcntl

        if hasattr(fcntl, "F_FULLFSYNC"):  # fsync alone leaves the bytes in the drive's cache there
            try:
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
                return
            except OSError as error:  # network file systems do not know it
                if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                    raise
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def punch_descriptor(fd: int, offset: int, length: int) -> bool:
    """Free a range of the file; False where the system or the file system cannot.

    Raises:
        OSError: it can, and failed.
    """
    if sys.platform != "linux":
        return False
    if length == 0:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    if fallocate is None:
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


def write_file(path: Path, parts: Sequence[Bytes]) -> None:
    """Make or empty the file, write the parts, sync it."""
    with reported("open", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OPEN_FLAGS, 0o666)
    try:
        at = 0
        for part in parts:
            view = np.ascontiguousarray(part).view(np.uint8).reshape(-1).data
            while len(view):
                with reported("write", path, at, len(view)):
                    moved = os.write(fd, view)
                view = view[moved:]
                at += moved
        with reported("sync", path):
            sync_descriptor(fd)
    finally:
        os.close(fd)


class LocalFiles(Backend):
    """What a backend does with names, and with descriptors apart from moving bytes, on a thread of its own.

    Syncs so wait for the device beside reads and writes, not between them.

    Args:
        threads: the other groups of threads of the backend, ended together with this one.
    """

    def __init__(self, *threads: IOThreads) -> None:
        super().__init__()
        self._file_thread = IOThreads("dsa-files", 1)
        self._all_threads = (*threads, self._file_thread)

    async def _on_file_thread(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await ended(self._file_thread.submit(fn, *args, **kwargs))

    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        if create and not writable:
            raise ValueError(f"{path}: a file that is made must be writable")
        flags = os.O_RDWR if writable else os.O_RDONLY
        if create:
            flags |= os.O_CREAT | os.O_TRUNC
        fd = open_descriptor(path, flags)
        return File(path, fd, writable=writable)

    def close(self, file: File) -> None:
        """Give the descriptor back; the file must not be in use. Closing a second time does nothing."""
        fd, file.fd = file.fd, -1
        if fd >= 0:
            with reported("close", file.path):
                os.close(fd)

    async def sync(self, file: File) -> None:
        self.counters.syncs += 1
        with reported("sync", file.path):
            await self._on_file_thread(sync_descriptor, descriptor(file, "sync"))

    async def truncate(self, file: File, length: int) -> None:
        with reported("truncate", file.path, 0, length):
            await self._on_file_thread(os.ftruncate, descriptor(file, "truncate"), length)

    async def punch(self, file: File, offset: int, length: int) -> bool:
        with reported("punch", file.path, offset, length):
            fd = descriptor(file, "punch")
            return await self._on_file_thread(punch_descriptor, fd, offset, length)

    async def write_whole(self, path: Path, parts: Sequence[Bytes]) -> None:
        self.counters.write_requests += len(parts)
        self.counters.write_bytes += sum(part.nbytes for part in parts)
        self.counters.syncs += 1
        await self._on_file_thread(write_file, path, parts)

    async def replace(self, source: Path, target: Path) -> None:
        with reported(f"rename to {target}", source):
            await self._on_file_thread(os.replace, source, target)

    async def sync_directory(self, path: Path) -> None:
        if os.name == "nt":  # directories cannot be opened there; NTFS keeps names in its journal
            return
        self.counters.syncs += 1
        await self._on_file_thread(_sync_directory, path)

    async def remove(self, path: Path) -> None:
        with reported("remove", path), contextlib.suppress(FileNotFoundError):
            await self._on_file_thread(os.remove, path)

    def shut_down(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for threads in self._all_threads:
            threads.shut_down(max(deadline - time.monotonic(), 0.0))


def _sync_directory(path: Path) -> None:
    with reported("sync of the directory", path):
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _OPEN_FLAGS)
        try:
            sync_names(fd)
        finally:
            os.close(fd)
