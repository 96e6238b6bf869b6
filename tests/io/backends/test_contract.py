"""What every backend promises, whatever it is made of."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from backend_rigs import DATA, PATIENCE_S, SIZE, Faults, Rig, cancel_transfer, extents, turns, until

from dsa.config import IOConfig
from dsa.errors import ClosedError, CorruptError, DeviceError
from dsa.io.backends import Backend, Extents, File
from dsa.io.memory import allocate


@pytest.fixture
def backend(rig: Rig, faults: Faults) -> Iterator[Backend]:
    made = rig.make(IOConfig(), faults)
    yield made
    faults.open_gates()
    made.shut_down(PATIENCE_S)


async def raises_device_error(call: Awaitable[None], number: int, path: Path) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        await call
    assert caught.value.errno == number
    assert caught.value.filename == str(path)
    assert str(path) in str(caught.value)
    return caught.value


# Reading.


@pytest.mark.parametrize("count", [1, 2, 3, 17, 400])
async def test_read_fills_every_extent_and_nothing_else(backend: Backend, file: File, count: int) -> None:
    rng = np.random.default_rng(count)
    lengths = rng.integers(1, 2000, count)
    offsets = np.sort(rng.integers(0, SIZE - 2000, count))
    order = rng.permutation(count)  # of the places in the buffer
    at = np.zeros(count, np.int64)
    at[order] = np.cumsum(lengths[order] + 3) - lengths[order]
    expected = np.full(int((lengths + 3).sum()) + 5, 0xA5, np.uint8)
    buffer = expected.copy()
    for o, n, a in zip(offsets, lengths, at, strict=True):
        expected[a : a + n] = DATA[o : o + n]
    await backend.read(file, Extents(offsets, lengths, at), buffer)
    assert np.array_equal(buffer, expected)


async def test_no_extents_and_empty_extents_make_no_request(backend: Backend, file: File, faults: Faults) -> None:
    ran: list[int] = []
    buffer = np.full(8, 9, np.uint8)
    await backend.read(file, extents(), buffer, then=lambda: ran.append(1))
    await backend.read(file, extents((0, 0, 0), (5, 0, 8)), buffer, then=lambda: ran.append(2))
    assert ran == [1, 2]
    assert faults.log == []
    assert backend.counters.read_requests == 0
    assert (buffer == 9).all()


async def test_read_up_to_the_last_byte_works_and_one_more_is_an_error(backend: Backend, file: File) -> None:
    buffer = np.zeros(100, np.uint8)
    await backend.read(file, extents((SIZE - 100, 100, 0)), buffer)
    assert np.array_equal(buffer, DATA[-100:])
    error = await raises_device_error(backend.read(file, extents((SIZE - 99, 100, 0)), buffer), 0, file.path)
    assert error.offset_bytes == SIZE
    assert error.length_bytes == 1
    assert "read" in str(error)
    assert "the file ends" in str(error)


async def test_extents_that_overlap_in_the_buffer_or_leave_it_are_refused(
    backend: Backend, file: File, faults: Faults
) -> None:
    buffer = np.zeros(100, np.uint8)
    for wrong in (extents((0, 60, 0), (60, 60, 40)), extents((0, 60, 41)), extents((0, 60, -1))):
        with pytest.raises(ValueError, match=r"overlap|does not fit"):
            await backend.read(file, wrong, buffer)
    with pytest.raises(ValueError, match="contiguous"):
        await backend.read(file, extents((0, 10, 0)), np.zeros(100, np.uint8)[::2])
    with pytest.raises(ValueError, match="read-only"):
        await backend.read(file, extents((0, 10, 0)), DATA)
    assert faults.log == []
    assert not buffer.any()


async def test_then_runs_once_off_the_loop_when_every_byte_is_there(backend: Backend, file: File) -> None:
    buffer = np.zeros(64 * 100, np.uint8)
    offsets = np.arange(64) * 200
    expected = DATA[: 64 * 200].reshape(64, 200)[:, :100].reshape(-1)
    seen: list[tuple[bool, int]] = []

    def then() -> None:
        seen.append((np.array_equal(buffer, expected), threading.get_ident()))

    await backend.read(file, Extents(offsets, np.full(64, 100), np.arange(64) * 100), buffer, then)
    assert [right for right, _ in seen] == [True]
    assert seen[0][1] != threading.get_ident()


async def test_then_does_not_run_after_a_failed_read(backend: Backend, file: File, faults: Faults) -> None:
    faults.errors[5000] = errno.EIO
    ran: list[int] = []
    offsets = np.arange(64) * 200
    read = backend.read(
        file, Extents(offsets, np.full(64, 100), np.arange(64) * 100), np.zeros(6400, np.uint8), lambda: ran.append(1)
    )
    error = await raises_device_error(read, errno.EIO, file.path)
    assert error.offset_bytes == 5000
    assert error.length_bytes == 100
    assert ran == []


async def test_a_failure_of_then_is_the_failure_of_the_read(backend: Backend, file: File) -> None:
    def then() -> None:
        raise CorruptError("row 3")

    with pytest.raises(CorruptError, match="row 3"):
        await backend.read(file, extents((0, 10, 0), (20, 10, 10), (40, 10, 20)), np.zeros(30, np.uint8), then)


# Writing.


async def test_write_moves_all_bytes_and_before_fills_them_first(backend: Backend, file: File) -> None:
    buffer = np.zeros(70_000, np.uint8)
    ran: list[int] = []

    def before() -> None:
        ran.append(threading.get_ident())
        buffer[:] = DATA[-70_000:]

    await backend.write(file, 1234, buffer, before)
    assert len(ran) == 1
    assert ran[0] != threading.get_ident()
    expected = DATA.copy()
    expected[1234 : 1234 + 70_000] = DATA[-70_000:]
    assert file.path.read_bytes() == expected.tobytes()


async def test_a_write_beyond_the_end_lengthens_the_file(backend: Backend, file: File) -> None:
    await backend.write(file, SIZE + 10, np.ones(5, np.uint8))
    assert file.path.read_bytes() == DATA.tobytes() + bytes(10) + b"\1" * 5


async def test_nothing_is_written_when_before_fails(backend: Backend, file: File, faults: Faults) -> None:
    def before() -> None:
        raise CorruptError("nothing to write")

    with pytest.raises(CorruptError, match="nothing to write"):
        await backend.write(file, 0, np.zeros(100, np.uint8), before)
    assert faults.log == []
    await backend.write(file, 0, np.zeros(100, np.uint8))  # the writer goes on
    assert file.path.read_bytes() == bytes(100) + DATA[100:].tobytes()


async def test_an_empty_write_moves_nothing_but_runs_before(backend: Backend, file: File, faults: Faults) -> None:
    ran: list[int] = []
    await backend.write(file, 0, np.empty(0, np.uint8), lambda: ran.append(1))
    assert ran == [1]
    assert faults.log == []
    assert backend.counters.write_requests == 0


async def test_a_buffer_may_be_read_only_for_a_write_but_must_be_contiguous(backend: Backend, file: File) -> None:
    await backend.write(file, 0, DATA[500:1000])
    assert file.path.read_bytes()[:500] == DATA[500:1000].tobytes()
    with pytest.raises(ValueError, match="contiguous"):
        await backend.write(file, 0, DATA[::2])
    with pytest.raises(ValueError, match="-1"):
        await backend.write(file, -1, DATA[:10])


async def test_a_file_opened_for_reading_cannot_be_written(backend: Backend, file: File) -> None:
    reader = backend.open(file.path, writable=False)
    try:
        buffer = np.zeros(10, np.uint8)
        error = await raises_device_error(backend.write(reader, 7, buffer), errno.EBADF, file.path)
        assert error.offset_bytes == 7
        assert error.length_bytes == 10
        await backend.read(reader, extents((0, 10, 0)), buffer)
        assert np.array_equal(buffer, DATA[:10])
    finally:
        backend.close(reader)
    assert file.path.read_bytes() == DATA.tobytes()


# Direct files: aligned where the backend and the file system do that, else like all others.


async def test_a_file_may_be_opened_direct(backend: Backend, file: File, faults: Faults, tmp_path: Path) -> None:
    direct = backend.open(file.path, direct=True)
    try:
        buffer = allocate(4 * 4096, np.uint8)
        places = extents((8192, 4096, 4096), (12288, 8192, 8192))
        faults.most_bytes = 2500 if direct.alignment > 1 else 7  # short ones end between two aligned offsets
        faults.interrupts = 2
        await backend.read(direct, places, buffer)
        assert np.array_equal(buffer, np.concatenate([np.zeros(4096, np.uint8), DATA[8192 : 8192 + 3 * 4096]]))
        await backend.write(direct, 4096, buffer)
        assert file.path.read_bytes() == DATA[:4096].tobytes() + buffer.tobytes() + DATA[5 * 4096 :].tobytes()
        if direct.alignment > 1:
            with pytest.raises(ValueError, match="direct I/O"):
                await backend.read(direct, extents((8192, 4096, 1)), buffer)
            with pytest.raises(ValueError, match="direct I/O"):
                await backend.write(direct, 4096, buffer[:100])
    finally:
        backend.close(direct)


async def test_the_end_of_a_direct_file_is_an_error(backend: Backend, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(DATA[:5000].tobytes())
    direct = backend.open(path, direct=True)
    try:
        read = backend.read(direct, extents((0, 8192, 0)), allocate(8192, np.uint8))
        error = await raises_device_error(read, 0, path)
        assert error.offset_bytes == 5000 // direct.alignment * direct.alignment
        assert "the file ends" in str(error)
    finally:
        backend.close(direct)


# Faults of the system.


async def test_short_and_interrupted_transfers_are_continued(backend: Backend, file: File, faults: Faults) -> None:
    faults.most_bytes, faults.interrupts = 7, 5
    buffer = np.zeros(300, np.uint8)
    await backend.read(file, extents((1000, 100, 100), (2000, 100, 0), (3000, 100, 200)), buffer)
    assert np.array_equal(buffer, np.concatenate([DATA[2000:2100], DATA[1000:1100], DATA[3000:3100]]))
    assert faults.interrupts == 0
    faults.interrupts = 3
    await backend.write(file, 50, buffer)
    assert faults.interrupts == 0
    assert file.path.read_bytes() == DATA[:50].tobytes() + buffer.tobytes() + DATA[350:].tobytes()
    assert len([what for what, _, _ in faults.log if what == "read"]) >= 3 * 15 + 5
    assert len([what for what, _, _ in faults.log if what == "write"]) == 43 + 3
    assert backend.counters.read_requests == 3  # what was asked, not what the system made of it
    assert backend.counters.write_requests == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_a_failed_transfer_names_the_place_where_it_failed(
    backend: Backend, file: File, faults: Faults, number: int
) -> None:
    faults.errors[600] = number
    for call in (
        backend.read(file, extents((500, 200, 0)), np.zeros(200, np.uint8)),
        backend.write(file, 500, np.zeros(200, np.uint8)),
    ):
        error = await raises_device_error(call, number, file.path)
        assert error.offset_bytes == 600
        assert error.length_bytes == 100
    faults.errors.clear()
    buffer = np.zeros(200, np.uint8)
    await backend.read(file, extents((500, 200, 0)), buffer)
    assert not buffer[:100].any()  # that part had been written
    assert np.array_equal(buffer[100:], DATA[600:700])


FILE_SIZE_LIMIT = """
import asyncio, resource, sys
from pathlib import Path
import numpy as np
from dsa.config import IOConfig
from dsa.errors import DeviceError
from dsa.io.backends import open_backend

