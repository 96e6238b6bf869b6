"""One table of a state directory against all that its indexes and its log's segments say of it.

The log is read once, in whole segments, for as many indexes at a time as fit a bound of memory. Which rows a segment
holds is what its header names; only where that is wrong, or not what the index says, the index is searched.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.config import MIB
from dsa.errors import DeviceError, StateFileError
from dsa.io.backends.base import Bytes, Extents, File
from dsa.io.compile import kernel
from dsa.io.findings import NO_ROWS, Damage, Verification, Work, file_bytes
from dsa.io.indexfile import DamagedChunk
from dsa.io.layout import SegmentLayout, read_header, record_check, table_identity
from dsa.io.manifest import Manifest, TableEntry, TableState
from dsa.io.memory import allocate
from dsa.io.reading import Opened, log_layout, open_index

INDEX_BYTES_AT_ONCE = 512 * MIB  # and one index at least
_READ_BYTES = 4 * MIB
_READS_IN_FLIGHT = 3


@dataclass
class _Index:
    """A table's index file, the generations that refer to it, and, once loaded, what it says."""

    state: TableState
    generations: tuple[int, ...]
    slots: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.int32))
    checks: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    live: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))


class TableCheck:
    """One table's indexes and log."""

    def __init__(self, opened: Opened, manifest: Manifest, entry: TableEntry, found: Verification, work: Work) -> None:
        self._opened = opened
        self._manifest = manifest
        self._entry = entry
        self._found = found
        self._work = work
        self._layout: SegmentLayout = log_layout(entry)
        self._identity = table_identity(manifest.uuid, entry.name)
        self._path = opened.directory.file(entry.file)
        self._bad_headers: set[int] = set()
        self._lock = threading.Lock()  # segments are checked in several threads

    def _add(self, kind: str, path: Path, text: str, generations: Sequence[int], *places: NDArray[np.int64]) -> None:
        damage = Damage(kind, str(path), text, self._entry.name, tuple(generations), *places)
        self._found.damage.append(damage)

    async def verify(self) -> None:
        indexes = self._indexes()
        numbers = sorted({number for index in indexes for number in index.generations})
        try:
            file = self._opened.backend.open(self._path, writable=False, direct=True)
        except DeviceError as error:
            self._add("log", self._path, f"{self._path}: the log of table {self._entry.name!r}: {error}", numbers)
            return
        try:
            group: list[_Index] = []
            nbytes = 0
            for index in indexes:
                if not await self._load(index):
                    continue
                group.append(index)
                nbytes += index.slots.nbytes + index.checks.nbytes
                if nbytes + index.slots.nbytes + index.checks.nbytes > INDEX_BYTES_AT_ONCE:
                    await self._check_log(file, group)
                    group, nbytes = [], 0
            await self._check_log(file, group)
            self._found.damage.sort(key=lambda one: (one.path, one.offsets_bytes[:1].tolist(), one.kind != "segment"))
        finally:
            self._opened.backend.close(file)

    def _indexes(self) -> list[_Index]:
        found: dict[str, _Index] = {}
        for generation in self._manifest.generations:
            state = generation.state(self._entry.name)
            if state is None or state.index_file is None:
                continue
            known = found.get(state.index_file)
            numbers = (*(known.generations if known else ()), generation.number)
            found[state.index_file] = _Index(state, numbers)
        return list(found.values())

    async def _load(self, index: _Index) -> bool:
        """Read an index and check it against itself and the manifest; False where it cannot be used at all."""
        state, n_rows = index.state, self._entry.n_rows
        path = self._opened.directory.file(str(state.index_file))
        damaged: list[tuple[str, DamagedChunk]] = []
        try:
            reader = await open_index(self._opened, self._manifest, state)
            try:
                if reader.header.n_rows > n_rows:
                    text = f"{path}: {reader.header.n_rows} rows, the table has {n_rows}; at byte 40"
                    self._add("index", path, text, index.generations)
                    return False
                of_segments: list[DamagedChunk] = []
                segments = await reader.segments(of_segments)
                index.slots = allocate(n_rows, np.int32 if reader.header.slot_bytes == 4 else np.int64)
                index.checks = allocate(n_rows, np.uint32)
                of_rows: list[DamagedChunk] = []
                await reader.index(index.slots, index.checks, of_rows)
            finally:
                reader.close()
        except (StateFileError, DeviceError) as error:
            self._add("index", path, str(error), index.generations)
            return False
        self._work.add(file_bytes(path))
        damaged += [("", chunk) for chunk in of_segments]
        damaged += [(f": rows {_rows_of(chunk, n_rows)} could not be checked", chunk) for chunk in of_rows]
        for consequence, chunk in damaged:
            self._add("index", path, f"{chunk.error}{consequence}", index.generations)
        for chunk in of_rows:
            index.slots[chunk.first : chunk.first + chunk.count] = -1
        index.live = np.zeros(state.n_segments, np.int32)
        total, beyond = _count(index.slots, self._layout.slots, index.live)
        if beyond >= 0:
            text = f"{path}: row {beyond} is in slot {index.slots[beyond]}, the log has {state.n_segments} segments"
            self._add("index", path, text, index.generations)
        if not of_rows and total != state.live_rows:
            text = f"{path}: {total} rows have a slot, the manifest says {state.live_rows}"
            self._add("index", path, text, index.generations)
        if not of_rows and not of_segments and not np.array_equal(segments, index.live > 0):
            wrong = int(np.argmax(segments != (index.live > 0)))
            text = f"{path}: whether segment {wrong} is referred to differs between the slots and the segments' bits"
            self._add("index", path, text, index.generations)
        return True

    async def _check_log(self, file: File, group: Sequence[_Index]) -> None:
        length = max((len(index.live) for index in group), default=0)
        wanted = np.zeros(length, np.bool_)
        for index in group:
            wanted[: len(index.live)] |= index.live > 0
        runs = iter(_runs(np.flatnonzero(wanted), max(1, _READ_BYTES // self._layout.segment_bytes)))
        size = os.fstat(file.fd).st_size // self._layout.segment_bytes * self._layout.segment_bytes
        await asyncio.gather(*(self._read_runs(file, size, runs, group) for _ in range(_READS_IN_FLIGHT)))

    async def _read_runs(self, file: File, size: int, runs: Iterator[tuple[int, int]], group: Sequence[_Index]) -> None:
        unit = self._layout.segment_bytes
        buffer = allocate(0, np.uint8)
        for first, count in runs:
            if len(buffer) < count * unit:
                buffer = allocate(count * unit, np.uint8)
            there = max(0, min(count, size // unit - first))
            try:
                await self._read(file, first, there, buffer, group)
                read = there
            except DeviceError:
                read = 0  # one by one, so that what can be read is checked
            for segment in range(first + read, first + count):
                failure = f"lies beyond the end of the log, which has {size} bytes: the log was cut short"
                if segment < first + there:
                    try:
                        await self._read(file, segment, 1, buffer, group)
                        continue
                    except DeviceError as error:
                        failure = f"cannot be read: {error}"
                self._check_segment(segment, None, failure, group)
            self._found.bytes_read += there * unit
            self._work.add(there * unit)

    async def _read(self, file: File, first: int, count: int, buffer: Bytes, group: Sequence[_Index]) -> None:
        """Read segments and check them, in the backend's thread."""
        if not count:
            return
        unit = self._layout.segment_bytes
        extent = Extents(*(np.array([value], np.int64) for value in (first * unit, count * unit, 0)))

        def check() -> None:
            for i in range(count):
                self._check_segment(first + i, buffer[i * unit : (i + 1) * unit], "", group)

        await self._opened.backend.read(file, extent, buffer, check)

    def _check_segment(self, segment: int, data: Bytes | None, failure: str, group: Sequence[_Index]) -> None:
        """Check a segment's header, and each record that an index of the group refers to."""
        layout = self._layout
        users = [index for index in group if segment < len(index.live) and index.live[segment]]
        numbers = sorted({number for index in users for number in index.generations})
        place = f"{self._path}, segment {segment} at byte {segment * layout.segment_bytes}"
        named, fault = NO_ROWS, f"{place}: {failure}" if data is None else ""
        if data is not None:
            try:
                named = read_header(data, layout, segment, self._identity, self._path)
            except StateFileError as error:
                fault = str(error)
        wrong: dict[tuple[int, int], list[int]] = {}
        for index in users:
            rows, at = _records_in(index, segment, layout.slots, named)
            if len(rows) < index.live[segment]:
                held = set(rows.tolist())
                rows, at = _pointing_into(index, segment, layout.slots)
                lost = [row for row in rows.tolist() if row not in held]
                fault = fault or f"{place}: the header does not name the rows {lost}, which the index has there"
            bad = np.arange(len(rows)) if data is None else _wrong_ones(data, layout, rows, at, index.checks)
            with self._lock:
                self._found.record_checks += len(rows)
            for i in bad.tolist():
                wrong.setdefault((int(rows[i]), int(at[i])), []).extend(index.generations)
        if fault and segment not in self._bad_headers:
            self._bad_headers.add(segment)
            self._add("segment", self._path, fault, numbers, NO_ROWS, np.array([segment * layout.segment_bytes]))
        self._add_records(segment, wrong, failure or "does not match its check")

    def _add_records(self, segment: int, wrong: dict[tuple[int, int], list[int]], text: str) -> None:
        by_generations: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for place, numbers in wrong.items():
            by_generations.setdefault(tuple(sorted(numbers)), []).append(place)
        for generations, places in by_generations.items():
            rows, at = np.array(places, np.int64).T
            offsets = self._layout.offsets(at + segment * self._layout.slots)
            order = np.argsort(offsets, kind="stable")
            self._add("record", self._path, text, generations, rows[order], offsets[order])


def _rows_of(chunk: DamagedChunk, n_rows: int) -> str:
    return f"{chunk.first} to {min(chunk.first + chunk.count, n_rows) - 1}"


def _runs(segments: NDArray[np.intp], most: int) -> Iterator[tuple[int, int]]:
    """First and number of each run of consecutive segments, `most` at a time."""
    breaks = np.flatnonzero(np.diff(segments) != 1) + 1
    for run_of in np.split(segments, breaks):
        for i in range(0, len(run_of), most):
            yield int(run_of[i]), min(most, len(run_of) - i)


def _records_in(
    index: _Index, segment: int, slots: int, named: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Those of the rows that a segment's header names whose record the index has there, and their places in it."""
    rows, at = np.empty(len(named), np.int64), np.empty(len(named), np.int64)
    n = _select(named, segment * slots, index.slots, rows, at)
    return rows[:n], at[:n]


def _pointing_into(index: _Index, segment: int, slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All rows that the index has in a segment, found without its header, and their places in it."""
    count = int(index.live[segment])
    rows, at = np.empty(count, np.int64), np.empty(count, np.int64)
    _find(index.slots, segment * slots, slots, rows, at)
    return rows, at


def _wrong_ones(
    data: Bytes, layout: SegmentLayout, rows: NDArray[np.int64], at: NDArray[np.int64], checks: NDArray[np.uint32]
) -> NDArray[np.int64]:
    wrong = np.empty(len(rows), np.int64)
    words = data[layout.header_bytes :].view(np.uint64)
    n = _check(words, layout.record_bytes // 8, rows, at, checks, wrong)
    return wrong[:n]


@kernel
def _count(slots: NDArray[Any], slots_per_segment: int, live: NDArray[np.int32]) -> tuple[int, int]:
    """Records of each segment and in all; the first row whose slot is none of the log's (not counted), or -1."""
    total, beyond = 0, -1
    for row in range(len(slots)):
        slot = slots[row]
        if slot < -1 or slot >= len(live) * slots_per_segment:
            if beyond < 0:
                beyond = row
        elif slot >= 0:
            live[slot // slots_per_segment] += 1
            total += 1
    return total, beyond


@kernel
def _select(
    named: NDArray[np.int64],
    first_slot: int,
    slots: NDArray[Any],
    rows: NDArray[np.int64],
    at: NDArray[np.int64],
) -> int:
    n = 0
    for i in range(len(named)):
        row = named[i]
        if 0 <= row < len(slots) and slots[row] == first_slot + i:
            rows[n] = row
            at[n] = i
            n += 1
    return n


@kernel
def _find(slots: NDArray[Any], first_slot: int, n_slots: int, rows: NDArray[np.int64], at: NDArray[np.int64]) -> None:
    n = 0
    for row in range(len(slots)):
        place = slots[row] - first_slot
        if 0 <= place < n_slots:
            rows[n] = row
            at[n] = place
            n += 1


@kernel
def _check(
    words: NDArray[np.uint64],
    record_words: int,
    rows: NDArray[np.int64],
    at: NDArray[np.int64],
    checks: NDArray[np.uint32],
    wrong: NDArray[np.int64],
) -> int:
    """The records whose check is wrong; how many."""
    n = 0
    for i in range(len(rows)):
        record = words[at[i] * record_words : (at[i] + 1) * record_words]
        if record_check(record, rows[i]) != checks[rows[i]]:
            wrong[n] = i
            n += 1
    return n
