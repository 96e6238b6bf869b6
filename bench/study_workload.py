"""What the study trains on: how large, which rows in which step, and the log as a long training has left it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dsa.errors import ConfigError
from dsa.io.cache import Rows
from dsa.io.layout import RecordLayout, segment_layout
from dsa.io.segments import Segments

RECORD = RecordLayout(128, "float32")  # 1 KiB of moments
_AGE = 2  # before a run every row was written once, then so many times as many rows by steps, with cleaning
_AGED_STEPS = 1 << 20  # more than there are


@dataclass(frozen=True)
class Scale:
    """How large a run is.

    Args:
        n_rows: rows of the table; batch_rows: of them in each step, all different.
        warm_steps: steps before the measured ones, besides those that a large cache needs.
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
def aged(workload: str, scale: Scale, segment_bytes: int) -> tuple[Segments, dict[int, Rows]]:
    """A log in which every row is, written over and cleaned many times; and its segments' headers."""
    layout = segment_layout(RECORD.record_bytes, scale.n_rows, segment_bytes)
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
