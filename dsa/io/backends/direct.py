"""Does the file system of a directory really move bytes past the page cache, and in what multiples?

The open flag does not tell: some file systems accept O_DIRECT and go through the page cache all the same. So a small
file is written and read, and afterwards the page cache is asked whether it holds the file.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsa.io.backends.base import Bytes, Extents, File
from dsa.io.extents import aligned
from dsa.io.memory import PAGE_BYTES, allocate

_log = logging.getLogger("dsa")
_TRIED_BYTES = (512, 4096)
_TRIAL_BYTES = 16 * PAGE_BYTES
_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
_STATX_BYTES, _DIO_MEM_ALIGN_AT = 256, 152
_O_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class DirectIO:
    """What `probe` found.

    Args:
        works: bytes really bypass the page cache.
        alignment: file offsets, lengths and memory addresses must be multiples of it; 1 where direct I/O does not work.
        reason: how that is known, or why it does not work.
    """

    works: bool
    alignment: int
    reason: str


class DirectFiles:
    """Turns open files to direct I/O where their directory allows it; each directory is probed once."""

    def __init__(self) -> None:
        self._found: dict[Path, DirectIO] = {}

    def turn(self, file: File) -> None:
        """Make a file that was just opened direct and set its alignment, or leave it as it is; never raises OSError.

        The mode is for the descriptor's life: a file must not be moved by both ways.
        """
        directory = file.path.resolve().parent
        found = self._found.get(directory)
        if found is None:
            found = self._found[directory] = probe(directory)
            if not found.works:
                _log.info("files in %s go through the page cache: %s", directory, found.reason)
        if found.works:
            try:
                _set_direct(file.fd)
            except OSError as error:
                _log.info("%s goes through the page cache: %s", file.path, error.strerror)
            else:
                file.alignment = found.alignment


def check_alignment(file: File, extents: Extents, buffer: Bytes) -> None:
    """See to it that extents of a direct file, and their places in memory, are whole units.

    Raises:
        ValueError: one is not; the message names the first.
    """
    if file.alignment == 1:
        return
    address = int(buffer.ctypes.data)
    if aligned(extents, address, file.alignment):
        return
    bad = (extents.offsets | extents.lengths | (extents.at + address)) % file.alignment != 0
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(
            f"{file.path} is open for direct I/O, aligned to {file.alignment} bytes; extent {i} is not: offset "
            f"{extents.offsets[i]}, length {extents.lengths[i]}, at {extents.at[i]} of a buffer at address {address:#x}"
        )


def probe(directory: Path) -> DirectIO:
    """Find out by transfers on a temporary file without a name; never raises an OSError."""
    if sys.platform != "linux" or not _O_DIRECT:
        return DirectIO(False, 1, f"no O_DIRECT on {sys.platform}")
    try:
        trial = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
    except OSError as error:
        return DirectIO(False, 1, f"no temporary file can be made there: {error.strerror}")
    with trial:
        try:
            return _try_file(trial.fileno())
        except OSError as error:
            return DirectIO(False, 1, f"the trial of O_DIRECT failed: {error.strerror or error}")


def _set_direct(fd: int) -> None:
    import fcntl  # not there on Windows

    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _O_DIRECT)


def _try_file(fd: int) -> DirectIO:
    try:
        _set_direct(fd)
    except OSError as error:
        return DirectIO(False, 1, f"the file system refuses O_DIRECT: {error.strerror}")
    told = told_alignment(fd)
    if told == 0:
        return DirectIO(False, 1, "statx says that the file system does no direct I/O")
    if told is not None and (told > PAGE_BYTES or told & (told - 1)):
        return DirectIO(False, 1, f"statx asks for an alignment of {told} bytes")
    refusals = []
    for alignment in _TRIED_BYTES if told is None else (told,):
        try:
            _transfer(fd, alignment)
        except OSError as error:
            refusals.append(f"{alignment} bytes: {error.strerror}")
            continue
        cached = cached_pages(fd, _TRIAL_BYTES)
        if cached:
            return DirectIO(False, 1, f"the page cache holds {cached} pages of a file moved with O_DIRECT")
        how = "transfers of that size work" if told is None else "statx says so, and transfers work"
        return DirectIO(True, alignment, f"aligned to {alignment} bytes: {how}")
    return DirectIO(False, 1, f"direct transfers fail ({'; '.join(refusals)})")


def told_alignment(fd: int) -> int | None:
    """What statx says direct I/O on the file must be aligned to (memory and offsets); 0: impossible; None: unknown."""
    statx: Callable[..., int] | None = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return None
    block = np.zeros(_STATX_BYTES, np.uint8)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.c_void_p(block.ctypes.data)):
        return None
    if not int(block[:4].view(np.uint32)[0]) & _STATX_DIOALIGN:
        return None
    memory, offset = (int(x) for x in block[_DIO_MEM_ALIGN_AT : _DIO_MEM_ALIGN_AT + 8].view(np.uint32))
    return max(memory, offset) if memory and offset else 0


def _transfer(fd: int, alignment: int) -> None:
    """Write the trial file whole, then one unit of it, and read both back.

    Raises:
        OSError: refused, short, or other bytes than those written.
    """
    pattern = (np.arange(_TRIAL_BYTES) * 31 % 251).astype(np.uint8)
    memory: NDArray[np.uint8] = allocate(_TRIAL_BYTES, np.uint8)
    for offset, length in ((0, _TRIAL_BYTES), (alignment, alignment)):
        memory[:length] = pattern[:length]
        moved = os.pwrite(fd, memory[:length].data, offset)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what the write left there; the read is what counts
        memory[:] = 0
        got = os.preadv(fd, [memory[:length].data], offset)
        if moved != length or got != length or (memory[:length] != pattern[:length]).any():
            raise OSError(0, f"of {length}, {moved} were written, {got} read, or they differ")


def cached_pages(fd: int, nbytes: int) -> int:
    """How many of the file's first pages the page cache holds (the file must be ours, and that long).

    Raises:
        OSError: the system does not say.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    view = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    try:
        pages = np.frombuffer(view, np.uint8)
        held = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
        failed = libc.mincore(pages.ctypes.data, nbytes, held.ctypes.data)
        number = ctypes.get_errno()
        del pages
    finally:
        view.close()
    if failed:
        raise OSError(number, os.strerror(number))
    return int((held & 1).sum())
