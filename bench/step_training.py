"""What takes the steps of bench.step: an embedding alone or a TransE model, with its moments in RAM or on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from bench.step_workload import Batch, distinct_rows
from dsa import DiskSparseAdam, IOConfig
from dsa.io.cache import FRAME_OVERHEAD_BYTES
from dsa.io.layout import RecordLayout
from dsa.io.pipeline import Pipeline
from dsa.io.statistics import Statistics
from dsa.optim.lookahead import MOST_AHEAD

N_RELATIONS = 237
_FILL_ROWS = 65_536
_LEAST_LEAD = 4
_MOST_HELD_SHARE = 0.5  # of the frames, that prefetch fills ahead of time
MOST_LEAD = MOST_AHEAD + _LEAST_LEAD
_MARGIN = 1.0
_QUIET_S = 0.05


class Work(Protocol):
    """Parameters, and what gives them gradients."""

    @property
    def tables(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters; "entities" is the first."""

    def backward(self, batch: Batch) -> None:
        """Give the parameters the gradients of a batch, duplicates not summed."""


class Alone:
    """One embedding whose gradients cost nothing: the same values in every step.

    Args:
        most_draws: of a batch.
        weight: [rows, width], used as it is; None: a new one.
    """

    def __init__(self, n_rows: int, width: int, most_draws: int, weight: Tensor | None = None) -> None:
        torch.sparse.check_sparse_tensor_invariants.disable()
        self.weight = nn.Parameter(touched(n_rows, width) if weight is None else weight)
        self._values = torch.randn(most_draws, width, generator=torch.Generator().manual_seed(1))

    @property
    def tables(self) -> list[tuple[str, nn.Parameter]]:
        return [("entities", self.weight)]

    def backward(self, batch: Batch) -> None:
        rows = batch.entities
        self.weight.grad = torch.sparse_coo_tensor(
            rows[None], self._values[: len(rows)], self.weight.shape, check_invariants=False
        )


class TransE(nn.Module):
    """Heads plus relations are tails (Bordes et al., 2013): margin ranking against as many corrupted triples."""

    def __init__(self, n_rows: int, width: int) -> None:
        super().__init__()
        torch.sparse.check_sparse_tensor_invariants.disable()
        generator = torch.Generator().manual_seed(2)
        start = [torch.empty(n, width).uniform_(-0.5, 0.5, generator=generator) for n in (n_rows, N_RELATIONS)]
        self.entities = nn.Parameter(start[0])
        self.relations = nn.Parameter(start[1])

    @property
    def tables(self) -> list[tuple[str, nn.Parameter]]:
        return [("entities", self.entities), ("relations", self.relations)]

    def forward(self, batch: Batch) -> Tensor:
        """The loss."""
        head, tail, other_head, other_tail = functional.embedding(batch.entities, self.entities, sparse=True).chunk(4)
        relation = functional.embedding(batch.relations, self.relations, sparse=True)
        true = (head + relation - tail).norm(dim=1)
        false = (other_head + relation - other_tail).norm(dim=1)
        return functional.margin_ranking_loss(false, true, torch.ones_like(true), margin=_MARGIN)

    def backward(self, batch: Batch) -> None:
        self.zero_grad()
        self(batch).backward()


def touched(n_rows: int, width: int) -> Tensor:
    """Weights that have their memory already."""
    return torch.empty(n_rows, width).fill_(0.01)


@dataclass(frozen=True)
class Turn:
    """Some steps: their batches, wall seconds of the loop, those in `step()`, those in the model."""

    batches: Sequence[Batch]
    loop_s: float
    step_s: float
    model_s: float
    misses: int = 0
    gradient_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0
    commit_s: float = 0.0

    @property
    def rows(self) -> int:
        """Distinct rows of the batches; counted when asked for, so that what is measured next need not wait for it."""
        return distinct_rows(self.batches)

    def parts_s(self) -> dict[str, float]:
        """Where the time went, by the names of step_samples.PARTS."""
        inside = self.gradient_s + self.wait_s + self.update_s + self.commit_s
        return {
            "loader and announcing": max(self.loop_s - self.step_s - self.model_s, 0.0),
            "model": self.model_s,
            "gradient": self.gradient_s,
            "wait": self.wait_s,
            "update": self.update_s,
            "commit": self.commit_s,
            "rest of step()": max(self.step_s - inside, 0.0),
        }


def take_steps(work: Work, optimizer: torch.optim.Optimizer, batches: Iterator[Batch], count: int) -> Turn:
    """The training loop, timed."""
    model_s = step_s = 0.0
    taken = []
    began = time.perf_counter()
    for _ in range(count):
        batch = next(batches)
        before = time.perf_counter()
        work.backward(batch)
        between = time.perf_counter()
        optimizer.step()
        after = time.perf_counter()
        model_s += between - before
        step_s += after - between
        taken.append(batch)
    loop_s = time.perf_counter() - began
    return Turn(taken, loop_s, step_s, model_s)


class InRam:
    """torch.optim.SparseAdam."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.optimizer = torch.optim.SparseAdam([param for _, param in work.tables])

    def fill(self) -> None:
        """Touch every row's moments."""
        for name, param in self.work.tables:
            for rows in row_runs(len(param), _FILL_ROWS):
                one_step(self.optimizer, self.work, {name: rows})

    def take(self, batches: Sequence[Batch]) -> Turn:
        """Steps on these batches."""
        return take_steps(self.work, self.optimizer, iter(batches), len(batches))


