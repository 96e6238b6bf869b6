"""The exception tree: what a caller did (usage), what the files hold (state), what the world did (device)."""

from __future__ import annotations

import os


class DsaError(Exception):
    """Root of every error that DSA raises on its own account."""


class ConfigError(DsaError, ValueError):
    """An argument has a value that cannot be meant; nothing was touched."""


class UsageError(DsaError, RuntimeError):
    """A call that cannot be carried out in the present situation; the message names the remedy."""


class ClosedError(UsageError):
    """The optimizer was closed by its user."""


class StateExistsError(UsageError):
    """The state directory holds state and the caller has not said what is to become of it."""


class StateLockedError(UsageError):
    """Another optimizer, in this process or another one, owns the state directory."""


class ForkedError(UsageError):
    """A forked child touched an optimizer that belongs to its parent."""


class StateFileError(DsaError):
    """A file of the state directory does not hold what it should."""


class FormatError(StateFileError):
    """A file is not one of ours, or of a format version that this program does not read."""


class CorruptError(StateFileError):
    """Bytes on disk do not match their check; the message gives row, path and offset."""


class MismatchError(StateFileError):
    """The state on disk and what the caller brought do not belong together; both values are given."""


class DeviceError(DsaError, OSError):
    """The device or file system failed.

    Args:
        errno_: the operating system's error number (0 where there is none, such as a read past the end).
        what: what was being done.
        path: the file.
        offset_bytes, length_bytes: the place in the file, where one is known.
    """

    def __init__(
        self,
        errno_: int,
        what: str,
        path: str | os.PathLike[str],
        offset_bytes: int | None = None,
        length_bytes: int | None = None,
    ) -> None:
        place = "" if offset_bytes is None else f" at byte {offset_bytes}"
        size = "" if length_bytes is None else f", {length_bytes} bytes"
        reason = os.strerror(errno_) if errno_ else "no error number"
        text = f"{what} failed: {reason} (errno {errno_}){place}{size}"
        super().__init__(errno_, text, os.fspath(path))
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes

    def __reduce__(self) -> tuple[object, ...]:
        # OSError's own pickling would call the constructor with its two or three arguments only.
        return (_rebuild_device_error, (self.args, self.filename, self.offset_bytes, self.length_bytes))


def _rebuild_device_error(
    args: tuple[int, str], path: str, offset_bytes: int | None, length_bytes: int | None
) -> DeviceError:
    error = DeviceError(args[0], "", path, offset_bytes, length_bytes)
    error.args = args
    error.strerror = args[1]
    return error
