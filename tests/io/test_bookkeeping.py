"""The bookkeeping by itself: moves in any order against a simulated disk, and single decisions by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from bookkeeping_walk import Walk, expect
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dsa.io import policy_news
from dsa.io.bookkeeping import MOST_HOOK_ANNOUNCEMENTS
from dsa.io.window import Kind

ROWS = (9, 5, 4)
some_rows = st.fixed_dictionaries(
    {}, optional={table: st.lists(st.integers(0, n - 1), min_size=1, max_size=6) for table, n in enumerate(ROWS)}
)
which = st.integers(0, 30)


class Moves(RuleBasedStateMachine):
    """Each rule is a move of the training thread, of the loop, or of the device; `Walk.check` runs after each."""

    world: Walk

    @initialize(
        eager=st.booleans(),
        held=st.sampled_from([None, 0, 1, 3]),
        share=st.sampled_from([None, 0.0, 0.25, 1.0]),
        frames=st.sampled_from([(6, 3), (2, 1), (14, 4), (40, 40)]),
    )
    def make(self, eager: bool, held: int | None, share: float | None, frames: tuple[int, int]) -> None:
        self.world = Walk(ROWS, frames, held_batches=held, dirty_share=share)
        if eager:
            self.world.clean_eagerly()

    @rule(kind=st.sampled_from([Kind.ANNOUNCED, Kind.AHEAD, Kind.HOOK]), rows=some_rows)
    def announce(self, kind: Kind, rows: dict[int, list[int]]) -> None:
        self.world.announce(kind, rows)

    @precondition(lambda self: self.world.tickets)
    @rule(n=which)
    def hand_out(self, n: int) -> None:
        self.world.hand_out(self.world.tickets[n % len(self.world.tickets)])

    @precondition(lambda self: self.world.tickets)
    @rule(n=which)
    def end(self, n: int) -> None:
        self.world.end(self.world.tickets[n % len(self.world.tickets)])

    @precondition(lambda self: self.world.books.step is None and not self.world.books.draining)
    @rule(rows=some_rows, lasting=st.booleans())
    def begin(self, rows: dict[int, list[int]], lasting: bool) -> None:
        self.world.begin(rows, lasting=lasting)

    @precondition(lambda self: self.world.books.step is not None)
    @rule(moves=st.integers(1, 6))
    def work(self, moves: int) -> None:
        for _ in range(moves):
            self.world.work()

    @precondition(lambda self: self.world.books.step is not None)
    @rule()
    def interrupt(self) -> None:
        self.world.interrupt()

    @rule()
    def next_fill(self) -> None:
        self.world.next_fill()

    @precondition(lambda self: self.world.fills)
    @rule(n=which)
    def fill_ends(self, n: int) -> None:
        self.world.fill_ends(n)

    @rule()
    def next_write(self) -> None:
        self.world.next_write()

    @precondition(lambda self: self.world.writes)
    @rule(n=which, moves=st.integers(1, 3))
    def write_moves(self, n: int, moves: int) -> None:
        for _ in range(moves):
            self.world.write_moves(n)

    @rule(table=st.integers(0, len(ROWS) - 1))
    def next_clean(self, table: int) -> None:
        self.world.next_clean(table)

    @precondition(lambda self: self.world.cleanings)
    @rule(n=which, moves=st.integers(1, 3))
    def clean_moves(self, n: int, moves: int) -> None:
        for _ in range(moves):
            self.world.clean_moves(n)

    @rule(most=st.integers(0, 2))
    def keep_generation(self, most: int) -> None:
        self.world.keep_generation(most)

    @precondition(lambda self: self.world.books.step is None)
    @rule(draining=st.booleans())
    def drain(self, draining: bool) -> None:
        self.world.books.draining = draining

    def teardown(self) -> None:
        """Whatever came before: let go on, and everything comes to rest, written and unpinned."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.books.draining = False
        world.settle()
        for batch in list(world.window.in_order()):
            world.end(batch.sequence)
        world.books.draining = True
        world.settle()
        expect(world.books.dirty_frames() == 0, "frames are dirty after a drain")
        expect(not any(arena.pinned for arena in world.books.arenas), "pinned frames are left")


