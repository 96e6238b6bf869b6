"""The location index and the fate of segments: written, dead, waiting for reads, free, retained, cleaned."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from dsa.io.layout import VOID_ROW, SegmentLayout
from dsa.io.segments import CLEANING, CLEANING_RESERVE, FREE, FULL, LIMBO, NEVER_WRITTEN, OPEN, Segments

SLOTS = 4
LAYOUT = SegmentLayout(1024, SLOTS, 4, 8192)


def new(n_rows: int = 20, kind: Any = np.int32) -> Segments:
    return Segments(LAYOUT, np.full(n_rows, NEVER_WRITTEN, kind), np.zeros(n_rows, np.uint32))


def write(segments: Segments, *rows: int, ticket: int = 1, check: int = 7) -> int:
    segment = segments.allocate(cleaning=False)
    named = np.array(rows, np.int64)
    segments.written(segment, named, np.full(len(rows), check, np.uint32), ticket, None)
    return segment


def states(segments: Segments) -> list[int]:
    return [int(state) for state in segments.state]


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_the_index_follows_a_write_and_only_that(kind: Any) -> None:
    segments = new(kind=kind)
    segment = segments.allocate(cleaning=False)
    assert states(segments) == [OPEN]
    assert (segments.slots == NEVER_WRITTEN).all()
    assert not segments.changed
    segments.written(segment, np.array([3, VOID_ROW, 5], np.int64), np.array([30, 99, 50], np.uint32), 1, None)
    slots, checks = segments.locate(np.array([3, 4, 5], np.int64))
    assert slots.tolist() == [0, NEVER_WRITTEN, 2]
    assert checks.tolist() == [30, 0, 50]
    assert (segments.live_records, segments.live.tolist(), segments.used.tolist()) == (2, [2], [3])
    assert segments.changed


def test_a_segment_with_nothing_live_waits_for_the_reads_submitted_before() -> None:
    segments = new()
    write(segments, 0, 1)
    write(segments, 0, 1, ticket=5)
    assert states(segments) == [LIMBO, FULL]
    segments.reads_ended(4)
    assert states(segments) == [LIMBO, FULL]
    segments.reads_ended(5)
    assert states(segments) == [FREE, FULL]
    assert segments.free_segments == 1


def test_a_segment_whose_records_are_all_void_is_given_up() -> None:
    segments = new()
    write(segments, VOID_ROW, VOID_ROW)
    assert states(segments) == [LIMBO]
    assert (segments.live_records, segments.changed) == (0, False)


def test_a_reserve_of_free_segments_is_for_cleaning() -> None:
    segments = new()
    for _ in range(CLEANING_RESERVE + 2):
        write(segments, 0)
    segments.reads_ended(1 << 40)
    assert segments.free_segments == CLEANING_RESERVE + 1
    assert segments.allocate(cleaning=False) == 0  # the lowest of them
    assert segments.allocate(cleaning=False) == len(segments) - 1 == CLEANING_RESERVE + 2  # grown
    grown = len(segments)
    for _ in range(CLEANING_RESERVE):
        assert segments.allocate(cleaning=True) < grown
    assert segments.allocate(cleaning=True) == grown


def test_a_retained_segment_is_not_free_until_it_is_released() -> None:
    segments = new()
    write(segments, 0, 1)
    segments.retain(np.array([True]), 1)
    write(segments, 0, 1)
    segments.reads_ended(1 << 40)
    assert states(segments) == [FULL, FULL]
    segments.retain(np.array([], np.bool_), 9)
    assert states(segments) == [LIMBO, FULL]
    segments.reads_ended(9)
    assert states(segments) == [FREE, FULL]


def test_cleaning_takes_the_emptiest_segments_that_fit_one() -> None:
    segments = new()
    for first in (0, 4, 8, 12):
        write(segments, *range(first, first + 4))
    write(segments, 0, 1, 2, 4)  # live now: 1, 3, 4, 4, 4
    assert segments.live.tolist() == [1, 3, 4, 4, 4]
    assert segments.choose_victims() == [0, 1]
    assert states(segments)[:2] == [CLEANING, CLEANING]
    assert segments.choose_victims() == []  # full ones alone gain nothing


def test_what_a_generation_refers_to_outlives_its_cleaning() -> None:
    segments = new()
    for row in range(3):
        write(segments, row)
    segments.retain(np.array([True, False, False]), 1)
    victims = segments.choose_victims()
    assert {1, 2} <= set(victims)
    rows = np.array(victims, np.int64)  # row k is in segment k
    target = segments.allocate(cleaning=True)
    segments.written(target, rows, np.full(len(rows), 7, np.uint32), 2, segments.locate(rows)[0])
    for victim in victims:
        segments.abandon(victim, 2)
    segments.reads_ended(2)
    assert states(segments) == [FULL, FREE, FREE, FULL]
    segments.retain(np.zeros(0, np.bool_), 3)
    segments.reads_ended(3)
    assert states(segments) == [FULL if segments.live[0] else FREE, FREE, FREE, FULL]


def test_cleaning_moves_the_index_only_where_it_has_not_moved_on() -> None:
    segments = new()
    one, two = write(segments, 0, 1, check=1), write(segments, 2, check=1)
    assert segments.choose_victims() == [two, one]
    target = segments.allocate(cleaning=True)
    rows = np.array([0, 1, 2], np.int64)
    slots, checks = segments.locate(rows)
    newer = write(segments, 1, check=2)
    segments.written(target, rows, checks, 3, slots)
    for victim in (one, two):
        segments.abandon(victim, 3)
    found, checks = segments.locate(rows)
    assert found.tolist() == [target * SLOTS, newer * SLOTS, target * SLOTS + 2]
    assert checks.tolist() == [1, 2, 1]
    assert [states(segments)[s] for s in (one, two, target, newer)] == [LIMBO, LIMBO, FULL, FULL]
    assert segments.live_records == 3


def test_what_a_header_names_is_live_only_where_the_index_agrees() -> None:
    segments = new()
    segment = write(segments, 0, VOID_ROW, 2, 3)
    write(segments, 2)
    named = np.array([0, VOID_ROW, 2, 3], np.int64)
    assert segments.still_live(named, segment).tolist() == [True, False, False, True]


def test_counts_worked_out_anew_are_those_kept() -> None:
    rnd = random.Random(4)
    segments = new(40)
    for _ in range(60):
        write(segments, *rnd.sample(range(40), rnd.randrange(1, SLOTS + 1)))
        segments.reads_ended(1 << 40)
    again = Segments(LAYOUT, segments.slots.copy(), segments.checks.copy())
    assert again.rebuild(len(segments), np.zeros(0, np.bool_))
    assert again.live.tolist() == segments.live.tolist()
    assert again.live_records == segments.live_records
    assert states(again) == states(segments)
    assert again.free_segments == segments.free_segments
    assert not again.changed


def test_an_index_that_points_beyond_the_log_is_refused() -> None:
    segments = new()
    write(segments, 0)
    write(segments, 1)
    assert not segments.rebuild(1, np.zeros(0, np.bool_))


def test_reopened_segments_that_generations_hold_are_not_free() -> None:
    segments = new()
    write(segments, 0)
    assert segments.rebuild(3, np.array([False, True, False, True]))
    assert states(segments) == [FULL, FULL, FREE]
    segments.retain(np.zeros(0, np.bool_), 1)
    segments.reads_ended(1)
    assert states(segments) == [FULL, FREE, FREE]


def test_clearing_forgets_every_record() -> None:
    segments = new()
    write(segments, 0, 1)
    write(segments, 2)
    segments.retain(np.array([False, True]), 1)
    segments.changed = False
    segments.clear(2)
    segments.reads_ended(2)
    assert (segments.slots == NEVER_WRITTEN).all()
    assert states(segments) == [FREE, FULL]
    assert segments.changed
    assert segments.live_records == 0


def test_surplus_at_the_end_of_the_log_is_cut_and_no_more() -> None:
    segments = new(400)
    kept = [write(segments, 4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3) for k in range(3)]
    for k in range(60):
        write(segments, 100 + k)
    for k in range(0, 60, 4):
        write(segments, *range(100 + k, 104 + k))
    for k in range(0, 60, 4):
        write(segments, *range(100 + k, 104 + k))
    segments.reads_ended(1 << 40)
    before, live = len(segments), segments.live.copy()
    left = segments.cut()
    assert left == len(segments) <= before
    assert segments.live.tolist() == live[:left].tolist()
    assert not live[left:].any()
    assert left >= max(kept) + 1
    assert segments.live_records == 12 + 60
    assert segments.free_segments == np.count_nonzero(segments.state == FREE)
    chosen = segments.begin_punch()
    assert not segments.live[chosen].any()
    taken = [segments.allocate(cleaning=True) for _ in range(segments.free_segments + 1)]
    assert not set(taken) & set(chosen)
    segments.end_punch(chosen, punched=True)
    assert segments.free_segments == len(chosen)


def test_the_log_stays_within_twice_its_live_records_however_long() -> None:
    rnd = random.Random(1)
    n_rows = 200
    segments = new(n_rows)
    for ticket in range(1, 3000):
        rows = np.array(rnd.sample(range(n_rows), SLOTS), np.int64)
        while segments.wants_cleaning() and (victims := segments.choose_victims()):
            target = segments.allocate(cleaning=True)
            moving = np.concatenate([np.flatnonzero(segments.slots // SLOTS == v) for v in victims]).astype(np.int64)
            slots, checks = segments.locate(moving)
            segments.written(target, moving, checks, ticket, slots)
            for victim in victims:
                segments.abandon(victim, ticket)
            segments.reads_ended(ticket)
        write(segments, *rows, ticket=ticket)
        segments.reads_ended(ticket)
    live_segments = n_rows / SLOTS
    assert len(segments) <= 2 * live_segments + 8


@pytest.mark.parametrize(("segment_bytes", "most"), [(8192, 8), (3 << 20, 4), (64 << 20, 2)])
def test_as_many_are_cleaned_at_once_as_fit_in_memory(segment_bytes: int, most: int) -> None:
    layout = SegmentLayout(1024, 16, 4, segment_bytes)
    segments = Segments(layout, np.full(20, NEVER_WRITTEN, np.int32), np.zeros(20, np.uint32))
    for row in range(12):
        write(segments, row)  # a record each: all of them would fit one segment
    assert segments.choose_victims() == list(range(most))
