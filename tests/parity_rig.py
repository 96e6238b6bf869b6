"""DiskSparseAdam and its oracle side by side: the same weights, the same gradients, and a comparison of every bit."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsa import DiskSparseAdam
from dsa.errors import ConfigError

HALVES = (torch.bfloat16, torch.float16)
BACKENDS = ("threads", "aiofiles", "uring")
Parameters = dict[str, nn.Parameter]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the last bit, the signs of zeros included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [each.detach().cpu().reshape(-1).contiguous().view(torch.uint8) for each in (one, other)]
    return torch.equal(flat[0], flat[1])


def sparse(rows: Tensor | Sequence[int], values: Tensor, shape: Sequence[int]) -> Tensor:
    """An uncoalesced gradient: `values[i]` for row `rows[i]`, duplicates and any order allowed."""
    return torch.sparse_coo_tensor(torch.as_tensor(rows, dtype=torch.int64)[None], values, tuple(shape))


def random_gradient(
    param: Tensor, rows: Tensor, generator: torch.Generator, *, dtype: torch.dtype | None = None
) -> Tensor:
    """A gradient with random values for these rows."""
    values = torch.randn(len(rows), *param.shape[1:], generator=generator, dtype=torch.float64)
    return sparse(rows, values.to(dtype or param.dtype), param.shape)


def parameters(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32, seed: int = 0) -> Parameters:
    """Random parameters by name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }


def clones(originals: Parameters) -> Parameters:
    """The same parameters once more."""
    return {name: nn.Parameter(param.detach().clone()) for name, param in originals.items()}


def overlapping_batches(n_rows: int, size: int, steps: int, seed: int = 0, share: float = 0.9) -> list[Tensor]:
    """Random batches of distinct rows, each with about `share` of its rows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randperm(n_rows, generator=generator)[:size]
    batches = []
    for _ in range(steps):
        keep = batch[torch.randperm(size, generator=generator)[: int(size * share)]]
        others = torch.randperm(n_rows, generator=generator)
        others = others[~torch.isin(others, keep)][: size - len(keep)]
        batch = torch.cat([keep, others])[torch.randperm(size, generator=generator)]
        batches.append(batch)
    return batches


class HalvesOracle:
    """SparseAdam's arithmetic for bf16 and fp16 parameters: fp32 moments, weights rounded after every step."""

    def __init__(self, params: Iterable[Any], **hyperparameters: Any) -> None:
        groups = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self._params: list[nn.Parameter] = [param for group in groups for param in group["params"]]
        self._wide = [nn.Parameter(param.detach().float()) for param in self._params]
        wide = iter(self._wide)
        wide_groups = [{**group, "params": [next(wide) for _ in group["params"]]} for group in groups]
        self._adam = torch.optim.SparseAdam(wide_groups, **hyperparameters)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._adam.param_groups

    @property
    def state(self) -> dict[nn.Parameter, Any]:
        return {
            param: self._adam.state[wide]
            for param, wide in zip(self._params, self._wide, strict=True)
            if wide in self._adam.state
        }

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for param, wide in zip(self._params, self._wide, strict=True):
            wide.data.copy_(param.detach())
            grad = None if param.grad is None else param.grad.coalesce()
            wide.grad = None if grad is None else sparse(grad.indices()[0], grad.values().float(), grad.shape)
        self._adam.step()
        for param, wide in zip(self._params, self._wide, strict=True):
            param.data.copy_(wide.detach())

    def state_dict(self) -> dict[str, Any]:
        return self._adam.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._adam.load_state_dict(state_dict)


def oracle(groups: Any, dtype: torch.dtype, **hyperparameters: Any) -> Any:
    """The optimizer whose numbers are the right ones."""
    kind = HalvesOracle if dtype in HALVES else torch.optim.SparseAdam
    return kind(groups, **hyperparameters)


def disk_optimizer(params: Any, state_dir: Path, **options: Any) -> DiskSparseAdam:
    """A DiskSparseAdam; the test is skipped where the backend asked for does not exist on this machine."""
    try:
        return DiskSparseAdam(params, state_dir=state_dir, **options)
    except ConfigError as error:
        if options.get("backend") == "uring" and "cannot work here" in str(error):
            pytest.skip(str(error))
        raise


class Twins:
    """The same parameters twice: `disk`, managed by `opt`, and `ram`, managed by the oracle.

    Args:
        originals: parameters by name; both sides begin with them.
        state_dir: of the disk side.
        hyperparameters: for both sides.
        options: for the disk side only.
    """

    def __init__(
        self,
        originals: Parameters,
        state_dir: Path,
        hyperparameters: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.disk, self.ram = clones(originals), clones(originals)
        dtype = next(iter(originals.values())).dtype
        both = dict(hyperparameters or {})
        self.oracle = oracle(list(self.ram.values()), dtype, **both)
        self.opt = disk_optimizer(list(self.disk.items()), state_dir, **both, **options)

    def give(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Set the gradients of the parameters named; the others have none."""
        for side in (self.disk, self.ram):
            for name, param in side.items():
                grad = gradients.get(name)
                param.grad = None if grad is None else grad.clone()

    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        """One step on both sides."""
        self.give(gradients)
        self.opt.step()
        self.oracle.step()

    def check_weights(self) -> None:
        """Every bit of every weight."""
        for name, param in self.disk.items():
            assert same_bits(param, self.ram[name]), f"weights of {name} differ"

    def check(self) -> None:
        """Every bit of weights and moments, and the step counts."""
        self.check_weights()
        for name, param in self.disk.items():
            check_moments(self.opt, name, param, self.oracle.state.get(self.ram[name]))


def check_moments(opt: DiskSparseAdam, name: str, param: Tensor, expected: Mapping[str, Any] | None) -> None:
    """Compare all moments of one parameter with the oracle's state of it."""
    found = opt.moments(name, range(len(param)))
    assert set(found) == {"exp_avg", "exp_avg_sq"}
    for key, values in found.items():
        assert values.shape == param.shape
        right = expected[key] if expected else torch.zeros_like(values)
        assert same_bits(values, right), f"{key} of {name} differs"
    assert opt.state[param]["step"] == (expected["step"] if expected else 0)


def snapshot(twins_oracle: Any, ram: Parameters) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The oracle's weights and state, copied."""
    return {name: param.detach().clone() for name, param in ram.items()}, copy.deepcopy(twins_oracle.state_dict())


def restore(saved: tuple[dict[str, Tensor], dict[str, Any]], twins_oracle: Any, *sides: Parameters) -> None:
    """Bring the oracle, and the weights of these sides, back to a snapshot."""
    for side in sides:
        for name, param in side.items():
            param.data.copy_(saved[0][name])
    twins_oracle.load_state_dict(copy.deepcopy(saved[1]))


def contents(directory: Path) -> dict[str, str]:
    """Every file and folder below `directory`, with a hash of what it holds. The lock file names its last owner, and
    is left out."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.name != "LOCK":
            found[str(path.relative_to(directory))] = (
                "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
            )
    return found


@contextlib.contextmanager
def unchanged(directory: Path) -> Iterator[None]:
    """Nothing below `directory` changes inside the block, and it does not come into being."""
    there, before = directory.exists(), contents(directory)
    yield
    assert directory.exists() == there
    assert contents(directory) == before