TestMoves = Moves.TestCase
TestMoves.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def run_step(world: Walk, rows: list[int]) -> None:
    world.begin({0: rows})
    world.settle()


def update(world: Walk, rows_by_table: dict[int, Iterable[int]]) -> None:
    """A step; nothing else moves."""
    world.begin({table: list(rows) for table, rows in rows_by_table.items()})
    while world.books.step is not None:
        world.work()


def pinned(world: Walk) -> int:
    return world.books.arenas[0].pinned


def write_all(world: Walk) -> None:
    """What a checkpoint does with dirty frames."""
    world.books.draining = True
    world.settle()
    world.books.draining = False
    assert world.books.dirty_frames() == 0


def fill_all(world: Walk) -> list[Any]:
    jobs = []
    while world.next_fill():
        jobs.append(world.fills[-1])
        world.fill_ends(0)
    return jobs


def test_rows_never_written_come_in_one_job_without_a_read() -> None:
    world = Walk((9,), (8, 1), rows_per_fill=2)
    run_step(world, [1, 3])
    world.books.draining = True
    world.settle()
    world.books.draining = False
    run_step(world, [0, 2, 4, 5, 6, 7, 8])  # evicts some of the rows that were written
    world.books.draining = True
    world.settle()
    world.announce(Kind.ANNOUNCED, {0: [1, 3]})
    jobs = fill_all(world)
    assert [job.new for job in jobs] == [False] * len(jobs)

    fresh = Walk((9,), (8, 1), rows_per_fill=2)
    fresh.announce(Kind.ANNOUNCED, {0: [0, 1, 2, 3, 4]})
    jobs = fill_all(fresh)
    assert [job.new for job in jobs] == [True]
    assert len(jobs[0].rows) == 5


def test_reads_are_split_into_chunks_in_the_order_of_slots() -> None:
    world = Walk((20,), (6, 1), rows_per_fill=2)
    run_step(world, [5, 1, 3, 0, 2])
    world.books.draining = True
    world.settle()
    world.books.draining = False
    run_step(world, [10, 11, 12, 13, 14, 15])
    world.books.draining = True
    world.settle()
    world.announce(Kind.ANNOUNCED, {0: [0, 1, 2, 3, 5]})
    jobs = fill_all(world)
    slots = np.concatenate([job.slots for job in jobs])
    assert [len(job.rows) for job in jobs] == [2, 2, 1]
    assert (np.diff(slots) > 0).all()


def test_the_youngest_held_batch_gives_its_frames_to_a_step() -> None:
    world = Walk((12,), (6, 1), held_batches=2)
    old = world.announce(Kind.AHEAD, {0: [0, 1]})
    young = world.announce(Kind.AHEAD, {0: [2, 3]})
    fill_all(world)
    world.begin({0: [6, 7, 8, 9]})
    assert world.books.bring()
    batches = {ticket: world.window.get(ticket) for ticket in (old, young)}
    assert {ticket: batch is not None and batch.held for ticket, batch in batches.items()} == {old: True, young: False}


def test_a_step_pins_what_its_announcement_held_and_lets_the_rest_go() -> None:
    world = Walk((12,), (6, 1))
    world.announce(Kind.ANNOUNCED, {0: [0, 1, 2, 3]})
    fill_all(world)
    assert pinned(world) == 4
    world.begin({0: [0, 1]})
    assert pinned(world) == 2
    assert not world.fills
    assert not world.next_fill()
    world.settle()
    assert pinned(world) == 0


def test_a_read_uses_no_announcement_up_and_makes_nothing_dirty() -> None:
    world = Walk((12,), (6, 1))
    ticket = world.announce(Kind.ANNOUNCED, {0: [0, 1]})
    fill_all(world)
    world.begin({0: [0, 5]}, lasting=False)
    world.settle()
    assert world.window.get(ticket) is not None
    assert world.books.dirty_frames() == 0
    assert world.books.tally.steps == 0


