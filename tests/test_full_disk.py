"""The disk is really full, or files may not grow: at creation, in a step, in a checkpoint, while cleaning."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from failing_disk import Cleanings, Mounts, file_size_limit, fill, is_hole
from failing_run import Run, check_device_error
from torch import nn

from dsa import DiskSparseAdam
from dsa.errors import ConfigError, DeviceError, DsaError
from dsa.io.jobs import CleanJob

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:a step touches more rows than the cache has frames"),
    pytest.mark.filterwarnings("ignore:.*(tmpfs|free)"),
]
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX's limits")
backends = pytest.mark.parametrize("backend", ["threads", "aiofiles", "uring"])
file_systems = pytest.mark.parametrize("kind", ["tmpfs", "ext4"])


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounts]:
    mounts = Mounts(tmp_path)
    yield mounts
    gc.collect()
    mounts.end()


# No room on the file system.


@file_systems
@pytest.mark.parametrize("when", ["creation", "step", "checkpoint"])
def test_a_full_disk(mount: Mounts, kind: str, when: str) -> None:
    place = mount(kind, {"tmpfs": 1, "ext4": 4}[kind])
    if when == "creation":
        ballast = fill(place)
        with pytest.raises(DeviceError) as caught:
            Run(place / "s")
        check_device_error(caught.value, errno.ENOSPC, str(place))
        ballast.unlink()
        run = Run(place / "s")
        run.steps(3)
        run.twins.check()
        run.opt.close()
        return
    run = Run(place / "s")
    run.steps(10)
    run.checkpoint()
    ballast = fill(place)
    if when == "step":
        with pytest.raises(DeviceError) as caught:
            run.steps(300)
        error: DsaError = caught.value
    else:
        run.step(5)
        with pytest.raises(DeviceError) as caught:
            run.opt.checkpoint()
        error = caught.value
    check_device_error(error, errno.ENOSPC, str(place))
    run.end()
    ballast.unlink()
    run.resume().close()


@file_systems
@pytest.mark.parametrize("target", ["beyond the end", "in a hole"])
def test_a_full_disk_met_by_cleaning(mount: Mounts, monkeypatch: pytest.MonkeyPatch, kind: str, target: str) -> None:
    """The file system is filled when a cleaning is about to write where it keeps nothing yet."""
    place = mount(kind, {"tmpfs": 2, "ext4": 8}[kind])
    run = Run(place / "s", keep_generations=None)
    ballast: list[Path] = []
    given_back = False

    def wanted(job: CleanJob, path: Path, offset: int, length: int) -> bool:
        inside = offset + length <= os.stat(path).st_size
        if target == "beyond the end":
            return not inside
        return given_back and inside and job.target in cleanings.filled and is_hole(path, offset, length)

    def strike(job: CleanJob, path: Path, offset: int) -> contextlib.AbstractContextManager[object]:
        ballast.append(fill(place))
        return contextlib.nullcontext()

    cleanings = Cleanings(monkeypatch, wanted, strike)
    if target == "in a hole":
        grow_and_give_back(run)
        given_back = True
    error = until_failure(run, checkpoints=target == "beyond the end")
    cleanings.check(error, errno.ENOSPC)
    with pytest.raises(DeviceError, match="errno 28"):
        run.opt.checkpoint()
    run.end()
    monkeypatch.undo()
    ballast[0].unlink()
    run.resume().close()


@file_systems
def test_cleaning_into_a_segment_that_is_there_needs_no_room(
    mount: Mounts, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What the reserve of segments is for: a disk that is full meanwhile does not stop it."""
    place = mount(kind, {"tmpfs": 1, "ext4": 4}[kind])
    run = Run(place / "s", keep_generations=1)

    def wanted(job: CleanJob, path: Path, offset: int, length: int) -> bool:
        return offset + length <= os.stat(path).st_size and job.target in cleanings.filled

    @contextlib.contextmanager
    def strike(job: CleanJob, path: Path, offset: int) -> Iterator[None]:
        ballast = fill(place)
        yield
        ballast.unlink()

    cleanings = Cleanings(monkeypatch, wanted, strike)
    for _ in range(100):
        run.steps(3)
        if cleanings.struck is not None:
            break
    run.checkpoint()
    assert cleanings.struck is not None
    assert cleanings.error is None
    run.twins.check()
    run.opt.close()


def grow_and_give_back(run: Run) -> None:
    """Let the log grow with the generations that hold it, then release them: what is free becomes holes."""
    for _ in range(8):
        run.steps(3)
        run.checkpoint()
    for number in run.opt.generations()[:-1]:
        run.opt.release(number)


def until_failure(run: Run, *, checkpoints: bool) -> DeviceError:
    """Train until a step or a checkpoint fails."""

    def train() -> None:
        for _ in range(100):
            run.steps(3)
            if checkpoints:
                run.checkpoint()

    with pytest.raises(DeviceError) as caught:
        train()
    return caught.value


