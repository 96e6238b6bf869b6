"""Disks that really run out: small file systems of their own, ballast, limits of the file size, and who met the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dsa.io.writebehind
from dsa.errors import DeviceError
from dsa.io.jobs import CleanJob, WriteJob
from dsa.io.rowlog import RowLog


class Mounts:
    """Mounts small file systems below a folder, and takes them away; the test is skipped where that cannot be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Path] = []

    def __call__(self, kind: str, mib: int) -> Path:
        """The mount point of a new file system, "tmpfs" or "ext4" (on a loop device)."""
        if sys.platform != "linux" or os.geteuid() != 0:
            pytest.skip("mounting a file system needs root on Linux")
        place = self._folder / f"mount{len(self._made)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "dsa-test", str(place)]
        if kind != "tmpfs":
            image = self._folder / f"{place.name}.image"
            with open(image, "wb") as file:
                file.truncate(mib << 20)
            _run([f"mkfs.{kind}", "-q", "-m", "0", str(image)])
            command = ["mount", "-t", kind, "-o", "loop", str(image), str(place)]
        _run(command)
        self._made.append(place)
        return place

    def end(self) -> None:
        for place in self._made:
            subprocess.run(["umount", "-l", str(place)], check=True)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no file system can be made here: {error}")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")


def fill(place: Path) -> Path:
    """Leave no byte free; the file to remove for room."""
    ballast = place / "ballast"
    with open(ballast, "ab", buffering=0) as file:
        size = -1
        while file.tell() > size:  # a file system that allocates late refuses more than it must, until it is synced
            size = file.tell()
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            os.fsync(file.fileno())
    return ballast


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.getsignal(signal.SIGXFSZ)
    assert handler is signal.SIG_IGN, "Python ignores the signal, or it would end the process"
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def is_hole(path: Path, offset: int, length: int) -> bool:
    """Whether the file system keeps nothing of the range, so that writing it takes space."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return True  # no data from there to the end of the file, or beyond it
    finally:
        os.close(fd)


class Cleanings:
    """Sees to it that a cleaning meets a failure, and nothing else: a write begins when all before it has ended, and
    where a cleaning begins with it, that goes first and alone.

    Args:
        wanted: called with a cleaning's job, the log's path and the place of its target in it, before it does anything.
        strike: entered for the first cleaning that is wanted, and left when that has ended.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        wanted: Callable[[CleanJob, Path, int, int], bool],
        strike: Callable[[CleanJob, Path, int], contextlib.AbstractContextManager[object]],
    ) -> None:
        self.struck: CleanJob | None = None
        self.error: DeviceError | None = None
        self.path, self.offset = Path(), -1
        self.filled: set[int] = set()  # segments that something was written to before
        turn = asyncio.Lock()
        write, clean = RowLog.write, RowLog.clean

        async def write_alone(log: RowLog, job: WriteJob) -> None:
            await asyncio.sleep(0)  # the cleaning that begins with it has its task made right after this one
            async with turn:
                await write(log, job)
                self.filled.add(job.segment)

        async def clean_alone(log: RowLog, job: CleanJob) -> None:
            async with turn:
                size, path = job.table.layout.segment_bytes, job.table.file.path
                offset = job.target * size
                if self.struck is not None or not wanted(job, path, offset, size):
                    await clean(log, job)
                    self.filled.add(job.target)
                    return
                self.struck, self.path, self.offset = job, path, offset
                with strike(job, path, offset):
                    try:
                        await clean(log, job)
                    except DeviceError as error:
                        self.error = error
                        raise

        monkeypatch.setattr(dsa.io.writebehind, "WRITES_IN_FLIGHT", 1)
        monkeypatch.setattr(RowLog, "write", write_alone)
        monkeypatch.setattr(RowLog, "clean", clean_alone)

    def check(self, error: BaseException, number: int, offset: int | None = None) -> None:
        """A cleaning met the failure, with this errno at its target, and `error` tells of that one."""
        assert self.error is not None, "no cleaning met it"
        assert isinstance(error, DeviceError)
        assert str(error) == str(self.error)
        assert error.errno == number
        assert error.filename == str(self.path)
        assert error.offset_bytes == (self.offset if offset is None else offset)
