"""Hit rates of DSA's eviction, replayed on traces, beside those of other policies: `python -m bench.cache`.

DSA's own columns run `dsa.io.eviction` itself on a cache without bytes: a batch's rows all get frames before its step
and are pinned until its end (one batch held); with 64 known batches the policy has been told of the next 64. The
reference has the same 64 batches, the same pins, and beyond the window the true frequencies. `measured` batches at the
end of a trace count, after at least 20 accesses a row. The other policies see access after access, without pins.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench import policies
from dsa.io.eviction import FREE, Policy

DATA = Path(__file__).parent / "data"
SHARES = (0.01, 0.05, 0.10, 0.25)
WINDOW = 64
WARM_ACCESSES_PER_ROW = 20


@dataclass(frozen=True)
class Trace:
    """Batches of sorted unique rows, one after the other, and what is true of them.

    Args:
        rows, starts: the rows of batch k are rows[starts[k] : starts[k + 1]].
        measured: the first batch that counts.
        frequencies: (phases, n_rows), the true ones, in phases of phase_batches batches.
        stationary: whether they stay the same.
    """

    name: str
    n_rows: int
    rows: NDArray[np.int32]
    starts: NDArray[np.int64]
    measured: int
    frequencies: NDArray[np.float64]
    phase_batches: int
    stationary: bool

    @property
    def n_batches(self) -> int:
        return len(self.starts) - 1


def zipf(n_rows: int, exponent: float) -> NDArray[np.float64]:
    """The shares of ranks 0 to n_rows - 1."""
    weights = 1 / np.arange(1, n_rows + 1) ** exponent
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def draws(
    name: str, seed: int, n_rows: int, batch: int, exponent: float, swaps: float = 0.0, scan_every: int = 0
) -> Trace:
    """Independent draws of `batch` rows a batch, by rank; which row has which rank is random.

    Args:
        swaps: in every 16 batches this share of the rows gets other ranks.
        scan_every: every so many batches one is a piece of a scan through the whole table instead.
    """
    random = np.random.default_rng(seed)
    share = zipf(n_rows, exponent)
    cumulative = np.cumsum(share)
    row_at = random.permutation(n_rows)
    warm = WARM_ACCESSES_PER_ROW * n_rows
    phase_batches = 16 if swaps else 1 << 40
    frequencies = []
    pieces: list[NDArray[np.int32]] = []
    seen = 0
    measured: int | None = None
    scan = 0
    while measured is None or len(pieces) < measured + max(measured // 8, 160):
        number = len(pieces)
        if number % phase_batches == 0:
            if swaps and number:
                some = random.choice(n_rows, int(swaps * n_rows), replace=False)
                row_at[some] = row_at[random.permutation(some)]
            frequency = np.empty(n_rows)
            frequency[row_at] = share
            frequencies.append(frequency)
        if scan_every and number % scan_every == scan_every - 1:
            rows = np.sort(np.arange(scan, scan + batch) % n_rows)
            scan = (scan + batch) % n_rows
        else:
            ranks = np.minimum(np.searchsorted(cumulative, random.random(batch)), n_rows - 1)
            rows = np.unique(row_at[ranks])
        pieces.append(rows.astype(np.int32))
        seen += len(rows)
        if measured is None and seen >= warm:
            measured = len(pieces)
    return _trace(name, n_rows, pieces, measured, np.array(frequencies), phase_batches, not swaps and not scan_every)


def graph(name: str, file: str, seed: int, triples: int) -> Trace:
    """The entities (heads and tails) of a training run over a knowledge graph: a new order each epoch."""
    random = np.random.default_rng(seed)
    train = np.load(DATA / file)["train"]
    n_rows = int(train[:, [0, 2]].max()) + 1
    degree = np.bincount(train[:, [0, 2]].reshape(-1), minlength=n_rows).astype(np.float64)
    pieces: list[NDArray[np.int32]] = []
    seen = 0
    measured = None
    while measured is None or len(pieces) < measured + max(measured // 2, 160):
        order = random.permutation(len(train))
        for at in range(0, len(train), triples):
            pieces.append(np.unique(train[order[at : at + triples]][:, [0, 2]]).astype(np.int32))
            seen += len(pieces[-1])
            if measured is None and seen >= WARM_ACCESSES_PER_ROW * n_rows:
                measured = len(pieces)
    return _trace(name, n_rows, pieces, measured, (degree / degree.sum())[None], 1 << 40, True)


def _trace(
    name: str,
    n_rows: int,
    pieces: list[NDArray[np.int32]],
    measured: int,
    frequencies: NDArray[np.float64],
    phase_batches: int,
    stationary: bool,
) -> Trace:
    starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    return Trace(name, n_rows, np.concatenate(pieces), starts, measured, frequencies, phase_batches, stationary)


def ours(trace: Trace, n_frames: int, window: int, parts: int = 1) -> int:
    """Hits of dsa.io.eviction with the next `window` batches known; a batch comes in `parts`, one of them held."""
    policy = Policy(n_frames)
    table = policy.add_table(trace.n_rows)
    frame_of = np.full(trace.n_rows, -1, np.int32)
    row_of = np.full(n_frames, -1, np.int64)
    flags = np.full(n_frames, FREE, np.uint8)
    pins = np.zeros(n_frames, np.int32)
    whole = [trace.rows[trace.starts[k] : trace.starts[k + 1]].astype(np.int64) for k in range(trace.n_batches)]
    batches = [part for rows in whole for part in np.array_split(rows, parts)]
    measured = trace.measured * parts
    told = hits = free = 0
    for number, rows in enumerate(batches):
        while told <= min(number + window, len(batches) - 1):
            policy.known(table, told, batches[told], frame_of[batches[told]])
            told += 1
        frames = frame_of[rows]
        missing = rows[frames < 0]
        if number >= measured:
            hits += len(rows) - len(missing)
        pins[frames[frames >= 0]] += 1
        taken = np.arange(free, min(free + len(missing), n_frames), dtype=np.int32)
        free += len(taken)
        victims = policy.victims(len(missing) - len(taken), flags, pins)
        frame_of[row_of[victims]] = -1
        taken = np.concatenate([taken, victims])
        if len(taken) < len(missing):
            raise RuntimeError(f"{trace.name}: batch {number} has {len(rows)} rows, the cache {n_frames} frames")
        row_of[taken] = missing
        frame_of[missing] = taken
        flags[taken] = 0
        pins[taken] += 1
        policy.filled(table, missing, taken)
        frames = frame_of[rows]
        policy.touched(table, rows, frames)
        pins[frames] -= 1
        policy.ended(table, number, frames)
    return int(hits)


def replay(trace: Trace, n_frames: int, only: set[str] | None = None) -> dict[str, float]:
    """The hit rate of each policy on one trace with a cache of n_frames."""
    accesses = int(trace.starts[-1] - trace.starts[trace.measured])
    common = (trace.rows, trace.starts, trace.measured, trace.n_rows, n_frames)
    coming = policies.next_batches(trace.rows, trace.starts, trace.n_rows)
    known = (coming, WINDOW, trace.frequencies, trace.phase_batches)
    endless = (coming, 1 << 31, trace.frequencies, trace.phase_batches)
    runs: dict[str, Callable[[], int]] = {
        "LRU": lambda: policies.lru(*common),
        "CLOCK": lambda: policies.clock(*common),
        "SIEVE": lambda: policies.sieve(*common),
        "S3-FIFO": lambda: policies.s3_fifo(*common),
        "ideal LFU": lambda: policies.ideal_lfu(*common[:3], n_frames, trace.frequencies, trace.phase_batches),
        "LFU held": lambda: policies.foreknown(*common, coming, -1, *known[2:], True),
        "DSA, 0 known": lambda: ours(trace, n_frames, 0),
        "DSA parts": lambda: ours(trace, n_frames, 0, 32),
        "DSA, 64 known": lambda: ours(trace, n_frames, WINDOW),
        "reference": lambda: policies.foreknown(*common, *known, True),
        "reference free": lambda: policies.foreknown(*common, *known, False),
        "Belady": lambda: policies.foreknown(*common, *endless, False),
    }
    return {name: run() / accesses for name, run in runs.items() if only is None or name in only}
