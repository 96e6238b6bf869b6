"""A simulated disk and training loop around the real bookkeeping: each move is a method, completions come in any order.

A record is four words: row, version, version once more, nothing. An update raises the two versions one after the
other, a copy for writing takes them one after the other: so a torn record shows. After each move `check` compares
frames, index and disk with the truth, and recounts every counter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsa.io.bookkeeping import Bookkeeping
from dsa.io.cache import Arena
from dsa.io.eviction import DIRTY, FILLING, FREE, LEASED, WRITING
from dsa.io.jobs import CleanJob, FillJob, Table, WriteJob
from dsa.io.layout import RecordLayout, SegmentLayout
from dsa.io.reach import Reach
from dsa.io.segments import CLEANING, FULL, LIMBO, Segments
from dsa.io.segments import FREE as FREE_SEGMENT
from dsa.io.window import Kind, Piece, Window

SLOTS = 3
RECORD_BYTES = 32
FIRST, SECOND = 1, 2  # the words of a record that hold its version


# How often each move is made, among all.
EVERYTHING = {
    "announce": 2, "step": 3, "work": 8, "fill": 3, "filled": 2, "write": 3, "moves": 6, "clean": 2,
    "cleans": 3, "hand": 1, "end": 1, "keep": 1, "interrupt": 1, "drain": 1,
}  # fmt: skip
MOSTLY_THE_LOG = {
    "announce": 1, "step": 2, "work": 6, "fill": 3, "filled": 1, "write": 3, "moves": 6, "clean": 3,
    "cleans": 3, "hand": 1, "end": 1,
}  # fmt: skip


class Wrong(AssertionError):
    """Something is not as the rules promise."""


def expect(holds: object, what: str) -> None:
    if not holds:
        raise Wrong(what)


@dataclass
class Copying:
    """A segment being written: filled in two halves, then with the device."""

    job: WriteJob
    records: np.ndarray[Any, Any]
    stage: int = 0


@dataclass
class Cleaning:
    """A cleaning: victims are read one after the other, then the target is with the device."""

    job: CleanJob
    rows: list[int]
    slots: list[int]
    checks: list[int]
    records: list[tuple[int, int, int]]
    done: int = 0


@dataclass
class Leased:
    piece: Piece
    positions: np.ndarray[Any, Any]
    frames: np.ndarray[Any, Any]
    changed: int = 0  # 0: nothing, 1: first word, 2: both


class Walk:
    """Tables that share one arena, and one with an arena of its own.

    Args:
        n_rows: rows of each table; the last one has frames of its own.
        n_frames: of both arenas.
    """

    def __init__(
        self,
        n_rows: tuple[int, ...] = (9, 5, 4),
        n_frames: tuple[int, int] = (6, 3),
        *,
        held_batches: int | None = None,
        known_batches: int = 5,
        known_rows: int = 30,
        dirty_share: float | None = 0.25,
        rows_per_fill: int = 2,
    ) -> None:
        self.window = Window(known_batches, known_rows)
        reach, orders = Reach(held_batches), dirty_share is None
        self.books = Bookkeeping(self.window, reach, rows_per_fill * RECORD_BYTES, orders)
        self.known_rows, self.known_batches, self.dirty_share = known_rows, known_batches, dirty_share
        arenas = [Arena(np.zeros((n, RECORD_BYTES), np.uint8)) for n in n_frames]
        record = RecordLayout(4, "float32")
        layout = SegmentLayout(RECORD_BYTES, SLOTS, 4, 8192)
        tables = []
        for number, n in enumerate(n_rows):
            arena = arenas[number == len(n_rows) - 1 > 0]
            segments = Segments(layout, np.full(n, -1, np.int32), np.zeros(n, np.uint32))
            frame_of = np.full(n, -1, np.int32)
            tables.append(Table(number, f"t{number}", n, record, arena, arena.add_table(frame_of), segments))
        self.books.tables, self.books.arenas = tables, arenas
        self.truth = [[0] * n for n in n_rows]
        self.disk: dict[tuple[int, int], list[tuple[int, int, int] | None]] = {}
        self.fills: list[FillJob] = []
        self.writes: list[Copying] = []
        self.cleanings: list[Cleaning] = []
        self.leased: Leased | None = None
        self.tickets: list[int] = []
        self.kept: list[dict[tuple[int, int], tuple[int, int, int]]] = []  # what generations refer to
        self.kept_index: list[list[np.ndarray[Any, Any]]] = []
        self.log: list[str] = []
        self._before = [self._look(arena) for arena in arenas]

    def _look(self, arena: Arena) -> tuple[Any, Any, Any]:
        return arena.row_of.copy(), arena.table_of.copy(), arena.flags.copy()

    def say(self, *what: object) -> None:
        self.log.append(" ".join(map(str, what)))

    # The training thread.

    @staticmethod
    def _rows(rows_by_table: dict[int, list[int]]) -> dict[int, np.ndarray[Any, Any]]:
        return {table: np.array(sorted(set(rows)), np.int64) for table, rows in sorted(rows_by_table.items())}

    def announce(self, kind: Kind, rows_by_table: dict[int, list[int]]) -> int:
        ticket = self.books.announce(kind, self._rows(rows_by_table)).sequence
        self.say("announce", kind.value, ticket, rows_by_table)
        if kind is Kind.AHEAD:
            self.tickets.append(ticket)
        self.move_on()
        return ticket

    def hand_out(self, ticket: int) -> None:
        self.say("hand out", ticket)
        self.books.hand_out(ticket)
        self.move_on()

    def move_on(self) -> None:
        """Training has moved on: a task that rests and is not told of it would find nothing to do."""
        self.check()
        books = self.books
        books.bring_roused()
        books.write_roused(self.dirty_share)
        if books.bringing_rests:
            expect(not self.next_fill(), "there was something to bring in, and nobody was told")
        if books.writing_rests:
            expect(not self.next_write(), "there was something to write, and nobody was told")

    def _settled(self) -> None:
        # Whoever has brought or written something tells the tasks of it, where they would find something to do.
        self.move_on()

    def end(self, ticket: int) -> None:
        self.say("end", ticket)
        if ticket in self.tickets:
            self.tickets.remove(ticket)
        batch = self.window.get(ticket)
        if batch is not None:
            self.books.end(batch, late=batch.handed_out)
        self.check()

    def begin(self, rows_by_table: dict[int, list[int]], *, lasting: bool = True) -> None:
        self.say("begin", rows_by_table, "step" if lasting else "read")
        self.books.begin(self._rows(rows_by_table), lasting=lasting)
        self.check()

    def work(self) -> bool:
        """One move of the thread that steps; False where it has to wait."""
        step = self.books.step
        if step is None:
            return False
        if self.leased is not None:
            self._update()
            return True
        left = [piece for piece in step.batch.pieces if piece.remaining]
        if not left:
            self.say("end of step")
            self.books.end_step()
            self.move_on()
            return True
        self.books.bring()
        self.check()
        job = self.books.next_new()
        if job is not None:
            self.say("zero", job.rows)
            self._fill(job)
            return True
        positions = self.books.ready(left[0])
        if positions is None:
            return False
        frames = left[0].frames[positions]
        if step.lasting:
            self.books.lease(left[0], positions)
        self.say("lease", left[0].table, left[0].rows[positions], "frames", frames)
        for frame, row in zip(frames, left[0].rows[positions], strict=True):
            self._expect_record(self.books.tables[left[0].table], int(frame), int(row), "is leased")
        self.leased = Leased(left[0], positions, frames)
        self.check()
        return True

    def _expect_record(self, table: Table, frame: int, row: int, what: str) -> None:
        version = self.truth[table.number][row]
        found = tuple(table.arena.words[frame].tolist()[:3])
        held = int(table.arena.row_of[frame])
        expect(held == row, f"frame {frame} {what} for row {row}, but holds row {held}")
        wanted = (row, version, version)
        never = found == (0, 0, 0) and version == 0
        expect(found == wanted or never, f"row {row} {what} with {found}, the truth is {wanted}")

    def _update(self) -> None:
        leased = self.leased
        if leased is None:
            return
        table, step = self.books.tables[leased.piece.table], self.books.step
        rows = leased.piece.rows[leased.positions]
        if step is not None and step.lasting and leased.changed < 2:
            leased.changed += 1
            table.arena.words[leased.frames, 0] = rows
            table.arena.words[leased.frames, leased.changed] += np.uint64(1)
            if leased.changed == 2:
                for row in rows:
                    self.truth[table.number][int(row)] += 1
            self.say("update", leased.changed, "of 2, rows", rows)
        else:
            self.books.commit(leased.piece, leased.positions)
            self.leased = None
            self.say("commit", rows)
        self.check()

    def interrupt(self) -> None:
        """The step ends early: not in the middle of an update, whose numbers nobody could use any more."""
        if self.books.step is None or (self.leased is not None and self.leased.changed == 1):
            return
        self.say("interrupt")
        self.leased = None
        self.books.end_step()
        self.move_on()

    # The loop.

    def next_fill(self) -> bool:
        job = self.books.next_fill()
        if job is not None:
            self.say("fill begins: table", job.table.number, job.rows, "slots", job.slots, "frames", job.frames)
            self.fills.append(job)
        self.check()
        return job is not None

    def fill_ends(self, which: int) -> None:
        if self.fills:
            job = self.fills.pop(which % len(self.fills))
            self.say("filled", job.rows)
            self._fill(job)

    def _fill(self, job: FillJob) -> None:
        table = job.table
        for i, (row, frame) in enumerate(zip(job.rows, job.frames, strict=True)):
            if job.slots[i] < 0:
                table.arena.words[frame] = 0
                continue
            record = self._record(table, int(job.slots[i]))
            expect(record is not None and record[0] == row, f"a read of row {row} found {record}")
            expect(record and record[1] == record[2] == job.checks[i], f"row {row}: {record}, check {job.checks[i]}")
            table.arena.words[frame][:3] = record
        self.books.filled(job)
        self._settled()
        self.check()

    def _record(self, table: Table, slot: int) -> tuple[int, int, int] | None:
        records = self.disk.get((table.number, slot // SLOTS), [])
        return records[slot % SLOTS] if slot % SLOTS < len(records) else None

    def next_write(self) -> bool:
        job = self.books.next_write(self.dirty_share)
        if job is not None:
            self.say("write begins: table", job.table.number, "segment", job.segment, job.rows)
            self._expect_unused(job.table, job.segment)
            self.writes.append(Copying(job, np.zeros((len(job.frames), 3), np.uint64)))
        self.check()
        return job is not None

    def write_moves(self, which: int) -> None:
        """The next stage of a write: half a copy, the other half, the file."""
        if not self.writes:
            return
        write = self.writes[which % len(self.writes)]
        job, key = write.job, (write.job.table.number, write.job.segment)
        words = job.table.arena.words[job.frames]
        self.say("write of segment", job.segment, "stage", write.stage)
        if write.stage == 0:
            write.records[:, 0] = job.rows
            write.records[:, FIRST] = words[:, FIRST]
        elif write.stage == 1:
            write.records[:, SECOND] = words[:, SECOND]
            job.checks[:] = write.records[:, SECOND]
            self.books.copied(job)
            self.disk[key] = [None] * SLOTS  # from here on the device may have any part of it
        else:
            void = job.rows < 0
            self.disk[key] = [
                None if gone else tuple(map(int, record))  # type: ignore[misc]
                for gone, record in zip(void, write.records, strict=True)
            ]
            self.writes.remove(write)
            self.books.written(job)
            self._settled()
        write.stage += 1
        self.check()

    def next_clean(self, table_number: int) -> bool:
        job = self.books.next_clean(self.books.tables[table_number])
        if job is not None:
            self.say("clean begins: table", table_number, "victims", job.victims, "target", job.target)
            self._expect_unused(job.table, job.target)
            self.cleanings.append(Cleaning(job, [], [], [], []))
        self.check()
        return job is not None

    def clean_moves(self, which: int) -> None:
        """The next stage of a cleaning: one victim's records, or the target's write."""
        if not self.cleanings:
            return
        cleaning = self.cleanings[which % len(self.cleanings)]
        job, table = cleaning.job, cleaning.job.table
        self.say("clean to", job.target, "stage", cleaning.done)
        if cleaning.done < len(job.victims):
            victim = job.victims[cleaning.done]
            held = self.disk[table.number, victim]
            named = np.array([record[0] if record else -1 for record in held], np.int64)
            for place in np.flatnonzero(self.books.still_live(table, named, victim)):
                record = held[place]
                if record is not None:
                    slots, checks = table.segments.locate(named[place : place + 1])
                    expect(record[2] == checks[0], f"cleaning found {record}, check {checks[0]}")
                    cleaning.rows.append(record[0])
                    cleaning.slots.append(int(slots[0]))
                    cleaning.checks.append(int(checks[0]))
                    cleaning.records.append(record)
            cleaning.done += 1
            if cleaning.done == len(job.victims):
                self.disk[table.number, job.target] = [None] * SLOTS
        else:
            self.disk[table.number, job.target] = list(cleaning.records)
            self.cleanings.remove(cleaning)
            rows, slots = np.array(cleaning.rows, np.int64), np.array(cleaning.slots, np.int64)
            self.books.cleaned(job, rows, slots, np.array(cleaning.checks, np.uint32))
            self._settled()
        self.check()

    def _expect_unused(self, table: Table, segment: int) -> None:
        """A segment that is about to be written holds nothing that anybody may still want (rule 5)."""
        reading = [job for job in self.fills if job.table is table and (job.slots // SLOTS == segment).any()]
        expect(not reading, f"segment {segment} is reused under a read")
        cleaned = [c for c in self.cleanings if c.job.table is table and segment in c.job.victims]
        expect(not cleaned, f"segment {segment} is reused while it is being cleaned")
        expect(not table.segments.retained[segment], f"segment {segment} is reused, a generation refers to it")
        expect(not (table.segments.slots // SLOTS == segment).any(), f"segment {segment} is reused, it holds records")

    # Generations.

    def keep_generation(self, most: int = 2) -> None:
        """The index as it is becomes a generation; at most so many are kept, and segments retained for them."""
        kept = {}
        for table in self.books.tables:
            for row in np.flatnonzero(table.segments.slots >= 0):
                record = self._record(table, int(table.segments.slots[row]))
                expect(record is not None, f"row {row} has no record")
                kept[table.number, int(table.segments.slots[row])] = record or (0, 0, 0)
        self.kept = [*self.kept, kept][-most:] if most else []
        self.say("keep", len(self.kept), "generations")
        for table in self.books.tables:
            retained = np.zeros(len(table.segments), np.bool_)
            for generation in self.kept:
                for number, slot in generation:
                    if number == table.number:
                        retained[slot // SLOTS] = True
            self.books.retain(table, retained)
        self.check()

    # What must hold.

    def check(self) -> None:
        for i, arena in enumerate(self.books.arenas):
            self._check_arena(arena, self._before[i])
            self._before[i] = self._look(arena)
        for table in self.books.tables:
            self._check_index(table)
        for generation in self.kept:
            for (number, slot), record in generation.items():
                found = self._record(self.books.tables[number], slot)
                expect(found == record, f"a generation refers to slot {slot} with {record}, now {found}")
        known = sum(len(piece.rows) for batch in self.window.in_order() for piece in batch.pieces)
        expect(known == self.window.known_rows, f"{known} rows are known, the window counts {self.window.known_rows}")

    def _fills_due(self) -> list[FillJob]:
        """Fills that are under way, and those that nobody has begun."""
        jobs = [job for job in self.books._reads._jobs.values() if isinstance(job, FillJob)]
        begun = {job.ticket for job in jobs if job.begun}
        expect(begun == {job.ticket for job in self.fills}, f"begun are {begun}")
        return jobs

    def _check_arena(self, arena: Arena, before: tuple[Any, Any, Any]) -> None:
        pins = np.zeros(arena.n_frames, np.int64)
        batches = [*self.window.in_order(), *([self.books.step.batch] if self.books.step else [])]
        for batch in batches:
            for piece in batch.pieces:
                if self.books.tables[piece.table].arena is arena:
                    np.add.at(pins, piece.frames[piece.frames >= 0], 1)
        expect((pins == arena.pins).all(), f"pins are {arena.pins}, the pieces hold {pins}")
        expect(arena.pinned == np.count_nonzero(pins), f"{arena.pinned} pinned, counted {np.count_nonzero(pins)}")
        for table in range(len(arena.frame_of)):
            idle = np.count_nonzero((arena.flags & DIRTY > 0) & (arena.pins == 0) & (arena.table_of == table))
            expect(idle == arena.idle_dirty[table], f"{idle} dirty without a pin, counted {arena.idle_dirty}")
        if not batches:
            expect(not arena.pins.any(), f"nothing is announced, no step runs, pins are {arena.pins}")
        flags = arena.flags
        changed = (arena.row_of != before[0]) | (arena.table_of != before[1])
        given_up = changed & (before[2] & (DIRTY | WRITING | LEASED) > 0)
        expect(not given_up.any(), f"frames {np.flatnonzero(given_up)} were given up with flags {before[2][given_up]}")
        filling = [frame for job in self._fills_due() for frame in self._frames(job, arena)]
        writing = [frame for write in self.writes for frame in self._frames(write.job, arena)]
        expect(len(set(filling)) == len(filling), f"a frame is filled by two reads: {sorted(filling)}")
        expect(len(set(writing)) == len(writing), f"a row is written twice at once: {sorted(writing)}")
        expect(set(np.flatnonzero(flags & FILLING)) == set(filling), f"filling {filling}, flags {flags}")
        expect(set(np.flatnonzero(flags & WRITING)) == set(writing), f"writing {writing}, flags {flags}")
        for job in self._fills_due():
            if job.table.arena is arena:
                expect((arena.row_of[job.frames] == job.rows).all(), f"a read of {job.rows} lands in another row")
        for number, table in enumerate(t for t in self.books.tables if t.arena is arena):
            own = (arena.table_of == number) & (flags & FREE == 0)
            dirty = np.count_nonzero(own & (flags & DIRTY > 0))
            expect(arena.dirty[number] == dirty, f"{arena.dirty[number]} dirty frames, counted {dirty}")
            resident = np.flatnonzero(arena.frame_of[number] >= 0)
            expect(len(resident) == np.count_nonzero(own), f"{np.count_nonzero(own)} frames, {len(resident)} rows")
            for row in resident:
                frame = int(arena.frame_of[number][row])
                expect(arena.row_of[frame] == row, f"row {row} says frame {frame}, which holds {arena.row_of[frame]}")
                if not flags[frame] & (FILLING | LEASED):
                    self._expect_record(table, frame, int(row), "is in its frame")

    @staticmethod
    def _frames(job: FillJob | WriteJob, arena: Arena) -> list[int]:
        return [int(frame) for frame in job.frames] if job.table.arena is arena else []

    def _check_index(self, table: Table) -> None:
        segments, arena = table.segments, table.arena
        slots, flags = segments.slots.tolist(), arena.flags.tolist()
        live = [0] * len(segments)
        for slot in slots:
            if slot >= 0:
                live[slot // SLOTS] += 1
        expect(sum(live) == segments.live_records, f"{segments.live_records} records, counted {sum(live)}")
        expect(live == segments.live.tolist(), f"live counters {segments.live}, counted {live}")
        empty = (segments.state == FREE_SEGMENT) | (segments.state == LIMBO)
        expect(not (segments.live[empty] > 0).any(), "a free segment holds records")
        expect(not segments.retained[empty].any(), "a free segment is retained")
        for job in self._fills_due():
            read = job.slots[job.slots >= 0] // SLOTS if job.table is table else ()
            expect(all(segments.state[n] != FREE_SEGMENT for n in read), f"one of {read} is free and being read")
        victims = {victim for c in self.cleanings if c.job.table is table for victim in c.job.victims}
        expect(victims == set(np.flatnonzero(segments.state == CLEANING)), f"being cleaned: {victims}")
        dead = (segments.state == FULL) & (segments.live == 0) & ~segments.retained
        expect(not dead.any(), f"segments {np.flatnonzero(dead)} hold nothing and are not free")
        frame_of, checks = arena.frame_of[table.arena_table].tolist(), segments.checks.tolist()
        for row, version in enumerate(self.truth[table.number]):
            slot, frame = slots[row], frame_of[row]
            dirty = frame >= 0 and flags[frame] & DIRTY
            if slot < 0:
                expect(dirty or version == 0, f"row {row} is at version {version}, nowhere to be found")
                continue
            record = self._record(table, slot)
            expect(record is not None and record[0] == row, f"the index has row {row} at slot {slot}: {record}")
            expect(record and record[FIRST] == record[SECOND], f"row {row} on disk is torn: {record}")
            current = record and record[SECOND] == version
            expect(dirty or current, f"row {row} is lost: {record} on disk, no dirty frame, the truth is {version}")
            expect(record and checks[row] == record[SECOND], f"row {row} has another check")

    # Driving it.

    def random_rows(self, rnd: random.Random, most: int = 5) -> dict[int, list[int]]:
        rows: dict[int, list[int]] = {}
        for table in self.books.tables:
            if rnd.random() < 0.6:
                rows[table.number] = [rnd.randrange(table.n_rows) for _ in range(rnd.randrange(1, most))]
        return rows

    def step_rows(self, rnd: random.Random) -> dict[int, list[int]]:
        """Any rows; or those that were announced for it, some of them or all, as it is in training."""
        rows = self.random_rows(rnd, 8)
        first = next(self.window.in_order(), None)
        if first is None or rnd.random() < 0.5:
            return rows
        announced = {piece.table: piece.rows.tolist() for piece in first.pieces}
        return announced if rnd.random() < 0.5 else {**rows, **dict(list(announced.items())[:1])}

    def random_move(self, rnd: random.Random, moves: dict[str, int]) -> None:
        (move,) = rnd.choices(list(moves), list(moves.values()))
        if move == "announce":
            self.announce(rnd.choice([Kind.ANNOUNCED, Kind.AHEAD, Kind.AHEAD, Kind.HOOK]), self.random_rows(rnd))
        elif move == "step" and self.books.step is None and not self.books.draining:
            self.begin(self.step_rows(rnd), lasting=rnd.random() < 0.8)
        elif move == "work":
            for _ in range(rnd.randrange(1, 4)):
                self.work()
        elif move == "fill":
            self.next_fill()
        elif move == "filled":
            self.fill_ends(rnd.randrange(99))
        elif move == "write":
            self.next_write()
        elif move == "moves":
            self.write_moves(rnd.randrange(99))
        elif move == "clean":
            self.next_clean(rnd.randrange(len(self.books.tables)))
        elif move == "cleans":
            self.clean_moves(rnd.randrange(99))
        elif move in ("hand", "end") and self.tickets:
            ticket = self.tickets[0 if move == "hand" else rnd.randrange(len(self.tickets))]
            (self.hand_out if move == "hand" else self.end)(ticket)
        elif move == "keep" and rnd.random() < 0.5:
            self.keep_generation(rnd.randrange(3))
        elif move == "interrupt" and rnd.random() < 0.2:
            self.interrupt()
        elif move == "drain" and self.books.step is None:
            self.books.draining = rnd.random() < 0.3

    def clean_eagerly(self) -> None:
        """Let the log be cleaned whenever there is something to gain, not only when it has grown."""
        for table in self.books.tables:
            table.segments.wants_cleaning = lambda: True  # type: ignore[method-assign]

    def settle(self, rounds: int = 400) -> None:
        """Let everything go on, fairly, until the step is over and nothing is in flight.

        Raises:
            Wrong: that does not happen: somebody waits in a circle.
        """
        for _ in range(rounds):
            self.work()
            self.next_fill()
            self.fill_ends(0)
            self.next_write()
            self.write_moves(0)
            self.clean_moves(0)
            if self.books.step is None and not self.next_fill() and not self.next_write() and self.books.quiet():
                return
        expect(self.books.step is None, "the step waits for ever")
        expect(False, f"no end: {len(self.fills)} reads, {len(self.writes)} writes, {len(self.cleanings)} cleanings")


def walk(seed: int, moves: int, **options: Any) -> Walk:
    """A random walk, from which everything comes to rest in the end."""
    rnd = random.Random(seed)
    mostly_the_log = seed % 3 == 2
    if mostly_the_log:
        options = {"n_rows": (14,), "n_frames": (6, 1), "dirty_share": 0.0, **options}
    world = Walk(**options)
    if seed % 3:
        world.clean_eagerly()
    try:
        for _ in range(moves):
            world.random_move(rnd, MOSTLY_THE_LOG if mostly_the_log else EVERYTHING)
        world.books.draining = False
        world.settle()
        for ticket in list(world.tickets):
            world.end(ticket)
        for batch in list(world.window.in_order()):
            world.end(batch.sequence)
        world.books.draining = True
        world.settle()
        expect(world.books.dirty_frames() == 0, "frames are dirty after a drain")
        expect(not any(arena.pinned for arena in world.books.arenas), "frames are pinned and nobody holds them")
    except Wrong as error:
        raise Wrong(f"seed {seed}, move {len(world.log)}: {error}; last: {world.log[-6:]}") from error
    return world
