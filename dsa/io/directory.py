"""The state directory: its files' places, what in it is ours, and who owns it.

    LOCK                    held with flock by the owner; its text names him
    manifest.json           replaced through manifest.json.tmp
    tables/<file>           one log per table
    index/<file>            location indexes, one per table and generation that changed it

The lock belongs to the open file description, which forked children share: each child closes its copy at once and
never unlocks, so that the lock goes when the owner unlocks or dies, whoever lives on. (A library that forks without
Python's knowledge passes a copy on; then the lock lasts until that child ends, or the owner unlocks.)
"""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from dsa.errors import ConfigError, DeviceError, FormatError, StateLockedError
from dsa.io.manifest import INDEX_FILE, SIGNATURE, TABLE_FILE

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_OWNER = re.compile(rb"disk-sparse-adam pid ([0-9]+) host ([^\n]*?) *\n")
_OWNER_BYTES = 256  # written in place, so that it works on a full disk once the file is there
_LOCKED_BYTE = 1 << 30  # Windows refuses to read what is locked: so a byte beyond the text
_OURS = {"LOCK", "manifest.json", "manifest.json.tmp", "tables", "index", "lost+found"}


@dataclass
class _Lock:
    fd: int
    place: tuple[int, int]


# The locks that this process holds. The guard is held over opening and noting a lock, and over a fork: no child can
# inherit a descriptor that is not noted.
_guard = threading.RLock()
_held: dict[tuple[int, int], _Lock] = {}


def _close_in_child() -> None:
    for lock in _held.values():
        os.close(lock.fd)
        lock.fd = -1
    _held.clear()
    _guard.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_in_child)


