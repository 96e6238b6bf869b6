"""State dicts: our own, which name a generation, and torch.optim.SparseAdam's, which hold dense moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa.errors import ConfigError, MismatchError, UsageError
from dsa.io.engine import Engine
from dsa.io.whole_file import WholeFile, replacing
from dsa.optim.parameters import check_unchanged
from dsa.optim.row_sets import Key, Rows, Table, TableDirectory, resolve

_CHUNK_BYTES = 8 << 20
_FIELDS = ("exp_avg", "exp_avg_sq")


def check_groups(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Torch's own checks of a state dict's groups, made before anything is changed.

    Raises:
        ConfigError: not a state dict, or other groups.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ConfigError("not an optimizer's state dict: it needs 'state' and 'param_groups'")
    for number, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ConfigError(f"parameter group {number} of the state dict is no dict with 'params', but {group!r:.80}")
    mine = [len(group["params"]) for group in groups]
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    if mine != theirs:
        raise ConfigError(
            f"the state dict has parameter groups of {theirs} parameters, the optimizer of {mine}: load it into an "
            "optimizer with the same groups"
        )


def by_number(state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The state by the parameters' places in the groups, whatever keys it has (torch's tools use names), as torch does.

    Raises:
        MismatchError: it has state of a parameter that its groups do not name.
    """
    state, keys = state_dict["state"], [key for group in state_dict["param_groups"] for key in group["params"]]
    unknown = [key for key in state if key not in set(keys)]
    if unknown:
        raise MismatchError(f"the state dict has state of {unknown}, its parameter groups are of {keys}; it is damaged")
    odd = [key for key in state if not isinstance(state[key], Mapping)]
    if odd:
        raise MismatchError(f"the state dict's entries of {odd} are no dicts; it is damaged")
    return {number: state[key] for number, key in enumerate(keys) if key in state}


def own_state(engine: Engine, tables: TableDirectory) -> dict[Tensor, dict[str, Any]]:
    """The state of each parameter in our own state dicts: what `load` finds its table and its generation by."""
    return {
        table.parameter: {
            "step": engine.steps_of(table.number),
            "generation": engine.generation,
            "table": table.name,
            "state_dir_uuid": engine.uuid,
        }
        for table in tables.tables
    }


