"""The device made of the CPU: what events order happens in order, the rest by chance; time is virtual."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from dsa.io.late_device import LateDevice


@pytest.fixture
def device() -> Iterator[LateDevice]:
    made = LateDevice(seed=1)
    yield made
    made.close()


def orders(waits: bool) -> set[str]:
    """The orders, over some seeds, of a piece of work on one stream and one on another that may wait for it."""
    found = set()
    for seed in range(20):
        device = LateDevice(seed)
        done: list[str] = []
        device.run(device.into, lambda done=done: done.append("a"))  # type: ignore[misc]
        event = device.record(device.into)
        if waits:
            device.wait(device.out, event)
        device.run(device.out, lambda done=done: done.append("b"))  # type: ignore[misc]
        device.finish()
        found.add("".join(done))
        device.close()
    return found


def test_streams_go_past_each_other_unless_an_event_orders_them() -> None:
    assert orders(waits=False) == {"ab", "ba"}
    assert orders(waits=True) == {"ab"}


def test_the_same_seed_gives_the_same_order() -> None:
    def order(seed: int) -> list[int]:
        device = LateDevice(seed)
        done: list[int] = []
        for i in range(30):
            stream = (device.current(), device.into, device.out)[i % 3]
            device.run(stream, lambda i=i: done.append(i))  # type: ignore[misc]
        device.finish()
        device.close()
        return done

    orders_by_seed = [order(seed) for seed in range(5)]
    assert [order(seed) for seed in range(5)] == orders_by_seed
    assert len({tuple(each) for each in orders_by_seed}) == 5


def test_a_copy_reads_and_writes_when_it_is_made_not_when_it_is_issued(device: LateDevice) -> None:
    source, target = torch.ones(4), torch.zeros(4)
    device.copy(device.into, target, source)
    event = device.record(device.into)
    assert target.sum() == 0
    source[0] = 5
    threading.Thread(target=device.hurry).start()
    device.synchronize(event)
    assert target.tolist() == [5, 1, 1, 1]


def test_a_step_ends_with_its_own_stream_done(device: LateDevice) -> None:
    done: list[int] = []
    for i in range(10):
        device.run(device.current(), lambda i=i: done.append(i))  # type: ignore[misc]
    device.finish_step()
    assert done == list(range(10))


def test_what_work_raises_comes_out_of_the_step_once(device: LateDevice) -> None:
    def fail() -> None:
        raise ValueError("no")

    device.run(device.current(), fail)
    with pytest.raises(ValueError, match="no"):
        device.finish_step()
    device.finish_step()


def test_time_is_virtual_and_waits_for_events() -> None:
    device = LateDevice(copy_s=lambda nbytes: nbytes / 100)
    block = torch.zeros(50, dtype=torch.uint8)
    device.copy(device.into, block, torch.ones_like(block))  # from 0.0 to 0.5
    first = device.record(device.into)
    device.copy(device.into, block, torch.ones_like(block))  # to 1.0
    second = device.record(device.into)
    device.spend(0.75)
    assert device.stalled_s == 0
    device.wait(device.current(), first)
    device.finish_step()
    assert device.stalled_s == 0  # 0.5 has passed
    device.wait(device.current(), second)
    device.finish_step()
    assert device.stalled_s == 0.25
    assert device.current().clock_s == 1.0
    assert device.copied_s == 1.0
    device.close()
