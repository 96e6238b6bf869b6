"""Each rule of the engine, taken out, is missed: a walk that is clean with all of them finds what goes wrong.

The rules are those of DESIGN.md, by number. A walk has its seed, so every outcome here is the same at every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bookkeeping_walk import Walk, Wrong, walk

from dsa.io.bookkeeping import Bookkeeping
from dsa.io.cache import Arena
from dsa.io.eviction import DIRTY, FILLING, LEASED, WRITING, Policy
from dsa.io.segments import Segments
from dsa.io.window import Batch, Kind, Window

SEEDS, MORE_SEEDS = range(12), range(50, 120)
MOVES = 300
TakeOut = Callable[[pytest.MonkeyPatch], None]


def versions_ignored(patch: pytest.MonkeyPatch) -> None:
    """Rule 2: a completed write makes the frame clean, whatever has happened to it since."""
    written = Arena.written
    patch.setattr(Arena, "written", lambda self, table, frames, _: written(self, table, frames, self.version[frames]))


def dirty_from_the_commit_on(patch: pytest.MonkeyPatch) -> None:
    """Rule 2: a frame counts as dirty from the commit on, not from the lease on."""
    lease, commit = Arena.lease, Bookkeeping.commit

    def lease_clean(self: Arena, table: int, frames: Any) -> None:
        fresh = frames[self.flags[frames] & DIRTY == 0]
        lease(self, table, frames)
        self.flags[fresh] &= 255 - DIRTY
        self.dirty[table] -= len(fresh)

    def commit_dirty(self: Bookkeeping, piece: Any, positions: Any) -> None:
        table, frames = self.tables[piece.table], piece.frames[positions]
        if self._running().lasting:
            clean = frames[table.arena.flags[frames] & DIRTY == 0]
            table.arena.flags[clean] |= DIRTY
            table.arena.dirty[table.arena_table] += len(clean)
        commit(self, piece, positions)

    patch.setattr(Arena, "lease", lease_clean)
    patch.setattr(Bookkeeping, "commit", commit_dirty)


def _collect_also(mask: int) -> TakeOut:
    def take_out(patch: pytest.MonkeyPatch) -> None:
        collect = Arena.collect

        def collect_more(self: Arena, table: int, limit: int, *, unpinned_only: bool, urgent: bool = True) -> Any:
            hidden = self.flags & mask
            self.flags &= 255 - mask
            frames = collect(self, table, limit, unpinned_only=unpinned_only and mask != LEASED, urgent=urgent)
            self.flags |= hidden
            return frames

        patch.setattr(Arena, "collect", collect_more)

    return take_out


def index_ahead_of_the_file(patch: pytest.MonkeyPatch) -> None:
    """Rule 4: the index follows the copy, not the completed write."""
    copied = Bookkeeping.copied

    def copied_and_written(self: Bookkeeping, job: Any) -> None:
        copied(self, job)
        job.table.segments.written(job.segment, job.rows, job.checks, self.next_ticket, None)

    patch.setattr(Bookkeeping, "copied", copied_and_written)


def cleaning_overwrites(patch: pytest.MonkeyPatch) -> None:
    """Rule 4: cleaning moves the index wherever it points now."""
    written = Segments.written
    patch.setattr(Segments, "written", lambda self, segment, rows, checks, ticket, _: written(
        self, segment, rows, checks, ticket, None
    ))  # fmt: skip


def reads_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """Rule 5: a freed segment is reused while reads of it are under way."""
    ended = Segments.reads_ended
    patch.setattr(Segments, "reads_ended", lambda self, oldest: ended(self, 1 << 60))


def generations_not_retained(patch: pytest.MonkeyPatch) -> None:
    """Rule 5: a segment is reused though a generation refers to it."""
    patch.setattr(Segments, "retain", lambda self, retained, ticket: None)


def _victims_also(mask: int) -> TakeOut:
    def take_out(patch: pytest.MonkeyPatch) -> None:
        victims = Policy.victims
        kept = 255 - mask
        patch.setattr(Policy, "victims", lambda self, count, flags, pins: victims(self, count, flags & kept, pins))

    return take_out


def pinned_given_up(patch: pytest.MonkeyPatch) -> None:
    """Rule 6: a frame is reused though it is pinned."""
    victims = Policy.victims
    patch.setattr(Policy, "victims", lambda self, count, flags, pins: victims(self, count, flags, np.zeros_like(pins)))


def torn_copies_kept(patch: pytest.MonkeyPatch) -> None:
    """Rule 7: a copy that overlapped a lease is written all the same."""
    patch.setattr(Bookkeeping, "copied", lambda self, job: None)


def _cleaning_meets_a_write() -> None:
    world = Walk((6,), (6, 1), dirty_share=0.0)
    world.clean_eagerly()
    for row in (0, 1):
        _step(world, [row])
        _write(world)
    assert world.next_clean(0)
    world.clean_moves(0)
    world.clean_moves(0)  # both victims are read, and then row 0 moves on
    _step(world, [0])
    _write(world)
    world.clean_moves(0)


def _cleaning_meets_a_read() -> None:
    world = Walk((6,), (2, 1), dirty_share=0.0)
    world.clean_eagerly()
    for rows in ([0], [1], [2, 3]):
        _step(world, rows)
        _write(world)
    world.announce(Kind.ANNOUNCED, {0: [0]})
    assert world.next_fill()  # row 0 is being read, and then cleaning moves it
    assert world.next_clean(0)
    for _ in range(3):
        world.clean_moves(0)
    world.fill_ends(0)


def _generation_meets_writes() -> None:
    world = Walk((6,), (2, 1), dirty_share=0.0)
    _step(world, [0])
    _write(world)
    world.keep_generation()
    for _ in range(6):
        _step(world, [0])
        _write(world)


def _step(world: Walk, rows: list[int]) -> None:
    world.begin({0: rows})
    for _ in range(40):
        if not world.work():
            assert world.next_fill()
            world.fill_ends(0)
        if world.books.step is None:
            return
    raise Wrong("the step waits for ever")


def _write(world: Walk) -> None:
    assert world.next_write()
    for _ in range(3):
        world.write_moves(0)


WALKED: dict[str, TakeOut] = {
    "2: versions": versions_ignored,
    "2: dirty from the lease on": dirty_from_the_commit_on,
    "3: one write of a row": _collect_also(WRITING),
    "4: the index follows the write": index_ahead_of_the_file,
    "6: frames being filled stay": _victims_also(FILLING),
    "6: dirty frames and frames being written stay": _victims_also(DIRTY | WRITING),
    "6: pinned frames stay": pinned_given_up,
    "7: torn copies are void": torn_copies_kept,
    "7: leased frames are not copied": _collect_also(LEASED),
}


def _lease_meets_a_copy() -> None:
    world = Walk((6,), (6, 1), dirty_share=0.0)
    _step(world, [0])
    assert world.next_write()
    world.write_moves(0)  # half of the record is copied
    _step(world, [0])
    world.write_moves(0)
    world.write_moves(0)


MADE: dict[str, tuple[TakeOut, Callable[[], None]]] = {
    "4: cleaning compares": (cleaning_overwrites, _cleaning_meets_a_write),
    "5: reads are awaited": (reads_not_awaited, _cleaning_meets_a_read),
    "5: generations are retained": (generations_not_retained, _generation_meets_writes),
    "7: torn copies are void": (torn_copies_kept, _lease_meets_a_copy),
}


def _first_wrong(seeds: range) -> str | None:
    for seed in seeds:
        try:
            walk(seed, MOVES)
        except Wrong as error:
            return str(error)
    return None


def test_with_all_rules_every_walk_is_clean() -> None:
    assert _first_wrong(SEEDS) is None


@pytest.mark.parametrize("rule", WALKED)
def test_without_the_rule_a_walk_goes_wrong(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WALKED[rule](monkeypatch)
    assert _first_wrong(MORE_SEEDS) is not None, f"no walk misses rule {rule}"


@pytest.mark.parametrize("rule", MADE)
def test_without_the_rule_a_few_moves_go_wrong(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_out, moves = MADE[rule]
    moves()
    take_out(monkeypatch)
    with pytest.raises(Wrong):
        moves()


# Rule 9, nobody waits in a circle: part by part.


def nothing_stolen(patch: pytest.MonkeyPatch) -> None:
    """A step leaves the frames of held batches alone."""
    patch.setattr(Bookkeeping, "_release_youngest", lambda self: False)


def nothing_written_for_who_waits(patch: pytest.MonkeyPatch) -> None:
    """Write-behind waits for its share of dirty frames, whoever waits for one."""
    next_write = Bookkeeping.next_write

    def unmoved(self: Bookkeeping, dirty_share: float) -> Any:
        self.frames_wanted = False
        return next_write(self, dirty_share)

    patch.setattr(Bookkeeping, "next_write", unmoved)


def no_parts(patch: pytest.MonkeyPatch) -> None:
    """A step waits until all its rows have frames at once."""
    ready = Bookkeeping.ready
    patch.setattr(Bookkeeping, "ready", lambda self, piece: None if piece.unframed else ready(self, piece))


def parts_at_once(patch: pytest.MonkeyPatch) -> None:
    """A step whose first piece is short of frames pins those of a later piece meanwhile."""

    def bring_all(self: Bookkeeping, batch: Batch, ended: Any = ()) -> None:
        for piece in reversed(batch.pieces):
            if piece.remaining:
                self._take(batch, piece)

    patch.setattr(Bookkeeping, "_bring_pieces", bring_all)


def prefetch_goes_on(patch: pytest.MonkeyPatch) -> None:
    """Prefetch takes frames for coming batches while a step waits for its own."""
    next_fill = Bookkeeping.next_fill

    def hold_ahead_first(self: Bookkeeping) -> Any:
        self._hold_ahead()
        return next_fill(self)

    patch.setattr(Bookkeeping, "next_fill", hold_ahead_first)


def youngest_first(patch: pytest.MonkeyPatch) -> None:
    """Frames go to the batch that was announced last."""
    in_order = Window.in_order
    patch.setattr(Window, "in_order", lambda self: reversed(list(in_order(self))))


def nothing_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A full window remembers all the same."""
    add = Window.add

    def add_all(self: Window, batch: Batch) -> None:
        self._most_batches = self._most_rows = 1 << 40
        add(self, batch)

    patch.setattr(Window, "add", add_all)


