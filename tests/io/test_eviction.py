"""Eviction: only frames that may go, as many as there are, what is due soonest last, what is frequent late."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from numpy.typing import NDArray

from dsa.errors import UsageError
from dsa.io.choosing import NOBODY
from dsa.io.eviction import BARRED, DIRTY, FILLING, FREE, LEASED, WRITING, Policy

NONE = np.int32(-1)


class Cache:
    """The least that a cache does around a policy: rows in frames, flags, pins; one or more tables."""

    def __init__(self, n_frames: int, *tables: int) -> None:
        self.policy = Policy(n_frames)
        self.frame_of: list[NDArray[np.int32]] = []
        for n_rows in tables:
            assert self.policy.add_table(n_rows) == len(self.frame_of)
            self.frame_of.append(np.full(n_rows, NONE, np.int32))
        self.holder: list[tuple[int, int] | None] = [None] * n_frames
        self.flags = np.full(n_frames, FREE, np.uint8)
        self.pins = np.zeros(n_frames, np.int32)
        self.known: dict[int, tuple[int, NDArray[np.int64]]] = {}
        self.sequence = -1

    def announce(self, table: int, rows: NDArray[np.int64]) -> int:
        self.sequence += 1
        self.known[self.sequence] = (table, rows)
        self.policy.known(table, self.sequence, rows, self.frame_of[table][rows])
        return self.sequence

    def end(self, sequence: int) -> None:
        table, rows = self.known.pop(sequence)
        self.policy.ended(table, sequence, self.frame_of[table][rows])

    def due(self, frame: int) -> float:
        holder = self.holder[frame]
        assert holder is not None
        table, row = holder
        return min((k for k, (t, rows) in self.known.items() if t == table and row in rows), default=np.inf)

    def put(self, table: int, rows: NDArray[np.int64], frames: NDArray[np.int32]) -> None:
        for row, frame in zip(rows.tolist(), frames.tolist(), strict=True):
            holder = self.holder[frame]
            if holder is not None:
                self.frame_of[holder[0]][holder[1]] = NONE
            self.holder[frame] = (table, row)
            self.frame_of[table][row] = frame
        self.flags[frames] &= ~np.uint8(FREE)
        self.policy.filled(table, rows, frames)

    def victims(self, count: int) -> NDArray[np.int32]:
        return self.policy.victims(count, self.flags, self.pins)

    def step(self, table: int, rows: NDArray[np.int64]) -> int:
        """Bring rows into frames, touch them, let them go; how many were there."""
        frames = self.frame_of[table][rows]
        hits = int(np.count_nonzero(frames >= 0))
        self.pins[frames[frames >= 0]] += 1
        missing = rows[frames < 0]
        taken = np.flatnonzero(self.flags & FREE)[: len(missing)].astype(np.int32)
        taken = np.concatenate([taken, self.victims(len(missing) - len(taken))])
        assert len(taken) == len(missing)
        self.pins[taken] += 1
        self.put(table, missing, taken)
        frames = self.frame_of[table][rows]
        self.policy.touched(table, rows, frames)
        self.pins[frames] -= 1
        return hits


class NeverAWrongVictim(RuleBasedStateMachine):
    @initialize(n_frames=st.integers(1, 24), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3))
    def begin(self, n_frames: int, sizes: list[int]) -> None:
        self.sizes = sizes
        self.cache = Cache(n_frames, *sizes)

    def some_rows(self, data: st.DataObject) -> tuple[int, NDArray[np.int64]]:
        table = data.draw(st.integers(0, len(self.sizes) - 1))
        return table, np.array(sorted(data.draw(st.sets(st.integers(0, self.sizes[table] - 1)))), np.int64)

    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        self.cache.announce(*self.some_rows(data))

    @precondition(lambda self: self.cache.known)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.cache.end(data.draw(st.sampled_from(sorted(self.cache.known))))

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        table, rows = self.some_rows(data)
        rows = rows[self.cache.frame_of[table][rows] >= 0]
        self.cache.policy.touched(table, rows, self.cache.frame_of[table][rows])

    @rule(data=st.data())
    def pin_and_flag(self, data: st.DataObject) -> None:
        frame = data.draw(st.integers(0, len(self.cache.pins) - 1))
        self.cache.pins[frame] = data.draw(st.integers(0, 2))
        if not self.cache.flags[frame] & FREE:
            self.cache.flags[frame] = data.draw(
                st.sampled_from([0, 0, 0, DIRTY, FILLING, WRITING, LEASED, BARRED - FREE])
            )

    @rule(data=st.data())
    def fill_free_frames(self, data: st.DataObject) -> None:
        table, rows = self.some_rows(data)
        rows = rows[self.cache.frame_of[table][rows] < 0]
        frames = np.flatnonzero(self.cache.flags & FREE)[: len(rows)].astype(np.int32)
        self.cache.put(table, rows[: len(frames)], frames)

    @rule(data=st.data(), count=st.integers(0, 30))
    def give_up(self, data: st.DataObject, count: int) -> None:
        cache = self.cache
        allowed = set(np.flatnonzero(((cache.flags & BARRED) == 0) & (cache.pins == 0)).tolist())
        victims = cache.victims(count).tolist()
        assert len(set(victims)) == len(victims) == min(count, len(allowed))
        assert set(victims) <= allowed
        if sum(self.sizes) > len(cache.pins):
            due = {frame: cache.due(frame) for frame in allowed}
            assert [due[v] for v in victims] == sorted(due.values(), reverse=True)[: len(victims)]
        table, rows = self.some_rows(data)
        rows = rows[cache.frame_of[table][rows] < 0][: len(victims)]
        cache.put(table, rows, np.array(victims[: len(rows)], np.int32))


TestNeverAWrongVictim = NeverAWrongVictim.TestCase
TestNeverAWrongVictim.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def belady(batches: list[NDArray[np.int64]], n_frames: int) -> int:
    """Hits of the rule that looks at everything that comes, where a batch's rows stay until it is over."""
    held: set[int] = set()
    hits = 0
    for number, rows in enumerate(batches):
        batch = set(rows.tolist())
        hits += len(batch & held)
        for row in batch - held:
            if len(held) == n_frames:
                later = {
                    r: next((k for k in range(number, len(batches)) if r in batches[k]), 10**6) for r in held - batch
                }
                held.remove(max(later, key=lambda r: (later[r], r)))
            held.add(row)
    return hits


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_knowing_everything_it_is_belady(data: st.DataObject) -> None:
    n_rows = data.draw(st.integers(2, 24))
    n_frames = data.draw(st.integers(1, n_rows - 1))
    batch = st.sets(st.integers(0, n_rows - 1), min_size=1, max_size=n_frames)
    batches = [np.array(sorted(b), np.int64) for b in data.draw(st.lists(batch, min_size=1, max_size=25))]
    cache = Cache(n_frames, n_rows)
    for rows in batches:
        cache.announce(0, rows)
    hits = 0
    for sequence, rows in enumerate(batches):
        hits += cache.step(0, rows)
        cache.end(sequence)
    assert hits == belady(batches, n_frames)


