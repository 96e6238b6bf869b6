"""Write-behind: moves dirty frames into segments, behind training, and cleans the log as it grows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dsa.io.access import Access
from dsa.io.jobs import CleanJob, Table, WriteJob
from dsa.io.rowlog import RowLog

WRITES_IN_FLIGHT = 3
"""Segments under way at once: one is filled from frames, one is with the device, one waits for its turn."""

IDLE_S = 0.5
"""Without a step, an announcement or a transfer for so long, the disk is idle: whole segments are written early."""


class WriteBehind:
    """A task on the loop; `wanted` is set whenever there may be something to write.

    `turn` is held by whoever writes: the task itself, or a checkpoint, which must not be overtaken.
    """

    def __init__(
        self, access: Access, log: RowLog, dirty_share: float | None, latch: Callable[[BaseException], None]
    ) -> None:
        self.wanted = asyncio.Event()
        self.turn = asyncio.Lock()
        self.calls = 0  # of the training side: steps and announcements
        self._rang = False  # the idle timer has run out
        self._access = access
        self._log = log
        self._dirty_share = dirty_share
        self._latch = latch
        self._running: set[asyncio.Task[None]] = set()
        self._cleaning: asyncio.Task[None] | None = None
        self._cleaned = asyncio.Event()  # set whenever segments have been cleaned, or could not be
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Until cancelled: write what is due, then wait to be woken; whole segments early where nothing happens."""
        idle = False
        while True:
            self.wanted.clear()
            try:
                async with self.turn:
                    await self._write_due(idle=idle)
            except Exception as error:
                self._latch(error)
                return
            seen = self.calls  # training goes on without waking this task, unless there is something to write
            # A timer and not wait_for: that one may swallow a cancellation that meets its event (until Python 3.11).
            self._rang = False
            timer = asyncio.get_running_loop().call_later(IDLE_S, self._ring)
            await self.wanted.wait()
            timer.cancel()
            idle = self.calls == seen and (idle or self._rang)

    def _ring(self) -> None:
        # Told by a mark and not by the clock: a loop's time is coarse, and may stand just below what was asked for.
        self._rang = True
        self.wanted.set()

    async def drain(self) -> None:
        """Write every dirty frame; returns when all of them, and all that was under way, are in the file.

        The caller holds `turn`, and no step runs meanwhile.
        """
        with self._access as books:
            books.draining = True
        try:
            while True:
                await self._write_due()
                await self._land(0)
                with self._access as books:
                    if not books.dirty_frames():
                        return
        except Exception as error:
            self._latch(error)  # whoever asked hears of it now, and everybody else from now on (rule 10)
            raise
        finally:
            with self._access as books:
                books.draining = False

    async def _write_due(self, *, idle: bool = False) -> None:
        calls = self.calls
        while not (idle and self.calls != calls):
            await self._land(WRITES_IN_FLIGHT - 1)
            with self._access as books:
                job = books.next_write(self._dirty_share, idle=idle)
            if job is None:
                return
            self._running.add(asyncio.create_task(self._write(job)))
            self._clean(job.table)
            # Cleaning goes on beside the writes, a step waits for none of it; only a log well over its limit waits.
            while job.table.segments.far_over_limit() and self._cleaning is not None and not self._cleaning.done():
                self._cleaned.clear()
                await self._cleaned.wait()
                self._raise_failure()
                self._clean(job.table)

    async def _land(self, most: int) -> None:
        """Wait until at most so many writes are under way.

        Raises:
            DeviceError: one of them failed.
        """
        while len(self._running) > most:
            ended, self._running = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            del ended
        if most == 0 and self._cleaning is not None:
            await asyncio.wait([self._cleaning])
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _write(self, job: WriteJob) -> None:
        try:
            await self._log.write(job)
        except Exception as error:
            self._failure = self._failure or error
            self._latch(error)

    def _clean(self, table: Table) -> None:
        """Begin a cleaning of the table's log, where one is due and none is under way."""
        if self._cleaning is not None and not self._cleaning.done():
            return
        with self._access as books:
            job = books.next_clean(table)
        self._cleaning = None if job is None else asyncio.create_task(self._move(job))

    async def _move(self, job: CleanJob) -> None:
        """Clean, and go on as long as it is due: a checkpoint that waits for this is not kept waiting for more."""
        following: CleanJob | None = job
        try:
            while following is not None:
                await self._log.clean(following)
                self._cleaned.set()
                with self._access as books:
                    following = None if books.draining else books.next_clean(job.table)
        except Exception as error:
            self._failure = self._failure or error
            self._latch(error)
        finally:
            self._cleaned.set()
