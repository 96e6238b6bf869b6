"""Emulated devices: what requests take, in which order a head serves them, and that it is the same each time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dsa.config import IOConfig
from dsa.errors import DeviceError
from dsa.io.backends import Extents, ThreadsBackend
from dsa.io.backends.clocks import CountedClock, VirtualTimeLoop
from dsa.io.backends.device_models import HDD, MODELS, NETWORK, NVME, SATA, DeviceModel, ParallelDevice, RotatingDisk
from dsa.io.backends.device_queues import DeviceQueue, queue_of
from dsa.io.backends.emulated import EmulatedBackend
from dsa.io.device_choice import DeviceFigures

KIB, MIB = 1024, 1 << 20
DATA = np.random.default_rng(0).integers(0, 256, 8 * MIB, np.uint8)
STILL = dataclasses.replace(HDD, jitter=0.0)


def ask(queue: DeviceQueue, at_s: float, positions: object, length: int = KIB, write: bool = False) -> int:
    places = np.array(positions, np.int64)
    return queue.submit(at_s, write, places, np.full(len(places), length, np.int64))


def finish(queue: DeviceQueue, *tickets: int) -> list[float]:
    ends = [queue.expected_s(ticket) for ticket in tickets]
    queue.run_until(max(ends))
    assert ends == [queue.expected_s(ticket) for ticket in tickets]
    return ends


def scattered(count: int, span: int, seed: int = 3) -> np.ndarray:
    random = np.random.default_rng(seed)
    places = np.unique(random.integers(0, span // KIB, 2 * count))
    return random.permutation(places)[:count] * KIB


# The head.


def test_a_seek_takes_longer_the_further_it_goes() -> None:
    busy = []
    for distance in (10**9, 10**10, 10**11, 10**12, 4 * 10**12):
        queue = queue_of(dataclasses.replace(STILL, rotation_s=1e-9, track_bytes=1.0), 0)
        finish(queue, ask(queue, 0.0, [distance], 1))
        busy.append(queue.time.read_s)
        assert queue.time.seeks == 1
    assert busy == sorted(busy)
    assert busy[0] > STILL.settle_s
    assert busy[-1] == pytest.approx(STILL.full_seek_s, rel=1e-3)


def test_what_lies_ahead_on_the_track_comes_by_itself_and_what_lies_behind_takes_a_turn() -> None:
    queue = queue_of(STILL, 0)
    start = finish(queue, ask(queue, 0.0, [MIB], 4 * KIB))[0]
    # Right behind, a tenth of a track on, and the place just passed.
    end = finish(queue, ask(queue, start, [MIB + 4 * KIB], 4 * KIB))[0]
    assert end - start == pytest.approx(4 * KIB / STILL.bytes_per_s)
    later = finish(queue, ask(queue, end, [MIB + 8 * KIB + 150_000], 4 * KIB))[0]
    assert later - end == pytest.approx((150_000 + 4 * KIB) / STILL.bytes_per_s)
    seeks = queue.time.seeks
    back = finish(queue, ask(queue, later, [MIB], 4 * KIB))[0]
    assert back - later < STILL.rotation_s
    assert queue.time.seeks == seeks + 1
    assert queue.time.returns == 1


def test_a_read_of_many_places_is_one_sweep_of_the_head_and_far_faster_than_in_the_order_of_submission() -> None:
    places = scattered(500, 1 << 41)
    seconds, returns = {}, {}
    for name, model in (("sweep", STILL), ("as submitted", dataclasses.replace(STILL, sweeps=False))):
        queue = queue_of(model, 0)
        seconds[name] = finish(queue, ask(queue, 0.0, places))[0]
        returns[name] = queue.time.returns
        assert queue.time.read_s == pytest.approx(seconds[name])
        assert queue.time.write_s == 0.0
    assert returns["sweep"] == 0
    assert returns["as submitted"] > 200
    assert seconds["sweep"] * 1.4 < seconds["as submitted"]


def test_the_head_takes_in_its_sweep_what_is_queued_while_it_moves() -> None:
    def returns(gap_s: float) -> tuple[int, float]:
        queue = queue_of(STILL, 0)
        tickets = [ask(queue, k * gap_s, scattered(10, 1 << 41, k)) for k in range(20)]
        expected = queue.expected_s(tickets[0])
        finish(queue, *tickets)
        return queue.time.returns, expected

    one_by_one, together = returns(1.0), returns(1e-6)
    assert one_by_one[0] >= 15
    assert together[0] <= 2
    assert together[1] > one_by_one[1]  # the first waits while the head takes others on its way


def test_other_requests_delay_a_ticket_and_never_hasten_it() -> None:
    random = np.random.default_rng(5)
    for model in (HDD, dataclasses.replace(HDD, sweeps=False), SATA):
        queue = queue_of(model, 1)
        ticket = ask(queue, 0.0, scattered(200, 1 << 28))
        expected = queue.expected_s(ticket)
        at = 0.0
        for number in range(20):
            at += float(random.random()) * 5e-3
            queue.forget(ask(queue, at, scattered(5, 1 << 28, number), write=bool(number % 2)))
            assert queue.expected_s(ticket) >= expected - 1e-12
            expected = queue.expected_s(ticket)


def test_tickets_that_nobody_asks_about_are_worked_off_and_their_places_used_again() -> None:
    queue = queue_of(HDD, 0)
    for number in range(200):
        queue.forget(ask(queue, number * 1.0, [number * MIB], write=True))
    last = ask(queue, 1e6, [0])
    assert last < 16
    assert queue.over(last, 1e6 + 1)
    busy = queue.time.write_s
    assert 200 * KIB / HDD.bytes_per_s < busy < 200 * (HDD.full_seek_s + HDD.rotation_s)


# Devices without moving parts.


@pytest.mark.parametrize("model", [NVME, SATA, NETWORK], ids=lambda model: model.name)
def test_few_requests_see_the_latency_many_the_rate_and_long_ones_the_bandwidth(model: ParallelDevice) -> None:
    still = dataclasses.replace(model, jitter=0.0)
    queue = queue_of(still, 0)
    assert finish(queue, ask(queue, 0.0, [0], 512))[0] == pytest.approx(still.read_latency_s)
    queue = queue_of(still, 0)
    per_request = finish(queue, ask(queue, 0.0, scattered(20_000, 1 << 30), 512))[0] / 20_000
    assert per_request == pytest.approx(still.figures.read_request_s, rel=0.05)
    for write, rate in ((False, still.read_bytes_per_s), (True, still.write_bytes_per_s)):
        queue = queue_of(still, 0)
        end = finish(queue, ask(queue, 0.0, np.arange(256) * 4 * MIB, 4 * MIB, write))[0]
        assert (1 << 30) / end == pytest.approx(rate, rel=0.02)
        assert (queue.time.write_s > 0) is write
        assert (queue.time.read_s > 0) is not write
    assert queue.time.seeks == queue.time.returns == 0


@pytest.mark.parametrize("write", [False, True])
def test_reads_and_writes_take_turns_and_neither_waits_for_the_whole_line_of_the_other(write: bool) -> None:
    queue = queue_of(SATA, 0)
    crowd = ask(queue, 0.0, scattered(5000, 1 << 30), write=write)
    alone = queue.expected_s(crowd)
    few = ask(queue, 1e-3, np.arange(4) * MIB, 64 * KIB, write=not write)
    assert queue.expected_s(few) < 0.1 * alone
    assert queue.expected_s(crowd) > alone
    behind = ask(queue, 1e-3, [0], write=write)  # the same line: it comes after the crowd
    assert queue.expected_s(behind) >= queue.expected_s(crowd) - SATA.read_latency_s * 5


def test_a_probe_becomes_a_device_of_its_figures() -> None:
    class Probe:
        path = "/data"
        figures = DeviceFigures(10e-6, 17e-6, 100e-6, 60e-6, 2e9, 2.5e9, 32)

    model = DeviceModel.from_probe(Probe())
    assert model.figures == Probe.figures
    assert "/data" in model.name


# The same each time.


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_the_seed_decides_every_time(model: DeviceModel) -> None:
    def ends(seed: int) -> list[float]:
        queue = queue_of(model, seed)
        tickets = [ask(queue, k * 1e-2, scattered(3, 1 << 30, k), write=k % 3 == 0) for k in range(10)]
        return [*finish(queue, *tickets), queue.time.read_s, queue.time.write_s]

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)


# The backend.


@pytest.fixture
def threads() -> Iterator[ThreadsBackend]:
    backend = ThreadsBackend(IOConfig(queue_depth=2))
    yield backend
    backend.shut_down(30)


def extents(places: np.ndarray, length: int = KIB) -> Extents:
    count = len(places)
    return Extents(np.sort(places), np.full(count, length, np.int64), np.arange(count, dtype=np.int64) * length)


async def work(backend: EmulatedBackend, path: Path) -> tuple[float, list[str]]:
    """Reads and a write at once; when all was over, and in which order they ended."""
    file = backend.open(path)
    order: list[str] = []

    async def read(name: str, seed: int) -> None:
        wanted = extents(scattered(40, 8 * MIB, seed))
        buffer = np.zeros(40 * KIB, np.uint8)
        await backend.read(file, wanted, buffer, lambda: order.append(name))
        assert (buffer.reshape(40, KIB) == DATA.reshape(-1, KIB)[wanted.offsets // KIB]).all()

    async def write() -> None:
        await backend.write(file, 8 * MIB, np.ones(MIB, np.uint8))
        order.append("write")

    await asyncio.gather(read("first", 1), write(), read("second", 2))
    await backend.sync(file)
    backend.close(file)
    return asyncio.get_running_loop().time(), order


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_virtual_time_is_the_same_each_time_whatever_the_threads_do(
    model: DeviceModel, threads: ThreadsBackend, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    found = []
    for _ in range(3):
        path.write_bytes(DATA.tobytes())
        loop = VirtualTimeLoop()
        backend = EmulatedBackend(threads, model, seed=4)
        seconds, order = loop.run_until_complete(work(backend, path))
        loop.close()
        found.append((seconds, sorted(order), backend.time))
    assert found[0] == found[1] == found[2]
    time = found[0][2]
    assert time.sync_s == model.sync_s
    assert time.read_s > 0
    assert time.write_s > 0
    assert found[0][0] >= model.sync_s
    if isinstance(model, RotatingDisk):  # one head: never idle here, so its work adds up to the time that passed
        assert time.read_s + time.write_s + time.sync_s == pytest.approx(found[0][0])


def test_virtual_seconds_do_not_pass(threads: ThreadsBackend, tmp_path: Path) -> None:
    """More than an hour of a disk's time: the test's own limit is two minutes."""
    path = tmp_path / "data"
    path.write_bytes(bytes(MIB))
    slow = dataclasses.replace(STILL, rotation_s=600.0, track_bytes=1e6)
    loop = VirtualTimeLoop()
    backend = EmulatedBackend(threads, slow)
    file = backend.open(path)
    for place in (0, 500_000, 0, 500_000, 0, 500_000, 0):
        loop.run_until_complete(backend.read(file, extents(np.array([place])), np.zeros(KIB, np.uint8)))
    assert loop.time() > 1800
    assert backend.time.read_s == pytest.approx(loop.time())
    backend.close(file)
    loop.close()


async def test_a_counted_clock_goes_on_by_what_the_device_takes(threads: ThreadsBackend, tmp_path: Path) -> None:
    clock = CountedClock()
    backend = EmulatedBackend(threads, STILL, clock=clock)
    file = backend.open(tmp_path / "new", create=True)
    await backend.write(file, 0, np.ones(MIB, np.uint8))
    assert clock.now() == pytest.approx(backend.time.write_s)
    await backend.read(file, extents(np.array([0, 512 * KIB])), np.zeros(2 * KIB, np.uint8))
    assert clock.now() == pytest.approx(backend.time.write_s + backend.time.read_s)
    await backend.write_whole(tmp_path / "small", [np.ones(100, np.uint8)])
    await backend.sync_directory(tmp_path)
    assert backend.time.sync_s == 2 * STILL.sync_s
    assert clock.now() == pytest.approx(backend.time.write_s + backend.time.read_s + backend.time.sync_s)
    backend.close(file)


async def test_a_failed_read_costs_no_wait_and_does_not_run_then(threads: ThreadsBackend, tmp_path: Path) -> None:
    clock = CountedClock()
    backend = EmulatedBackend(threads, STILL, clock=clock)
    file = backend.open(tmp_path / "new", create=True)
    ran: list[int] = []
    with pytest.raises(DeviceError, match="the file ends there"):
        await backend.read(file, extents(np.array([0])), np.zeros(KIB, np.uint8), lambda: ran.append(1))
    assert ran == []
    assert clock.now() == 0.0
    backend.close(file)


async def test_the_clock_waits_really_on_a_usual_loop(threads: ThreadsBackend, tmp_path: Path) -> None:
    """The call is not over before the device is: the loop's own clock says so."""
    backend = EmulatedBackend(threads, STILL)
    file = backend.open(tmp_path / "new", create=True)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await backend.write(file, 0, np.ones(4 * KIB, np.uint8))
    assert loop.time() - began >= backend.time.write_s - 1e-6
    assert backend.time.write_s > 4 * KIB / STILL.bytes_per_s
    backend.close(file)


async def test_writes_of_whole_segments_take_a_disk_less_than_two_percent_of_the_time(
    threads: ThreadsBackend, tmp_path: Path
) -> None:
    """A batch's reads in one sweep, and its records written back as one segment: what each costs the head."""
    backend = EmulatedBackend(threads, HDD, clock=CountedClock())
    file = backend.open(tmp_path / "log", create=True)
    await backend.truncate(file, 300 * MIB)
    batch = 1024
    for number in range(4):
        before = backend.time.returns
        wanted = extents(scattered(batch, 256 * MIB, number))
        await backend.read(file, wanted, np.zeros(batch * KIB, np.uint8))
        assert backend.time.returns - before <= 1  # back to the beginning, then one sweep
        await backend.write(file, 256 * MIB + number * MIB, np.ones(batch * KIB, np.uint8))
    assert 0 < backend.time.write_s < 0.02 * (backend.time.read_s + backend.time.write_s)
    backend.close(file)