def test_how_far_ahead_batches_are_held() -> None:
    def held(held_batches: int | None, n_frames: int) -> list[bool]:
        world = Walk((20,), (n_frames, 1), held_batches=held_batches, known_batches=9, known_rows=99)
        tickets = [world.announce(Kind.AHEAD, {0: [3 * i, 3 * i + 1, 3 * i + 2]}) for i in range(5)]
        fill_all(world)
        batches = [world.window.get(ticket) for ticket in tickets]
        return [batch is not None and batch.complete for batch in batches]

    assert held(0, 16) == [False] * 5
    assert held(2, 16) == [True, True, False, False, False]
    assert held(None, 16) == [True, True, False, False, False]  # two of them are less than half the frames
    assert held(None, 4) == [True, False, False, False, False]  # one is always held, if it fits


def test_a_batch_whose_rows_are_all_there_is_held_where_frames_can_be_given_up() -> None:
    for n_rows, held in ((12, 2), (6, 0)):
        world = Walk((n_rows,), (6, 1))
        run_step(world, [1, 2])
        world.announce(Kind.ANNOUNCED, {0: [1, 2]})
        world.next_fill()
        assert pinned(world) == held


def test_a_step_on_the_rows_of_its_announcement_has_its_pins() -> None:
    world = Walk((20, 9), (16, 1))
    ticket = world.announce(Kind.AHEAD, {0: [0, 1, 2], 1: [4]})
    later = world.announce(Kind.AHEAD, {0: [1, 5]})
    fill_all(world)
    world.hand_out(ticket)
    arena = world.books.arenas[0]
    assert arena.pins[arena.frame_of[0][[0, 1, 2, 5]]].tolist() == [1, 2, 1, 1]
    held = next(world.window.in_order()).pieces[0].frames
    world.begin({0: [0, 1, 2], 1: [4]})
    step = world.books.step
    assert step is not None
    assert step.batch.pieces[0].frames is held
    assert arena.pins[arena.frame_of[0][[0, 1, 2, 5]]].tolist() == [1, 2, 1, 1]
    world.settle()
    assert arena.pins[arena.frame_of[0][[0, 1, 2, 5]]].tolist() == [0, 1, 0, 1]
    assert world.books.tally.rows_announced == 4
    world.end(later)
    assert pinned(world) == 0


def test_pins_of_an_announcement_with_other_rows_are_let_go() -> None:
    world = Walk((20, 9), (16, 1))
    world.announce(Kind.ANNOUNCED, {0: [0, 1, 2]})
    fill_all(world)
    world.begin({0: [0, 1]})
    arena = world.books.arenas[0]
    assert arena.pins[arena.frame_of[0][[0, 1, 2]]].tolist() == [1, 1, 0]
    world.settle()
    assert pinned(world) == 0
    assert world.books.tally.rows_announced == 2


def test_pins_are_taken_over_in_the_order_of_the_pieces_only() -> None:
    # Rule 9: what a later piece needs is not pinned while an earlier one still waits for frames.
    world = Walk((20, 9, 4), (6, 1))
    world.announce(Kind.ANNOUNCED, {1: [4, 5]})
    fill_all(world)
    assert pinned(world) == 2
    world.begin({0: [0, 1, 2, 3, 4, 5], 1: [4, 5]})
    step = world.books.step
    assert step is not None
    first, second = step.batch.pieces
    assert (first.unframed > 0, second.held) == (True, False)
    world.settle()
    assert pinned(world) == 0


def test_a_batch_that_was_handed_out_is_held_whatever_the_reach() -> None:
    world = Walk((20,), (16, 1), held_batches=0)
    ticket = world.announce(Kind.AHEAD, {0: [0, 1]})
    fill_all(world)
    assert pinned(world) == 0
    world.hand_out(ticket)
    fill_all(world)
    assert pinned(world) == 2


def test_dirty_frames_are_written_from_the_share_on_and_never_below() -> None:
    world = Walk((12,), (8, 1), dirty_share=0.5)
    for rows in ([0, 1], [2, 3]):
        world.begin({0: rows})
        while world.books.step is not None:
            world.work()
        assert not world.next_write()
    world.begin({0: [4]})
    while world.books.step is not None:
        world.work()
    assert world.next_write()


def test_without_a_share_only_what_a_batch_may_need_is_written_and_only_in_whole_segments() -> None:
    world = Walk((40,), (16, 1), dirty_share=None, held_batches=0)
    arena = world.books.arenas[0]
    for first in (0, 4):
        update(world, {0: range(first, first + 4)})
    assert int(arena.idle_dirty[0]) == 8
    assert not world.next_write()  # eight frames were never used, and a batch brings four
    assert not arena.wants_writing(0, 3)
    update(world, {0: range(8, 12)})
    update(world, {0: range(12, 15)})
    assert arena.wants_writing(0, 3)  # a batch brings three, one was never used
    assert world.next_write()  # one segment of three: with it there are enough
    assert not arena.wants_writing(0, 3)
    assert not world.next_write()