def _used_without(queue: str) -> TakeOut:
    """A step does not end the batches in that queue."""

    def take_out(patch: pytest.MonkeyPatch) -> None:
        used_by_step = Window.used_by_step

        def fewer(self: Window) -> Any:
            kept = list(getattr(self, queue))
            getattr(self, queue).clear()
            used = used_by_step(self)
            getattr(self, queue).extend(kept)
            return used

        patch.setattr(Window, "used_by_step", fewer)

    return take_out


def _hold(world: Walk, rows: list[int]) -> int:
    ticket = world.announce(Kind.AHEAD, {0: rows})
    while world.next_fill():
        world.fill_ends(0)
    return ticket


def _step_beside_held_batches() -> None:
    world = Walk((12,), (4, 1))
    ticket = _hold(world, [0, 1, 2, 3])
    world.begin({0: [4, 5, 6]})
    world.settle()
    batch = world.window.get(ticket)
    if batch is None or not batch.complete:
        raise Wrong("the batch that gave its frames up is not held again")


def _step_beside_few_dirty_frames() -> None:
    world = Walk((8,), (4, 1), dirty_share=1.0)
    _step(world, [0, 1, 2, 3])
    world.begin({0: [4]})
    world.settle()


def _step_larger_than_the_cache() -> None:
    world = Walk((8,), (3, 1))
    world.begin({0: [0, 1, 2, 3, 4, 5, 6]})
    world.settle()


