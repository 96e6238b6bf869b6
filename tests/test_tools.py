"""Tools that look into optimizers neither break this one nor leave anything behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import Twins, parameters, random_gradient
from torch import nn

from dsa import DiskSparseAdam
from dsa.errors import ForkedError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(30, 4, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.emb(ids).square().sum()


def optimizer(model: nn.Module, path: Path, **options: Any) -> DiskSparseAdam:
    return DiskSparseAdam(model.named_parameters(), state_dir=path, **options)


def train(model: nn.Module, opt: Any, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randint(0, 30, (8,), generator=generator)).backward()
        opt.step()


def test_distributed_checkpoints_see_a_filled_state(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = Model()
    with optimizer(model, tmp_path / "s") as opt:
        # Before the first step: it fills in what it finds missing, and it must find nothing missing.
        found = get_optimizer_state_dict(model, opt)
        assert opt.state[model.emb.weight]["step"] == 0
        train(model, opt, 3)
        found = get_optimizer_state_dict(model, opt)
        assert set(found) == {"state", "param_groups"}
        entry = found["state"]["emb.weight"]
        assert entry["step"] == 3
        assert entry["generation"] == opt.state[model.emb.weight]["generation"]
        weights = model.emb.weight.detach().clone()
        moments = opt.moments("emb.weight", range(30))
        train(model, opt, 2, seed=1)
        with torch.no_grad():
            model.emb.weight.copy_(weights)
        set_optimizer_state_dict(model, opt, found)
        assert opt.state[model.emb.weight]["step"] == 3
        again = opt.moments("emb.weight", range(30))
        assert all(torch.equal(again[key], moments[key]) for key in moments)
        train(model, opt, 1)


def test_copies_and_pickles_are_refused_with_the_remedy(tmp_path: Path) -> None:
    model = Model()
    with optimizer(model, tmp_path / "s") as opt:
        for attempt in (lambda: copy.deepcopy(opt), lambda: copy.copy(opt), lambda: pickle.dumps(opt)):
            with pytest.raises(UsageError, match=r"state_dict\(\)"):
                attempt()
        with pytest.raises(UsageError, match=r"state_dict\(\)"):
            torch.save(opt, tmp_path / "opt.pt")
        train(model, opt, 1)


def test_a_state_dict_survives_torch_save_and_weights_only_loading(tmp_path: Path) -> None:
    model = Model()
    with optimizer(model, tmp_path / "s") as opt:
        train(model, opt, 2)
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (tmp_path / "checkpoint.pt").stat().st_size < 20_000
    fresh = Model()
    fresh.load_state_dict(saved["model"])
    with optimizer(fresh, tmp_path / "s") as opt:
        opt.load_state_dict(saved["opt"])
        assert opt.state[fresh.emb.weight]["step"] == 2
        train(fresh, opt, 1)


def test_repr_and_hooks_and_profiler_hooks_of_torch(tmp_path: Path) -> None:
    model = Model()
    calls = []
    with optimizer(model, tmp_path / "s") as opt:
        opt.register_step_pre_hook(lambda *_: calls.append("before"))
        opt.register_step_post_hook(lambda *_: calls.append("after"))
        opt.register_state_dict_post_hook(lambda *_: calls.append("saved"))
        opt.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
        train(model, opt, 1)
        opt.load_state_dict(opt.state_dict())
        assert calls == ["before", "after", "saved", "loaded"]
        assert "lr: 0.001" in repr(opt)
        opt.zero_grad(set_to_none=False)
        assert model.emb.weight.grad is not None


def test_the_profiler_of_torch_shows_each_stage_by_name(tmp_path: Path) -> None:
    model = Model()
    with optimizer(model, tmp_path / "s") as opt:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(model, opt, 2)
        stages = {event.key for event in profile.key_averages() if event.key.startswith("dsa::")}
        assert stages == {"dsa::gradient", "dsa::wait", "dsa::update", "dsa::commit"}


def test_gradient_scaler_steps_it(tmp_path: Path) -> None:
    model = Model()
    with optimizer(model, tmp_path / "s") as opt:
        scaler = torch.amp.GradScaler("cpu", enabled=True)
        before = model.emb.weight.detach().clone()
        scaler.scale(model(torch.tensor([1, 2]))).backward()
        scaler.step(opt)
        scaler.update()
        assert opt.state[model.emb.weight]["step"] == 1
        assert not torch.equal(before, model.emb.weight)


def test_stochastic_weight_averaging_copies_the_model_but_not_the_hooks(tmp_path: Path) -> None:
    model = Model()
    with optimizer(model, tmp_path / "s") as opt, opt.watch(model):
        averaged = torch.optim.swa_utils.AveragedModel(model)
        train(model, opt, 3)
        averaged.update_parameters(model)
        averaged(torch.tensor([1]))
        assert opt.statistics().announced_share == 1.0


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Model()
    opt = optimizer(model, tmp_path / "s", lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the tool itself warns of is its own affair
        accelerator = accelerate.Accelerator(cpu=True)
        prepared_model, prepared, scheduler = accelerator.prepare(
            model, opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
        )
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            prepared.zero_grad()
            accelerator.backward(prepared_model(torch.randint(0, 30, (8,), generator=generator)))
            prepared.step()
            scheduler.step()
        assert opt.state[model.emb.weight]["step"] == 4
        weights = model.emb.weight.detach().clone()
        moments = opt.moments("emb.weight", range(30))
        accelerator.save_state(str(tmp_path / "checkpoint"))
        train(model, opt, 2)
        accelerator.load_state(str(tmp_path / "checkpoint"))
    assert torch.equal(model.emb.weight, weights)
    assert torch.equal(opt.moments("emb.weight", range(30))["exp_avg"], moments["exp_avg"])
    assert opt.state[model.emb.weight]["step"] == 4
    train(model, opt, 1)
    opt.close()


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.opt: Any = None

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.model(batch)

        def configure_optimizers(self) -> Any:
            self.opt = DiskSparseAdam(self.named_parameters(), lr=0.05, state_dir=tmp_path / "s")
            return self.opt

    batches = torch.randint(0, 30, (6, 8), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    options = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": tmp_path, "enable_checkpointing": False,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Module()
        trainer = lightning.Trainer(max_epochs=2, **options)
        trainer.fit(module, loader)
        assert module.opt.state[module.model.emb.weight]["step"] == 12
        trainer.save_checkpoint(tmp_path / "lightning.ckpt")
        moments = module.opt.moments("model.emb.weight", range(30))
        module.opt.close()
        resumed = Module()
        more = lightning.Trainer(max_epochs=3, **options)
        more.fit(resumed, loader, ckpt_path=tmp_path / "lightning.ckpt")
    assert resumed.opt.state[resumed.model.emb.weight]["step"] == 18
    right = nn.Parameter(module.model.emb.weight.detach().clone())
    reference = torch.optim.SparseAdam([right], lr=0.05)
    reference.load_state_dict(
        {"state": {0: {"step": 12, **moments}}, "param_groups": reference.state_dict()["param_groups"]}
    )
    for ids in batches:
        reference.zero_grad()
        nn.functional.embedding(ids, right, sparse=True).square().sum().backward()
        reference.step()
    assert torch.equal(right, resumed.model.emb.weight)
    resumed.opt.close()


# What an optimizer leaves behind: nothing.


def descriptors() -> set[str]:
    """What this process has open, pipes and sockets by number."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("end", ["close", "collected", "raised", "refused"])
