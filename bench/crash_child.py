"""The processes of bench.crash: one that trains until it is killed, and one that opens what it left and goes on.

Both write a line to a pipe whenever they enter or leave something, so that the parent knows what they were doing, and
what must be there, when they die.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsa import DiskSparseAdam
from dsa.config import IOConfig
from dsa.io.rowlog import RowLog

SHAPES = {"emb.weight": (600, 12), "rel.weight": (30, 5)}
BATCH_ROWS = {"emb.weight": 70, "rel.weight": 9}
HYPERPARAMETERS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95)}
Parameters = dict[str, nn.Parameter]


@dataclass(frozen=True)
class Plan:
    """One run.

    Args:
        number: of the run.
        data_seed: of weights and batches.
        moment: in what the process is killed: a key of `bench.crash.MOMENTS`.
        occurrence: in the how-manieth of them, from 1.
        share: where in it, as a share of the time that it usually takes.
        steps: of the whole training.
        every: steps between checkpoints.
        keep: generations that stay loadable.
        go_on_from: which of the files left is gone on from, counted from the newest.
    """

    number: int
    data_seed: int
    moment: str
    occurrence: int
    share: float
    steps: int
    every: int
    keep: int
    backend: str
    uvloop: bool
    cache_bytes: int
    segment_bytes: int
    go_on_from: int


class Marks:
    """Lines into a pipe: what happened, when, and with which values. A line that was written survives the writer."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self, what: str, *values: Any) -> None:
        os.write(self._fd, json.dumps([what, time.monotonic(), *values]).encode() + b"\n")


# The training, the same in every process.


def make_parameters(data_seed: int) -> Parameters:
    """The weights before the first step."""
    generator = torch.Generator().manual_seed(data_seed)
    return {name: nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in SHAPES.items()}


def set_gradients(params: Parameters, data_seed: int, step: int) -> None:
    """Give the parameters the gradients of a step, duplicates included."""
    generator = torch.Generator().manual_seed((data_seed << 20) + step)
    for name, param in params.items():
        rows = torch.randint(0, len(param), (BATCH_ROWS[name],), generator=generator)
        values = torch.randn(len(rows), *param.shape[1:], generator=generator)
        param.grad = torch.sparse_coo_tensor(rows[None], values, param.shape)


def rows_of(params: Parameters) -> dict[str, Tensor]:
    """The rows that the parameters' gradients touch."""
    return {name: param.grad._indices()[0] for name, param in params.items() if param.grad is not None}


