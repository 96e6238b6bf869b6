"""The engine's synchronous face: announce, step, read, checkpoint, go back, close.

What an optimizer holds. The running half (pipeline.py) does not refer to it, so that it ends when nobody holds it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsa.config import IOConfig
from dsa.errors import ClosedError, ConfigError
from dsa.io.backends import open_backend
from dsa.io.cache import FRAME_OVERHEAD_BYTES, Rows
from dsa.io.directory import Directory
from dsa.io.pipeline import Pipeline
from dsa.io.staging import Update as OnDevice
from dsa.io.state import State
from dsa.io.statistics import Statistics
from dsa.io.stepping import Stepping, Update
from dsa.io.tables import TableSpec
from dsa.io.window import Kind


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
        self.closed = False
        self._public = threading.RLock()
        self._state = State(self._pipeline, cache_bytes)
        self._stepping = Stepping(self._pipeline, self._state)
        try:
            self._state.open(specs, existing)
        except BaseException:
            self._pipeline.stop()
            raise
        self._finalizer = weakref.finalize(self, Pipeline.end_without_close, self._pipeline)

    # What the optimizer asks.

    @property
    def path(self) -> str:
        """The state directory."""
        return self._state.path

    @property
    def uuid(self) -> str:
        """The directory's own identity."""
        return self._state.uuid

    @property
    def generation(self) -> int | None:
        """The generation that the state descends from; None while that is undecided."""
        return self._state.generation

    @property
    def decided(self) -> bool:
        """Whether it is settled which state the tables have."""
        return self._state.decided

    @property
    def steps_since_commit(self) -> int:
        """Steps that no generation holds."""
        return self._state.steps_since_commit

    @property
    def grow_tables(self) -> bool:
        """Whether a parameter may have more rows than what is loaded for it."""
        return self._pipeline.config.grow_tables

    def spec_of(self, table: int) -> TableSpec:
        """What the parameter was when its table was made."""
        return self._state.specs[table]

    def steps_of(self, table: int) -> int:
        """The parameter's step count."""
        return self._pipeline.books.tables[table].step

    def fingerprint_of(self, table: int) -> int | None:
        """The fingerprint of weights that came with the generation that the state descends from."""
        return self._state.fingerprint_of(table)

    def moments_array(self, table: int) -> NDArray[Any]:
        """The table's arena as numbers [frames, fields x width (and padding)]."""
        return self._pipeline.books.tables[table].arena.moments(self._state.specs[table].moment_dtype)

    def check_open(self) -> None:
        """Raise where nothing can be done: in a forked child, after close(), after a failure."""
        self._pipeline.raise_if_forked()
        self._pipeline.access.let_go()
        if self.closed:
            raise ClosedError(f"the optimizer of {self.path} was closed; make a new one with existing='resume'")
        self._pipeline.latch.raise_failure()

    def check_open_or_failed(self) -> None:
        """Raise in a forked child and after close(); a failure may be mended by loading a generation."""
        self._pipeline.raise_if_forked()
        self._pipeline.access.let_go()
        if self.closed:
            self.check_open()

    def check_decided(self) -> None:
        """Raise where it is not settled yet what becomes of the state that the directory holds."""
        self._state.check_decided()

    # Announcing.

    def announce(self, kind: Kind, rows_by_table: Mapping[int, Rows], hand_out: int | None = None) -> int:
        """Note rows of a coming step; never blocks. A ticket (0 where announcements are ignored).

        Args:
            hand_out: the ticket of a batch that goes to the training loop now, as by `hand_out`.
        """
        if not self._state.decided:
            return 0
        pipeline = self._pipeline
        with pipeline.access as books:
            pipeline.settle_ended_locked(books)
            ticket = books.announce(kind, rows_by_table).sequence
            if hand_out is not None:
                books.hand_out(hand_out)
            pipeline.moved_on_locked(books, stepped=False)
        return ticket

    def hand_out(self, ticket: int) -> None:
        """The batch goes to the training loop: the next step uses it up."""
        pipeline = self._pipeline
        with pipeline.access as books:
            pipeline.settle_ended_locked(books)
            books.hand_out(ticket)
            pipeline.moved_on_locked(books, stepped=False)

    def end(self, ticket: int) -> None:
        """End a batch without a step; takes no lock and never raises."""
        pipeline = self._pipeline
        if os.getpid() == pipeline.pid and pipeline.books.window.get(ticket) is not None:
            pipeline.end_soon(ticket)

    # Stepping and reading.

    def trace_with(self, stage: Callable[[str], AbstractContextManager[Any]]) -> None:
        """Enter `stage(name)` around each stage of a step."""
        self._stepping.stage = stage

    def place(self, table: int, device: torch.device | None) -> None:
        """Say where the table's updates are carried out from now on: in frames (None), or staged on a device."""
        if device != self._stepping.device_of(table):
            with self._public:
                self._stepping.place(table, device)

    @property
    def stages(self) -> bool:
        """Whether any table is staged on a device."""
        return self._stepping.stages

    def stages_table(self, table: int) -> bool:
        """Whether the table is."""
        return self._stepping.device_of(table) is not None

    @property
    def device_refused(self) -> bool:
        """Whether a device had no memory for the records of a batch."""
        return any(staging.refused for staging in self._pipeline.stagings)

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
        with self._public:
            self.check_open()
            self._state.check_decided()
            return self._stepping.run(rows_by_table, update, counts, on_device)

    def read(self, table: int, rows: Rows, out: NDArray[np.uint8]) -> None:
        """Copy the rows' records (bytes [n, record_bytes]) to `out`; rows are sorted and unique."""
        with self._public:
            self.check_open()
            self._state.check_decided()
            self._stepping.read(table, rows, out)

    def overwrite(self, table: int, rows: Rows, put: Update) -> None:
        """Let `put` write the frames of the rows (sorted, unique), as a step does, but no step is counted."""
        with self._public:
            self.check_open()
            self._state.check_decided()
            with self._state.without_staging():
                self._stepping.run({table: rows}, put, (), None)

    def written_rows(self, table: int, first: int, last: int) -> Rows:
        """Those of the rows `first` to `last` (exclusive) that a step ever touched, on disk or in a frame."""
        state = self._pipeline.books.tables[table]
        touched = state.segments.slots[first:last] >= 0
        touched |= state.arena.frame_of[state.arena_table][first:last] >= 0
        return np.asarray(np.flatnonzero(touched) + first, dtype=np.int64)

    # Which state it is.

    def add_tables(self, specs: Sequence[TableSpec]) -> None:
        """Take more tables, all or none; the cache is divided anew, so what is in frames is written first."""
        with self._public:
            self.check_open()
            self._state.add_tables(specs)

    def checkpoint(self, fingerprints: Sequence[int | None], *, counted: bool = True, settle: bool = False) -> int:
        """Commit, where a step came since the last commit; the generation's number.

        Args:
            counted: it is handed out to the user. That is on disk with the next commit, `close`, or `settle` at once.
        """
        with self._public:
            self.check_open()
            self._state.check_decided()
            return self._state.checkpoint(fingerprints, counted=counted, settle=settle)

    def generations(self) -> tuple[int, ...]:
        """The generations that can be loaded."""
        self.check_open()
        return self._pipeline.generations.numbers() if self._pipeline.generations else ()

    def release(self, number: int) -> None:
        """Give a generation up."""
        with self._public:
            self.check_open()
            self._state.release(number)

    def load(self, number: int) -> None:
        """Go back (or on) to a generation; a failure of this process's engine is forgotten with the state it spoilt."""
        with self._public:
            self.check_open_or_failed()
            self._state.load(number)

    @contextmanager
    def replacing_all(self) -> Iterator[None]:
        """Inside, every row of every table is one that was never written, with step count 0, and is to be written anew.

        What is broken off inside has left half a state: every later call raises, until all of it is replaced again, or
        a generation is loaded.
        """
        with self._public:
            self.check_open_or_failed()
            self._state.check_decided()
            with self._state.replacing_all():
                yield

    def set_steps(self, table: int, steps: int) -> None:
        """Set a parameter's step count."""
        self._pipeline.books.tables[table].step = steps

    # Figures and the end.

    def announced_lately(self) -> tuple[int, float]:
        """Steps for which something had been announced, and the share of the rows they touched that had been."""
        tally = self._pipeline.books.tally
        return tally.judged_steps, tally.judged_announced / tally.judged_rows if tally.judged_rows else 1.0

    def statistics(self, *, gradient_s: float, compile_s: float, kernel: str) -> Statistics:
        """What was done so far; also after close()."""
        pipeline = self._pipeline
        books, counters = pipeline.books, pipeline.backend.counters
        tally = books.tally
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
            pinned_frames=sum(arena.pinned for arena in books.arenas),
            dirty_frames=books.dirty_frames(),
            frames=sum(arena.n_frames for arena in books.arenas),
            cache_bytes=sum(arena.n_frames * (arena.memory.shape[1] + FRAME_OVERHEAD_BYTES) for arena in books.arenas),
            state_bytes_on_disk=sum(table.file_segments * table.layout.segment_bytes for table in books.tables),
            live_records=sum(table.segments.live_records for table in books.tables),
            device_bytes=sum(staging.device_bytes for staging in pipeline.stagings),
            gradient_s=gradient_s,
            wait_s=pipeline.wait_s,
            update_s=self._stepping.update_s,
            commit_s=self._stepping.commit_s,
            compile_s=compile_s,
            backend=pipeline.backend.name,
            kernel=kernel,
        )

    def close(self) -> None:
        """End everything; what was handed out is written down, nothing is committed. Idempotent.

        What an interrupt has cut short is done when it is called again, or when the engine is collected.

        Raises:
            DeviceError: it could not be written down; everything is ended all the same.
        """
        self._pipeline.raise_if_forked()
        with self._public:
            again, self.closed = self.closed, True
            try:
                if not again and self._pipeline.latch.failure is None and self._pipeline.generations is not None:
                    self._pipeline.run(self._pipeline.generations.settle())
            finally:
                self._pipeline.stop()
            self._finalizer.detach()
