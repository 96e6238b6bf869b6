"""Records through files: requests counted, bytes as the format says, cleaning with real segments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsa.config import IOConfig
from dsa.errors import CorruptError, DsaError
from dsa.io.cache import FRAME_OVERHEAD_BYTES
from dsa.io.engine import Engine
from dsa.io.layout import read_header, record_check
from dsa.io.tables import TableSpec
from dsa.io.window import Kind


class Log:
    """An engine with one table; a step writes numbers of its own into its rows."""

    def __init__(
        self, path: Path, n_rows: int, width: int, n_frames: int, dtype: str = "float32", **config: Any
    ) -> None:
        self.spec = TableSpec("t", (n_rows, width), dtype, width, dtype)
        knobs = IOConfig(**{"dirty_share": 0.0, **config})
        frame_bytes = self.spec.record.record_bytes + FRAME_OVERHEAD_BYTES
        self.engine = Engine(
            path,
            [self.spec],
            cache_bytes=n_frames * frame_bytes + frame_bytes // 2,
            existing="resume",
            backend="threads",
            keep_generations=1,
            config=knobs,
        )
        self.truth = np.zeros((n_rows, self.spec.record.record_bytes), np.uint8)
        self.rnd = np.random.default_rng(n_rows + width)

    @property
    def table(self) -> Any:
        return self.engine._pipeline.books.tables[0]

    @property
    def counters(self) -> Any:
        return self.engine._pipeline.backend.counters

    def step(self, rows: np.ndarray[Any, Any]) -> None:
        rows = np.unique(rows).astype(np.int64)
        values = self.rnd.integers(0, 256, (len(rows), self.truth.shape[1]), dtype=np.uint8)

        def update(table: int, positions: Any, frames: Any) -> None:
            self.table.arena.memory[frames] = values[positions]

        self.engine.step({0: rows}, update, [0])
        self.truth[rows] = values

    def read(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        out = np.empty((len(rows), self.truth.shape[1]), np.uint8)
        self.engine.read(0, rows.astype(np.int64), out)
        return out

    def check(self) -> None:
        rows = np.arange(self.spec.n_rows)
        assert np.array_equal(self.read(rows), self.truth)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Any]:
    made: list[Log] = []

    def make(*args: Any, **options: Any) -> Log:
        made.append(Log(tmp_path / "state", *args, **options))
        return made[-1]

    yield make
    for log in made:
        log.engine.close()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [1, 3, 7, 100, 129])
def test_records_of_any_width_come_back_from_the_file(logs: Any, width: int, dtype: str) -> None:
    log = logs(70, width, 9, dtype)
    for _ in range(30):
        log.step(log.rnd.integers(0, 70, 12))
    log.check()
    log.engine.checkpoint([None])
    log.engine.close()
    again = logs(70, width, 9, dtype)
    again.truth = log.truth
    again.check()
    assert again.engine.statistics(gradient_s=0, compile_s=0, kernel="").rows_new < 70


def test_the_file_is_as_the_format_says(logs: Any) -> None:
    log = logs(60, 16, 20, segment_bytes=8192)
    for _ in range(12):
        log.step(log.rnd.integers(0, 60, 15))
    log.engine.checkpoint([None])
    table = log.table
    layout, path = table.layout, table.file.path
    data = np.fromfile(path, np.uint8)
    assert len(data) % layout.segment_bytes == 0
    assert len(data) // layout.segment_bytes == table.file_segments
    rows = np.flatnonzero(table.segments.slots >= 0)
    assert len(rows) > 30
    for row in rows:
        slot = int(table.segments.slots[row])
        segment, place = divmod(slot, layout.slots)
        named = read_header(data[segment * layout.segment_bytes :], layout, segment, table.identity, path)
        assert named[place] == row
        at = int(layout.offsets(np.array([slot]))[0])
        record = data[at : at + layout.record_bytes]
        assert np.array_equal(record, log.truth[row])
        assert record_check(record.copy().view(np.uint64), row) == table.segments.checks[row]


def test_neighbouring_rows_are_read_in_few_requests_and_new_rows_in_none(logs: Any) -> None:
    n_rows = 16384
    log = logs(n_rows, 16, 8192 + 64)
    log.step(np.arange(8192))
    assert log.counters.read_requests == 0
    log.engine.checkpoint([None])
    log.step(np.arange(8192, n_rows))
    log.engine.checkpoint([None])
    assert log.counters.read_requests == 0
    log.engine.announce(Kind.ANNOUNCED, {0: np.arange(8192, dtype=np.int64)})
    log.step(np.arange(8192))
    resident = 64
    segments = -(-8192 // log.table.layout.slots)
    bound = 8192 * log.spec.record.record_bytes / (1 << 20) + 1
    assert 0 < log.counters.read_requests <= bound + segments
    assert log.counters.read_bytes <= (8192 + resident) * log.spec.record.record_bytes + segments * 3 * 4096


def test_a_segment_is_one_request(logs: Any) -> None:
    log = logs(64, 16, 64, dirty_share=1.0)
    log.step(np.arange(64))
    before = log.counters.write_requests
    log.engine._pipeline.run(log.engine._pipeline.flush())
    assert log.counters.write_requests - before == -(-64 // log.table.layout.slots)


def test_cleaning_keeps_every_record_and_the_file_small(logs: Any) -> None:
    log = logs(600, 16, 100, segment_bytes=8192)
    for _ in range(150):
        log.step(log.rnd.integers(0, 600, 50))
    figures = log.engine.statistics(gradient_s=0, compile_s=0, kernel="")
    assert figures.segments_cleaned > 0
    log.check()
    live = figures.live_records * log.spec.record.record_bytes
    assert figures.state_bytes_on_disk <= 2 * live + 16 * log.table.layout.segment_bytes


@pytest.mark.parametrize("what", ["header", "record"])
def test_cleaning_stops_at_damage_and_says_where(logs: Any, what: str) -> None:
    log = logs(600, 16, 100, segment_bytes=8192)
    layout = log.table.layout

    def damage() -> None:
        slots = log.table.segments.slots
        with open(log.table.file.path, "r+b") as file:
            if what == "header":
                for segment in range(log.table.file_segments):
                    file.seek(segment * layout.segment_bytes + 20)
                    file.write(b"\xff\xff")
            else:
                for at in layout.offsets(slots[slots >= 0].astype(np.int64)):
                    file.seek(int(at))
                    file.write(b"\xff\x00\xff\x01\x7f")

    for _ in range(30):
        log.step(log.rnd.integers(0, 600, 50))
    log.engine._pipeline.run(log.engine._pipeline.flush())
    damage()
    # Rows that have a frame are stepped: nothing is read but what cleaning reads.
    arena = log.table.arena

    def step_on() -> None:
        for _ in range(400):
            resident = arena.row_of[arena.row_of >= 0]
            log.step(log.rnd.choice(resident, 30, replace=False))
            log.engine._pipeline.run(log.engine._pipeline.flush())

    with pytest.raises(CorruptError) as caught:
        step_on()
    text = str(caught.value)
    assert str(log.table.file.path) in text
    assert "segment" in text
    assert "at byte" in text
    with pytest.raises(DsaError):
        log.engine.checkpoint([None])
