"""Generations: commit one, go back to one, give one up; in the order that loses nothing (see DESIGN.md beside this).

What is kept at a commit: the new generation; of the counted ones that it descends from the newest, `keep` in all with
the new one if that counts. So uncounted generations (0, and those of `close()`) stay until the next commit, and so do
those abandoned by going back.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.errors import ConfigError, DeviceError, MismatchError, StateFileError, UsageError
from dsa.io import indexfile
from dsa.io.backends.base import Backend
from dsa.io.directory import Directory
from dsa.io.image import TableImage as TableImage
from dsa.io.manifest import Generation, Manifest, TableEntry, TableState, index_file
from dsa.io.manifest_file import discard, need_lock, read_manifest, remove_own_files, replace_manifest

_log = logging.getLogger("dsa")


class Generations:
    """The generations of one directory. Not for use by several tasks at once.

    After a call that writes has failed, what is durable is the state before or after it; this object still reads, and
    every later call that would write raises UsageError.
    """

    def __init__(self, backend: Backend, directory: Directory, manifest: Manifest | None) -> None:
        if sys.byteorder != "little":
            raise ConfigError("state directories are little-endian; this machine is not")
        self.backend = backend
        self.directory = directory
        self.manifest = manifest
        self.current: int | None = None
        self._failure: BaseException | None = None
        self._unsaved = False
        self._segments: dict[str, NDArray[np.bool_]] = {}  # by index file

    @classmethod
    async def open(cls, backend: Backend, directory: Directory) -> Generations:
        """Read what the directory holds; nothing on disk is changed.

        An index file that cannot be read is logged, and counts as referring to its table's whole log as it then was,
        so that nothing of it is overwritten; loading its generation raises.

        Raises:
            FormatError, CorruptError: the manifest is not one of ours, or damaged.
            DeviceError: the manifest cannot be read or made durable.
        """
        self = cls(backend, directory, await read_manifest(backend, directory))
        if self.manifest is None:
            return self
        # A killed process may have renamed without the sync: the generations that this manifest no longer names
        # would come back with a loss of power, after their segments were reused.
        await backend.sync_directory(directory.path)
        for generation in self.manifest.generations:
            for state in generation.tables:
                if state.index_file is not None and state.index_file not in self._segments:
                    self._segments[state.index_file] = await self._read_segments(state, generation.number)
        return self

    async def _read_segments(self, state: TableState, number: int) -> NDArray[np.bool_]:
        try:
            reader = await self._reader(state)
            try:
                return await reader.segments()
            finally:
                reader.close()
        except (StateFileError, DeviceError) as error:
            _log.warning("generation %d of table %r cannot be loaded: %s", number, state.table, error)
            return np.ones(state.n_segments, np.bool_)

    async def _reader(self, state: TableState) -> indexfile.Reader:
        manifest = self._present()
        path = self.directory.file(str(state.index_file))
        return await indexfile.Reader.of_table(self.backend, path, manifest.uuid, state)

    # Looking.

    def numbers(self) -> tuple[int, ...]:
        """The generations that can be loaded, in ascending order."""
        return tuple(g.number for g in self.manifest.generations) if self.manifest is not None else ()

    def retained_segments(self, table: str) -> NDArray[np.bool_]:
        """The segments of the table's log that any generation refers to: bool, as long as the longest log among them.

        None of them may be overwritten or punched out. It follows a commit only when that is durable.
        """
        retained = np.zeros(0, np.bool_)
        files = {
            s.index_file: s.n_segments
            for g in (self.manifest.generations if self.manifest is not None else ())
            for s in g.tables
            if s.table == table and s.index_file is not None
        }
        for file in files:
            segments = self._segments[file]
            if len(segments) > len(retained):
                retained = np.concatenate([retained, np.zeros(len(segments) - len(retained), np.bool_)])
            retained[: len(segments)] |= segments
        return retained

    async def load(
        self, number: int, table: str, slots_out: NDArray[Any], checks_out: NDArray[np.uint32]
    ) -> TableState:
        """Fill a table's index (int32 or int64, and uint32; contiguous; at least as many rows) as of a generation.

        Raises:
            MismatchError: no such generation, or it has no such table.
            StateFileError: the index file is damaged; the arrays then hold nothing of use.
            DeviceError: it cannot be read.
        """
        state = self._generation(number).state(table)
        if state is None:
            names = [s.table for s in self._generation(number).tables]
            raise MismatchError(f"{self.directory.path}: generation {number} has the tables {names}, not {table!r}")
        if state.index_file is None:
            slots_out[:] = -1
            checks_out[:] = 0
            return state
        reader = await self._reader(state)
        try:
            await reader.index(slots_out, checks_out)
        finally:
            reader.close()
        return state

    def go_back(self, number: int) -> None:
        """The running state descends from this generation now; later ones are given up by the next commit.

        Raises:
            MismatchError: it is not there.
        """
        self.current = self._generation(number).number

    def hand_out(self, number: int) -> None:
        """Count the generation toward `keep_generations`: the user has its number. On disk from the next commit,
        release or `settle` on.

        Raises:
            MismatchError: it is not there.
        """
        manifest, found = self._present(), self._generation(number)
        if found.counted:
            return
        marked = replace(found, counted=True)
        self.manifest = replace(manifest, generations=tuple(marked if g is found else g for g in manifest.generations))
        self._unsaved = True

    def _present(self) -> Manifest:
        if self.manifest is None:
            raise UsageError(f"{self.directory.path} holds no generation yet; create() it first")
        return self.manifest

    def _generation(self, number: int) -> Generation:
        found = self._present().generation(number)
        if found is None:
            present = ", ".join(map(str, self.numbers()))
            raise MismatchError(
                f"{self.directory.path}: generation {number} is not there, present are {present}. A checkpoint gives "
                "up older ones beyond keep_generations, and later ones after going back; raise keep_generations"
            )
        return found

    # Writing.

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        need_lock(self.directory, what)
        if self._failure is not None:
            raise UsageError(
                f"{what}: an earlier write to {self.directory.path} failed ({self._failure}); open the directory anew"
            ) from self._failure
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    async def create(self, entries: Sequence[TableEntry]) -> None:
        """Publish generation 0, with empty logs; an unfinished creation's own files are removed first.

        Raises:
            UsageError: there are generations already, or the directory is not locked.
            DeviceError: it could not be made durable.
        """
        if self.manifest is not None:
            raise UsageError(f"{self.directory.path} holds generations {self.numbers()}; discard() them first")
        with self._writing("create"):
            await remove_own_files(self.backend, self.directory)
            self.directory.make_subdirectories()
            for entry in entries:
                await self.backend.write_whole(self.directory.file(entry.file), [])
            here = self.directory
            # Before the manifest can be seen: it must not outlive the names that it stands for.
            for path in (here.tables_path, here.index_path, here.path, *here.ancestors()):
                await self.backend.sync_directory(path)
            states = tuple(TableState(entry.name, 0, None, 0, 0, 0, None) for entry in entries)
            first = Generation(0, False, time.time(), states)
            await self._publish(Manifest(str(uuid.uuid4()), 1, tuple(entries), (first,)))
            self.current = 0

    async def commit(self, images: Sequence[TableImage], *, counted: bool, keep: int | None) -> int:
        """Make the tables' present state a generation; durable when this returns. The generation's number.

        Tables of the directory that are not among `images` keep the state that they have in `current`.

        Raises:
            UsageError: `current` is not chosen, or the directory is not locked.
            MismatchError: a table is not the one in the manifest.
            DeviceError: something could not be written; the generations before are still there.
        """
        old = self._present()
        if self.current is None:
            raise UsageError(f"{self.directory.path}: go_back() to one of the generations {self.numbers()} first")
        if keep is not None and keep < 1:
            raise ConfigError(f"keep_generations must be at least 1 or None, got {keep}")
        base = self._generation(self.current)
        entries = {entry.name: entry for entry in old.tables}
        for image in images:
            image.check(entries.get(image.entry.name))
            entries[image.entry.name] = image.entry
        with self._writing("commit"):
            # 1. The records, and the names of logs that are new.
            for image in images:
                if image.changed or old.entry(image.entry.name) is None:
                    await self.backend.sync(image.file)
            if len(entries) > len(old.tables):
                await self.backend.sync_directory(self.directory.tables_path)
            # 2. The indexes and their names.
            states = {state.table: state for state in base.tables}
            written: dict[str, NDArray[np.bool_]] = {}
            for image in images:
                state = await self._state(image, states.get(image.entry.name), old, written)
                states[state.table] = state
            if written:
                await self.backend.sync_directory(self.directory.index_path)
            # 3. The manifest; the generation exists from its rename on, for certain from the directory's sync on.
            number = old.next_number
            new = Generation(number, counted, time.time(), tuple(states.values()))
            kept = _keep(old.generations, base.number, None if keep is None else keep - counted)
            self._segments.update(written)
            await self._publish(Manifest(old.uuid, number + 1, tuple(entries.values()), (*kept, new)))
            self.current = number
            # 4. Only now what nothing refers to any more.
            await self._sweep()
        return number

    async def _state(
        self, image: TableImage, base: TableState | None, old: Manifest, written: dict[str, NDArray[np.bool_]]
    ) -> TableState:
        """The table's state in the new generation; its index file is written where it differs from the base's."""
        if base is not None and not image.changed:
            return replace(base, step=image.step, fingerprint=image.fingerprint)
        name, n_segments = image.entry.name, len(image.segments)
        if image.live_rows == 0:
            return TableState(name, image.step, None, 0, 0, n_segments, image.fingerprint)
        file = index_file(image.entry, old.next_number)
        header = indexfile.Header(
            old.uuid, name, old.next_number, len(image.slots), image.slots.dtype.itemsize, n_segments
        )
        written[file] = image.segments.copy()
        path = self.directory.file(file)
        check = await indexfile.write(self.backend, path, header, image.segments, image.slots, image.checks)
        return TableState(name, image.step, file, check, image.live_rows, n_segments, image.fingerprint)

    async def settle(self) -> None:
        """Write down what was handed out since the manifest was written; no I/O where nothing was.

        Raises:
            DeviceError: the manifest could not be replaced.
        """
        if self._unsaved:
            with self._writing("settle"):
                await self._publish(self._present())

    async def release(self, number: int) -> None:
        """Give a generation up: what only it refers to is free when this returns.

        Raises:
            MismatchError: it is not there.
            UsageError: the running state descends from it, or there is no other.
            DeviceError: the manifest could not be replaced.
        """
        old, gone = self._present(), self._generation(number)
        if number == self.current or len(old.generations) == 1:
            why = "the running state descends from it" if number == self.current else "it is the only one"
            raise UsageError(f"generation {number} cannot be released: {why}; make another checkpoint() first")
        with self._writing("release"):
            await self._publish(replace(old, generations=tuple(g for g in old.generations if g is not gone)))
            await self._sweep()

    async def discard(self) -> None:
        """Remove everything of the program's own, the manifest first and durably; then `create` may follow.

        Raises:
            DeviceError: something cannot be removed.
        """
        with self._writing("discard"):
            self.manifest = self.current = None
            self._segments.clear()
            await discard(self.backend, self.directory)

    async def _publish(self, manifest: Manifest) -> None:
        await replace_manifest(self.backend, self.directory, manifest)
        self.manifest = manifest
        self._unsaved = False

    async def _sweep(self) -> None:
        """Remove the index files that nothing refers to, those of a commit cut short included."""
        referred = self._present().index_files()
        for file in sorted(self.directory.index_files() - referred):
            await self.backend.remove(self.directory.file(file))
        self._segments = {file: segments for file, segments in self._segments.items() if file in referred}


def _keep(generations: Sequence[Generation], base: int, keep: int | None) -> tuple[Generation, ...]:
    """Of the counted generations up to `base` the newest `keep`, all of them with None."""
    counted = [g for g in generations if g.counted and g.number <= base]
    return tuple(counted if keep is None else counted[max(len(counted) - keep, 0) :])
