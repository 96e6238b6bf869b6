"""The running tables and the generations of their directory: logs are opened, indexes loaded, checkpoints made.

Coroutines of the loop. None of them is overtaken by write-behind: they hold its turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsa.errors import CorruptError
from dsa.io.access import Access
from dsa.io.backends.base import Backend
from dsa.io.bookkeeping import Bookkeeping
from dsa.io.directory import Directory
from dsa.io.generations import Generations, TableImage
from dsa.io.jobs import Table
from dsa.io.layout import table_identity
from dsa.io.manifest import TableEntry
from dsa.io.manifest_file import discard
from dsa.io.rowlog import RowLog
from dsa.io.writebehind import WriteBehind


class Checkpoints:
    """Moves the tables' state between memory and generations.

    Args:
        directory: locked by the caller.
        writebehind: whose turn is held while generations change.
        keep: how many generations handed out stay loadable; None: all.
    """

    def __init__(
        self,
        backend: Backend,
        directory: Directory,
        access: Access,
        books: Bookkeeping,
        log: RowLog,
        writebehind: WriteBehind,
        keep: int | None,
    ) -> None:
        self.generations: Generations | None = None
        self.keep = keep
        self._backend = backend
        self._directory = directory
        self._access = access
        self._books = books
        self._log = log
        self._writebehind = writebehind

    async def open(self, existing: str) -> Generations:
        """Read the manifest; with "discard" remove what is there instead, however damaged it is."""
        if existing == "discard":
            await discard(self._backend, self._directory)
        self.generations = await Generations.open(self._backend, self._directory)
        return self.generations

    def open_log(self, table: Table, entry: TableEntry, uuid: str) -> None:
        """Open the table's log; from any thread."""
        path = self._directory.file(entry.file)
        table.file = self._backend.open(path, direct=True)
        size = path.stat().st_size
        table.file_segments = size // table.layout.segment_bytes
        table.identity = table_identity(uuid, table.name)

    def create_log(self, table: Table, entry: TableEntry, uuid: str) -> None:
        """Make the log of a table that no generation has yet; a leftover of that name is emptied. From any thread."""
        table.file = self._backend.open(self._directory.file(entry.file), create=True, direct=True)
        table.file_segments = 0
        table.identity = table_identity(uuid, table.name)

    async def load(self, number: int, tables: Sequence[Table]) -> None:
        """Replace the state in memory by that of a generation; nothing is in flight, and frames are forgotten."""
        generations = self._opened()
        async with self._writebehind.turn:
            states = {}
            for table in tables:
                segments = table.segments
                states[table.name] = await generations.load(number, table.name, segments.slots, segments.checks)
            for table in tables:
                state = states[table.name]
                length = table.file_segments
                if not table.segments.rebuild(length, generations.retained_segments(table.name)):
                    raise CorruptError(
                        f"table {table.name!r}: generation {number} refers to segments beyond the end of "
                        f"{table.file.path} at byte {length * table.layout.segment_bytes}; the log was cut short, "
                        "restore it from a copy"
                    )
                table.step = state.step
            generations.go_back(number)

    async def commit(self, entries: Sequence[TableEntry], fingerprints: Sequence[int | None], counted: bool) -> int:
        """Commit the present state as a generation (rule 11)."""
        generations = self._opened()
        async with self._writebehind.turn:
            await self._writebehind.drain()
            images = [
                TableImage(
                    entry=entry,
                    slots=table.segments.slots,
                    checks=table.segments.checks,
                    segments=table.segments.live_segments(),
                    step=table.step,
                    live_rows=table.segments.live_records,
                    fingerprint=fingerprint,
                    changed=table.segments.changed or not table.in_generation,
                    file=table.file,
                )
                for table, entry, fingerprint in zip(self._books.tables, entries, fingerprints, strict=True)
            ]
            number = await generations.commit(images, counted=counted, keep=self.keep)
            for table in self._books.tables:
                table.segments.changed = False
                table.in_generation = True
            await self._retain(generations)
            return number

    async def release(self, number: int) -> None:
        """Give a generation up, and what only it refers to."""
        generations = self._opened()
        async with self._writebehind.turn:
            await generations.release(number)
            await self._retain(generations)

    async def _retain(self, generations: Generations) -> None:
        """The manifest has changed, durably: free what no generation refers to any more, and give back the surplus."""
        with self._access as books:
            for table in books.tables:
                books.retain(table, generations.retained_segments(table.name))
        for table in self._books.tables:
            await self._log.give_back(table)

    def _opened(self) -> Generations:
        if self.generations is None:
            raise RuntimeError("open() comes first")
        return self.generations
