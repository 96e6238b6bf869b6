"""A default device that is not the CPU (`torch.set_default_device`) is the user's for his own tensors, not for ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import Twins, overlapping_batches, parameters, random_gradient
from torch.utils._device import _device_constructors

import dsa

N_ROWS, BATCH = 200, 30
SOURCES = sorted(Path(dsa.__file__).parent.rglob("*.py"))
FACTORIES = {function.__name__ for function in _device_constructors()} | {"Generator"}


def factories(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of torch's own functions that make a tensor where the default device is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch":
                yield node


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def test_every_tensor_of_ours_is_made_on_a_device_that_is_named() -> None:
    found = [(path, call) for path in SOURCES for call in factories(ast.parse(path.read_text(encoding="utf-8")))]
    assert len(found) > 10
    unnamed = [
        f"{path.name}:{call.lineno}"
        for path, call in found
        if not any(keyword.arg == "device" and not _is_none(keyword.value) for keyword in call.keywords)
        and not (isinstance(call.func, ast.Attribute) and call.func.attr == "Generator" and call.args)
    ]
    assert unnamed == []


@pytest.mark.parametrize("staging", ["auto", "on"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_training_under_another_default_device_changes_no_bit(tmp_path: Path, dtype: torch.dtype, staging: str) -> None:
    shapes = {"w": (N_ROWS, 6), "cube": (N_ROWS, 2, 2)}
    originals, generator = parameters(shapes, dtype), torch.Generator().manual_seed(0)
    batches = overlapping_batches(N_ROWS, BATCH, 12)
    with torch.device("meta"):
        twins = Twins(originals, tmp_path / "s", {"lr": 0.01}, staging=staging, cache="8KiB")
    opt: Any = twins.opt

    def step(batch: torch.Tensor) -> None:
        rows = torch.cat([batch, batch[:4]])
        twins.give({name: random_gradient(param, rows, generator) for name, param in twins.disk.items()})
        with torch.device("meta"):
            opt.step()
        twins.oracle.step()

    with torch.device("meta"):
        ahead = iter(opt.lookahead(batches[:6], rows=lambda batch: {"w": batch, "cube": batch}, depth=2))
        for _ in range(6):
            batch = next(ahead)
            with torch.device("cpu"):
                step(batch)
        saved = opt.state_dict()
        opt.load_state_dict(saved)
        moments = opt.moments("cube", [3, 1, 3])
        exported = opt.export_state_dict()
    assert moments["exp_avg"].device.type == exported["state"][0]["exp_avg"].device.type == "cpu"
    for batch in batches[6:]:
        with torch.device("meta"):
            opt.announce({"w": batch, "cube": batch.tolist()})
        step(batch)
    twins.check()
    opt.close()