@file_systems
def test_what_a_real_file_system_is_warned_of(mount: Mounts, kind: str) -> None:
    place = mount(kind, {"tmpfs": 1, "ext4": 4}[kind])
    param = nn.Parameter(torch.zeros(40_000, 16))
    with pytest.warns(UserWarning, match={"tmpfs": "is on a tmpfs", "ext4": "are free"}[kind]) as caught:
        DiskSparseAdam([("w", param)], state_dir=place / "s").close()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    if kind == "ext4":  # what fits is not warned of, and a tmpfs always is
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            DiskSparseAdam([("w", nn.Parameter(torch.zeros(1000, 16)))], state_dir=place / "t").close()


def test_a_read_only_file_system(mount: Mounts) -> None:
    place = mount("tmpfs", 8)
    run = Run(place / "s")
    run.steps(5)
    run.checkpoint()
    run.opt.close()
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    with pytest.raises(DeviceError) as caught:
        DiskSparseAdam(list(run.twins.disk.items()), state_dir=run.path, existing="resume")
    check_device_error(caught.value, errno.EROFS, str(place))
    with pytest.raises(DeviceError) as caught:
        DiskSparseAdam(list(run.twins.disk.items()), state_dir=place / "new")
    check_device_error(caught.value, errno.EROFS, str(place))
    subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
    run.resume().close()


# No room in a file.


def limited_run(path: Path, backend: str) -> Run:
    try:
        return Run(path, keep_generations=None, backend=backend)
    except ConfigError as error:
        if "cannot work here" not in str(error):
            raise
        pytest.skip(str(error))


@posix
def test_a_limit_of_the_file_size_met_by_the_creation(tmp_path: Path) -> None:
    limited_run(tmp_path / "warm", "auto").opt.close()  # so that nothing else is written under the limit
    with file_size_limit(1024), pytest.raises(DeviceError) as caught:
        Run(tmp_path / "s")
    check_device_error(caught.value, errno.EFBIG, "manifest.json.tmp")
    run = Run(tmp_path / "s")
    run.steps(3)
    run.twins.check()
    run.opt.close()


@posix
@backends
@pytest.mark.parametrize("file", [".log", ".idx"])
def test_a_limit_of_the_file_size_met_by_a_checkpoint(tmp_path: Path, backend: str, file: str) -> None:
    run = limited_run(tmp_path / "s", backend)
    run.steps(10)
    run.checkpoint()
    run.step(5)
    limit = 8192  # an index has more; the log has one segment of that size, which a generation holds
    if file == ".idx":
        pipeline = run.opt._books.engine._pipeline
        pipeline.run(pipeline.flush())
    with file_size_limit(limit), pytest.raises(DeviceError) as caught:
        run.opt.checkpoint()
    check_device_error(caught.value, errno.EFBIG, file)
    run.end()
    run.resume().close()


@posix
@backends
@pytest.mark.parametrize("what", ["truncate", "write"])
def test_a_limit_of_the_file_size_met_by_cleaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, what: str
) -> None:
    """Where the log is made longer for its target, and where the target lies beyond the limit already."""
    run = limited_run(tmp_path / "s", backend)

    def wanted(job: CleanJob, path: Path, offset: int, length: int) -> bool:
        inside = offset + length <= os.stat(path).st_size
        return inside == (what == "write")

    def strike(job: CleanJob, path: Path, offset: int) -> contextlib.AbstractContextManager[object]:
        return file_size_limit(offset)

    cleanings = Cleanings(monkeypatch, wanted, strike)
    error = until_failure(run, checkpoints=what == "truncate")
    cleanings.check(error, errno.EFBIG, offset=0 if what == "truncate" else None)
    assert what in str(error)
    run.end()
    monkeypatch.undo()
    run.resume().close()


LIMITED = """
import resource, signal, sys, torch
from torch import nn
from dsa import DiskSparseAdam
from dsa.config import IOConfig
from dsa.errors import DeviceError
import errno

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path, backend = sys.argv[1:]
torch.set_num_threads(1)
param = nn.Parameter(torch.zeros(4000, 8))
opt = DiskSparseAdam([("w", param)], state_dir=path, cache=20000, backend=backend, io=IOConfig(segment_bytes=8192))

def step(i):
    rows = (torch.arange(50) * 79 + i * 50) % 4000
    param.grad = torch.sparse_coo_tensor(rows[None], torch.ones(50, 8), (4000, 8))
    opt.step()

step(0)
first = opt.checkpoint()
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
try:
    for i in range(400):
        step(i)
except DeviceError as error:
    assert error.errno == errno.EFBIG and error.filename.endswith(".log"), error
    print("raised", error)
else:
    raise SystemExit("no error")
try:
    opt.close()
except DeviceError:
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
opt = DiskSparseAdam([("w", param)], state_dir=path, existing="resume", backend=backend)
assert opt.generations()[-1] == first and opt.state[param]["step"] == 1
opt.moments("w", range(4000))
opt.close()
print("resumed")
"""


@posix
@pytest.mark.parametrize("backend", ["threads", "aiofiles", "auto"])
def test_a_limit_of_the_file_size_met_by_a_step(tmp_path: Path, backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path / "s"), backend],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "raised" in done.stdout
    assert "resumed" in done.stdout