def digest(tensors: Iterator[Tensor]) -> str:
    """A hash of every bit."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def weights_digest(params: Parameters) -> str:
    """A hash of all weights."""
    return digest(iter(params.values()))


def _moments_digest(opt: DiskSparseAdam, params: Parameters) -> str:
    def tensors() -> Iterator[Tensor]:
        for name, param in params.items():
            found = opt.moments(name, range(len(param)))
            yield found["exp_avg"]
            yield found["exp_avg_sq"]

    return digest(tensors())


def oracle_digests(data_seed: int, steps: int) -> list[tuple[str, str]]:
    """Weights and moments after 0, 1, ... steps of torch.optim.SparseAdam, as hashes."""
    params = make_parameters(data_seed)
    opt = torch.optim.SparseAdam(list(params.values()), **HYPERPARAMETERS)

    def tensors() -> Iterator[Tensor]:
        for param in params.values():
            state = opt.state[param]
            for key in ("exp_avg", "exp_avg_sq"):
                yield state[key] if state else torch.zeros_like(param)

    found = [(weights_digest(params), digest(tensors()))]
    for step in range(steps):
        set_gradients(params, data_seed, step)
        opt.step()  # type: ignore[no-untyped-call, unused-ignore]
        found.append((weights_digest(params), digest(tensors())))
    return found


def _open(plan: Plan, params: Parameters, directory: Path, existing: str) -> DiskSparseAdam:
    config = IOConfig(segment_bytes=plan.segment_bytes, uvloop=plan.uvloop, dirty_share=0.1)
    warnings.filterwarnings("ignore", "a step touches more rows than the cache has frames")
    return DiskSparseAdam(
        list(params.items()),
        **HYPERPARAMETERS,
        state_dir=directory / "state",
        existing=existing,
        backend=plan.backend,
        cache=plan.cache_bytes,
        keep_generations=plan.keep,
        io=config,
    )


def _generation(opt: DiskSparseAdam, params: Parameters) -> int | None:
    (found,) = {opt.state[param]["generation"] for param in params.values()}
    return found if found is None else int(found)


def _uuid(opt: DiskSparseAdam, params: Parameters) -> str:
    return str(opt.state[params["emb.weight"]]["state_dir_uuid"])


def _train(plan: Plan, opt: DiskSparseAdam, params: Parameters, directory: Path, steps: range, mark: Marks) -> None:
    for step in steps:
        mark("step", step)
        for ahead in (step, step + 1) if step == steps[0] else (step + 1,):
            set_gradients(params, plan.data_seed, ahead)
            opt.announce(rows_of(params))
        set_gradients(params, plan.data_seed, step)
        opt.step()
        mark("stepped", step + 1)
        if (step + 1) % plan.every == 0:
            mark("checkpoint", step + 1)
            state_dict = opt.state_dict()
            generation = state_dict["state"][0]["generation"]
            mark("handed", generation, step + 1)
            _save(directory, params, state_dict, step + 1)
            mark("saved", generation, step + 1)


def _save(directory: Path, params: Parameters, state_dict: dict[str, Any], step: int) -> None:
    content = {
        "weights": {name: param.detach() for name, param in params.items()},
        "optimizer": state_dict,
        "step": step,
    }
    part = directory / f"{step:06}.part"
    with open(part, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    part.rename(directory / f"{_identity(state_dict)}-{step:06}.pt")


def _identity(state_dict: dict[str, Any]) -> str:
    return str(state_dict["state"][0]["state_dir_uuid"])


def mark_cleanings(mark: Marks) -> None:
    """Have every cleaning of the log in this process marked."""
    clean = RowLog.clean

    async def marked(self: RowLog, job: Any) -> None:
        mark("clean")
        await clean(self, job)
        mark("cleaned")

    RowLog.clean = marked  # type: ignore[method-assign]


# The processes.


def train_until_killed(plan: Plan, directory: Path, existing: str, mark: Marks) -> None:
    """Train from the start, and wait to be killed at the end."""
    mark_cleanings(mark)
    params = make_parameters(plan.data_seed)
    mark("construct")
    opt = _open(plan, params, directory, existing)
    mark("constructed", _uuid(opt, params))
    _train(plan, opt, params, directory, range(plan.steps), mark)
    mark("idle")
    while True:
        signal.pause()


def open_and_go_on(plan: Plan, directory: Path, mark: Marks) -> None:
    """Load everything that is there, tell its hashes, and train to the end from one of the files left."""
    params = make_parameters(plan.data_seed)
    opt = _open(plan, params, directory, "load")
    uuid, generations = _uuid(opt, params), opt.generations()
    mark("opened", uuid, generations)
    for generation in generations:
        state_dict = opt.state_dict() if _generation(opt, params) is not None else torch.optim.Optimizer.state_dict(opt)
        for entry in state_dict["state"].values():
            entry["generation"] = generation
        opt.load_state_dict(state_dict)
        steps = {opt.state[param]["step"] for param in params.values()}
        mark("loaded", generation, sorted(steps), _moments_digest(opt, params))
    files = sorted(directory.glob(f"{uuid}-*.pt"))
    usable: list[Path] = []
    for file in files:
        content = torch.load(file, weights_only=True)
        generation = content["optimizer"]["state"][0]["generation"]
        if generation not in generations:
            continue
        _restore(opt, params, content)
        mark("file", generation, content["step"], weights_digest(params), _moments_digest(opt, params))
        usable.append(file)
    if usable:
        content = torch.load(usable[-1 - plan.go_on_from % len(usable)], weights_only=True)
        _restore(opt, params, content)
        begin = int(content["step"])
    else:
        # Moments without weights: a user would begin anew.
        opt.close()
        opt = _open(plan, params := make_parameters(plan.data_seed), directory, "discard")
        begin = 0
    _train(plan, opt, params, directory, range(begin, plan.steps), mark)
    mark("end", begin, weights_digest(params), _moments_digest(opt, params))
    opt.close()
    again = _open(plan, params, directory, "resume")
    mark("reopened", again.state[params["emb.weight"]]["step"], _moments_digest(again, params))
    again.close()


def _restore(opt: DiskSparseAdam, params: Parameters, content: dict[str, Any]) -> None:
    for name, param in params.items():
        param.data.copy_(content["weights"][name])
    opt.load_state_dict(content["optimizer"])


def run_in_fork(target: Callable[[Marks], None], close: tuple[int, ...] = ()) -> tuple[int, int]:
    """Run `target` in a forked child, whose marks come through the pipe; its process id and the pipe's reading end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        for fd in (reading, *close):
            os.close(fd)
        mark = Marks(writing)
        try:
            target(mark)
            status = 0
        except BaseException as error:
            mark("failed", f"{type(error).__name__}: {error}")
            raise
    finally:
        # Not by way of the parent's own exit handlers.
        os._exit(status)
    raise AssertionError("unreachable")
