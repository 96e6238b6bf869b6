"""What may be handed to the optimizer: hyperparameters and parameters, checked before anything is touched."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsa.config import IOConfig
from dsa.errors import ConfigError, UsageError
from dsa.io.tables import TableSpec

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def number(value: Any) -> float:
    """A hyperparameter as a float; a tensor of one element counts as its value."""
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def check_hyperparameters(group: Mapping[str, Any], where: str = "", *, zero_lr: bool = False) -> None:
    """SparseAdam's own checks, with `where` naming the parameter group.

    Args:
        zero_lr: an lr of 0 is right too (a scheduler's warm-up may begin there).

    Raises:
        ConfigError: a value is out of range.
    """
    lr, betas, eps = group["lr"], group["betas"], group["eps"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"{where}a tensor lr must have 1 element, got shape {tuple(lr.shape)}")
    try:
        rate, least, both = number(lr), number(eps), tuple(number(beta) for beta in betas)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}lr, eps and betas must be numbers, got {lr!r}, {eps!r}, {betas!r}") from error
    if not (rate > 0.0 or (zero_lr and rate == 0.0)):
        raise ConfigError(f"{where}lr must be above 0, got {rate}")
    if not least > 0.0:
        raise ConfigError(f"{where}eps must be above 0, got {least}")
    if len(both) != 2 or not all(0.0 <= beta < 1.0 for beta in both):
        raise ConfigError(f"{where}betas must be two numbers in [0, 1), got {betas!r}")
    if group.get("weight_decay"):
        raise ConfigError(
            f"{where}weight_decay={group['weight_decay']!r} is not supported: rows that a batch does not touch are "
            "not visited, so they could not decay; add a penalty on the looked-up rows to the loss instead"
        )


def check_parameter(name: str, param: Any) -> None:
    """Refuse what SparseAdam refuses, and what has no rows.

    Raises:
        ConfigError: a sparse, complex, integer or zero-dimensional parameter.
    """
    if not isinstance(param, Tensor):
        return  # torch's own message names the type
    if param.is_sparse or param.layout != torch.strided:
        raise ConfigError(
            f"parameter {name!r} is sparse ({param.layout}): only its gradients may be; make it a dense tensor, "
            "for example nn.Embedding(..., sparse=True).weight"
        )
    if param.is_complex():
        raise ConfigError(f"parameter {name!r} is complex ({param.dtype}); split it into real and imaginary parts")
    if param.dtype not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise ConfigError(f"parameter {name!r} is of dtype {param.dtype}; supported are {known}")
    if param.dim() == 0:
        raise ConfigError(f"parameter {name!r} has no dimensions, so no rows; give it to another optimizer")
    if param.device.type == "meta":
        raise ConfigError(f"parameter {name!r} is on the meta device: it has no data; materialise the model first")


def spec(name: str, param: Tensor) -> TableSpec:
    """What the engine is told about a parameter."""
    dtype = DTYPES[param.dtype]
    moment_dtype = "float64" if dtype == "float64" else "float32"
    return TableSpec(name, tuple(param.shape), dtype, math.prod(param.shape[1:]), moment_dtype)


def check_unchanged(made: TableSpec, param: Tensor) -> None:
    """Refuse a parameter that is not what its table was made for: records of another size would be written past.

    Raises:
        UsageError: another shape or dtype, such as after `model.to(dtype)` or a new `param.data`.
    """
    if tuple(param.shape) != made.shape or DTYPES.get(param.dtype) != made.dtype:
        raise UsageError(
            f"parameter {made.name!r} is {str(param.dtype).removeprefix('torch.')} of shape {tuple(param.shape)}, its "
            f"table was made for {made.dtype} of shape {made.shape}: make the optimizer after the model has been "
            "converted or resized"
        )


def named(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, Tensor]]:
    """All parameters of the groups with their names: those given, else p0, p1, ... by order.

    Raises:
        ConfigError: two parameters have one name.
    """
    pairs: list[tuple[str, Tensor]] = []
    for group in groups:
        names: Iterable[str | None] = group.get("param_names") or [None] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            pairs.append((name if name is not None else f"p{len(pairs)}", param))
    seen: set[str] = set()
    for name, _ in pairs:
        if not isinstance(name, str) or any("\ud800" <= each <= "\udfff" for each in name):
            raise ConfigError(f"a parameter's name must be a str that UTF-8 can write, got {name!r}")
        if name in seen:
            raise ConfigError(f"two parameters are called {name!r}: names tell tables apart, give each its own")
        seen.add(name)
    return pairs


def refuse_several_processes() -> None:
    """Raise where torch.distributed runs more than one process.

    Raises:
        UsageError: it does.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UsageError(
            f"torch.distributed runs {distributed.get_world_size()} processes: DiskSparseAdam does not shard its "
            "tables; train in one process"
        )


def check_choices(staging: object, keep_generations: object, io: object) -> None:
    """Refuse values that are not among the choices.

    Raises:
        ConfigError: with the value and what it may be.
    """
    if staging not in ("auto", "on", "off"):
        raise ConfigError(f'staging must be "auto", "on" or "off", got {staging!r}')
    whole = isinstance(keep_generations, int) and not isinstance(keep_generations, bool)
    if keep_generations is not None and not (whole and keep_generations >= 1):  # type: ignore[operator]
        raise ConfigError(f"keep_generations must be a whole number of at least 1, or None, got {keep_generations!r}")
    if io is not None and not isinstance(io, IOConfig):
        raise ConfigError(f"io must be an IOConfig, got {type(io).__name__}")


def check_group(group: dict[str, Any], defaults: dict[str, Any], number: int) -> None:
    """Check a group before torch takes it; its parameters may be an iterator, which becomes a list."""
    where = f"parameter group {number}: "
    check_hyperparameters({**defaults, **group}, where, zero_lr=True)
    params = group["params"]
    if isinstance(params, Tensor):
        params = [params]
    elif not isinstance(params, set):
        params = list(params)
    group["params"] = params
    for i, each in enumerate(params):
        name, param = each if isinstance(each, tuple) and len(each) == 2 else (f"{where}number {i}", each)
        check_parameter(str(name), param)


def warn_of_lookalikes(pairs: list[tuple[str, Tensor]]) -> None:
    """Warn where two parameters without names have one shape: only their order tells their tables apart."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, param in pairs:
        key = (tuple(param.shape), param.dtype)
        if key in seen:
            warnings.warn(
                f"parameters {seen[key]} and {name} have no names and one shape {tuple(param.shape)}: their moments "
                "are told apart by order only; pass model.named_parameters()",
                stacklevel=4,
            )
            return
        seen[key] = name
