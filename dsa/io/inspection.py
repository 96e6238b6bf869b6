"""What a state directory holds, seen without owning it: tables, generations, space, files, and whose it is."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsa.errors import DeviceError, StateFileError
from dsa.io.directory import Directory
from dsa.io.manifest import Manifest, TableEntry
from dsa.io.manifest_file import read_manifest
from dsa.io.reading import Opened, log_layout, open_directory, open_index, run

_OWNER = re.compile(rb"disk-sparse-adam pid ([0-9]+) host ([^\n]*?) *\n")
_TRIES = 5


@dataclass(frozen=True)
class Holder:
    """Who has the lock, or had it last.

    Args:
        holds: True or False where the system tells, None where it does not.
        pid, host: of the last owner; None where nobody ever owned the directory.
    """

    holds: bool | None
    pid: int | None
    host: str | None


@dataclass(frozen=True)
class TableSpace:
    """One table.

    Args:
        rows, live_records: of the newest generation.
        log_bytes, allocated_bytes: the log's length, and what the file system holds of it.
        live_bytes: records that the newest generation refers to.
        dead_bytes: the rest of the segments that it refers to, their headers included.
        retained_bytes: segments that only older generations refer to.
        free_bytes: segments that no generation refers to (in a directory in use some are being written).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    moment_dtype: str
    rows: int
    live_records: int
    record_bytes: int
    segment_bytes: int
    log: str
    log_bytes: int
    allocated_bytes: int
    live_bytes: int
    dead_bytes: int
    retained_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class GenerationSummary:
    """One generation; `steps` and `live_records` by table."""

    number: int
    counted: bool
    created: float
    steps: dict[str, int]
    live_records: dict[str, int]


@dataclass(frozen=True)
class Inspection:
    """What a state directory holds.

    Args:
        files: bytes of each file of the program's own.
        problems: what was found wrong at a look: manifest, index headers, lengths of logs. Records are not looked at.
        notes: what is no problem but worth knowing.
    """

    path: str
    uuid: str | None
    holder: Holder
    tables: tuple[TableSpace, ...]
    generations: tuple[GenerationSummary, ...]
    files: dict[str, int]
    disk_free_bytes: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found wrong at a look."""
        return not self.problems


def lock_holder(directory: Directory) -> Holder:
    """Who has the directory's lock; the lock is not touched.

    The pid comes from the lock's text, which stays when the lock is given up. Whether it is held is what the kernel's
    list of locks says (Linux); a lock of another machine, or of a process that cannot be seen from here, is not in it.
    """
    try:
        with open(directory.lock_path, "rb") as file:
            owner = _OWNER.match(file.read(256))
            status = os.fstat(file.fileno())
    except FileNotFoundError:
        return Holder(False, None, None)
    except OSError as error:
        raise DeviceError(error.errno or 0, "reading the lock", directory.lock_path) from error
    pid = int(owner.group(1)) if owner else None
    host = owner.group(2).decode(errors="replace") if owner else None
    held = _held_on_linux(status, pid) if sys.platform == "linux" else None
    return Holder(held, pid, host)


def _held_on_linux(status: os.stat_result, pid: int | None) -> bool | None:
    # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234567 0 EOF
    # Not every file system has the device number there that it has in its files' status; then the pid must be right.
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) < 6 or words[1] != "FLOCK":
            continue
        place, _, inode = words[5].rpartition(":")
        if inode == str(status.st_ino) and (place == device or words[4] == str(pid)):
            return True
    return False


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Look at a state directory, in use or not; nothing is changed and no lock is taken.

    Raises:
        ConfigError, FormatError: it is no state directory.
        DeviceError: it cannot be read.
    """
    return run(_inspect(path))


async def _inspect(path: str | os.PathLike[str]) -> Inspection:
    async with open_directory(path, lock=False) as opened:
        for _ in range(_TRIES - 1):
            manifest, found = await _look(opened)
            # Files of a generation go when its owner gives it up: then what is missing is not missed.
            if not found.problems or await _same(opened, manifest):
                return found
        return (await _look(opened))[1]


