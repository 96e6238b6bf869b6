"""How an emulated device works off its requests: a clock of its own, counters, and completions by ticket. Pure.

Time is a number that the caller passes in and that never goes back. Nothing here waits. The same calls give the same
times, to the digit, for the same seed.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsa.io.backends.device_models import DeviceModel, ParallelDevice, RotatingDisk
from dsa.io.compile import kernel

_SAME_TIME_S = 1e-9
"""Times closer than this are one: clocks that add up durations miss a moment by their last digit."""
_SAME_ANGLE = 1e-6
"""Of a turn: so near, the place is under the head already."""

Times = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass
class DeviceTime:
    """What the device spent its time on so far.

    Args:
        read_s, write_s, sync_s: seconds (of a parallel device: of its pipe).
        seeks: requests that the head had to seek for.
        returns: how often the head went back to a lower place.
    """

    read_s: float = 0.0
    write_s: float = 0.0
    sync_s: float = 0.0
    seeks: int = 0
    returns: int = 0


class DeviceQueue(abc.ABC):
    """The requests that a device has, and when they are over."""

    def __init__(self, seed: int) -> None:
        self.time = DeviceTime()
        self._random = np.random.default_rng(seed)
        self._now = 0.0

    @abc.abstractmethod
    def submit(self, at_s: float, write: bool, positions: Places, lengths: Places) -> int:
        """Queue requests that come together; a ticket for all of them."""

    @abc.abstractmethod
    def expected_s(self, ticket: int) -> float:
        """When the last of the ticket's requests is over if nothing else comes. What comes can only delay it."""

    @abc.abstractmethod
    def forget(self, ticket: int) -> None:
        """Nobody will ask about the ticket again; its requests are worked off all the same."""

    def over(self, ticket: int, now_s: float) -> bool:
        """Whether all of the ticket's requests are over by now."""
        self.run_until(now_s)
        return self.expected_s(ticket) <= now_s + _SAME_TIME_S

    def run_until(self, now_s: float) -> None:
        """Begin every request whose turn comes until now."""
        self._now = max(self._now, now_s)


def queue_of(model: DeviceModel, seed: int) -> DeviceQueue:
    """An idle device of the model."""
    if isinstance(model, RotatingDisk):
        return RotatingQueue(model, seed)
    if isinstance(model, ParallelDevice):
        return ParallelQueue(model, seed)
    raise TypeError(f"no queue for a device of type {type(model).__name__}")


@kernel
def _work_in_parallel(
    at_s: float,
    lengths: Places,
    latencies: Times,
    request_s: float,
    byte_s: float,
    lanes: Times,
    pipe_s: float,
) -> tuple[float, float, float]:
    """Run the requests through the lanes and the pipe: when the pipe is free, how long it was taken, the last end."""
    busy_s, end_s = 0.0, at_s
    for i in range(len(lengths)):
        lane = np.argmin(lanes)
        start = max(lanes[lane], at_s)
        cost = max(request_s, lengths[i] * byte_s)
        pipe_s = max(pipe_s, start) + cost
        busy_s += cost
        done = max(start + latencies[i], pipe_s)
        lanes[lane] = done
        end_s = max(end_s, done)
    return pipe_s, busy_s, end_s


class ParallelQueue(DeviceQueue):
    """First come, first served: so the end of a request is known when it comes."""

    def __init__(self, model: ParallelDevice, seed: int) -> None:
        super().__init__(seed)
        self._model = model
        self._lanes: Times = np.zeros(model.lanes)
        self._pipe_s = 0.0
        self._ends: dict[int, float] = {}
        self._next = 0

    def submit(self, at_s: float, write: bool, positions: Places, lengths: Places) -> int:
        self.run_until(at_s)
        model = self._model
        latency, request_s, rate = (
            (model.write_latency_s, model.write_request_s, model.write_bytes_per_s)
            if write
            else (model.read_latency_s, model.read_request_s, model.read_bytes_per_s)
        )
        noise = -np.log1p(-self._random.random(len(lengths)))  # exponential, mean 1
        latencies = latency * (1 - model.jitter + model.jitter * noise)
        lanes = (self._lanes, self._pipe_s)
        pipe_s, busy_s, end_s = _work_in_parallel(self._now, lengths, latencies, request_s, 1 / rate, *lanes)
        self._pipe_s = pipe_s
        if write:
            self.time.write_s += busy_s
        else:
            self.time.read_s += busy_s
        self._next += 1
        self._ends[self._next] = end_s
        return self._next

    def expected_s(self, ticket: int) -> float:
        return self._ends[ticket]

    def forget(self, ticket: int) -> None:
        del self._ends[ticket]


