"""What one table is at the moment of a commit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.errors import MismatchError
from dsa.io.backends.base import File
from dsa.io.manifest import TableEntry


@dataclass
class TableImage:
    """What a table is now; the arrays are the live ones and must not change while a commit runs.

    Args:
        entry: the table; it may have more rows than in the manifest.
        slots: int32 or int64 [n_rows], -1: never written.
        checks: uint32 [n_rows].
        segments: bool [n_segments], those that hold live records.
        step: the parameter's step count.
        live_rows: rows with a slot.
        fingerprint: of some weight rows, or None.
        changed: the index differs from that of the generation that the running state descends from.
        file: the log, open, for its sync.
    """

    entry: TableEntry
    slots: NDArray[Any]
    checks: NDArray[np.uint32]
    segments: NDArray[np.bool_]
    step: int
    live_rows: int
    fingerprint: int | None
    changed: bool
    file: File

    def check(self, known: TableEntry | None) -> None:
        """Raise unless the arrays fit the entry, and the entry the manifest's (None: it has none of this name).

        Raises:
            MismatchError: the table is not the one in the manifest.
            ValueError: an array has another length or type.
        """
        entry = self.entry
        n_rows = entry.n_rows
        if known is not None:
            same = replace(entry, shape=known.shape) == known and entry.shape[1:] == known.shape[1:]
            if not same or n_rows < known.n_rows:
                raise MismatchError(f"table {entry.name!r} is {known} in the manifest, and {entry} now")
        arrays = (self.slots, self.checks)
        if any(array.shape != (n_rows,) or not array.flags.c_contiguous for array in arrays):
            raise ValueError(f"table {entry.name!r}: index arrays must be contiguous with {n_rows} elements")
        if self.slots.dtype not in (np.int32, np.int64) or self.checks.dtype != np.uint32:
            raise ValueError(f"table {entry.name!r}: index of {self.slots.dtype} and {self.checks.dtype}")
