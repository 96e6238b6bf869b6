"""The disk is full, broken, gone, slow or silent: a Python exception with its place, and the last generation stays."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_backend import FaultBackend, install
from parity_rig import Twins, check_moments, parameters, random_gradient, restore, snapshot

from dsa import DiskSparseAdam
from dsa.config import IOConfig
from dsa.errors import CorruptError, DeviceError, DsaError, FormatError, StateFileError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:a step touches more rows than the cache has frames"),
]
N_ROWS, WIDTH = 400, 8
CACHE = 12_000  # some 100 frames
SMALL = IOConfig(segment_bytes=8192, dirty_share=0.05)


class Run:
    """A training and its oracle; what each generation must hold is kept."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.twins = Twins(parameters({"w": (N_ROWS, WIDTH)}), path, {"lr": 0.1}, cache=CACHE, io=SMALL, **options)
        self.generator = torch.Generator().manual_seed(5)
        self.saved: dict[int, Any] = {}
        self.checkpoint()

    @property
    def opt(self) -> DiskSparseAdam:
        return self.twins.opt

    def step(self, count: int = 60) -> None:
        rows = torch.randint(0, N_ROWS, (count,), generator=self.generator)
        self.twins.step({"w": random_gradient(self.twins.disk["w"], rows, self.generator)})

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def checkpoint(self) -> int:
        number = self.opt.checkpoint()
        self.saved[number] = snapshot(self.twins.oracle, self.twins.ram)
        return number

    def until_failure(self, limit: int = 200) -> DsaError:
        """Train, and make a checkpoint, until it fails."""

        def train() -> None:
            for _ in range(limit):
                self.step()
                self.opt.checkpoint()

        with pytest.raises(DsaError) as caught:
            train()
        return caught.value

    def end(self) -> None:
        with pytest.raises(DsaError):  # what had failed is said once more, and everything is ended
            self.opt.close()

    def resume(self, path: Path | None = None) -> DiskSparseAdam:
        """Open the directory anew, compare the newest generation with the oracle's, and go on for a while."""
        gc.collect()
        opt = DiskSparseAdam(
            list(self.twins.disk.items()), state_dir=path or self.path, lr=0.1, cache=CACHE, io=SMALL, existing="resume"
        )
        newest = opt.generations()[-1]
        assert newest == max(self.saved)
        restore(self.saved[newest], self.twins.oracle, self.twins.disk, self.twins.ram)
        self.twins.opt = opt
        self.twins.check()
        self.steps(5)
        self.twins.check()
        return opt


def check_device_error(error: BaseException, number: int, path: str) -> None:
    assert isinstance(error, DeviceError)
    assert isinstance(error, OSError)
    assert error.errno == number
    assert path in str(error.filename)
    assert f"errno {number}" in str(error)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[FaultBackend]:
    return install(monkeypatch)


# Errors of the device, one kind after the other.


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("write", ".log"),
        ("truncate", ".log"),
        ("sync", ".log"),
        ("write_whole", ".idx"),
        ("write_whole", "manifest.json.tmp"),
        ("replace", "manifest.json.tmp"),
        ("sync_directory", "index"),
        ("sync_directory", ""),
        ("remove", ".idx"),
    ],
)
def test_a_failing_request_is_raised_and_the_last_generation_stays(
    tmp_path: Path, faults: list[FaultBackend], kind: str, path: str, number: int
) -> None:
    run = Run(tmp_path / "s", keep_generations=1)
    run.steps(3)
    run.checkpoint()
    faults[0].fail(kind, number, path)
    if kind == "truncate":
        run.opt.checkpoint()
    run.step()
    error = run.until_failure()
    check_device_error(error, number, path)
    for call in (run.opt.step, run.opt.checkpoint, run.opt.state_dict, lambda: run.opt.moments("w", [0])):
        with pytest.raises(DeviceError) as again:
            call()
        assert again.value.errno == number, "the first failure is what every later call says"
    run.end()
    assert not run.opt._books.engine._pipeline.loop.alive
    faults[0].heal()
    if kind in ("sync_directory", "remove") and path != "index":
        # The rename was done: the generation that nobody got the number of is there too, and later than the last.
        opt = DiskSparseAdam(list(run.twins.disk.items()), state_dir=run.path, existing="load")
        newest = max(run.saved)
        assert newest in opt.generations() or kind == "remove"
        opt.close()
        return
    run.resume().close()


