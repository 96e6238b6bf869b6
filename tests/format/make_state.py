"""Makes the state directory beside it, and what it must be read as: python tests/format/make_state.py NEW_DIRECTORY.

Run it only for a new version of the format, into a new directory; those of older versions stay as they are. Gradients
come from a formula, so that they do not hang on any random stream.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from dsa import DiskSparseAdam, IOConfig

STEPS_OF_GENERATION = (3, 2)
WRITTEN_OF_LATER = {"nodes.weight": 1, "relations": 0}  # gradients per step after the first generation


def parameters() -> dict[str, nn.Parameter]:
    """The parameters that the state belongs to."""
    return {
        "nodes.weight": nn.Parameter(torch.full((40, 3), 0.5)),
        "relations": nn.Parameter(torch.full((5, 2, 2), -0.25, dtype=torch.float64)),
    }


def gradient(param: nn.Parameter, step: int) -> torch.Tensor:
    """Rows step, step + 3, step + 6, ..., but never the last three, with values that binary fractions hold exactly."""
    rows = torch.arange(step % 3, len(param) - 3, 3)
    count = param[0].numel()
    values = (rows[:, None] * count + torch.arange(count) + step - 20).to(param.dtype) / 64
    values = values.reshape(len(rows), *param.shape[1:])
    return torch.sparse_coo_tensor(rows[None], values, param.shape, check_invariants=False)


def main(directory: Path) -> None:
    """Make the directory, and the file of what it holds."""
    params = parameters()
    expected = []
    opt = DiskSparseAdam(
        list(params.items()), lr=0.125, state_dir=directory, io=IOConfig(segment_bytes=8192), kernel="reference"
    )
    with opt:
        step = 0
        for steps in STEPS_OF_GENERATION:
            for _ in range(steps):
                for name, param in params.items():
                    later = step >= STEPS_OF_GENERATION[0]
                    param.grad = gradient(param, step) if not later or WRITTEN_OF_LATER[name] else None
                opt.step()
                step += 1
            number = opt.checkpoint()
            expected.append({"generation": number, "tables": {name: _state(opt, params, name) for name in params}})
    (directory / "LOCK").unlink()
    directory.with_name(directory.name + "-expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def _state(opt: DiskSparseAdam, params: dict[str, nn.Parameter], name: str) -> dict[str, object]:
    moments = opt.moments(name, list(range(len(params[name]))))
    hexes = {key: [value.hex() for value in values.reshape(-1).tolist()] for key, values in moments.items()}
    return {"step": opt.state[params[name]]["step"], **hexes}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