def _step_of_two_tables_in_parts() -> None:
    world = Walk((8, 8, 2), (4, 1))
    world.begin({0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3]})
    world.settle()


def _frame_is_free_while_a_step_waits() -> None:
    world = Walk((12,), (4, 1))
    ticket = world.announce(Kind.AHEAD, {0: [0]})
    world.next_fill()
    world.announce(Kind.AHEAD, {0: [8, 9, 10]})
    world.begin({0: [4, 5, 6, 7]})
    while world.next_fill():
        pass  # the step's reads: for one of its rows there is no frame
    while world.fills:
        world.fill_ends(0)
    world.end(ticket)
    while world.next_fill():
        if not set(world.fills[-1].rows) <= {4, 5, 6, 7}:
            raise Wrong(f"while the step waits for a frame, rows {world.fills[-1].rows} get one")
    world.settle()


def _frames_for_one_of_two_batches() -> None:
    world = Walk((8,), (4, 1))
    first = world.announce(Kind.AHEAD, {0: [0, 1, 2]})
    world.announce(Kind.AHEAD, {0: [3, 4, 5]})
    while world.next_fill():
        world.fill_ends(0)
    batch = world.window.get(first)
    if batch is None or not batch.complete:
        raise Wrong("the batch that is needed first has no frames")


def _many_announcements() -> None:
    world = Walk((8,), (4, 1), known_batches=3, known_rows=6)
    for row in range(8):
        world.announce(Kind.AHEAD, {0: [row, (row + 1) % 8]})
    if world.window.known_rows > 6:
        raise Wrong(f"{world.window.known_rows} rows are known, the window has room for 6")


def _step_after(kind: Kind) -> Callable[[], None]:
    def moves() -> None:
        world = Walk((8,), (4, 1))
        ticket = world.announce(kind, {0: [0, 1]})
        if kind is Kind.AHEAD:
            world.hand_out(ticket)
        while world.next_fill():
            world.fill_ends(0)
        _step(world, [0])
        if len(world.window) or world.books.arenas[0].pinned:
            raise Wrong(f"after the step {world.books.arenas[0].pinned} frames are pinned")

    return moves


PARTS: dict[str, tuple[TakeOut, Callable[[], None]]] = {
    "a step takes frames from held batches": (nothing_stolen, _step_beside_held_batches),
    "what there is is written": (nothing_written_for_who_waits, _step_beside_few_dirty_frames),
    "more rows than frames go in parts": (no_parts, _step_larger_than_the_cache),
    "one piece after the other": (parts_at_once, _step_of_two_tables_in_parts),
    "a step's rows come first": (prefetch_goes_on, _frame_is_free_while_a_step_waits),
    "frames are taken in window order": (youngest_first, _frames_for_one_of_two_batches),
    "a full window forgets": (nothing_forgotten, _many_announcements),
    "a lookahead's batch ends at a step": (_used_without("_handed"), _step_after(Kind.AHEAD)),
    "a hook's announcement ends at a step": (_used_without("_hooks"), _step_after(Kind.HOOK)),
    "an announcement is used up by a step": (_used_without("_fifo"), _step_after(Kind.ANNOUNCED)),
}


@pytest.mark.parametrize("part", PARTS)
def test_without_a_part_of_rule_9_somebody_waits_in_vain(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_out, moves = PARTS[part]
    moves()
    take_out(monkeypatch)
    with pytest.raises(Wrong):
        moves()
