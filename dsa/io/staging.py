"""The pinned double buffer between the cache and an accelerator: the next batch is copied while a step runs.

A thread of its own (staging_thread.py) gathers the next batch's records from their frames and issues their copy to the
device; a step waits for that on the device, updates there, and issues the copy back; the thread scatters the records to
their frames when the copy has been made. The host never waits for the device in a step whose rows are staged. Here is
the training thread's part.

What keeps it right (rule 12): the frames of staged rows are pinned; what a step leases stays leased, dirty and pinned
until its record is back in its frame. A batch is staged in window order, at most the two next ones. Where the other
buffer holds rows of the same batch that are ahead of the frames, or will be, they are copied from there on the device,
after its update and before this one's. Whatever else would change a row that is staged gives the staged batch up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dsa.io.access import Access
from dsa.io.bookkeeping import Bookkeeping
from dsa.io.cache import DONE_FRAME
from dsa.io.devices import Device
from dsa.io.double_buffer import DoubleBuffer
from dsa.io.jobs import Step
from dsa.io.kernels_on_rows import shared
from dsa.io.staged import StagedPiece
from dsa.io.staging_buffer import Buffer, Group, Phase
from dsa.io.staging_thread import StagingThread
from dsa.io.window import Piece

_T = TypeVar("_T")

Update = Callable[[Device, Sequence[Group]], Callable[[], None]]
"""Called on the training thread; returns the work that updates the groups in place, for the device's stream."""