def test_a_failed_read_is_raised_by_the_step_that_needs_it(tmp_path: Path, faults: list[FaultBackend]) -> None:
    run = Run(tmp_path / "s")
    run.steps(20)
    run.checkpoint()
    faults[0].fail("read", errno.EIO, ".log")
    with pytest.raises(DeviceError) as caught:
        run.steps(10)
    check_device_error(caught.value, errno.EIO, ".log")
    assert caught.value.offset_bytes is not None
    run.end()
    faults[0].heal()
    run.resume().close()


def test_a_failed_read_ahead_is_raised_by_the_next_call(tmp_path: Path, faults: list[FaultBackend]) -> None:
    run = Run(tmp_path / "s")
    run.steps(20)
    run.checkpoint()
    faults[0].fail("read", errno.EIO, ".log")
    pipeline = run.opt._books.engine._pipeline
    for first in range(0, N_ROWS, 50):  # some of them are on disk only
        run.opt.announce({"w": range(first, first + 50)})
        with pipeline.access.condition:
            if pipeline.access.condition.wait_for(lambda: pipeline.failure is not None, 0.3):
                break
    with pytest.raises(DeviceError) as caught:
        run.opt.announce({"w": [0]})
    check_device_error(caught.value, errno.EIO, ".log")
    run.end()


