"""State directories read from outside: opened, locked where nobody else owns them, and read generation by generation.

Nothing is changed but the lock's text. A directory in use can be read too: what the generations of its manifest refer
to stays as it is until a newer manifest is durable (rule 11), and every record is checked.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dsa.config import KIB, MIB, IOConfig
from dsa.errors import ConfigError, CorruptError, DeviceError, FormatError, MismatchError, StateLockedError, UsageError
from dsa.io.backends import open_backend
from dsa.io.backends.base import Backend
from dsa.io.directory import Directory
from dsa.io.extents import plan
from dsa.io.indexfile import Reader
from dsa.io.layout import SegmentLayout, checked_scatter, round_up, row_bytes_for
from dsa.io.loop import LoopThread
from dsa.io.manifest import Generation, Manifest, TableEntry, TableState
from dsa.io.manifest_file import read_manifest
from dsa.io.memory import allocate

_T = TypeVar("_T")
Progress = Callable[[int, int], None]  # done, of how much in all
_STOP_TIMEOUT_S = 3.0
_PIECE_BYTES = 8 * MIB
_PIECE_RECORDS = 8192  # each may cost a block of the file
_MERGE_GAP_BYTES = 4 * KIB
_OWN_NAMES = {"LOCK", "tables", "index", "manifest.json.tmp"}


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end, also where the caller's thread runs an event loop already."""
    loop = LoopThread("dsa-reading", use_uvloop=True)
    try:
        return loop.submit(coroutine).result()
    finally:
        loop.stop(_STOP_TIMEOUT_S)


@dataclass(frozen=True)
class Opened:
    """A state directory open for reading.

    Args:
        not_locked: why it is not locked by us, None where it is.
        in_use: it is not locked because somebody else owns it.
    """

    directory: Directory
    backend: Backend
    not_locked: str | None
    in_use: bool


@asynccontextmanager
async def open_directory(path: str | os.PathLike[str], *, lock: bool = True) -> AsyncIterator[Opened]:
    """Open a state directory for reading; with `lock` it is locked meanwhile, unless it is in use or read-only.

    Raises:
        ConfigError: there is no such directory.
        FormatError: it is not a state directory.
        DeviceError: it cannot be read.
    """
    directory = Directory(path)
    _refuse_others(directory)
    not_locked, in_use = None if lock else "not asked for", False
    if lock:
        try:
            directory.lock()
        except StateLockedError as error:
            not_locked, in_use = str(error), True
        except DeviceError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            not_locked = f"{directory.path} cannot be locked ({os.strerror(error.errno)})"
    try:
        backend = open_backend("auto", IOConfig())
        try:
            yield Opened(directory, backend, not_locked, in_use)
        finally:
            backend.shut_down(_STOP_TIMEOUT_S)
    finally:
        directory.unlock()


def _refuse_others(directory: Directory) -> None:
    try:
        names = set(os.listdir(directory.path))
    except FileNotFoundError:
        raise ConfigError(f"there is no directory {directory.path}") from None
    except OSError as error:
        raise DeviceError(error.errno or 0, "listing the state directory", directory.path) from error
    if "manifest.json" not in names and not names & _OWN_NAMES:
        holds = f"it holds {min(names)!r}" if names else "it is empty"
        raise FormatError(f"{directory.path} is not a state directory of this program: {holds}")


async def need_manifest(opened: Opened) -> Manifest:
    """The directory's manifest.

    Raises:
        UsageError: there is none.
        FormatError, CorruptError, DeviceError: see `manifest_file.read_manifest`.
    """
    manifest = await read_manifest(opened.backend, opened.directory)
    if manifest is None:
        raise UsageError(
            f"{opened.directory.path} has no manifest.json: its creation (or discarding) was cut short, and it holds "
            "no generation"
        )
    return manifest


def choose(manifest: Manifest, number: int | None, directory: Directory) -> Generation:
    """The generation of that number, the newest with None.

    Raises:
        MismatchError: it is not there.
    """
    found = manifest.generations[-1] if number is None else manifest.generation(number)
    if found is None:
        present = ", ".join(str(generation.number) for generation in manifest.generations)
        raise MismatchError(f"{directory.path}: generation {number} is not there, present are {present}")
    return found


def log_layout(entry: TableEntry) -> SegmentLayout:
    """The geometry of a table's log."""
    return SegmentLayout(entry.record_bytes, entry.slots_per_segment, row_bytes_for(entry.n_rows), entry.segment_bytes)


async def open_index(opened: Opened, manifest: Manifest, state: TableState) -> Reader:
    """The table's index file in a generation that has one; close it after use.

    Raises:
        StateFileError, DeviceError: see `indexfile.Reader.of_table`.
    """
    path = opened.directory.file(str(state.index_file))
    return await Reader.of_table(opened.backend, path, manifest.uuid, state)


async def load_index(
    opened: Opened, manifest: Manifest, entry: TableEntry, state: TableState
) -> tuple[NDArray[Any], NDArray[np.uint32]]:
    """Slots (int32 or int64 [n_rows], -1: never written) and checks of a table in a generation.

    Raises:
        StateFileError, DeviceError: the index file cannot be read whole.
    """
    checks = allocate(entry.n_rows, np.uint32)
    if state.index_file is None:
        slots = allocate(entry.n_rows, np.int32)
        slots[:] = -1
        return slots, checks
    reader = await open_index(opened, manifest, state)
    try:
        slots = allocate(entry.n_rows, np.int32 if reader.header.slot_bytes == 4 else np.int64)
        await reader.index(slots, checks)
    finally:
        reader.close()
    return slots, checks


