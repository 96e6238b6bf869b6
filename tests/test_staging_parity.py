"""Bit for bit the numbers of SparseAdam through the staging buffers of a device that is late and out of order."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import BACKENDS, restore, snapshot, unchanged
from staging_rig import BATCH, N_ROWS, Staged
from torch import Tensor

from dsa.config import IOConfig
from dsa.errors import ConfigError, UsageError
from dsa.io import double_buffer
from dsa.io.late_device import LateDevice
from dsa.io.staging_buffer import Phase
from dsa.optim import books, kernels, placement, staged_update, work
from dsa.optim.gradients import SparseGradient
from dsa.optim.placement import device_of_update

STEPS = 300
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:a step touches more rows than the cache has frames"),
    pytest.mark.filterwarnings("ignore:only .* of the rows that steps touched had been announced"),
]
CACHES: dict[str, int | str] = {"less": 3400, "one": 6800, "third": 14_000, "all": "auto"}
RUNS = [pytest.param(seed, ("all", "third", "all", "one")[seed % 4], id=f"{seed}") for seed in range(20)]


@pytest.mark.parametrize(("seed", "cache"), RUNS)
def test_any_order_of_streams_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, cache: str
) -> None:
    training = Staged(tmp_path, monkeypatch, seed, cache=CACHES[cache], backend=BACKENDS[seed % 2])
    chance = random.Random(seed)
    held: list[Tensor] = []
    for batch in training.opt.lookahead(training.batches(STEPS, seed), rows=training.rows, depth=4):
        held.append(batch)
        if chance.random() < 0.1:
            continue  # several batches in one step
        if chance.random() < 0.15:  # rows that nobody announced
            held.append(torch.randint(N_ROWS, (chance.choice([1, 4, BATCH]),)))
        training.step(torch.cat(held))
        held = []
    staging = training.staging
    assert staging.staged_rows > 0
    assert staging.part_rows > 0
    assert staging.forwarded_rows > 0
    training.step(torch.cat([*held, torch.arange(2)]))
    training.check()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_nothing_announced_and_other_dtypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, dtype: torch.dtype
) -> None:
    import staging_rig

    make = staging_rig.parameters
    monkeypatch.setattr(staging_rig, "parameters", lambda shapes, seed: make(shapes, dtype, seed))
    training = Staged(tmp_path, monkeypatch, 3, cache=CACHES[cache])
    for batch in training.batches(30):
        training.step(batch)
    assert training.staging.staged_rows == 0
    training.check()


@pytest.mark.parametrize("seed", range(4))
def test_wrong_announcements_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    training = Staged(tmp_path, monkeypatch, seed)
    chance = random.Random(seed)
    for batch in training.batches(60, seed):
        for _ in range(chance.choice([0, 1, 1, 1, 2])):
            part = batch[: chance.choice([0, 5, BATCH])]
            training.opt.announce(training.rows(torch.cat([part, torch.randint(N_ROWS, (7,))])))
        if chance.random() < 0.5 and training.opt.statistics().window_batches:
            training.await_staged(hurry=True)
        training.step(batch)
    for _ in range(training.opt.statistics().window_batches):
        training.twins.step({})
    training.check()


@pytest.mark.parametrize("cache", ["third", "all"])
def test_checkpoints_reads_and_going_back_see_what_is_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    training = Staged(tmp_path, monkeypatch, 5, cache=CACHES[cache], keep_generations=None)
    opt, twins = training.opt, training.twins
    for i, batch in enumerate(opt.lookahead(training.batches(60), rows=training.rows, depth=3)):
        training.step(batch)
        if i % 7 == 0:
            opt.checkpoint()
        if i % 5 == 0:
            twins.check()
        if i == 30:
            saved, right = opt.state_dict(), snapshot(twins.oracle, twins.ram)
    opt.load_state_dict(saved)
    restore(right, twins.oracle, twins.disk, twins.ram)
    for batch in opt.lookahead(training.batches(20, seed=8), rows=training.rows, depth=3):
        training.step(batch)
    training.check()


def test_a_dense_state_taken_over_and_a_group_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Staged(tmp_path, monkeypatch, 5)
    opt, twins = training.opt, training.twins
    batches = training.batches(20)
    for batch in opt.lookahead(batches, rows=training.rows, depth=2):
        training.step(batch)
    opt.announce(training.rows(batches[0]))
    training.await_staged(hurry=True)
    opt.load_state_dict(opt.export_state_dict() or {})  # the same numbers, written to frames beside staged rows
    training.step(batches[0])
    late = torch.nn.Parameter(torch.zeros(7, 2))
    opt.add_param_group({"params": [("late", late)]})
    late.grad = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 2), (7, 2))
    opt.announce({**training.rows(batches[1]), "late": [1, 3]})
    training.await_staged(hurry=True)
    training.step(batches[1])
    assert late[1, 0] != 0
    assert late[0, 0] == 0
    twins.check()
    opt.close()


def test_the_path_follows_the_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a parameter is, is asked in each step; here a parameter on the CPU says that it is elsewhere, or not."""
    training = Staged(tmp_path, monkeypatch, 2, cache=CACHES["third"])
    where: dict[int, bool] = {}
    monkeypatch.setattr(
        books,
        "device_of_update",
        lambda param, staging, kernel: torch.device("cpu") if where.get(len(param), True) else None,
    )
    for i, batch in enumerate(training.opt.lookahead(training.batches(80), rows=training.rows, depth=3)):
        where[N_ROWS] = i % 20 < 10
        where[N_ROWS // 2] = i % 30 < 15
        training.step(batch)
    assert training.staging.staged_rows > 0
    assert training.opt.statistics().kernel in ("exact", "reference", "exact+reference")
    training.check()


def test_tables_of_one_kind_share_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Staged(tmp_path, monkeypatch, 2)
    calls: list[int] = []
    step = staged_update.reference_step

    def counted(old: Tensor, *args: Any) -> Any:
        calls.append(len(old))
        return step(old, *args)

    monkeypatch.setattr(staged_update, "reference_step", counted)
    batch = torch.arange(10)
    training.opt.announce(training.rows(batch))
    training.await_staged()
    training.step(batch)
    assert calls == [15]
    training.check()


def test_a_step_that_a_scaler_skips_leaves_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = IOConfig(dirty_share=1.0, segment_bytes=4 << 20)  # nothing is written behind that earlier steps have left
    training = Staged(tmp_path, monkeypatch, 4, io=quiet)
    opt, twins = training.opt, training.twins
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000) for _ in range(2)]
    for i, batch in enumerate(opt.lookahead(training.batches(40), rows=training.rows, depth=3)):
        gradients = training.gradients(batch)
        scale = scalers[0].get_scale()
        twins.give({name: grad * scale for name, grad in gradients.items() if grad is not None})
        bad = i % 6 == 3
        if bad:
            for side in (twins.disk, twins.ram):
                grad = side["w"].grad
                assert grad is not None
                grad._values()[0, 0] = float("inf")
        before, steps = opt.statistics().window_batches, opt.state[twins.disk["w"]]["step"]
        with unchanged(tmp_path / "state") if bad else torch.enable_grad():
            for scaler, optimizer in zip(scalers, (opt, twins.oracle), strict=True):
                scaler.scale(torch.ones(()))  # sets the scale up
                scaler.step(optimizer)
                scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert opt.state[twins.disk["w"]]["step"] == steps + (not bad)
        if bad:
            assert opt.statistics().window_batches == before
    training.check()


