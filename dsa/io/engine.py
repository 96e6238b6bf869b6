"""The engine's synchronous face: announce, step, read, checkpoint, go back, close.

What an optimizer holds. The running half (pipeline.py) does not refer to it, so that it ends when nobody holds it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsa.config import IOConfig
from dsa.errors import ClosedError, ConfigError, MismatchError, StateExistsError, UsageError
from dsa.io.backends import open_backend
from dsa.io.cache import FRAME_OVERHEAD_BYTES, Frames, Rows
from dsa.io.devices import open_device
from dsa.io.directory import Directory
from dsa.io.disk_space import warn_of_place
from dsa.io.jobs import Step
from dsa.io.manifest import Manifest, TableEntry
from dsa.io.pipeline import Pipeline
from dsa.io.staging import Staging
from dsa.io.staging import Update as OnDevice
from dsa.io.statistics import Statistics
from dsa.io.tables import TableSpec, check_match, entries_for, lay_out
from dsa.io.window import Kind, Piece

_log = logging.getLogger("dsa")
Update = Callable[[int, NDArray[np.int64], Frames], None]
Updated = Sequence[tuple[Piece, NDArray[np.int64]]]


class Engine:
    """The state of all tables of one state directory.

    Args:
        state_dir: the directory; made where it is missing.
        specs: the tables.
        cache_bytes: RAM for frames, their bookkeeping included.
        existing: "load" | "resume" | "discard": what becomes of state that is there already.
        backend: a backend's name, or "auto".
        keep_generations: how many generations handed out stay loadable; None: all.

    Raises:
        DsaError: see DiskSparseAdam; what was opened is closed again.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        specs: Sequence[TableSpec],
        *,
        cache_bytes: int,
        existing: str,
        backend: str,
        keep_generations: int | None,
        config: IOConfig,
    ) -> None:
        if existing not in ("load", "resume", "discard"):
            raise ConfigError(f'existing must be "load", "resume" or "discard", got {existing!r}')
        directory = Directory(state_dir)
        opened = open_backend(backend, config)
        try:
            directory.lock()
            self._pipeline = Pipeline(directory, opened, config, keep_generations)
        except BaseException:
            directory.unlock()
            opened.shut_down(1.0)
            raise
        self.cache_bytes = cache_bytes
        self.closed = False
        self.decided = False  # whether it is settled which state the tables have
        self.steps_since_commit = 0
        self._all_claimed = False  # every table on disk has a parameter
        self._specs: list[TableSpec] = []
        self._entries: list[TableEntry] = []
        self._public = threading.RLock()
        self._stagings: dict[torch.device, Staging] = {}
        self._staging_of: dict[int, Staging] = {}  # by table, those that are staged
        self._device_of: dict[int, torch.device] = {}
        self._update_s = 0.0
        self._commit_s = 0.0
        self.stage: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
        try:
            self._open(specs, existing)
        except BaseException:
            self._pipeline.stop()
            raise
        self._finalizer = weakref.finalize(self, Pipeline.end_without_close, self._pipeline)

    # Opening.

    def _open(self, specs: Sequence[TableSpec], existing: str) -> None:
        pipeline = self._pipeline
        generations = pipeline.run(pipeline.open_generations(existing))
        self._specs = list(specs)
        self._lay_out()
        warn_of_place(pipeline.directory.path, self._entries, pipeline.keep_generations, stacklevel=5)
        if generations.manifest is None:
            if existing == "resume":
                _log.warning("%s holds no state to resume: starting anew", pipeline.directory.path)
            pipeline.run(generations.create(self._entries))
            self._adopt(0)
        elif existing == "resume":
            self._adopt(generations.numbers()[-1])

    def _manifest(self) -> Manifest:
        manifest = self._pipeline.generations and self._pipeline.generations.manifest
        if not manifest:
            raise RuntimeError("the state directory has no manifest yet")
        return manifest

    def _lay_out(self) -> None:
        """Make arenas and tables for the specs; the logs of new ones are not open yet."""
        books, generations = self._pipeline.books, self._pipeline.generations
        manifest = generations.manifest if generations is not None else None
        config = self._pipeline.config
        self._entries = entries_for(
            self._specs, manifest, config.segment_bytes, self.cache_bytes, grow=config.grow_tables
        )
        tables, arenas = lay_out(self._specs, self._entries, self.cache_bytes, books.tables)
        with self._pipeline.access:
            books.forget_window()  # what was announced since the books were frozen is known to the old arenas only
            books.tables, books.arenas = tables, arenas

    def _adopt(self, number: int) -> None:
        """Make a generation the present state."""
        manifest = self._manifest()
        generation = manifest.generation(number)
        if generation is None:
            self._pipeline.generations.go_back(number)  # type: ignore[union-attr]  # raises: it is not there
            raise RuntimeError(f"generation {number} is not there")
        pipeline = self._pipeline
        check_match(pipeline.directory.path, self._specs, manifest, generation, grow=pipeline.config.grow_tables)
        for table, entry in zip(pipeline.books.tables, self._entries, strict=True):
            if table.file is None:
                pipeline.open_log(table, entry, manifest.uuid)
        self._stand_still()
        try:
            with pipeline.access as books:
                books.reset()
            try:
                pipeline.run(pipeline.load(number, pipeline.books.tables))
            except BaseException as error:
                # The index in memory is of no use now; another generation may still be loaded over it.
                if not isinstance(error, Exception):
                    error = UsageError(f"loading generation {number} of {self.path} was interrupted; load it again")
                pipeline.latch_until_load(error)
                raise
        finally:
            with pipeline.access as books:
                books.frozen = False
        for table in pipeline.books.tables:
            table.in_generation = True
        self.decided = True
        self._all_claimed = False
        self._uncommitted(0)

    def _refuse_unclaimed(self) -> None:
        """A table on disk that no parameter has: found at the first step, for parameter groups may still come."""
        mine = {spec.name for spec in self._specs}
        unclaimed = [entry.name for entry in self._manifest().tables if entry.name not in mine]
        if unclaimed:
            raise MismatchError(
                f"{self._pipeline.directory.path}: the state has the tables {unclaimed}, the optimizer has parameters "
                f"{sorted(mine)}; give it all of them, or use another state_dir"
            )
        self._all_claimed = True

    def _stand_still(self) -> None:
        """Freeze the bookkeeping, forget the window and wait until nothing is in flight."""
        pipeline = self._pipeline
        pipeline.await_interrupted()
        try:
            with pipeline.access as books:
                books.frozen = True
                books.forget_window()
            with self._without_staging():
                pass  # and while the books are frozen nothing is staged
            pipeline.await_quiet()
        except BaseException:  # an interrupt, or a failure: nothing is replaced
            pipeline.books.frozen = False
            raise

    @contextmanager
    def _without_staging(self) -> Iterator[None]:
        """Inside, nothing is on a device: what steps have updated is in frames, what was staged ahead is given up."""
        try:
            for staging in self._pipeline.stagings:
                staging.stand_still()
            yield
        finally:
            for staging in self._pipeline.stagings:
                staging.resume()

    def add_tables(self, specs: Sequence[TableSpec]) -> None:
        """Take more tables, all or none; the cache is divided anew, so what is in frames is written first."""
        with self._public:
            self.check_open()
            pipeline = self._pipeline
            for staging in pipeline.stagings:
                staging.drain()
            if self.decided:
                pipeline.run(pipeline.flush())
            self._stand_still()
            known = len(self._specs)
            self._specs.extend(specs)
            try:
                self._lay_out()
                if self.decided:
                    for number in range(known, len(self._specs)):
                        self._settle_new(number)
            except BaseException:
                for table in pipeline.books.tables[known:]:
                    if table.file is not None:
                        pipeline.backend.close(table.file)
                del self._specs[known:], self._entries[known:], pipeline.books.tables[known:]
                raise
            finally:
                with pipeline.access as books:
                    books.frozen = False

    def _settle_new(self, number: int) -> None:
        """Open the log of a table that came late: as its generation has it, or empty."""
        pipeline, manifest = self._pipeline, self._manifest()
        table, spec, entry = pipeline.books.tables[number], self._specs[number], self._entries[number]
        generations = pipeline.generations
        current = manifest.generation(generations.current) if generations and generations.current is not None else None
        if current is not None and current.state(spec.name) is not None:
            check_match(pipeline.directory.path, [spec], manifest, current, grow=pipeline.config.grow_tables)
            pipeline.open_log(table, entry, manifest.uuid)
            pipeline.run(pipeline.load(current.number, [table]))
            table.in_generation = True
        else:
            pipeline.create_log(table, entry, manifest.uuid)

    # What the optimizer asks.

    @property
    def path(self) -> str:
        """The state directory."""
        return str(self._pipeline.directory.path)

    @property
    def uuid(self) -> str:
        """The directory's own identity."""
        return self._manifest().uuid

    @property
    def generation(self) -> int | None:
        """The generation that the state descends from; None while that is undecided."""
        return self._pipeline.generations.current if self.decided and self._pipeline.generations else None

    def spec_of(self, table: int) -> TableSpec:
        """What the parameter was when its table was made."""
        return self._specs[table]

    def steps_of(self, table: int) -> int:
        """The parameter's step count."""
        return self._pipeline.books.tables[table].step

    def fingerprint_of(self, table: int) -> int | None:
        """The fingerprint of weights that came with the generation that the state descends from."""
        manifest, spec = self._manifest(), self._specs[table]
        entry = manifest.entry(spec.name)
        if entry is not None and entry.shape != spec.shape:
            return None  # the table has grown: the rows that it was taken of are others now
        generation = manifest.generation(self.generation if self.generation is not None else -1)
        state = generation.state(self._specs[table].name) if generation else None
        return state.fingerprint if state else None

    def moments_array(self, table: int) -> NDArray[Any]:
        """The table's arena as numbers [frames, fields x width (and padding)]."""
        return self._pipeline.books.tables[table].arena.moments(self._specs[table].moment_dtype)

    def check_open(self) -> None:
        """Raise where nothing can be done: in a forked child, after close(), after a failure."""
        self._pipeline.raise_if_forked()
        self._pipeline.access.let_go()
        if self.closed:
            raise ClosedError(f"the optimizer of {self.path} was closed; make a new one with existing='resume'")
        self._pipeline.raise_failure()

    def check_open_or_failed(self) -> None:
        """Raise in a forked child and after close(); a failure may be mended by loading a generation."""
        self._pipeline.raise_if_forked()
        self._pipeline.access.let_go()
        if self.closed:
            self.check_open()

    def check_decided(self) -> None:
        """Raise where it is not settled yet what becomes of the state that the directory holds."""
        if not self.decided:
            newest = self._manifest().generations[-1].number
            raise StateExistsError(
                f"{self.path} holds state (newest generation {newest}) and nothing says what is to become of it: "
                'load_state_dict() a checkpoint, or construct with existing="resume" (go on from the newest '
                'generation) or existing="discard" (start anew)'
            )

    # Announcing.

    def announce(self, kind: Kind, rows_by_table: Mapping[int, Rows]) -> int:
        """Note rows of a coming step; never blocks. A ticket (0 where announcements are ignored)."""
        if not self.decided:
            return 0
        pipeline = self._pipeline
        with pipeline.access as books:
            pipeline.settle_ended_locked(books)
            ticket = books.announce(kind, rows_by_table).sequence
            pipeline.moved_on_locked(books)
        return ticket

    def hand_out(self, ticket: int) -> None:
        """The batch goes to the training loop: the next step uses it up."""
        pipeline = self._pipeline
        with pipeline.access as books:
            pipeline.settle_ended_locked(books)
            books.hand_out(ticket)
            pipeline.moved_on_locked(books)

    def end(self, ticket: int) -> None:
        """End a batch without a step; takes no lock and never raises."""
        pipeline = self._pipeline
        if os.getpid() == pipeline.pid and pipeline.books.window.get(ticket) is not None:
            pipeline.end_soon(ticket)

    # Stepping and reading.

    def place(self, table: int, device: torch.device | None) -> None:
        """Say where the table's updates are carried out from now on: in frames (None), or staged on a device."""
        staging = self._staging_of.get(table)
        if (device is None) if staging is None else (device == self._device_of[table]):
            return
        with self._public, self._without_staging():
            if staging is not None:
                staging.remove_table(table)
                del self._staging_of[table], self._device_of[table]
            if device is not None:
                found = self._stagings.get(device)
                if found is None:
                    found = self._stagings[device] = self._pipeline.add_staging(open_device(device))
                found.add_table(table)
                self._staging_of[table], self._device_of[table] = found, device

    @property
    def stages(self) -> bool:
        """Whether any table is staged on a device."""
        return bool(self._staging_of)

    def stages_table(self, table: int) -> bool:
        """Whether the table is."""
        return table in self._staging_of

    @property
    def pinned(self) -> bool:
        """Whether all memory of staging buffers is pinned."""
        return all(staging.pinned for staging in self._pipeline.stagings)

    def step(
        self,
        rows_by_table: Mapping[int, Rows],
        update: Update,
        counts: Sequence[int],
        on_device: OnDevice | None = None,
    ) -> int:
        """Run one step: `update(table, positions, frames)` for all rows, in one call a table or in parts.

        Args:
            rows_by_table: sorted unique rows.
            update: called with positions into those rows, and their frames, leased.
            counts: the tables whose step count rises by one, those with no rows included.
            on_device: the update of tables that are staged.

        Returns:
            0; where the step was done in parts, the cache's bytes that would have avoided it.
        """
        return self._run(rows_by_table, update, counts, on_device)

    def _run(
        self, rows_by_table: Mapping[int, Rows], update: Update, counts: Sequence[int], on_device: OnDevice | None
    ) -> int:
        with self._public:
            self.check_open()
            self.check_decided()
            if not self._all_claimed:
                self._refuse_unclaimed()
            pipeline = self._pipeline
            pipeline.await_interrupted()
            counted, whole = False, False

            def count() -> None:
                nonlocal counted
                if not counted:
                    counted = True
                    self._count(counts)

            updated: list[tuple[Piece, NDArray[np.int64]]] = []  # and not committed yet
            try:
                with pipeline.access as books:
                    pipeline.settle_ended_locked(books)
                    step = books.begin(rows_by_table, lasting=True)
                    # What is in frames is leased at once: so a step with everything in cache takes the lock twice.
                    there = books.lease_ready() if on_device is None else {}
                if on_device is not None:
                    self._step_ahead(step, on_device, count)
                for piece in step.batch.pieces:
                    staging = self._staging_of.get(piece.table) if on_device is not None else None
                    left = piece.remaining
                    while left:
                        leased = there.pop(piece.table, None)
                        if leased is None:
                            if updated:
                                self._commit(updated)
                                updated.clear()
                            with self.stage("dsa::wait"):
                                leased = pipeline.await_rows(step, piece)
                        positions, frames = leased
                        count()
                        began = time.perf_counter()
                        with self.stage("dsa::update"):
                            if staging is not None and on_device is not None:
                                staging.step_part(piece, positions, on_device)
                                left = piece.remaining
                            else:
                                update(piece.table, positions, frames)
                                updated.append((piece, positions))
                                left -= len(positions)
                        self._update_s += time.perf_counter() - began
                count()
                books.reach.stepped(
                    time.perf_counter(), waited_s=pipeline.wait_s, idle_s=pipeline.idle_s, announced=step.announced
                )
                whole = True
            finally:
                self._end(whole, updated)
        return self._needed_cache_bytes(rows_by_table) if step.in_parts else 0

    def _commit(self, updated: Updated) -> None:
        """What a step has updated is done: others may have its frames."""
        began = time.perf_counter()
        with self._pipeline.access as books:
            for piece, positions in updated:
                books.commit(piece, positions)
        self._commit_s += time.perf_counter() - began

    def _step_ahead(self, step: Step, on_device: OnDevice, count: Callable[[], None]) -> None:
        """Update what is staged for the step, and have the rest ready for going in parts."""
        for staging in self._pipeline.stagings:
            pieces = [piece for piece in step.batch.pieces if piece.table in staging.tables]
            began, waited_before = time.perf_counter(), staging.waited_s
            with self.stage("dsa::update"):
                staging.step_ahead(step, on_device, count)
            staging.await_back([piece for piece in pieces if piece.remaining])
            waited_s = staging.waited_s - waited_before
            self._pipeline.wait_s += waited_s
            self._update_s += time.perf_counter() - began - waited_s

    def _count(self, counts: Sequence[int]) -> None:
        # A step that no parameter had a gradient for leaves the state as it was.
        for table in counts:
            self._pipeline.books.tables[table].step += 1
        if counts:
            self._uncommitted(self.steps_since_commit + 1)

    def _uncommitted(self, steps: int) -> None:
        self.steps_since_commit = self._pipeline.uncommitted_steps = steps

    def _end(self, whole: bool, updated: Updated = ()) -> None:
        """End what runs; an interrupt may have come as early as its beginning, or before."""
        pipeline = self._pipeline
        step = pipeline.books.step
        if step is None:
            return
        began = time.perf_counter()
        if not whole and step.leased and step.lasting:
            pipeline.latch(
                UsageError(
                    f"a step of {self.path} was interrupted after it had begun to update: weights and moments are "
                    "mixed; load_state_dict() a checkpoint together with the model, or close() and resume"
                )
            )
        with pipeline.access as books:
            if whole:
                for piece, positions in updated:
                    books.commit(piece, positions)
            books.end_step()
            pipeline.moved_on_locked(books)
        self._commit_s += time.perf_counter() - began

    def _needed_cache_bytes(self, rows_by_table: Mapping[int, Rows]) -> int:
        needed: dict[int, int] = {}
        for number, rows in rows_by_table.items():
            arena = self._pipeline.books.tables[number].arena
            needed[id(arena)] = needed.get(id(arena), 0) + len(rows)
        shares = [needed[id(arena)] / arena.n_frames for arena in self._pipeline.books.arenas if id(arena) in needed]
        arenas = self._pipeline.books.arenas  # of a tiny cache they hold more: one frame each at least
        held = sum(arena.n_frames * (arena.memory.shape[1] + FRAME_OVERHEAD_BYTES) for arena in arenas)
        return int(max(self.cache_bytes, held) * max(shares)) + FRAME_OVERHEAD_BYTES

    def read(self, table: int, rows: Rows, out: NDArray[np.uint8]) -> None:
        """Copy the rows' records (bytes [n, record_bytes]) to `out`; rows are sorted and unique."""
        with self._public:
            self.check_open()
            self.check_decided()
            pipeline = self._pipeline
            for staging in pipeline.stagings:
                staging.drain()
            try:
                with pipeline.access as books:
                    step = books.begin({table: rows}, lasting=False)
                for piece in step.batch.pieces:
                    while piece.remaining:
                        positions, frames = pipeline.await_rows(step, piece)
                        out[positions] = pipeline.books.tables[table].arena.memory[frames]
                        with pipeline.access as books:
                            books.commit(piece, positions)
            finally:
                self._end(True)

    def written_rows(self, table: int, first: int, last: int) -> Rows:
        """Those of the rows `first` to `last` (exclusive) that a step ever touched, on disk or in a frame."""
        state = self._pipeline.books.tables[table]
        touched = state.segments.slots[first:last] >= 0
        touched |= state.arena.frame_of[state.arena_table][first:last] >= 0
        return np.asarray(np.flatnonzero(touched) + first, dtype=np.int64)

    # Generations.

    def checkpoint(self, fingerprints: Sequence[int | None], *, counted: bool = True, settle: bool = False) -> int:
        """Commit, where a step came since the last commit; the generation's number.

        Args:
            counted: it is handed out to the user. That is on disk with the next commit, `close`, or `settle` at once.
        """
        with self._public:
            self.check_open()
            self.check_decided()
            pipeline, generations = self._pipeline, self._pipeline.generations
            if generations is None or generations.current is None:
                raise RuntimeError("decided, but no current generation")
            if self.steps_since_commit == 0 and not self._has_new_tables():
                if counted:
                    generations.hand_out(generations.current)
                if settle:
                    pipeline.run(generations.settle())
                return generations.current
            try:
                for staging in pipeline.stagings:
                    staging.drain()
                number = pipeline.run(pipeline.checkpoint(self._entries, fingerprints, counted))
            except Exception as error:
                pipeline.latch(error)
                raise
            self._uncommitted(0)
            return number

    def _has_new_tables(self) -> bool:
        return any(not table.in_generation for table in self._pipeline.books.tables)

    def generations(self) -> tuple[int, ...]:
        """The generations that can be loaded."""
        self.check_open()
        return self._pipeline.generations.numbers() if self._pipeline.generations else ()

    def release(self, number: int) -> None:
        """Give a generation up."""
        with self._public:
            self.check_open()
            self._pipeline.run(self._pipeline.release(number))

    def load(self, number: int) -> None:
        """Go back (or on) to a generation; a failure of this process's engine is forgotten with the state it spoilt."""
        with self._public:
            self.check_open_or_failed()
            failed = self._pipeline.failure is not None
            if failed:
                self._pipeline.recover()
            elif self.decided and number == self.generation and self.steps_since_commit == 0:
                return
            self._adopt(number)

    def reset_tables(self) -> None:
        """Make every row of every table one that was never written, with step count 0."""
        with self._public:
            self.check_open()
            self.check_decided()
            self._stand_still()
            pipeline = self._pipeline
            try:
                with pipeline.access as books:
                    books.reset()
                    for table in books.tables:
                        table.step = 0
                        table.segments.clear(books.next_ticket)
            finally:
                with pipeline.access as books:
                    books.frozen = False
            self._uncommitted(self.steps_since_commit + 1)

    def overwrite(self, table: int, rows: Rows, put: Update) -> None:
        """Let `put` write the frames of the rows (sorted, unique), as a step does, but no step is counted."""
        with self._public, self._without_staging():
            self._run({table: rows}, put, (), None)

    def announced_lately(self) -> tuple[int, float]:
        """Steps for which something had been announced, and the share of the rows they touched that had been."""
        tally = self._pipeline.books.tally
        return tally.judged_steps, tally.judged_announced / tally.judged_rows if tally.judged_rows else 1.0

    def set_steps(self, table: int, steps: int) -> None:
        """Set a parameter's step count."""
        self._pipeline.books.tables[table].step = steps

    # Figures and the end.

    def statistics(self, *, gradient_s: float, compile_s: float, kernel: str) -> Statistics:
        """What was done so far; also after close()."""
        pipeline = self._pipeline
        books, counters = pipeline.books, pipeline.backend.counters
        tally = books.tally
        frames = books.count_frames()
        hits = max(tally.rows_touched - tally.misses, 0)
        misses = tally.rows_touched - hits
        return Statistics(
            steps=tally.steps,
            rows_touched=tally.rows_touched,
            announced_share=tally.rows_announced / tally.rows_touched if tally.rows_touched else 1.0,
            cache_hits=hits,
            cache_misses=misses,
            hit_rate=hits / tally.rows_touched if tally.rows_touched else 0.0,
            rows_new=tally.rows_new,
            rows_read=tally.rows_read,
            read_requests=counters.read_requests,
            read_bytes=counters.read_bytes,
            rows_written=tally.rows_written,
            write_requests=counters.write_requests,
            write_bytes=counters.write_bytes,
            rows_cleaned=tally.rows_cleaned,
            segments_cleaned=tally.segments_cleaned,
            forgotten_batches=books.window.forgotten_batches,
            window_batches=len(books.window),
            pinned_frames=frames["pinned"],
            dirty_frames=frames["dirty"],
            frames=sum(arena.n_frames for arena in books.arenas),
            cache_bytes=sum(arena.n_frames * (arena.memory.shape[1] + FRAME_OVERHEAD_BYTES) for arena in books.arenas),
            state_bytes_on_disk=sum(table.file_segments * table.layout.segment_bytes for table in books.tables),
            live_records=sum(table.segments.live_records for table in books.tables),
            device_bytes=sum(staging.device_bytes for staging in pipeline.stagings),
            gradient_s=gradient_s,
            wait_s=pipeline.wait_s,
            update_s=self._update_s,
            commit_s=self._commit_s,
            compile_s=compile_s,
            backend=pipeline.backend.name,
            kernel=kernel,
        )

    def close(self) -> None:
        """End everything; what was handed out is written down, nothing is committed. Idempotent.

        Raises:
            DeviceError: it could not be written down; everything is ended all the same.
        """
        self._pipeline.raise_if_forked()
        with self._public:
            if not self.closed:
                self.closed = True
                self._finalizer.detach()
                try:
                    if self._pipeline.failure is None and self._pipeline.generations is not None:
                        self._pipeline.run(self._pipeline.generations.settle())
                finally:
                    self._pipeline.stop()
