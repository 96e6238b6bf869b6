"""The order of announced batches: who is used up by a step, who is brought in next, who is forgotten."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.io.cache import DONE_FRAME, NO_FRAME
from dsa.io.window import Batch, Kind, Piece, Window


def add(window: Window, kind: Kind, rows: list[int], table: int = 0) -> Batch:
    batch = window.new(kind, {table: np.array(rows, np.int64)})
    window.add(batch)
    return batch


def numbers(batches: list[Batch]) -> list[int]:
    return [batch.sequence for batch in batches]


def test_announcements_are_used_up_first_in_first_out() -> None:
    window = Window(10, 100)
    first, second = (add(window, Kind.ANNOUNCED, [k]) for k in range(2))
    assert window.used_by_step() == ([first], [])
    assert window.used_by_step() == ([second], [])
    assert window.used_by_step() == ([], [])


def test_a_step_uses_up_all_that_was_handed_out_all_hooks_and_one_announcement() -> None:
    window = Window(10, 100)
    announced = [add(window, Kind.ANNOUNCED, [k]) for k in range(2)]
    ahead = [add(window, Kind.AHEAD, [k]) for k in range(3)]
    hooks = [add(window, Kind.HOOK, [k]) for k in range(2)]
    for batch in ahead[:2]:
        window.hand_out(batch.sequence)
        window.hand_out(batch.sequence)  # saying it twice says no more
    used, late = window.used_by_step()
    assert numbers(used) == numbers([*ahead[:2], *hooks, announced[0]])
    assert late == []
    assert numbers(list(window.in_order())) == numbers([announced[1], ahead[2]])


def test_rows_are_brought_in_for_hooks_and_what_was_handed_out_before_the_rest() -> None:
    window = Window(10, 100)
    a, b, c = (add(window, Kind.AHEAD, [k]) for k in range(3))
    hook = add(window, Kind.HOOK, [7])
    window.hand_out(c.sequence)
    assert numbers(list(window.in_order())) == numbers([hook, c, a, b])


def test_a_full_window_forgets_the_youngest_and_keeps_their_places() -> None:
    window = Window(2, 100)
    kept = [add(window, Kind.ANNOUNCED, [k]) for k in range(2)]
    gone = [add(window, Kind.ANNOUNCED, [k]) for k in range(2, 5)]
    assert [batch.forgotten for batch in [*kept, *gone]] == [False, False, True, True, True]
    assert window.forgotten_batches == 3
    assert numbers(list(window.in_order())) == numbers(kept)
    uses = [window.used_by_step()[0] for _ in range(6)]
    assert [[batch.forgotten for batch in used] for used in uses] == [[False], [False], [True], [True], [True], []]
    assert len(window) == 0


def test_rows_are_the_bound_too_but_one_batch_is_always_remembered() -> None:
    window = Window(100, 5)
    big = add(window, Kind.ANNOUNCED, list(range(9)))
    assert not big.forgotten
    assert window.known_rows == 9
    assert add(window, Kind.ANNOUNCED, [1]).forgotten
    window.used_by_step()
    window.used_by_step()
    assert window.known_rows == 0
    assert not add(window, Kind.ANNOUNCED, [0, 1, 2, 3, 4]).forgotten


def test_places_of_forgotten_announcements_take_no_room() -> None:
    window = Window(4, 100)
    for k in range(1000):
        add(window, Kind.ANNOUNCED, [k])
    assert len(window) == 5
    for _ in range(1000):
        assert len(window.used_by_step()[0]) == 1
    assert window.used_by_step()[0] == []
    assert len(window) == 0


def test_a_forgotten_lookahead_batch_has_a_place_of_its_own() -> None:
    window = Window(1, 100)
    add(window, Kind.ANNOUNCED, [0])
    one, two = (add(window, Kind.AHEAD, [k]) for k in range(2))
    window.hand_out(one.sequence)
    used, _ = window.used_by_step()
    assert one in used
    assert two not in used
    assert window.get(two.sequence) is two


def test_batches_that_ended_late_count_for_the_next_step_only() -> None:
    window = Window(10, 100)
    batch = add(window, Kind.AHEAD, [1, 2])
    other = add(window, Kind.AHEAD, [3])
    window.remove(batch, late=True)
    window.remove(other)
    window.remove(batch, late=True)  # it has ended: nothing more comes of it
    assert window.get(batch.sequence) is None
    assert window.used_by_step() == ([], [batch])
    assert window.used_by_step() == ([], [])


def test_late_rows_are_bounded() -> None:
    window = Window(10, 6)
    for k in range(8):
        window.remove(add(window, Kind.HOOK, [k, k + 1]), late=True)
    _, late = window.used_by_step()
    assert sum(batch.rows for batch in late) <= 6
    assert late[-1].pieces[0].rows.tolist() == [7, 8]


def test_only_the_newest_hooks_are_kept() -> None:
    window = Window(2, 6)
    hooks = [add(window, Kind.HOOK, [k]) for k in range(5)]
    assert window.oldest_hooks(3) == hooks[:2]
    assert window.oldest_hooks(5) == []


def test_the_rows_of_hooks_are_bounded_but_for_the_newest() -> None:
    window = Window(9, 4)
    hooks = [add(window, Kind.HOOK, [k, k + 1, k + 2]) for k in range(3)]
    assert window.oldest_hooks(9) == hooks[:2]
    hooks.append(add(window, Kind.HOOK, [*range(7)]))
    assert window.oldest_hooks(9) == hooks[:3]


def test_clearing_leaves_nothing() -> None:
    window = Window(10, 100)
    batches = [add(window, kind, [1, 2]) for kind in (Kind.ANNOUNCED, Kind.AHEAD, Kind.HOOK)]
    window.remove(add(window, Kind.HOOK, [3]), late=True)
    assert window.clear() == batches
    assert (len(window), window.known_rows, window.used_by_step()) == (0, 0, ([], []))


def test_a_piece_knows_what_is_left_of_it() -> None:
    piece = Piece(0, np.array([4, 5, 6], np.int64))
    assert (piece.held, piece.unframed, piece.remaining) == (False, 3, 3)
    piece.open()
    assert piece.frames.tolist() == [NO_FRAME] * 3
    piece.frames[:2] = [8, 9]
    piece.unframed = 1
    piece.open()  # again: what it has stays
    assert piece.frames.tolist() == [8, 9, NO_FRAME]
    piece.finish(np.array([1]))
    assert piece.frames.tolist() == [8, DONE_FRAME, NO_FRAME]
    assert piece.remaining == 2
    piece.asked = piece.waits = True
    piece.forget_frames()
    assert (piece.held, piece.unframed, piece.remaining, len(piece.frames)) == (False, 3, 3, 0)
    assert not piece.asked  # held once more, it may order once more
    assert not piece.waits


def test_tables_without_rows_are_no_part_of_a_batch() -> None:
    window = Window(4, 100)
    batch = window.new(Kind.STEP, {0: np.empty(0, np.int64), 3: np.array([1], np.int64)})
    assert [piece.table for piece in batch.pieces] == [3]
    assert batch.rows == 1


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    most=st.integers(1, 4),
    rows=st.integers(1, 8),
    moves=st.lists(st.tuples(st.sampled_from(["announce", "ahead", "hook", "hand", "end", "step"]), st.integers(1, 5))),
)
def test_bounds_and_counters_hold_whatever_comes(most: int, rows: int, moves: list[tuple[str, int]]) -> None:
    window = Window(most, rows)
    kinds = {"announce": Kind.ANNOUNCED, "ahead": Kind.AHEAD, "hook": Kind.HOOK}
    ahead: list[Batch] = []
    announced, steps_for_announced = 0, 0
    for move, n in moves:
        if move in kinds:
            batch = add(window, kinds[move], list(range(n)))
            announced += batch.kind is Kind.ANNOUNCED
            if batch.kind is Kind.AHEAD:
                ahead.append(batch)
        elif move == "hand" and ahead:
            window.hand_out(ahead[n % len(ahead)].sequence)
        elif move == "end" and ahead:
            window.remove(ahead.pop(n % len(ahead)), late=n > 2)
        elif move == "step":
            used, _ = window.used_by_step()
            steps_for_announced += sum(batch.kind is Kind.ANNOUNCED for batch in used)
            assert steps_for_announced <= announced
            assert sum(batch.kind is Kind.ANNOUNCED for batch in used) <= 1
        in_order = list(window.in_order())
        assert len(set(numbers(in_order))) == len(in_order)
        assert window.known_rows == sum(batch.rows for batch in in_order)
        remembered = [batch for batch in in_order if batch.kind is not Kind.HOOK and not batch.forgotten]
        assert len(remembered) <= most
        assert sum(batch.rows for batch in remembered) <= rows or len(remembered) == 1
    for _ in range(announced - steps_for_announced):
        assert any(batch.kind is Kind.ANNOUNCED for batch in window.used_by_step()[0])
    assert not any(batch.kind is Kind.ANNOUNCED for batch in window.used_by_step()[0])