class Staging:
    """Two staging buffers for the tables whose parameters are on one device.

    Args:
        settled: called under the lock whenever something that others may wait for has changed.
        latch: told of a failure in the background.
        raise_failure: raises what was latched.
    """

    def __init__(
        self,
        device: Device,
        access: Access,
        books: Bookkeeping,
        settled: Callable[[], None],
        latch: Callable[[BaseException], None],
        raise_failure: Callable[[], None],
    ) -> None:
        self.device = device
        self.staged_rows = 0  # copied to the device ahead of their step, and updated there
        self.part_rows = 0  # not staged ahead: gathered by the step itself
        self.waited_s = 0.0  # of the training thread, for buffers
        self._access = access
        self._raise_failure = raise_failure
        self._buffers = DoubleBuffer(device, books, settled)
        self._thread = StagingThread(self._buffers, access, latch)
        self.staged = self._buffers.staged

    @property
    def tables(self) -> frozenset[int]:
        """Those whose updates are carried out on the device."""
        return self._buffers.tables

    @property
    def forwarded_rows(self) -> int:
        """Rows that one buffer took from the other, so far."""
        return self._buffers.forwarded_rows

    @property
    def device_bytes(self) -> int:
        """Memory of the device that staging has."""
        return self._buffers.device_bytes

    @property
    def refused(self) -> bool:
        """Whether the device had no memory for a batch."""
        return self._buffers.refused

    @property
    def pinned(self) -> bool:
        """Whether all host memory that was asked for could be pinned."""
        return self._buffers.pinned

    def phases(self) -> tuple[Phase, Phase]:
        """Of both buffers; under the lock."""
        return self._buffers.phases()

    def add_table(self, table: int) -> None:
        """The table's updates are carried out on the device from now on."""
        self._buffers.tables |= {table}
        self._thread.start()

    def remove_table(self, table: int) -> None:
        """They are not any more; nothing of the table is in a buffer."""
        self._buffers.tables -= {table}

    def wake(self) -> None:
        """Let the thread look again at what there is to do; from any thread."""
        self._thread.wake()

    def stop(self, timeout_s: float) -> None:
        """End the thread; what is under way is left."""
        self._thread.stop(timeout_s)

    # READY -> LEASED -> DRAINING

    def step_ahead(self, step: Step, update: Update, begin: Callable[[], None]) -> None:
        """Update those of the step's rows that are staged for it.

        Args:
            begin: called before the first update.
        """
        while (buffer := self._await(lambda: self._next_of(step))) is not None:
            leases = buffer.leases
            begin()
            self._update(buffer, update)
            self.staged_rows += sum(len(lease.at) for lease in leases)

    def _next_of(self, step: Step) -> Buffer | bool | None:
        """The oldest ready buffer of a batch that the step uses up, leased; None: there is no more; False: wait."""
        buffers = self._buffers
        buffers.sweep()
        mine = [each for each in buffers.both if each.job is not None and each.job.sequence in step.used]
        if not mine:
            return None
        last = max(each.turn for each in mine)
        for each in buffers.both:  # staged for a later step, but older: the rows of this one go past it
            if each.job is not None and each not in mine and each.turn < last:
                buffers.give_up(each)
        buffer = min(mine, key=lambda each: each.turn)
        if buffer.job is None or buffer.phase is not Phase.READY:
            return False
        job = buffer.job
        if not any(piece.remaining for piece in step.batch.pieces if piece.table in self.tables):
            buffers.give_up(buffer)
            return self._next_of(step)
        buffer.leases = self.staged.take(job, step)
        buffer.job = None
        if not buffer.leases:
            buffers.end_source(buffer)
            buffers.free(buffer)
            return self._next_of(step)
        buffer.phase = Phase.LEASED
        return buffer

    def _update(self, buffer: Buffer, update: Update) -> None:
        """Issue the update, what follows from it, and the copy back; the host waits for nothing."""
        device = self.device
        current, out = device.current(), device.out
        work = update(device, buffer.groups())
        self._await_copy(current, buffer)
        device.run(current, work)
        buffer.updated = device.record(current)
        with self._access:
            buffer.issued = True
            other = self._buffers.other(buffer)
            follower = other if other.source is buffer and other.phase is Phase.READY else None
        if follower is not None:
            try:
                self._buffers.forward(buffer, buffer.regions, follower)
            except torch.OutOfMemoryError:
                with self._access:
                    self._buffers.refuse(follower)
        device.wait(out, buffer.updated)
        host, block = buffer.used
        device.copy(out, host, block)
        buffer.copied = device.record(out)
        with self._access:
            self._buffers.enter(buffer, Phase.DRAINING)
        self.wake()
        device.finish_step()

    def _await_copy(self, stream: object, buffer: Buffer) -> None:
        self.device.wait(stream, buffer.ready)

    def step_part(self, piece: Piece, positions: NDArray[np.int64], update: Update) -> None:
        """Update rows that were not staged and that the step has leased."""
        most = self._buffers.most_rows(piece.table)
        record_bytes = self._buffers.record_bytes(piece.table)
        while len(positions):
            rows = piece.rows[positions[:most]]
            buffer = self._await(lambda rows=rows: self._free_for(piece.table, rows))  # type: ignore[misc]
            if buffer is None:
                raise RuntimeError("no staging buffer")
            if buffer.copied is not None:
                self.device.hurry()
            self._buffers.await_copied(buffer)
            # No larger than the device has memory for: the step has begun, and a failure would leave it half done.
            rows = rows[: buffer.make_room(len(rows) * record_bytes, record_bytes) // record_bytes]
            if len(rows) < min(most, len(positions)):
                most, self._buffers.refused = len(rows), True
            some, positions = positions[: len(rows)], positions[len(rows) :]
            with self._access:
                lease = self.staged.keep(piece, some)
                buffer.leases = [lease]
            self._buffers.copy_in(buffer, [StagedPiece(piece.table, rows, lease.frames)])
            self._update(buffer, update)
            self.part_rows += len(rows)

    def _free_for(self, table: int, rows: NDArray[np.int64]) -> Buffer | bool:
        """A buffer for rows that the step has leased itself; batches staged ahead that hold one are given up."""
        buffers = self._buffers
        buffers.sweep()
        for each in buffers.both:
            if each.job is not None and _holds(each.job.pieces, table, rows):
                buffers.give_up(each)
        buffer = buffers.oldest(Phase.FREE)
        if buffer is None:
            if all(each.phase is not Phase.DRAINING for each in buffers.both):
                ahead = max((each for each in buffers.both if each.job is not None), key=lambda each: each.turn)
                buffers.give_up(ahead)
                buffer = buffers.oldest(Phase.FREE)
            if buffer is None:
                return False
        buffers.take(buffer, Phase.LEASED)
        return buffer

    def await_back(self, pieces: Sequence[Piece]) -> None:
        """Wait until those of these rows that earlier steps have leased are in their frames again."""

        left = {piece.table: _left(piece) for piece in pieces}

        def back() -> bool:
            for buffer in self._buffers.both:
                if buffer.phase is Phase.DRAINING:
                    rows = {region.table.number: region.rows for region in buffer.regions}
                    for lease in buffer.leases:
                        mine = left.get(lease.table)
                        if mine is not None and len(shared(mine, rows[lease.table][lease.at])[0]):
                            return False
            return True

        self._await(back)

    # Standing still.

    def drain(self) -> None:
        """Wait until all that steps have updated is in frames; what is staged ahead stays."""
        self._await(lambda: Phase.DRAINING not in self.phases())

    def stand_still(self) -> None:
        """Drain, and give up what is staged ahead, until `resume`; also what a failed step has left half-done."""
        self._thread.paused = True
        buffers = self._buffers
        if Phase.LEASED in self.phases():  # no lock: only this thread leases
            self.device.finish()
        with self._access:
            for buffer in buffers.both:
                if buffer.phase is Phase.LEASED:
                    self.staged.back(buffer.leases)
                    buffers.end_source(buffer)
                    buffers.free(buffer)
                buffers.give_up(buffer)
        self._await(lambda: set(self.phases()) == {Phase.FREE})
        self.staged.forget()

    def resume(self) -> None:
        """Stage ahead again."""
        self._thread.paused = False
        self.wake()

    def _await(self, come: Callable[[], _T | bool]) -> _T:
        """Wait, on the training thread, until `come` gives something else than False; it is called under the lock."""
        self.wake()
        while True:
            with self._access:
                self._raise_failure()
                found = come()
                if found is not False:
                    return found  # type: ignore[return-value]
                self.device.hurry()
                began = time.perf_counter()
                self._access.wait()
                self.waited_s += time.perf_counter() - began


def _holds(pieces: Sequence[StagedPiece], table: int, rows: NDArray[np.int64]) -> bool:
    return any(piece.table == table and len(shared(piece.rows, rows)[0]) > 0 for piece in pieces)


def _left(piece: Piece) -> NDArray[np.int64]:
    return piece.rows[piece.frames != DONE_FRAME] if piece.held else piece.rows