async def main():
    backend = open_backend(sys.argv[1], IOConfig())
    file = backend.open(Path(sys.argv[2]), create=True)
    await backend.write(file, 0, np.ones(100, np.uint8))
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    try:
        await backend.write(file, 100, np.ones(10_000, np.uint8))
    except DeviceError as error:
        print(error.errno, error.offset_bytes, error.length_bytes)
    try:
        await backend.write_whole(Path(sys.argv[2] + ".whole"), [np.ones(8000, np.uint8), np.ones(500, np.uint8)])
    except DeviceError as error:
        print(error.errno, error.offset_bytes, error.length_bytes)
    backend.close(file)
    backend.shut_down(10)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no RLIMIT_FSIZE on Windows")
def test_the_limit_of_the_file_size_is_an_error_with_its_place(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "limited"
    done = subprocess.run(
        [sys.executable, "-c", FILE_SIZE_LIMIT, rig.opened_as or rig.name, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    assert done.stdout.split("\n")[:2] == [f"{errno.EFBIG} 8192 {10_100 - 8192}", f"{errno.EFBIG} 8192 308"]
    assert path.stat().st_size == 8192


# At once.


async def test_many_reads_and_writes_at_once_do_not_mix(backend: Backend, file: File) -> None:
    rng = np.random.default_rng(3)
    half = SIZE // 2  # the first half is read, the second written
    buffers, checks = [], []

    async def read(seed: int) -> None:
        offsets = np.sort(np.random.default_rng(seed).integers(0, half - 64, 30))
        buffer = np.zeros(30 * 64, np.uint8)
        await backend.read(file, Extents(offsets, np.full(30, 64), np.arange(30) * 64), buffer)
        checks.append(np.array_equal(buffer.reshape(30, 64), DATA[offsets[:, None] + np.arange(64)]))

    async def write(i: int) -> None:
        buffers.append((i, rng.integers(0, 256, 4096, dtype=np.uint8)))
        await backend.write(file, half + i * 4096, buffers[-1][1])

    await asyncio.gather(*[call(i) for i in range(40) for call in (read, write)])
    assert checks == [True] * 40
    expected = DATA.copy()
    for i, buffer in buffers:
        expected[half + i * 4096 : half + (i + 1) * 4096] = buffer
    assert file.path.read_bytes() == expected.tobytes()


async def test_reads_syncs_and_names_do_not_wait_for_writes(
    backend: Backend, file: File, faults: Faults, tmp_path: Path
) -> None:
    faults.gates["write"].clear()
    count = 40  # more than any backend has threads for reading
    writes = [backend.write(file, i * 10, np.zeros(10, np.uint8)) for i in range(count)]
    writing = asyncio.gather(*writes)
    await until(faults.entered["write"])
    buffer = np.zeros(40, np.uint8)
    await backend.read(file, extents((1000, 10, 0), (2000, 10, 10), (3000, 10, 20), (4000, 10, 30)), buffer)
    assert np.array_equal(buffer[:10], DATA[1000:1010])
    await backend.sync(file)
    await backend.remove(tmp_path / "nothing")
    assert not writing.done()
    faults.gates["write"].set()
    await writing


async def test_several_reads_of_a_file_are_in_flight_together(backend: Backend, file: File, faults: Faults) -> None:
    faults.gates["read"].clear()
    read = backend.read(file, Extents(np.arange(8) * 10, np.full(8, 10), np.arange(8) * 10), np.zeros(80, np.uint8))
    reading = asyncio.ensure_future(read)
    for _ in range(2):  # each request reports, then stands at the gate
        assert await asyncio.to_thread(faults.arrived.acquire, timeout=PATIENCE_S)
    assert not reading.done()
    faults.gates["read"].set()
    await reading


@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_transfer_returns_only_when_its_memory_is_at_rest(
    backend: Backend, file: File, faults: Faults, what: str, times: int
) -> None:
    buffer = await cancel_transfer(backend, file, faults, what, times)
    # And the backend is as good as before.
    await backend.write(file, 0, np.full(10, 1, np.uint8))
    await backend.read(file, extents((0, 100, 0)), buffer)
    assert (buffer[:10] == 1).all()


async def test_tasks_cancelled_all_together_still_wait_for_their_transfers(
    backend: Backend, file: File, faults: Faults
) -> None:
    """As asyncio.run cancels at its end: the backend's own tasks, where it has some, are cancelled too."""
    faults.gates["read"].clear()
    buffer = np.zeros(100, np.uint8)
    moving = asyncio.ensure_future(backend.read(file, extents((0, 100, 0)), buffer))
    await until(faults.entered["read"])
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await turns()
    assert not moving.done()
    faults.gates["read"].set()
    with pytest.raises(asyncio.CancelledError):
        await moving
    assert np.array_equal(buffer, DATA[:100])


# Files and names.


async def test_open_makes_keeps_or_empties(backend: Backend, tmp_path: Path) -> None:
    path = tmp_path / "new"
    with pytest.raises(DeviceError) as caught:
        backend.open(path)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(path)
    with pytest.raises(ValueError, match="must be writable"):
        backend.open(path, create=True, writable=False)
    assert not path.exists()
    made = backend.open(path, create=True)
    await backend.write(made, 0, np.ones(10, np.uint8))
    assert not os.get_inheritable(made.fd)
    backend.close(made)
    kept = backend.open(path)
    assert path.stat().st_size == 10
    backend.close(kept)
    backend.close(backend.open(path, create=True))
    assert path.stat().st_size == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no list of open descriptors")
def test_close_gives_every_descriptor_back(backend: Backend, tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    opened = backend.open(tmp_path / "new", create=True)
    assert len(os.listdir("/proc/self/fd")) > len(before)
    backend.close(opened)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    backend.close(opened)  # a second time does nothing


async def test_a_closed_file_is_an_error_and_not_another_file(backend: Backend, file: File, tmp_path: Path) -> None:
    backend.close(file)
    other = backend.open(tmp_path / "other", create=True)  # takes the number of the descriptor
    try:
        for call in (
            lambda: backend.sync(file),
            lambda: backend.truncate(file, 7),
            lambda: backend.punch(file, 0, 4096),
            lambda: backend.write(file, 0, DATA[:10]),
            lambda: backend.read(file, extents((0, 10, 0)), np.zeros(10, np.uint8)),
        ):
            await raises_device_error(call(), errno.EBADF, file.path)
        assert (tmp_path / "other").stat().st_size == 0
    finally:
        backend.close(other)


async def test_truncate_shortens_and_lengthens(backend: Backend, file: File) -> None:
    await backend.truncate(file, 100)
    assert file.path.read_bytes() == DATA[:100].tobytes()
    await backend.truncate(file, 8192)
    assert file.path.read_bytes() == DATA[:100].tobytes() + bytes(8092)


async def test_a_punched_range_reads_as_zeros_or_is_left_alone(backend: Backend, file: File) -> None:
    punched = await backend.punch(file, 8192, 16384)
    hole = bytes(16384) if punched else DATA[8192:24576].tobytes()
    assert file.path.read_bytes() == DATA[:8192].tobytes() + hole + DATA[24576:].tobytes()
    if punched:
        assert await backend.punch(file, 0, 0) is True
        reader = backend.open(file.path, writable=False)
        with pytest.raises(DeviceError) as caught:
            await backend.punch(reader, 0, 4096)
        assert caught.value.offset_bytes == 0
        backend.close(reader)


async def test_write_whole_makes_the_file_of_its_parts(backend: Backend, tmp_path: Path) -> None:
    path = tmp_path / "whole"
    path.write_bytes(bytes(5000))
    await backend.write_whole(path, [DATA[:10], np.empty(0, np.uint8), DATA[10:3000]])
    assert path.read_bytes() == DATA[:3000].tobytes()
    missing = tmp_path / "nowhere" / "whole"
    await raises_device_error(backend.write_whole(missing, [DATA[:10]]), errno.ENOENT, missing)


async def test_replace_and_remove(backend: Backend, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    await backend.replace(source, target)
    assert target.read_bytes() == b"new"
    assert not source.exists()
    await raises_device_error(backend.replace(source, target), errno.ENOENT, source)
    assert target.read_bytes() == b"new"
    await backend.remove(target)
    assert not target.exists()
    await backend.remove(target)
    with pytest.raises(DeviceError):
        await backend.remove(tmp_path)  # a directory


async def test_sync_reaches_the_system(
    backend: Backend, file: File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        if hasattr(os, name):
            real: Callable[[int], None] = getattr(os, name)

            def logged(fd: int, real: Callable[[int], None] = real) -> None:
                synced.append(os.fstat(fd).st_ino)
                real(fd)

            monkeypatch.setattr(os, name, logged)
    await backend.sync(file)
    await backend.sync_directory(tmp_path)
    await backend.write_whole(tmp_path / "whole", [DATA[:10]])
    assert synced == [path.stat().st_ino for path in (file.path, tmp_path, tmp_path / "whole")]
    assert backend.counters.syncs == 3
    await raises_device_error(backend.sync_directory(tmp_path / "nowhere"), errno.ENOENT, tmp_path / "nowhere")


async def test_a_failed_sync_is_an_error(backend: Backend, file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "fdatasync", fail, raising=False)
    await raises_device_error(backend.sync(file), errno.EIO, file.path)
    await raises_device_error(backend.sync_directory(file.path.parent), errno.EIO, file.path.parent)
    whole = file.path.parent / "whole"
    await raises_device_error(backend.write_whole(whole, [DATA[:10]]), errno.EIO, whole)


# Counters and the end.


async def test_counters_count_what_was_asked(backend: Backend, file: File, tmp_path: Path) -> None:
    buffer = np.zeros(300, np.uint8)
    await backend.read(file, extents((0, 100, 0), (500, 100, 100), (900, 50, 200)), buffer)
    await backend.write(file, 0, buffer)
    await backend.write(file, 300, buffer[:10])
    counters = backend.counters
    assert (counters.read_requests, counters.read_bytes) == (3, 250)
    assert (counters.write_requests, counters.write_bytes) == (2, 310)
    await backend.write_whole(tmp_path / "whole", [buffer, buffer[:20]])
    assert (counters.write_requests, counters.write_bytes, counters.syncs) == (4, 630, 1)


async def test_shut_down_ends_every_thread_and_what_was_submitted(rig: Rig, faults: Faults, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    backend = rig.make(IOConfig(), faults)
    started = set(threading.enumerate()) - before
    assert started
    assert all(thread.daemon for thread in started)
    opened = backend.open(tmp_path / "new", create=True)
    await backend.write(opened, 0, DATA[:100])
    backend.shut_down(PATIENCE_S)
    assert not [thread.name for thread in started if thread.is_alive()]
    for call in (backend.read(opened, extents((0, 10, 0)), np.zeros(10, np.uint8)), backend.sync(opened)):
        with pytest.raises(ClosedError):
            await call
    backend.close(opened)
    backend.shut_down(PATIENCE_S)  # a second time does nothing


async def test_shut_down_leaves_a_stuck_thread_behind(
    rig: Rig, faults: Faults, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = rig.make(IOConfig(), faults)
    opened = backend.open(tmp_path / "new", create=True)
    faults.gates["write"].clear()
    writing = asyncio.ensure_future(backend.write(opened, 0, DATA[:100]))
    await until(faults.entered["write"])
    backend.shut_down(0.01)
    assert "left behind" in caplog.text
    assert not writing.done()
    faults.gates["write"].set()
    await writing
    assert (tmp_path / "new").read_bytes() == DATA[:100].tobytes()
    backend.close(opened)
