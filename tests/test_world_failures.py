"""The disk is broken, gone, slow or silent: a Python exception with its place, and the last generation stays."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from failing_disk import Mounts
from failing_run import CACHE, N_ROWS, Run, check_device_error
from fault_backend import FaultBackend, install
from parity_rig import check_moments

import dsa.io.memory
import dsa.io.rowlog
from dsa import DiskSparseAdam
from dsa.config import IOConfig
from dsa.errors import CorruptError, DeviceError, DsaError, FormatError, StateFileError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:a step touches more rows than the cache has frames"),
]


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


@pytest.mark.parametrize(
    ("kind", "path"), [("write_whole", "manifest.json.tmp"), ("sync_directory", ""), ("punch", ".log")]
)
def test_a_release_that_fails_is_final_too(tmp_path: Path, faults: list[FaultBackend], kind: str, path: str) -> None:
    run = Run(tmp_path / "s", keep_generations=None)
    for _ in range(4):
        run.steps(8)
        run.checkpoint()
    with pytest.raises(DsaError, match="99"):
        run.opt.release(99)
    run.steps(1)  # a wrong number did no harm
    run.checkpoint()
    faults[0].fail(kind, errno.EIO, path)

    def release_all() -> None:
        for number in run.opt.generations()[:-1]:
            run.opt.release(number)

    with pytest.raises(DeviceError) as caught:
        release_all()
    assert caught.value.errno == errno.EIO
    for call in (run.step, run.opt.checkpoint, run.opt.state_dict):
        with pytest.raises(DeviceError) as again:
            call()
        assert again.value.errno == errno.EIO
    run.end()
    faults[0].heal()
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
            if pipeline.access.condition.wait_for(lambda: pipeline.latch.failure is not None, 0.3):
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
def test_a_stalled_device_is_an_error(
    tmp_path: Path, faults: list[FaultBackend], monkeypatch: pytest.MonkeyPatch, kind: str, path: str
) -> None:
    monkeypatch.setattr("dsa.io.pipeline.STOP_TIMEOUT_S", 0.3)
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


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mounts]:
    mounts = Mounts(tmp_path)
    yield mounts
    mounts.end()


@pytest.mark.filterwarnings("ignore:.*are free")
def test_a_file_system_that_stands_still(mount: Mounts, tmp_path: Path) -> None:
    """Writes that the system itself does not let go on, and which nobody can take back."""
    place = mount("ext4", 8)
    run = Run(place / "s")
    run.opt.close()
    quick = IOConfig(segment_bytes=8192, dirty_share=0.05, stall_timeout_s=0.2)
    run.twins.opt = DiskSparseAdam(
        list(run.twins.disk.items()), state_dir=run.path, lr=0.1, cache=CACHE, io=quick, existing="resume"
    )
    run.steps(20)
    run.checkpoint()
    with frozen(place):
        error = run.until_failure()
    check_device_error(error, errno.ETIMEDOUT, str(place))
    assert "nothing answered" in str(error)
    run.end()
    shutil.copytree(run.path, tmp_path / "copy")
    run.resume(tmp_path / "copy").close()


@contextlib.contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Nothing is written to the file system inside: writers wait in the system."""
    try:
        subprocess.run(["fsfreeze", "--freeze", str(place)], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be frozen here: {error}")
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(place)], check=True)


# Slowness.


def test_on_a_slow_disk_queues_and_memory_plateau_and_nothing_fails(
    tmp_path: Path, faults: list[FaultBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[int] = []

    def allocate(nbytes: int, kind: Any) -> Any:
        allocated.append(nbytes)
        return dsa.io.memory.allocate(nbytes, kind)

    monkeypatch.setattr(dsa.io.rowlog, "allocate", allocate)
    run = Run(tmp_path / "s")
    faults[0].write_delay_s = 0.02
    most_dirty = most_batches = 0
    for _ in range(60):
        run.step()
        figures = run.opt.statistics()
        most_dirty = max(most_dirty, figures.dirty_frames)
        most_batches = max(most_batches, figures.window_batches)
    run.checkpoint()
    run.twins.check()
    assert faults[0].most_in_flight["write"] <= 4, "three segments and a cleaning at most"
    assert most_dirty <= run.opt.statistics().frames
    assert most_batches <= 1
    assert faults[0].calls["write"] > 30, "the disk did take part"
    assert run.opt.statistics().wait_s > 0.02, "steps wait for it, and so slow down"
    assert 0 < len(allocated) <= 12, "buffers are used again, and not made for every request"
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


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_file_of_the_directory_is_mapped(tmp_path: Path) -> None:
    """A mapped file that is cut short, or whose device fails, would be SIGBUS."""
    run = Run(tmp_path / "s")
    for _ in range(5):
        run.steps(5)
        run.checkpoint()
        assert str(run.path) not in Path("/proc/self/maps").read_text()
    run.opt.close()


def test_a_directory_deleted_in_use_is_an_exception(tmp_path: Path) -> None:
    run = Run(tmp_path / "s")
    run.steps(3)
    shutil.rmtree(run.path)
    error = run.until_failure()
    check_device_error(error, errno.ENOENT, str(run.path))
    run.end()


def test_moments_of_an_intact_directory_are_right(tmp_path: Path) -> None:
    """What the damage above is measured against: without it the same calls give the oracle's numbers."""
    run = Run(tmp_path / "s", keep_generations=1)
    run.steps(30)
    run.checkpoint()
    run.opt.close()
    opt = DiskSparseAdam(list(run.twins.disk.items()), state_dir=run.path, existing="resume")
    check_moments(opt, "w", run.twins.disk["w"], run.twins.oracle.state[run.twins.ram["w"]])
    opt.close()
