"""The state machine of the engine: window, pins, versions, dirty marks, index and free segments, as one. Pure.

Every method is called under the engine's one lock and takes microseconds; none copies a record or does I/O. What is
to be moved leaves as a job (`FillJob`, `WriteJob`, `CleanJob`) and comes back through `filled`, `copied` and
`written`, `cleaned`. The rules meant by number are those of DESIGN.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsa.io import holding
from dsa.io.cache import Arena, Frames, Rows
from dsa.io.jobs import CleanJob, FillJob, Step, Table, Tally, WriteJob
from dsa.io.layout import VOID_ROW
from dsa.io.policy_news import PolicyNews
from dsa.io.reach import Reach
from dsa.io.reads import Reads
from dsa.io.segments import Checks
from dsa.io.window import Batch, Kind, Piece, Window
from dsa.io.write_choice import Need, any_due, any_ordered, choose

MOST_HOOK_ANNOUNCEMENTS = 256
"""Look-ups of forward passes that are remembered without a step; older ones end."""


@dataclass
class Bookkeeping:
    """All bookkeeping of one state directory.

    Args:
        window: the announced batches.
        reach: how many batches beyond the one being stepped are brought in ahead of time.
        orders: a batch ahead may have written what it should take, and wait for that.
    """

    window: Window
    reach: Reach = field(default_factory=lambda: Reach(None))
    chunk_bytes: int = 4 << 20
    orders: bool = True
    tables: list[Table] = field(default_factory=list)
    arenas: list[Arena] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    step: Step | None = None
    draining: bool = False  # a checkpoint wants every dirty frame written
    frames_wanted: int = 0  # frames that somebody waits for: write what there is, however little (rule 9)
    give_back: Callable[[], bool] = lambda: False  # asked for frames when no batch is held any more
    frozen: bool = False  # nothing new is begun: the state is about to be replaced
    bringing_rests: bool = False  # next_fill found nothing to begin, and nobody has been told of anything since
    writing_rests: bool = False  # likewise next_write
    _news: PolicyNews = field(default_factory=PolicyNews)
    _writing: int = 0
    _cleaning: int = 0

    def __post_init__(self) -> None:
        self._reads = Reads(self.chunk_bytes)

    # Announcing.

    def announce(self, kind: Kind, rows_by_table: Mapping[int, Rows]) -> Batch:
        """Put a batch into the window; its rows are sorted, unique and in range."""
        self._news.tell_much()
        batch = self.window.new(kind, rows_by_table)
        self.window.add(batch)
        for piece in batch.pieces:
            table = self.tables[piece.table]
            self._news.known(table, batch.sequence, piece.rows)
            if table.arena.roomy and not (table.arena.frame_of[table.arena_table][piece.rows] < 0).any():
                piece.unframed = 0  # no frame is ever given up here: nothing to bring, and nothing to pin
        if kind is Kind.HOOK:
            for old in self.window.oldest_hooks(MOST_HOOK_ANNOUNCEMENTS):
                self.end(old, late=True)
        return batch

    def hand_out(self, sequence: int) -> None:
        """A lookahead's batch goes to the training loop."""
        self.window.hand_out(sequence)

    def end(self, batch: Batch, *, late: bool = False) -> None:
        """The batch will not be stepped: unpin what it holds. Its rows that are being filled stay until they are."""
        if self.window.get(batch.sequence) is batch:
            self.window.remove(batch, late=late)
            self._let_go(batch)

    def _let_go(self, batch: Batch) -> None:
        """Take the batch's pins off; its next use leaves the policy before that is asked for anything."""
        for piece in batch.pieces:
            self._unpin(piece)
            if batch.kind is not Kind.STEP:
                self._news.ended(self.tables[piece.table], batch.sequence, piece.rows)

    def _unpin(self, piece: Piece) -> None:
        if piece.held:
            self.tables[piece.table].arena.unpin(piece.frames)
            piece.forget_frames()

    # Bringing rows into frames.

    def next_new(self) -> FillJob | None:
        """The next of the queued jobs, where it needs no read: whoever waits for it may as well do it."""
        job = self._reads.queued()
        if job is None or not job.new:
            return None
        job.begun = True
        return job

    def next_fill(self) -> FillJob | None:
        """The next records to bring in: those of the running step first, then held batches in window order."""
        job = self._reads.queued()
        if job is None and not self.frozen and (self.step is None or self.step.batch.complete):
            self._hold_ahead()
            job = self._reads.queued()
        if job is not None:
            job.begun = True
        self.bringing_rests = job is None
        return job

    def _hold_ahead(self) -> None:
        """Hold batches in window order until the reach is used up, one cannot be held whole, or a job is due."""
        self.frames_wanted = 0
        for batch in holding.within_reach(self.window, self.reach, self.tables, self.arenas):
            for piece in batch.pieces:
                self._take(batch, piece)
                if piece.unframed:
                    self.frames_wanted = 0 if piece.waits else piece.unframed
                    return
            if self._reads.queued() is not None:
                return

    def _take(self, batch: Batch, piece: Piece) -> None:
        """Pin what is resident, take frames for the rest as far as there are any, and queue the fills.

        None are taken where the piece had better wait for writes.
        """
        if piece.unframed == 0:
            return
        table = self.tables[piece.table]
        arena = table.arena
        first = not piece.held
        piece.open()
        missing = arena.pin_resident(table.arena_table, piece.rows, piece.frames)
        piece.unframed = missing
        if first and (missing or batch.kind is not Kind.STEP):  # what was announced for a step has brought its rows
            arena.brings(table.arena_table, missing)
        if not missing:
            return
        self._news.tell()
        ahead = self.window.is_ahead(batch)
        if first and not ahead:
            arena.keep_ready()
        piece.waits = ahead and self.orders and holding.better_wait(piece, arena, self.tables)
        if piece.waits:
            return
        taken = arena.take(table.arena_table, piece.rows, piece.frames, missing)
        piece.unframed -= len(taken)
        if not len(taken):
            return
        batch.brought_rows += len(taken)
        batch.new_rows += self._reads.queue(table, piece.rows[taken], piece.frames[taken])

    @property
    def writes_wanted(self) -> bool:
        """Whether somebody waits for frames, or for writes that nobody has begun."""
        return self.frames_wanted > 0 or any_ordered(self.tables)

    @property
    def next_ticket(self) -> int:
        """Reads submitted from now on have this number or a later one."""
        return self._reads.next_ticket

    def filled(self, job: FillJob) -> None:
        """The job's frames hold their records (checked)."""
        job.table.arena.filled(job.frames)
        if job.new:
            self.tally.rows_new += len(job.rows)
        else:
            self.tally.rows_read += len(job.rows)
        self._reads.ended(job.ticket, self.tables)

    def failed(self, job: FillJob) -> None:
        """The job came to nothing: its frames stay barred until the state is replaced, and nobody waits for it."""
        self._reads.ended(job.ticket, self.tables)

    # Stepping.

    def begin(self, rows_by_table: Mapping[int, Rows], *, lasting: bool) -> Step:
        """Begin a step (`lasting`) or a read of the rows; a step uses up its announcements."""
        self._news.tell_much()
        batch = self.window.new(Kind.STEP, rows_by_table)
        used, late = self.window.used_by_step() if lasting else ([], [])
        sequences = frozenset(announced.sequence for announced in used)
        self.step = Step(batch, lasting, announced=bool(used or late), used=sequences)
        self._bring_pieces(batch, used)
        for announced in used:
            # What the step pinned stays pinned; what it does not touch becomes free to go.
            self._let_go(announced)
        if lasting:
            self.tally.judge(batch, late + used)
        return self.step

    def bring(self) -> bool:
        """Take frames for the running step's rows, from the youngest held batches if need be; whether all have one."""
        step = self._running()
        self._bring_pieces(step.batch)
        while not step.batch.complete and (self._release_youngest() or self.give_back()):
            self._bring_pieces(step.batch)
        self.frames_wanted = next((piece.unframed for piece in step.batch.pieces if piece.unframed), 0)
        return not self.frames_wanted

    def _bring_pieces(self, batch: Batch, ended: Sequence[Batch] = ()) -> None:
        # One piece after the other: a later piece never pins what an earlier one still waits for (rule 9).
        for piece in batch.pieces:
            if piece.remaining:
                if any(piece.take_over(other) for announced in ended for other in announced.pieces):
                    continue
                self._take(batch, piece)
                if piece.unframed:
                    return

    def _release_youngest(self) -> bool:
        """Make the youngest held batch known again; False where none is held."""
        for batch in reversed(list(self.window.in_order())):
            if batch.held:
                for piece in batch.pieces:
                    self._unpin(piece)
                return True
        return False

    def ready(self, piece: Piece) -> NDArray[np.int64] | None:
        """Positions of the piece's rows that can be worked on now: all that remain, or a part where no more fit.

        None: wait. A part is worked on only where the step itself pins every frame of the arena.
        """
        step = self._running()
        arena = self.tables[piece.table].arena
        if piece.unframed and arena.pinned < arena.n_frames:
            return None
        if arena.filling(piece.frames):
            return None
        positions = np.flatnonzero(piece.frames >= 0)
        if not len(positions):
            return None
        step.in_parts = step.in_parts or piece.unframed > 0
        return positions

    def lease_ready(self) -> dict[int, tuple[NDArray[np.int64], Frames]]:
        """Lease those of the running step's pieces that are wholly in frames; by table, as `ready` and `lease` say."""
        found = {}
        for piece in self._running().batch.pieces:
            if piece.unframed:
                break  # what comes after it pins nothing yet (rule 9)
            if not self.tables[piece.table].arena.filling(piece.frames):
                positions = np.arange(len(piece.rows))
                found[piece.table] = positions, self.lease(piece, positions)
        return found

    def lease(self, piece: Piece, positions: NDArray[np.int64]) -> Frames:
        """Give these rows of the piece to the step; their frames. They count as dirty from here on."""
        step = self._running()
        table = self.tables[piece.table]
        whole = len(positions) == len(piece.rows)
        frames: Frames = piece.frames.copy() if whole else piece.frames[positions]
        self.lease_frames(table, piece.rows if whole else piece.rows[positions], frames)
        step.leased = True
        return frames

    def lease_frames(self, table: Table, rows: Rows, frames: Frames) -> None:
        """Give frames (pinned, filled) that hold these rows to the step."""
        table.arena.lease(table.arena_table, frames)
        self._news.touched(table, rows, frames)

    def commit(self, piece: Piece, positions: NDArray[np.int64]) -> None:
        """The step has updated these rows."""
        table = self.tables[piece.table]
        frames = piece.frames[positions]
        if self._running().lasting:
            table.arena.end_step(frames)
        else:
            table.arena.unpin(frames)
        piece.finish(positions)

    def end_step(self) -> None:
        """The step is over, whole or not: nothing of it stays pinned."""
        step = self._running()
        self.step = None
        self.frames_wanted = 0
        for piece in step.batch.pieces:
            if piece.held:
                self.tables[piece.table].arena.end_step(piece.frames)
                piece.forget_frames()
        if step.lasting:
            self.tally.steps += 1
            self.tally.misses += step.batch.brought_rows

    def _running(self) -> Step:
        if self.step is None:
            raise RuntimeError("no step is running: begin() comes first")
        return self.step

    # Who has something to do.

    def bring_roused(self) -> bool:
        """Whether `next_fill` would find something now that had found nothing when last asked.

        Says yes once; whoever asks sees to it that it is called.
        """
        if not self.bringing_rests or not self._may_bring():
            return False
        self.bringing_rests = False
        return True

    def write_roused(self, dirty_share: float | None) -> bool:
        """Likewise for `next_write`."""
        if not self.writing_rests or not self._may_write(dirty_share):
            return False
        self.writing_rests = False
        return True

    def _may_bring(self) -> bool:
        if self._reads.queued() is not None:
            return True
        if self.frozen or not (self.step is None or self.step.batch.complete):
            return False
        return holding.may_bring(self.window, self.reach, self.tables, self.arenas)

    def _may_write(self, dirty_share: float | None) -> bool:
        return not self.frozen and any_due(self.tables, self._need(dirty_share))

    def _need(self, dirty_share: float | None, idle: bool = False) -> Need:
        return Need(self.draining, self.frames_wanted, dirty_share, idle)

    # Writing behind.

    def next_write(self, dirty_share: float | None, *, idle: bool = False) -> WriteJob | None:
        """A segment's worth of dirty frames, if it is time to write; where all is `idle`, any whole segment.

        It is time when frames are wanted, when a checkpoint drains them all, when a batch ahead has ordered some, and
        when more than the share of the cache is dirty. Without one (None) it is time when there are whole segments of
        them, and few others to give up.
        """
        job = None if self.frozen else self._next_write(self._need(dirty_share, idle))
        self.writing_rests = job is None
        return job

    def _next_write(self, need: Need) -> WriteJob | None:
        chosen = choose(self.tables, need, self._news)
        if chosen is None:
            return None
        table, frames = chosen
        segment = table.segments.allocate(cleaning=False)
        self._writing += 1
        rows, versions = table.arena.row_of[frames], table.arena.version[frames]
        return WriteJob(table, segment, frames, rows, versions, np.zeros(len(frames), np.uint32), need.draining)

    def copied(self, job: WriteJob) -> None:
        """The frames were copied to the segment's buffer: what a lease may have overlapped is void (rule 7)."""
        torn = job.table.arena.version[job.frames] != job.versions
        job.rows = np.where(torn, VOID_ROW, job.rows)

    def written(self, job: WriteJob) -> None:
        """The segment is in the file: the index follows, and the frames that nobody changed since are clean."""
        job.table.segments.written(job.segment, job.rows, job.checks, self._reads.next_ticket, None)
        self._reads.settle(self.tables)
        job.table.arena.written(job.table.arena_table, job.frames, job.versions)
        self._writing -= 1
        self.tally.rows_written += int(np.count_nonzero(job.rows >= 0))

    def dirty_frames(self) -> int:
        """Frames that hold what the log does not."""
        return sum(sum(arena.dirty) for arena in self.arenas)

    # Cleaning.

    def next_clean(self, table: Table) -> CleanJob | None:
        """Segments of the table to clean, where the log has grown to its limit."""
        if self.frozen or not table.segments.wants_cleaning():
            return None
        victims = table.segments.choose_victims()
        if not victims:
            return None
        target = table.segments.allocate(cleaning=True)
        self._cleaning += 1
        return self._reads.clean(table, victims, target)

    def cleaned(self, job: CleanJob, rows: Rows, slots: NDArray[np.int64], checks: Checks) -> None:
        """The live records of the victims are in the target; the index follows where it still says `slots` (rule 4)."""
        segments = job.table.segments
        self._reads.ended(job.ticket, self.tables)
        ticket = self._reads.next_ticket
        segments.written(job.target, rows, checks, ticket, slots)
        for victim in job.victims:
            segments.abandon(victim, ticket)
        self._reads.settle(self.tables)
        self._cleaning -= 1
        self.tally.segments_cleaned += len(job.victims)
        self.tally.rows_cleaned += len(rows)

    def still_live(self, table: Table, rows: Rows, segment: int) -> NDArray[np.bool_]:
        """Which of a segment's records are the current ones of their rows."""
        return table.segments.still_live(rows, segment)

    # Standing still.

    def quiet(self) -> bool:
        """Whether nothing is in flight or about to be."""
        return not (self._reads or self._writing or self._cleaning)

    def writes_in_flight(self) -> bool:
        """Whether segments are being written or cleaned."""
        return bool(self._writing or self._cleaning)

    def forget_window(self) -> None:
        """End every announced batch; what is queued or being filled for them goes on, and its frames stay barred."""
        for batch in self.window.clear():
            self._let_go(batch)

    def go_on_with(self, tables: list[Table], arenas: list[Arena]) -> None:
        """Replace tables and arenas; nothing may be in flight."""
        self.forget_window()  # any thread may have announced since the window was forgotten last
        self._news.forget()
        self.tables, self.arenas = tables, arenas

    def reset(self) -> None:
        """Forget announcements and what is in frames; nothing may be in flight."""
        self.go_on_with(self.tables, self.arenas)
        self.step = None
        for arena in self.arenas:
            arena.reset()

    def retain(self, table: Table, retained: NDArray[np.bool_]) -> None:
        """Set which of the table's segments generations refer to."""
        table.segments.retain(retained, self._reads.next_ticket)
        self._reads.settle(self.tables)
