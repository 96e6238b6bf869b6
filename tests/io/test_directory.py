"""The state directory: who owns it, through forks and deaths, and what is refused without a change."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsa.errors import ConfigError, DeviceError, FormatError, StateLockedError
from dsa.io import directory as module
from dsa.io.directory import Directory
from dsa.io.manifest import SIGNATURE

WAIT_S = 60
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # pytest's timeout is a thread
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def tree(path: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


@pytest.fixture
def locked(tmp_path):
    directory = Directory(tmp_path / "run" / "deep" / "adam")
    directory.lock()
    yield directory
    directory.unlock()


def test_parents_are_made_and_the_path_is_resolved_at_construction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = Directory("a/b/c")
    assert not (tmp_path / "a").exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    directory.lock()
    assert directory.path == tmp_path / "a" / "b" / "c"
    assert directory.locked
    assert f"pid {os.getpid()} ".encode() in directory.lock_path.read_bytes()
    directory.unlock()
    assert not directory.locked
    directory.unlock()


def test_a_second_owner_in_this_process_is_told_to_close_the_first(locked):
    for second in (Directory(locked.path), locked):
        with pytest.raises(StateLockedError, match=r"close\(\) the earlier one|already locked"):
            second.lock()
    locked.unlock()
    second = Directory(locked.path)
    second.lock()
    second.unlock()


def test_a_symlink_is_no_way_around_the_lock(locked, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(locked.path)
    with pytest.raises(StateLockedError, match="earlier one"):
        Directory(link).lock()


CHILD = """
import sys
from dsa.errors import StateLockedError
from dsa.io.directory import Directory
directory = Directory(sys.argv[1])
try:
    directory.lock()
except StateLockedError as error:
    print(error)
else:
    print("locked", flush=True)
    sys.stdin.read()
"""


def child(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_another_process_is_given_the_owners_pid(locked):
    with child(locked.path) as process:
        answer, _ = process.communicate(timeout=WAIT_S)
    assert f"in use by process {os.getpid()};" in answer


def test_the_owner_of_another_host_is_named_with_it(locked, monkeypatch):
    with child(locked.path) as process:
        process.communicate(timeout=WAIT_S)
    held = dict(module._held)
    monkeypatch.setattr(module, "_held", {})  # as another process would see it
    monkeypatch.setattr(module.socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(StateLockedError, match=rf"process {os.getpid()} on host "):
        Directory(locked.path).lock()
    assert held


def test_the_lock_dies_with_a_killed_process(tmp_path):
    with child(tmp_path / "adam") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        directory = Directory(tmp_path / "adam")
        with pytest.raises(StateLockedError, match=f"process {process.pid};"):
            directory.lock()
        process.kill()
        process.wait(timeout=WAIT_S)
        directory.lock()
        directory.unlock()


ORPHAN = """
import os, sys
from dsa.io.directory import Directory
directory = Directory(sys.argv[1])
directory.lock()
if os.fork() == 0:
    print(os.getpid(), directory.locked, flush=True)
    sys.stdin.read()  # lives on
    os._exit(0)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


