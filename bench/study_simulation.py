"""One run of the study: the engine's own decisions on an emulated device, in virtual time, without a byte moved.

Bookkeeping, prefetch and write-behind are the engine's, on an event loop whose time jumps; the log is the engine's plan
of requests without their bytes; the device is `EmulatedBackend`. All of it in one thread: so the same setting gives the
same figures to the digit.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.study_log import NoBytes, TimedLog
from bench.study_workload import RECORD, Scale, aged, batches, likely_rows
from dsa.config import IOConfig
from dsa.io.access import Access
from dsa.io.backends.clocks import VirtualTimeLoop
from dsa.io.backends.device_models import MODELS, DeviceModel
from dsa.io.backends.emulated import EmulatedBackend
from dsa.io.bookkeeping import Bookkeeping
from dsa.io.cache import FRAME_OVERHEAD_BYTES, NO_FRAME, Arena, Rows
from dsa.io.device_choice import choose
from dsa.io.jobs import Step, Table
from dsa.io.layout import choose_segment_bytes
from dsa.io.prefetch import Prefetch
from dsa.io.window import Kind, Piece, Window
from dsa.io.writebehind import WriteBehind

_WARM_SHARE = 0.3  # of the frames: after so many rows nothing tells of how the cache was filled


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


@dataclass
class Run:
    """The engine's parts, wired for one setting."""

    setting: Setting
    scale: Scale
    model: DeviceModel
    wait_s: float = 0.0
    failure: BaseException | None = None
    _sequences: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scale, record = self.scale, RECORD
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
        segments, headers = copy.deepcopy(aged(self.setting.workload, scale, size))
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
        """Update rows in frames at once, before time begins: long training leaves nearly all frames dirty."""
        books = self.books
        step = books.begin({0: rows}, lasting=True)
        books.bring()
        while (job := books.next_fill()) is not None:
            books.filled(job)
        for piece in step.batch.pieces:
            positions = books.ready(piece)
            if positions is None:
                raise RuntimeError(f"{self.setting}: the cache takes fewer rows than it has frames")
            books.lease(piece, positions)
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
        clock = asyncio.get_running_loop().time
        self.prefetch = Prefetch(self.access, self.log, self.writebehind.wanted.set, self._latch, clock)
        self._tasks = [asyncio.create_task(self.prefetch.run()), asyncio.create_task(self.writebehind.run())]
        scale = self.scale
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
        for piece in step.batch.pieces:
            while piece.remaining:
                positions = await self._rows_of(step, piece)
                await asyncio.sleep(self.scale.update_us * 1e-6 * len(positions))
                with self.access as books:
                    books.commit(piece, positions)
        now_s, idle_s = asyncio.get_running_loop().time(), self.prefetch.idle_s
        with self.access as books:
            books.reach.stepped(now_s, waited_s=self.wait_s, idle_s=idle_s, announced=step.announced)
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
