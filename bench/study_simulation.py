"""One run of the study: the engine's own decisions on an emulated device, in virtual time, without a byte moved.

Bookkeeping, prefetch and write-behind are the engine's, on an event loop whose time jumps; the log is the engine's plan
of requests without their bytes; the device is `EmulatedBackend`. All of it in one thread: so the same setting gives the
same figures to the digit.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dsa.config import IOConfig
from dsa.errors import ConfigError
from dsa.io.access import Access
from dsa.io.backends.base import Backend, Bytes, Extents, File
from dsa.io.backends.clocks import VirtualTimeLoop
from dsa.io.backends.device_models import MODELS, DeviceModel
from dsa.io.backends.emulated import EmulatedBackend
from dsa.io.bookkeeping import Bookkeeping
from dsa.io.cache import FRAME_OVERHEAD_BYTES, NO_FRAME, Arena
from dsa.io.device_choice import choose
from dsa.io.extents import plan
from dsa.io.jobs import CleanJob, FillJob, Step, Table, WriteJob
from dsa.io.layout import RecordLayout, choose_segment_bytes, segment_layout
from dsa.io.prefetch import Prefetch
from dsa.io.rowlog import RowLog
from dsa.io.segments import Segments
from dsa.io.window import Kind, Piece, Window
from dsa.io.writebehind import WriteBehind

Rows = NDArray[np.int64]
WIDTH = 128  # floats of a row, so 1 KiB of moments
_AGE = 2  # before a run every row was written once, then so many times as many rows by steps, with cleaning
_AGED_STEPS = 1 << 20  # more than there are
_WARM_SHARE = 0.3  # write-behind begins when a quarter of the frames is dirty
_WAITED_SHARE = 0.03  # the engine's: a step that waited longer, as a share of a step's time, calls for a longer reach


@dataclass(frozen=True)
class Scale:
    """How large a run is.

    Args:
        n_rows: rows of the table; batch_rows: of them in each step, all different.
        warm_steps: steps before the measured ones, besides those until a large cache is as dirty as it gets.
        model_us, update_us: what a row costs outside of the optimizer, and the optimizer beside its waiting.
        exponent: of the Zipf workload.
    """

    n_rows: int = 1 << 18
    batch_rows: int = 1 << 11
    warm_steps: int = 6
    steps: int = 20
    model_us: float = 2.0
    update_us: float = 0.7
    exponent: float = 0.9
    seed: int = 0

    def check(self) -> None:
        """Raises:
        ConfigError: a number is out of range.
        """
        if self.steps < 1 or self.warm_steps < 0 or min(self.model_us, self.update_us, self.seed) < 0:
            raise ConfigError("a study needs at least one step, and costs and a seed that are not negative")
        if not 1 <= self.batch_rows <= self.n_rows // 2:
            raise ConfigError(f"a step of {self.batch_rows} rows: it must be 1 to half the {self.n_rows} of the table")


@dataclass(frozen=True)
class Setting:
    """What a run is about.

    Args:
        cache: the share of the rows that have frames.
        lookahead: batches known beyond the one being stepped; 0: nothing is announced, a step is the first to ask.
    """

    device: str
    workload: str
    cache: float
    lookahead: int


@dataclass(frozen=True)
class Outcome:
    """What the measured steps of a run took, in virtual seconds.

    Args:
        wait_ms: that a step waited for its rows, on average; hit_rate: rows that were in RAM, of those stepped.
        read_s, write_s: that the device was busy; seeks, returns: of its head.
    """

    rows_per_s: float
    wait_ms: float
    wait_share: float
    hit_rate: float
    seconds: float
    read_s: float
    write_s: float
    seeks: int
    returns: int


class NoBytes(Backend):
    """Moves nothing, at once."""

    name: ClassVar[str] = "no bytes"

    def open(self, path: Path, *, create: bool = False, writable: bool = True, direct: bool = False) -> File:
        return File(path, -1, alignment=512, writable=writable)

    def close(self, file: File) -> None:
        pass

    async def read(self, file: File, extents: Extents, buffer: Bytes, then: Callable[[], None] | None = None) -> None:
        self.counters.read_requests += len(extents)
        self.counters.read_bytes += int(extents.lengths.sum())
        if then is not None:
            then()

    async def write(self, file: File, offset: int, buffer: Bytes, before: Callable[[], None] | None = None) -> None:
        self.counters.write_requests += 1
        self.counters.write_bytes += buffer.nbytes
        if before is not None:
            before()

    async def sync(self, file: File) -> None:
        self.counters.syncs += 1

    async def truncate(self, file: File, length: int) -> None:
        pass

    async def punch(self, file: File, offset: int, length: int) -> bool:
        return False

    async def write_whole(self, path: Path, parts: Sequence[Bytes]) -> None:
        pass

    async def replace(self, source: Path, target: Path) -> None:
        pass

    async def sync_directory(self, path: Path) -> None:
        pass

    async def remove(self, path: Path) -> None:
        pass

    def shut_down(self, timeout_s: float) -> None:
        pass


def _bytes(count: int) -> Bytes:
    """A buffer of so many bytes that takes no memory."""
    return np.broadcast_to(np.zeros(1, np.uint8), count)


class TimedLog(RowLog):
    """The row log's requests, and what it reports, without records; headers are remembered here."""

    headers: dict[int, Rows]

    async def fill(self, job: FillJob) -> None:
        if job.new:
            self.fill_new(job)
            return
        offsets, record_bytes = job.table.layout.offsets(job.slots), job.table.record.record_bytes
        reach = plan(
            offsets,
            record_bytes,
            merge_gap_bytes=self.config.merge_gap_bytes,
            max_request_bytes=self.config.max_request_bytes,
            alignment=job.table.file.alignment,
        )
        buffer = _bytes(reach.buffer_bytes)
        await self.backend.read(job.table.file, reach.extents, buffer, then=partial(self.fill_new, job))

    def fill_new(self, job: FillJob) -> None:
        with self.lock:
            self.books.filled(job)
            self.settled()

    def _copied(self, job: WriteJob) -> None:
        with self.lock:
            self.books.copied(job)

    async def write(self, job: WriteJob) -> None:
        layout = job.table.layout
        used, place = _bytes(layout.used_bytes(len(job.frames))), job.segment * layout.segment_bytes
        await self.backend.write(job.table.file, place, used, before=partial(self._copied, job))
        self.headers[job.segment] = job.rows
        with self.lock:
            self.books.written(job)
            self.settled()

    async def clean(self, job: CleanJob) -> None:
        table, layout = job.table, job.table.layout
        whole = _bytes(layout.segment_bytes)
        rows, slots = [], []
        for victim in job.victims:
            length = layout.used_bytes(len(self.headers[victim]))
            place = np.array([victim * layout.segment_bytes], np.int64)
            await self.backend.read(table.file, Extents(place, np.array([length]), np.zeros(1, np.int64)), whole)
            named = self.headers[victim]
            live = named[self.books.still_live(table, named, victim)]
            rows.append(live)
            slots.append(table.segments.locate(live)[0])
        moved = np.concatenate(rows)
        used = _bytes(layout.used_bytes(len(moved)))
        await self.backend.write(table.file, job.target * layout.segment_bytes, used)
        self.headers[job.target] = moved
        with self.lock:
            self.books.cleaned(job, moved, np.concatenate(slots), np.zeros(len(moved), np.uint32))
            self.settled()


