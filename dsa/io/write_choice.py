"""Which dirty frames are written, and when: little, late, and those first that should be given up first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsa.io.cache import Frames
from dsa.io.jobs import Table
from dsa.io.policy_news import PolicyNews


@dataclass(frozen=True)
class Need:
    """What writing is for now.

    Args:
        draining: a checkpoint wants every dirty frame written.
        frames_wanted: frames that somebody waits for: write what there is, however little (rule 9).
        dirty_share: of a cache's frames, that may be dirty; None: those that a batch needs are to be ready in time.
        idle: the disk has nothing else to do, so every whole segment is due.
    """

    draining: bool
    frames_wanted: int
    dirty_share: float | None
    idle: bool = False


def any_ordered(tables: Sequence[Table]) -> bool:
    """Whether a batch ahead waits for writes that nobody has begun."""
    return any(table.arena.ordered(table.arena_table) for table in tables)


def any_due(tables: Sequence[Table], need: Need) -> bool:
    """Whether frames of any table are to be written now."""
    return any(_due(table, need) for table in tables)


def choose(tables: Sequence[Table], need: Need, news: PolicyNews) -> tuple[Table, Frames] | None:
    """A segment's worth of frames of one table, which count as being written from now on; None: it is not time.

    Args:
        news: told to the policies before they are asked.
    """
    if need.dirty_share is None and not need.draining:
        news.tell()
        for table in tables:
            if not table.arena.roomy and _idle_dirty(table) >= table.layout.slots:
                table.arena.look(table.arena_table, table.layout.slots)
    for table in sorted(tables, key=_precedence, reverse=True):
        arena, number, slots = table.arena, table.arena_table, table.layout.slots
        left = arena.dirty[number] - arena.writing[number]
        if not _due(table, need) and not (need.idle and left >= slots):
            continue
        news.tell()
        urgent = need.draining or need.frames_wanted > 0
        frames = arena.collect(number, slots, urgent=urgent, unpinned_only=not need.draining)
        if len(frames):
            return table, frames
    return None


def _due(table: Table, need: Need) -> bool:
    arena, number = table.arena, table.arena_table
    if need.draining:
        return arena.dirty[number] > arena.writing[number]
    left = _idle_dirty(table)
    if left <= 0:
        return False
    if need.frames_wanted > sum(arena.writing) or arena.ordered(number):
        return True
    if need.dirty_share is not None:
        return sum(arena.dirty) > need.dirty_share * arena.n_frames
    slots = table.layout.slots
    return left >= slots and not arena.roomy and arena.wants_writing(number, slots)


def _idle_dirty(table: Table) -> int:
    """Dirty frames of the table that nobody pins and that are not being written (or a few less)."""
    return int(table.arena.idle_dirty[table.arena_table]) - table.arena.writing[table.arena_table]


def _precedence(table: Table) -> tuple[int, int]:
    return table.arena.overdue(table.arena_table), _idle_dirty(table)