def test_what_an_announced_batch_brought_in_tells_of_the_next_and_the_step_itself_nothing() -> None:
    world = Walk((60,), (26, 1), dirty_share=None)
    world.announce(Kind.ANNOUNCED, {0: list(range(12))})
    fill_all(world)
    update(world, {0: range(12)})
    assert not world.next_write()  # a batch brings twelve in, fourteen are free
    update(world, {0: range(12, 16)})  # nine are remembered
    assert not world.next_write()
    update(world, {0: range(16, 20)})  # seven
    assert world.next_write()


def test_after_a_checkpoint_rows_that_were_updated_and_go_first_are_written_although_others_are_clean() -> None:
    world = Walk((200,), (60, 1), dirty_share=None)
    for first in range(0, 60, 10):
        update(world, {0: range(first, first + 10)})
    write_all(world)
    for _ in range(4):
        update(world, {0: range(54)})  # of use, and due again
    world.announce(Kind.ANNOUNCED, {0: list(range(54))})
    world.announce(Kind.ANNOUNCED, {0: list(range(54))})
    write_all(world)
    update(world, {0: range(100, 106)})  # uses up one of them; six clean frames go
    assert world.books.dirty_frames() == 6
    assert world.next_write()  # of those six, before more of the fifty-four go
    assert set(world.writes[0].job.rows.tolist()) <= set(range(100, 106))


def in_a_tight_cache(dirty_share: float | None = None) -> Walk:
    """Twelve frames: six clean, of rows that every step touches, and six dirty, of rows that one step touched."""
    size = {"rows_per_fill": 99, "known_batches": 20, "known_rows": 300}
    world = Walk((60,), (12, 1), dirty_share=dirty_share, held_batches=1, **size)
    for _ in range(3):
        update(world, {0: range(6)})
    write_all(world)
    update(world, {0: range(20, 26)})
    return world


def test_a_batch_ahead_waits_for_the_writes_it_has_ordered_and_takes_those_frames() -> None:
    world = in_a_tight_cache()
    world.announce(Kind.AHEAD, {0: list(range(30, 36))})
    assert not world.next_fill()
    assert world.books.frames_wanted == 0
    assert world.books.writes_wanted
    assert world.next_write()
    assert world.next_write()
    assert not world.books.writes_wanted
    assert not world.next_write()
    for write in list(world.writes):
        assert not world.next_fill()
        assert not world.books.bring_roused()  # not before the last of them has ended
        assert set(write.job.rows.tolist()) <= set(range(20, 26))
        while write in world.writes:
            world.write_moves(0)
    assert world.next_fill()
    assert set(world.books.arenas[0].row_of.tolist()) == {*range(6), *range(30, 36)}


def test_a_batch_whose_turn_comes_waits_for_nothing_that_it_ordered() -> None:
    world = in_a_tight_cache()
    ticket = world.announce(Kind.AHEAD, {0: list(range(30, 36))})
    assert not world.next_fill()
    world.hand_out(ticket)  # with that the walk sees to it that somebody is told
    world.next_fill()
    assert len(world.fills) == 1
    assert len(world.fills[0].rows) == 6
    world.settle()
    run_step(world, list(range(30, 36)))


def test_a_batch_orders_once_and_then_takes_what_there_is() -> None:
    world = in_a_tight_cache()
    world.announce(Kind.AHEAD, {0: list(range(30, 36))})
    assert not world.next_fill()
    assert world.next_write()
    update(world, {0: range(20, 26)})  # in use again: what is being written is dirty all the same, the rest not ordered
    assert not world.next_fill()
    while world.writes:
        world.write_moves(0)
    assert world.books.dirty_frames() == 6
    world.next_write()  # finds that what was ordered has been touched
    while world.writes:
        world.write_moves(0)
    assert world.next_fill()


