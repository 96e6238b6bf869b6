"""The arena of frames: pins, flags, versions and who may be given up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsa.io.cache import NO_FRAME, RECENT, Arena
from dsa.io.eviction import DIRTY, FILLING, FREE, LEASED, WRITING


def array(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def frames_for(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.full(len(rows), NO_FRAME, np.int32)


@pytest.fixture
def arena() -> Arena:
    made = Arena(np.zeros((4, 16), np.uint8))
    for n_rows in (10, 6):
        made.add_table(np.full(n_rows, NO_FRAME, np.int32))
    return made


def bring(arena: Arena, table: int, *rows: int) -> np.ndarray[Any, Any]:
    """Pin the rows, whatever that takes; their frames, filled."""
    wanted = array(*rows)
    frames = frames_for(wanted)
    missing = arena.pin_resident(table, wanted, frames)
    taken = arena.take(table, wanted, frames, missing)
    assert len(taken) == missing
    arena.filled(frames[taken])
    return frames


def make_dirty(arena: Arena, table: int, *rows: int) -> np.ndarray[Any, Any]:
    frames = bring(arena, table, *rows)
    arena.lease(table, frames)
    arena.policy.touched(table, array(*rows), frames)
    arena.end_lease(frames)
    arena.unpin(frames)
    return frames


def test_new_rows_take_fresh_frames_pinned_and_filling(arena: Arena) -> None:
    rows = array(1, 5, 9)
    frames = frames_for(rows)
    assert arena.pin_resident(0, rows, frames) == 3
    assert arena.take(0, rows, frames, 3).tolist() == [0, 1, 2]
    assert sorted(frames.tolist()) == [0, 1, 2]
    assert arena.frame_of[0][rows].tolist() == frames.tolist()
    assert arena.row_of[frames].tolist() == rows.tolist()
    assert (arena.flags[frames] == FILLING).all()
    assert arena.flags[3] == FREE
    assert (arena.pins[frames] == 1).all()
    assert arena.pinned == 3
    assert arena.filling(frames)
    arena.filled(frames)
    assert not arena.filling(frames)
    assert not (arena.flags & FILLING).any()


def test_frames_wait_for_their_bytes_each_until_its_own_have_come(arena: Arena) -> None:
    first, second = frames_for(array(1, 5)), frames_for(array(2))
    arena.take(0, array(1, 5), first, 2)
    arena.take(0, array(2), second, 1)
    arena.filled(first[:1])
    arena.filled(first[:1])  # said twice: whoever was interrupted says it again
    assert arena.filling(first)
    assert arena.filling(second)
    arena.filled(second)
    assert not arena.filling(second)
    assert arena.filling(first)
    arena.filled(first[1:])
    assert not arena.filling(first)
    arena.unpin(first)
    arena.unpin(second)
    arena.take(0, array(3), frames_for(array(3)), 1)
    arena.reset()
    rows = frames_for(array(3))
    arena.take(0, array(3), rows, 1)
    arena.filled(rows)
    assert not arena.filling(rows)
    arena.take(0, array(4), again := frames_for(array(4)), 1)
    assert arena.filling(again)


def test_passes_that_ask_ahead_find_the_same_however_many_frames_there_are() -> None:
    """The last rows of a pass have none ahead of them, and a row without a frame has no books to ask for."""
    random = np.random.default_rng(4)
    for n_rows in (1, 2, 31, 32, 33, 63, 64, 65, 66, 300):
        made = Arena(np.zeros((n_rows + 7, 16), np.uint8))
        made.add_table(np.full(400, NO_FRAME, np.int32))
        rows = np.sort(random.choice(400, n_rows, replace=False))
        some = rows[random.random(n_rows) < 0.7]
        bring(made, 0, *some.tolist())
        frames = frames_for(rows)
        assert made.pin_resident(0, rows, frames) == n_rows - len(some)
        there = np.isin(rows, some)
        assert frames.tolist() == np.where(there, made.frame_of[0][rows], NO_FRAME).tolist()
        assert (made.pins[frames[there]] == 2).all()
        before = made.version.copy()
        made.lease(0, frames[there])
        assert (made.version[frames[there]] == before[frames[there]] + 1).all()
        assert int((made.version - before).sum()) == made.dirty[0] == len(some)
        assert (made.flags[frames[there]] == DIRTY | LEASED | RECENT).all()
        made.end_step(frames)  # with numbers that are none
        assert (made.pins[frames[there]] == 1).all()
        made.unpin(frames)
        assert not made.pins.any()
        assert made.pinned == 0
        assert int(made.idle_dirty[0]) == len(some)
        assert not (made.flags & LEASED).any()


def test_pins_add_up_over_holders(arena: Arena) -> None:
    first = bring(arena, 0, 1, 2)
    second = bring(arena, 0, 2, 3)
    assert arena.pins[second[0]] == 2
    assert arena.pinned == 3
    arena.unpin(first)
    assert arena.pinned == 2
    arena.unpin(second)
    assert arena.pinned == 0
    assert not arena.pins.any()


def test_rows_that_have_a_frame_already_are_not_pinned_twice_by_one_piece(arena: Arena) -> None:
    rows = array(1, 2, 3)
    frames = frames_for(rows)
    frames[0] = bring(arena, 0, 1)[0]
    assert arena.pin_resident(0, rows, frames) == 2
    assert arena.pins[frames[0]] == 1


def test_same_row_number_of_two_tables_has_two_frames(arena: Arena) -> None:
    one, two = bring(arena, 0, 5), bring(arena, 1, 5)
    assert one[0] != two[0]
    assert arena.table_of[[one[0], two[0]]].tolist() == [0, 1]


def test_frames_change_hands_between_tables_and_the_old_row_has_none_then(arena: Arena) -> None:
    arena.unpin(bring(arena, 0, 0, 1, 2, 3))
    frames = bring(arena, 1, 0, 1)
    assert arena.frame_of[1][[0, 1]].tolist() == frames.tolist()
    assert np.count_nonzero(arena.frame_of[0] >= 0) == 2
    for row in np.flatnonzero(arena.frame_of[0] >= 0):
        assert arena.row_of[arena.frame_of[0][row]] == row


def test_only_frames_that_nobody_needs_are_given_up(arena: Arena) -> None:
    dirty = make_dirty(arena, 0, 0)
    pinned = bring(arena, 0, 1)
    rows = array(2)
    filling = frames_for(rows)
    arena.take(0, rows, filling, 1)
    arena.unpin(filling)  # its batch was dropped, its read has not come
    arena.unpin(bring(arena, 0, 3))
    rows = array(6, 7)
    frames = frames_for(rows)
    taken = arena.take(0, rows, frames, 2)
    assert taken.tolist() == [0]
    assert frames[1] == NO_FRAME
    assert arena.frame_of[0][[0, 1, 2]].tolist() == [dirty[0], pinned[0], filling[0]]
    assert arena.frame_of[0][3] == NO_FRAME


def test_a_lease_raises_versions_and_counts_dirty_frames_once(arena: Arena) -> None:
    frames = bring(arena, 0, 1, 2)
    arena.lease(0, frames)
    assert arena.dirty == [2, 0]
    assert (arena.flags[frames] & (DIRTY | LEASED | FILLING | WRITING) == DIRTY | LEASED).all()
    arena.end_lease(frames)
    arena.lease(0, frames[:1])
    assert arena.dirty == [2, 0]
    assert arena.version[frames].tolist() == [2, 1]
    arena.end_lease(frames)
    assert (arena.flags[frames] & (DIRTY | LEASED | FILLING | WRITING) == DIRTY).all()


def test_what_is_written_is_clean_unless_it_was_leased_meanwhile(arena: Arena) -> None:
    make_dirty(arena, 0, 1, 2)
    frames = arena.collect(0, 8, unpinned_only=True)
    versions = arena.version[frames]
    assert sorted(arena.row_of[frames]) == [1, 2]
    assert np.count_nonzero(arena.flags & WRITING) == 2
    again = arena.collect(0, 8, unpinned_only=True)
    assert len(again) == 0  # one write of a row at a time
    make_dirty(arena, 0, 2)
    arena.written(0, frames, versions)
    assert arena.dirty == [1, 0]
    assert not (arena.flags & WRITING).any()
    left = arena.collect(0, 8, unpinned_only=True)
    assert arena.row_of[left].tolist() == [2]
    arena.written(0, left, arena.version[left])
    assert arena.dirty == [0, 0]
    assert not (arena.flags & DIRTY).any()


def test_versions_wrap_around(arena: Arena) -> None:
    frames = bring(arena, 0, 1)
    arena.version[frames] = 2**32 - 1
    arena.lease(0, frames)
    assert arena.version[frames].tolist() == [0]


def test_collecting_takes_one_tables_frames_up_to_the_limit_and_goes_round(arena: Arena) -> None:
    make_dirty(arena, 0, 1, 2, 3)
    make_dirty(arena, 1, 1)
    first = arena.collect(0, 2, unpinned_only=True)
    assert len(first) == 2
    assert (arena.table_of[first] == 0).all()
    second = arena.collect(0, 2, unpinned_only=True)
    assert len(second) == 1
    assert not set(first) & set(second)
    assert arena.table_of[arena.collect(1, 9, unpinned_only=True)].tolist() == [1]


def test_where_there_is_room_for_all_what_was_leased_lately_is_spared_once_unless_it_is_urgent() -> None:
    arena = Arena(np.zeros((9, 16), np.uint8))
    for n_rows in (5, 4):
        arena.add_table(np.full(n_rows, NO_FRAME, np.int32))
    make_dirty(arena, 0, 1, 2, 3)
    arena.flags[arena.frame_of[0][[2, 3]]] &= 255 - RECENT  # the hand has passed these two since
    spared = int(arena.frame_of[0][1])
    first = arena.collect(0, 2, unpinned_only=True, urgent=False)
    assert arena.row_of[first].tolist() == [2, 3]
    assert arena.flags[spared] in (DIRTY, DIRTY | RECENT)
    assert arena.collect(0, 2, unpinned_only=True, urgent=False).tolist() == [spared]  # nothing else is left
    make_dirty(arena, 1, 1)
    assert len(arena.collect(1, 2, unpinned_only=True, urgent=True)) == 1


@pytest.mark.parametrize("urgent", [False, True])
def test_what_would_be_given_up_first_is_written_first(urgent: bool) -> None:
    arena = Arena(np.zeros((6, 16), np.uint8))
    for n_rows in (10, 6):
        arena.add_table(np.full(n_rows, NO_FRAME, np.int32))
    for _ in range(4):
        make_dirty(arena, 0, 1, 2)  # often
    make_dirty(arena, 0, 3, 4)
    make_dirty(arena, 1, 5)
    coming = array(2, 3)  # known to come
    arena.policy.known(0, 1, coming, arena.frame_of[0][coming])
    order = []
    while len(frames := arena.collect(0, 1, unpinned_only=True, urgent=urgent)):
        order += arena.row_of[frames].tolist()
    assert order[:2] == [4, 1]
    assert sorted(order[2:]) == [2, 3]
    assert arena.writing == [4, 0]
    assert arena.collect(0, 9, unpinned_only=False).tolist() == []


def test_what_was_chosen_to_be_written_and_touched_since_waits_for_the_next_choice(arena: Arena) -> None:
    make_dirty(arena, 0, 1, 2, 3)
    first = arena.collect(0, 1, unpinned_only=True)  # all three are chosen, this one is taken
    left = [row for row in (1, 2, 3) if row != arena.row_of[first[0]]]
    make_dirty(arena, 0, left[0])
    assert arena.row_of[arena.collect(0, 1, unpinned_only=True)].tolist() == [left[1]]
    assert arena.row_of[arena.collect(0, 1, unpinned_only=True)].tolist() == [left[0]]
    assert arena.writing == [3, 0]


def test_a_frame_that_holds_another_row_by_now_is_not_the_one_that_was_chosen() -> None:
    arena = Arena(np.zeros((2, 16), np.uint8))
    arena.add_table(np.full(10, NO_FRAME, np.int32))
    make_dirty(arena, 0, 1, 2)
    first = arena.collect(0, 1, unpinned_only=True)
    arena.written(0, first, arena.version[first])
    other = bring(arena, 0, 7)
    assert other.tolist() == first.tolist()
    arena.unpin(other)
    second = arena.collect(0, 1, unpinned_only=True)
    assert arena.row_of[second].tolist() in ([1], [2])
    arena.written(0, second, arena.version[second])
    third = make_dirty(arena, 0, 8)
    assert arena.collect(0, 2, unpinned_only=True).tolist() == third.tolist()
    assert arena.dirty == [1]


def test_a_frame_that_is_another_tables_by_now_is_not_written_as_this_ones() -> None:
    arena = Arena(np.zeros((3, 16), np.uint8))
    for n_rows in (10, 6):
        arena.add_table(np.full(n_rows, NO_FRAME, np.int32))
    make_dirty(arena, 0, 1, 2, 3)
    first = arena.collect(0, 1, unpinned_only=True)  # the two others are chosen, too
    rest = arena.collect(0, 9, unpinned_only=False)
    for frames in (first, rest):
        arena.written(0, frames, arena.version[frames])
    make_dirty(arena, 1, 1, 2, 3)  # the same rows of the other table, in those frames
    assert len(arena.collect(1, 1, unpinned_only=True)) == 1  # all three are chosen
    assert arena.collect(0, 9, unpinned_only=True).tolist() == []
    assert arena.writing == [0, 1]


def test_pinned_frames_are_written_only_when_all_are(arena: Arena) -> None:
    make_dirty(arena, 0, 1)
    frames = bring(arena, 0, 1)
    assert len(arena.collect(0, 9, unpinned_only=True)) == 0
    arena.lease(0, frames)
    assert len(arena.collect(0, 9, unpinned_only=False)) == 0  # leased: its bytes may be changing
    arena.end_lease(frames)
    assert arena.collect(0, 9, unpinned_only=False).tolist() == frames.tolist()


def test_a_reset_arena_is_as_new(arena: Arena) -> None:
    make_dirty(arena, 0, 1, 2)
    bring(arena, 1, 3)
    arena.reset()
    assert arena.pinned == 0
    assert arena.dirty == [0, 0]
    assert (arena.flags == FREE).all()
    assert all((frame_of == NO_FRAME).all() for frame_of in arena.frame_of)
    assert sorted(bring(arena, 0, 0, 1, 2, 3).tolist()) == [0, 1, 2, 3]


def test_frames_can_be_seen_as_numbers(arena: Arena) -> None:
    arena.moments(np.float32)[2, 1] = 1.5
    assert arena.memory[2].view(np.float32).tolist() == [0.0, 1.5, 0.0, 0.0]
    assert arena.moments(np.float64).shape == (4, 2)


def after_a_checkpoint(n_frames: int) -> Arena:
    """A full arena of clean rows that the next batches touch; twelve of them are updated and dirty again."""
    arena = Arena(np.zeros((n_frames, 16), np.uint8))
    arena.add_table(np.full(10 * n_frames, NO_FRAME, np.int32))
    every = np.arange(n_frames)
    arena.unpin(bring(arena, 0, *every))
    arena.policy.known(0, 1, every, arena.frame_of[0][every])
    arena.policy.known(0, 2, np.arange(12), arena.frame_of[0][np.arange(12)])
    arena.policy.ended(0, 1, arena.frame_of[0][every])
    arena.policy.known(0, 3, np.arange(12, n_frames), arena.frame_of[0][np.arange(12, n_frames)])
    make_dirty(arena, 0, *range(12))
    return arena


def test_dirty_frames_that_should_go_before_clean_ones_are_found_by_whole_segments() -> None:
    arena = after_a_checkpoint(40)
    arena.brings(0, 1)
    assert not arena.wants_writing(0, 4)
    arena.brings(0, 1)
    assert arena.wants_writing(0, 4)  # half a segment of rows has come in: perhaps
    arena.look(0, 4)
    assert arena.overdue(0) == 0  # those that are dirty are due before the clean ones
    assert not arena.wants_writing(0, 4)
    arena.policy.ended(0, 2, arena.frame_of[0][np.arange(12)])
    arena.brings(0, 2)
    arena.look(0, 13)  # there are twelve
    assert arena.overdue(0) == 0
    arena.brings(0, 8)
    assert arena.wants_writing(0, 12)
    arena.look(0, 12)
    assert arena.overdue(0) == 12
    assert arena.wants_writing(0, 12)
    frames = arena.collect(0, 12, unpinned_only=True)
    assert sorted(arena.row_of[frames].tolist()) == list(range(12))
    assert arena.overdue(0) == 0
    assert not arena.wants_writing(0, 12)
    arena.written(0, frames, arena.version[frames])
    make_dirty(arena, 0, *range(12))
    arena.brings(0, 8)
    arena.look(0, 12)
    assert arena.overdue(0) == 12
    assert len(arena.collect(0, 3, unpinned_only=False)) == 3  # a checkpoint writes them all, in any order
    assert arena.overdue(0) == 0


def test_a_few_rows_of_a_small_table_are_not_looked_for() -> None:
    arena = after_a_checkpoint(40)
    arena.add_table(np.full(6, NO_FRAME, np.int32))
    arena.brings(0, 20)
    arena.brings(1, 4)
    assert not arena.wants_writing(1, 2)
    arena.brings(1, 2)
    assert arena.wants_writing(1, 2)


def test_what_is_being_written_is_as_good_as_clean() -> None:
    arena = after_a_checkpoint(40)
    arena.policy.ended(0, 2, arena.frame_of[0][np.arange(12)])
    arena.brings(0, 4)
    assert len(arena.collect(0, 4, unpinned_only=True)) == 4
    arena.look(0, 4)
    assert arena.overdue(0) == 0  # a batch's worth is on its way
    arena.brings(0, 5)
    arena.look(0, 4)
    assert arena.overdue(0) == 4


def tight(n_often: int = 8, n_once: int = 8) -> Arena:
    """A full arena: clean rows that are touched often, and dirty ones, from 40 on, that were touched once."""
    arena = Arena(np.zeros((n_often + n_once, 16), np.uint8))
    for n_rows in (80, 6):
        arena.add_table(np.full(n_rows, NO_FRAME, np.int32))
    for _ in range(3):
        make_dirty(arena, 0, *range(n_often))
    every = arena.collect(0, n_often, unpinned_only=False)
    arena.written(0, every, arena.version[every])
    make_dirty(arena, 0, *range(40, 40 + n_once))
    return arena


def test_a_batch_ahead_has_the_dirty_frames_written_that_it_should_take() -> None:
    arena = tight()
    assert arena.order(6, [4, 4])
    written = []
    for _ in range(2):  # six are most of two segments
        assert arena.ordered(0)
        assert not arena.ordered(1)
        assert arena.waited_for()
        written.append(arena.collect(0, 4, unpinned_only=True))
    assert not arena.ordered(0)
    for frames in written:
        assert arena.waited_for()
        arena.written(0, frames, arena.version[frames])
    assert not arena.waited_for()
    bring(arena, 0, *range(70, 76))
    assert (arena.frame_of[0][:8] >= 0).all()  # none of those that are touched often had to go
    assert int((arena.frame_of[0][40:48] >= 0).sum()) == 2


@pytest.mark.parametrize(
    ("needed", "slots", "why"),
    [
        (1, 1, "it needs little of what nobody pins"),
        (6, 33, "it needs little of a segment"),
        (16, 4, "most of what it should take is clean"),
    ],
)
def test_nothing_is_ordered_where_that_is_not_worth_a_wait(needed: int, slots: int, why: str) -> None:
    arena = tight(8, 8) if needed < 16 else tight(33, 3)
    assert not arena.order(needed, [slots, slots]), why
    assert not arena.waited_for()
    assert not arena.ordered(0)


def test_nothing_is_ordered_before_every_frame_was_used() -> None:
    arena = Arena(np.zeros((9, 16), np.uint8))
    arena.add_table(np.full(40, NO_FRAME, np.int32))
    make_dirty(arena, 0, *range(8))
    assert not arena.order(6, [4])
    make_dirty(arena, 0, 8)
    assert arena.order(6, [4])


def test_of_a_small_table_nothing_is_ordered_beside_a_large_one() -> None:
    arena = Arena(np.zeros((20, 16), np.uint8))
    for n_rows in (40, 6):
        arena.add_table(np.full(n_rows, NO_FRAME, np.int32))
    make_dirty(arena, 1, 1, 2)
    make_dirty(arena, 0, *range(18))
    assert arena.order(20, [4, 1])
    assert arena.ordered(0)
    assert not arena.ordered(1)


def test_what_was_ordered_and_is_in_use_again_is_waited_for_no_longer() -> None:
    arena = tight()
    assert arena.order(6, [8, 8])
    frames = bring(arena, 0, *range(40, 48))
    arena.lease(0, frames)
    assert not arena.ordered(0)
    assert not arena.waited_for()
    arena.end_lease(frames)
    arena.unpin(frames)
    assert arena.ordered(0)  # whoever writes finds them touched, and takes what is coldest now
    assert len(arena.collect(0, 8, unpinned_only=True)) == 8
    assert not arena.ordered(0)


def test_what_is_being_written_is_not_ordered_again() -> None:
    arena = tight(8, 16)
    assert len(arena.collect(0, 4, unpinned_only=True)) == 4
    assert arena.order(8, [4, 4])  # four of the eight are on their way
    assert arena.overdue(0) == 4


def test_nothing_is_kept_ready_while_batches_ahead_order_what_they_need() -> None:
    arena = tight()
    arena.brings(0, 9)  # there are eight
    assert arena.wants_writing(0, 4)
    assert arena.order(6, [4, 4])
    assert not arena.wants_writing(0, 4)
    arena.look(0, 4)
    assert arena.overdue(0) == 8  # of the order, and not of this
    arena.keep_ready()
    assert arena.wants_writing(0, 4)
    assert not arena.ordered(0)


def test_a_reset_arena_has_no_orders() -> None:
    arena = tight()
    assert arena.order(6, [4, 4])
    assert len(arena.collect(0, 4, unpinned_only=True)) == 4
    arena.reset()
    assert not arena.ordered(0)
    assert not arena.waited_for()