@forks
def test_the_lock_dies_with_its_owner_while_forked_children_live_on(tmp_path):
    command = [sys.executable, "-c", ORPHAN, str(tmp_path / "adam")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        pid, locked = process.stdout.readline().split()
        assert locked == "False"
        directory = Directory(tmp_path / "adam")
        with pytest.raises(StateLockedError):
            directory.lock()
        process.stdin.write("die\n")
        assert process.wait(timeout=WAIT_S) == -signal.SIGKILL
        os.kill(int(pid), 0)  # the orphan is there
        directory.lock()
        directory.unlock()


@forks
def test_a_forked_child_neither_owns_nor_unlocks(locked):
    descriptor = locked._lock.fd
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.fstat(descriptor)
        except OSError:
            try:
                locked.unlock()  # its number may be another file's by now
                Directory(locked.path).lock()
            except StateLockedError as error:
                status = 0 if f"process {os.getppid()};" in str(error) and not locked.locked else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert locked.locked
    with child(locked.path) as process:
        answer, _ = process.communicate(timeout=WAIT_S)
    assert "in use by process" in answer


def _try(path: str, answers) -> None:
    try:
        Directory(path).lock()
        answers.put("locked")
    except StateLockedError as error:
        answers.put(str(error))


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_workers_of_every_start_method_meet_the_lock_and_leave_it(locked, method):
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    worker = context.Process(target=_try, args=(str(locked.path), answers))
    worker.start()
    assert f"process {os.getpid()};" in answers.get(timeout=WAIT_S)
    worker.join(WAIT_S)
    assert worker.exitcode == 0
    assert locked.locked
    if method != "fork":  # the others share nothing with this process; each costs a start of the interpreter
        return
    locked.unlock()
    worker = context.Process(target=_try, args=(str(locked.path), answers))
    worker.start()
    assert answers.get(timeout=WAIT_S) == "locked"
    worker.join(WAIT_S)
    locked.lock()  # the worker's ended with it


def test_a_directory_replaced_while_it_is_locked_is_locked_anew(tmp_path, monkeypatch):
    """The file that was locked is not the one that others would find: the lock is taken on theirs."""
    directory = Directory(tmp_path / "adam")
    real, calls = module._try_lock, []

    def replaced(fd: int) -> bool:
        calls.append(fd)
        if len(calls) == 1:
            directory.lock_path.unlink()
            directory.path.rmdir()
        return real(fd)

    monkeypatch.setattr(module, "_try_lock", replaced)
    directory.lock()
    assert len(calls) == 2
    assert os.fstat(directory._lock.fd).st_ino == directory.lock_path.stat().st_ino
    directory.unlock()


def test_a_foreign_directory_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    (tmp_path / "figures").mkdir()
    before = tree(tmp_path)
    with pytest.raises(FormatError, match=r"'figures'.*name an empty"):
        Directory(tmp_path).lock()
    assert tree(tmp_path) == before


@pytest.mark.parametrize("files", [{"LOCK": b"", "CURRENT": b"x"}, {"manifest.json": b'{"name": "my web app"}'}])
def test_names_like_ours_do_not_make_a_directory_ours(tmp_path, files):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    before = tree(tmp_path)
    with pytest.raises(FormatError, match=r"Nothing was changed"):
        Directory(tmp_path).lock()
    assert tree(tmp_path) == before


def test_what_is_ours_is_taken(tmp_path):
    unfinished = tmp_path / "unfinished"
    (unfinished / "tables").mkdir(parents=True)
    (unfinished / "manifest.json.tmp").write_bytes(b"half")
    fresh = tmp_path / "fresh_file_system"
    (fresh / "lost+found").mkdir(parents=True)
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "manifest.json").write_bytes(SIGNATURE)
    (copied / "notes.txt").write_text("the user's")
    owned = tmp_path / "owned"
    owned.mkdir()
    Directory(owned).lock()
    module._held.popitem()[1]  # as if its process had ended: the text of the lock stays
    (owned / "notes.txt").write_text("the user's")
    os.remove(owned / "LOCK")
    (owned / "LOCK").write_bytes(b"disk-sparse-adam pid 1 host old \n")
    for path in (unfinished, fresh, copied, owned):
        directory = Directory(path)
        directory.lock()
        directory.unlock()


def test_a_file_in_the_way_is_a_wrong_argument(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        Directory(tmp_path / "file")
    with pytest.raises(ConfigError, match="file is a file"):
        Directory(tmp_path / "file" / "below").lock()
    for wrong in ("", b"", None, 3, "a\0b"):
        with pytest.raises(ConfigError, match="state_dir"):
            Directory(wrong)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that refuses directories")
def test_a_place_that_cannot_be_written_is_a_device_error():
    with pytest.raises(DeviceError) as caught:
        Directory("/proc/adam/state").lock()
    assert "/proc/adam" in str(caught.value.filename)
    assert caught.value.errno


@pytest.mark.parametrize("call", ["open", "write", "listdir"])
def test_errors_of_the_system_carry_path_and_errno(tmp_path, monkeypatch, call):
    (tmp_path / "adam").mkdir()
    directory = Directory(tmp_path / "adam")

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(module.os, call, refuse)
        with pytest.raises(DeviceError) as caught:
            directory.lock()
    assert caught.value.errno == errno.EROFS
    assert str(tmp_path / "adam") in str(caught.value.filename)
    assert not directory.locked
    directory.lock()  # nothing was left behind
    directory.unlock()


def test_only_files_with_our_names_are_own_files(locked):
    locked.make_subdirectories()
    ours = ["manifest.json.tmp", "tables/000-a.log", "index/000001-000-a.idx"]
    others = ["notes.txt", "tables/readme.log", "index/1.idx", "tables/000-a.log~", "manifest.json"]
    for name in ours + others:
        locked.file(name).write_bytes(b"")
    assert {str(path.relative_to(locked.path)) for path in locked.own_files()} == {str(Path(name)) for name in ours}
    assert locked.index_files() == {"index/000001-000-a.idx"}


def test_ancestors_are_those_on_the_same_file_system(locked, tmp_path):
    found = locked.ancestors()
    assert found[:2] == [locked.path.parent, locked.path.parent.parent]
    assert tmp_path in found
    assert all(os.stat(path).st_dev == os.stat(tmp_path).st_dev for path in found)