async def _same(opened: Opened, manifest: Manifest | None) -> bool:
    try:
        return manifest is None or await read_manifest(opened.backend, opened.directory) == manifest
    except StateFileError:
        return True


async def _look(opened: Opened) -> tuple[Manifest | None, Inspection]:
    directory = opened.directory
    problems: list[str] = []
    notes: list[str] = []
    manifest = None
    try:
        manifest = await read_manifest(opened.backend, directory)
        if manifest is None:
            notes.append("no manifest: a creation (or a discard) was cut short; the directory counts as empty")
    except (StateFileError, DeviceError) as error:
        problems.append(str(error))
    tables = [await _table(opened, manifest, entry, problems) for entry in manifest.tables] if manifest else []
    generations = [
        GenerationSummary(
            generation.number,
            generation.counted,
            generation.created,
            {state.table: state.step for state in generation.tables},
            {state.table: state.live_rows for state in generation.tables},
        )
        for generation in (manifest.generations if manifest else ())
    ]
    files = {}
    for path in (directory.manifest_path, *directory.own_files()):
        with contextlib.suppress(FileNotFoundError):  # its owner removed it just now
            files[str(path.relative_to(directory.path))] = path.stat().st_size
    return manifest, Inspection(
        path=str(directory.path),
        uuid=manifest.uuid if manifest else None,
        holder=lock_holder(directory),
        tables=tuple(tables),
        generations=tuple(generations),
        files=files,
        disk_free_bytes=shutil.disk_usage(directory.path).free,
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(notes),
    )


async def _table(opened: Opened, manifest: Manifest, entry: TableEntry, problems: list[str]) -> TableSpace:
    path = opened.directory.file(entry.file)
    length = allocated = 0
    try:
        status = path.stat()
        length, allocated = status.st_size, getattr(status, "st_blocks", -(-status.st_size // 512)) * 512
    except OSError as error:
        problems.append(f"{path}: the log of table {entry.name!r} cannot be looked at: {error.strerror}")
    newest = np.zeros(0, np.bool_)
    older = np.zeros(0, np.bool_)
    live_records = 0
    for generation in manifest.generations:
        state = generation.state(entry.name)
        is_newest = generation is manifest.generations[-1]
        if is_newest and state is not None:
            live_records = state.live_rows
        if state is None or state.index_file is None:
            continue
        try:
            reader = await open_index(opened, manifest, state)
            try:
                segments = await reader.segments()
            finally:
                reader.close()
        except (StateFileError, DeviceError) as error:
            problems.append(str(error))
            segments = np.ones(state.n_segments, np.bool_)
        reach = int(np.max(np.flatnonzero(segments), initial=-1) + 1) * entry.segment_bytes
        if reach > length:
            problems.append(
                f"{path}: {length} bytes long, generation {generation.number} refers to bytes up to {reach}: the log "
                "was cut short"
            )
        if is_newest:
            newest = segments
        else:
            older = _either(older, segments)
    in_newest = int(np.count_nonzero(newest)) * entry.segment_bytes
    retained = int(np.count_nonzero(_either(older, newest))) * entry.segment_bytes - in_newest
    live = live_records * log_layout(entry).record_bytes
    return TableSpace(
        name=entry.name,
        shape=entry.shape,
        dtype=entry.dtype,
        moment_dtype=entry.moment_dtype,
        rows=entry.n_rows,
        live_records=live_records,
        record_bytes=entry.record_bytes,
        segment_bytes=entry.segment_bytes,
        log=entry.file,
        log_bytes=length,
        allocated_bytes=allocated,
        live_bytes=live,
        dead_bytes=max(in_newest - live, 0),
        retained_bytes=retained,
        free_bytes=max(length - in_newest - retained, 0),
    )


def _either(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> NDArray[np.bool_]:
    both = np.zeros(max(len(one), len(other)), np.bool_)
    both[: len(one)] |= one
    both[: len(other)] |= other
    return both