def test_nothing_is_ordered_where_a_share_says_what_is_written() -> None:
    world = in_a_tight_cache(dirty_share=1.0)
    world.announce(Kind.AHEAD, {0: list(range(30, 36))})
    assert world.next_fill()
    assert not world.next_write()


def test_without_announcements_frames_are_kept_ready_again() -> None:
    world = in_a_tight_cache()
    ticket = world.announce(Kind.AHEAD, {0: list(range(30, 36))})
    assert not world.next_fill()
    world.end(ticket)
    assert world.books.writes_wanted
    update(world, {0: range(40, 46)})  # takes the six clean ones
    assert not world.books.writes_wanted  # what was ordered is no order any more
    assert world.books.dirty_frames() == 12
    assert world.next_write()


def test_without_a_share_nothing_is_written_where_every_row_has_a_frame() -> None:
    world = Walk((12,), (12, 1), dirty_share=None)
    for _ in range(3):
        update(world, {0: range(12)})
    assert world.books.dirty_frames() == 12
    assert not world.next_write()
    assert world.books.next_write(None, idle=True) is not None  # but while the disk has nothing to do


def test_less_than_a_segment_is_written_for_who_waits_and_no_more_than_is_wanted() -> None:
    world = Walk((12,), (4, 1), dirty_share=None)
    update(world, {0: [0, 1]})
    world.begin({0: [4, 5, 6]})
    assert not world.books.bring()
    assert world.books.frames_wanted == 1
    assert world.next_write()
    assert len(world.writes[0].job.frames) == 2
    assert not world.next_write()


def test_who_waits_for_one_frame_has_one_segment_written_for_it_and_not_all() -> None:
    world = Walk((20,), (8, 1), dirty_share=1.0)
    update(world, {0: range(6)})
    world.begin({0: [6, 7, 8]})
    assert not world.books.bring()
    assert world.books.frames_wanted == 1
    assert world.next_write()
    assert not world.next_write()


def test_the_table_with_the_most_idle_dirty_frames_is_written_first() -> None:
    world = Walk((12, 6, 4), (12, 1), dirty_share=0.0)
    update(world, {0: range(4), 1: range(2)})
    for expected in (0, 1, 0):
        assert world.next_write()
        assert world.writes[-1].job.table.number == expected


def test_a_segment_of_void_records_is_free_again() -> None:
    world = Walk((6,), (6, 1), dirty_share=0.0)
    run_step(world, [0, 1])
    world.begin({0: [0, 1]})
    while world.books.step is not None:
        world.work()
    assert world.next_write()
    world.write_moves(0)
    world.begin({0: [0, 1]})
    assert world.work()  # leases both rows while their copy is under way
    world.write_moves(0)
    world.write_moves(0)
    segments = world.books.tables[0].segments
    assert segments.free_segments == len(segments) - np.count_nonzero(segments.live)
    world.settle()
    assert world.truth[0][:2] == [3, 3]


def test_only_so_many_forward_passes_without_a_step_are_remembered() -> None:
    world = Walk((6,), (6, 1), known_batches=1000, known_rows=10_000)
    for i in range(MOST_HOOK_ANNOUNCEMENTS + 20):
        world.books.announce(Kind.HOOK, {0: np.array([i % 6], np.int64)})
    world.check()
    assert len(world.window) == MOST_HOOK_ANNOUNCEMENTS


def test_announced_share_counts_rows_once_and_judges_only_what_was_remembered() -> None:
    world = Walk((12,), (8, 1), known_batches=1)
    world.announce(Kind.ANNOUNCED, {0: [0, 1, 2]})
    world.announce(Kind.HOOK, {0: [2, 3]})
    world.announce(Kind.ANNOUNCED, {0: [6, 7]})  # forgotten, but keeps its place
    run_step(world, [0, 1, 2, 3, 4])
    tally = world.books.tally
    assert (tally.rows_touched, tally.rows_announced, tally.judged_rows, tally.judged_announced) == (5, 4, 5, 4)
    run_step(world, [6, 7])
    assert (tally.rows_touched, tally.rows_announced, tally.judged_rows, tally.judged_announced) == (7, 4, 5, 4)
    assert world.window.forgotten_batches == 1
    assert len(world.window) == 0


