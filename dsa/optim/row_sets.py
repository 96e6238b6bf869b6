"""What a user announces, as rows: names, parameters and modules become table numbers, ids become sorted unique rows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dsa.errors import ConfigError, UsageError
from dsa.optim.sorting import Sorted, sort

Key: TypeAlias = "nn.Module | torch.Tensor | str"
Rows: TypeAlias = "torch.Tensor | NDArray[Any] | Sequence[Any] | int"
RowSets: TypeAlias = "dict[int, NDArray[np.int64]]"

_NAMES_SHOWN = 20


@dataclass(frozen=True, eq=False)
class Table:
    """One managed parameter: the number of its table, its name and the number of its rows."""

    number: int
    name: str
    parameter: torch.Tensor
    n_rows: int


@dataclass(frozen=True, init=False)
class TableDirectory:
    """The managed parameters, found by name or by identity; a table's number is its place in the order given.

    Args:
        parameters: pairs of name and parameter, each once. They are kept alive, so that an identity stays theirs.
    """

    tables: tuple[Table, ...]
    _by_name: dict[str, Table] = field(repr=False, compare=False)
    _by_identity: dict[int, Table] = field(repr=False, compare=False)

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        tables = tuple(
            Table(number, name, parameter, int(parameter.shape[0]) if parameter.dim() else 1)
            for number, (name, parameter) in enumerate(parameters)
        )
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "_by_name", {table.name: table for table in tables})
        object.__setattr__(self, "_by_identity", {id(table.parameter): table for table in tables})

    def of_parameter(self, parameter: object) -> Table | None:
        """The table of this very parameter, None where it is not managed."""
        return self._by_identity.get(id(parameter))

    def find(self, key: Key) -> Table:
        """The table that a key of an announcement means.

        Raises:
            ConfigError: an unknown name, or a key that is no module, parameter or name.
            UsageError: a parameter that is not managed, a module that has none or several managed ones.
        """
        if isinstance(key, str):
            table = self._by_name.get(key)
            if table is None:
                raise ConfigError(f"no parameter is called {key!r}; the optimizer has {self._names()}")
            return table
        if isinstance(key, torch.Tensor):
            table = self.of_parameter(key)
            if table is None:
                raise UsageError(
                    f"a parameter of shape {tuple(key.shape)} was announced that this optimizer does not manage; "
                    f"it has {self._names()}"
                )
            return table
        if isinstance(key, nn.Module):
            return self._of_module(key)
        raise ConfigError(f"the key of an announcement is a module, a parameter or a name, not {type(key).__name__}")

    def _of_module(self, module: nn.Module) -> Table:
        found = [table for table in map(self.of_parameter, module.parameters()) if table is not None]
        if len(found) == 1:
            return found[0]
        kind = type(module).__name__
        if not found:
            raise UsageError(f"module {kind} has no parameter that this optimizer manages; it has {self._names()}")
        names = ", ".join(table.name for table in found)
        raise UsageError(
            f"module {kind} has {len(found)} managed parameters ({names}): announce each by its own module or name"
        )

    def _names(self) -> str:
        shown = ", ".join(table.name for table in self.tables[:_NAMES_SHOWN])
        more = len(self.tables) - _NAMES_SHOWN
        return f"{shown} and {more} more" if more > 0 else shown or "none"


def resolve(announcement: Mapping[Key, Rows], tables: TableDirectory) -> RowSets:
    """The rows announced, by table number: sorted, unique, int64, in memory of their own.

    Args:
        announcement: module, parameter or name -> integer rows (a tensor on any device, an array, a list, a range,
            one int), of any shape, with duplicates or empty. Two keys of one table are united.
        tables: the managed parameters.

    Raises:
        ConfigError: not a mapping, an unknown name, rows that are no integers, a row out of range.
        UsageError: a module or parameter that does not mean exactly one table.
    """
    return {number: sorted_unique(rows) for number, rows in united(announcement, tables).items()}


def resolve_sorted(
    announcement: Mapping[Key, Rows] | Mapping[str, Sorted],
    tables: TableDirectory,
    unordered: Container[int] = (),
    most_look_ups: int | None = None,
) -> dict[int, Sorted]:
    """As `resolve`, with the order of the look-ups besides; what a loader's worker has sorted is only checked.

    Args:
        unordered: tables whose order is of no use to anybody, and costs most of the time.
        most_look_ups: where there are more, all tables together, the rows alone are found, for all of them.

    Raises:
        ConfigError, UsageError: as `resolve`.
    """
    found: dict[int, Sorted] = {}
    given: dict[Key, Rows] = {}
    for key, rows in announcement.items() if isinstance(announcement, Mapping) else ():
        if isinstance(rows, Sorted):
            table = tables.find(key)
            _checked(rows.rows, table)
            found[table.number] = rows
        else:
            given[key] = rows
    looked_up = united(given if isinstance(announcement, Mapping) else announcement, tables)
    ordered = [len(rows) for number, rows in looked_up.items() if number not in unordered]
    look_ups = sum(ordered) + sum(len(batch.order) for batch in found.values())
    too_many = most_look_ups is not None and look_ups > most_look_ups
    if too_many:
        found = {number: Sorted.of_rows(batch.rows) for number, batch in found.items()}
    for number, rows in looked_up.items():
        if too_many or number in unordered:
            found[number] = Sorted.of_rows(sorted_unique(rows))
        else:
            found[number] = sort(_as_tensor(rows), recognizable=True)
    return found


def united(announcement: Mapping[Key, Rows], tables: TableDirectory) -> RowSets:
    """The rows announced, by table number, as they come: checked int64 [n], not always in memory of their own."""
    if not isinstance(announcement, Mapping):
        raise ConfigError(
            "an announcement is a dict from module, parameter or name to rows, such as {model.node_emb: ids}, "
            f"not {type(announcement).__name__}"
        )
    pieces: dict[int, list[NDArray[np.int64]]] = {}
    for key, rows in announcement.items():
        table = tables.find(key)
        pieces.setdefault(table.number, []).append(_checked(rows, table))
    return {number: parts[0] if len(parts) == 1 else np.concatenate(parts) for number, parts in pieces.items()}


def sorted_unique(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The distinct rows of int64 [n] in ascending order, always a copy; time and memory depend on n only."""
    ordered = np.array(rows, dtype=np.int64, order="C")
    if len(ordered) < 2:
        return ordered
    step_up = ordered[1:] > ordered[:-1]
    if step_up.all():
        return ordered
    ordered.sort()
    first_of_its_kind = np.empty(len(ordered), dtype=np.bool_)
    first_of_its_kind[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first_of_its_kind[1:])
    return ordered[first_of_its_kind]


