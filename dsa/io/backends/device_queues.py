"""How an emulated device works off its requests: a clock of its own, counters, and completions by ticket. Pure.

Time is a number that the caller passes in and that never goes back. Nothing here waits. The same calls give the same
times, to the digit, for the same seed.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace

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
Marks = NDArray[np.bool_]


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


@dataclass
class _Queued:
    """Requests, one entry each, and whether they were served."""

    positions: Places
    lengths: Places
    writes: Marks
    owners: Places
    noise: Times
    served: Marks

    @classmethod
    def none(cls) -> _Queued:
        places, marks = np.empty(0, np.int64), np.empty(0, np.bool_)
        return cls(places, places, marks, places, np.empty(0), marks)

    def followed_by(self, other: _Queued) -> _Queued:
        """What is not served here, then the other's."""
        keep = ~self.served
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Queued(*(np.concatenate([mine[keep], added]) for mine, added in pairs))

    def ordered(self, order: Places) -> _Queued:
        """The same in another order."""
        return _Queued(*(array[order] for array in vars(self).values()))


class DeviceQueue(abc.ABC):
    """The requests that a device has, and when they are over.

    Args:
        moving: what changes of the device, besides the requests, as one array.
    """

    def __init__(self, seed: int, moving: Times) -> None:
        self.time = DeviceTime()
        self._random = np.random.default_rng(seed)
        self._now = 0.0
        self._queued = _Queued.none()
        self._moving = moving
        # Tickets are numbers of owners, used again when they are forgotten and nothing of them is queued.
        self._left: Places = np.zeros(16, np.int64)  # requests that are not served
        self._ends: Times = np.zeros(16)  # when the last one was over
        self._idle = list(range(16))
        self._forgotten: set[int] = set()
        self._known: dict[int, float] = {}  # expected ends, until something else comes

    @abc.abstractmethod
    def _draw(self, write: bool, count: int) -> Times:
        """What is random in requests, one number each."""

    @abc.abstractmethod
    def _line_up(self, queued: _Queued) -> _Queued:
        """Put the requests, none of them served, into the order in which they are looked through from now on."""

    @abc.abstractmethod
    def _work(
        self, queued: _Queued, left: Places, ends: Times, moving: Times, until_s: float, wanted: int, tally: Times
    ) -> None:
        """Begin requests until then, or until the owner `wanted` has none left; the arrays change.

        Args:
            tally: seconds of reads and of writes, seeks, returns; added to.
        """

    def submit(self, at_s: float, write: bool, positions: Places, lengths: Places) -> int:
        """Queue requests that come together; a ticket for all of them."""
        self.run_until(at_s)
        owner, count = self._new_owner(), len(positions)
        self._left[owner], self._ends[owner] = count, self._now
        if count:
            self._known.clear()
            owners, marks = np.full(count, owner, np.int64), np.full(count, write)
            new = _Queued(positions, lengths, marks, owners, self._draw(write, count), np.zeros(count, np.bool_))
            self._queued = self._line_up(self._queued.followed_by(new))
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

    def expected_s(self, ticket: int) -> float:
        """When the last of the ticket's requests is over if nothing else comes. What comes can only delay it."""
        if self._left[ticket] == 0:
            return float(self._ends[ticket])
        if ticket not in self._known:
            # Look ahead on copies of all that changes.
            ahead = replace(self._queued, served=self._queued.served.copy())
            left, ends, moving = self._left.copy(), self._ends.copy(), self._moving.copy()
            self._work(ahead, left, ends, moving, np.inf, ticket, np.zeros(4))
            self._known[ticket] = float(ends[ticket])
        return self._known[ticket]

    def over(self, ticket: int, now_s: float) -> bool:
        """Whether all of the ticket's requests are over by now."""
        self.run_until(now_s)
        return self.expected_s(ticket) <= now_s + _SAME_TIME_S

    def forget(self, ticket: int) -> None:
        """Nobody will ask about the ticket again; its requests are worked off all the same."""
        self._known.pop(ticket, None)
        self._forgotten.add(ticket)

    def run_until(self, now_s: float) -> None:
        """Begin every request whose turn comes until now."""
        self._now = max(self._now, now_s)
        if not self._queued.served.all():
            tally = np.zeros(4)
            self._work(self._queued, self._left, self._ends, self._moving, self._now, -1, tally)
            self.time.read_s += float(tally[0])
            self.time.write_s += float(tally[1])
            self.time.seeks += int(tally[2])
            self.time.returns += int(tally[3])