def test_hits_and_misses_are_counted_for_announced_and_other_rows() -> None:
    world = Walk((12,), (8, 1))
    world.announce(Kind.ANNOUNCED, {0: [0, 1, 2]})
    fill_all(world)
    run_step(world, [0, 1, 2, 3])
    assert world.books.tally.misses == 4
    run_step(world, [0, 1, 2, 3])
    assert world.books.tally.misses == 4


def test_frozen_books_begin_nothing() -> None:
    world = Walk((12,), (8, 1), dirty_share=0.0)
    run_step(world, [0])
    world.begin({0: [0, 1]})
    while world.books.step is not None:
        world.work()
    world.announce(Kind.ANNOUNCED, {0: [4]})
    world.books.frozen = True
    assert not world.next_fill()
    assert not world.next_write()
    world.books.frozen = False
    assert world.next_fill()
    assert world.next_write()


def test_an_announcement_between_standing_still_and_the_reset_does_no_harm() -> None:
    world = Walk((12,), (8, 1))
    world.books.frozen = True
    world.books.forget_window()
    world.announce(Kind.ANNOUNCED, {0: [4, 5]})  # by another thread: nothing keeps it out
    world.books.reset()
    world.books.frozen = False
    run_step(world, [4, 5])
    assert pinned(world) == 0


def test_forgetting_the_window_unpins_everything_and_lets_reads_end() -> None:
    world = Walk((12,), (8, 1))
    world.announce(Kind.ANNOUNCED, {0: [4, 5]})
    world.announce(Kind.AHEAD, {0: [5, 6]})
    world.next_fill()
    world.books.forget_window()
    world.check()
    assert (len(world.window), pinned(world), world.window.known_rows) == (0, 0, 0)
    assert not world.books.quiet()
    world.settle()
    assert world.books.quiet()


def test_without_a_step_there_is_nothing_to_bring() -> None:
    world = Walk((4,), (4, 1))
    with pytest.raises(RuntimeError, match="begin"):
        world.books.bring()


def test_what_the_policy_is_told_late_is_told_before_it_is_asked_and_never_piles_up() -> None:
    world = Walk((200,), (20, 1), dirty_share=None, held_batches=0)
    update(world, {0: range(20)})
    write_all(world)
    for first in range(0, 8, 2):
        world.announce(Kind.ANNOUNCED, {0: [first, first + 1]})
    world.begin({0: range(100, 112)})  # uses up the first of them; the rows of the others stay
    while world.books.step is not None:
        world.work()
    frame_of = world.books.arenas[0].frame_of[0]
    assert (frame_of[2:8] >= 0).all()
    assert (frame_of[8:20] < 0).sum() + (frame_of[:2] < 0).sum() == 12
    for _ in range(100):
        world.announce(Kind.HOOK, {0: [1]})
    assert len(world.books._news) <= 65


def test_news_of_steps_that_nobody_announces_and_that_miss_nothing_do_not_pile_up() -> None:
    world = Walk((200,), (20, 1), dirty_share=None)
    for _ in range(100):
        update(world, {0: range(5)})
    assert len(world.books._news) <= 65


def test_where_every_row_has_a_frame_there_are_no_news() -> None:
    world = Walk((9,), (10, 1), dirty_share=None)
    world.announce(Kind.ANNOUNCED, {0: [1, 2]})
    update(world, {0: [1, 2]})
    assert len(world.books._news) == 0


def test_news_of_large_steps_do_not_pile_up_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_news, "_MOST_ROWS", 12)
    world = Walk((200,), (20, 1), dirty_share=None)
    for _ in range(10):
        update(world, {0: range(5)})
        assert len(world.books._news) <= 3


def test_a_state_can_be_loaded_although_an_interrupt_left_a_policy_half_told() -> None:
    world = Walk((40,), (10, 1), dirty_share=None)
    update(world, {0: range(10)})
    world.announce(Kind.ANNOUNCED, {0: [1, 2]})
    world.books._news._untold.popleft()  # taken up, and the interrupt came
    write_all(world)
    world.books.forget_window()
    world.books.reset()
    for first in range(0, 40, 5):
        world.announce(Kind.ANNOUNCED, {0: list(range(first, first + 5))})
        fill_all(world)
        update(world, {0: range(first, first + 5)})
        write_all(world)
    assert len(world.books.window) == 0
