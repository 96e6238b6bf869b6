"""The pinned double buffer between the cache and an accelerator: the next batch is copied while a step runs.

A thread of its own gathers the next batch's records from their frames and issues their copy to the device; a step
waits for that on the device, updates there, and issues the copy back; the thread scatters the records to their frames
when the copy has been made. The host never waits for the device in a step whose rows are staged.

What keeps it right (rule 12): the frames of staged rows are pinned; what a step leases stays leased, dirty and pinned
until its record is back in its frame. A batch is staged in window order, at most the two next ones. Where the other
buffer holds rows of the same batch that are ahead of the frames, or will be, they are copied from there on the device,
after its update and before this one's. Whatever else would change a row that is staged gives the staged batch up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dsa.io.access import Access
from dsa.io.bookkeeping import Bookkeeping
from dsa.io.cache import DONE_FRAME
from dsa.io.devices import Device
from dsa.io.jobs import Step
from dsa.io.kernels_on_rows import shared
from dsa.io.staged import StagedBatches, StagedPiece
from dsa.io.staging_buffer import Buffer, Group, Region, State
from dsa.io.window import Piece

_T = TypeVar("_T")
MOST_BYTES = 256 << 20
"""A larger batch is not staged ahead; its step goes in parts of at most this size."""

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
        self.tables: frozenset[int] = frozenset()
        self.staged = StagedBatches(books)
        self.wanted = threading.Event()  # there may be something to do
        self.staged_rows = 0  # copied to the device ahead of their step, and updated there
        self.part_rows = 0  # not staged ahead: gathered by the step itself
        self.forwarded_rows = 0
        self.waited_s = 0.0  # of the training thread, for buffers
        self._books = books
        self._access = access
        self._settled = settled
        self._latch = latch
        self._raise_failure = raise_failure
        self._buffers = (Buffer(device), Buffer(device))
        self._turn = 0
        self._stopped = False
        self._paused = False
        self._thread: threading.Thread | None = None

    @property
    def device_bytes(self) -> int:
        """Memory of the device that staging has."""
        return sum(buffer.device_bytes for buffer in self._buffers)

    @property
    def pinned(self) -> bool:
        """Whether all host memory that was asked for could be pinned."""
        return all(buffer.pinned for buffer in self._buffers)

    def states(self) -> tuple[State, State]:
        """Of both buffers; under the lock."""
        return self._buffers[0].state, self._buffers[1].state

    # The thread beside training.

    def add_table(self, table: int) -> None:
        """The table's updates are carried out on the device from now on."""
        self.tables |= {table}
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="dsa-staging", daemon=True)
            self._thread.start()

    def remove_table(self, table: int) -> None:
        """They are not any more; nothing of the table is in a buffer."""
        self.tables -= {table}

    def wake(self) -> None:
        """Look again at what there is to do; from any thread."""
        self.wanted.set()

    def stop(self, timeout_s: float) -> None:
        """End the thread; what is under way is left."""
        self._stopped = True
        self.device.close()
        self.wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _serve(self) -> None:
        while not self._stopped:
            self.wanted.clear()
            try:
                while not self._stopped and self._do_next():
                    pass
            except BaseException as error:
                if not self._stopped:
                    self._latch(error)
            self.wanted.wait()

    def _do_next(self) -> bool:
        """Fill a buffer or drain one; False where there is neither."""
        with self._access:
            self._sweep()
            buffer = self._begin_fill()
            draining = None if buffer is not None else self._oldest(State.DRAINING)
        if buffer is not None:
            self._fill(buffer)
            return True
        if draining is not None:
            self._drain(draining)
            return True
        return False

    def _oldest(self, state: State) -> Buffer | None:
        return min((each for each in self._buffers if each.state is state), key=lambda each: each.turn, default=None)

    def _other(self, buffer: Buffer) -> Buffer:
        return self._buffers[buffer is self._buffers[0]]

    def _sweep(self) -> None:
        """Let go of staged batches that ended without a step, or whose frames were needed."""
        for buffer in self._buffers:
            if buffer.job is not None and (buffer.job.unwanted or self.staged.outlived(buffer.job)):
                self._give_up(buffer)

    def _give_up(self, buffer: Buffer) -> None:
        """The batch will not be updated here: frames are the truth, and nobody needs its rows."""
        if buffer.job is None:
            return
        self.staged.give_up(buffer.job)
        if self._other(buffer).source is buffer:
            self._other(buffer).source = None
        if buffer.state is State.READY:
            self._free(buffer)

    def _free(self, buffer: Buffer) -> None:
        buffer.state, buffer.job, buffer.source, buffer.leases, buffer.issued = State.FREE, None, None, [], False
        self._settled()

    # FREE -> FILLING -> READY

    def _begin_fill(self) -> Buffer | None:
        buffer = None if self._paused else self._oldest(State.FREE)
        job = None if buffer is None else self.staged.next(self.tables, MOST_BYTES)
        if buffer is None or job is None:
            return None
        self._take(buffer, State.FILLING)
        buffer.job = job
        other = self._other(buffer)
        buffer.source = other if other.state is not State.FREE else None
        return buffer

    def _take(self, buffer: Buffer, state: State) -> None:
        self._turn += 1
        buffer.state, buffer.turn = state, self._turn

    def _copy_in(self, buffer: Buffer, pieces: Sequence[StagedPiece]) -> None:
        if buffer.copied is not None:  # of a batch that was given up: its copy may not have been made yet
            self.device.synchronize(buffer.copied)
        buffer.lay_out(self._books.tables, pieces)
        buffer.gather()
        host, block = buffer.used
        self.device.copy(self.device.into, block, host)
        buffer.ready = buffer.copied = self.device.record(self.device.into)

    def _fill(self, buffer: Buffer) -> None:
        job, source = buffer.job, buffer.source
        if job is None:
            raise RuntimeError("a buffer is filled for a batch")
        before = source.regions if source is not None else ()
        self._copy_in(buffer, job.pieces)
        with self._access:
            self.staged.gathered(job)
            issued = buffer.source is not None and buffer.source.issued
            if job.unwanted:
                self._free(buffer)
                return
            if not issued:
                self._be_ready(buffer)
                return
        if source is not None:  # it is not freed meanwhile: only this thread drains
            self._forward(source, before, buffer)
        with self._access:
            if job.unwanted:
                self._free(buffer)
            else:
                self._be_ready(buffer)

    def _be_ready(self, buffer: Buffer) -> None:
        buffer.state = State.READY
        self._settled()

    def _forward(self, source: Buffer, regions: Sequence[Region], target: Buffer) -> None:
        """Copy the rows that both hold from the source, after its update; the target is ready after that."""
        pairs = []
        for mine in target.regions:
            for theirs in regions:
                if theirs.table.number == mine.table.number:
                    there, here = shared(theirs.rows, mine.rows)
                    if len(there):
                        pairs.append((source.records(theirs), there, target.records(mine), here))
        target.source = None
        if not pairs:
            return

        def work() -> None:
            for old, there, new, here in pairs:
                new.index_copy_(0, self.device.upload(here), old.index_select(0, self.device.upload(there)))

        into = self.device.into
        self.device.wait(into, source.updated)
        self.device.run(into, work)
        target.ready = self.device.record(into)
        target.copied = target.ready
        self.forwarded_rows += sum(len(there) for _, there, _, _ in pairs)

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
        self._sweep()
        mine = [each for each in self._buffers if each.job is not None and each.job.sequence in step.used]
        if not mine:
            return None
        last = max(each.turn for each in mine)
        for each in self._buffers:  # staged for a later step, but older: the rows of this one go past it
            if each.job is not None and each not in mine and each.turn < last:
                self._give_up(each)
        buffer = min(mine, key=lambda each: each.turn)
        if buffer.job is None or buffer.state is not State.READY:
            return False
        job = buffer.job
        if not any(piece.remaining for piece in step.batch.pieces if piece.table in self.tables):
            self._give_up(buffer)
            return self._next_of(step)
        buffer.leases = self.staged.take(job, step)
        buffer.job = None
        if not buffer.leases:
            if self._other(buffer).source is buffer:
                self._other(buffer).source = None
            self._free(buffer)
            return self._next_of(step)
        buffer.state = State.LEASED
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
            other = self._other(buffer)
            follower = other if other.source is buffer and other.state is State.READY else None
        if follower is not None:
            self._forward(buffer, buffer.regions, follower)
        device.wait(out, buffer.updated)
        host, block = buffer.used
        device.copy(out, host, block)
        buffer.copied = device.record(out)
        with self._access:
            self._begin_drain(buffer)
        self.wake()
        device.finish_step()

    def _await_copy(self, stream: object, buffer: Buffer) -> None:
        self.device.wait(stream, buffer.ready)

    def _begin_drain(self, buffer: Buffer) -> None:
        buffer.state = State.DRAINING
        self._settled()

    def step_part(self, piece: Piece, positions: NDArray[np.int64], update: Update) -> None:
        """Update rows that were not staged and that the step has leased."""
        record_bytes = self._books.tables[piece.table].record.record_bytes
        most = max(1, MOST_BYTES // record_bytes)
        for first in range(0, len(positions), most):
            some = positions[first : first + most]
            rows = piece.rows[some]
            buffer = self._await(lambda rows=rows: self._free_for(piece.table, rows))  # type: ignore[misc]
            if buffer is None:
                raise RuntimeError("no staging buffer")
            with self._access:
                lease = self.staged.keep(piece, some)
                buffer.leases = [lease]
            if buffer.copied is not None:
                self.device.hurry()
            self._copy_in(buffer, [StagedPiece(piece.table, rows, lease.frames)])
            self._update(buffer, update)
            self.part_rows += len(rows)

    def _free_for(self, table: int, rows: NDArray[np.int64]) -> Buffer | bool:
        """A buffer for rows that the step has leased itself; batches staged ahead that hold one are given up."""
        self._sweep()
        for each in self._buffers:
            if each.job is not None and _holds(each.job.pieces, table, rows):
                self._give_up(each)
        buffer = self._oldest(State.FREE)
        if buffer is None:
            if all(each.state is not State.DRAINING for each in self._buffers):
                ahead = max((each for each in self._buffers if each.job is not None), key=lambda each: each.turn)
                self._give_up(ahead)
                buffer = self._oldest(State.FREE)
            if buffer is None:
                return False
        self._take(buffer, State.LEASED)
        return buffer

    def await_back(self, pieces: Sequence[Piece]) -> None:
        """Wait until those of these rows that earlier steps have leased are in their frames again."""

        left = {piece.table: _left(piece) for piece in pieces}

        def back() -> bool:
            for buffer in self._buffers:
                if buffer.state is State.DRAINING:
                    rows = {region.table.number: region.rows for region in buffer.regions}
                    for lease in buffer.leases:
                        mine = left.get(lease.table)
                        if mine is not None and len(shared(mine, rows[lease.table][lease.at])[0]):
                            return False
            return True

        self._await(back)

    # DRAINING -> FREE

    def _drain(self, buffer: Buffer) -> None:
        self.device.synchronize(buffer.copied)
        if self._stopped:
            return
        buffer.copied = None
        buffer.scatter()
        with self._access:
            self.staged.back(buffer.leases)
            self._free(buffer)

    # Standing still.

    def drain(self) -> None:
        """Wait until all that steps have updated is in frames; what is staged ahead stays."""
        self._await(lambda: all(each.state is not State.DRAINING for each in self._buffers))

    def stand_still(self) -> None:
        """Drain, and give up what is staged ahead, until `resume`; also what a failed step has left half-done."""
        self._paused = True
        if any(each.state is State.LEASED for each in self._buffers):
            self.device.finish()
        with self._access:
            for buffer in self._buffers:
                if buffer.state is State.LEASED:
                    self.staged.back(buffer.leases)
                    if self._other(buffer).source is buffer:
                        self._other(buffer).source = None
                    self._free(buffer)
                self._give_up(buffer)
        self._await(lambda: all(each.state is State.FREE for each in self._buffers))
        self.staged.forget()

    def resume(self) -> None:
        """Stage ahead again."""
        self._paused = False
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
