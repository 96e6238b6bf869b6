"""What the engine asks of a backend: ranges of files into and out of memory, and whole small files made durable.

Every backend passes one contract suite (tests/io/backends/test_contract.py). Two promises carry the rest of the
program: a call that returns normally moved every byte, and a call that failed raises `DeviceError` with the path, the
offset and the errno.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dsa.io.extents import Extents

__all__ = ["Backend", "Bytes", "Counters", "Extents", "File"]

Bytes = NDArray[np.uint8]


@dataclass
class Counters:
    """Requests that the backend made of the operating system for data, and the bytes that they moved."""

    read_requests: int = 0
    read_bytes: int = 0
    write_requests: int = 0
    write_bytes: int = 0
    syncs: int = 0


@dataclass
class File:
    """An open file: its path, the descriptor, and the alignment (bytes) that offsets, lengths and memory must have."""

    path: Path
    fd: int
    alignment: int = 1
    writable: bool = True
    extra: Any = None


@dataclass
class Backend(abc.ABC):
    """One way to move bytes. Coroutines run on the engine's loop; other methods may be called from any thread.

    `then` is run when the bytes have moved and before the call returns, in a thread that may spend time (an I/O thread
    where the backend has some): it is where records are checked and copied to their frames.
    """

    name: ClassVar[str]
    counters: Counters = field(default_factory=Counters)

    # Ranges of open files.

    @abc.abstractmethod
    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        """Open a file (with `create`: made or emptied). Descriptors are not inherited by programs started later.

        With `direct` the backend may move the file's bytes past the page cache, where it and the file system can; then
        the file's `alignment` is more than 1, and offsets, lengths and memory addresses must be multiples of it.
        """

    @abc.abstractmethod
    def close(self, file: File) -> None:
        """Give the descriptor back; the file must not be in use."""

    @abc.abstractmethod
    async def read(self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None) -> None:
        """Fill `buffer[at : at + length]` from the file for every extent; the end of the file is an error."""

    @abc.abstractmethod
    async def write(self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None) -> None:
        """Write all of `buffer` at `offset`; `before` fills the buffer first, in the thread that writes it."""

    def begin_read(
        self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None
    ) -> Awaitable[None]:
        """What `read` waits for: a coroutine, or a future where the transfer needs none, which spares the loop a task.

        Bytes move until it has ended, also where a future that is waited for is cancelled.
        """
        return self.read(file, extents, buffer, then)

    def begin_write(
        self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None
    ) -> Awaitable[None]:
        """Likewise what `write` waits for."""
        return self.write(file, offset, buffer, before)

    @abc.abstractmethod
    async def sync(self, file: File) -> None:
        """Everything written to the file so far survives a loss of power when this returns."""

    @abc.abstractmethod
    async def truncate(self, file: File, length: int) -> None:
        """Make the file `length` bytes long."""

    @abc.abstractmethod
    async def punch(self, file: File, offset: int, length: int) -> bool:
        """Give the range's space back to the file system; False where that cannot be done. It reads as zeros then."""

    # Names and small files.

    @abc.abstractmethod
    async def write_whole(self, path: Path, parts: Sequence[Bytes]) -> None:
        """Make (or empty) the file, write the parts one after the other, and sync the file, not its directory."""

    @abc.abstractmethod
    async def replace(self, source: Path, target: Path) -> None:
        """Rename over the target in one step."""

    @abc.abstractmethod
    async def sync_directory(self, path: Path) -> None:
        """Names made, replaced or removed in the directory so far survive a loss of power when this returns."""

    @abc.abstractmethod
    async def remove(self, path: Path) -> None:
        """Remove the file; one that is not there is no error."""

    @abc.abstractmethod
    def shut_down(self, timeout_s: float) -> None:
        """End the backend's threads; one that is stuck in the system is left behind (it is a daemon)."""
