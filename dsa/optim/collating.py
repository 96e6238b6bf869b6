"""`collate_with_rows`: a DataLoader's workers find, sort and deduplicate a batch's rows, not the training thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dsa.errors import ConfigError
from dsa.optim.sorting import Sorted, sort


@dataclass
class BatchWithRows:
    """A batch and its look-ups, sorted, by parameter name."""

    batch: Any
    rows: dict[str, Sorted]

    def pin_memory(self) -> BatchWithRows:
        """What DataLoader(pin_memory=True) calls: pins the batch; rows stay where they are."""
        pinned = torch.utils.data._utils.pin_memory.pin_memory(self.batch)
        return BatchWithRows(pinned, self.rows)


class _Collate:
    """A collate function that also says which rows its batch looks up; can be sent to worker processes."""

    def __init__(self, collate: Callable[[list[Any]], Any], rows: Callable[[Any], Mapping[str, Any]]) -> None:
        self._collate = collate
        self._rows = rows

    def __call__(self, samples: list[Any]) -> BatchWithRows:
        batch = self._collate(samples)
        found = {}
        for name, ids in self._rows(batch).items():
            if not isinstance(name, str):
                raise ConfigError(
                    f"in a worker a parameter is known by its name only, such as 'node_emb.weight', not by a "
                    f"{type(name).__name__}"
                )
            array = ids.cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
            if array.size and array.dtype.kind not in "iu":
                raise ConfigError(f"rows of {name!r} must be integers, got {array.dtype}")
            found[name] = sort(torch.from_numpy(array.astype(np.int64).reshape(-1)), recognizable=True)
        return BatchWithRows(batch, found)


def gives_rows(loader: object) -> bool:
    """Whether the loader's batches come with their rows."""
    return isinstance(getattr(loader, "collate_fn", None), _Collate)


def collate_with_rows(
    collate: Callable[[list[Any]], Any], rows: Callable[[Any], Mapping[str, Any]]
) -> Callable[[list[Any]], BatchWithRows]:
    """Wrap a collate function so that `opt.lookahead(loader)` needs no `rows`, and no sorting in the training thread.

    The loop gets the batches as `collate` made them.

    Args:
        collate: the loader's collate function, such as `torch.utils.data.default_collate`.
        rows: `rows(batch)` -> {parameter name: integer rows}.

    Raises:
        ConfigError: (in the worker) a key that is no name, or rows that are no integers.
    """
    return _Collate(collate, rows)