def test_a_failed_update_is_latched_and_a_checkpoint_mends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Staged(tmp_path, monkeypatch, 4)
    opt, twins = training.opt, training.twins
    batches = training.batches(30)
    for batch in batches[:10]:
        training.step(batch)
    saved, right = opt.state_dict(), snapshot(twins.oracle, twins.ram)
    with monkeypatch.context() as broken:

        def fail(*args: Any) -> None:
            raise ValueError("the device's own")

        broken.setattr(staged_update, "add_to_rows", fail)
        opt.announce(training.rows(batches[10]))
        training.await_staged(hurry=True)
        twins.give(training.gradients(batches[10]))
        with pytest.raises(ValueError, match="the device's own"):
            opt.step()
    with pytest.raises(UsageError, match="weights and moments are mixed"):
        opt.step()
    opt.load_state_dict(saved)
    restore(right, twins.oracle, twins.disk, twins.ram)
    for batch in opt.lookahead(batches[10:], rows=training.rows, depth=3):
        training.step(batch)
    training.check()


def test_statistics_tell_the_two_device_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Staged(tmp_path, monkeypatch, 4)
    assert training.opt.statistics().device_bytes == 0
    for batch in training.opt.lookahead(training.batches(20), rows=training.rows, depth=3):
        training.step(batch)
    blocks = [buffer.device_bytes for buffer in training.staging._buffers.both]
    assert min(blocks) > 0
    assert training.opt.statistics().device_bytes == sum(blocks)
    assert training.opt.statistics().kernel == "reference"
    training.check()


