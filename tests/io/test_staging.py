"""Each fault that staging must not have, planted, shows as wrong numbers; copies are hidden behind the model."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import restore, same_bits, snapshot
from staging_rig import BATCH, LIMIT_S, Staged

from dsa.errors import UsageError
from dsa.io import late_device
from dsa.io.cache import Arena
from dsa.io.devices import CudaDevice, host_memory, open_device, pinned
from dsa.io.double_buffer import DoubleBuffer
from dsa.io.late_device import LateDevice
from dsa.io.staged import Lease, StagedBatches, StageJob
from dsa.io.staging import Staging
from dsa.io.staging_buffer import Buffer, Phase

pytestmark = pytest.mark.usefixtures("one_thread")
Fault = Callable[[pytest.MonkeyPatch], None]
STEPS = 40


def right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault | None, seed: int) -> bool:
    """Whether training ends with every bit right: each batch is staged before its step, two ahead where that can be,
    and what nobody waits for the device does not do by itself."""
    with monkeypatch.context() as planted:
        if fault is not None:
            fault(planted)
        planted.setattr(late_device, "_MOST_CREDIT", 0)
        training = Staged(tmp_path / str(seed), planted, seed)
        batches = training.batches(STEPS, seed)
        for batch in batches[:2]:
            training.opt.announce(training.rows(batch))
        for i, batch in enumerate(batches):
            training.await_next(2 - i % 2)  # both buffers, then the second one while the first is late to drain
            training.step(batch)
            for coming in batches[i + 2 : i + 3]:
                training.opt.announce(training.rows(coming))
        assert training.staging.staged_rows > 0
        assert training.staging.part_rows == 0
        return numbers_are_right(training)


def numbers_are_right(training: Staged) -> bool:
    try:
        training.twins.check()
    except AssertionError:
        return False
    finally:
        training.opt.close()
    return True


def no_forwarding(planted: pytest.MonkeyPatch) -> None:
    def skip(self: DoubleBuffer, source: Buffer, regions: object, target: Buffer) -> None:
        target.source = None

    planted.setattr(DoubleBuffer, "forward", skip)


def reused_before_its_event(planted: pytest.MonkeyPatch) -> None:
    planted.setattr(LateDevice, "synchronize", lambda self, event: None)


def update_does_not_wait_for_the_copy_in(planted: pytest.MonkeyPatch) -> None:
    planted.setattr(Staging, "_await_copy", lambda self, stream, buffer: None)


def forwarded_before_the_update(planted: pytest.MonkeyPatch) -> None:
    wait = LateDevice.wait

    def but(self: LateDevice, stream: Any, event: Any) -> None:
        if stream is not self.into:
            wait(self, stream, event)

    planted.setattr(LateDevice, "wait", but)


def copied_back_before_the_update(planted: pytest.MonkeyPatch) -> None:
    wait = LateDevice.wait

    def but(self: LateDevice, stream: Any, event: Any) -> None:
        if stream is not self.out:
            wait(self, stream, event)

    planted.setattr(LateDevice, "wait", but)


FAULTS = (
    no_forwarding,
    reused_before_its_event,
    update_does_not_wait_for_the_copy_in,
    forwarded_before_the_update,
    copied_back_before_the_update,
)


@pytest.mark.parametrize("seed", range(3))
def test_with_no_fault_planted_every_bit_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    assert right(tmp_path, monkeypatch, None, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", FAULTS, ids=[each.__name__ for each in FAULTS])
def test_a_planted_fault_shows_as_wrong_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, seed: int
) -> None:
    assert not right(tmp_path, monkeypatch, fault, seed)


def leases_end_with_the_step(planted: pytest.MonkeyPatch) -> None:
    """Frames are free to go while their records are still on the way back."""
    take, keep = StagedBatches.take, StagedBatches.keep

    def early(self: StagedBatches, leases: list[Lease]) -> None:
        for lease in leases:
            arena: Arena = self._books.tables[lease.table].arena
            arena.end_lease(lease.frames)
            arena.unpin(lease.frames)
        self._out = []

    def take_early(self: StagedBatches, job: StageJob, step: Any) -> list[Lease]:
        leases = take(self, job, step)
        early(self, leases)
        return leases

    def keep_early(self: StagedBatches, piece: Any, positions: Any) -> Lease:
        lease = keep(self, piece, positions)
        early(self, [lease])
        return lease

    planted.setattr(StagedBatches, "take", take_early)
    planted.setattr(StagedBatches, "keep", keep_early)
    planted.setattr(StagedBatches, "back", lambda self, leases: None)


@pytest.mark.parametrize("ahead", [True, False], ids=["staged", "in-parts"])
@pytest.mark.parametrize("fault", [None, leases_end_with_the_step], ids=["right", "evicted"])
def test_frames_wait_for_their_records_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault | None, ahead: bool
) -> None:
    if fault is not None:
        fault(monkeypatch)
    monkeypatch.setattr(late_device, "_MOST_CREDIT", 0)
    training = Staged(tmp_path, monkeypatch, 0, cache=8000)
    opt = training.opt
    arena = opt._books.engine._pipeline.books.arenas[0]
    batch = torch.arange(BATCH)
    if ahead:
        opt.announce(training.rows(batch))
        training.await_staged()
    training.step(batch)
    assert training.staging.phases().count(Phase.DRAINING) >= 1
    opt.announce({"w": range(100, 300)})  # takes every frame that it can get, which are too few
    condition = training.staging._access.condition
    with condition:
        assert condition.wait_for(lambda: arena.pinned == arena.n_frames, 20.0)
    training.device.hurry()
    training.await_phases(lambda phases: Phase.DRAINING not in phases)
    assert numbers_are_right(training) == (fault is None)


def overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_s: float, *, announced: bool = True) -> float:
    """The share of the copies' time that steps do not wait for, when each copy takes 1 s (virtual)."""
    device = LateDevice(copy_s=lambda nbytes: 1.0)
    training = Staged(tmp_path, monkeypatch, 0, device=device)
    batches = training.batches(50)
    for batch in batches[:2] if announced else []:
        training.opt.announce(training.rows(batch))
    for i, batch in enumerate(batches):
        left = min(2, len(batches) - i) if announced else 0
        training.await_phases(
            lambda phases, left=left: phases.count(Phase.READY) == left and phases.count(Phase.FREE) == 2 - left,
            hurry=True,
        )
        device.spend(model_s)
        training.step(batch)
        for coming in batches[i + 2 : i + 3] if announced else []:
            training.opt.announce(training.rows(coming))
    training.check()
    return 1 - device.stalled_s / device.copied_s


