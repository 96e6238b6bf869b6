"""One generation of a state directory as a directory of its own, without what is dead."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.errors import DsaError, UsageError
from dsa.io import indexfile
from dsa.io.backends.base import Backend, File
from dsa.io.directory import Directory
from dsa.io.layout import table_identity, write_header
from dsa.io.manifest import Generation, Manifest, TableEntry, TableState, index_file
from dsa.io.manifest_file import discard, replace_manifest
from dsa.io.memory import allocate
from dsa.io.reading import (
    Opened,
    Progress,
    choose,
    explain_loss,
    load_index,
    log_layout,
    need_manifest,
    open_directory,
    records,
    run,
)

# The copy and the original go on apart, under one UUID. A state dict must not find another generation of its number in
# the other directory: so the copy's next numbers begin far away, at a place that no two copies share.
_NUMBER_STRIDE = 1000
_NUMBER_STRIDES = 1_000_000


@dataclass(frozen=True)
class Copied:
    """What was copied: the generation, its records and their bytes, the bytes of the new directory's logs."""

    generation: int
    next_generation: int
    tables: tuple[str, ...]
    records: int
    record_bytes: int
    log_bytes: int


def copy_generation(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    number: int | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Make a new state directory that holds one generation only; all of it is durable when this returns.

    The copy has the UUID of the original, so that a state dict that names the generation loads from it.

    Args:
        source: the directory; it may be in use.
        target: a directory that is missing or empty (what a creation that was cut short left counts as nothing).
        number: the generation; None: the newest.
        progress: called now and then with records done and records in all.

    Raises:
        UsageError: `target` is not empty, or `source` holds no generation.
        MismatchError: the generation is not there.
        CorruptError: a record, or the index, is damaged; nothing was made.
        DeviceError: reading or writing failed; nothing was made.
    """
    return run(_copy(source, target, number, progress))


async def _copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    number: int | None,
    progress: Progress | None,
) -> Copied:
    new = Directory(target)
    _refuse_used(new)
    async with open_directory(source) as opened:
        manifest = await need_manifest(opened)
        generation = choose(manifest, number, opened.directory)
        new.lock()
        try:
            _refuse_used(new)
            return await _fill(opened, manifest, generation, new, progress)
        except BaseException as error:
            with contextlib.suppress(DsaError):  # the first error is the one to tell
                await discard(opened.backend, new)
            if isinstance(error, Exception):
                told = await explain_loss(opened, generation.number, error)
                if told is not error:
                    raise told from error
            raise
        finally:
            new.unlock()


def _refuse_used(new: Directory) -> None:
    try:
        names = set(os.listdir(new.path))
    except OSError:
        return  # missing, or lock() says what is wrong
    if new.manifest_path.name in names or names - {"LOCK", "tables", "index", "manifest.json.tmp"}:
        raise UsageError(f"{new.path} is not empty; name a new or an empty directory to copy to")


async def _fill(
    opened: Opened, manifest: Manifest, generation: Generation, new: Directory, progress: Progress | None
) -> Copied:
    backend = opened.backend
    await discard(backend, new)
    new.make_subdirectories()
    total = sum(state.live_rows for state in generation.tables)
    done, log_bytes, record_bytes = 0, 0, 0
    entries, states = [], []
    for state in generation.tables:
        entry = next(entry for entry in manifest.tables if entry.name == state.table)
        slots, checks = await load_index(opened, manifest, entry, state)
        log = _Log(backend, new, entry, manifest.uuid)
        try:
            async for rows, data in records(opened, entry, slots, checks):
                await log.append(rows, data)
                done += len(rows)
                record_bytes += data.nbytes
                if progress is not None:
                    progress(done, total)
            await log.finish()
        finally:
            log.close()
        log_bytes += log.segments * entry.segment_bytes
        entries.append(entry)
        states.append(await _index(backend, new, manifest.uuid, generation.number, entry, state, slots, checks))
    next_number = manifest.next_number + _NUMBER_STRIDE * (1 + secrets.randbelow(_NUMBER_STRIDES))
    copied = replace(generation, counted=True, tables=tuple(states))
    await _publish(backend, new, Manifest(manifest.uuid, next_number, tuple(entries), (copied,)))
    names = tuple(entry.name for entry in entries)
    return Copied(generation.number, next_number, names, done, record_bytes, log_bytes)


class _Log:
    """A new log, written segment by segment, each of them full but the last."""

    def __init__(self, backend: Backend, new: Directory, entry: TableEntry, uuid: str) -> None:
        self._backend = backend
        self._entry = entry
        self._layout = log_layout(entry)
        self._identity = table_identity(uuid, entry.name)
        self._buffer = allocate(self._layout.segment_bytes, np.uint8)
        self._rows = np.empty(self._layout.slots, np.int64)
        self._count = 0
        self.segments = 0
        self._file: File = backend.open(new.file(entry.file), create=True, direct=True)

    async def append(self, rows: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
        """Add records, uint8 [n, record_bytes]."""
        first = 0
        while first < len(rows):
            n = min(len(rows) - first, self._layout.slots - self._count)
            begin = self._layout.header_bytes + self._count * self._layout.record_bytes
            place = self._buffer[begin : begin + n * self._layout.record_bytes]
            place.reshape(n, self._layout.record_bytes)[:] = data[first : first + n]
            self._rows[self._count : self._count + n] = rows[first : first + n]
            self._count += n
            first += n
            if self._count == self._layout.slots:
                await self._write()

    async def _write(self) -> None:
        layout = self._layout
        self._buffer[layout.header_bytes + self._count * layout.record_bytes :] = 0
        write_header(self._buffer, layout, self.segments, self._identity, self._rows[: self._count])
        # The whole segment: files are whole segments long.
        await self._backend.write(self._file, self.segments * layout.segment_bytes, self._buffer)
        self.segments += 1
        self._count = 0

    async def finish(self) -> None:
        """Write what is left, and sync."""
        if self._count:
            await self._write()
        await self._backend.sync(self._file)

    def close(self) -> None:
        self._backend.close(self._file)


async def _index(
    backend: Backend,
    new: Directory,
    uuid: str,
    number: int,
    entry: TableEntry,
    state: TableState,
    slots: NDArray[Any],
    checks: NDArray[np.uint32],
) -> TableState:
    """Write the new index: the records lie in the order of their rows. (`slots` is changed.)"""
    written = slots >= 0
    live_rows = int(np.count_nonzero(written))
    if live_rows == 0:
        return replace(state, index_file=None, index_check=0, live_rows=0, n_segments=0)
    slots[written] = np.arange(live_rows, dtype=slots.dtype)
    n_segments = -(-live_rows // entry.slots_per_segment)
    file = index_file(entry, number)
    header = indexfile.Header(uuid, entry.name, number, len(slots), slots.dtype.itemsize, n_segments)
    check = await indexfile.write(backend, new.file(file), header, np.ones(n_segments, np.bool_), slots, checks)
    return replace(state, index_file=file, index_check=check, live_rows=live_rows, n_segments=n_segments)


async def _publish(backend: Backend, new: Directory, manifest: Manifest) -> None:
    """As a creation does it: all names are durable before the manifest can be seen."""
    for path in (new.tables_path, new.index_path, new.path, *new.ancestors()):
        await backend.sync_directory(path)
    await replace_manifest(backend, new, manifest)