def queue_of(model: DeviceModel, seed: int) -> DeviceQueue:
    """An idle device of the model."""
    if isinstance(model, RotatingDisk):
        return RotatingQueue(model, seed)
    if isinstance(model, ParallelDevice):
        return ParallelQueue(model, seed)
    raise TypeError(f"no queue for a device of type {type(model).__name__}")


_PIPE, _READ_TURN, _WRITE_TURN, _READ_HAND, _WRITE_HAND, _FLOOR, _LANES = range(7)


@kernel
def _work_in_parallel(
    lengths: Places,
    writes: Marks,
    owners: Places,
    latencies: Times,
    served: Marks,
    left: Places,
    ends: Times,
    moving: Times,
    costs: tuple[float, float, float, float],
    until_s: float,
    wanted: int,
    tally: Times,
) -> None:
    """Let the reads and the writes, each first come first served, through the lanes and the pipe in fair turns."""
    lanes = moving[_LANES:]
    hands = np.array([moving[_READ_HAND], moving[_WRITE_HAND]]).astype(np.int64)
    while wanted < 0 or left[wanted] > 0:
        for line in range(2):
            while hands[line] < len(served) and (served[hands[line]] or writes[hands[line]] != line):
                hands[line] += 1
        if hands[0] == len(served) and hands[1] == len(served):
            break
        lane = np.argmin(lanes)
        start = max(lanes[lane], moving[_FLOOR])
        if start > until_s:
            break
        # Whoever has had less of the pipe is next; a line that was empty does not save up turns.
        line = 0 if moving[_READ_TURN] <= moving[_WRITE_TURN] else 1
        if hands[line] == len(served):
            moving[_READ_TURN + line] = max(moving[_READ_TURN + line], moving[_READ_TURN + 1 - line])
            line = 1 - line
        elif hands[1 - line] == len(served):
            moving[_READ_TURN + 1 - line] = max(moving[_READ_TURN + 1 - line], moving[_READ_TURN + line])
        i = hands[line]
        cost = max(costs[line], lengths[i] * costs[2 + line])
        moving[_READ_TURN + line] += cost
        moving[_PIPE] = max(moving[_PIPE], start) + cost
        lanes[lane] = max(start + latencies[i], moving[_PIPE])
        tally[line] += cost
        left[owners[i]] -= 1
        ends[owners[i]] = max(ends[owners[i]], lanes[lane])
        served[i] = True
    moving[_READ_HAND], moving[_WRITE_HAND] = hands[0], hands[1]


class ParallelQueue(DeviceQueue):
    """Reads and writes wait in two lines and share the pipe in fair turns, as from two queues of a host."""

    def __init__(self, model: ParallelDevice, seed: int) -> None:
        super().__init__(seed, np.zeros(_LANES + model.lanes))
        self._model = model
        requests = (float(model.read_request_s), float(model.write_request_s))
        self._costs = (*requests, 1.0 / model.read_bytes_per_s, 1.0 / model.write_bytes_per_s)

    def _draw(self, write: bool, count: int) -> Times:
        model = self._model
        noise = -np.log1p(-self._random.random(count))  # exponential, mean 1
        latency = model.write_latency_s if write else model.read_latency_s
        latencies: Times = latency * (1 - model.jitter + model.jitter * noise)
        return latencies

    def _line_up(self, queued: _Queued) -> _Queued:
        self._moving[_READ_HAND] = self._moving[_WRITE_HAND] = 0
        self._moving[_FLOOR] = self._now
        return queued

    def _work(
        self, queued: _Queued, left: Places, ends: Times, moving: Times, until_s: float, wanted: int, tally: Times
    ) -> None:
        requests = (queued.lengths, queued.writes, queued.owners, queued.noise, queued.served)
        _work_in_parallel(*requests, left, ends, moving, self._costs, until_s, wanted, tally)


