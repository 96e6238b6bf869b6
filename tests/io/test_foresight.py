"""Foresight against a dictionary: what the known batches touch next, whatever the order in which they come and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from dsa.errors import UsageError
from dsa.io.foresight import NEVER, Foresight


def rows_of(*rows: int) -> NDArray[np.int64]:
    return np.array(rows, np.int64)


class AgainstADictionary(RuleBasedStateMachine):
    @initialize(
        n_rows=st.integers(1, 70),
        before=st.sampled_from([-1, 65_530, 2**31 - 6, 2**40]),
    )
    def begin(self, n_rows: int, before: int) -> None:
        self.n_rows = n_rows
        self.sequence = before
        self.foresight = Foresight(n_rows)
        self.known: dict[int, list[int]] = {}

    @rule(data=st.data(), skipped=st.integers(0, 3), dtype=st.sampled_from([np.int32, np.int64]))
    def announce(self, data: st.DataObject, skipped: int, dtype: type) -> None:
        rows = sorted(data.draw(st.sets(st.integers(0, self.n_rows - 1))))
        self.sequence += 1 + skipped
        self.foresight.announce(self.sequence, np.array(rows, dtype))
        self.known[self.sequence] = rows

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def retire_any(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.known)))
        self.foresight.retire(sequence)
        del self.known[sequence]

    @precondition(lambda self: self.known)
    @rule()
    def retire_oldest(self) -> None:
        self.foresight.retire(min(self.known))
        del self.known[min(self.known)]

    @precondition(lambda self: self.known)
    @rule()
    def retire_newest(self) -> None:
        self.foresight.retire(max(self.known))
        del self.known[max(self.known)]

    @invariant()
    def says_what_a_dictionary_says(self) -> None:
        naive = [min((k for k, rows in self.known.items() if row in rows), default=NEVER) for row in range(self.n_rows)]
        assert self.foresight.next_use(np.arange(self.n_rows)).tolist() == naive
        assert self.foresight.next_use(np.arange(self.n_rows)[::-1]).tolist() == naive[::-1]
        assert len(self.foresight) == len(self.known)
        if self.known:
            assert self.foresight.span == (min(self.known), max(self.known))
        for sequence, rows in self.known.items():
            assert sequence in self.foresight
            assert self.foresight.rows(sequence).tolist() == rows


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_more_batches_than_slots_over_time() -> None:
    foresight = Foresight(3)
    for sequence in range(70_000):
        foresight.announce(sequence, rows_of(sequence % 3))
        if sequence >= 5:
            assert foresight.next_use(rows_of((sequence - 5) % 3))[0] == sequence - 5
            foresight.retire(sequence - 5)
    assert len(foresight) == 5


@pytest.mark.parametrize("spread", [1, 1000])
def test_large_batches_of_clustered_and_spread_rows(spread: int) -> None:
    random = np.random.default_rng(3)
    n_rows = 5000 * spread
    foresight = Foresight(n_rows)
    batches = [np.unique(random.integers(0, 5000, 3000)) * spread for _ in range(20)]
    for sequence, rows in enumerate(batches):
        foresight.announce(sequence, rows)
    for gone in random.permutation(20):
        foresight.retire(int(gone))
        batches[gone] = rows_of()
        naive = np.full(n_rows, NEVER)
        for sequence in reversed(range(20)):
            naive[batches[sequence]] = sequence
        assert np.array_equal(foresight.next_use(np.arange(0, n_rows, spread)), naive[::spread])


def test_memory_follows_what_is_known_at_once() -> None:
    foresight = Foresight(1000)
    random = np.random.default_rng(0)
    for sequence in range(3000):
        foresight.announce(sequence, np.flatnonzero(random.random(1000) < 0.5))
        if sequence >= 8:
            # Some leave out of order, as dropped batches do.
            foresight.retire(sequence if sequence % 3 == 0 else next(iter(foresight._slots)))
        while len(foresight) > 16:
            foresight.retire(foresight.span[0])
    assert len(foresight._rows) < 2 * 17 * 600


@pytest.mark.parametrize("rows", [rows_of(1, 1), rows_of(2, 1), rows_of(-1, 1), rows_of(3, 10)])
def test_rows_that_are_not_sorted_unique_or_in_range_change_nothing(rows: NDArray[np.int64]) -> None:
    foresight = Foresight(10)
    foresight.announce(4, rows_of(1, 3))
    with pytest.raises(UsageError, match="batch 5"):
        foresight.announce(5, rows)
    assert foresight.next_use(rows_of(1, 2, 3)).tolist() == [4, NEVER, 4]
    foresight.announce(5, rows_of(2))
    assert foresight.next_use(rows_of(2)).tolist() == [5]


def test_numbers_out_of_order_and_unknown_numbers_are_refused() -> None:
    foresight = Foresight(10)
    foresight.announce(4, rows_of(1))
    with pytest.raises(UsageError, match="batch 4 is announced after batch 4"):
        foresight.announce(4, rows_of(2))
    with pytest.raises(UsageError, match="batch 3 is not known"):
        foresight.retire(3)
    foresight.retire(4)
    with pytest.raises(UsageError, match="batch 4 is not known"):
        foresight.rows(4)