def _row_at(scale: Scale) -> Rows:
    """Which row has which rank."""
    return np.random.default_rng(scale.seed).permutation(scale.n_rows)


@lru_cache(maxsize=16)
def batches(workload: str, scale: Scale, first: int, count: int) -> list[Rows]:
    """The sorted rows of steps `first` to `first + count`: a step's are the same whatever else is asked for."""
    weights = 1 / np.arange(1, scale.n_rows + 1) ** (scale.exponent if workload == "zipf" else 0.0)
    cumulative = np.cumsum(weights / weights.sum())
    row_at, found = _row_at(scale), []
    for number in range(first, first + count):
        random = np.random.default_rng((scale.seed, number + _AGED_STEPS))
        chosen = np.empty(0, np.int64)
        while len(chosen) < scale.batch_rows:
            draws = np.sort(random.random(scale.batch_rows))  # sorted ones are looked up faster
            ranks = random.permutation(np.searchsorted(cumulative, draws).clip(max=scale.n_rows - 1))
            drawn = np.concatenate([chosen, row_at[ranks]])
            chosen = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        found.append(np.sort(chosen[: scale.batch_rows]))
    return found


def likely_rows(workload: str, scale: Scale, count: int) -> Rows:
    """The rows that a cache of so many frames holds after a long time."""
    return np.sort(_row_at(scale)[:count])


