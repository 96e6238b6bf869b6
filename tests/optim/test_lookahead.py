from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dsa.errors import ConfigError
from dsa.optim.lookahead import MOST_AHEAD, Lookahead
from dsa.optim.row_sets import Key, Rows

DEPTHS = [0, 1, 2, 4, 64]


class RecordingAnnouncer:
    """Keeps every call in order, and which tickets are open; `step` ends what was handed out."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.announced: dict[int, Any] = {}
        self.handed_out: set[int] = set()

    @property
    def open(self) -> list[int]:
        return sorted(self.announced)

    def announce_ahead(self, rows: Mapping[Key, Rows], hand_out: int | None = None) -> int:
        ticket = sum(name == "announce" for name, _ in self.calls)
        self.announced[ticket] = rows
        self.calls.append(("announce", rows))
        if hand_out is not None:
            self.hand_out(hand_out)
        return ticket

    def hand_out(self, ticket: int) -> None:
        assert ticket in self.announced
        self.handed_out.add(ticket)
        self.calls.append(("hand_out", ticket))

    def end(self, ticket: int) -> None:
        self.announced.pop(ticket, None)
        self.handed_out.discard(ticket)
        self.calls.append(("end", ticket))

    def step(self) -> None:
        for ticket in self.handed_out:
            del self.announced[ticket]
        self.handed_out.clear()
        self.calls.append(("step", None))


def by_name(batch: Any) -> dict[Any, Any]:
    return {"w": batch}


def lookahead(loader: Iterable[Any], depth: int = 4, rows: Any = by_name) -> tuple[Lookahead[Any], RecordingAnnouncer]:
    announcer = RecordingAnnouncer()
    return Lookahead(loader, rows, announcer, depth), announcer


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_batch_comes_once_and_in_order(depth: int) -> None:
    batches, announcer = lookahead(range(10), depth)
    seen = []
    for batch in batches:
        announcer.step()
        seen.append(batch)
    assert seen == list(range(10))
    assert [rows for name, rows in announcer.calls if name == "announce"] == [{"w": n} for n in range(10)]
    assert announcer.open == []


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_depth_batches_are_announced_beyond_the_one_in_hand(depth: int) -> None:
    batches, announcer = lookahead(range(10), depth)
    for batch in batches:
        assert announcer.open == list(range(batch, min(batch + depth + 1, 10)))
        assert announcer.handed_out == {batch}
        announcer.step()


def test_without_a_depth_one_more_batch_is_known_at_each_step_up_to_a_limit() -> None:
    announcer = RecordingAnnouncer()
    ahead = []
    for batch in Lookahead(range(150), by_name, announcer, depth=None):
        ahead.append(len(announcer.open) - 1)
        announcer.step()
        if batch == 80:
            break
    assert ahead == [min(4 + batch, MOST_AHEAD) for batch in range(81)]
    assert announcer.open == []


def test_a_batch_is_announced_before_the_next_is_fetched() -> None:
    announcer = RecordingAnnouncer()

    def batches() -> Iterator[int]:
        for number in range(6):
            assert len(announcer.announced) == number
            yield number

    assert next(iter(Lookahead(batches(), by_name, announcer, depth=4))) == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_batches_that_never_step_stay_for_depth_batches_only(depth: int) -> None:
    batches, announcer = lookahead(range(100), depth)
    most = 0
    for batch in batches:
        most = max(most, len(announcer.handed_out))
        assert batch in announcer.handed_out
    assert most == max(depth, 1)
    assert announcer.open == []


@pytest.mark.parametrize("depth", DEPTHS)
def test_break_ends_what_is_open(depth: int) -> None:
    batches, announcer = lookahead(range(10), depth)
    for batch in batches:
        announcer.step()
        if batch == 3:
            break
    assert announcer.open == []
    assert list(batches) == list(range(10))


def test_an_exception_in_the_body_ends_what_is_open() -> None:
    batches, announcer = lookahead(range(10))

    def body() -> None:
        for batch in batches:
            raise ValueError(batch)

    with pytest.raises(ValueError, match="0"):
        body()
    assert announcer.open == []


def test_garbage_collection_ends_what_is_open() -> None:
    batches, announcer = lookahead(range(10))
    cycle: list[Any] = [iter(batches)]
    cycle.append(cycle)
    next(cycle[0])
    assert len(announcer.open) == 5
    del cycle
    gc.collect()
    assert announcer.open == []


def test_an_abandoned_iteration_ends_only_its_own() -> None:
    batches, announcer = lookahead(range(10), depth=2)
    first = iter(batches)
    next(first)
    second = iter(batches)
    next(second)
    assert announcer.open == [0, 1, 2, 3, 4, 5]
    first.close()
    assert announcer.open == [3, 4, 5]
    assert next(second) == 1


class Shuffled:
    """Batches from DataLoader with shuffle, and negatives from each of the three global generators in collate."""

    def __init__(self, workers: int) -> None:
        options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
        self.loader: DataLoader[Any] = DataLoader(
            range(40),  # type: ignore[arg-type]
            batch_size=4,
            shuffle=True,
            num_workers=workers,
            collate_fn=self.collate,
            **options,
        )

    @staticmethod
    def collate(rows: list[int]) -> torch.Tensor:
        negatives = [torch.randint(100, ()).item(), int(np.random.randint(100)), random.randrange(100)]
        return torch.tensor([*rows, *negatives])


def numpy_state() -> list[int]:
    return np.random.get_state(legacy=False)["state"]["key"].tolist()  # type: ignore[no-any-return]


def train(depth: int, workers: int) -> tuple[list[Any], tuple[Any, ...]]:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    weights = nn.Embedding(100, 4)
    dropout = nn.Dropout(0.5)
    batches, announcer = lookahead(Shuffled(workers).loader, depth)
    trail = []
    for _ in range(3):
        for batch in batches:
            loss = dropout(weights(batch)).sum().item()
            trail.append((batch.tolist(), loss, float(np.random.random()), random.random()))
            announcer.step()
    return trail, (torch.get_rng_state().tolist(), numpy_state(), random.getstate())


@pytest.mark.parametrize("workers", [0, 2])
def test_no_number_depends_on_the_depth(workers: int) -> None:
    depths = [0, 1, 4, 64] if workers == 0 else [0, 4]
    expected, expected_end = train(depths[0], workers)
    assert len(expected) == 30
    assert sorted(row for batch, *_ in expected[:10] for row in batch[:4]) == list(range(40))
    negatives = {tuple(batch[4:]) for batch, *_ in expected}
    assert len(negatives) == 30, "every batch of every epoch draws anew"
    for depth in depths[1:]:
        trail, end = train(depth, workers)
        assert trail == expected
        assert end == expected_end


def test_a_rows_function_may_draw_too() -> None:
    def drawing(batch: int) -> dict[Any, Any]:
        return {"w": torch.randint(1000, (3,)).tolist()}

    announced = []
    for depth in DEPTHS:
        torch.manual_seed(1)
        batches, announcer = lookahead(range(8), depth, drawing)
        for _ in batches:
            torch.rand(5)
        announced.append([rows for name, rows in announcer.calls if name == "announce"])
    assert all(rows == announced[0] for rows in announced)


def test_random_states_come_back_after_an_error_in_the_loader() -> None:
    def failing() -> Iterator[int]:
        torch.rand(7)
        np.random.random()
        random.random()
        raise OSError("no more data")
        yield 0

    torch.manual_seed(0)
    batches, _ = lookahead(failing())
    iterator = iter(batches)
    before = torch.get_rng_state(), numpy_state(), random.getstate()
    with pytest.raises(OSError, match="no more data"):
        next(iterator)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (numpy_state(), random.getstate())


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("where", ["loader", "rows", "announcer"])
def test_an_error_is_raised_when_its_batch_would_come(depth: int, where: str) -> None:
    error = KeyError("third")

    class Failing(RecordingAnnouncer):
        def announce_ahead(self, rows: Mapping[Key, Rows], hand_out: int | None = None) -> int:
            if where == "announcer" and rows == {"w": 3}:
                raise error
            return super().announce_ahead(rows, hand_out)

    def numbers() -> Iterator[int]:
        for number in range(6):
            if where == "loader" and number == 3:
                raise error
            yield number

    def rows(batch: int) -> dict[Any, Any]:
        if where == "rows" and batch == 3:
            raise error
        return {"w": batch}

    announcer = Failing()
    seen: list[int] = []
    with pytest.raises(KeyError) as caught:
        seen.extend(Lookahead(numbers(), rows, announcer, depth))
    assert caught.value is error
    assert seen == [0, 1, 2]
    assert announcer.open == []


def test_a_rows_function_that_raises_stop_iteration_does_not_end_the_epoch() -> None:
    batches, _ = lookahead(range(3), rows=lambda batch: next(iter(())))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(batches)


class StatefulLoader:
    """Says how many batches it has yielded in this iteration; None before any."""

    def __init__(self) -> None:
        self.yielded = 0
        self.batch_size = 17

    def __iter__(self) -> Iterator[int]:
        for number in range(self.yielded, 8):
            self.yielded = number + 1
            yield number
        self.yielded = 0

    def __len__(self) -> int:
        return 8

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.yielded = state["yielded"]


@pytest.mark.parametrize("depth", DEPTHS)
def test_state_dict_is_that_of_the_batch_in_hand(depth: int) -> None:
    batches, _ = lookahead(StatefulLoader(), depth)
    assert batches.state_dict() == {"yielded": 0}
    for batch in batches:
        assert batches.state_dict() == {"yielded": batch + 1}
    assert batches.state_dict() == {"yielded": 0}

    for batch in batches:
        if batch == 2:
            break
    state = batches.state_dict()
    assert state == {"yielded": 3}
    resumed, _ = lookahead(StatefulLoader(), depth)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert list(resumed) == [3, 4, 5, 6, 7]


def test_len_and_attributes_are_the_loaders() -> None:
    loader = StatefulLoader()
    batches, _ = lookahead(loader)
    assert len(batches) == 8
    assert batches.batch_size == 17
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = batches.nothing_such


def test_what_the_loader_lacks_is_lacking() -> None:
    batches, _ = lookahead(iter([1, 2]))
    assert not hasattr(batches, "state_dict")
    assert not hasattr(batches, "load_state_dict")
    with pytest.raises(TypeError, match="len"):
        len(batches)
    assert list(batches) == [1, 2]


def test_it_can_be_copied() -> None:
    batches, _ = lookahead(range(3))
    assert list(copy.copy(batches)) == [0, 1, 2]


@pytest.mark.parametrize("depth", [-1, 1.0, True, "4"])
def test_a_depth_that_is_no_count_is_refused(depth: Any) -> None:
    with pytest.raises(ConfigError, match="depth"):
        lookahead(range(3), depth)


def test_without_a_rows_function_the_message_tells_how() -> None:
    with pytest.raises(ConfigError, match=r"rows=fn.*watch"):
        lookahead(range(3), rows=None)


def test_a_batch_is_let_go_before_the_next_is_fetched() -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def fresh() -> Iterator[torch.Tensor]:
        nonlocal most
        for _ in range(6):
            batch = torch.zeros(2)
            alive.add(batch)
            most = max(most, len(alive))
            yield batch
            del batch

    batches, announcer = lookahead(fresh(), depth=2, rows=lambda batch: {})
    for batch in batches:
        announcer.step()
        del batch
    assert most == 3
