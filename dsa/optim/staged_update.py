"""The update of staged rows on their device: the reference kernel's arithmetic, tables of one kind together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa.io.devices import Device
from dsa.io.staging_buffer import Group, Part
from dsa.optim.gradients import SparseGradient
from dsa.optim.kernels import Hyperparameters, add_to_rows, reference_step
from dsa.optim.work import Work


def updater(work: Mapping[int, Work]) -> Callable[[Device, Sequence[Group]], Callable[[], None]]:
    """What staging calls for each buffer: it returns the operations for the device's stream.

    Nothing in them makes the host wait. A learning rate that is a tensor on a device is read once a step, before them,
    as SparseAdam reads it, and for that the host waits.
    """

    summed: dict[int, Work] = {}
    hypers: dict[int, tuple[Hyperparameters, float]] = {}  # with the step size, which reads the learning rate

    def update(device: Device, groups: Sequence[Group]) -> Callable[[], None]:
        for table in {part.table for group in groups for part in group.parts} - summed.keys():
            summed[table] = replace(work[table], gradient=work[table].gradient.dense())
            hyper = work[table].hyper()
            hypers[table] = hyper, hyper.step_size
        batches = [(group.numbers, *together) for group in groups for together in _together(group, summed, hypers)]

        def run() -> None:
            for numbers, hyper, step_size, parts in batches:
                _update(device, numbers, hyper, step_size, [(part, summed[part.table]) for part in parts])

        return run

    return update


def _together(
    group: Group, work: Mapping[int, Work], hypers: Mapping[int, tuple[Hyperparameters, float]]
) -> list[tuple[Hyperparameters, float, list[Part]]]:
    """The group's tables by what must be equal to share launches."""
    found: dict[tuple[object, ...], tuple[Hyperparameters, float, list[Part]]] = {}
    for part in group.parts:
        hyper, step_size = hypers[part.table]
        values = work[part.table].gradient.values
        key = (values.dtype, values.shape[1], hyper.beta1, hyper.beta2, hyper.eps, step_size)
        found.setdefault(key, (hyper, step_size, []))[2].append(part)
    return list(found.values())


def _update(
    device: Device, numbers: Tensor, hyper: Hyperparameters, step_size: float, parts: Sequence[tuple[Part, Work]]
) -> None:
    chosen = [_chosen(device, part.positions, work.gradient) for part, work in parts]
    values = torch.cat([each.values for each in chosen]) if len(chosen) > 1 else chosen[0].values
    if values.numel() == 0:
        return
    moments = numbers[:, : 2 * values.shape[1]]
    at = np.concatenate([part.at for part, _ in parts])
    if at[-1] - at[0] + 1 == len(at):  # ascending, so all of them from the first to the last
        moments = moments[int(at[0]) : int(at[-1]) + 1]
        places = None
        old = moments
    else:
        places = device.upload(at)
        old = moments.index_select(0, places)
    new, change = reference_step(old, values, hyper.beta1, hyper.beta2, hyper.eps, step_size)
    if places is None:
        moments.copy_(new)
    else:
        moments.index_copy_(0, places, new)
    first = 0
    for (_, work), some in zip(parts, chosen, strict=True):
        add_to_rows(work.param, some.rows, change[first : first + len(some.rows)])
        first += len(some.rows)


def _chosen(device: Device, positions: NDArray[np.int64], gradient: SparseGradient) -> SparseGradient:
    """The gradient at some positions of its rows."""
    if len(positions) == len(gradient.rows):
        return gradient
    at = device.upload(positions)
    return SparseGradient(gradient.rows.index_select(0, at), gradient.values.index_select(0, at))
