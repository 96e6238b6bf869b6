"""Training through the staging buffers, on a late device with a seed, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import Twins, overlapping_batches, parameters, random_gradient
from torch import Tensor

import dsa.io.stepping
from dsa.io.late_device import LateDevice
from dsa.io.staging import Staging
from dsa.io.staging_buffer import Phase

LIMIT_S = 20.0
N_ROWS, BATCH, WIDTH = 300, 24, 5


class Staged:
    """Two tables, both staged on one late device; `pair` has half the rows of `w`, of the same record size.

    Args:
        device: made anew by default, with the seed.
    """

    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, device: LateDevice | None = None, **options: Any
    ) -> None:
        self.device = device or LateDevice(seed)
        monkeypatch.setattr(dsa.io.stepping, "open_device", lambda wanted: self.device)
        shapes = {"w": (N_ROWS, WIDTH), "pair": (N_ROWS // 2, WIDTH)}
        options = {"cache": "auto", "staging": "on", **options}
        self.twins = Twins(parameters(shapes, seed=seed), path / "state", {"lr": 0.01}, **options)
        self.opt = self.twins.opt
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def staging(self) -> Staging:
        return self.opt._books.engine._pipeline.stagings[0]

    def rows(self, batch: Tensor) -> dict[Any, Any]:
        return {"w": batch, "pair": batch // 2}

    def gradients(self, batch: Tensor) -> dict[str, Tensor | None]:
        """Random values for the batch's rows, some of them twice."""
        ids = {"w": torch.cat([batch, batch[:3]]), "pair": batch // 2}
        return {name: random_gradient(self.twins.disk[name], rows, self._generator) for name, rows in ids.items()}

    def step(self, batch: Tensor) -> None:
        self.twins.step(self.gradients(batch))

    def batches(self, steps: int, seed: int = 0, share: float = 0.9) -> list[Tensor]:
        return overlapping_batches(N_ROWS, BATCH, steps, seed=seed, share=share)

    def await_phases(self, come: Callable[[tuple[Phase, Phase]], bool], *, hurry: bool = False) -> None:
        """Wait until the buffers' phases are what a test needs."""
        staging = self.staging
        condition = staging._access.condition
        with condition:
            if hurry:
                self.device.hurry()
            assert condition.wait_for(lambda: come(staging.phases()), LIMIT_S), f"buffers are {staging.phases()}"

    def await_staged(self, count: int = 1, *, hurry: bool = False) -> None:
        """Wait until so many batches are ready on the device, and none is on its way."""
        self.await_phases(
            lambda phases: phases.count(Phase.READY) >= count and Phase.FILLING not in phases, hurry=hurry
        )

    def await_next(self, count: int, or_else: Callable[[], bool] = lambda: False) -> None:
        """Wait until so many batches are ready on the device, or something else is so; nothing is hurried then."""
        staging = self.staging
        condition = staging._access.condition
        with condition:
            for _ in range(2000):
                if staging.phases().count(Phase.READY) >= count or or_else():
                    return
                self.device.hurry()
                condition.wait(0.01)
        raise AssertionError(f"buffers are {staging.phases()}")

    def refused(self) -> bool:
        """Whether the next batch is not staged, since the device had no memory for one."""
        books = self.opt._books.engine._pipeline.books
        last = self.staging.staged._last_refused
        with self.staging._access.condition:  # which its holder may take again
            return any(batch.sequence <= last for batch in books.window.in_order())

    def check(self) -> None:
        """Every bit is equal, and nothing is left pinned."""
        self.twins.check()
        statistics = self.opt.statistics()
        assert statistics.pinned_frames == 0
        assert statistics.window_batches == 0
        assert set(self.staging.phases()) == {Phase.FREE}
        self.opt.close()
