"""A device made of the CPU: its copies and kernels finish late, and out of order between streams, as real ones may.

With it everything that staging does on an accelerator is done, and can be tested, without one: what is not ordered by
an event happens in an order drawn by chance, and a copy that nobody waits for is likely not made yet. Time is virtual:
each stream has a clock of its own, and what is issued begins when its stream, the events that it waits for and whoever
issues it have come so far.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MOST_CREDIT = 6  # pieces of work that the device does by itself after a step


@dataclass(eq=False)
class LateStream:
    """Work issued to one stream, in order; `clock_s` is when what it has done so far ended."""

    queue: deque[_Work] = field(default_factory=deque)
    clock_s: float = 0.0


@dataclass(eq=False)
class LateEvent:
    """A point in a stream's work; `time_s` is when it was reached."""

    stream: LateStream
    happened: bool = False
    time_s: float = 0.0


@dataclass(eq=False)
class _Work:
    issued_s: float
    action: Callable[[], None] | None = None
    duration_s: float = 0.0
    awaited: LateEvent | None = None
    recorded: LateEvent | None = None

    @property
    def can_begin(self) -> bool:
        return self.awaited is None or self.awaited.happened


class LateDevice:
    """Three streams, all run by one thread of the device; which goes on next is drawn from `seed`.

    What is issued to the current stream has ended when `finish_step` returns, for parameters in RAM are read without a
    stream. All else is done when chance has it, or somebody who waits calls `hurry`.

    Args:
        copy_s: seconds (virtual) that a copy of so many bytes takes.
    """

    def __init__(self, seed: int = 0, copy_s: Callable[[int], float] = lambda nbytes: 0.0) -> None:
        self._current, self.into, self.out = LateStream(), LateStream(), LateStream()
        self._streams = (self._current, self.into, self.out)
        self.copied_s = 0.0  # virtual time of all copies, each way
        self.stalled_s = 0.0  # virtual time that the current stream waited for events
        self._copy_s = copy_s
        self._chance = random.Random(seed)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._host_s: dict[int, float] = {}  # by thread: the latest event that it waited for
        self._credit = 0
        self._forced = False
        self._hurried = False
        self._closed = False
        self._error: BaseException | None = None

    def current(self) -> LateStream:
        """The one stream of whoever steps."""
        return self._current

    def host_block(self, nbytes: int) -> tuple[Tensor, bool]:
        """Plain memory, which is as good as pinned here."""
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu"), True

    def device_block(self, nbytes: int) -> Tensor:
        """Plain memory, full of what must not be read."""
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cpu")

    def upload(self, array: NDArray[np.int64]) -> Tensor:
        """The same memory."""
        return torch.from_numpy(array)

    def run(self, stream: LateStream, work: Callable[[], None]) -> None:
        """Issue `work`; it runs on the device's thread."""
        self._issue(stream, _Work(self._now(), work))

    def copy(self, stream: LateStream, target: Tensor, source: Tensor) -> None:
        """Issue a copy; both sides are read and written when it is made, not before."""
        took_s = self._copy_s(source.nbytes)
        self._issue(stream, _Work(self._now(), lambda: _copy(target, source), took_s))
        self.copied_s += took_s

    def spend(self, seconds: float) -> None:
        """The model computes for so long, on the current stream."""
        self._issue(self._current, _Work(self._now(), duration_s=seconds))
        self.finish_step()

    def record(self, stream: LateStream) -> LateEvent:
        """An event behind all that was issued to the stream."""
        event = LateEvent(stream)
        self._issue(stream, _Work(self._now(), recorded=event))
        return event

    def wait(self, stream: LateStream, event: LateEvent) -> None:
        """Issue a wait."""
        self._issue(stream, _Work(self._now(), awaited=event))

    def synchronize(self, event: LateEvent) -> None:
        """Wait for the event; it comes when it comes."""
        with self._changed:
            self._changed.wait_for(lambda: event.happened or self._closed)
            self._host_s[threading.get_ident()] = max(self._host_s.get(threading.get_ident(), 0.0), event.time_s)

    def hurry(self) -> None:
        """Do all that was issued, in an order by chance."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def finish_step(self) -> None:
        """Wait until the current stream has done all that was issued to it.

        Raises:
            Exception: what a piece of work has raised.
        """
        with self._changed:
            self._forced = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._current.queue or self._closed)
            self._forced = False
            self._credit = self._chance.randint(0, _MOST_CREDIT)
            self._changed.notify_all()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def finish(self) -> None:
        """Wait until everything was done, or has failed."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not any(stream.queue for stream in self._streams) or self._closed)
            self._error = None

    def close(self) -> None:
        """End the device's thread; whoever waits for an event goes on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _now(self) -> float:
        return max(self._host_s.get(threading.get_ident(), 0.0), self._current.clock_s)

    def _issue(self, stream: LateStream, work: _Work) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="dsa-late-device", daemon=True)
                self._thread.start()
            stream.queue.append(work)
            self._changed.notify_all()

    # The device's thread.

    def _serve(self) -> None:
        with self._changed:
            while not self._closed:
                stream = self._pick()
                if stream is None:
                    self._changed.wait()
                    continue
                work = stream.queue.popleft()
                try:
                    self._carry_out(stream, work)
                except BaseException as error:
                    self._error = self._error or error
                self._changed.notify_all()

    def _pick(self) -> LateStream | None:
        able = [stream for stream in self._streams if stream.queue and stream.queue[0].can_begin]
        if not able:
            self._hurried = False
        elif self._hurried:
            return self._chance.choice(able)
        elif self._forced and self._current.queue:
            return self._chance.choice([*able, self._needed()])
        elif self._credit:
            self._credit -= 1
            return self._chance.choice(able)
        return None

    def _needed(self) -> LateStream:
        """The stream that holds up the current one, or that one itself."""
        stream = self._current
        while (awaited := stream.queue[0].awaited) is not None and not awaited.happened:
            stream = awaited.stream
        return stream

    def _carry_out(self, stream: LateStream, work: _Work) -> None:
        begin_s = max(stream.clock_s, work.issued_s)
        if work.awaited is not None:
            if stream is self._current:
                self.stalled_s += max(0.0, work.awaited.time_s - begin_s)
            begin_s = max(begin_s, work.awaited.time_s)
        stream.clock_s = begin_s + work.duration_s
        if work.recorded is not None:
            work.recorded.time_s, work.recorded.happened = stream.clock_s, True
        if work.action is not None:
            with torch.no_grad():
                work.action()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