class OnDisk:
    """DiskSparseAdam.

    Args:
        cache: share of the rows (or of `in_use` ones) that have frames.
        depth: of lookahead.
        existing: as DiskSparseAdam's.
        in_use: the rows that will ever be looked up, sorted; None: all.
    """

    def __init__(
        self,
        work: Work,
        directory: Path,
        cache: float,
        *,
        kernel: str = "auto",
        backend: str = "auto",
        depth: int | None = None,
        existing: str = "discard",
        in_use: NDArray[np.int64] | None = None,
    ) -> None:
        self.work = work
        self._depth = depth
        self._in_use = in_use
        config = IOConfig()
        need = sum(len(param) * frame_bytes(param.shape[1]) for _, param in work.tables)
        used = 1.0 if in_use is None else len(in_use) / len(work.tables[0][1])
        # The byte more makes a share of 1 all rows, whatever the rounding.
        self.optimizer = DiskSparseAdam(
            work.tables,
            state_dir=directory,
            cache=int(cache * used * need) + 1,
            existing=existing,
            backend=backend,
            kernel=kernel,
            io=config,
        )
        self._stands = False
        self._ahead: Iterator[Batch] = iter(())

    @property
    def frames(self) -> int:
        """Frames, all tables together."""
        return self.optimizer.statistics().frames

    def fill(self) -> None:
        """Write every row (in use) once, in order."""
        self.go_on()
        for name, param in self.work.tables:
            every = self._in_use if self._in_use is not None else len(param)
            for rows in row_runs(every, max(min(_FILL_ROWS, self.frames // 4), 1)):
                one_step(self.optimizer, self.work, {name: rows})
        self._pipeline.run(self._pipeline.flush())

    def train_on(self, batches: Sequence[Batch]) -> None:
        """The steps to come take these batches, through lookahead."""
        names = [name for name, _ in self.work.tables]
        self._ahead = iter(
            self.optimizer.lookahead(batches, lambda batch: dict(zip(names, batch, strict=False)), depth=self._depth)
        )

    def take(self, count: int) -> Turn:
        """Steps on the next batches."""
        self.go_on()
        before = self.optimizer.statistics()
        turn = take_steps(self.work, self.optimizer, self._ahead, count)
        return _with_figures(turn, before, self.optimizer.statistics())

    def lead_steps(self, distinct: float) -> int:
        """Steps after which a pause no longer tells: what was brought into frames meanwhile is used up.

        Args:
            distinct: rows of a step.
        """
        held = int(_MOST_HELD_SHARE * self.frames / max(distinct, 1.0)) + _LEAST_LEAD
        return min(held, MOST_LEAD)

    def settle(self) -> None:
        """Let the device be until the next step: what can be is brought in, and nothing more is written behind.

        What is dirty stays so: the next steps find the cache as steps leave it, not clean.
        """
        if not self._stands:
            self._pipeline.run(self._pipeline._writebehind.turn.acquire())
            self._stands = True
        before = -1
        while (moved := self._moved_bytes()) != before:
            before = moved
            time.sleep(_QUIET_S)

    def go_on(self) -> None:
        """End standing still; steps do that themselves."""

        async def release() -> None:
            self._pipeline._writebehind.turn.release()

        if self._stands:
            self._stands = False
            self._pipeline.run(release())

    @property
    def _pipeline(self) -> Pipeline:
        return self.optimizer._books.engine._pipeline

    def _moved_bytes(self) -> int:
        statistics = self.optimizer.statistics()
        return statistics.read_bytes + statistics.write_bytes

    def close(self) -> None:
        """End it; the state is not committed."""
        self.go_on()
        self.optimizer._close(commit=False)

    def __enter__(self) -> OnDisk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def frame_bytes(width: int) -> int:
    """What a row takes in the cache."""
    return RecordLayout(width, "float32").record_bytes + FRAME_OVERHEAD_BYTES


def _with_figures(turn: Turn, before: Statistics, after: Statistics) -> Turn:
    return Turn(
        turn.batches,
        turn.loop_s,
        turn.step_s,
        turn.model_s,
        misses=after.cache_misses - before.cache_misses,
        gradient_s=after.gradient_s - before.gradient_s,
        wait_s=after.wait_s - before.wait_s,
        update_s=after.update_s - before.update_s,
        commit_s=after.commit_s - before.commit_s,
    )


def row_runs(every: int | NDArray[np.int64], most: int) -> Iterator[Tensor]:
    """The rows, or the first `every` ones, in runs of at most `most`."""
    count = every if isinstance(every, int) else len(every)
    for first in range(0, count, most):
        last = min(first + most, count)
        yield torch.arange(first, last) if isinstance(every, int) else torch.from_numpy(every[first:last])


def one_step(optimizer: torch.optim.Optimizer, work: Work, rows: Mapping[str, Tensor]) -> None:
    """A step on these sorted rows of one table or several, with gradients of ones."""
    for name, param in work.tables:
        param.grad = None
        if name in rows:
            values = torch.ones(len(rows[name]), param.shape[1])
            param.grad = torch.sparse_coo_tensor(
                rows[name][None], values, param.shape, is_coalesced=True, check_invariants=False
            )
    optimizer.step()
