"""`opt.watch(model)`: embedding modules announce what they look up, so that reading overlaps forward and backward."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.hooks import RemovableHandle

from dsa.errors import UsageError
from dsa.optim.row_sets import TableDirectory, sorted_unique

_INTEGERS = (torch.int32, torch.int64)


class HookAnnouncer(Protocol):
    """What takes announcements of rows that the running forward pass looks up."""

    def announce_hook(self, table: int, rows: NDArray[np.int64]) -> None:
        """Add sorted unique rows of one table to the batch that the next step will step; never blocks."""


class WatchHandle:
    """Removes the hooks of one `watch`, by `remove()` (again and again, if need be) or at the end of a `with` block."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> WatchHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def watch(model: nn.Module, announcer: HookAnnouncer, tables: TableDirectory) -> WatchHandle:
    """Every `nn.Embedding` and `nn.EmbeddingBag` in `model` with a managed weight announces the rows that it looks up.

    It does so in training mode, with gradients enabled and a weight that requires one; `padding_idx` is left out, as
    it gets no gradient. Code compiled by `torch.compile` announces nothing: there, use lookahead.

    Args:
        model: searched through and through; a module that stands in it twice gets one hook.
        announcer: receives the rows. Held weakly: a watched model does not keep an optimizer alive.
        tables: the managed parameters.

    Raises:
        UsageError: no such module has a managed weight.
    """
    watched = [
        module
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and tables.of_parameter(module.weight) is not None
    ]
    if not watched:
        raise UsageError(
            f"watch: {type(model).__name__} has no nn.Embedding or nn.EmbeddingBag whose weight this optimizer "
            "manages; announce the rows yourself, by announce or lookahead"
        )
    hook = _LookupHook(weakref.ref(announcer), tables)
    return WatchHandle([module.register_forward_pre_hook(hook, with_kwargs=True) for module in watched])


class _LookupHook:
    """The forward pre-hook; a copied or pickled model gets one that does nothing."""

    def __init__(
        self,
        announcer: weakref.ReferenceType[HookAnnouncer] | None = None,
        tables: TableDirectory | None = None,
    ) -> None:
        self._announcer = announcer
        self._tables = tables

    def __reduce__(self) -> tuple[type[_LookupHook], tuple[()]]:
        return _LookupHook, ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._tables is None or self._announcer is None:
            return
        announcer = self._announcer()
        weight = module.weight
        ids = args[0] if args else kwargs.get("input")
        if announcer is None or not (module.training and torch.is_grad_enabled()):
            return
        table = self._tables.of_parameter(weight)
        # What forward is going to refuse (no ids, ids of a wrong type, out of range) is left for forward to refuse.
        if table is None or not table.parameter.requires_grad:
            return
        if not isinstance(ids, torch.Tensor) or ids.dtype not in _INTEGERS or ids.is_meta or ids.is_nested:
            return
        rows = sorted_unique(ids.detach().reshape(-1).cpu().numpy())
        padding = getattr(module, "padding_idx", None)
        if padding is not None:
            rows = rows[rows != padding]
        if len(rows) and rows[0] >= 0 and rows[-1] < table.n_rows:
            announcer.announce_hook(table.number, rows)