@pytest.mark.parametrize("before", [65_530, 2**31 - 5, 2**32 - 5])
def test_order_holds_where_numbers_outgrow_their_bits(before: int) -> None:
    cache = Cache(10, 30)
    cache.put(0, np.arange(10), np.arange(10, dtype=np.int32))
    cache.sequence = before
    for row in range(10):
        cache.announce(0, np.array([row]))
    assert cache.victims(10).tolist() == list(range(9, -1, -1))


def test_a_scan_does_not_wash_out_what_is_used_often() -> None:
    cache = Cache(100, 1000)
    hot = np.arange(0, 500, 10)
    for _ in range(10):
        cache.step(0, hot)
    for start in range(0, 1000, 25):
        cache.step(0, np.setdiff1d(np.arange(start, start + 25), hot))
    assert cache.step(0, hot) == len(hot)


def test_a_row_that_was_given_up_is_known_for_what_it_was() -> None:
    cache = Cache(20, 100)
    for _ in range(5):
        cache.step(0, np.arange(10))
    for _ in range(3):
        cache.step(0, np.arange(20, 40))  # the whole cache: the ten are gone
    cache.step(0, np.arange(10))
    frames = cache.victims(10)
    assert {holder[1] for f in frames.tolist() if (holder := cache.holder[f])} <= set(range(20, 40))


def test_what_was_popular_once_gives_way() -> None:
    cache = Cache(40, 200)
    old, new = np.arange(30), np.arange(100, 130)
    for _ in range(300):
        cache.step(0, old)
    random = np.random.default_rng(0)
    for _ in range(300):
        cache.step(0, np.unique(np.concatenate([random.choice(new, 20), random.choice(200, 5)])))
    assert np.count_nonzero(cache.frame_of[0][new] >= 0) >= 28


def test_the_same_calls_give_the_same_victims() -> None:
    def run() -> list[int]:
        cache = Cache(60, 300, 50)
        random = np.random.default_rng(5)
        chosen: list[int] = []
        for _ in range(200):
            table = int(random.integers(2))
            rows = np.unique(random.zipf(1.3, 20) % (300, 50)[table])
            sequence = cache.announce(table, rows)
            cache.step(table, rows)
            cache.end(sequence)
            chosen.extend(cache.victims(7).tolist())
        return chosen

    assert run() == run()


def test_the_one_frame_that_may_go_is_found_in_a_large_arena() -> None:
    n_frames = 300_000
    policy = Policy(n_frames)
    policy.add_table(400_000)
    policy.filled(0, np.arange(n_frames), np.arange(n_frames, dtype=np.int32))
    flags = np.full(n_frames, DIRTY, np.uint8)
    pins = np.zeros(n_frames, np.int32)
    for frame in (299_999, 0, 150_000):
        flags[frame] = 0
        assert policy.victims(5, flags, pins).tolist() == [frame]
        pins[frame] = 1
        assert policy.victims(5, flags, pins).tolist() == []
        pins[frame] = 0
        flags[frame] = DIRTY


