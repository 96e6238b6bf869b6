"""The batches of bench.step: which rows are looked up, and how often the best policy would have to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench import policies
from bench.cache import WINDOW, zipf

EXPONENTS = {"uniform": 0.0, "zipf 0.9": 0.9, "zipf 1.1": 1.1}
_ENDLESS = 1 << 40


class Batch(NamedTuple):
    """One step's look-ups, int64: of entities, with repetitions, in no order; and of relations (none: no model)."""

    entities: Tensor
    relations: Tensor


_NONE = torch.empty(0, dtype=torch.int64)


class Draws:
    """Independent draws of rows; which row has which rank is random.

    Args:
        in_use: only rows of this sorted set are drawn; None: of the whole table.
    """

    def __init__(self, n_rows: int, distribution: str, seed: int, in_use: NDArray[np.int64] | None = None) -> None:
        self._random = np.random.default_rng((seed, list(EXPONENTS).index(distribution)))
        self._n_rows = n_rows
        self._in_use = in_use
        self._exponent = EXPONENTS[distribution]
        count = n_rows if in_use is None else len(in_use)
        self._count = count
        self._cumulative: NDArray[np.float64] | None = None
        self._row_at: NDArray[np.int64] | None = None
        if self._exponent:
            self._cumulative = np.cumsum(zipf(count, self._exponent))
            self._row_at = self._random.permutation(count)

    def rows(self, count: int) -> Tensor:
        """So many draws, int64."""
        if self._cumulative is None or self._row_at is None:
            drawn = self._random.integers(0, self._count, count)
        else:
            ranks = np.searchsorted(self._cumulative, self._random.random(count))
            drawn = self._row_at[np.minimum(ranks, self._count - 1)]
        return torch.from_numpy(drawn if self._in_use is None else self._in_use[drawn])

    def batch(self, count: int) -> Batch:
        """A batch of so many look-ups, of one table."""
        return Batch(self.rows(count), _NONE)

    def triples(self, count: int, n_relations: int) -> Batch:
        """A batch of triples: heads, tails, and as many corrupted ones, all drawn alike."""
        return Batch(self.rows(4 * count), torch.from_numpy(self._random.integers(0, n_relations, count)))

    def frequencies(self) -> NDArray[np.float64]:
        """Each row's share of the draws, float64 [n_rows]."""
        found = np.zeros(self._n_rows)
        share = zipf(self._count, self._exponent)
        ranked = np.arange(self._count) if self._row_at is None else self._row_at
        found[ranked if self._in_use is None else self._in_use[ranked]] = share
        return found


def distinct_rows(batches: Sequence[Batch]) -> int:
    """Rows that the batches update, each batch counted by itself, all tables together."""
    return sum(len(np.unique(part.numpy())) for batch in batches for part in batch)


def reference_misses(batches: Sequence[Batch], measured: int, n_frames: int, frequencies: NDArray[np.float64]) -> float:
    """Entity rows that a step has to read, on average, with the best policy that bench.cache knows.

    It holds a batch's rows until the batch is over, knows the next 64 batches, and beyond them the true frequencies.

    Args:
        measured: the first batch that counts.
    """
    sets = [np.unique(batch.entities.numpy()).astype(np.int32) for batch in batches]
    starts = np.concatenate([[0], np.cumsum([len(rows) for rows in sets])]).astype(np.int64)
    rows = np.concatenate(sets)
    n_rows = len(frequencies)
    coming = policies.next_batches(rows, starts, n_rows)
    hits = policies.foreknown(
        rows, starts, measured, n_rows, n_frames, coming, WINDOW, frequencies[None], _ENDLESS, True
    )
    return float(starts[-1] - starts[measured] - hits) / (len(sets) - measured)
