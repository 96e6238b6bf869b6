"""A training beside its oracle that is to meet a failure, and the check that the last generation outlives it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import Twins, parameters, random_gradient, restore, snapshot

from dsa import DiskSparseAdam
from dsa.config import IOConfig
from dsa.errors import DeviceError, DsaError

N_ROWS, WIDTH = 400, 8
CACHE = 12_000  # some 100 frames
SMALL = IOConfig(segment_bytes=8192, dirty_share=0.05)


class Run:
    """A training and its oracle; what each generation must hold is kept."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.twins = Twins(parameters({"w": (N_ROWS, WIDTH)}), path, {"lr": 0.1}, cache=CACHE, io=SMALL, **options)
        self.generator = torch.Generator().manual_seed(5)
        self.saved: dict[int, Any] = {}
        self.checkpoint()

    @property
    def opt(self) -> DiskSparseAdam:
        return self.twins.opt

    def step(self, count: int = 60) -> None:
        rows = torch.randint(0, N_ROWS, (count,), generator=self.generator)
        self.twins.step({"w": random_gradient(self.twins.disk["w"], rows, self.generator)})

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def checkpoint(self) -> int:
        number = self.opt.checkpoint()
        self.saved[number] = snapshot(self.twins.oracle, self.twins.ram)
        return number

    def until_failure(self, limit: int = 200) -> DsaError:
        """Train, and make a checkpoint, until it fails."""

        def train() -> None:
            for _ in range(limit):
                self.step()
                self.opt.checkpoint()

        with pytest.raises(DsaError) as caught:
            train()
        return caught.value

    def end(self) -> None:
        with pytest.raises(DsaError):  # what had failed is said once more, and everything is ended
            self.opt.close()

    def resume(self, path: Path | None = None) -> DiskSparseAdam:
        """Open the directory anew, compare the newest generation with the oracle's, and go on for a while."""
        gc.collect()
        opt = DiskSparseAdam(
            list(self.twins.disk.items()), state_dir=path or self.path, lr=0.1, cache=CACHE, io=SMALL, existing="resume"
        )
        newest = opt.generations()[-1]
        assert newest == max(self.saved)
        restore(self.saved[newest], self.twins.oracle, self.twins.disk, self.twins.ram)
        self.twins.opt = opt
        self.twins.check()
        self.steps(5)
        self.twins.check()
        return opt


def check_device_error(error: BaseException, number: int, path: str) -> None:
    assert isinstance(error, DeviceError)
    assert isinstance(error, OSError)
    assert error.errno == number
    assert path in str(error.filename)
    assert f"errno {number}" in str(error)
