"""Backends for tests: plain system calls that record, that fail where told, that forget what was not synced."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from dsa.errors import DeviceError
from dsa.io.backends.base import Backend, Bytes, Extents, File

SECTOR_BYTES = 512


class PlainBackend(Backend):
    """Every operation by one or a few system calls, in the caller's thread; `happened` follows each change."""

    name: ClassVar[str] = "plain"

    def about_to(self, operation: str, path: Path) -> None:
        """Before an operation that changes or syncs something."""

    def happened(self, operation: str, path: Path, other: Path | None = None) -> None:
        """After each part of one."""

    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT | os.O_TRUNC if create else 0)
        try:
            file = File(path, os.open(path, flags, 0o666), writable=writable)
        except OSError as error:
            raise DeviceError(error.errno or 0, "open", path) from error
        if create:
            self.happened("create", path)
        return file

    def close(self, file: File) -> None:
        os.close(file.fd)

    async def read(self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None) -> None:
        for offset, length, at in zip(extents.offsets, extents.lengths, extents.at, strict=True):
            data = os.pread(file.fd, length, offset)
            if len(data) < length:
                raise DeviceError(0, "read", file.path, int(offset), int(length))
            buffer[at : at + length] = memoryview(data)
        if then is not None:
            then()

    async def write(self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None) -> None:
        self.about_to("write", file.path)
        if before is not None:
            before()
        os.pwrite(file.fd, buffer.tobytes(), offset)
        self.happened("write", file.path)

    async def sync(self, file: File) -> None:
        self.about_to("sync", file.path)
        self.happened("sync", file.path)

    async def truncate(self, file: File, length: int) -> None:
        self.about_to("truncate", file.path)
        os.ftruncate(file.fd, length)
        self.happened("write", file.path)

    async def punch(self, file: File, offset: int, length: int) -> bool:
        return False

    async def write_whole(self, path: Path, parts: Sequence[Bytes]) -> None:
        self.about_to("write_whole", path)
        file = self.open(path, create=True)
        for part in parts:
            os.write(file.fd, part.tobytes())
        self.close(file)
        self.happened("write", path)
        self.happened("sync", path)
        self.counters.write_bytes += sum(part.nbytes for part in parts)

    async def replace(self, source: Path, target: Path) -> None:
        self.about_to("replace", target)
        os.replace(source, target)
        self.happened("replace", source, target)

    async def sync_directory(self, path: Path) -> None:
        self.about_to("sync_directory", path)
        self.happened("sync_directory", path)

    async def remove(self, path: Path) -> None:
        self.about_to("remove", path)
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        self.happened("remove", path)

    def shut_down(self, timeout_s: float) -> None:
        pass


class RecordingBackend(PlainBackend):
    """Keeps (operation, path relative to the root) of everything that changes or syncs something."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.log: list[tuple[str, str]] = []

    def about_to(self, operation: str, path: Path) -> None:
        self.log.append((operation, os.path.relpath(path, self.root)))


class FailingBackend(PlainBackend):
    """Fails the operation number `at`, before it or (`late`) after each of its parts but the last, or all done.

    Args:
        at: counted from 0 over operations and, with `late`, over their parts.
    """

    def __init__(self, at: int, *, late: bool) -> None:
        super().__init__()
        self.left = at
        self.late = late

    def _count(self, path: Path) -> None:
        self.left -= 1
        if self.left == -1:
            raise DeviceError(errno.EIO, "made to fail", path)

    def about_to(self, operation: str, path: Path) -> None:
        if not self.late:
            self._count(path)

    def happened(self, operation: str, path: Path, other: Path | None = None) -> None:
        if self.late:
            self._count(path)


@dataclass
class Inode:
    """A file's bytes: those that survive for certain, those of the page cache, and whether it was emptied between."""

    synced: bytes = b""
    written: bytes = b""
    emptied: bool = False

    def survivors(self) -> list[bytes]:
        """What may be there after a loss of power: sectors of either, cut short where it grew, or never filled there.

        Synced bytes that were not written again stay.
        """
        old, new = self.synced, self.written
        if old == new and not self.emptied:
            return [old]
        kept = b"" if self.emptied else old
        half = (len(kept) + len(new)) // 2 // SECTOR_BYTES * SECTOR_BYTES
        padded = kept.ljust(len(new), b"\0")[: len(new)]
        cuts = [slice(at, at + SECTOR_BYTES) for at in range(0, len(new), SECTOR_BYTES)]
        mixed = [b"".join((new, padded)[(i + first) % 2][cut] for i, cut in enumerate(cuts)) for first in (0, 1)]
        return list(dict.fromkeys([old, new, kept, new[: max(half, len(kept))], padded, *mixed]))


