"""Ageing: a long memory where popularity stays, a short one where it drifts, and back."""

from __future__ import annotations

import numpy as np
import pytest

from dsa.io.ageing import HALF_LIVES, Ageing


def draw(ageing: Ageing, n_rows: int, accesses_per_row: float, drift: float, seed: int = 0) -> float:
    """Zipf draws; after every access per row the share `drift` of the rows gets other ranks. The half-life chosen."""
    random = np.random.default_rng(seed)
    share = np.cumsum(1 / np.arange(1, n_rows + 1) ** 0.9)
    share /= share[-1]
    row_at = random.permutation(n_rows)
    batch = n_rows // 20
    for number in range(int(accesses_per_row * 20)):
        if number % 20 == 0:
            some = random.choice(n_rows, int(drift * n_rows), replace=False)
            row_at[some] = row_at[random.permutation(some)]
        ageing.touched(0, np.unique(row_at[np.searchsorted(share, random.random(batch))]))
    return ageing.half_life / n_rows


@pytest.mark.parametrize("n_rows", [3000, 30_000])
def test_memory_is_as_long_as_popularity_lasts(n_rows: int) -> None:
    ageing = Ageing(n_rows // 10)
    ageing.add_table(n_rows)
    assert draw(ageing, n_rows, 25, drift=0.0) >= 10
    assert draw(ageing, n_rows, 25, drift=0.7) <= 1
    assert draw(ageing, n_rows, 60, drift=0.0) >= 3


def test_a_new_table_starts_the_measurement_anew_and_is_sampled() -> None:
    ageing = Ageing(300)
    ageing.add_table(3000)
    draw(ageing, 3000, 25, drift=0.9)
    short = ageing.half_life / 3000
    assert short in HALF_LIVES
    ageing.add_table(50_000)
    assert ageing.half_life == short * 53_000
    ageing.touched(1, np.arange(50_000))
    assert ageing.half_life / 53_000 in HALF_LIVES