def test_in_a_large_arena_rare_rows_go_and_all_of_it_is_looked_at() -> None:
    n_frames = 200_000
    policy = Policy(n_frames)
    policy.add_table(400_000)
    frames = np.arange(n_frames, dtype=np.int32)
    rows = frames.astype(np.int64)
    policy.filled(0, rows, frames)
    often = frames[frames % 4 != 0]
    for _ in range(4):
        policy.touched(0, rows[often], often)
    flags, pins = np.zeros(n_frames, np.uint8), np.zeros(n_frames, np.int32)
    gone: list[NDArray[np.int32]] = []
    for _ in range(90):  # 90 of the 100 that would take every fourth frame
        gone.append(policy.victims(500, flags, pins))
        flags[gone[-1]] = FREE
    everything = np.concatenate(gone)
    assert len(np.unique(everything)) == 45_000
    assert not np.any(everything % 4)


def test_a_frame_for_every_row_needs_no_foresight_until_a_table_joins() -> None:
    cache = Cache(10, 10)
    first = cache.announce(0, np.arange(5))
    cache.step(0, np.arange(10))
    with pytest.raises(UsageError, match="5 rows came with 4 frames"):
        cache.policy.ended(0, first, np.arange(4, dtype=np.int32))
    assert len(cache.victims(20)) == 10
    assert cache.policy.add_table(30) == 1
    cache.frame_of.append(np.full(30, NONE, np.int32))
    cache.end(first)
    cache.announce(0, np.arange(5))
    assert sorted(cache.victims(5).tolist()) == sorted(cache.frame_of[0][5:].tolist())


def test_rows_and_frames_must_be_as_many() -> None:
    policy = Policy(4)
    policy.add_table(8)
    rows, frames = np.arange(3), np.zeros(2, np.int32)
    calls: list[Callable[[], None]] = [
        lambda: policy.known(0, 0, rows, frames),
        lambda: policy.filled(0, rows, frames),
        lambda: policy.touched(0, rows, frames),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="3 rows came with 2 frames"):
            call()
    policy.known(0, 0, rows, np.full(3, NONE))
    with pytest.raises(UsageError, match="3 rows came with 2 frames"):
        policy.ended(0, 0, frames)
    policy.ended(0, 0, np.full(3, NONE))
    with pytest.raises(UsageError, match="batch 0 is not known"):
        policy.ended(0, 0, np.full(3, NONE))


def test_cold_dirty_frames_are_told_by_whether_they_should_go_before_clean_ones() -> None:
    cache = Cache(12, 50)
    for first in (0, 4, 8):
        cache.step(0, np.arange(first, first + 4))
    cache.announce(0, np.arange(6))
    cache.announce(0, np.arange(6, 12))
    flags, pins, tables = cache.flags, cache.pins, np.zeros(12, np.int16)
    soon, late = cache.frame_of[0][:6], cache.frame_of[0][6:12]
    flags[soon] |= DIRTY
    worst = cache.policy.worst_victim(3, flags, pins)  # clean, and due late
    assert worst == cache.policy.worst_victim(6, flags, pins)
    assert cache.policy.worst_victim(7, flags, pins) == NOBODY
    assert cache.policy.cold_dirty(3, flags, pins, tables, 0, below=worst).tolist() == []
    assert cache.policy.cold_dirty(3, flags, pins, tables, 0).tolist() == soon[:3].tolist()
    flags[soon] ^= DIRTY
    flags[late] |= DIRTY
    worst = cache.policy.worst_victim(1, flags, pins)
    assert cache.policy.cold_dirty(6, flags, pins, tables, 0, below=worst).tolist() == late.tolist()
    assert cache.policy.cold_dirty(7, flags, pins, tables, 0, below=worst).tolist() == []  # there are six
    assert cache.policy.cold_dirty(3, flags, pins, tables, 1, below=worst).tolist() == []
    assert set(cache.victims(2).tolist()) <= set(soon.tolist())


def test_looking_at_the_worst_victim_moves_no_hand() -> None:
    policy = Policy(40_000)
    policy.add_table(80_000)
    rows = np.arange(40_000)
    policy.filled(0, rows, rows.astype(np.int32))
    flags, pins = np.zeros(40_000, np.uint8), np.zeros(40_000, np.int32)
    first = Policy(40_000)
    first.add_table(80_000)
    first.filled(0, rows, rows.astype(np.int32))
    assert policy.worst_victim(100, flags, pins) == 0
    assert policy.worst_victim(0, flags, pins) == -1
    flags[:200] = DIRTY
    tables = np.zeros(40_000, np.int16)
    assert len(policy.cold_dirty(200, flags, pins, tables, 0, below=0)) == 0  # no better to give up than a clean one
    assert len(policy.cold_dirty(200, flags, pins, tables, 0, below=1)) == 200
    flags[:200] = 0
    assert policy.victims(100, flags, pins).tolist() == first.victims(100, flags, pins).tolist()
