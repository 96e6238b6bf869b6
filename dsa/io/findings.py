"""What a verification found: what was checked, and every damage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io.reading import Progress

NO_ROWS: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong; for damaged records of one segment: all of those that the same generations refer to.

    Args:
        kind: "manifest", "index", "log", "segment" or "record".
        text: what is wrong, with path and offset.
        generations: the generations that it harms.
        rows: int64 [n], the rows of damaged records.
        offsets_bytes: int64 [n], their places in the file; without rows one place, or none where only `text` has it.
    """

    kind: str
    path: str
    text: str
    table: str | None = None
    generations: tuple[int, ...] = ()
    rows: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    offsets_bytes: NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)

    def each(self) -> Iterator[dict[str, Any]]:
        """One plain object for each damaged record, or one for the whole where it is not about records."""
        common = {"kind": self.kind, "path": self.path, "table": self.table, "generations": list(self.generations)}
        if not len(self.rows):
            offset = int(self.offsets_bytes[0]) if len(self.offsets_bytes) else None
            yield {**common, "row": None, "offset_bytes": offset, "text": self.text}
            return
        for row, offset in zip(self.rows.tolist(), self.offsets_bytes.tolist(), strict=True):
            text = f"{self.path}: the record of row {row} of table {self.table!r} at byte {offset} {self.text}"
            yield {**common, "row": row, "offset_bytes": offset, "text": text}


@dataclass
class Verification:
    """What was checked, and what is wrong.

    Args:
        not_locked: why the directory was not locked meanwhile; None where it was.
        generations: the numbers of those that were checked.
        record_checks: records compared with their checks, each once for every index that refers to it.
        bytes_read: of logs.
        notes: what is not damage but worth knowing, and what could not be checked.
    """

    path: str
    uuid: str | None = None
    not_locked: str | None = None
    generations: tuple[int, ...] = ()
    record_checks: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage


class Work:
    """Counts bytes towards a total that is known roughly."""

    def __init__(self, report: Progress | None, total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._report is not None:
            self._report(min(self._done, self._total), self._total)

    def end(self) -> None:
        if self._report is not None:
            self._report(self._total, self._total)


def file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