def test_copies_are_hidden_when_the_model_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert overlap(tmp_path / "long", monkeypatch, model_s=2.5) >= 0.9
    assert overlap(tmp_path / "short", monkeypatch, model_s=0.1) < 0.9
    assert overlap(tmp_path / "alone", monkeypatch, model_s=2.5, announced=False) <= 0.5


def test_blocks_grow_to_the_largest_batch_and_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    allocate = LateDevice.device_block

    def noted(self: LateDevice, nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return allocate(self, nbytes)

    monkeypatch.setattr(LateDevice, "device_block", noted)
    monkeypatch.setattr("dsa.io.staging_buffer._LEAST_BYTES", 256)
    training = Staged(tmp_path, monkeypatch, 0)
    for rows in (4, 4, 4, 4, 200, 200, 4, 200):
        training.step(torch.arange(rows))
    assert len(made) == 4
    assert training.opt.statistics().device_bytes == sum(made[-2:])
    training.check()


def test_a_batch_larger_than_a_buffer_may_be_goes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsa.io.double_buffer.MOST_BYTES", 400)  # ten records
    training = Staged(tmp_path, monkeypatch, 0)
    for batch in training.opt.lookahead(training.batches(10), rows=training.rows, depth=2):
        training.step(batch)
    assert training.staging.staged_rows == 0
    assert training.staging.part_rows > 10 * BATCH
    training.check()


class SmallDevice(LateDevice):
    """A device with memory for blocks of at most `most_bytes`."""

    most_bytes = 1 << 40
    refused = 0

    def device_block(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.most_bytes:
            self.refused += 1
            raise torch.OutOfMemoryError(f"no {nbytes} bytes on this device")
        return super().device_block(nbytes)


@pytest.mark.parametrize("most_bytes", [256, 700])
def test_a_device_without_memory_for_a_batch_takes_it_in_parts_and_stages_again_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr("dsa.io.staging_buffer._LEAST_BYTES", 64)
    device = SmallDevice(0)
    device.most_bytes = most_bytes
    training = Staged(tmp_path, monkeypatch, 0, device=device)
    batches = iter(training.batches(200))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for batch in training.opt.lookahead(list(itertools.islice(batches, 15)), rows=training.rows, depth=2):
            training.step(batch)
    assert ["no memory to stage the moments" in str(each.message) for each in warned] == [True]
    assert 0 < device.refused < 15 * 12  # fewer and fewer batches are tried
    assert training.staging.staged_rows == 0
    assert training.staging.part_rows > 0
    assert training.staging.device_bytes <= 2 * most_bytes
    training.twins.check()
    device.most_bytes = 1 << 40
    for batch in batches:
        training.opt.announce(training.rows(batch))
        training.await_next(1, or_else=training.refused)
        training.step(batch)
        if training.staging.staged_rows:
            break
    assert training.staging.staged_rows > 0
    training.check()


@pytest.mark.filterwarnings("ignore:the device had no memory to stage")
def test_a_step_for_which_the_device_has_no_memory_at_all_is_mended_by_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsa.io.staging_buffer._LEAST_BYTES", 64)
    device = SmallDevice(0)
    training = Staged(tmp_path, monkeypatch, 0, device=device)
    opt, twins, batches = training.opt, training.twins, training.batches(20)
    for batch in batches[:5]:
        training.step(batch[:4])
    saved, right = opt.state_dict(), snapshot(twins.oracle, twins.ram)
    device.most_bytes = 0
    for buffer in training.staging._buffers.both:
        buffer._host, buffer._block = buffer._host[:0], buffer._block[:0]
    twins.give(training.gradients(batches[5]))
    with pytest.raises(torch.OutOfMemoryError, match="bytes of memory for the records"):
        opt.step()
    with pytest.raises(UsageError, match="load_state_dict"):
        opt.step()
    device.most_bytes = 1 << 40
    opt.load_state_dict(saved)
    restore(right, twins.oracle, twins.disk, twins.ram)
    for batch in opt.lookahead(batches[5:], rows=training.rows, depth=3):
        training.step(batch)
    training.check()


def without_memory_for_forwarding(monkeypatch: pytest.MonkeyPatch, thread: str) -> list[bool]:
    """Every second forwarding by this thread finds no memory; whether each did is listed."""
    forward, found = DoubleBuffer.forward, []

    def scarce(self: DoubleBuffer, source: Buffer, regions: Any, target: Buffer) -> None:
        if threading.current_thread().name == thread:
            found.append(not (found and found[-1]))
            if found[-1]:
                if len(found) % 4 == 1:  # or half of it has been issued
                    forward(self, source, regions, target)
                raise torch.OutOfMemoryError("no memory on this device")
        forward(self, source, regions, target)

    monkeypatch.setattr(DoubleBuffer, "forward", scarce)
    monkeypatch.setattr(late_device, "_MOST_CREDIT", 0)
    return found


@pytest.mark.filterwarnings("ignore:the device had no memory to stage")
@pytest.mark.parametrize("seed", range(3))
def test_a_step_without_memory_for_forwarding_gives_the_next_batch_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    found = without_memory_for_forwarding(monkeypatch, "MainThread")
    training = Staged(tmp_path, monkeypatch, seed)
    batches = training.batches(STEPS, seed)
    for batch in batches[:2]:
        training.opt.announce(training.rows(batch))
    for i, batch in enumerate(batches):
        training.await_next(2 - i % 2, or_else=training.refused)
        training.step(batch)
        for coming in batches[i + 2 : i + 3]:
            training.opt.announce(training.rows(coming))
    assert set(found) == {True, False}
    assert training.staging.part_rows > 0
    training.check()


@pytest.mark.filterwarnings("ignore:the device had no memory to stage")
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_for_whose_forwarding_the_thread_finds_no_memory_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Each batch is being staged while the step before it is updated: so what both hold is the thread's to forward."""
    found, stepped = without_memory_for_forwarding(monkeypatch, "dsa-staging"), threading.Event()
    copy_in = DoubleBuffer.copy_in

    def until_stepped(self: DoubleBuffer, buffer: Buffer, pieces: Any) -> None:
        early = buffer.source is not None and buffer.source.phase is Phase.READY
        copy_in(self, buffer, pieces)
        if early and threading.current_thread().name == "dsa-staging":
            assert stepped.wait(LIMIT_S)

    monkeypatch.setattr(DoubleBuffer, "copy_in", until_stepped)
    training = Staged(tmp_path, monkeypatch, seed)
    batches = training.batches(STEPS, seed)
    training.opt.announce(training.rows(batches[0]))
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        refused = training.refused()
        if not refused:
            training.await_phases(lambda phases: Phase.READY in phases and Phase.DRAINING not in phases, hurry=True)
        if following is not None:
            training.opt.announce(training.rows(following))
            if not refused:
                training.await_next(3, or_else=lambda: Phase.FILLING in training.staging.phases())
        training.step(batch)
        stepped.set()
        training.await_phases(lambda phases: Phase.FILLING not in phases, hurry=True)
        stepped.clear()
    assert set(found) == {True, False}
    assert training.staging.part_rows > 0
    training.check()


def test_blocks_are_as_large_as_the_device_has_room_for() -> None:
    device = SmallDevice(0)
    buffer = Buffer(device)
    first = buffer.make_room(1000)
    assert first == buffer.device_bytes >= 1250
    device.most_bytes = 2 * first
    assert buffer.make_room(first * 8, 1) == 2 * first  # without the quarter more that there may be
    assert buffer.make_room(first, 1) == 2 * first
    assert buffer.device_bytes == buffer._host.nbytes
    with pytest.raises(torch.OutOfMemoryError, match=f"no {first * 8} bytes"):
        buffer.make_room(first * 8)
    assert buffer.device_bytes == buffer._host.nbytes == 0
    assert buffer.make_room(100) == buffer._host.nbytes == first


def test_what_cannot_be_pinned_is_copied_as_it_is() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine gives pinned memory")
    rows = torch.arange(5)
    assert pinned(rows) is rows
    memory, is_pinned = host_memory((3, 2), torch.int64)
    assert memory.shape == (3, 2)
    assert not is_pinned


def test_pinned_memory_that_cannot_be_had_is_pageable() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine gives pinned memory")
    block, pinned = CudaDevice.host_block(None, 100)  # type: ignore[arg-type]
    assert not pinned
    assert block.nbytes == 100
    assert not block.any()


def test_work_on_cuda_is_issued_with_its_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a stream's context makes the stream before current again, on the device that is current then."""
    entered: list[Any] = []

    @contextlib.contextmanager
    def entering(what: Any) -> Iterator[None]:
        entered.append(what)
        yield
        assert entered.pop() == what

    monkeypatch.setattr(torch.cuda, "device", entering)
    monkeypatch.setattr(torch.cuda, "stream", entering)
    device = CudaDevice.__new__(CudaDevice)
    device._device, device.into = torch.device("cuda", 1), "into"
    monkeypatch.setattr(torch, "empty", lambda *args, **options: list(entered))
    assert device.device_block(64) == [device._device, "into"]
    seen: list[Any] = []
    device.run("own", lambda: seen.extend(entered))
    assert seen == [device._device, "own"]

    class Target:
        def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
            assert non_blocking
            assert entered == [device._device, "out"]
            seen.append(source)

    device.copy("out", Target(), seen)  # type: ignore[arg-type]
    assert seen[-1] is seen


def test_devices_that_staging_does_not_know() -> None:
    from dsa.errors import ConfigError

    assert isinstance(open_device(torch.device("cpu")), LateDevice)
    with pytest.raises(ConfigError, match="mps"):
        open_device(torch.device("mps"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("announced", [True, False])
def test_on_cuda_the_numbers_are_those_of_sparse_adam_there(tmp_path: Path, announced: bool) -> None:
    from dsa import DiskSparseAdam

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2000, 16, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.cuda()) for _ in range(2))
    opt = DiskSparseAdam([("w", ours)], state_dir=tmp_path / "s", lr=0.01, cache="100KiB")
    oracle = torch.optim.SparseAdam([theirs], lr=0.01)
    batches = [torch.randint(2000, (200,), generator=generator) for _ in range(100)]
    for batch in opt.lookahead(batches, rows=lambda ids: {"w": ids}, depth=4) if announced else batches:
        values = torch.randn(len(batch), 16, generator=generator).cuda()
        for param in (ours, theirs):
            param.grad = torch.sparse_coo_tensor(batch.cuda()[None], values, param.shape)
        opt.step()
        oracle.step()
    assert same_bits(ours, theirs)
    assert opt.statistics().device_bytes > 0
    found = opt.moments("w", range(2000))
    assert same_bits(found["exp_avg"], oracle.state[theirs]["exp_avg"])
    opt.close()