def names_generation(state: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Whether the state is our own and names a generation."""
    return any(entry.get("generation") is not None for entry in state.values())


def load(engine: Engine, tables: TableDirectory, state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Bring the engine to what the state says: a generation of its directory, or dense moments taken over.

    Raises:
        MismatchError: it does not fit the directory or the parameters; nothing was changed.
    """
    if any("generation" in entry for entry in state.values()):
        _load_generation(engine, tables, state)
    else:
        _take_over(engine, tables, state)


def _load_generation(engine: Engine, tables: TableDirectory, state: Mapping[Any, Mapping[str, Any]]) -> None:
    by_number = {int(key): entry for key, entry in state.items()}
    missing = [table.name for table in tables.tables if table.number not in by_number]
    if missing:
        raise MismatchError(f"the state dict says nothing of the parameters {missing}")
    numbers = set()
    for table in tables.tables:
        entry = by_number[table.number]
        if entry.get("table") != table.name:
            raise MismatchError(
                f"the state dict's parameter {table.number} is the table {entry.get('table')!r}, the optimizer's is "
                f"{table.name!r}; give the parameters in the same order and by the same names"
            )
        if entry.get("state_dir_uuid") != engine.uuid:
            raise MismatchError(
                f"the state dict belongs to the state directory with UUID {entry.get('state_dir_uuid')}, "
                f"{engine.path} has {engine.uuid}: moments live in state_dir; copy it or export"
            )
        numbers.add(entry["generation"])
    if len(numbers) > 1:
        raise MismatchError(f"the state dict names several generations ({sorted(map(str, numbers))}); it is damaged")
    generation = numbers.pop()
    if generation is not None:
        if not isinstance(generation, int):
            raise MismatchError(f"the state dict names the generation {generation!r}, no number; it is damaged")
        engine.load(generation)


def _take_over(engine: Engine, tables: TableDirectory, state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Write the dense moments of a torch.optim.SparseAdam state dict to the tables, except rows that are all zero."""
    engine.check_decided()
    entries = {int(key): entry for key, entry in state.items()}
    for number, entry in entries.items():
        if not 0 <= number < len(tables.tables):
            raise MismatchError(
                f"the state dict has state of parameter {number}, the optimizer has {len(tables.tables)}"
            )
        table = tables.tables[number]
        check_unchanged(engine.spec_of(number), table.parameter)
        lacking = [key for key in ("step", *_FIELDS) if key not in entry]
        if lacking:
            raise MismatchError(f"the state dict's entry of {table.name!r} lacks {lacking}: not SparseAdam's")
        steps = entry["step"]
        if not isinstance(steps, (int, float, Tensor)) or not (float(steps) >= 0 and float(steps).is_integer()):
            raise MismatchError(f"step of {table.name!r} must be a whole number of at least 0, got {steps!r}")
        shapes = {}
        for name in _FIELDS:
            moment = entry[name]
            whole = isinstance(moment, Tensor) and moment.layout == torch.strided and not moment.is_meta
            if not whole or not moment.is_floating_point():
                raise MismatchError(f"{name} of {table.name!r} must be a dense real tensor with data, got {moment!r}")
            shapes[name] = tuple(moment.shape)
            _check_shape(engine, table, name, shapes[name])
        if len(set(shapes.values())) > 1:
            raise MismatchError(f"the moments of {table.name!r} have different shapes ({shapes}); it is damaged")
    if not entries and engine.steps_since_commit == 0 and all(engine.steps_of(t.number) == 0 for t in tables.tables):
        return
    with engine.replacing_all():
        for number, entry in entries.items():
            table = tables.tables[number]
            engine.set_steps(number, int(entry["step"]))
            moments = [entry[name].detach() for name in _FIELDS]
            for first, last in _chunks(engine, table, len(moments[0])):
                _write(engine, table, first, [part[first:last] for part in moments])


def _check_shape(engine: Engine, table: Table, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a moment of another shape than the parameter's, but not one with fewer rows where tables may grow."""
    wanted = tuple(table.parameter.shape)
    has_grown = shape[1:] == wanted[1:] and len(shape) == len(wanted) and shape[0] < wanted[0]
    if shape == wanted or (has_grown and engine.grow_tables):
        return
    remedy = "; a table that has grown is taken with io=IOConfig(grow_tables=True)" if has_grown else ""
    raise MismatchError(f"{name} of {table.name!r} has shape {shape}, the parameter {wanted}{remedy}")


def _write(engine: Engine, table: Table, first: int, parts: list[Tensor]) -> None:
    array = engine.moments_array(table.number)
    count = len(parts[0])
    real = torch.float64 if array.dtype == np.float64 else torch.float32
    block = torch.cat([part.reshape(count, -1).to("cpu", real) for part in parts], 1).numpy()
    rows = np.flatnonzero(block.view(np.uint8).reshape(count, -1).any(1)).astype(np.int64)

    def put(number: int, positions: NDArray[np.int64], frames: NDArray[np.int32]) -> None:
        array[frames, : block.shape[1]] = block[rows[positions]]

    engine.overwrite(table.number, rows + first, put)


def _chunks(engine: Engine, table: Table, n_rows: int) -> list[tuple[int, int]]:
    array = engine.moments_array(table.number)
    record_bytes = max(array.shape[1] * array.itemsize, 1)
    step = max(1, min(_CHUNK_BYTES // record_bytes, len(array)))
    return [(first, min(first + step, n_rows)) for first in range(0, n_rows, step)]


def _read_into(engine: Engine, table: Table, targets: list[Tensor]) -> None:
    """Fill dense tensors (all zero before) with the table's moments."""
    width = targets[0][0].numel() if table.n_rows else 0
    for first, last in _chunks(engine, table, table.n_rows):
        rows = engine.written_rows(table.number, first, last)
        if len(rows):
            fields = _fields(engine, table, rows, width)
            at = torch.from_numpy(rows)
            for target, values in zip(targets, fields, strict=True):
                target.view(table.n_rows, -1)[at] = torch.from_numpy(values)


def _fields(engine: Engine, table: Table, rows: NDArray[np.int64], width: int) -> list[NDArray[Any]]:
    array = engine.moments_array(table.number)
    raw = np.empty((len(rows), array.shape[1] * array.itemsize), np.uint8)
    engine.read(table.number, rows, raw)
    numbers = raw.view(array.dtype)
    return [numbers[:, i * width : (i + 1) * width] for i in range(len(_FIELDS))]


def moments(engine: Engine, tables: TableDirectory, param: Key, rows: Rows) -> dict[str, Tensor]:
    """Both moments of the rows, in their order, duplicates included.

    Raises:
        ConfigError: an unknown key, rows that are no integers or out of range.
    """
    table = tables.find(param)
    resolve({param: rows}, tables)
    wanted = torch.as_tensor(rows, device="cpu").reshape(-1).numpy().astype(np.int64)
    check_unchanged(engine.spec_of(table.number), table.parameter)
    shape = tuple(table.parameter.shape[1:])
    width = int(np.prod(shape, dtype=np.int64))
    distinct, where = np.unique(wanted, return_inverse=True)
    fields = _fields(engine, table, distinct, width)
    return {
        name: torch.from_numpy(np.ascontiguousarray(values[where])).reshape(len(wanted), *shape)
        for name, values in zip(_FIELDS, fields, strict=True)
    }


def _export(
    engine: Engine, tables: TableDirectory, groups: list[Any], make: Callable[[tuple[int, ...], torch.dtype], Tensor]
) -> dict[str, Any]:
    state = {}
    for table in tables.tables:
        steps = engine.steps_of(table.number)
        if steps == 0:
            continue  # as SparseAdam: no state before the first gradient
        check_unchanged(engine.spec_of(table.number), table.parameter)
        array = engine.moments_array(table.number)
        dtype = torch.float64 if array.dtype == np.float64 else torch.float32
        targets = [make(tuple(table.parameter.shape), dtype) for _ in _FIELDS]
        _read_into(engine, table, targets)
        state[table.number] = {"step": steps, **dict(zip(_FIELDS, targets, strict=True))}
    return {"state": state, "param_groups": groups}


def export(engine: Engine, tables: TableDirectory, groups: list[Any]) -> dict[str, Any]:
    """A torch.optim.SparseAdam state dict with dense moments in RAM (fp32 for bf16 and fp16 parameters)."""
    return _export(engine, tables, groups, lambda shape, dtype: torch.zeros(shape, dtype=dtype, device="cpu"))


def export_to(engine: Engine, tables: TableDirectory, groups: list[Any], path: Path) -> None:
    """Save such a state dict as torch.save does; the moments pass through a temporary file beside `path`, not RAM.

    It is on the medium before it takes the name `path`.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a directory; make it first")
    with replacing(path) as folder:
        made = 0

        def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal made
            made += 1
            count = int(np.prod(shape, dtype=np.int64))
            if count == 0:
                return torch.zeros(shape, dtype=dtype, device="cpu")
            with WholeFile(folder / str(made)) as file:
                file.reserve(count * dtype.itemsize)  # mapped and without room it would be SIGBUS
            return torch.from_file(str(file.path), shared=True, size=count, dtype=dtype).view(shape)

        state_dict = _export(engine, tables, groups, make)
        with WholeFile(folder / "whole") as whole:
            torch.save(state_dict, cast("IO[bytes]", whole))
            whole.sync()
