"""Pins and leases of staged batches: kept while they must be, and not longer."""

from __future__ import annotations

import numpy as np
import pytest

from dsa.io.bookkeeping import Bookkeeping
from dsa.io.cache import Arena
from dsa.io.eviction import DIRTY, LEASED
from dsa.io.jobs import Table
from dsa.io.layout import RecordLayout, segment_layout
from dsa.io.memory import allocate
from dsa.io.segments import Segments
from dsa.io.staged import StagedBatches, StageJob
from dsa.io.window import Kind, Window

N_ROWS, N_FRAMES = 16, 8
ALL = frozenset((0,))


def rows(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


class World:
    """One table whose rows were never written; `fill` brings what is held into frames."""

    def __init__(self) -> None:
        record = RecordLayout(2, "float32")
        self.arena = Arena(allocate((N_FRAMES, record.record_bytes), np.uint8))
        segments = Segments(
            segment_layout(record.record_bytes, N_ROWS, 8192),
            np.full(N_ROWS, -1, np.int32),
            np.zeros(N_ROWS, np.uint32),
        )
        self.frame_of = np.full(N_ROWS, -1, np.int32)
        self.books = Bookkeeping(Window(8, 1000))
        table = Table(0, "t", N_ROWS, record, self.arena, self.arena.add_table(self.frame_of), segments)
        self.books.tables, self.books.arenas = [table], [self.arena]
        self.staged = StagedBatches(self.books)

    def announce(self, *numbers: int, kind: Kind = Kind.ANNOUNCED) -> None:
        self.books.announce(kind, {0: rows(*numbers)})
        self.fill()

    def fill(self) -> None:
        while (job := self.books.next_fill()) is not None:
            self.books.filled(job)

    def stage(self) -> StageJob:
        job = self.staged.next(ALL, 1 << 20)
        assert job is not None
        self.staged.gathered(job)
        return job

    def pins(self, *numbers: int) -> list[int]:
        return self.arena.pins[self.frame_of[rows(*numbers)]].tolist()

    def leased(self, *numbers: int) -> list[bool]:
        return ((self.arena.flags[self.frame_of[rows(*numbers)]] & LEASED) > 0).tolist()


@pytest.fixture
def world() -> World:
    return World()


def test_batches_are_staged_in_window_order_once_their_rows_are_there(world: World) -> None:
    world.books.announce(Kind.ANNOUNCED, {0: rows(0, 1)})
    assert world.staged.next(ALL, 1 << 20) is None  # not in frames yet
    world.fill()
    world.announce(1, 2)
    first, second = world.stage(), world.stage()
    assert [piece.rows.tolist() for job in (first, second) for piece in job.pieces] == [[0, 1], [1, 2]]
    assert world.staged.next(ALL, 1 << 20) is None
    assert world.pins(0, 1, 2) == [2, 4, 2]


def test_what_is_not_staged(world: World) -> None:
    world.announce(3, kind=Kind.HOOK)
    assert world.staged.next(ALL, 1 << 20) is None
    world.announce(0, 1)
    assert world.staged.next(frozenset((1,)), 1 << 20) is None
    assert world.staged.next(ALL, 16) is None  # one record's bytes
    world.books.frozen = True
    assert world.staged.next(ALL, 1 << 20) is None
    world.books.frozen = False
    world.books.begin({0: rows(5)}, lasting=False)
    assert world.staged.next(ALL, 1 << 20) is None
    world.books.end_step()
    assert world.staged.next(ALL, 1 << 20) is not None


def test_leases_outlast_the_step_and_a_row_of_two_steps_stays_leased_for_the_later(world: World) -> None:
    world.announce(0, 1, 2)
    world.announce(1, 2, 3)
    jobs = [world.stage(), world.stage()]
    leases = []
    for job, touched in zip(jobs, ((0, 1), (1, 3)), strict=True):
        step = world.books.begin({0: rows(*touched)}, lasting=True)
        leases.append(world.staged.take(job, step))
        assert step.batch.pieces[0].remaining == 0
        assert step.leased
        world.books.end_step()
    assert world.pins(0, 1, 2, 3) == [1, 2, 0, 1]
    assert world.leased(0, 1, 2, 3) == [True, True, False, True]
    world.staged.back(leases[0])
    assert world.pins(0, 1, 3) == [0, 1, 1]
    assert world.leased(0, 1, 3) == [False, True, True]
    assert world.arena.collect(0, 9, unpinned_only=False).tolist() == [world.frame_of[0]]
    world.staged.back(leases[1])
    assert world.arena.pinned == 0
    assert not any(world.leased(0, 1, 3))
    assert np.count_nonzero(world.arena.flags & DIRTY) == 3


def test_rows_that_a_step_leased_itself_are_kept_until_they_are_back(world: World) -> None:
    step = world.books.begin({0: rows(4, 6)}, lasting=True)
    world.books.bring()
    job = world.books.next_new()
    assert job is not None
    world.books.filled(job)
    piece = step.batch.pieces[0]
    positions = world.books.ready(piece)
    assert positions is not None
    world.books.lease(piece, positions)
    lease = world.staged.keep(piece, positions)
    world.books.end_step()
    assert world.pins(4, 6) == [1, 1]
    assert world.leased(4, 6) == [True, True]
    world.staged.back([lease])
    assert world.arena.pinned == 0
    assert world.leased(4, 6) == [False, False]


def test_frames_of_a_batch_that_is_given_up_go_when_nobody_reads_them(world: World) -> None:
    world.announce(0, 1)
    job = world.staged.next(ALL, 1 << 20)
    assert job is not None
    assert not world.staged.give_back()  # they are being gathered
    assert job.unwanted
    assert world.pins(0, 1) == [2, 2]
    world.staged.gathered(job)
    assert world.pins(0, 1) == [1, 1]
    assert not world.staged.give_back()
    again = world.stage()
    assert world.staged.give_back()
    assert again.unwanted
    assert world.pins(0, 1) == [1, 1]


def test_a_step_without_frames_takes_them_from_staged_batches(world: World) -> None:
    world.books.give_back = world.staged.give_back
    world.announce(0, 1, 2, 3)
    world.stage()
    step = world.books.begin({0: rows(8, 9, 10, 11, 12, 13)}, lasting=True)
    # The announcement was used up by this step, whose rows are others; what is staged for it holds its frames.
    assert world.books.bring()
    assert step.batch.complete
    assert world.staged.jobs == []


def test_a_batch_that_ended_is_outlived_but_not_while_a_step_uses_it(world: World) -> None:
    world.announce(0, 1)
    job = world.stage()
    assert not world.staged.outlived(job)
    world.books.begin({0: rows(0)}, lasting=True)
    assert not world.staged.outlived(job)
    world.books.end_step()
    assert world.staged.outlived(job)


def test_the_oftener_the_device_has_no_memory_the_more_batches_are_passed_over_until_one_is_taken(world: World) -> None:
    def next_batch() -> StageJob | None:
        for batch in list(world.books.window.in_order()):
            world.books.end(batch)
        world.announce(1, 2)
        return world.staged.next(ALL, 1 << 20)

    def passed_over(job: StageJob | None) -> tuple[int, StageJob]:
        """Refuse a job: how many batches are not staged after it, and the job of the first that is."""
        assert job is not None
        world.staged.refuse(job)
        assert world.staged.jobs == []
        assert world.pins(1, 2) == [1, 1]  # of the batch ahead
        for count in range(200):
            job = next_batch()
            if job is not None:
                return count, job
        raise AssertionError("no batch is staged any more")

    found, job = [], next_batch()
    for _ in range(10):
        count, job = passed_over(job)
        found.append(count)
    assert found == [0, 1, 3, 7, 15, 31, 63, 63, 63, 63]
    world.staged.gathered(job)
    leases = world.staged.take(job, world.books.begin({0: rows(1, 2)}, lasting=True))
    world.books.end_step()
    world.staged.back(leases)
    assert passed_over(next_batch())[0] == 0
