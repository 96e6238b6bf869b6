"""Which announced batches are held ahead of their step, and which of them had better wait for writes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsa.io.cache import Arena
from dsa.io.jobs import Table
from dsa.io.reach import Reach
from dsa.io.window import Batch, Piece, Window

_CHEAP_SHARE = 0.125  # of an arena's frames: so many may be pinned, and the cache hardly misses them


def within_reach(window: Window, reach: Reach, tables: Sequence[Table], arenas: Sequence[Arena]) -> Iterator[Batch]:
    """The batches to hold, in window order; asked for one by one, since each one held changes what fits."""
    held = 0
    for batch in window.in_order():
        if window.is_ahead(batch):
            held += 1
            if held > reach.batches:
                reach.used_up = True
                reach.cheap = all(arena.pinned <= _CHEAP_SHARE * arena.n_frames for arena in arenas)
                return
            if held > 1 and reach.sizes_itself and _crowded(batch, tables):
                return
        yield batch


def may_bring(window: Window, reach: Reach, tables: Sequence[Table], arenas: Sequence[Arena]) -> bool:
    """Whether a batch within reach lacks frames, and the first one that does would wait for writes no longer."""
    for batch in within_reach(window, reach, tables, arenas):
        for piece in batch.pieces:
            if piece.unframed:
                waits = piece.waits and window.is_ahead(batch)
                return not (waits and tables[piece.table].arena.waited_for())
    return False


def better_wait(piece: Piece, arena: Arena, tables: Sequence[Table]) -> bool:
    """Whether a piece of a batch ahead, which lacks frames, is to take none yet: it waits for what it has ordered.

    It waits for one order: what it cannot have then it takes elsewhere. So it is no link in a circle (rule 9): writes
    wait for nobody, and a batch whose turn has come is not ahead any more.
    """
    if piece.asked:
        return arena.waited_for()
    piece.asked = arena.order(piece.unframed, [table.layout.slots for table in tables if table.arena is arena])
    return piece.asked


def _crowded(batch: Batch, tables: Sequence[Table]) -> bool:
    """Whether holding the batch too would pin more than about half the frames of an arena."""
    for piece in batch.pieces:
        if not piece.held and piece.unframed:
            arena = tables[piece.table].arena
            if 2 * (arena.pinned + len(piece.rows)) > arena.n_frames:
                return True
    return False