_FREE, _HEAD, _LAST, _HAND = range(4)


@kernel
def _work_in_turn(
    positions: Places,
    lengths: Places,
    writes: Marks,
    owners: Places,
    noise: Times,
    served: Marks,
    left: Places,
    ends: Times,
    moving: Times,
    geometry: tuple[float, float, float, float, float, float],
    until_s: float,
    wanted: int,
    tally: Times,
) -> None:
    """Serve the requests one after the other, in the order of the arrays, from the hand on and then from the start.

    Of `moving`: when the head is free, where it is, where what it moved last begins, and the hand.
    """
    rotation_s, track, capacity, settle_s, full_s, phase = geometry
    hand = int(moving[_HAND])
    waiting = 0
    for i in range(len(served)):
        waiting += not served[i]
    while waiting > 0 and moving[_FREE] <= until_s and (wanted < 0 or left[wanted] > 0):
        while hand < len(served) and served[hand]:
            hand += 1
        if hand == len(served):
            hand = 0
            continue
        start = positions[hand]
        end = start + lengths[hand]
        if not writes[hand] and moving[_LAST] <= start < moving[_HEAD]:  # the disk still has what moved last
            start = int(moving[_HEAD])
            end = max(start, end)
        gap = start - moving[_HEAD]
        moment = moving[_FREE]
        if gap < 0 or gap >= track:
            moment += (settle_s + (full_s - settle_s) * np.sqrt(min(abs(gap) / capacity, 1.0))) * noise[hand]
            tally[2] += 1
            tally[3] += gap < 0
        turn = (start / track - phase - moment / rotation_s) % 1.0
        if turn < 1 - _SAME_ANGLE and end > start:
            moment += turn * rotation_s
        moment += (end - start) * rotation_s / track
        tally[1 if writes[hand] else 0] += moment - moving[_FREE]
        moving[_FREE], moving[_HEAD], moving[_LAST] = moment, end, min(positions[hand], start)
        left[owners[hand]] -= 1
        ends[owners[hand]] = moment
        served[hand] = True
        waiting -= 1
    moving[_HAND] = hand


class RotatingQueue(DeviceQueue):
    """One head: in sweeps over what is queued, or in the order of submission."""

    def __init__(self, model: RotatingDisk, seed: int) -> None:
        super().__init__(seed, np.zeros(4))
        self._model = model
        phase = float(self._random.random())
        seek = (float(model.capacity_bytes), float(model.settle_s), float(model.full_seek_s))
        self._geometry = (float(model.rotation_s), float(model.track_bytes), *seek, phase)

    def _draw(self, write: bool, count: int) -> Times:
        factors: Times = 1 + self._model.jitter * (2 * self._random.random(count) - 1)
        return factors

    def _line_up(self, queued: _Queued) -> _Queued:
        self._moving[_FREE] = max(self._moving[_FREE], self._now)
        self._moving[_HAND] = 0
        if self._model.sweeps:
            queued = queued.ordered(np.argsort(queued.positions, kind="stable"))
            self._moving[_HAND] = np.searchsorted(queued.positions, self._moving[_HEAD])
        return queued

    def _work(
        self, queued: _Queued, left: Places, ends: Times, moving: Times, until_s: float, wanted: int, tally: Times
    ) -> None:
        places = (queued.positions, queued.lengths, queued.writes, queued.owners, queued.noise, queued.served)
        _work_in_turn(*places, left, ends, moving, self._geometry, until_s, wanted, tally)
