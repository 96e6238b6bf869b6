"""Hit rates of DSA's eviction, replayed on traces, beside those of other policies: `python -m bench.cache`.

DSA's columns run `dsa.io.eviction` itself on a cache without bytes. Two settings:

- *free*, the classical one: access after access, nothing announced. LRU, CLOCK, SIEVE, S3-FIFO as published, ideal LFU
  (the truly most frequent rows at every moment), Belady's optimum; `DSA free` brings a batch in 32 parts (4 with
  --quick), of which one is pinned at a time.
- *held*, training: all rows of a batch have frames before its step and are pinned until its end. `DSA 0` has been told
  nothing ahead, `DSA 64` the next 64 batches. The reference has the same pins and the same 64 batches, and beyond them
  the true frequencies; `LFU held` has the true frequencies only.

The last batches of a trace count, after at least 20 accesses a row. Hits are exact: one seed, one number.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
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
CLASSICAL = ("LRU", "CLOCK", "SIEVE", "S3-FIFO")


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
        swaps: in every 64 batches this share of the rows gets other ranks.
        scan_every: every so many batches one is a piece of a scan through the whole table instead.
    """
    random = np.random.default_rng(seed)
    share = zipf(n_rows, exponent)
    cumulative = np.cumsum(share)
    row_at = random.permutation(n_rows)
    warm = WARM_ACCESSES_PER_ROW * n_rows
    phase_batches = 64 if swaps else 1 << 40
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


def replay(trace: Trace, n_frames: int, parts: int) -> dict[str, int]:
    """The hits of each policy on one trace with a cache of n_frames; `DSA free` takes a batch in parts."""
    common = (trace.rows, trace.starts, trace.measured, trace.n_rows, n_frames)
    coming = policies.next_batches(trace.rows, trace.starts, trace.n_rows)
    truth = (trace.frequencies, trace.phase_batches)
    endless = 1 << 31
    runs: dict[str, Callable[[], int]] = {
        "LRU": lambda: policies.lru(*common),
        "CLOCK": lambda: policies.clock(*common),
        "SIEVE": lambda: policies.sieve(*common),
        "S3-FIFO": lambda: policies.s3_fifo(*common),
        "ideal LFU": lambda: policies.ideal_lfu(trace.rows, trace.starts, trace.measured, n_frames, *truth),
        "Belady": lambda: policies.foreknown(*common, coming, endless, *truth, False),
        "DSA free": lambda: ours(trace, n_frames, 0, parts),
        "LFU held": lambda: policies.foreknown(*common, coming, -1, *truth, True),
        "DSA 0": lambda: ours(trace, n_frames, 0),
        "reference": lambda: policies.foreknown(*common, coming, WINDOW, *truth, True),
        "DSA 64": lambda: ours(trace, n_frames, WINDOW),
    }
    return {name: int(run()) for name, run in runs.items()}


def traces(seed: int, n_rows: int, batch: int, wanted: Iterable[str]) -> Iterator[Trace]:
    """The traces of the table, one after the other (the big ones take hundreds of megabytes)."""
    makers: dict[str, Callable[[], Trace]] = {
        "zipf 0.7": lambda: draws("zipf 0.7", seed, n_rows, batch, 0.7),
        "zipf 0.9": lambda: draws("zipf 0.9", seed, n_rows, batch, 0.9),
        "zipf 1.1": lambda: draws("zipf 1.1", seed, n_rows, batch, 1.1),
        "uniform": lambda: draws("uniform", seed, n_rows, batch, 0.0),
        "fb15k-237": lambda: graph("fb15k-237", "fb15k237.npz", seed, 64),
        "codex-m": lambda: graph("codex-m", "codex-m.npz", seed, 64),
        "drift": lambda: draws("drift", seed, n_rows, batch, 0.9, swaps=0.08),
        "scan": lambda: draws("scan", seed, n_rows, batch, 0.9, scan_every=2),
    }
    for name, make in makers.items():
        if not set(wanted) or name in set(wanted):
            yield make()


def ratios(trace: Trace, hits: dict[str, int]) -> dict[str, float]:
    """What is promised, on one trace and size; a promise that does not apply there is left out."""
    accesses = int(trace.starts[-1] - trace.starts[trace.measured])
    out = {"none_vs_best": hits["DSA free"] / max(1, *(hits[name] for name in CLASSICAL))}
    if trace.stationary:
        out["none_vs_ideal_lfu"] = hits["DSA free"] / max(1, hits["ideal LFU"])
        out["none_held_vs_lfu_held"] = hits["DSA 0"] / max(1, hits["LFU held"])
    if hits["reference"] > 0.2 * accesses:
        out["known64_vs_reference"] = hits["DSA 64"] / hits["reference"]
    return out


def main() -> None:
    """Print the table; say at its end how close DSA came where it was worst."""
    parser = argparse.ArgumentParser(prog="python -m bench.cache", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the rows, two sizes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", action="append", default=[], help="only this trace (may be given again)")
    parser.add_argument("--rows", type=int, help="rows of the drawn traces; batches are 1/122 of them")
    parser.add_argument("--size", type=float, action="append", help="only caches of this share of the rows")
    parser.add_argument("--json", type=Path, help="write hits, accesses and ratios to this file")
    options = parser.parse_args()
    if options.rows is not None and options.rows < 122:
        parser.error(f"--rows must be at least 122 (a batch of one draw), got {options.rows}")
    n_rows = options.rows or (20_000 if options.quick else 1_000_000)
    batch = max(n_rows // 122, 1)
    sizes = options.size or ((0.05, 0.25) if options.quick else SHARES)
    if not all(0 < size <= 1 for size in sizes):
        parser.error(f"--size is a share of the rows, above 0 and at most 1, got {', '.join(map(str, sizes))}")
    console = Console(width=None if Console().is_terminal else 170)
    began = time.perf_counter()
    table = Table(title=f"hit rates: {n_rows:,} rows, batches of {batch:,} draws, seed {options.seed}")
    worst: dict[str, tuple[float, str]] = {}
    results: list[dict[str, Any]] = []
    for trace in traces(options.seed, n_rows, batch, options.trace):
        accesses = int(trace.starts[-1] - trace.starts[trace.measured])
        for size in sizes:
            n_frames, largest = int(size * trace.n_rows), int(np.diff(trace.starts).max())
            if n_frames < largest:
                parser.error(f"--size {size}: {n_frames} frames do not hold a batch of {trace.name!r}, {largest} rows")
            hits = replay(trace, n_frames, 4 if options.quick else 32)
            if not results:
                for column in ("trace", "cache", *hits):
                    table.add_column(column, justify="left" if column == "trace" else "right")
            table.add_row(trace.name, f"{size:.0%}", *(f"{count / accesses:.3f}" for count in hits.values()))
            reached = ratios(trace, hits)
            for name, value in reached.items():
                worst[name] = min(worst.get(name, (np.inf, "")), (value, f"{trace.name}, {size:.0%}"))
            results.append(
                {"trace": trace.name, "frames": n_frames, "accesses": accesses, "hits": hits, "ratios": reached}
            )
            console.log(f"{trace.name}, {size:.0%}: {time.perf_counter() - began:.0f} s")
    if not results:
        parser.error(f"no trace is called {' or '.join(options.trace)}")
    console.print(table)
    for name, (value, where) in sorted(worst.items()):
        console.print(f"{name}: {value:.4f} at the least ({where})")
    if options.json:
        summary = {name: value for name, (value, _) in worst.items()}
        options.json.write_text(json.dumps({"seed": options.seed, "ratios": summary, "results": results}, indent=1))


if __name__ == "__main__":
    main()
