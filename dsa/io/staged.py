"""Batches that are being copied to an accelerator ahead of their step, and leases that outlast it. Pure.

A batch that is staged has pins of its own on its frames, so that nobody gives them up while they are gathered. A row
that a step updated on the device keeps its pin and its lease until its record is back in its frame (rules 2, 6, 7).
Every method is called under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsa.io.bookkeeping import Bookkeeping
from dsa.io.cache import DONE_FRAME, NO_FRAME, Frames, Rows
from dsa.io.jobs import Step
from dsa.io.kernels_on_rows import shared
from dsa.io.window import Batch, Kind, Piece

_MOST_REFUSALS = 7  # after so many, 64 numbers are passed over each time


@dataclass(frozen=True)
class StagedPiece:
    """Rows of one table, ascending, and their frames."""

    table: int
    rows: Rows
    frames: Frames


@dataclass
class StageJob:
    """An announced batch to copy to the device, its frames pinned."""

    sequence: int
    pieces: list[StagedPiece]
    gathering: bool = True  # its frames are being read
    unwanted: bool = False  # it is given up: its frames are needed, its batch has ended, or it is out of date


@dataclass(frozen=True)
class Lease:
    """Rows of one table that a step has leased: where they are in the step, in the staged batch, and in frames."""

    table: int
    positions: NDArray[np.int64]
    at: NDArray[np.int64]
    frames: Frames


class StagedBatches:
    """The staged batches of one device, in window order, and the leases that are not back yet."""

    def __init__(self, books: Bookkeeping) -> None:
        self._books = books
        self.jobs: list[StageJob] = []
        self._out: list[Lease] = []
        self._refusals = 0  # one after the other
        self._last_refused = 0  # the last sequence number that is not staged

    def next(self, tables: frozenset[int], most_bytes: int) -> StageJob | None:
        """The first batch of the window that is not staged, if all its rows of these tables are in frames; pinned.

        None while a step runs: what it leases would be out of date in a batch that is staged beside it. Look-ups of
        the forward pass (hooks) are rows of the very next step, not ahead of it. None, too, until what was refused
        has ended.
        """
        books = self._books
        if books.frozen or books.step is not None:
            return None
        staged = {job.sequence for job in self.jobs}
        for batch in books.window.in_order():
            pieces = [piece for piece in batch.pieces if piece.table in tables]
            if batch.kind is Kind.HOOK or batch.sequence in staged or not pieces:
                continue
            if batch.sequence <= self._last_refused:
                return None
            return self._begin(batch, pieces, most_bytes)
        return None

    def _begin(self, batch: Batch, pieces: Sequence[Piece], most_bytes: int) -> StageJob | None:
        job, nbytes = StageJob(batch.sequence, []), 0
        for piece in pieces:
            table = self._books.tables[piece.table]
            frames = table.arena.frame_of[table.arena_table][piece.rows]
            nbytes += len(piece.rows) * table.record.record_bytes
            if nbytes > most_bytes or (frames < 0).any() or table.arena.filling(frames):
                return None
            job.pieces.append(StagedPiece(piece.table, piece.rows, frames))
        for staged in job.pieces:
            table = self._books.tables[staged.table]
            staged.frames[:] = NO_FRAME
            table.arena.pin_resident(table.arena_table, staged.rows, staged.frames)
        self.jobs.append(job)
        return job

    def gathered(self, job: StageJob) -> None:
        """The frames have been read."""
        job.gathering = False
        if job.unwanted:
            self._let_go(job)

    def give_up(self, job: StageJob) -> None:
        """The batch is not staged any more; its frames are free to go as soon as nobody reads them."""
        if not job.unwanted:
            job.unwanted = True
            if not job.gathering:
                self._let_go(job)

    def refuse(self, job: StageJob) -> None:
        """The device has no memory for the batch: it is given up, and none is staged before it has ended.

        Nor are those soon after it, more of them each time: an allocation that fails makes the device wait.
        """
        self._refusals = min(self._refusals + 1, _MOST_REFUSALS)
        self._last_refused = job.sequence + 2 ** (self._refusals - 1) - 1
        if job.gathering:
            self.gathered(job)
        self.give_up(job)

    def give_back(self) -> bool:
        """A step lacks frames: give up the youngest staged batch; False where none can be given up now."""
        for job in reversed(self.jobs):
            if not job.unwanted:
                self.give_up(job)
                return not job.gathering
        return False

    def outlived(self, job: StageJob) -> bool:
        """Whether the batch has ended and no running step uses it."""
        return self._books.step is None and self._books.window.get(job.sequence) is None

    def _let_go(self, job: StageJob) -> None:
        self.jobs.remove(job)
        for piece in job.pieces:
            self._books.tables[piece.table].arena.unpin(piece.frames)

    # Leases that outlast their step.

    def take(self, job: StageJob, step: Step) -> list[Lease]:
        """Lease those rows of the step that the job holds and that are not done; the others are unpinned.

        The job's pins on the rows leased stay until `back`.
        """
        self._refusals = 0
        self.jobs.remove(job)
        pieces = {piece.table: piece for piece in step.batch.pieces}
        leases = []
        for staged in job.pieces:
            table = self._books.tables[staged.table]
            piece = pieces.get(staged.table)
            left = np.ones(len(staged.rows), np.bool_)
            if piece is not None and piece.remaining:
                piece.open()
                positions, at = shared(piece.rows, staged.rows)
                new = piece.frames[positions] != DONE_FRAME
                positions, at = positions[new], at[new]
                frames = staged.frames[at]
                mine = piece.frames[positions]
                table.arena.unpin(mine)
                piece.unframed -= int(np.count_nonzero(mine == NO_FRAME))
                piece.finish(positions)
                self._books.lease_frames(table, piece.rows[positions], frames)
                left[at] = False
                if len(at):
                    leases.append(Lease(staged.table, positions, at, frames))
                    step.leased = True
            table.arena.unpin(staged.frames[left])
        self._out += leases
        return leases

    def keep(self, piece: Piece, positions: NDArray[np.int64]) -> Lease:
        """Rows that the step has leased itself are under way to the device: its pins on them stay until `back`."""
        frames: Frames = piece.frames[positions]
        piece.finish(positions)
        lease = Lease(piece.table, positions, np.arange(len(positions)), frames)
        self._out.append(lease)
        return lease

    def back(self, leases: Sequence[Lease]) -> None:
        """The records are in their frames again (or the step that leased them has failed)."""
        done = {id(lease) for lease in leases}
        self._out = [lease for lease in self._out if id(lease) not in done]
        for lease in leases:
            arena = self._books.tables[lease.table].arena
            arena.end_lease(lease.frames)
            arena.unpin(lease.frames)
        for lease in self._out:  # a row of two steps: the later one's lease goes on
            self._books.tables[lease.table].arena.stay_leased(lease.frames)

    def forget(self) -> None:
        """No buffer holds anything: what an interrupt has left is of no use."""
        self._out.clear()
