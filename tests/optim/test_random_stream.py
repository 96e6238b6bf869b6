"""The stream that fetching draws from: training's generators draw as if it were not there."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dsa.optim import random_stream
from dsa.optim.random_stream import RandomStream

DRAWS: dict[str, Callable[[], object]] = {
    "numpy": lambda: np.random.randint(1 << 30),
    "one normal of a pair": lambda: float(np.random.randn()),
    "random": random.random,
    "one of gauss": lambda: random.gauss(0, 1),
    "torch": lambda: float(torch.rand(())),
}


def seed() -> None:
    np.random.seed(1)
    random.seed(1)
    torch.manual_seed(1)


@pytest.fixture(autouse=True, params=["place known", "numpy is asked"])
def _restore(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    if request.param == "numpy is asked":
        monkeypatch.setattr(random_stream, "_place_of_kept", lambda: None)
    else:
        assert random_stream._place_of_kept() is not None
    bits, state = np.random.get_bit_generator(), np.random.get_state()
    yield
    np.random.set_bit_generator(bits)
    np.random.set_state(state)


@pytest.mark.parametrize("outside", DRAWS)
@pytest.mark.parametrize("inside", [*DRAWS, "nothing"])
def test_training_draws_as_if_nothing_were_fetched(outside: str, inside: str) -> None:
    draw = DRAWS[outside]
    seed()
    expected = [draw() for _ in range(7)]
    seed()
    stream = RandomStream(5)
    found = []
    for _ in range(7):
        with stream:
            if inside in DRAWS:
                DRAWS[inside]()
        found.append(draw())
    assert found == expected


@pytest.mark.parametrize("kind", DRAWS)
def test_the_stream_goes_on_where_it_ended(kind: str) -> None:
    def drawn(pauses: int) -> list[object]:
        found, stream = [], RandomStream(9)
        for _ in range(6):
            with stream:
                found.append(DRAWS[kind]())
            for _ in range(pauses):
                with stream:
                    pass
                [draw() for draw in DRAWS.values()]
        return found

    assert drawn(0) == drawn(1) == drawn(2)
    assert len(set(drawn(0))) == 6


def test_a_kept_normal_that_was_used_up_outside_is_not_drawn_again() -> None:
    seed()
    np.random.randn()
    kept = np.random.get_state()
    expected = [float(np.random.randn()) for _ in range(3)]
    stream = RandomStream(2)
    np.random.set_state(kept)
    with stream:
        pass
    found = [float(np.random.randn())]
    with stream:
        pass
    found += [float(np.random.randn()) for _ in range(2)]
    assert found == expected
    np.random.set_state(kept)  # as a loop does that restores the generators after an evaluation
    with stream:
        pass
    assert float(np.random.randn()) == expected[0]


def test_other_bit_generators_are_exchanged_too() -> None:
    np.random.set_bit_generator(np.random.PCG64(4))
    expected = [np.random.randint(1 << 30) for _ in range(4)]
    mine = np.random.PCG64(4)
    np.random.set_bit_generator(mine)
    stream = RandomStream(5)
    found = []
    for _ in range(4):
        with stream:
            np.random.seed(3) if isinstance(np.random.get_bit_generator(), np.random.MT19937) else None
        found.append(np.random.randint(1 << 30))
    assert found == expected
    assert np.random.get_bit_generator() is mine


def test_a_fetch_that_sets_another_bit_generator_keeps_it_to_itself() -> None:
    seed()
    before, other = np.random.get_bit_generator(), np.random.PCG64(8)
    stream = RandomStream(5)
    with stream:
        np.random.set_bit_generator(other)
    assert np.random.get_bit_generator() is before
    with stream:
        assert np.random.get_bit_generator() is other
    assert np.random.get_bit_generator() is before
