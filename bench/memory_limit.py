"""Run a program with less memory than its files, page cache included: in a memory cgroup of version 1 or 2.

    with MemoryLimit.open(256 << 20) as limit:
        limit.run([sys.executable, "-m", "bench.device_memmap", ...])

The group is made under this process's own one (or the nearest above it that may have groups with memory limits) and
removed at the end. It takes root, or a part of the tree that was given to this user.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC_SELF = Path("/proc/self")
_LIMIT_FILE = {1: "memory.limit_in_bytes", 2: "memory.max"}
_REMOVE_TRIES, _REMOVE_PAUSE_S = 50, 0.1


class CannotLimit(Exception):
    """No memory cgroup can be made here; the message says why."""


class ProgramFailed(RuntimeError):
    """A program under the limit ended with an exit status other than 0 (below 0: the signal that killed it)."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@dataclass(frozen=True)
class Hierarchy:
    """Where memory is accounted.

    Args:
        version: 1 or 2.
        root: where the hierarchy is mounted.
        own: this process's group, `root` or below it.
    """

    version: int
    root: Path
    own: Path

    def ancestors(self) -> Iterator[Path]:
        """The own group and those above it, up to the root."""
        path = self.own
        yield path
        while path != self.root:
            path = path.parent
            yield path


def find_hierarchy(proc_self: Path = _PROC_SELF) -> Hierarchy:
    """The hierarchy that limits memory: version 1's where it is mounted, else version 2's.

    Args:
        proc_self: the process's directory in /proc (tests: one made up).

    Raises:
        CannotLimit: there is none.
    """
    try:
        mounts = (proc_self / "mountinfo").read_text().splitlines()
        groups = (proc_self / "cgroup").read_text().splitlines()
    except OSError as error:
        raise CannotLimit(f"no memory cgroup: {error.filename}: {error.strerror}") from error
    paths = {}  # by controllers; version 2 has none
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    unified = None
    for line in mounts:
        before, _, after = line.partition(" - ")
        inside, mount_point = (_unescaped(field) for field in before.split()[3:5])
        kind, *_, options = after.split()
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in paths:
            return _hierarchy(1, mount_point, inside, paths["memory"])
        if kind == "cgroup2" and "" in paths:
            unified = unified or _hierarchy(2, mount_point, inside, paths[""])
    if unified is None:
        raise CannotLimit("no memory cgroup: neither version's file system is mounted")
    try:
        offered = (unified.root / "cgroup.controllers").read_text().split()
    except OSError as error:
        raise CannotLimit(f"no memory cgroup: {error.filename}: {error.strerror}") from error
    if "memory" not in offered:
        raise CannotLimit(f"no memory cgroup: {unified.root} has no memory controller")
    return unified


def _unescaped(field: str) -> str:
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _hierarchy(version: int, mount_point: str, inside: str, path: str) -> Hierarchy:
    """The path of /proc/self/cgroup counts from the hierarchy's root; `inside` of it is what is mounted."""
    root = Path(mount_point)
    with contextlib.suppress(ValueError):
        own = root / Path(path).relative_to(inside)
        if ".." not in own.parts and own.is_dir():
            return Hierarchy(version, root, own)
    return Hierarchy(version, root, root)


class MemoryLimit:
    """A memory cgroup; `run` runs programs in it.

    Args:
        hierarchy: where it is.
        group: its directory, made by `open`.
    """

    def __init__(self, hierarchy: Hierarchy, group: Path) -> None:
        self.version = hierarchy.version
        self.group = group

    @classmethod
    @contextlib.contextmanager
    def open(cls, limit_bytes: int, proc_self: Path = _PROC_SELF) -> Iterator[MemoryLimit]:
        """Make a group whose processes, their page cache included, get so much memory; removed at the end.

        Raises:
            CannotLimit: that is not possible here, and why.
        """
        hierarchy = find_hierarchy(proc_self)
        group = _make_group(hierarchy)
        limit = cls(hierarchy, group)
        try:
            try:
                (group / _LIMIT_FILE[hierarchy.version]).write_text(f"{limit_bytes}\n")
                if (group / "memory.swap.max").exists():
                    (group / "memory.swap.max").write_text("0\n")
            except OSError as error:
                raise CannotLimit(f"{error.filename} cannot be set: {error.strerror}") from error
            yield limit
        finally:
            limit.remove()

    def run(self, command: Sequence[str], timeout_s: float, cwd: Path | None = None) -> str:
        """Run a program in the group from its first page on; what it printed.

        Raises:
            ProgramFailed: it failed; with what it said.
            RuntimeError: it did not end in time (then it was killed).
        """
        # The shell enters the group and becomes the program, so that all the program's memory is counted there.
        entering = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.group / "cgroup.procs"), *command]
        try:
            ended = subprocess.run(entering, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, check=False)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{command[0]} did not end within {timeout_s:g} s under the memory limit") from error
        if ended.returncode:
            said = ended.stderr.strip()[-500:] or "nothing"
            raise ProgramFailed(
                f"{command[0]} failed under the memory limit: exit {ended.returncode}, it said: {said}",
                ended.returncode,
            )
        return ended.stdout

    def remove(self) -> None:
        """Remove the group; its page cache goes with it or to the group above."""
        with contextlib.suppress(OSError):
            if self.version == 1:
                (self.group / "memory.force_empty").write_text("0\n")
        for _ in range(_REMOVE_TRIES):
            try:
                self.group.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(_REMOVE_PAUSE_S)  # a process that has just ended is still counted for a moment
            else:
                return


def _make_group(hierarchy: Hierarchy) -> Path:
    name = f"dsa-bench-{os.getpid()}"
    reasons = []
    for above in hierarchy.ancestors():
        try:
            if hierarchy.version == 2:
                _enable_memory(above)
            group = above / name
            group.mkdir()
        except OSError as error:
            reasons.append(f"{error.filename or above}: {error.strerror}")
            continue
        return group
    raise CannotLimit(f"no memory cgroup can be made (it takes root): {'; '.join(reasons)}")


def _enable_memory(above: Path) -> None:
    """See to it that groups below may limit memory; refused (EBUSY) where processes are in the group itself."""
    control = above / "cgroup.subtree_control"
    if "memory" not in control.read_text().split():
        control.write_text("+memory\n")