Piece = tuple[NDArray[np.int64], NDArray[np.uint8]]


async def records(
    opened: Opened, entry: TableEntry, slots: NDArray[Any], checks: NDArray[np.uint32]
) -> AsyncIterator[Piece]:
    """All records of an index in the order of their rows, piece by piece: rows, and bytes [n, record_bytes].

    A piece's arrays are used again for the next one.

    Raises:
        CorruptError: a record does not match its check, or lies beyond the log's end.
        DeviceError: the log cannot be read.
    """
    layout = log_layout(entry)
    most = max(1, min(_PIECE_BYTES // entry.record_bytes, _PIECE_RECORDS))
    frames = allocate((most, entry.record_bytes // 8), np.uint64)
    buffer = allocate(0, np.uint8)
    path = opened.directory.file(entry.file)
    file = opened.backend.open(path, writable=False, direct=True)
    try:
        size = os.fstat(file.fd).st_size
        for first in range(0, len(slots), most):
            rows = np.flatnonzero(slots[first : first + most] >= 0) + first
            if not len(rows):
                continue
            order = np.argsort(slots[rows], kind="stable")
            offsets = layout.offsets(slots[rows[order]].astype(np.int64))
            if offsets[-1] + entry.record_bytes > size:
                raise CorruptError(
                    f"table {entry.name!r}: the record of row {rows[order[-1]]} should be in {path} at byte "
                    f"{offsets[-1]}, which has {size} bytes; the log was cut short"
                )
            reach = plan(
                offsets,
                entry.record_bytes,
                merge_gap_bytes=_MERGE_GAP_BYTES,
                max_request_bytes=MIB,
                alignment=file.alignment,
            )
            if len(buffer) < reach.buffer_bytes + 8:
                buffer = allocate(round_up(reach.buffer_bytes + 8, 4096), np.uint8)
            await opened.backend.read(file, reach.extents, buffer)
            ordered = rows[order]
            wrong = checked_scatter(
                buffer.view(np.uint64),
                reach.positions // 8,
                entry.record_bytes // 8,
                ordered,
                checks[ordered],
                frames,
                order.astype(np.int32),
            )
            if wrong >= 0:
                raise CorruptError(
                    f"table {entry.name!r}: the record of row {ordered[wrong]} in {path} at byte {offsets[wrong]} "
                    f"({entry.record_bytes} bytes) does not match its check {checks[ordered[wrong]]:08x}; "
                    "`dsa verify` lists all damage"
                )
            yield rows, frames[: len(rows)].view(np.uint8)
    finally:
        opened.backend.close(file)


async def gone(opened: Opened, number: int) -> bool:
    """Whether the owner of a directory in use has given the generation up meanwhile."""
    manifest = await read_manifest(opened.backend, opened.directory)
    return manifest is None or manifest.generation(number) is None


async def explain_loss(opened: Opened, number: int, error: Exception) -> Exception:
    """The error to raise for one that came while a generation was read: if its owner gave it up, that is why."""
    if opened.in_use and isinstance(error, (CorruptError, DeviceError)) and await gone(opened, number):
        return UsageError(
            f"generation {number} of {opened.directory.path} was given up by the directory's owner while it was read; "
            "choose a newer one"
        )
    return error


class Sink(Protocol):
    """Takes a generation's records, table by table, rows ascending; called in a thread of its own."""

    def begin(self, manifest: Manifest, generation: Generation) -> None:
        """What is going to come."""

    def put(self, entry: TableEntry, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Some rows, and their numbers [n, fields x width] (and padding); used again after the call."""


def stream(path: str | os.PathLike[str], number: int | None, sink: Sink, progress: Progress | None = None) -> None:
    """Hand all records of a generation to a sink; at most some MiB of them are in memory at a time.

    Args:
        path: the directory; it may be in use.
        number: the generation; None: the newest.
        progress: called now and then with records done and records in all.

    Raises:
        UsageError, MismatchError: the generation is not there.
        CorruptError: a record, or the index, is damaged.
        DeviceError: the directory cannot be read.
    """
    run(_stream(path, number, sink, progress))


async def _stream(path: str | os.PathLike[str], number: int | None, sink: Sink, progress: Progress | None) -> None:
    async with open_directory(path) as opened:
        manifest = await need_manifest(opened)
        generation = choose(manifest, number, opened.directory)
        sink.begin(manifest, generation)
        done, total = 0, sum(state.live_rows for state in generation.tables)
        try:
            for entry in manifest.tables:
                state = generation.state(entry.name)
                if state is None:
                    continue
                slots, checks = await load_index(opened, manifest, entry, state)
                async for rows, data in records(opened, entry, slots, checks):
                    sink.put(entry, rows, data.view(entry.moment_dtype))
                    done += len(rows)
                    if progress is not None:
                        progress(done, total)
        except (CorruptError, DeviceError) as error:
            raise await explain_loss(opened, generation.number, error) from error
