"""Prefetch: brings the rows of coming batches into frames, in window order, while steps run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dsa.io.access import Access
from dsa.io.bookkeeping import Bookkeeping
from dsa.io.jobs import FillJob
from dsa.io.rowlog import RowLog

JOBS_IN_FLIGHT = 3
"""Reads that run at once: while one is checked and copied to frames, the next is with the device."""


class Prefetch:
    """A task on the loop; `wanted` is set whenever there may be something to bring in."""

    def __init__(
        self,
        access: Access,
        log: RowLog,
        writes_wanted: Callable[[], None],
        latch: Callable[[BaseException], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.wanted = asyncio.Event()
        self._access = access
        self._log = log
        self._writes_wanted = writes_wanted
        self._latch = latch
        self._running: set[asyncio.Task[None]] = set()
        self._full = False  # what there is to begin was not asked for, since enough was running
        self._idle_s = 0.0
        self._clock = clock
        self._idle_since: float | None = clock()

    @property
    def idle_s(self) -> float:
        """Seconds, so far, in which nothing was being brought in; read from any thread."""
        since = self._idle_since
        return self._idle_s + (0.0 if since is None else self._clock() - since)

    async def run(self) -> None:
        """Until cancelled: begin what can be begun, then wait to be woken."""
        while True:
            self.wanted.clear()
            self._full = True
            while len(self._running) < JOBS_IN_FLIGHT:
                job, to_write = self._next()
                if to_write:
                    self._writes_wanted()
                if job is None:
                    self._full = False
                    break
                if self._idle_since is not None:
                    self._idle_s += self._clock() - self._idle_since
                    self._idle_since = None
                task = asyncio.create_task(self._bring(job))
                self._running.add(task)
                task.add_done_callback(self._done)
            await self.wanted.wait()

    def _next(self) -> tuple[FillJob | None, bool]:
        with self._access as books:
            return _next(books)

    async def _bring(self, job: FillJob) -> None:
        try:
            await self._log.fill(job)
        except Exception as error:
            with self._access as books:
                books.failed(job)
            self._latch(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not self._running:
            self._idle_since = self._clock()
        if self._full:
            self.wanted.set()


def _next(books: Bookkeeping) -> tuple[FillJob | None, bool]:
    job = books.next_fill()
    return job, books.writes_wanted