@kernel
def _work_in_turn(
    positions: Places,
    lengths: Places,
    writes: NDArray[np.bool_],
    owners: NDArray[np.int64],
    noise: Times,
    served: NDArray[np.bool_],
    left: NDArray[np.int64],
    ends: Times,
    head: Times,
    hand: int,
    geometry: tuple[float, float, float, float, float, float],
    until_s: float,
    wanted: int,
    tally: Times,
) -> int:
    """Serve requests one after the other, each begun by `until_s`, or until `wanted` (an owner) has none left.

    Args:
        left, ends: per owner, requests that are not served, and when the last was over.
        head: when the head is free, where it is, and where what it read or wrote last begins.
        hand: where to go on in the order of the arrays; the new one is returned.
        tally: seconds of reads and of writes, seeks, returns.
    """
    rotation_s, track, capacity, settle_s, full_s, phase = geometry
    waiting = 0
    for i in range(len(served)):
        waiting += not served[i]
    while waiting > 0:
        if wanted >= 0 and left[wanted] == 0:
            break
        if head[0] > until_s:
            break
        while hand < len(served) and served[hand]:
            hand += 1
        if hand == len(served):
            hand = 0
            continue
        start = positions[hand]
        end = start + lengths[hand]
        if not writes[hand] and head[2] <= start < head[1]:  # the disk still has what moved last
            start = head[1]
            end = max(start, end)
        gap = start - head[1]
        moment = head[0]
        if gap < 0 or gap >= track:
            moment += (settle_s + (full_s - settle_s) * np.sqrt(min(abs(gap) / capacity, 1.0))) * noise[hand]
            tally[2] += 1
            tally[3] += gap < 0
        turn = (start / track - phase - moment / rotation_s) % 1.0
        if turn < 1 - _SAME_ANGLE and end > start:
            moment += turn * rotation_s
        moment += (end - start) * rotation_s / track
        tally[1 if writes[hand] else 0] += moment - head[0]
        head[0], head[1], head[2] = moment, end, min(positions[hand], start)
        owner = owners[hand]
        left[owner] -= 1
        ends[owner] = moment
        served[hand] = True
        waiting -= 1
    return hand


class RotatingQueue(DeviceQueue):
    """One head: in sweeps over what is queued, or in the order of submission."""

    def __init__(self, model: RotatingDisk, seed: int) -> None:
        super().__init__(seed)
        self._model = model
        phase = float(self._random.random())
        seek = (float(model.capacity_bytes), float(model.settle_s), float(model.full_seek_s))
        self._geometry = (float(model.rotation_s), float(model.track_bytes), *seek, phase)
        self._head: Times = np.zeros(3)
        self._hand = 0
        none = np.empty(0, np.int64)
        self._queued = (
            none,
            none,
            np.empty(0, np.bool_),
            none,
            np.empty(0),
        )  # positions, lengths, writes, owners, noise
        self._served: NDArray[np.bool_] = np.empty(0, np.bool_)
        # Tickets are numbers of owners, used again when they are forgotten and nothing of them is queued.
        self._left: NDArray[np.int64] = np.zeros(16, np.int64)
        self._ends: Times = np.zeros(16)
        self._idle = list(range(16))
        self._forgotten: set[int] = set()
        self._known: dict[int, float] = {}  # expected ends, until something else comes

    def submit(self, at_s: float, write: bool, positions: Places, lengths: Places) -> int:
        self.run_until(at_s)
        self._known.clear()
        owner = self._new_owner()
        count = len(positions)
        self._left[owner], self._ends[owner] = count, self._now
        if count == 0:
            return owner
        noise = 1 + self._model.jitter * (2 * self._random.random(count) - 1)
        new = (positions, lengths, np.full(count, write), np.full(count, owner, np.int64), noise)
        keep = ~self._served
        queued = [np.concatenate([old[keep], added]) for old, added in zip(self._queued, new, strict=True)]
        self._hand = 0
        if self._model.sweeps:
            order = np.argsort(queued[0], kind="stable")
            queued = [array[order] for array in queued]
            self._hand = int(np.searchsorted(queued[0], self._head[1]))
        self._queued = (queued[0], queued[1], queued[2], queued[3], queued[4])
        self._served = np.zeros(len(queued[0]), np.bool_)
        self._head[0] = max(self._head[0], self._now)
        return owner

    def _new_owner(self) -> int:
        for owner in sorted(self._forgotten):
            if self._left[owner] == 0:
                self._forgotten.discard(owner)
                self._idle.append(owner)
        if not self._idle:
            n = len(self._left)
            self._left = np.concatenate([self._left, np.zeros(n, np.int64)])
            self._ends = np.concatenate([self._ends, np.zeros(n)])
            self._idle = list(range(n, 2 * n))
        return self._idle.pop(0)

    def run_until(self, now_s: float) -> None:
        super().run_until(now_s)
        if len(self._served) == 0:
            return
        tally = np.zeros(4)
        state = (*self._queued, self._served, self._left, self._ends, self._head, self._hand, self._geometry)
        self._hand = _work_in_turn(*state, self._now, -1, tally)
        self.time.read_s += float(tally[0])
        self.time.write_s += float(tally[1])
        self.time.seeks += int(tally[2])
        self.time.returns += int(tally[3])

    def expected_s(self, ticket: int) -> float:
        if self._left[ticket] == 0:
            return float(self._ends[ticket])
        if ticket not in self._known:
            # Look ahead on copies.
            served, left, ends, head = (a.copy() for a in (self._served, self._left, self._ends, self._head))
            state = (*self._queued, served, left, ends, head, self._hand, self._geometry)
            _work_in_turn(*state, np.inf, ticket, np.zeros(4))
            self._known[ticket] = float(ends[ticket])
        return self._known[ticket]

    def forget(self, ticket: int) -> None:
        self._known.pop(ticket, None)
        self._forgotten.add(ticket)
