"""Bit for bit the numbers of torch.optim.SparseAdam, whatever the lookahead, the cache, the backend or the hints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import BACKENDS, Twins, overlapping_batches, parameters, random_gradient
from torch import Tensor, nn

STEPS = 300
N_ROWS, BATCH, WIDTH = 500, 32, 5
# In bytes: fewer frames than a batch has rows, little more than one batch, about a third of the rows, all of them.
CACHES: dict[str, int | str] = {"less": 2400, "one": 4500, "third": 16_000, "all": "auto"}
DEPTHS = (0, 1, 2, 4, 8, 64)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:a step touches more rows than the cache has frames"),
]


class Training:
    """A table of embeddings on both sides, 300 batches that overlap by 90 %, and their gradients."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.twins = Twins(parameters({"emb.weight": (N_ROWS, WIDTH)}), tmp_path / "state", {"lr": 0.01}, **options)
        self.opt = self.twins.opt
        self.param = self.twins.disk["emb.weight"]
        self.batches = overlapping_batches(N_ROWS, BATCH, STEPS)
        self._generator = torch.Generator().manual_seed(1)

    def gradient(self, batch: Tensor) -> Tensor:
        """Random values for the batch's rows, a few of them twice, so that the gradient is uncoalesced."""
        return random_gradient(self.param, torch.cat([batch, batch[:3]]), self._generator)

    def step(self, batch: Tensor) -> None:
        self.twins.step({"emb.weight": self.gradient(batch)})

    def rows(self, batch: Tensor) -> dict[Any, Any]:
        return {"emb.weight": batch}

    def check(self) -> None:
        """Everything is equal, and nothing stays pinned or known."""
        self.twins.check()
        statistics = self.opt.statistics()
        assert statistics.pinned_frames == 0
        assert statistics.window_batches == 0
        assert statistics.cache_hits + statistics.cache_misses == statistics.rows_touched
        self.opt.close()