def test_pageable_memory_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pageable(LateDevice):
        def host_block(self, nbytes: int) -> tuple[Tensor, bool]:
            return super().host_block(nbytes)[0], False

    training = Staged(tmp_path, monkeypatch, 4, device=Pageable())
    first, *others = training.batches(4)
    with pytest.warns(UserWarning, match="no pinned memory"):
        training.step(first)
    for batch in others:
        training.step(batch)  # a warning would be an error here
    training.check()


def test_off_and_auto_stage_nothing_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for staging in ("off", "auto"):
        training = Staged(tmp_path / staging, monkeypatch, 4, staging=staging)
        for batch in training.opt.lookahead(training.batches(5), rows=training.rows, depth=3):
            training.step(batch)
        training.twins.check()
        assert training.opt._books.engine._pipeline.stagings == []
        training.opt.close()


@pytest.mark.parametrize("kernel", ["exact", "fast"])
def test_kernels_of_frames_are_refused_with_staging_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    with pytest.raises(ConfigError, match=rf"kernel='{kernel}'.*staging='on'"):
        Staged(tmp_path, monkeypatch, 0, kernel=kernel)
    assert not (tmp_path / "state").exists()


class _Elsewhere:
    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind)


@pytest.mark.parametrize("staging", ["auto", "off"])
def test_a_kernel_of_the_cpu_is_refused_before_a_step_where_the_parameter_has_moved(staging: str) -> None:
    here, moved = torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(3, 2, device="meta"))
    assert device_of_update(here, staging, "exact") is None
    assert device_of_update(moved, staging, "auto") is None
    with pytest.raises(ConfigError, match="kernel='exact' runs on the CPU, a parameter is on meta"):
        device_of_update(moved, staging, "exact")


def test_a_learning_rate_is_read_once_a_step_however_many_parts_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    hyperparameters = work._hyperparameters

    def counted(group: Any, engine: Any, table: int) -> Any:
        read.append(table)
        return hyperparameters(group, engine, table)

    monkeypatch.setattr(work, "_hyperparameters", counted)
    monkeypatch.setattr(double_buffer, "MOST_BYTES", 200)
    training = Staged(tmp_path, monkeypatch, 0)
    for batch in training.batches(3):
        training.step(batch)
        assert sorted(read) == [0, 1]
        read.clear()
    assert training.staging.part_rows > 0
    training.check()


def test_other_accelerators_are_updated_on_the_cpu_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere: Any = _Elsewhere("mps")
    monkeypatch.setattr(placement, "_missing", lambda device: None)
    assert placement.device_of_update(elsewhere, "auto", "auto") is None
    assert kernels.choose_kernel("auto", elsewhere).name == "exact"
    with pytest.raises(ConfigError, match=r"staging='on'.*mps.*CUDA"):
        placement.device_of_update(elsewhere, "on", "auto")
    monkeypatch.setattr(placement, "_missing", lambda device: "coalesce is not implemented")
    with pytest.raises(ConfigError, match=r"mps.*coalesce is not implemented.*CPU or on CUDA"):
        placement.device_of_update(elsewhere, "auto", "auto")


