"""The files that bench.device measures on, and the device's own count of what was read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.device_samples import Sample
from dsa.io.memory import allocate

MIB = 1 << 20
SECTOR_BYTES = 512
TOLERANCE = 0.02
TRIES = 8
PAUSE_S = 0.1
_CHUNK_BYTES = 8 * MIB


class ReadsDiffer(Exception):
    """The device counted other reads than were asked for."""


def write_file(path: Path, nbytes: int, seed: int = 0) -> None:
    """Write the file in full, so that no part of it is a hole, sync it, and take it out of the page cache."""
    noise = np.random.default_rng(seed).integers(0, 256, _CHUNK_BYTES, np.uint8)
    with path.open("wb", buffering=0) as file:
        at = 0
        while at < nbytes:
            noise[:8] = np.frombuffer(at.to_bytes(8, "little"), np.uint8)  # no two chunks are the same
            at += file.write(noise[: nbytes - at].data)
        os.fsync(file.fileno())
    drop_cache(path)


def drop_cache(path: Path) -> None:
    """Take the file's clean pages out of the page cache, where the system can."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Bytes at a page's beginning, touched."""
    buffer: NDArray[np.uint8] = allocate(nbytes, np.uint8)
    buffer[:] = 1
    return buffer


def draw(random: np.random.Generator, n_rows: int, count: int) -> NDArray[np.int64]:
    """`count` different rows (fewer than half of all), drawn uniformly, sorted."""
    rows = np.unique(random.integers(0, n_rows, count + count // 8 + 16))
    while len(rows) < count:
        rows = np.unique(np.concatenate([rows, random.integers(0, n_rows, count)]))
    chosen = random.choice(len(rows), count, replace=False)
    return np.sort(rows[chosen]).astype(np.int64)


def find_counter(path: Path, diskstats: Path = Path("/proc/diskstats")) -> str | None:
    """The name under which /proc/diskstats counts the device that holds the path; None: it does not."""
    if not diskstats.is_file():
        return None
    device = os.stat(path).st_dev
    for line in diskstats.read_text().splitlines():
        fields = line.split()
        if (int(fields[0]), int(fields[1])) == (os.major(device), os.minor(device)):
            return fields[2]
    return None


def read_sectors(name: str, diskstats: Path = Path("/proc/diskstats")) -> int:
    """Sectors (512 bytes) that the device has read so far.

    Raises:
        KeyError: there is no such device.
    """
    for line in diskstats.read_text().splitlines():
        fields = line.split()
        if fields[2] == name:
            return int(fields[5])
    raise KeyError(f"{diskstats} has no device {name!r}")


@dataclass
class ReadCheck:
    """Compares each direct measurement with what the device says it read.

    Args:
        sectors: the device's count so far; None: it is not known, and nothing is checked.
        worst: the largest difference accepted so far, as a share; `checked` measurements; `repeated`: those that were
            made again because the device had read something else.
    """

    sectors: Callable[[], int] | None
    worst: float = 0.0
    checked: int = 0
    repeated: int = 0

    def measure(self, what: str, take: Callable[[], Sample], asked: Callable[[], int] | None = None) -> Sample:
        """A sample whose reads the device confirms within 2 %; made again a few times where something else read too.

        Args:
            asked: bytes asked of the device so far; None: those of the sample are all.

        Raises:
            ReadsDiffer: it never did.
        """
        if self.sectors is None:
            return take()
        expected = counted = 0
        for number in range(TRIES):
            before, earlier = self.sectors(), asked() if asked else 0
            sample = take()
            counted = (self.sectors() - before) * SECTOR_BYTES
            expected = asked() - earlier if asked else sample.nbytes
            if abs(counted - expected) <= TOLERANCE * expected:
                self.checked += 1
                self.worst = max(self.worst, abs(counted - expected) / max(expected, 1))
                return sample
            self.repeated += 1
            time.sleep(PAUSE_S * 2**number)  # whatever else reads may come to its end
        raise ReadsDiffer(
            f"{what}: {expected:,} bytes were asked for, the device read {counted:,} ({TRIES} times in a row they were "
            f"more than {TOLERANCE:.0%} apart): fewer: a cache answered; more: something else uses the disk"
        )
