"""The running half of the engine: one lock, one loop, the tasks on it, rows for a step, and the end.

It never refers to the engine's face (engine.py), so that an optimizer that nobody holds any more can be collected
while this half still runs; then the face's finalizer stops it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np

from dsa.config import IOConfig
from dsa.errors import DeviceError, ForkedError
from dsa.io.access import Access
from dsa.io.backends.base import Backend
from dsa.io.backends.watched import WatchedBackend
from dsa.io.bookkeeping import Bookkeeping
from dsa.io.cache import Frames
from dsa.io.checkpoints import Checkpoints
from dsa.io.devices import Device
from dsa.io.directory import Directory
from dsa.io.generations import Generations
from dsa.io.jobs import Step
from dsa.io.latch import Latch
from dsa.io.loop import LoopThread
from dsa.io.prefetch import Prefetch
from dsa.io.reach import Reach
from dsa.io.rowlog import RowLog
from dsa.io.staging import Staging
from dsa.io.window import Piece, Window
from dsa.io.writebehind import WriteBehind

_T = TypeVar("_T")
STOP_TIMEOUT_S = 3.0
"""How long ending waits for the loop, and for the backend's threads, before it leaves them behind."""

_alive: weakref.WeakSet[Pipeline] = weakref.WeakSet()


class Pipeline:
    """Loop, backend, bookkeeping and tasks of one state directory.

    Args:
        directory: locked by the caller; unlocked by `stop`.
        backend: shut down by `stop`.
        keep_generations: how many generations handed out stay loadable; None: all.
    """

    def __init__(self, directory: Directory, backend: Backend, config: IOConfig, keep_generations: int | None) -> None:
        self.pid = os.getpid()
        self.directory = directory
        self.backend = WatchedBackend(backend, config.stall_timeout_s)
        self.config = config
        self.books = Bookkeeping(
            Window(config.known_batches, config.known_rows),
            Reach(config.held_batches),
            config.read_chunk_bytes,
            orders=config.dirty_share is None,
        )
        # Each asks for the other: the lock is the access's, and what it latches is kept under that lock.
        self.access = Access(self.books, lambda error: self.latch.note_locked(error))
        self.latch = Latch(self.access.condition)
        self.stagings: list[Staging] = []
        self.books.give_back = self._give_back
        self.log = RowLog(self.backend, self.books, config, self.access, self._settled)
        self.loop = LoopThread("dsa-loop", use_uvloop=config.uvloop)
        self.uncommitted_steps = 0
        self.wait_s = 0.0
        self._ended: deque[int] = deque()  # tickets whose end was called out of a garbage collection
        self._stopped = False
        self._unwaited: concurrent.futures.Future[Any] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.run(self._start())
        self.checkpoints = Checkpoints(
            self.backend, directory, self.access, self.books, self.log, self._writebehind, keep_generations
        )
        _alive.add(self)

    # The loop.

    async def _start(self) -> None:
        self._writebehind = WriteBehind(self.access, self.log, self.config.dirty_share, self.latch.note)
        self._prefetch = Prefetch(self.access, self.log, self._writebehind.wanted.set, self.latch.note)
        self._tasks = [asyncio.create_task(self._prefetch.run()), asyncio.create_task(self._writebehind.run())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.latch.note(task.exception() or RuntimeError("a task of the loop ended"))

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start a coroutine on the loop."""
        return self.loop.submit(coroutine)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop and wait for it. Interrupted, it goes on; see `await_interrupted`."""
        self._unwaited = future = self.submit(coroutine)
        try:
            return future.result()
        finally:
            # An error's traceback holds the frames of whoever called, and so the optimizer: nothing here keeps it.
            if future.done():
                self._unwaited = None
            del future

    def await_interrupted(self) -> None:
        """Wait until what an interrupt left running has ended: a step beside a checkpoint would be half in it."""
        if self._unwaited is not None and not self._unwaited.done():
            concurrent.futures.wait([self._unwaited])

    def wake(self) -> None:
        """Let the tasks look again at what there is to do, for somebody waits; from any thread."""
        self._writebehind.calls += 1
        self.loop.call_soon(self._wake)
        for staging in self.stagings:
            staging.wake()

    async def flush(self) -> None:
        """Write every dirty frame; no generation is made."""
        async with self._writebehind.turn:
            await self._writebehind.drain()

    @property
    def generations(self) -> Generations | None:
        """Those of the directory; None until they have been opened."""
        return self.checkpoints.generations

    @property
    def idle_s(self) -> float:
        """Seconds, so far, in which nothing was being brought in."""
        return self._prefetch.idle_s

    def moved_on_locked(self, books: Bookkeeping, *, stepped: bool = True) -> None:
        """Training has moved on: wake the tasks that have something to do now. The caller holds the lock.

        A task that is woken for nothing costs the training thread as much time as it takes, for it holds the GIL.

        Args:
            stepped: a step has ended; else a batch was announced or handed out, of which no frame becomes dirty.
        """
        self._writebehind.calls += 1
        self._rouse_locked(books, write_too=stepped)

    def _rouse_locked(self, books: Bookkeeping, *, write_too: bool = True) -> None:
        if books.bring_roused():
            self.loop.call_soon(self._prefetch.wanted.set)
        if write_too and books.write_roused(self.config.dirty_share):
            self.loop.call_soon(self._writebehind.wanted.set)
        for staging in self.stagings:
            staging.wake()

    def _wake(self) -> None:
        self._settle_ended()
        self._prefetch.wanted.set()
        self._writebehind.wanted.set()

    def _settled(self) -> None:
        # Called under the lock, by whoever has brought or written something.
        self.access.condition.notify_all()
        self._rouse_locked(self.books)

    # Staging.

    def add_staging(self, device: Device) -> Staging:
        """A double buffer for a device."""
        staging = Staging(device, self.access, self.books, self._settled, self.latch.note, self.latch.raise_failure)
        self.stagings.append(staging)
        return staging

    def _give_back(self) -> bool:
        return any(staging.staged.give_back() for staging in self.stagings)

    def _wait(self) -> None:
        """Wait, inside the lock, until something has changed."""
        for staging in self.stagings:
            staging.device.hurry()
        self.access.wait()

    # Announcements that end at any moment.

    def end_soon(self, ticket: int) -> None:
        """End a batch; takes no lock, for it may be called out of a garbage collection inside the bookkeeping."""
        self._ended.append(ticket)
        self.wake()

    def _settle_ended(self) -> None:
        if self._ended:
            with self.access as books:
                self.settle_ended_locked(books)
            for staging in self.stagings:
                staging.wake()

    def settle_ended_locked(self, books: Bookkeeping) -> None:
        """Carry out the ends that were asked for; the caller holds the lock."""
        while self._ended:
            with contextlib.suppress(IndexError):
                batch = books.window.get(self._ended.popleft())
                if batch is not None:
                    books.end(batch, late=batch.handed_out)

    # Rows for a step.

    def await_rows(self, step: Step, piece: Piece) -> tuple[np.ndarray[Any, np.dtype[np.int64]], Frames]:
        """Wait until rows of the piece are in frames: their positions in the piece, and the frames (leased by a step).

        All that remain, or a part where the arena cannot hold all of them at once.
        """
        began = time.perf_counter()
        try:
            while True:
                job = None
                try:
                    with self.access as books:
                        self.latch.raise_failure()
                        books.bring()
                        job = books.next_new()
                        if job is None:
                            positions = books.ready(piece)
                            if positions is not None:
                                frames = piece.frames[positions]
                                return positions, books.lease(piece, positions) if step.lasting else frames
                            self.wake()
                            self._wait()
                            continue
                    self.log.fill_new(job)
                except BaseException:  # an interrupt: whoever needs the rows next does it
                    if job is not None:
                        with self.access:
                            job.begun = False
                    raise
        finally:
            self.wait_s += time.perf_counter() - began

    def await_quiet(self) -> None:
        """Wait until nothing is in flight; the bookkeeping is frozen by the caller."""
        while True:
            with self.access as books:
                self.latch.raise_failure()
                if books.quiet():
                    return
                self.wake()
                self._wait()

    # Forks.

    def raise_if_forked(self) -> None:
        """Raise in a forked child: the loop, the lock and the frames are its parent's."""
        if os.getpid() != self.pid:
            raise ForkedError(
                f"the optimizer of {self.directory.path} belongs to process {self.pid}, this is its forked child "
                f"{os.getpid()}: make the optimizer after the fork, with a state_dir of its own"
            )

    # The end.

    def stop(self) -> None:
        """End the loop and the I/O threads, close files, unlock; whatever is stuck in the system is left behind.

        What an interrupt has cut short is done when it is called again.
        """
        if self._stopped or os.getpid() != self.pid:
            return
        self.access.let_go()
        _alive.discard(self)
        for staging in self.stagings:
            staging.stop(STOP_TIMEOUT_S)
        ended = self.loop.stop(STOP_TIMEOUT_S)
        self.backend.shut_down(STOP_TIMEOUT_S)
        failure = self.latch.failure
        if isinstance(failure, DeviceError) and failure.errno == errno.ETIMEDOUT:
            pass  # what is stuck in the device may still be written: nobody else owns the directory in this process
        elif ended:
            self._let_go()
        else:
            with contextlib.suppress(RuntimeError):  # no new threads: the interpreter ends, and everything with it
                threading.Thread(target=self._let_go_late, name="dsa-end", daemon=True).start()
        self._stopped = True

    def _let_go(self) -> None:
        for table in self.books.tables:
            if table.file is not None:
                with contextlib.suppress(DeviceError):
                    self.backend.close(table.file)
        for arena in self.books.arenas:  # now, not when a garbage collection has come twice
            arena.let_go()
        self.directory.unlock()

    def _let_go_late(self) -> None:
        self.loop.stop(threading.TIMEOUT_MAX)
        self._let_go()

    def end_without_close(self) -> None:
        """What is done when the optimizer was collected, or the interpreter ends, and nobody called close()."""
        if self._stopped or os.getpid() != self.pid:
            return
        if self.uncommitted_steps and sys.stderr is not None:
            generation = self.generations.current if self.generations is not None else None
            with contextlib.suppress(Exception):
                print(
                    f"dsa: {self.uncommitted_steps} steps of {self.directory.path} were not committed (no checkpoint() "
                    f"or close() after them); the last generation there is {generation}",
                    file=sys.stderr,
                )
        self.stop()


def _after_fork_in_child() -> None:
    for pipeline in list(_alive):
        for table in pipeline.books.tables:
            fd = getattr(table.file, "fd", -1)
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
    _alive.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
