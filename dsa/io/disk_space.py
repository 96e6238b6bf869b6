"""What is to be said of the place of a state directory before training begins: too little room, or none that lasts."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from dsa.io.manifest import TableEntry

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs"}


def peak_bytes(tables: Iterable[TableEntry], generations: int) -> int:
    """What the tables' files can grow to with every row live: twice the records and an index, for the running state and
    each generation retained (one that `close()` has made, until the next commit, is not reckoned with).
    """
    each = sum(table.n_rows * (2 * table.record_bytes + 8) for table in tables)
    return each * (1 + generations)


def warn_of_place(path: Path, tables: Sequence[TableEntry], keep_generations: int | None, stacklevel: int) -> None:
    """Give one warning where the directory lies in memory, or where its tables can outgrow the free space.

    With `keep_generations` None, when nobody can say how much it will be, one retained generation is reckoned with.
    """
    kind = file_system(path)
    if kind in _IN_MEMORY:
        warnings.warn(
            f"state_dir {path} is on a {kind}: it takes RAM instead of disk, and is lost when the machine restarts; "
            "name a directory on a disk",
            stacklevel=stacklevel,
        )
        return
    try:
        free = shutil.disk_usage(path).free
    except OSError:
        return  # some network file systems do not say
    there = sum(_allocated(path / table.file) for table in tables)
    generations = 1 if keep_generations is None else keep_generations
    wanted = peak_bytes(tables, generations)
    if wanted > there + free:
        warnings.warn(
            f"state_dir {path}: the tables can grow to {wanted} bytes (twice their records, for the running state and "
            f"{generations} retained generations each); {there} are taken already and {free} are free: make room, name "
            "another disk, or lower keep_generations",
            stacklevel=stacklevel,
        )


def _allocated(path: Path) -> int:
    try:
        status = os.stat(path)
    except OSError:
        return 0
    return int(getattr(status, "st_blocks", 0)) * 512 or status.st_size


def file_system(path: Path) -> str:
    """The type of the file system that holds the path, such as "ext4"; "" where the system does not tell."""
    try:
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in _MOUNTS.read_text().splitlines():
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return ""
