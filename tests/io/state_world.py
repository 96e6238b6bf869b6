"""Small tables with real logs, written as training writes them, and the check that a directory holds just them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io.backends.base import Backend, File
from dsa.io.directory import Directory
from dsa.io.generations import Generations, TableImage
from dsa.io.manifest import TableEntry, table_file

RECORD_BYTES, SLOTS = 512, 4
SEGMENT_BYTES = RECORD_BYTES * SLOTS


def make_entry(name: str, n_rows: int, taken: list[str]) -> TableEntry:
    file = table_file(name, taken)
    fields = ("exp_avg", "exp_avg_sq")
    return TableEntry(name, (n_rows, 64), "float32", "float32", 64, fields, RECORD_BYTES, SEGMENT_BYTES, SLOTS, file)


@dataclass
class Table:
    entry: TableEntry
    file: File
    slots: NDArray[Any]
    checks: NDArray[np.uint32]
    n_segments: int = 0
    step: int = 0
    changed: bool = False

    def live(self) -> NDArray[np.bool_]:
        segments = np.zeros(self.n_segments, np.bool_)
        segments[self.slots[self.slots >= 0] // SLOTS] = True
        return segments

    def image(self) -> TableImage:
        live_rows = int((self.slots >= 0).sum())
        live = self.live()
        return TableImage(
            self.entry, self.slots, self.checks, live, self.step, live_rows, self.step * 3, self.changed, self.file
        )


@dataclass
class World:
    """A running program on one directory; `expected` has the tables of each generation, as they were committed."""

    backend: Backend
    directory: Directory
    generations: Generations
    tables: dict[str, Table] = field(default_factory=dict)
    expected: dict[int, dict[str, tuple[NDArray[Any], NDArray[np.uint32], int]]] = field(default_factory=dict)
    serial: int = 0

    @classmethod
    async def begin(cls, backend: Backend, path: Path, names: tuple[str, ...] = ("a", "b"), n_rows: int = 6) -> World:
        directory = Directory(path)
        directory.lock()
        generations = await Generations.open(backend, directory)
        self = cls(backend, directory, generations)
        entries: list[TableEntry] = []
        for name in names:
            entries.append(make_entry(name, n_rows, [entry.file for entry in entries]))
        await generations.create(entries)
        for entry in entries:
            self._add(entry, create=False)
        self.remember(0)
        return self

    def _add(self, entry: TableEntry, *, create: bool) -> Table:
        file = self.backend.open(self.directory.file(entry.file), create=create)
        table = Table(entry, file, np.full(entry.n_rows, -1, np.int32), np.zeros(entry.n_rows, np.uint32))
        self.tables[entry.name] = table
        return table

    def add_table(self, name: str, n_rows: int = 6) -> None:
        self._add(make_entry(name, n_rows, [t.entry.file for t in self.tables.values()]), create=True)

    async def reopen(self, number: int | None = None, backend: Backend | None = None) -> None:
        """As a new process would: everything from disk, going on from a generation (the newest)."""
        self.end()
        self.backend = backend or self.backend
        self.directory = Directory(self.directory.path)
        self.directory.lock()
        self.generations = await Generations.open(self.backend, self.directory)
        assert self.generations.manifest is not None
        self.tables = {}
        for entry in self.generations.manifest.tables:
            self._add(entry, create=False)
        self.serial += 1000
        await self.go_back(self.generations.numbers()[-1] if number is None else number)

    async def go_back(self, number: int) -> None:
        for name, table in self.tables.items():
            state = await self.generations.load(number, name, table.slots, table.checks)
            table.step, table.changed = state.step, False
            table.n_segments = max(table.n_segments, state.n_segments)
        self.generations.go_back(number)

    def end(self) -> None:
        self.directory.unlock()
        for table in self.tables.values():
            self.backend.close(table.file)

    def free_segments(self, name: str) -> list[int]:
        table = self.tables[name]
        used = table.live()
        retained = self.generations.retained_segments(name)
        n = max(len(used), len(retained))
        taken = np.zeros(n, np.bool_)
        taken[: len(used)] |= used
        taken[: len(retained)] |= retained
        return [*np.flatnonzero(~taken).tolist(), n]

    async def step(self, name: str, *rows: int) -> None:
        """Write new records of some rows into the first free segment; the index follows."""
        table = self.tables[name]
        segment = self.free_segments(name)[0]
        records = np.zeros((SLOTS, RECORD_BYTES), np.uint8)
        for i in range(len(rows)):
            self.serial += 1
            records[i] = np.random.default_rng(self.serial).integers(0, 256, RECORD_BYTES, np.uint8)
        await self.backend.write(table.file, segment * SEGMENT_BYTES, records.reshape(-1))
        table.n_segments = max(table.n_segments, segment + 1)
        for i, row in enumerate(rows):
            table.slots[row] = segment * SLOTS + i
            table.checks[row] = zlib.crc32(records[i])
        table.step += 1
        table.changed = True

    async def spoil_what_is_free(self, name: str) -> None:
        """Overwrite every segment that may be overwritten, as later steps will."""
        for segment in self.free_segments(name)[:-1]:
            junk = np.full(SEGMENT_BYTES, 0xEE, np.uint8)
            await self.backend.write(self.tables[name].file, segment * SEGMENT_BYTES, junk)

    def remember(self, number: int) -> None:
        self.expected[number] = {n: (t.slots.copy(), t.checks.copy(), t.step) for n, t in self.tables.items()}

    async def commit(self, *, counted: bool = True, keep: int | None = 2) -> int:
        assert self.generations.manifest is not None
        self.remember(self.generations.manifest.next_number)  # before: it may turn out to be durable after a failure
        images = [table.image() for table in self.tables.values()]
        number = await self.generations.commit(images, counted=counted, keep=keep)
        for table in self.tables.values():
            table.changed = False
        return number

    async def holds(self, path: Path, backend: Backend) -> tuple[int, ...]:
        """The generations in a directory, each verified down to its records; what differs raises."""
        directory = Directory(path)
        generations = await Generations.open(backend, directory)
        for number in generations.numbers():
            expected = self.expected[number]
            assert generations.manifest is not None
            found = generations.manifest.generation(number)
            assert found is not None
            assert {state.table for state in found.tables} == set(expected)
            for name, (slots, checks, step) in expected.items():
                got_slots, got_checks = np.full(len(slots), 99, np.int32), np.full(len(slots), 99, np.uint32)
                state = await generations.load(number, name, got_slots, got_checks)
                assert state.step == step
                np.testing.assert_array_equal(got_slots, slots)
                np.testing.assert_array_equal(got_checks, checks)
                entry = generations.manifest.entry(name)
                assert entry is not None
                log = directory.file(entry.file).read_bytes()
                for slot, check in zip(slots[slots >= 0], checks[slots >= 0], strict=True):
                    assert zlib.crc32(log[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]) == check
                    assert generations.retained_segments(name)[slot // SLOTS]
        return generations.numbers()
