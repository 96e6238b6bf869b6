"""What a hunt for defects once found, so that it stays mended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import sparse
from torch import Tensor, nn

from dsa import DiskSparseAdam
from dsa.errors import UsageError

ROWS, WIDTH = 20, 4


def table(width: int = WIDTH) -> nn.Parameter:
    return nn.Parameter(torch.zeros(ROWS, width))


def step(optimizer: DiskSparseAdam, rows: tuple[int, ...] = (1, 2)) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = sparse(rows, torch.ones(len(rows), *param.shape[1:], dtype=param.dtype), param.shape)
    optimizer.step()


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "more rows": lambda data: torch.zeros(ROWS + 10, WIDTH),
    "fewer rows": lambda data: torch.zeros(ROWS - 10, WIDTH),
    "wider": lambda data: torch.zeros(ROWS, WIDTH + 2),
    "another dtype": lambda data: data.double(),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_parameter_that_changed_is_refused_not_written_past_its_records(tmp_path: Path, change: str) -> None:
    param = table()
    with DiskSparseAdam([("emb", param)], state_dir=tmp_path) as optimizer:
        step(optimizer)
        moments, data = optimizer.moments("emb", [1]), param.data
        param.grad, param.data = None, CHANGED[change](param.data)
        calls: list[Callable[[], Any]] = [
            lambda: step(optimizer),
            lambda: optimizer.moments("emb", [1]),
            lambda: optimizer.export_state_dict(),
        ]
        for call in calls:
            with pytest.raises(UsageError, match=r"'emb'.*its table was made for float32 of shape"):
                call()
        param.grad, param.data = None, data
        assert torch.equal(optimizer.moments("emb", [1])["exp_avg"], moments["exp_avg"])
        step(optimizer)