@lru_cache(maxsize=8)
def _aged(workload: str, scale: Scale, segment_bytes: int) -> tuple[Segments, dict[int, Rows]]:
    """A log in which every row is, written over and cleaned many times; and its segments' headers."""
    layout = segment_layout(RecordLayout(WIDTH, "float32").record_bytes, scale.n_rows, segment_bytes)
    segments = Segments(layout, np.full(scale.n_rows, -1, np.int32), np.zeros(scale.n_rows, np.uint32))
    headers: dict[int, Rows] = {}
    before = min(_AGE * scale.n_rows // scale.batch_rows, _AGED_STEPS)
    order = [np.random.default_rng(scale.seed + 1).permutation(scale.n_rows).astype(np.int64)]
    rows = np.concatenate(order + batches(workload, scale, -before, before))

    def put(moved: Rows, cleaning: bool, expected: Rows | None) -> None:
        segment = segments.allocate(cleaning=cleaning)
        headers[segment] = moved
        segments.written(segment, moved, np.zeros(len(moved), np.uint32), 0, expected)
        segments.reads_ended(0)

    for start in range(0, len(rows), layout.slots):
        while segments.wants_cleaning() and (victims := segments.choose_victims()):
            live = [headers[v][segments.still_live(headers[v], v)] for v in victims]
            moved = np.concatenate(live)
            put(moved, True, segments.locate(moved)[0])
            for victim in victims:
                segments.abandon(victim, 0)
            segments.reads_ended(0)
        part = rows[start : start + layout.slots]
        put(part[np.sort(np.unique(part, return_index=True)[1])], False, None)
    return segments, headers


@dataclass
class Run:
    """The engine's parts, wired for one setting."""

    setting: Setting
    scale: Scale
    model: DeviceModel
    wait_s: float = 0.0
    failure: BaseException | None = None
    _sequences: dict[int, int] = field(default_factory=dict)
    _stepped_s: float = 0.0

    def __post_init__(self) -> None:
        scale, record = self.scale, RecordLayout(WIDTH, "float32")
        choice = choose(self.model.figures, backend="emulated", direct=True)
        self.config = IOConfig(
            queue_depth=choice.queue_depth,
            merge_gap_bytes=choice.merge_gap_bytes,
            max_request_bytes=choice.max_request_bytes,
            known_rows=max(1 << 20, 2 * scale.batch_rows * (self.setting.lookahead + 2)),
        )
        n_frames = max(int(self.setting.cache * scale.n_rows), 1)
        cache_bytes = n_frames * (record.record_bytes + FRAME_OVERHEAD_BYTES)
        size = choose_segment_bytes(record.record_bytes, scale.n_rows, cache_bytes)
        segments, headers = copy.deepcopy(_aged(self.setting.workload, scale, size))
        arena = Arena(np.zeros((n_frames, 8), np.uint8))  # frames without their records
        frame_of = np.full(scale.n_rows, NO_FRAME, np.int32)
        table = Table(0, "table", scale.n_rows, record, arena, arena.add_table(frame_of), segments)
        self.books = Bookkeeping(Window(self.config.known_batches, self.config.known_rows))
        self.books.tables, self.books.arenas = [table], [arena]
        self.backend = EmulatedBackend(NoBytes(), self.model, seed=scale.seed)
        table.file = self.backend.open(Path("log"))
        self.access = Access(self.books, self._latch)
        self.log = TimedLog(self.backend, self.books, self.config, self.access.condition, self._settled)
        self.log.headers = headers
        self.warm_steps = scale.warm_steps + int(_WARM_SHARE * n_frames / scale.batch_rows)
        count = self.warm_steps + scale.steps + self.setting.lookahead
        self.rows = batches(self.setting.workload, scale, 0, count)
        self._fill_cache(likely_rows(self.setting.workload, scale, n_frames))

    def _fill_cache(self, rows: Rows) -> None:
        """Bring rows into frames at once, before time begins."""
        books = self.books
        step = books.begin({0: rows}, lasting=False)
        books.bring()
        while (job := books.next_fill()) is not None:
            books.filled(job)
        for piece in step.batch.pieces:
            positions = books.ready(piece)
            if positions is None:
                raise RuntimeError(f"{self.setting}: the cache takes fewer rows than it has frames")
            books.commit(piece, positions)
        books.end_step()

    def _latch(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._settled()

    def _settled(self) -> None:
        self.changed.set()
        self._wake()

    def _wake(self) -> None:
        self.prefetch.wanted.set()
        self.writebehind.wanted.set()

    async def measure(self) -> Outcome:
        """Run all steps; the figures of those after the warm ones."""
        self.changed = asyncio.Event()
        self.writebehind = WriteBehind(self.access, self.log, self.config.dirty_share, self._latch)
        self.prefetch = Prefetch(self.access, self.log, self.writebehind.wanted.set, self._latch)
        self._tasks = [asyncio.create_task(self.prefetch.run()), asyncio.create_task(self.writebehind.run())]
        scale, clock = self.scale, asyncio.get_running_loop().time
        for number in range(self.warm_steps):
            await self._step(number)
        began, waited, before = clock(), self.wait_s, copy.copy(self.backend.time)
        tally = copy.copy(self.books.tally)
        for number in range(self.warm_steps, self.warm_steps + scale.steps):
            await self._step(number)
        seconds, now = clock() - began, self.backend.time
        await _cancel_the_rest()
        touched = self.books.tally.rows_touched - tally.rows_touched
        return Outcome(
            rows_per_s=touched / seconds,
            wait_ms=(self.wait_s - waited) / scale.steps * 1e3,
            wait_share=(self.wait_s - waited) / seconds,
            hit_rate=1 - (self.books.tally.misses - tally.misses) / touched,
            seconds=seconds,
            read_s=now.read_s - before.read_s,
            write_s=now.write_s - before.write_s,
            seeks=now.seeks - before.seeks,
            returns=now.returns - before.returns,
        )

    def _announce_until(self, number: int) -> None:
        for coming in range(len(self._sequences), number + 1):
            with self.access as books:
                self._sequences[coming] = books.announce(Kind.AHEAD, {0: self.rows[coming]}).sequence
        self._wake()

    async def _step(self, number: int) -> None:
        if self.setting.lookahead:
            # As `lookahead` does: batches are fetched until `depth` wait behind the one that is handed out.
            self._announce_until(number + self.setting.lookahead)
            with self.access as books:
                books.hand_out(self._sequences[number])
            self._wake()
        rows = self.rows[number]
        await asyncio.sleep(self.scale.model_us * 1e-6 * len(rows))
        with self.access as books:
            step = books.begin({0: rows}, lasting=True)
        waits_before = self.wait_s
        for piece in step.batch.pieces:
            while piece.remaining:
                positions = await self._rows_of(step, piece)
                await asyncio.sleep(self.scale.update_us * 1e-6 * len(positions))
                with self.access as books:
                    books.commit(piece, positions)
        now = asyncio.get_running_loop().time()
        interval_s, self._stepped_s = now - self._stepped_s, now
        with self.access as books:
            if step.announced:
                books.reach.stepped(waited=self.wait_s - waits_before > _WAITED_SHARE * interval_s)
            books.end_step()
        self._wake()

    async def _rows_of(self, step: Step, piece: Piece) -> NDArray[np.int64]:
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            if self.failure is not None:
                raise self.failure
            self.changed.clear()
            with self.access as books:
                books.bring()
                job = books.next_new()
                positions = None if job is not None else books.ready(piece)
                if positions is not None:
                    books.lease(piece, positions)
                    self.wait_s += clock() - began
                    return positions
            if job is not None:
                self.log.fill_new(job)
                continue
            self._wake()
            await self.changed.wait()


async def _cancel_the_rest() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run(setting: Setting, scale: Scale, models: Mapping[str, DeviceModel] = MODELS) -> Outcome:
    """Run one setting on a loop of its own."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(Run(setting, scale, models[setting.device]).measure())
    finally:
        loop.close()
