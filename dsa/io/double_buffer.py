"""The two staging buffers of one device: which is the older, which holds rows ahead of their frames, and the copies in.

What keeps forwarding right (rule 12): a buffer is filled only when it is free, by one thread, which drains as well. So
a row can be ahead of its frame in the other buffer only, and that one is noted as the source. Whoever comes second, the
copy in or the source's update, issues the copy between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsa.io.bookkeeping import Bookkeeping
from dsa.io.devices import Device
from dsa.io.kernels_on_rows import shared
from dsa.io.staged import StagedBatches, StagedPiece
from dsa.io.staging_buffer import Buffer, Phase, Region

MOST_BYTES = 256 << 20
"""A larger batch is not staged ahead; its step goes in parts of at most this size."""


class DoubleBuffer:
    """Two staging buffers, for the staging thread and the training thread, and the batches that are staged in them.

    Its methods are called under the engine's lock, but those that need none, as they say, and `copy_in` and `forward`:
    these only issue work for buffers that their caller has taken.

    Args:
        settled: called under the lock whenever something that others may wait for has changed.
    """

    def __init__(self, device: Device, books: Bookkeeping, settled: Callable[[], None]) -> None:
        self.device = device
        self.tables: frozenset[int] = frozenset()  # those that are staged
        self.staged = StagedBatches(books)
        self.both = (Buffer(device), Buffer(device))
        self.forwarded_rows = 0
        self.refused = False  # the device had no memory for a batch; read without the lock
        self._books = books
        self._settled = settled
        self._turn = 0

    @property
    def device_bytes(self) -> int:
        """Memory of the device that both have; needs no lock."""
        return sum(buffer.device_bytes for buffer in self.both)

    @property
    def pinned(self) -> bool:
        """Whether all host memory that was asked for could be pinned; needs no lock."""
        return all(buffer.pinned for buffer in self.both)

    def phases(self) -> tuple[Phase, Phase]:
        """Of both buffers."""
        return self.both[0].phase, self.both[1].phase

    def oldest(self, phase: Phase) -> Buffer | None:
        """The buffer in that phase that was taken first; None: neither is in it."""
        return min((each for each in self.both if each.phase is phase), key=lambda each: each.turn, default=None)

    def other(self, buffer: Buffer) -> Buffer:
        """The other one of the two."""
        return self.both[buffer is self.both[0]]

    def most_rows(self, table: int) -> int:
        """How many rows of a table a part of a step may have, at least one; needs no lock."""
        return max(1, MOST_BYTES // self.record_bytes(table))

    def record_bytes(self, table: int) -> int:
        """Of a row of the table; needs no lock."""
        return self._books.tables[table].record.record_bytes

    # From phase to phase.

    def begin_fill(self) -> Buffer | None:
        """Take a free buffer for the next batch to stage, and note whose rows are, or will be, ahead of the frames.

        None where no buffer is free, or no batch is to be staged.
        """
        buffer = self.oldest(Phase.FREE)
        job = None if buffer is None else self.staged.next(self.tables, MOST_BYTES)
        if buffer is None or job is None:
            return None
        self.take(buffer, Phase.FILLING)
        buffer.job = job
        other = self.other(buffer)
        buffer.source = other if other.phase is not Phase.FREE else None
        return buffer

    def take(self, buffer: Buffer, phase: Phase) -> None:
        """The buffer, which was free, is the younger one from now on."""
        self._turn += 1
        buffer.phase, buffer.turn = phase, self._turn

    def enter(self, buffer: Buffer, phase: Phase) -> None:
        """The buffer comes to a phase that others may wait for."""
        buffer.phase = phase
        self._settled()

    def free(self, buffer: Buffer) -> None:
        """Nothing in the buffer is of use any more."""
        # In one statement, which no interrupt divides: a buffer that held nothing and was not free would stay so.
        buffer.phase, buffer.job, buffer.source, buffer.leases, buffer.issued = Phase.FREE, None, None, [], False
        self._settled()

    def sweep(self) -> None:
        """Let go of staged batches that ended without a step, or whose frames were needed."""
        for buffer in self.both:
            if buffer.job is not None and (buffer.job.unwanted or self.staged.outlived(buffer.job)):
                self.give_up(buffer)

    def give_up(self, buffer: Buffer) -> None:
        """The batch will not be updated here: frames are the truth, and nobody needs its rows."""
        if buffer.job is None:
            return
        self.staged.give_up(buffer.job)
        self.end_source(buffer)
        if buffer.phase is Phase.READY:
            self.free(buffer)

    def refuse(self, buffer: Buffer) -> None:
        """The device has no memory for the buffer's batch, whose step then goes in parts; the caller has the buffer.

        It is the younger of the two, so the other one takes nothing from it.
        """
        self.refused = True
        if buffer.job is not None:
            self.staged.refuse(buffer.job)
        self.free(buffer)

    def end_source(self, buffer: Buffer) -> None:
        """No row of the buffer is, or will be, ahead of its frame: the other one has nothing to take from it."""
        other = self.other(buffer)
        if other.source is buffer:
            other.source = None

    # Copies that are issued, without the lock.

    def await_copied(self, buffer: Buffer) -> None:
        """Wait for the copy of a batch that was given up: it may not have been made yet."""
        if buffer.copied is not None:
            self.device.synchronize(buffer.copied)
            buffer.copied = None

    def copy_in(self, buffer: Buffer, pieces: Sequence[StagedPiece]) -> None:
        """Gather the rows from their frames, which are pinned, and issue their copy to the device."""
        self.await_copied(buffer)
        buffer.lay_out(self._books.tables, pieces)
        buffer.gather()
        host, block = buffer.used
        self.device.copy(self.device.into, block, host)
        buffer.ready = buffer.copied = self.device.record(self.device.into)

    def forward(self, source: Buffer, regions: Sequence[Region], target: Buffer) -> None:
        """Copy the rows that both hold from the source, after its update; the target is ready after that.

        Args:
            regions: the source's.
        """
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