def test_a_failure_while_cleaning(tmp_path: Path, faults: list[FaultBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    from dsa.io.rowlog import RowLog

    run = Run(tmp_path / "s")
    clean = RowLog.clean
    cleanings = []

    async def clean_and_fail(self: RowLog, job: Any) -> None:
        cleanings.append(job)
        faults[0].fail("write", errno.EIO, ".log")
        await clean(self, job)

    run.steps(5)
    run.checkpoint()
    monkeypatch.setattr(RowLog, "clean", clean_and_fail)
    with pytest.raises(DeviceError, match="errno 5"):
        run.steps(300)
    assert cleanings
    run.end()
    monkeypatch.setattr(RowLog, "clean", clean)
    faults[0].heal()
    run.resume().close()


@pytest.mark.parametrize(
    ("kind", "path"), [("write_whole", ".log"), ("write_whole", "manifest"), ("sync_directory", ""), ("replace", "")]
)
def test_a_failure_in_the_creation_leaves_nothing_that_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, path: str
) -> None:
    made = install(monkeypatch, lambda backend: backend.fail(kind, errno.ENOSPC, path))
    with pytest.raises(DeviceError) as caught:
        Run(tmp_path / "s")
    check_device_error(caught.value, errno.ENOSPC, path)
    assert len(made) == 1
    monkeypatch.undo()
    run = Run(tmp_path / "s")
    run.steps(3)
    run.twins.check()
    run.opt.close()


# Silence.


@pytest.mark.parametrize(("kind", "path"), [("read", ".log"), ("write", ".log"), ("sync", ".log"), ("replace", "")])
def test_a_stalled_device_is_an_error(tmp_path: Path, faults: list[FaultBackend], kind: str, path: str) -> None:
    run = Run(tmp_path / "s")
    run.opt.close()
    quick = IOConfig(segment_bytes=8192, dirty_share=0.05, stall_timeout_s=0.2)
    run.twins.opt = DiskSparseAdam(
        list(run.twins.disk.items()), state_dir=run.path, lr=0.1, cache=CACHE, io=quick, existing="resume"
    )
    run.steps(20)
    run.checkpoint()
    faults[1].stall(kind, path)
    error = run.until_failure()
    assert faults[1].stalled.is_set()
    check_device_error(error, errno.ETIMEDOUT, path)
    assert "nothing answered" in str(error)
    shutil.copytree(run.path, tmp_path / "copy")
    run.end()
    run.resume(tmp_path / "copy").close()


# Slowness.


def test_on_a_slow_disk_queues_and_memory_plateau_and_nothing_fails(tmp_path: Path, faults: list[FaultBackend]) -> None:
    run = Run(tmp_path / "s")
    faults[0].write_delay_s = 0.02
    pipeline = run.opt._books.engine._pipeline

    def held() -> tuple[int, int, int]:
        log = pipeline.log
        buffers = sum(len(buffer) for some in (log._buffers, log._segment_buffers) for buffer in some._idle)
        figures = run.opt.statistics()
        return buffers, figures.dirty_frames, figures.window_batches

    seen = []
    for _ in range(60):
        run.step()
        seen.append(held())
    run.checkpoint()
    run.twins.check()
    frames = run.opt.statistics().frames
    assert faults[0].most_in_flight["write"] <= 4, "three segments and a cleaning at most"
    assert max(dirty for _, dirty, _ in seen) <= frames
    most = [max(buffers for buffers, _, _ in some) for some in (seen[:30], seen[30:])]
    assert most[1] <= most[0] + 4 * 8192, "no buffer for every write"
    assert max(batches for _, _, batches in seen) <= 1
    assert faults[0].calls["write"] > 30, "the disk did take part"
    run.opt.close()


# What others do to the directory.


def files_of(path: Path, pattern: str) -> list[Path]:
    found = sorted(path.glob(pattern))
    assert found, pattern
    return found


@pytest.mark.parametrize("pattern", ["manifest.json", "index/*.idx", "tables/*.log"])
@pytest.mark.parametrize("how", ["cut", "emptied", "flipped", "foreign", "gone"])
def test_damaged_files_are_refused_and_never_read_wrongly(tmp_path: Path, pattern: str, how: str) -> None:
    run = Run(tmp_path / "s", keep_generations=1)
    run.steps(30)
    run.checkpoint()
    run.opt.close()
    for file in files_of(run.path, pattern):
        content = bytearray(file.read_bytes())
        if how == "cut":
            del content[len(content) // 2 :]
        elif how == "emptied":
            content.clear()
        elif how == "flipped":
            for i in range(60, len(content), 61):
                content[i] ^= 0x40
        elif how == "foreign":
            content = bytearray(os.urandom(len(content)))
        file.write_bytes(content)
        if how == "gone":
            file.unlink()
    if how == "gone" and pattern == "manifest.json":
        # As a creation that was cut short, which counts as nothing: a new one takes its place.
        DiskSparseAdam(list(run.twins.disk.items()), state_dir=run.path, existing="resume").close()
        return

    def read_all() -> None:
        opt = DiskSparseAdam(list(run.twins.disk.items()), state_dir=run.path, existing="resume")
        try:
            opt.moments("w", range(N_ROWS))
        finally:
            opt._books.engine.close()

    with pytest.raises((StateFileError, DeviceError)) as caught:
        read_all()
    if not isinstance(caught.value, DeviceError):
        assert str(run.path) in str(caught.value)
        assert isinstance(caught.value, (CorruptError, FormatError))
    DiskSparseAdam(list(run.twins.disk.items()), state_dir=run.path, existing="discard").close()


def test_a_truncated_log_is_an_exception_while_it_is_in_use(tmp_path: Path) -> None:
    run = Run(tmp_path / "s")
    run.steps(30)
    run.checkpoint()
    (log,) = files_of(run.path, "tables/*.log")
    os.truncate(log, 8192)
    with pytest.raises((DeviceError, CorruptError)) as caught:
        run.steps(200)
    assert log.name in str(caught.value)
    run.end()


def test_a_directory_deleted_in_use_is_an_exception(tmp_path: Path) -> None:
    run = Run(tmp_path / "s")
    run.steps(3)
    shutil.rmtree(run.path)
    error = run.until_failure()
    check_device_error(error, errno.ENOENT, str(run.path))
    run.end()


def _not_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() != 0


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """A small file system of its own."""
    made: list[Path] = []

    def maker(size: str, *options: str) -> Path:
        place = tmp_path / f"mount{len(made)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "dsa-test", str(place)]
        if sys.platform != "linux" or _not_root():
            pytest.skip("mounting a file system needs root on Linux")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        made.append(place)
        return place

    yield maker
    gc.collect()
    for place in made:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Leave no byte free."""
    ballast = place / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return ballast


@pytest.mark.filterwarnings("ignore:.*(tmpfs|free)")
@pytest.mark.parametrize("when", ["creation", "step", "checkpoint"])
def test_a_full_disk(mount: Callable[..., Path], when: str) -> None:
    place = mount("1m")
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


@pytest.mark.filterwarnings("ignore:.*(tmpfs|free)")
def test_a_read_only_file_system(mount: Callable[..., Path]) -> None:
    place = mount("8m")
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


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX's limits")
@pytest.mark.parametrize("backend", ["threads", "aiofiles", "auto"])
def test_a_limit_of_the_file_size(tmp_path: Path, backend: str) -> None:
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


def test_moments_of_an_intact_directory_are_right(tmp_path: Path) -> None:
    """What the damage above is measured against: without it the same calls give the oracle's numbers."""
    run = Run(tmp_path / "s", keep_generations=1)
    run.steps(30)
    run.checkpoint()
    run.opt.close()
    opt = DiskSparseAdam(list(run.twins.disk.items()), state_dir=run.path, existing="resume")
    check_moments(opt, "w", run.twins.disk["w"], run.twins.oracle.state[run.twins.ram["w"]])
    opt.close()
