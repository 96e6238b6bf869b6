"""Which state the tables have: opened, resumed, gone back to, made a generation.

One thread at a time; the engine's face sees to that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dsa.errors import DsaError, MismatchError, StateExistsError, UsageError
from dsa.io.disk_space import warn_of_place
from dsa.io.manifest import Manifest, TableEntry
from dsa.io.pipeline import Pipeline
from dsa.io.tables import TableSpec, check_match, entries_for, lay_out

_log = logging.getLogger("dsa")


class State:
    """The tables of one state directory, and the generation that they descend from.

    Args:
        pipeline: stopped by the caller.
        cache_bytes: RAM for frames, their bookkeeping included.
    """

    def __init__(self, pipeline: Pipeline, cache_bytes: int) -> None:
        self.decided = False  # whether it is settled which state the tables have
        self.steps_since_commit = 0
        self.specs: list[TableSpec] = []
        self.cache_bytes = cache_bytes
        self._pipeline = pipeline
        self._entries: list[TableEntry] = []
        self._all_claimed = False  # every table on disk has a parameter

    # Opening.

    def open(self, specs: Sequence[TableSpec], existing: str) -> None:
        """Make the tables for the specs; with "discard", "resume", or where there was no state, it is decided now."""
        pipeline = self._pipeline
        generations = pipeline.run(pipeline.checkpoints.open(existing))
        self.specs = list(specs)
        self._lay_out()
        warn_of_place(pipeline.directory.path, self._entries, pipeline.checkpoints.keep, stacklevel=5)
        if generations.manifest is None:
            if existing == "resume":
                _log.warning("%s holds no state to resume: starting anew", pipeline.directory.path)
            pipeline.run(generations.create(self._entries))
            self.adopt(0)
        elif existing == "resume":
            self.adopt(generations.numbers()[-1])

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
            self.specs, manifest, config.segment_bytes, self.cache_bytes, grow=config.grow_tables
        )
        tables, arenas = lay_out(self.specs, self._entries, self.cache_bytes, books.tables)
        with self._pipeline.access:
            books.go_on_with(tables, arenas)

    def adopt(self, number: int) -> None:
        """Make a generation the present state."""
        manifest = self._manifest()
        generation = manifest.generation(number)
        if generation is None:
            self._pipeline.generations.go_back(number)  # type: ignore[union-attr]  # raises: it is not there
            raise RuntimeError(f"generation {number} is not there")
        pipeline = self._pipeline
        check_match(pipeline.directory.path, self.specs, manifest, generation, grow=pipeline.config.grow_tables)
        for table, entry in zip(pipeline.books.tables, self._entries, strict=True):
            if table.file is None:
                pipeline.checkpoints.open_log(table, entry, manifest.uuid)
        self.stand_still()
        try:
            with pipeline.access as books:
                books.reset()
            try:
                pipeline.run(pipeline.checkpoints.load(number, pipeline.books.tables))
            except BaseException as error:
                # The index in memory is of no use now; another generation may still be loaded over it.
                if not isinstance(error, Exception):
                    error = UsageError(f"loading generation {number} of {self.path} was interrupted; load it again")
                pipeline.latch.note_until_load(error)
                raise
        finally:
            with pipeline.access as books:
                books.frozen = False
        for table in pipeline.books.tables:
            table.in_generation = True
        self.decided = True
        self._all_claimed = False
        self.uncommitted(0)

    def refuse_unclaimed(self) -> None:
        """Raise for a table on disk that no parameter has: at the first step, for parameter groups may still come."""
        if self._all_claimed:
            return
        mine = {spec.name for spec in self.specs}
        unclaimed = [entry.name for entry in self._manifest().tables if entry.name not in mine]
        if unclaimed:
            raise MismatchError(
                f"{self._pipeline.directory.path}: the state has the tables {unclaimed}, the optimizer has parameters "
                f"{sorted(mine)}; give it all of them, or use another state_dir"
            )
        self._all_claimed = True

    def stand_still(self) -> None:
        """Freeze the bookkeeping, forget the window and wait until nothing is in flight."""
        pipeline = self._pipeline
        pipeline.await_interrupted()
        try:
            with pipeline.access as books:
                books.frozen = True
                books.forget_window()
            with self.without_staging():
                pass  # and while the books are frozen nothing is staged
            pipeline.await_quiet()
        except BaseException:  # an interrupt, or a failure: nothing is replaced
            pipeline.books.frozen = False
            raise

    @contextmanager
    def without_staging(self) -> Iterator[None]:
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
        pipeline = self._pipeline
        for staging in pipeline.stagings:
            staging.drain()
        if self.decided:
            pipeline.run(pipeline.flush())
        self.stand_still()
        known = len(self.specs)
        self.specs.extend(specs)
        try:
            self._lay_out()
            if self.decided:
                for number in range(known, len(self.specs)):
                    self._settle_new(number)
        except BaseException:
            for table in pipeline.books.tables[known:]:
                if table.file is not None:
                    pipeline.backend.close(table.file)
            del self.specs[known:], self._entries[known:], pipeline.books.tables[known:]
            raise
        finally:
            with pipeline.access as books:
                books.frozen = False

    def _settle_new(self, number: int) -> None:
        """Open the log of a table that came late: as its generation has it, or empty."""
        pipeline, manifest = self._pipeline, self._manifest()
        table, spec, entry = pipeline.books.tables[number], self.specs[number], self._entries[number]
        generations = pipeline.generations
        current = manifest.generation(generations.current) if generations and generations.current is not None else None
        if current is not None and current.state(spec.name) is not None:
            check_match(pipeline.directory.path, [spec], manifest, current, grow=pipeline.config.grow_tables)
            pipeline.checkpoints.open_log(table, entry, manifest.uuid)
            pipeline.run(pipeline.checkpoints.load(current.number, [table]))
            table.in_generation = True
        else:
            pipeline.checkpoints.create_log(table, entry, manifest.uuid)

    # What is asked.

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

    def fingerprint_of(self, table: int) -> int | None:
        """The fingerprint of weights that came with the generation that the state descends from."""
        manifest, spec = self._manifest(), self.specs[table]
        entry = manifest.entry(spec.name)
        if entry is not None and entry.shape != spec.shape:
            return None  # the table has grown: the rows that it was taken of are others now
        generation = manifest.generation(self.generation if self.generation is not None else -1)
        state = generation.state(self.specs[table].name) if generation else None
        return state.fingerprint if state else None

    def check_decided(self) -> None:
        """Raise where it is not settled yet what becomes of the state that the directory holds."""
        if not self.decided:
            newest = self._manifest().generations[-1].number
            raise StateExistsError(
                f"{self.path} holds state (newest generation {newest}) and nothing says what is to become of it: "
                'load_state_dict() a checkpoint, or construct with existing="resume" (go on from the newest '
                'generation) or existing="discard" (start anew)'
            )

    # Generations.

    def uncommitted(self, steps: int) -> None:
        """So many steps came since the last commit."""
        self.steps_since_commit = self._pipeline.uncommitted_steps = steps

    def checkpoint(self, fingerprints: Sequence[int | None], *, counted: bool, settle: bool) -> int:
        """Commit, where a step came since the last commit; the generation's number.

        Args:
            counted: it is handed out to the user. That is on disk with the next commit, `close`, or `settle` at once.
        """
        pipeline, generations = self._pipeline, self._pipeline.generations
        if generations is None or generations.current is None:
            raise RuntimeError("decided, but no current generation")
        if self.steps_since_commit == 0 and all(table.in_generation for table in pipeline.books.tables):
            if counted:
                generations.hand_out(generations.current)
            if settle:
                with self._final():
                    pipeline.run(generations.settle())
            return generations.current
        with self._final():
            for staging in pipeline.stagings:
                staging.drain()
            number = pipeline.run(pipeline.checkpoints.commit(self._entries, fingerprints, counted))
        self.uncommitted(0)
        return number

    def release(self, number: int) -> None:
        """Give a generation up."""
        with self._final(MismatchError, UsageError):  # a number that cannot be given up: nothing was done
            self._pipeline.run(self._pipeline.checkpoints.release(number))

    @contextmanager
    def _final(self, *harmless: type[DsaError]) -> Iterator[None]:
        """A failure inside is what every later call raises (rule 10), unless it is a harmless one."""
        try:
            yield
        except harmless:
            raise
        except Exception as error:
            self._pipeline.latch.note(error)
            raise

    def load(self, number: int) -> None:
        """Go back (or on) to a generation; a failure of this process's engine is forgotten with the state it spoilt."""
        latch, generations = self._pipeline.latch, self._pipeline.generations
        there = self.decided and number == self.generation and self.steps_since_commit == 0
        if latch.failure is not None or not there:
            with latch.recovered():
                self.adopt(number)
        if generations is not None:
            generations.hand_out(number)  # whoever asks for it has its number, also of one that close() made

    @contextmanager
    def replacing_all(self) -> Iterator[None]:
        """Inside, every row of every table is one that was never written, with step count 0, and is to be written anew.

        What is broken off inside has left half a state: every later call raises, until a generation is loaded or all of
        it is replaced again.
        """
        pipeline = self._pipeline
        with pipeline.latch.recovered():
            self.stand_still()
            try:
                try:
                    with pipeline.access as books:
                        books.reset()
                        for table in books.tables:
                            table.step = 0
                            table.segments.clear(books.next_ticket)
                finally:
                    with pipeline.access as books:
                        books.frozen = False
                self.uncommitted(self.steps_since_commit + 1)
                yield
            except BaseException as error:
                pipeline.latch.note(
                    UsageError(
                        f"{type(error).__name__} ({error}) came while the moments in {self.path} were replaced by "
                        "those of a state dict: they are partly these; load_state_dict() that one again, or a "
                        "checkpoint together with the model, or close() and resume"
                    )
                )
                raise