def lookahead_cases() -> list[Any]:
    cases = []
    for i, depth in enumerate(DEPTHS):
        for j, cache in enumerate(CACHES):
            if cache == "third" and depth in (0, 2):
                continue
            # Each cache meets each backend, and each depth too; kernels take turns the other way round.
            backend, kernel = BACKENDS[(i + j) % 3], ("reference", "exact")[(i + j // 2) % 2]
            cases.append(pytest.param(depth, cache, backend, kernel, id=f"{depth}-{cache}-{backend}-{kernel}"))
    return cases


@pytest.mark.parametrize(("depth", "cache", "backend", "kernel"), lookahead_cases())
def test_lookahead_changes_no_bit(tmp_path: Path, depth: int, cache: str, backend: str, kernel: str) -> None:
    training = Training(tmp_path, cache=CACHES[cache], backend=backend, kernel=kernel)
    frames = training.opt.statistics().frames
    assert {"less": frames < BATCH, "all": frames == N_ROWS}.get(cache, BATCH < frames < N_ROWS / 2)
    for batch in training.opt.lookahead(training.batches, rows=training.rows, depth=depth):
        training.step(batch)
    statistics = training.opt.statistics()
    assert statistics.steps == STEPS
    assert statistics.rows_touched == STEPS * BATCH
    assert statistics.announced_share == 1.0
    assert statistics.backend == backend
    assert statistics.kernel == kernel
    training.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cache", ["less", "third"])
def test_no_announcement_at_all(tmp_path: Path, cache: str, backend: str) -> None:
    training = Training(tmp_path, cache=CACHES[cache], backend=backend, kernel="reference")
    for batch in training.batches:
        training.step(batch)
    assert training.opt.statistics().announced_share == 0.0
    training.check()


@pytest.mark.parametrize(
    ("cache", "backend", "kernel"), [("one", "threads", "reference"), ("third", "aiofiles", "exact")]
)
def test_announced_by_hand_eight_steps_ahead(tmp_path: Path, cache: str, backend: str, kernel: str) -> None:
    training = Training(tmp_path, cache=CACHES[cache], backend=backend, kernel=kernel)
    for coming in training.batches[:8]:
        training.opt.announce({training.param: coming})
    for i, batch in enumerate(training.batches):
        training.step(batch)
        for coming in training.batches[i + 8 : i + 9]:
            training.opt.announce({"emb.weight": coming.tolist()})
    assert training.opt.statistics().announced_share == 1.0
    training.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cache", ["less", "third"])
@pytest.mark.filterwarnings("ignore:only .* of the rows that steps touched had been announced")
def test_wrong_announcements_change_no_bit(tmp_path: Path, cache: str, backend: str) -> None:
    training = Training(tmp_path, cache=CACHES[cache], backend=backend, kernel="reference")
    chance = random.Random(3)
    for batch in training.batches:
        for _ in range(chance.choice([0, 1, 1, 1, 2])):
            wrong = torch.tensor([chance.randrange(N_ROWS) for _ in range(chance.choice([0, 1, BATCH, 3 * BATCH]))])
            training.opt.announce({training.param: wrong.long()})
        training.step(batch)
    statistics = training.opt.statistics()
    assert 0.0 < statistics.announced_share < 0.5
    # What no step used up stays known until then; it is bounded, and steps that touch nothing use it up.
    for _ in range(statistics.window_batches):
        training.twins.step({})
    training.check()


@pytest.mark.parametrize(("cache", "backend"), [("less", "aiofiles"), ("one", "threads"), ("third", "uring")])
def test_evaluation_between_steps_changes_no_bit_and_leaves_nothing(tmp_path: Path, cache: str, backend: str) -> None:
    training = Training(tmp_path, cache=CACHES[cache], backend=backend, kernel="reference")
    held_out = overlapping_batches(N_ROWS, BATCH, 12, seed=9, share=0.0)
    for i, batch in enumerate(training.opt.lookahead(training.batches, rows=training.rows, depth=4)):
        if i % 20 == 0:
            for j, _ in enumerate(training.opt.lookahead(held_out, rows=training.rows, depth=3)):
                if i % 40 == 0 and j == 7:
                    break
        training.step(batch)
    assert training.opt.statistics().announced_share == 1.0
    training.check()


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_gradient_accumulation_over_announced_batches(tmp_path: Path, depth: int) -> None:
    training = Training(tmp_path, cache=CACHES["third"], kernel="reference", backend="threads")
    held: list[Tensor] = []
    for batch in training.opt.lookahead(training.batches, rows=training.rows, depth=depth):
        held.append(batch)
        if len(held) == 3:
            training.step(torch.cat(held))
            held = []
    statistics = training.opt.statistics()
    assert statistics.steps == STEPS // 3
    assert statistics.announced_share == 1.0
    training.check()


def test_a_body_that_raises_leaves_nothing_pinned(tmp_path: Path) -> None:
    training = Training(tmp_path, cache=CACHES["third"], kernel="exact", backend="threads")
    for start in range(0, STEPS, 30):
        try:
            ahead = training.opt.lookahead(training.batches[start : start + 30], rows=training.rows, depth=8)
            for i, batch in enumerate(ahead):
                if i == 20:
                    raise KeyError("the body's own")
                training.step(batch)
        except KeyError:
            pass
    training.step(training.batches[0])  # ends what was handed out last
    training.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_watched_forward_passes_change_no_bit(tmp_path: Path, backend: str) -> None:
    training = Training(tmp_path, cache=CACHES["third"], kernel="reference", backend=backend)
    model = nn.Embedding(N_ROWS, WIDTH, sparse=True)
    model.weight = training.param
    generator = torch.Generator().manual_seed(5)
    with training.opt.watch(model):
        for i, batch in enumerate(training.batches):
            ids = torch.cat([batch, batch[:3]])
            factors = torch.randn(len(ids), WIDTH, generator=generator)
            training.param.grad = None
            (model(ids) * factors).sum().backward()
            if i % 9 == 0:
                model(batch.flip(0))  # looked up and thrown away
                with torch.no_grad():
                    model(torch.arange(N_ROWS))
            assert training.param.grad is not None
            training.twins.step({"emb.weight": training.param.grad})
    assert training.opt.statistics().announced_share == 1.0
    training.check()


@pytest.mark.parametrize("kernel", ["reference", "exact"])
def test_batches_large_enough_for_torchs_threads(tmp_path: Path, kernel: str) -> None:
    torch.set_num_threads(2)  # the fixture puts it back
    twins = Twins(parameters({"w": (6000, 24)}), tmp_path / "s", {"lr": 0.01}, cache="600KiB", kernel=kernel)
    generator = torch.Generator().manual_seed(0)
    for batch in twins.opt.lookahead(overlapping_batches(6000, 2000, 6), rows=lambda ids: {"w": ids}, depth=2):
        twins.step({"w": random_gradient(twins.disk["w"], batch.repeat(2), generator)})
    twins.check()
    twins.opt.close()