def test_what_a_device_lacks_is_what_torch_says() -> None:
    assert placement._missing(torch.device("cpu")) is None
    assert placement._missing(torch.device("meta")) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_update_on_copies_has_the_bits_of_one_in_place(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(20, 3, 2, generator=generator).to(dtype) for _ in range(1)] * 1
    one, other = params[0].clone(), params[0].clone()
    moments = torch.rand(9, 12, generator=generator, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    first, second = moments.numpy().copy(), moments.numpy().copy()
    gradient = SparseGradient(torch.tensor([1, 5, 19]), torch.randn(3, 6, generator=generator).to(dtype))
    frames = torch.tensor([8, 0, 3], dtype=torch.int32).numpy()
    hyper = kernels.Hyperparameters(1e-2, 0.9, 0.999, 1e-8, 3)
    kernel = kernels.choose_kernel("auto", one)
    kernel.update(first, frames, one, gradient, hyper)
    placement.update_on_copies(kernel, second, frames, other, gradient, hyper)
    assert torch.equal(one, other)
    assert (first == second).all()
    assert not torch.equal(one, params[0])
    placement.update_on_copies(kernel, second, frames[:0], other, gradient.at(slice(0)), hyper)
    assert torch.equal(one, other)


def test_staged_batches_that_end_without_a_step_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Staged(tmp_path, monkeypatch, 1)
    batches = training.batches(12)
    for i, batch in enumerate(training.opt.lookahead(batches, rows=training.rows, depth=4)):
        if i == 5:
            break
        training.step(batch)
    training.await_phases(lambda phases: set(phases) == {Phase.FREE}, hurry=True)
    training.step(batches[11])
    training.check()


def test_a_step_that_goes_past_a_staged_batch_has_it_staged_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Staged(tmp_path, monkeypatch, 1)
    opt = training.opt
    batches = training.batches(4)
    ahead = iter(opt.lookahead(batches, rows=training.rows, depth=1))
    training.step(next(ahead))  # the second is announced, for a later step
    training.await_staged(hurry=True)
    opt.announce(training.rows(batches[3]))  # used up by the next step, and it shares rows with what is staged
    training.await_staged(2, hurry=True)
    training.step(batches[3])
    for batch in ahead:
        training.step(batch)
    training.check()


def test_a_block_whose_copy_is_still_to_come_is_not_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsa.io.late_device._MOST_CREDIT", 0)
    waits = threading.Event()
    wait = LateDevice.synchronize

    def noted(self: LateDevice, event: Any) -> None:
        waits.set()
        wait(self, event)

    training = Staged(tmp_path, monkeypatch, 1)
    monkeypatch.setattr(LateDevice, "synchronize", noted)
    batches = training.batches(3)
    for batch in batches[:2]:
        training.opt.announce(training.rows(batch))
    training.await_staged(2)
    training.opt._books.engine._pipeline.stagings[0].stand_still()  # gives both up, their copies not made
    assert not waits.is_set()
    training.staging.resume()
    assert waits.wait(20.0)
    assert Phase.FILLING in training.staging.phases()
    training.await_staged(2, hurry=True)
    for batch in batches[:2]:
        training.step(batch)
    training.check()


def test_an_optimizer_that_nobody_holds_ends_with_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Staged(tmp_path, monkeypatch, 1)
    for batch in training.opt.lookahead(training.batches(3), rows=training.rows, depth=2):
        training.step(batch)
    threads = [training.staging._thread._thread, training.device._thread]
    del training.twins, training.opt
    gc.collect()
    for thread in threads:
        assert thread is not None
        thread.join(20.0)
        assert not thread.is_alive()
    assert "3 steps" in capsys.readouterr().err
