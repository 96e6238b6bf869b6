"""The asyncio loop in a daemon thread of its own, on uvloop where there is one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_log = logging.getLogger("dsa")


def _new_loop(use_uvloop: bool) -> asyncio.AbstractEventLoop:
    if use_uvloop:
        try:
            import uvloop
        except ImportError:
            _log.debug("uvloop is not installed; the event loop is asyncio's own")
        else:
            return uvloop.new_event_loop()  # type: ignore[no-any-return, unused-ignore]
    return asyncio.new_event_loop()


class LoopThread:
    """An event loop that runs until `stop`; its thread is a daemon and takes no signals.

    Args:
        name: the thread's name.
        use_uvloop: run on uvloop where it is installed.
    """

    def __init__(self, name: str, *, use_uvloop: bool) -> None:
        self._loop = _new_loop(use_uvloop)
        self._stopping = False
        self._thread = threading.Thread(target=_run, args=(self._loop,), name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start the coroutine on the loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run the function on the loop soon; nothing happens once the loop has been stopped."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # closed
            _log.debug("%s: the loop has ended, a wake-up was dropped", self._thread.name)

    def inside(self) -> bool:
        """Whether the caller runs on the loop's thread."""
        return threading.current_thread() is self._thread

    @property
    def alive(self) -> bool:
        """Whether the loop's thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Cancel what runs, end the loop and its thread; False where that takes longer than `timeout_s`.

        Called again it only waits on: a second end would stop the loop under those that are being cancelled.
        """
        if self._thread.is_alive():
            if not self._stopping:
                self._stopping = True
                self.call_soon(lambda: _cancel_all(self._loop))
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.stop()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
