"""Time for emulated devices: real, virtual on an event loop of its own, or merely counted."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Clock(Protocol):
    """What an emulated device needs of time."""

    def now(self) -> float:
        """Seconds since any moment; never less than before."""

    async def sleep_until(self, moment_s: float) -> None:
        """Return when it is that late."""

    def holding(self) -> AbstractContextManager[None]:
        """Inside, something goes on that takes real time: virtual time must not run ahead of it."""


class LoopClock:
    """The running event loop's time: real on a usual loop, virtual on a `VirtualTimeLoop`."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep_until(self, moment_s: float) -> None:
        await asyncio.sleep(max(moment_s - self.now(), 0.0))

    def holding(self) -> AbstractContextManager[None]:
        loop = asyncio.get_running_loop()
        return loop.holding() if isinstance(loop, VirtualTimeLoop) else contextlib.nullcontext()


class CountedClock:
    """A counter that whoever sleeps puts forward: nobody waits, and the device's busy time is the same.

    For code on a loop of its own, such as a whole engine. What others do meanwhile takes no time here, so waits that
    would have overlapped with it are not seen.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep_until(self, moment_s: float) -> None:
        self._now = max(self._now, moment_s)
        await asyncio.sleep(0)

    def holding(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on which nobody waits: when nothing is left to do, its time jumps to the next timer.

    A single thread's work so takes the same virtual time, to the digit, each time it is run. Work in other threads
    takes none, provided that whoever waits for it does so inside `holding()`.
    """

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self._holders = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_s

    def jump(self, seconds: float) -> None:
        """Put the time forward."""
        self._virtual_s += seconds

    @property
    def held(self) -> bool:
        """Whether somebody waits for real work."""
        return self._holders > 0

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, the time does not jump."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1


class _JumpingSelector(selectors.BaseSelector):
    """Waits for file events really where it must, and lets the loop's time jump where it need not."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._real = selectors.DefaultSelector()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or self._loop.held:
            # Nothing is due before a thread or a file reports (a timer is not: time stands still).
            return self._real.select(0 if timeout is not None and timeout <= 0 else None)
        events = self._real.select(0)
        if not events and timeout > 0:
            self._loop.jump(timeout)
        return events

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()
