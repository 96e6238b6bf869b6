"""A new file for other programs: every write is whole, errors name the place, and room is taken before it is mapped.

It is made beside its target and takes that name when it is whole and on the medium: whenever the power goes, there is
the old file, or none, or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from dsa.errors import DeviceError
from dsa.io.backends.posix_files import open_descriptor, reported, sync_descriptor, sync_names

_ZEROS = bytes(1 << 20)
_CANNOT_SYNC = {errno.EACCES, errno.EBADF, errno.EINVAL, errno.EISDIR, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A folder beside the target, in which the body makes a file "whole" and syncs it; then that takes the target's
    name, durably where the file system can sync a directory. What else is in the folder goes with it.

    Raises:
        DeviceError: the folder cannot be made, or the file not renamed; the target is what it was.
    """
    with reported("making a folder for the new file", target.parent):
        made = tempfile.TemporaryDirectory(prefix=".dsa-export-", dir=target.parent)
    with made as folder:
        whole = Path(folder) / "whole"
        yield Path(folder)
        with reported(f"rename to {target}", whole):
            os.replace(whole, target)
    _sync_names(target.parent)


def _sync_names(directory: Path) -> None:
    """The names in a directory are on the medium when this returns, where its file system can do that."""
    if os.name == "nt":  # directories cannot be opened there; NTFS keeps names in its journal
        return
    try:
        with reported("sync of the directory", directory):
            fd = open_descriptor(directory, os.O_RDONLY)
            try:
                sync_names(fd)
            finally:
                os.close(fd)
    except DeviceError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


class WholeFile:
    """A file that did not exist before; also what `torch.save` writes to, as its file object.

    Leaving the context closes it, and raises the first failed write in place of an error that followed from it:
    torch.save ends a file that it could not write with an error about its own bookkeeping.

    Raises:
        DeviceError: the file is there, or cannot be made, written or closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failure: DeviceError | None = None
        self._end = 0
        with reported("making the file", path):
            self._file = FileIO(path, "x+")

    @contextlib.contextmanager
    def _noted(self, what: str, offset: int, nbytes: int) -> Iterator[None]:
        try:
            with reported(what, self.path, offset, nbytes):
                yield
        except DeviceError as error:
            self._failure = self._failure or error
            raise

    def write(self, data: Any) -> int:
        """Append all of a buffer's bytes; how many those are."""
        nbytes = self.put(self._end, data)
        self._end += nbytes
        return nbytes

    def put(self, offset: int, data: Any) -> int:
        """Write all of a buffer's bytes at an offset; how many those are."""
        view = memoryview(data).cast("B")
        nbytes = len(view)
        with self._noted("write", offset, nbytes):
            self._file.seek(offset)
            while len(view):
                view = view[self._file.write(view) :]
        return nbytes

    def flush(self) -> None:
        """Nothing is held back."""

    def lengthen(self, nbytes: int) -> None:
        """Make it so long; what is not written yet is zero, and need not take room."""
        with self._noted("truncate", 0, nbytes):
            self._file.truncate(nbytes)

    def reserve(self, nbytes: int) -> None:
        """Make it so long, all zero, with its room taken, so that it can be mapped: a page that the file system has no
        room for would be SIGBUS, not an exception.
        """
        with self._noted("taking room", 0, nbytes):
            if hasattr(os, "posix_fallocate"):
                try:
                    if nbytes:
                        os.posix_fallocate(self._file.fileno(), 0, nbytes)
                    return
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        raise
            for offset in range(0, nbytes, len(_ZEROS)):
                self.put(offset, memoryview(_ZEROS)[: nbytes - offset])

    def sync(self) -> None:
        """Its bytes are on the medium when this returns."""
        with self._noted("sync", 0, self._end):
            sync_descriptor(self._file.fileno())

    def close(self) -> None:
        """Close it; a second time does nothing."""
        with self._noted("close", 0, self._end):
            self._file.close()

    def __enter__(self) -> WholeFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if isinstance(error, Exception) and self._failure is not None and error is not self._failure:
            raise self._failure