class Directory:
    """A state directory, by its resolved path; nothing is touched before `lock`.

    Raises:
        ConfigError: the path cannot name a directory, or a file is there.
        DeviceError: the path cannot be resolved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise ConfigError(f"state_dir must be the path of a directory, got {path!r}")
        try:
            self.path = Path(path).resolve()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"state_dir must be the path of a directory, got {path!r}: {error}") from None
        except (OSError, RuntimeError) as error:
            raise DeviceError(getattr(error, "errno", 0) or errno.ELOOP, "resolving the state_dir", path) from error
        self.lock_path = self.path / "LOCK"
        self.manifest_path = self.path / "manifest.json"
        self.new_manifest_path = self.path / "manifest.json.tmp"
        self.tables_path = self.path / "tables"
        self.index_path = self.path / "index"
        self._lock: _Lock | None = None
        self._refuse_file()

    def file(self, relative: str) -> Path:
        """The place of a file that the manifest names."""
        return self.path / relative

    @property
    def locked(self) -> bool:
        """Whether this object, in this process, owns the directory."""
        return self._lock is not None and self._lock.fd >= 0

    def lock(self) -> None:
        """Become the directory's owner, without waiting; the directory and its parents are made where missing.

        Raises:
            StateLockedError: it has an owner, in this process or another one.
            FormatError: it holds somebody else's files; nothing was changed.
            ConfigError: a file is in the way.
            DeviceError: it cannot be made, read or written.
        """
        if self.locked:
            raise StateLockedError(f"{self.path} is already locked by this object")
        self._refuse_file()
        self._refuse_foreign()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"state_dir {self.path}: a file is in the way; name a directory") from None
        except OSError as error:
            raise DeviceError(error.errno or 0, "making the state directory", self.path) from error
        with _guard:
            while (lock := self._acquire()) is None:
                pass
            _held[lock.place] = lock
            self._lock = lock

    def unlock(self) -> None:
        """Give the directory up; nothing happens where it is not locked, as in a forked child."""
        with _guard:
            lock, self._lock = self._lock, None
            if lock is None or lock.fd < 0:
                return
            _held.pop(lock.place, None)
            try:
                _release(lock.fd)
            finally:
                os.close(lock.fd)
                lock.fd = -1

    def _acquire(self) -> _Lock | None:
        """The lock, or None where the file was replaced meanwhile."""
        # Looked for before the file is opened: on network file systems closing any descriptor gives the lock up.
        try:
            status = os.stat(self.lock_path)
            if (status.st_dev, status.st_ino) in _held:
                raise StateLockedError(
                    f"{self.path} is in use by another optimizer of this process; close() the earlier one"
                )
        except FileNotFoundError:
            pass
        except OSError as error:
            raise DeviceError(error.errno or 0, "looking at the lock", self.lock_path) from error
        fd = -1
        try:
            fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            if not _try_lock(fd):
                raise StateLockedError(self._owner_text(fd))
            status = os.fstat(fd)
            try:
                there = os.stat(self.lock_path)
            except FileNotFoundError:
                there = None
            if there is None or (there.st_dev, there.st_ino) != (status.st_dev, status.st_ino):
                os.close(fd)
                fd = -1
                self.path.mkdir(parents=True, exist_ok=True)
                return None
            text = f"disk-sparse-adam pid {os.getpid()} host {socket.gethostname()[:200]}".encode()
            os.lseek(fd, 0, os.SEEK_SET)
            os.write(fd, text[: _OWNER_BYTES - 1].ljust(_OWNER_BYTES - 1) + b"\n")
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, OSError):
                raise DeviceError(error.errno or 0, "locking the state directory", self.lock_path) from error
            raise
        return _Lock(fd, (status.st_dev, status.st_ino))

    def _owner_text(self, fd: int) -> str:
        os.lseek(fd, 0, os.SEEK_SET)
        owner = _OWNER.match(os.read(fd, _OWNER_BYTES))
        if owner is None:
            return f"{self.path} is in use by another process; close() it there or end that process"
        pid, host = int(owner.group(1)), owner.group(2).decode(errors="replace")
        where = "" if host == socket.gethostname() else f" on host {host}"
        return f"{self.path} is in use by process {pid}{where}; close() it there or end that process"

    def _refuse_file(self) -> None:
        try:
            nearest = next(place for place in (self.path, *self.path.parents) if place.exists())
            in_the_way = not nearest.is_dir()
        except OSError as error:
            raise DeviceError(error.errno or 0, "looking at the state_dir", self.path) from error
        if in_the_way:
            raise ConfigError(f"state_dir {self.path}: {nearest} is a file; name a directory")

    def _refuse_foreign(self) -> None:
        """Raise unless the directory is missing, holds only names of ours, or is marked as ours."""
        names = set(_names(self.path))
        foreign = sorted(names - _OURS)
        if "LOCK" in names and _OWNER.match(_beginning(self.lock_path, _OWNER_BYTES)):
            return
        if "manifest.json" in names:
            if _beginning(self.manifest_path, len(SIGNATURE)) == SIGNATURE:
                return
            foreign = ["manifest.json", *foreign]
        if foreign:
            raise FormatError(
                f"{self.path} is not a state directory of this program: it holds {foreign[0]!r}. "
                "Nothing was changed; name an empty or a new directory as state_dir"
            )

    def make_subdirectories(self) -> None:
        """Make tables/ and index/ where missing."""
        for path in (self.tables_path, self.index_path):
            try:
                path.mkdir(exist_ok=True)
            except OSError as error:
                raise DeviceError(error.errno or 0, "making a directory", path) from error

    def own_files(self) -> list[Path]:
        """The program's own files that are there, the lock and the manifest left out."""
        found = [self.path / name for name in _names(self.path) if name == "manifest.json.tmp"]
        for folder, pattern in (("tables", TABLE_FILE), ("index", INDEX_FILE)):
            names = (f"{folder}/{name}" for name in _names(self.path / folder))
            found += [self.path / name for name in names if pattern.fullmatch(name)]
        return found

    def index_files(self) -> set[str]:
        """The index files that are there, as the manifest names them."""
        names = (f"index/{name}" for name in _names(self.index_path))
        return {name for name in names if INDEX_FILE.fullmatch(name)}

    def ancestors(self) -> list[Path]:
        """The directories above that may hold a name that is not durable yet, nearest first.

        Those are all that this process may write, up to the mount point: an earlier creation that was cut short may
        have made any of them.
        """
        found = []
        here = self.path
        try:
            while here.parent != here and os.stat(here.parent).st_dev == os.stat(here).st_dev:
                here = here.parent
                if os.access(here, os.W_OK):
                    found.append(here)
        except OSError as error:
            raise DeviceError(error.errno or 0, "looking at a directory", here) from error
        return found


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DeviceError(error.errno or 0, "listing a directory", path) from error


def _beginning(path: Path, length: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(length)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise DeviceError(error.errno or 0, "reading", path) from error


if sys.platform == "win32":

    def _try_lock(fd: int) -> bool:
        os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EDEADLK):
                return False
            raise
        return True

    def _release(fd: int) -> None:
        os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)

else:

    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _release(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)