def test_no_thread_descriptor_or_lock_is_left(tmp_path: Path, capfd: pytest.CaptureFixture[str], end: str) -> None:
    model = Model()
    optimizer(model, tmp_path / "first").close()  # what a process opens once, it has opened then
    gc.collect()
    threads, open_before = set(threading.enumerate()), descriptors()
    path = tmp_path / "s"
    if end == "refused":
        optimizer(model, path).close()
        for _ in range(3):
            with pytest.raises(UsageError, match="resume"), optimizer(model, path) as opt:
                train(model, opt, 1)
            with pytest.raises(Exception, match="no table"):
                DiskSparseAdam([("other", model.emb.weight)], state_dir=path, existing="resume")
        del opt
    else:
        opt = optimizer(model, path)
        handle = opt.watch(model)
        ahead = opt.lookahead([[1], [2], [3]], rows=lambda rows: {"emb.weight": rows}, depth=2)
        batches = iter(ahead)
        next(batches)
        train(model, opt, 2)
        gone = weakref.ref(opt)
        if end == "close":
            opt.close()
        elif end == "raised":
            with pytest.raises(KeyError), opt:
                raise KeyError
        del opt, ahead, batches
        gc.collect()
        assert gone() is None
        model(torch.tensor([1]))  # the hooks are still there, and do nothing
        handle.remove()
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert descriptors() <= open_before
    told = capfd.readouterr().err
    if end == "collected":
        assert str(path) in told
        assert "2 steps" in told
        assert "last generation there is 0" in told
    else:
        assert "dsa:" not in told
    optimizer(model, path, existing="resume").close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_disturbs_nothing(tmp_path: Path) -> None:
    twins = Twins(parameters({"w": (30, 4)}), tmp_path / "s")
    generator = torch.Generator().manual_seed(0)
    twins.step({"w": random_gradient(twins.disk["w"], torch.tensor([1, 2]), generator)})
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (twins.opt.step, twins.opt.checkpoint, lambda: twins.opt.announce({"w": [1]}), twins.opt.close):
            try:
                call()
            except ForkedError as error:
                refused += str(os.getppid()) in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    twins.step({"w": random_gradient(twins.disk["w"], torch.tensor([2, 3]), generator)})
    twins.check()
    twins.opt.close()