@dataclass
class PowerLoss(PlainBackend):
    """Knows after every part of every operation what a loss of power could leave behind.

    Names of one directory may survive in any combination until it is synced, bytes of a file until that is. `observe`
    is called with this object at each such point.

    Args:
        root: the directory that is watched.
        ignored: these operations (operation, name) promise durability and do not give it.
    """

    name: ClassVar[str] = "power-loss"
    root: Path = Path()
    ignored: frozenset[tuple[str, str]] = frozenset()
    observe: Callable[[], None] = lambda: None
    durable: dict[str, Inode] = field(default_factory=dict)
    cached: dict[str, Inode] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)
    pending: list[tuple[str, dict[str, Inode | None]]] = field(default_factory=list)  # directory, its changes

    def happened(self, operation: str, path: Path, other: Path | None = None) -> None:
        name = os.path.relpath(path, self.root)
        if name.startswith(".."):
            return
        self._note_directories()
        if operation == "create":
            self._create(name)
        elif operation == "write":
            self.cached[name].written = path.read_bytes()
        elif operation == "sync" and (operation, name) not in self.ignored:
            self.cached[name].synced = self.cached[name].written
            self.cached[name].emptied = False
        elif operation == "replace" and other is not None:
            target = os.path.relpath(other, self.root)
            inode = self.cached.pop(name)
            self.cached[target] = inode
            self.pending.append((os.path.dirname(target), {name: None, target: inode}))
        elif operation == "remove":
            if self.cached.pop(name, None) is not None:
                self.pending.append((os.path.dirname(name), {name: None}))
        elif operation == "sync_directory" and (operation, name) not in self.ignored:
            self._settle("" if name == "." else name)
        self.observe()

    def _note_directories(self) -> None:
        for path in self.root.iterdir():
            if path.is_dir() and path.name not in self.directories:
                self.directories.add(path.name)
                self.cached[path.name] = Inode()
                self.pending.append(("", {path.name: self.cached[path.name]}))

    def _create(self, name: str) -> None:
        if name in self.cached:
            self.cached[name].written = b""
            self.cached[name].emptied = True
        else:
            self.cached[name] = Inode()
            self.pending.append((os.path.dirname(name), {name: self.cached[name]}))

    def _settle(self, directory: str) -> None:
        for changed, changes in self.pending:
            if changed == directory:
                _apply(self.durable, changes)
        self.pending = [(changed, changes) for changed, changes in self.pending if changed != directory]

    def survivors(self) -> Iterator[dict[str, bytes | None]]:
        """Every state that the disk may be in after a loss of power now: name -> bytes, None for a directory."""
        for kept in itertools.product((False, True), repeat=len(self.pending)):
            names = dict(self.durable)
            for keep, (_, changes) in zip(kept, self.pending, strict=True):
                if keep:
                    _apply(names, changes)
            alive = {n: i for n, i in names.items() if os.path.dirname(n) in ("", *names) and n not in self.directories}
            folders = {name: None for name in names if name in self.directories}
            for contents in itertools.product(*(inode.survivors() for inode in alive.values())):
                yield {**folders, **dict(zip(alive, contents, strict=True))}


def _apply(names: dict[str, Inode], changes: dict[str, Inode | None]) -> None:
    for name, inode in changes.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode
