"""Threads that wait for the device, so that neither the loop nor the training thread has to.

They are daemons and not a ThreadPoolExecutor's: that one refuses work while the interpreter ends, and its threads are
joined there, so that one stuck in the system would block the exit for ever. They block signals, which would only
interrupt their transfers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Generic, ParamSpec, TypeVar

from dsa.errors import ClosedError, ForkedError

_log = logging.getLogger("dsa")
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Job = tuple["Future[Any] | _Reply[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_Jobs = queue.SimpleQueue["_Job | None"]


class _Reply(Generic[_T]):
    """A future of a loop, settled from a thread; where the loop has ended nobody waits for it any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future: asyncio.Future[_T] = loop.create_future()

    def set_running_or_notify_cancel(self) -> bool:
        return True  # bytes may be waited for: what was submitted is done

    def set_result(self, result: _T) -> None:
        self._post(self.future.set_result, result)

    def set_exception(self, error: BaseException) -> None:
        self._post(self.future.set_exception, error)

    def _post(self, settle: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(_settle, self.future, settle, outcome)


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], outcome: Any) -> None:
    if not future.done():
        settle(outcome)


class IOThreads(Executor):
    """`count` daemon threads that carry out what is submitted, in its order; aiofiles takes it as an executor.

    The threads refer to their queue only: when the last reference to this object goes, they end by themselves.
    """

    def __init__(self, name: str, count: int) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._owner = os.getpid()
        self._threads = [
            threading.Thread(target=_serve, args=(self._jobs,), name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        self._finalizer = weakref.finalize(self, _end, self._jobs, count)
        self._finalizer.atexit = False
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._threads)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run `fn(*args, **kwargs)` in one of the threads.

        Raises:
            ClosedError: the threads were shut down.
            ForkedError: this is a forked child, which has none of the threads.
        """
        future: Future[_T] = Future()
        self._put((future, fn, args, kwargs))
        return future

    def start(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> asyncio.Future[_T]:
        """As `submit`, for a coroutine that waits in the running loop, and with less work for the interpreter.

        Raises:
            ClosedError, ForkedError: as `submit`.
        """
        reply: _Reply[_T] = _Reply(asyncio.get_running_loop())
        self._put((reply, fn, args, kwargs))
        return reply.future

    def _put(self, job: _Job) -> None:
        if os.getpid() != self._owner:
            raise ForkedError("the I/O threads stayed in the parent process; make a new optimizer in this one")
        with self._lock:
            if self._closed:
                raise ClosedError("the I/O threads were shut down")
            self._jobs.put(job)

    def shut_down(self, timeout_s: float) -> list[str]:
        """Finish what was submitted, then end the threads; the names of those that had not ended in time.

        A thread that calls this is not waited for, and a forked child waits for none.
        """
        with self._lock:
            self._closed = True
        self._finalizer()
        if os.getpid() != self._owner:
            return []
        deadline = time.monotonic() + timeout_s
        left = []
        for thread in self._threads:
            if thread is threading.current_thread():
                continue
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                left.append(thread.name)
        if left:
            _log.warning("I/O threads left behind, not ended within %g s: %s", timeout_s, ", ".join(left))
        return left

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The Executor's way to end it: without a limit of time, or without waiting; nothing submitted is dropped."""
        if cancel_futures:
            raise NotImplementedError("IOThreads finishes what was submitted: bytes may be on their way")
        if wait:
            self.shut_down(threading.TIMEOUT_MAX / 2)
        else:
            with self._lock:
                self._closed = True
            self._finalizer()


def _end(jobs: _Jobs, count: int) -> None:
    for _ in range(count):
        jobs.put(None)


def _serve(jobs: _Jobs) -> None:
    if hasattr(signal, "pthread_sigmask"):
        # Faults of the thread itself stay deliverable, so that a crash can be reported as one.
        faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)
    while True:
        job = jobs.get()
        if job is None:
            return
        future, fn, args, kwargs = job
        if future.set_running_or_notify_cancel():
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        # An idle thread keeps nothing alive.
        del job, future, fn, args, kwargs


async def ended(work: asyncio.Future[_T] | Future[_T]) -> _T:
    """The outcome of work in flight; a cancellation is held back until it has ended.

    Whoever is cancelled reuses the memory of the transfer next, so it must not go on while bytes still move.
    """
    inner = asyncio.wrap_future(work) if isinstance(work, Future) else work
    cancelled: asyncio.CancelledError | None = None
    while not inner.done():
        try:
            await done(inner)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if inner.cancelled() else inner.exception())
    return inner.result()


async def done(work: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until the work has ended, whatever its outcome, or the time is up; a cancellation leaves it alone.

    What `asyncio.wait` does, for one future and with less work.
    """
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def release(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = None if timeout_s is None else loop.call_later(timeout_s, release)
    work.add_done_callback(release)
    try:
        await waiter
    finally:
        work.remove_done_callback(release)
        if timer is not None:
            timer.cancel()
