"""The manifest on disk: read, replaced, and removed with all that it stands for; in the order that loses nothing.

Whatever a manifest refers to must be durable before it is replaced by that one, and stay as it is until the replacing
has returned (see DESIGN.md beside this). Only a directory's owner changes it.
"""

from __future__ import annotations

import errno
import os

import numpy as np

from dsa.errors import DeviceError, UsageError
from dsa.io import memory
from dsa.io.backends.base import Backend, Bytes, Extents
from dsa.io.directory import Directory
from dsa.io.manifest import Manifest, decode, encode


async def read_manifest(backend: Backend, directory: Directory) -> Manifest | None:
    """The directory's manifest, None where there is none; needs no lock.

    Raises:
        FormatError, CorruptError: see `manifest.decode`.
        DeviceError: it cannot be read.
    """
    path = directory.manifest_path
    try:
        file = backend.open(path, writable=False)
    except DeviceError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    try:
        # Ours are whole blocks; what is not ours is read as far as an aligned request can.
        size = os.fstat(file.fd).st_size // file.alignment * file.alignment
        data = memory.allocate(size, np.uint8)
        if size:
            extent = Extents(*(np.array([value], np.int64) for value in (0, size, 0)))
            await backend.read(file, extent, data)
    finally:
        backend.close(file)
    return decode(data.tobytes(), path)


async def replace_manifest(backend: Backend, directory: Directory, manifest: Manifest) -> None:
    """Put the manifest in the place of the one that may be there; durable when this returns.

    The caller owns the directory, and has synced what the manifest refers to.

    Raises:
        DeviceError: it could not be made durable; either of the two may be there.
    """
    data: Bytes = np.frombuffer(encode(manifest), np.uint8)
    await backend.write_whole(directory.new_manifest_path, [data])
    await backend.replace(directory.new_manifest_path, directory.manifest_path)
    await backend.sync_directory(directory.path)


async def discard(backend: Backend, directory: Directory) -> None:
    """Remove the program's own files, the manifest first and durably; a damaged manifest is no obstacle.

    Raises:
        UsageError: the directory is not locked.
        DeviceError: something cannot be removed; the directory is then as it was, or an unfinished creation.
    """
    need_lock(directory, "discard")
    await backend.remove(directory.manifest_path)
    await backend.sync_directory(directory.path)
    await remove_own_files(backend, directory)


async def remove_own_files(backend: Backend, directory: Directory) -> None:
    """Remove what an unfinished creation has left; there is no manifest, durably.

    Raises:
        DeviceError: something cannot be removed.
    """
    for path in directory.own_files():
        await backend.remove(path)


def need_lock(directory: Directory, what: str) -> None:
    """Raise unless this process owns the directory.

    Args:
        what: the call that needs it, for the message.

    Raises:
        UsageError: the directory is not locked.
    """
    if not directory.locked:
        raise UsageError(f"{what}: {directory.path} is not locked by this process; lock() it first")
