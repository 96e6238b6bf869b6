"""Threads of the kernels' own, which carry out one step's nogil loops beside the calling thread.

Each return from a nogil loop may wait for the GIL (5 ms where another thread is busy in Python): so a job is split
into one part a worker, never more, and the calling thread takes the first part itself.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

ELEMENTS_PER_WORKER = 1 << 15  # a part smaller than this does not pay for waking a thread


class _Crew:
    """Daemon threads that take parts from one queue; they belong to the process that started them."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.size = 0
        self.lock = threading.Lock()

    def grow(self, size: int) -> None:
        """Start threads until there are `size`."""
        if self.size >= size:
            return
        with self.lock:
            threads = torch.get_num_threads()
            ready: queue.SimpleQueue[None] = queue.SimpleQueue()
            started = 0
            while self.size < size:
                name = f"dsa-kernel-{self.size}"
                threading.Thread(target=_work, args=(self.parts, ready), name=name, daemon=True).start()
                self.size += 1
                started += 1
            for _ in range(started):
                ready.get()
            # Each thread has set torch's thread count to 1 for itself; torch also takes the last value set for
            # threads that come later, so the caller's is set again.
            torch.set_num_threads(threads)


_crew = _Crew()


def _work(parts: queue.SimpleQueue[Any], ready: queue.SimpleQueue[None]) -> None:
    torch.set_num_threads(1)  # else each worker's torch operation would start as many threads again
    ready.put(None)
    while True:
        part, first, last, outcomes = parts.get()
        outcome: BaseException | None = None
        try:
            part(first, last)
        except BaseException as error:
            outcome = error
        outcomes.put(outcome)
        del part, outcomes, outcome


def share_out(part: Callable[[int, int], None], rows: int, elements: int) -> None:
    """Run `part(first, last)` over all of `range(rows)`, in as many threads as torch may use now and as pay.

    Returns only when every part has ended, also when one of them failed or the caller was interrupted: nothing is
    written behind the caller's back.

    Args:
        part: works on rows `first` to `last`, in any thread, at the same time as on other rows.
        rows: how many there are.
        elements: how many numbers they hold together.

    Raises:
        BaseException: the first failure of a part.
    """
    workers = min(torch.get_num_threads(), rows, elements // ELEMENTS_PER_WORKER)
    if workers <= 1:
        part(0, rows)
        return
    crew = _own_crew()
    crew.grow(workers - 1)
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    bounds = [rows * worker // workers for worker in range(workers + 1)]
    for first, last in zip(bounds[1:-1], bounds[2:], strict=True):
        crew.parts.put((part, first, last, outcomes))
    failures: list[BaseException] = []
    try:
        part(0, bounds[1])
    except BaseException as error:
        failures.append(error)
    pending = workers - 1
    while pending:
        try:
            outcome = outcomes.get()
        except BaseException as interrupt:
            failures.append(interrupt)
            continue
        pending -= 1
        if outcome is not None:
            failures.append(outcome)
    if failures:
        raise failures[0]


def _own_crew() -> _Crew:
    """This process's crew: a forked child has none of its parent's threads, and its lock may have been held."""
    global _crew
    if _crew.pid != os.getpid():
        _crew = _Crew()
    return _crew
