"""What the bookkeeping hands out and takes back: tables, jobs, the running step, counters. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io.cache import Arena, Frames, Rows
from dsa.io.kernels_on_rows import count_members
from dsa.io.layout import RecordLayout, SegmentLayout
from dsa.io.segments import NEVER_WRITTEN, Checks, Segments
from dsa.io.window import Batch


@dataclass
class Table:
    """The rows of one parameter: where they are in RAM and on disk."""

    number: int
    name: str
    n_rows: int
    record: RecordLayout
    arena: Arena
    arena_table: int
    segments: Segments
    file: Any = None  # the log's open file
    file_segments: int = 0  # the file's length, in segments
    identity: int = 0  # what its segment headers carry
    step: int = 0  # the parameter's step count
    in_generation: bool = False  # some committed generation knows the table

    @property
    def layout(self) -> SegmentLayout:
        """Geometry of the log's segments."""
        return self.segments.layout


@dataclass
class FillJob:
    """Records to bring into frames: rows ascending by slot, or rows that were never written and need no read."""

    ticket: int
    table: Table
    rows: Rows
    frames: Frames
    slots: NDArray[np.int64]
    checks: Checks
    begun: bool = False  # somebody is bringing them in

    @property
    def new(self) -> bool:
        """Whether the rows were never written: their frames become all zero."""
        return bool(self.slots[0] == NEVER_WRITTEN)


@dataclass
class WriteJob:
    """Dirty frames to write as one segment."""

    table: Table
    segment: int
    frames: Frames
    rows: Rows
    versions: NDArray[np.uint32]
    checks: Checks
    for_checkpoint: bool


@dataclass
class CleanJob:
    """Segments whose live records are to be moved to a segment of their own."""

    ticket: int
    table: Table
    victims: list[int]
    target: int
    used: list[int]


@dataclass
class Step:
    """A step, or a read of rows, that is running."""

    batch: Batch
    lasting: bool  # leases its rows (a read does not)
    announced: bool = False  # something was announced for it
    leased: bool = False  # some row was leased: from here on there is no way back
    in_parts: bool = False
    used: frozenset[int] = frozenset()  # the announced batches that it used up


@dataclass
class Tally:
    """Counters of what steps and the engine did."""

    steps: int = 0
    rows_touched: int = 0
    rows_announced: int = 0  # of the rows touched
    misses: int = 0  # rows that had to be brought into frames for steps, new ones included
    rows_new: int = 0  # frames filled with zeros
    rows_read: int = 0  # frames filled from the log
    rows_written: int = 0
    rows_cleaned: int = 0
    segments_cleaned: int = 0
    judged_steps: int = 0  # steps for which something was announced, and nothing of it forgotten
    judged_rows: int = 0
    judged_announced: int = 0

    def judge(self, batch: Batch, covered: Sequence[Batch]) -> None:
        """Count what a step touches, how much of it had been announced, and what was brought in for that.

        Args:
            covered: the announced batches that it uses up.
        """
        announced = 0
        for piece in batch.pieces:
            said = [other.rows for used in covered for other in used.pieces if other.table == piece.table]
            whole = len(said) == 1 and np.array_equal(said[0], piece.rows)
            announced += len(piece.rows) if whole else count_members(piece.rows, said)
        self.misses += sum(used.brought_rows for used in covered)
        if covered and not any(used.forgotten for used in covered):
            self.judged_steps += 1
            self.judged_rows += batch.rows
            self.judged_announced += announced
        self.rows_touched += batch.rows
        self.rows_announced += announced