def _as_tensor(rows: NDArray[np.int64]) -> torch.Tensor:
    whole = np.ascontiguousarray(rows)
    return torch.from_numpy(whole if whole.flags.writeable else whole.copy())


def _checked(rows: Rows, table: Table) -> NDArray[np.int64]:
    flat = _as_array(rows, table).reshape(-1)
    if flat.size == 0:
        return np.empty(0, dtype=np.int64)
    if flat.dtype.kind not in "iu":
        raise ConfigError(f"rows of {table.name!r} must be integers, got {flat.dtype} ({type(rows).__name__})")
    # Compared before the cast: an unsigned 64-bit row must not wrap around into range.
    lowest, highest = int(flat.min()), int(flat.max())
    if lowest < 0 or highest >= table.n_rows:
        wrong = lowest if lowest < 0 else highest
        raise ConfigError(f"row {wrong} of {table.name!r} is out of range: the table has {table.n_rows} rows")
    return flat.astype(np.int64, copy=False)


def _as_array(rows: Rows, table: Table) -> NDArray[Any]:
    if isinstance(rows, torch.Tensor):
        if rows.dtype is torch.bfloat16 or rows.layout != torch.strided or rows.is_meta or rows.is_quantized:
            what = "meta" if rows.is_meta else f"{rows.dtype} ({rows.layout})"
            raise ConfigError(f"rows of {table.name!r} must be integers in a dense tensor, got {what}")
        return rows.detach().cpu().numpy()
    if isinstance(rows, range):
        return np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
    try:
        return np.asarray(rows)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"rows of {table.name!r} are no array of integers: {error}") from error
