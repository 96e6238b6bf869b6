"""From the optimizer's parameters to tables: the arenas that they share, their indexes, their place on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dsa.errors import MismatchError
from dsa.io.cache import NO_FRAME, Arena
from dsa.io.cache_budget import divide
from dsa.io.jobs import Table
from dsa.io.layout import RecordLayout, SegmentLayout, choose_segment_bytes, row_bytes_for, segment_layout
from dsa.io.manifest import Generation, Manifest, TableEntry, table_file
from dsa.io.memory import allocate, touch
from dsa.io.segments import Segments


@dataclass(frozen=True)
class TableSpec:
    """What the engine is told about a parameter.

    Args:
        name: how its table is found again.
        shape, dtype: of the parameter.
        width: elements of a row.
        moment_dtype: "float32" or "float64".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    width: int
    moment_dtype: str

    @property
    def n_rows(self) -> int:
        """Rows of the parameter."""
        return self.shape[0]

    @property
    def record(self) -> RecordLayout:
        """Layout of the table's records."""
        return RecordLayout(self.width, self.moment_dtype)


def entries_for(
    specs: Sequence[TableSpec],
    manifest: Manifest | None,
    segment_bytes: int | None,
    cache_bytes: int,
    *,
    grow: bool = False,
) -> list[TableEntry]:
    """The tables as the manifest describes them, or, those that it does not know, as it will.

    Args:
        segment_bytes: size of new tables' segments; None: chosen by the size of table and cache.
        grow: a table may have more rows than the manifest says, all of them never written.
    """
    entries: list[TableEntry] = []
    for spec in specs:
        known = manifest.entry(spec.name) if manifest is not None else None
        if known is not None:
            entries.append(replace(known, shape=spec.shape) if grow and _has_grown(spec, known) else known)
            continue
        record_bytes = spec.record.record_bytes
        wanted = segment_bytes or choose_segment_bytes(record_bytes, spec.n_rows, cache_bytes)
        layout = segment_layout(record_bytes, spec.n_rows, wanted)
        taken = [entry.file for entry in [*(manifest.tables if manifest is not None else ()), *entries]]
        entries.append(
            TableEntry(
                name=spec.name,
                shape=spec.shape,
                dtype=spec.dtype,
                moment_dtype=spec.moment_dtype,
                width=spec.width,
                fields=spec.record.fields,
                record_bytes=record_bytes,
                segment_bytes=layout.segment_bytes,
                slots_per_segment=layout.slots,
                file=table_file(spec.name, taken),
            )
        )
    return entries


def lay_out(
    specs: Sequence[TableSpec], entries: Sequence[TableEntry], cache_bytes: int, known: Sequence[Table]
) -> tuple[list[Table], list[Arena]]:
    """Make arenas and tables; no frame holds a row.

    Args:
        known: the tables of the first specs, whose indexes and logs are kept; the others' are empty and not open.
    """
    rows_by_record: dict[int, int] = {}
    for spec in specs:
        size = spec.record.record_bytes
        rows_by_record[size] = rows_by_record.get(size, 0) + spec.n_rows
    arenas: dict[int, Arena] = {}
    for size, frames in divide(cache_bytes, rows_by_record).items():
        memory = allocate((frames, size), np.uint8)
        touch(memory)
        arenas[size] = Arena(memory)
    tables = []
    for number, (spec, entry) in enumerate(zip(specs, entries, strict=True)):
        arena = arenas[spec.record.record_bytes]
        frame_of = allocate(spec.n_rows, np.int32)
        frame_of[:] = NO_FRAME
        old = known[number] if number < len(known) else None
        segments = old.segments if old is not None else _empty_segments(spec, entry)
        table = Table(number, spec.name, spec.n_rows, spec.record, arena, arena.add_table(frame_of), segments)
        if old is not None:
            table.file, table.file_segments, table.identity = old.file, old.file_segments, old.identity
            table.step, table.in_generation = old.step, old.in_generation
        tables.append(table)
    return tables, list(arenas.values())


def _has_grown(spec: TableSpec, entry: TableEntry) -> bool:
    """Whether the parameter is the table with more rows; not where their numbers need more bytes in each segment."""
    same_rows = spec.shape[1:] == entry.shape[1:] and spec.dtype == entry.dtype
    return same_rows and spec.n_rows > entry.n_rows and row_bytes_for(spec.n_rows) == row_bytes_for(entry.n_rows)


def check_match(
    where: Path, specs: Sequence[TableSpec], manifest: Manifest, generation: Generation, *, grow: bool = False
) -> None:
    """Refuse a generation that lacks a table, or has one of another shape or dtype (with `grow` more rows are fine).

    Raises:
        MismatchError: with both values.
    """
    for spec in specs:
        entry = manifest.entry(spec.name)
        if entry is None or generation.state(spec.name) is None:
            names = ", ".join(state.table for state in generation.tables) or "none"
            raise MismatchError(
                f"{where}: generation {generation.number} has no table {spec.name!r}; it has {names}. Give the "
                "optimizer the parameters that the state was made with (named_parameters()), or another state_dir"
            )
        if grow and _has_grown(spec, entry):
            continue
        if entry.shape != spec.shape or entry.dtype != spec.dtype:
            remedy = ""
            if _has_grown(spec, entry):
                remedy = "; a table that has grown is taken with io=IOConfig(grow_tables=True)"
            raise MismatchError(
                f"{where}: table {spec.name!r} is {entry.dtype} of shape {entry.shape} on disk, the parameter is "
                f"{spec.dtype} of shape {spec.shape}; use the model that the state was made with, or another "
                f"state_dir{remedy}"
            )


def _segment_layout(entry: TableEntry) -> SegmentLayout:
    return SegmentLayout(entry.record_bytes, entry.slots_per_segment, row_bytes_for(entry.n_rows), entry.segment_bytes)


def _empty_segments(spec: TableSpec, entry: TableEntry) -> Segments:
    layout = _segment_layout(entry)
    # A log may grow to some times its records; beyond 2**31 slots an index entry needs 8 bytes.
    kind = np.int32 if spec.n_rows * 16 < 2**31 else np.int64
    slots = allocate(spec.n_rows, kind)
    slots[:] = -1
    return Segments(layout, slots, allocate(spec.n_rows, np.uint32))
