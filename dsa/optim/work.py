"""What one step has to do: the gradient of each parameter that has one, its rows on the host, and their update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsa.errors import UsageError
from dsa.io.engine import Engine
from dsa.optim.books import Books
from dsa.optim.gradients import SparseGradient, await_host, rows_on_host, unique_rows
from dsa.optim.kernels import Hyperparameters, choose_kernel
from dsa.optim.parameters import check_unchanged, number
from dsa.optim.placement import update_in_frames


@dataclass(frozen=True)
class Work:
    """What a step does to one table."""

    param: Tensor
    gradient: SparseGradient
    hyper: Callable[[], Hyperparameters]  # asked when the step has been counted


def collect(groups: Iterable[Mapping[str, Any]], books: Books) -> tuple[dict[int, Work], dict[int, NDArray[np.int64]]]:
    """By table number, for the parameters that have a gradient: what is to be done, and the table's rows on the host.

    Args:
        groups: torch's, all of the optimizer's; what they hold is read again when the update is carried out.

    Raises:
        UsageError: a gradient that cannot be meant, or a parameter that has no table, or not the one it was made with.
    """
    found = []
    announcer = books.announcer
    for group in groups:
        for param in group["params"]:
            table = books.tables.of_parameter(param)
            if table is None:
                raise UsageError(
                    f"a parameter of shape {tuple(param.shape)} came into a group without add_param_group(); "
                    "add it through that"
                )
            check_unchanged(books.engine.spec_of(table.number), param)
            announced = announcer.handed_out.get(table.number)
            gradient = unique_rows(table.name, param, bool(group.get("maximize", False)), announced)
            if gradient is None:
                continue
            found.append((table, group, gradient))
            if announced is not None and announced.ordered:
                runs = gradient.runs
                announcer.order_was_of_use(table.number, runs is not None and runs.order is announced.order)
    await_host(table.parameter for table, _, _ in found)
    work, rows = {}, {}
    for table, group, gradient in found:
        maximize = bool(group.get("maximize", False))
        gradient, rows[table.number] = rows_on_host(table.name, table.parameter, gradient, maximize)
        # Nothing in it refers to `work`: gradients are large, and a cycle would keep them until a garbage collection.
        hyper = functools.partial(_hyperparameters, group, books.engine, table.number)
        work[table.number] = Work(table.parameter, gradient, hyper)
    return work, rows


def _hyperparameters(group: Mapping[str, Any], engine: Engine, table: int) -> Hyperparameters:
    return Hyperparameters(
        lr=group["lr"],
        beta1=number(group["betas"][0]),
        beta2=number(group["betas"][1]),
        eps=number(group["eps"]),
        step=engine.steps_of(table),
    )


def in_frames(work: Mapping[int, Work], books: Books) -> Callable[[int, NDArray[np.int64], NDArray[np.int32]], None]:
    """What a step calls for rows with moments in frames: with a table, positions among its gradient's rows, frames."""

    def update(table: int, positions: NDArray[np.int64], frames: NDArray[np.int32]) -> None:
        mine = work[table]
        gradient = mine.gradient
        if len(positions) < len(gradient.rows):
            gradient = gradient.at(positions)
        kernel = choose_kernel(books.kernel, mine.param)
        update_in_frames(kernel, books.engine.moments_array(table), frames, mine.param, gradient, mine.hyper())

    return update
