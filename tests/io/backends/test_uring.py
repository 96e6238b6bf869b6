"""The io_uring backend: what it moves, and what it does when the kernel, the device or the file system refuse."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dsa.config import IOConfig
from dsa.errors import ConfigError, DeviceError
from dsa.io.backends import ring as ring_module
from dsa.io.backends import ringloop, uring
from dsa.io.backends.base import File
from dsa.io.backends.ring import READ, WRITE, Ring
from dsa.io.extents import Extents, plan
from dsa.io.memory import allocate

BLOCK = 4096
BLOCKS = 64


def _why_not() -> str:
    try:
        Ring(1, 1, 1.0).close()
    except OSError as error:
        return error.strerror
    return ""


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "io_uring works")
Make = Callable[..., uring.UringBackend]


@pytest.fixture
def content() -> NDArray[np.uint8]:
    return np.random.default_rng(7).integers(0, 256, BLOCKS * BLOCK, dtype=np.uint8)


@pytest.fixture
def path(tmp_path: Path, content: NDArray[np.uint8]) -> Path:
    path = tmp_path / "records"
    path.write_bytes(content.tobytes())
    return path


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[uring.UringBackend] = []

    def make(*faults: tuple[int, int, int, int], **knobs: float) -> uring.UringBackend:
        config = IOConfig(**{"queue_depth": 8, "stall_timeout_s": 30.0, **knobs})  # type: ignore[arg-type]
        made.append(uring.UringBackend(config))
        hook = np.array(faults, np.int64).reshape(-1, 4)
        for ring in made[-1].rings:
            ring.faults = hook
        return made[-1]

    yield make
    for backend in made:
        for ring in backend.rings:
            assert ring.closed or _is_empty(ring)
        backend.shut_down(10.0)
    assert not _ring_threads()


@pytest.fixture
async def gate() -> AsyncIterator[int]:
    """A descriptor that is readable when 8 bytes were written to it."""
    fd = os.eventfd(0) if hasattr(os, "eventfd") else -1
    if fd < 0:
        pytest.skip("no eventfd")
    yield fd
    os.close(fd)


def _is_empty(ring: Ring) -> bool:
    """Nothing is left in the queues that a later transfer would submit or reap."""
    sq_head, sq_tail, cq_head, cq_tail = (int(x) for x in ring._words[ring._where[:4]])
    return sq_head == sq_tail and cq_head == cq_tail


def _ring_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dsa-uring")]


def _blocks(numbers: list[int], length: int = BLOCK) -> Extents:
    n = len(numbers)
    offsets = np.array(numbers, np.int64) * BLOCK
    return Extents(offsets, np.full(n, length, np.int64), np.arange(n, dtype=np.int64) * length)


def _bytes(path: Path) -> bytes:
    return path.read_bytes()


def _filled(extents: Extents) -> NDArray[np.uint8]:
    buffer: NDArray[np.uint8] = allocate(int(extents.lengths.sum()), np.uint8)
    buffer[:] = 0xA5
    return buffer


def _expected(extents: Extents, content: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.concatenate([content[o : o + n] for o, n in zip(extents.offsets, extents.lengths, strict=True)])


@contextlib.contextmanager
def _open(backend: uring.UringBackend, path: Path, **how: bool) -> Iterator[File]:
    file = backend.open(path, **how)
    try:
        yield file
    finally:
        backend.close(file)


EVERY = list(range(BLOCKS))


@pytest.mark.parametrize("direct", [False, True])
async def test_reads_every_extent_into_its_place(
    make: Make, path: Path, content: NDArray[np.uint8], direct: bool
) -> None:
    backend = make()
    extents = _blocks(EVERY[::2])
    buffer = _filled(extents)
    with _open(backend, path, direct=direct) as file:
        await backend.read(file, extents, buffer)
    assert (buffer == _expected(extents, content)).all()
    assert (backend.counters.read_requests, backend.counters.read_bytes) == (32, 32 * BLOCK)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("blocks", [1, BLOCKS])
async def test_writes_are_read_back(make: Make, tmp_path: Path, direct: bool, blocks: int) -> None:
    backend = make()
    buffer: NDArray[np.uint8] = allocate(blocks * BLOCK, np.uint8)
    names: list[str] = []

    def fill() -> None:
        names.append(threading.current_thread().name)
        buffer[:] = np.arange(len(buffer)) % 251

    with _open(backend, tmp_path / "new", create=True, direct=direct) as file:
        await backend.write(file, 2 * BLOCK, buffer, fill)
    assert _bytes(tmp_path / "new") == bytes(2 * BLOCK) + buffer.tobytes()
    assert names == ["dsa-uring-write-0"]
    assert backend.counters.write_requests == 1


async def test_long_write_is_cut_into_requests(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: NDArray[np.uint8]
) -> None:
    monkeypatch.setattr(uring, "_MOST_WRITE_BYTES", 3 * BLOCK)
    backend = make()
    with _open(backend, tmp_path / "new", create=True) as file:
        await backend.write(file, 0, content)
    assert _bytes(tmp_path / "new") == content.tobytes()
    assert backend.counters.write_requests == 22


async def test_ten_times_more_extents_than_the_queue_holds(make: Make, path: Path, content: NDArray[np.uint8]) -> None:
    backend = make(queue_depth=6)
    extents = _blocks(EVERY)
    buffer = _filled(extents)
    with _open(backend, path, direct=True) as file:
        await backend.read(file, extents, buffer)
    assert (buffer == content).all()


def _pieces(length: int) -> Extents:
    """All of the file, in pieces: many requests, so that their memory is registered with the kernel."""
    at = np.arange(0, BLOCKS * BLOCK, length, dtype=np.int64)
    return Extents(at, np.full(len(at), length, np.int64), at)


async def test_memory_of_many_direct_requests_is_registered(
    make: Make, path: Path, content: NDArray[np.uint8], gate: int
) -> None:
    backend = make(
        (ringloop.FAULT_ERROR, 7 * BLOCK, errno.EIO, 1),
        (ringloop.FAULT_STALL, 9 * BLOCK, gate, 1),
        stall_timeout_s=0.05,
    )
    extents = _pieces(512)
    with _open(backend, path, direct=True) as file:
        if file.alignment != 512 or not backend.rings[0]._registers:
            pytest.skip("no direct I/O by 512 bytes, or a kernel before 6.4")
        for number in (errno.EIO, errno.ETIMEDOUT):  # the registration must end with either
            with pytest.raises(DeviceError) as caught:
                await backend.read(file, extents, _filled(extents))
            assert caught.value.errno == number
        for _ in range(3):
            buffer = _filled(extents)
            await backend.read(file, extents, buffer)
            assert (buffer == content).all()
        assert backend.rings[0]._registers


async def test_memory_that_cannot_be_registered_is_used_all_the_same(
    make: Make, path: Path, content: NDArray[np.uint8], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring, "_MOST_WRITE_BYTES", BLOCK)
    backend = make()
    with _open(backend, tmp_path / "new", create=True, direct=True) as file:
        await backend.write(file, 0, _mapped(path))
    assert not backend.rings[1]._registers or file.alignment == 1
    assert _bytes(tmp_path / "new") == content.tobytes()


def _mapped(path: Path) -> NDArray[np.uint8]:
    """The file's bytes as memory that nobody may write to, the kernel included."""
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


@pytest.mark.parametrize("record_bytes", [1, 7, 100, 1000, 1024, 1025, 5000])
async def test_odd_records_come_through_aligned_extents(
    make: Make, path: Path, content: NDArray[np.uint8], record_bytes: int
) -> None:
    backend = make()
    slots = np.sort(np.random.default_rng(record_bytes).choice(len(content) // record_bytes, 40, replace=False))
    with _open(backend, path, direct=True) as file:
        wanted = plan(
            slots * record_bytes, record_bytes, merge_gap_bytes=0, max_request_bytes=BLOCK, alignment=file.alignment
        )
        buffer: NDArray[np.uint8] = allocate(wanted.buffer_bytes, np.uint8)
        await backend.read(file, wanted.extents, buffer)
    for slot, position in zip(slots, wanted.positions, strict=True):
        record = content[slot * record_bytes : (slot + 1) * record_bytes]
        assert (buffer[position : position + record_bytes] == record).all()


async def test_then_follows_in_the_same_thread_and_only_after_success(make: Make, path: Path) -> None:
    backend = make((ringloop.FAULT_ERROR, 9 * BLOCK, errno.EIO, 1))
    names: list[str] = []
    extents = _blocks([9])
    buffer = _filled(extents)
    with _open(backend, path) as file:
        with pytest.raises(DeviceError):
            await backend.read(file, extents, buffer, lambda: names.append("failed"))
        await backend.read(file, extents, buffer, lambda: names.append(threading.current_thread().name))
    assert names == ["dsa-uring-read-0"]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("short", [1, 700, 1024, 4000])
@pytest.mark.parametrize("op", ["read", "write"])
async def test_short_transfers_are_continued(
    make: Make, path: Path, content: NDArray[np.uint8], direct: bool, short: int, op: str
) -> None:
    backend = make((ringloop.FAULT_SHORT, 3 * BLOCK, short, 2), (ringloop.FAULT_SHORT, 17 * BLOCK + 4095, short, 1))
    extents = _blocks(EVERY)
    with _open(backend, path, direct=direct) as file:
        if op == "read":
            buffer = _filled(extents)
            await backend.read(file, extents, buffer)
            assert (buffer == content).all()
        else:
            new: NDArray[np.uint8] = allocate(BLOCK, np.uint8)
            new[:] = 255 - content[:BLOCK]
            for number in (3, 17):
                await backend.write(file, number * BLOCK, new)
            expected = content.copy()
            expected[3 * BLOCK : 4 * BLOCK] = expected[17 * BLOCK : 18 * BLOCK] = new
            assert _bytes(path) == expected.tobytes()


def test_answer_of_no_bytes_is_not_asked_for_again(path: Path) -> None:
    ring = Ring(4, 1, 5.0)
    extents = _blocks([BLOCKS])
    fd = os.open(path, os.O_RDONLY)
    outcome = ring.transfer(READ, fd, _filled(extents), extents.at, extents.offsets, extents.lengths, 1)
    os.close(fd)
    ring.close()
    assert (outcome.status, outcome.errno, outcome.submitted) == (ringloop.FAILED, 0, 1)


async def test_end_of_the_file_is_an_error_with_its_place(make: Make, path: Path) -> None:
    os.truncate(path, 5 * BLOCK + 100)
    backend = make()
    for direct in (False, True):
        extents = _blocks([4, 5])
        with _open(backend, path, direct=direct) as file, pytest.raises(DeviceError, match="file ends") as caught:
            await backend.read(file, extents, _filled(extents))
        assert caught.value.errno == 0
        assert caught.value.filename == str(path)
        assert caught.value.offset_bytes is not None
        assert 5 * BLOCK <= caught.value.offset_bytes <= 5 * BLOCK + 100


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN, errno.EBUSY])
async def test_refused_system_calls_are_repeated_and_lose_nothing(
    make: Make, path: Path, content: NDArray[np.uint8], number: int
) -> None:
    faults = [(ringloop.FAULT_ENTER, calls, number, 3) for calls in (0, 2, 4)]
    backend = make(*faults)
    extents = _blocks(EVERY)
    buffer = _filled(extents)
    with _open(backend, path, direct=True) as file:
        await backend.read(file, extents, buffer)
        assert (buffer == content).all()
        # An answer that was left behind would now be taken for one of these requests.
        again = _filled(_blocks([40]))
        await backend.read(file, _blocks([40]), again)
    assert (again == content[40 * BLOCK : 41 * BLOCK]).all()


async def test_kernel_that_never_takes_a_request_is_an_error(make: Make, path: Path) -> None:
    backend = make((ringloop.FAULT_TAKE, 0, 0, 1 << 40), stall_timeout_s=0.05)
    extents = _blocks([1])
    with _open(backend, path) as file, pytest.raises(DeviceError) as caught:
        await backend.read(file, extents, _filled(extents))
    assert caught.value.errno == errno.EAGAIN


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
async def test_interrupted_requests_are_repeated(
    make: Make, path: Path, content: NDArray[np.uint8], number: int
) -> None:
    backend = make((ringloop.FAULT_ERROR, 5 * BLOCK, number, 3))
    extents = _blocks(EVERY)
    buffer = _filled(extents)
    with _open(backend, path) as file:
        await backend.read(file, extents, buffer)
    assert (buffer == content).all()


async def test_request_interrupted_for_ever_is_an_error(make: Make, path: Path) -> None:
    backend = make((ringloop.FAULT_ERROR, 5 * BLOCK, errno.EINTR, 1 << 40))
    extents = _blocks(EVERY)
    with _open(backend, path) as file, pytest.raises(DeviceError) as caught:
        await backend.read(file, extents, _filled(extents))
    assert (caught.value.errno, caught.value.offset_bytes) == (errno.EINTR, 5 * BLOCK)


@pytest.mark.parametrize("taken", [0, 1, 3])
async def test_entries_not_taken_are_submitted_again(
    make: Make, path: Path, content: NDArray[np.uint8], taken: int
) -> None:
    backend = make((ringloop.FAULT_TAKE, 0, taken, 20))
    extents = _blocks(EVERY)
    buffer = _filled(extents)
    with _open(backend, path, direct=True) as file:
        await backend.read(file, extents, buffer)
    assert (buffer == content).all()
    assert backend.rings[0].faults[0, 3] < 20


@pytest.mark.parametrize("block", [2, 20])  # the first while entries wait to be taken
async def test_error_names_the_place_and_the_ring_goes_on(
    make: Make, path: Path, content: NDArray[np.uint8], block: int
) -> None:
    backend = make((ringloop.FAULT_ERROR, block * BLOCK, errno.EIO, 1), (ringloop.FAULT_TAKE, 0, 3, 4))
    extents = _blocks(EVERY)
    buffer = _filled(extents)
    with _open(backend, path, direct=True) as file:
        with pytest.raises(DeviceError) as caught:
            await backend.read(file, extents, buffer)
        error = caught.value
        assert (error.errno, error.filename) == (errno.EIO, str(path))
        assert (error.offset_bytes, error.length_bytes) == (block * BLOCK, BLOCK)
        await backend.read(file, extents, buffer)
    assert (buffer == content).all()


async def test_full_file_system_is_an_error(make: Make, tmp_path: Path) -> None:
    backend = make((ringloop.FAULT_ERROR, 2 * BLOCK, errno.ENOSPC, 1))
    buffer: NDArray[np.uint8] = allocate(4 * BLOCK, np.uint8)
    with _open(backend, tmp_path / "new", create=True, direct=True) as file:
        with pytest.raises(DeviceError) as caught:
            await backend.write(file, BLOCK, buffer)
        assert (caught.value.errno, caught.value.offset_bytes) == (errno.ENOSPC, 2 * BLOCK)
        await backend.write(file, BLOCK, buffer)
    assert len(_bytes(tmp_path / "new")) == 5 * BLOCK


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
async def test_full_device_is_an_error(make: Make) -> None:
    backend = make()
    with _open(backend, Path("/dev/full")) as file, pytest.raises(DeviceError) as caught:
        await backend.write(file, 0, np.zeros(100, np.uint8))
    assert caught.value.errno == errno.ENOSPC


def test_limit_on_the_size_of_files_is_an_error_at_the_limit(tmp_path: Path) -> None:
    _run(
        """
        import asyncio, errno, resource, sys
        from pathlib import Path
        import numpy as np
        from dsa.config import IOConfig
        from dsa.errors import DeviceError
        from dsa.io.backends.uring import UringBackend

        backend = UringBackend(IOConfig())
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        file = backend.open(Path(sys.argv[1]), create=True)
        try:
            asyncio.run(backend.write(file, 4096, np.ones(8192, np.uint8)))
        except DeviceError as error:
            assert (error.errno, error.offset_bytes, error.length_bytes) == (errno.EFBIG, 8192, 4096), error
        else:
            raise SystemExit("no error")
        backend.close(file)
        backend.shut_down(10.0)
        """,
        str(tmp_path / "limited"),
    )


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (compiled code sets it, which knows no event)
        await asyncio.sleep(0)


async def test_device_that_stops_for_a_while_loses_nothing(
    make: Make, path: Path, content: NDArray[np.uint8], gate: int
) -> None:
    backend = make((ringloop.FAULT_STALL, 30 * BLOCK, gate, 1))
    extents = _blocks(EVERY)
    buffer = _filled(extents)
    with _open(backend, path, direct=True) as file:
        reading = asyncio.ensure_future(backend.read(file, extents, buffer))
        await _until(lambda: bool(backend.rings[0].faults[0, 3] == 0))
        assert not reading.done()
        os.write(gate, (1).to_bytes(8, "little"))
        await reading
    assert (buffer == content).all()


async def test_stalled_device_is_an_error_and_cancelled_requests_free_the_ring(
    make: Make, path: Path, content: NDArray[np.uint8], gate: int
) -> None:
    backend = make((ringloop.FAULT_STALL, 30 * BLOCK, gate, 1), stall_timeout_s=0.05)
    extents = _blocks(EVERY)
    buffer = _filled(extents)
    with _open(backend, path, direct=True) as file:
        with pytest.raises(DeviceError, match="nothing answered") as caught:
            await backend.read(file, extents, buffer)
        assert (caught.value.errno, caught.value.offset_bytes) == (errno.ETIMEDOUT, 30 * BLOCK)
        await backend.read(file, extents, buffer)
    assert (buffer == content).all()


async def test_failed_read_returns_only_when_its_other_requests_have_ended(make: Make, path: Path, gate: int) -> None:
    faults = [(ringloop.FAULT_STALL, 2 * BLOCK, gate, 1), (ringloop.FAULT_ERROR, 3 * BLOCK, errno.EIO, 1)]
    backend = make(*faults, stall_timeout_s=0.05)
    extents = _blocks(EVERY)
    with _open(backend, path, direct=True) as file, pytest.raises(DeviceError, match="nothing answered") as caught:
        await backend.read(file, extents, _filled(extents))
    assert (caught.value.errno, caught.value.offset_bytes) == (errno.EIO, 3 * BLOCK)


async def test_requests_that_stay_in_the_device_keep_their_memory(
    make: Make, path: Path, content: NDArray[np.uint8], gate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(ring_module, "_kept_for_the_kernel", kept)
    backend = make(
        (ringloop.FAULT_STALL, 30 * BLOCK, gate, 1), (ringloop.FAULT_UNCANCELLABLE, 0, 0, 1), stall_timeout_s=0.05
    )
    extents = _blocks(EVERY)
    buffer = _filled(extents)
    with _open(backend, path, direct=True) as file:
        with pytest.raises(DeviceError, match="nothing answered"):
            await backend.read(file, extents, buffer)
        assert any(one is buffer for one in kept)
        with pytest.raises(DeviceError, match="not tried"):
            await backend.read(file, _blocks([1]), _filled(_blocks([1])))
        same: NDArray[np.uint8] = allocate(BLOCK, np.uint8)
        same[:] = content[:BLOCK]
        await backend.write(file, 0, same)  # writes have a ring of their own
    backend.shut_down(10.0)
    assert not _ring_threads()


def test_no_more_in_flight_than_the_depth(path: Path, gate: int) -> None:
    faults = np.array([(ringloop.FAULT_STALL, n * BLOCK, gate, 1) for n in EVERY], np.int64)
    ring = Ring(5, 2, 0.05, faults)
    extents = _blocks(EVERY)
    fd = os.open(path, os.O_RDONLY)
    try:
        outcome = ring.transfer(READ, fd, _filled(extents), extents.at, extents.offsets, extents.lengths, 1)
    finally:
        os.close(fd)
        ring.close()
    assert (outcome.status, outcome.submitted) == (ringloop.STALLED, 5)


async def test_cancelled_read_returns_only_when_its_io_has_ended(
    make: Make, path: Path, content: NDArray[np.uint8], gate: int
) -> None:
    backend = make((ringloop.FAULT_STALL, 30 * BLOCK, gate, 1))
    extents = _blocks(EVERY)
    buffer = _filled(extents)
    with _open(backend, path) as file:
        reading = asyncio.ensure_future(backend.read(file, extents, buffer))
        await _until(lambda: bool(backend.rings[0].faults[0, 3] == 0))
        reading.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not reading.done()
        os.write(gate, (1).to_bytes(8, "little"))
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert (buffer == content).all()


async def test_misaligned_extent_of_a_direct_file_is_named(make: Make, path: Path) -> None:
    backend = make()
    with _open(backend, path, direct=True) as file:
        if file.alignment == 1:
            pytest.skip("no direct I/O in the directory for tests")
        for extents in (
            Extents(*(np.array([0, x], np.int64) for x in (file.alignment + 1, BLOCK, BLOCK))),
            Extents(*(np.array([0, x], np.int64) for x in (0, 100, BLOCK))),
            Extents(*(np.array([0, x], np.int64) for x in (0, BLOCK, 8))),
        ):
            with pytest.raises(ValueError, match="direct I/O"):
                await backend.read(file, extents, allocate(4 * BLOCK, np.uint8))
        with pytest.raises(ValueError, match="direct I/O"):
            await backend.write(file, 0, allocate(100, np.uint8))


async def test_places_outside_of_the_buffer_are_refused(make: Make, path: Path) -> None:
    backend = make()
    with _open(backend, path) as file:
        with pytest.raises(ValueError, match="does not fit"):
            await backend.read(file, _blocks([0, 1]), allocate(BLOCK, np.uint8))
        with pytest.raises(ValueError, match="no byte -1"):
            await backend.write(file, -1, allocate(BLOCK, np.uint8))
    ring = Ring(2, 1, 1.0)
    one = np.ones(1, np.int64)
    with pytest.raises(ValueError, match="outside of its buffer"):
        ring.transfer(WRITE, 0, np.zeros(8, np.uint8), one, one, one * 8, 1)
    ring.close()
    with pytest.raises(OSError, match="closed"):
        ring.transfer(WRITE, 0, np.zeros(8, np.uint8), one, one, one, 1)


def test_ring_refuses_every_thread_but_its_own(path: Path, content: NDArray[np.uint8]) -> None:
    ring = Ring(4, 1, 5.0)
    extents = _blocks([2])
    other, buffer = _filled(extents), _filled(extents)
    fd = os.open(path, os.O_RDONLY)
    outcomes: list[ring_module.Outcome] = []

    def move(buffer: NDArray[np.uint8]) -> None:
        outcomes.append(ring.transfer(READ, fd, buffer, extents.at, extents.offsets, extents.lengths, 1))

    thread = threading.Thread(target=move, args=(other,))
    thread.start()
    thread.join()
    move(buffer)
    os.close(fd)
    ring.close()
    assert (outcomes[0].status, outcomes[0].errno) == (ringloop.BROKEN, errno.EEXIST)
    assert (outcomes[1].status, outcomes[1].submitted) == (ringloop.WHOLE, 1)
    assert (buffer == content[2 * BLOCK : 3 * BLOCK]).all()
    assert (other == 0xA5).all()


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (errno.ENOSYS, "no io_uring"),
        (errno.EPERM, "forbidden"),
        (errno.EINVAL, "6.1"),
        (errno.ENOMEM, "locked memory"),
        (errno.EMFILE, "Too many open files"),
    ],
)
def test_kernel_that_refuses_a_ring_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch, number: int, word: str
) -> None:
    monkeypatch.setattr(ring_module, "_setup", lambda entries, params: -number)
    with pytest.raises(ConfigError, match=word):
        uring.UringBackend(IOConfig())
    assert not _ring_threads()


def test_kernel_without_a_needed_feature_is_refused_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "_FEATURES", {"TIME_TRAVEL": 1 << 31})
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="TIME_TRAVEL"):
        uring.UringBackend(IOConfig())
    assert len(os.listdir("/proc/self/fd")) == before


def test_shut_down_gives_descriptors_and_mappings_back() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as lines:
            return sum("io_uring" in line for line in lines)

    before = len(os.listdir("/proc/self/fd"))
    backend = uring.UringBackend(IOConfig())
    assert mapped() == 10  # two of each of five rings
    backend.shut_down(10.0)
    backend.shut_down(10.0)
    assert mapped() == 0
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("blocked", [425, 426])
def test_filter_of_system_calls_leads_to_the_next_backend(blocked: int) -> None:
    _run(
        """
        import ctypes, errno, struct, sys
        from dsa.config import IOConfig
        from dsa.errors import ConfigError
        from dsa.io.backends import open_backend
        from dsa.io.backends.uring import UringBackend

        # Load the number of the system call; if it is the one: EPERM, else allow.
        refuse, allow = (6, 0, 0, 0x50000 | errno.EPERM), (6, 0, 0, 0x7FFF0000)
        steps = [(0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), refuse, allow]
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program)))
        libc = ctypes.CDLL(None)
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filter, 0, 0):
            sys.exit(77)
        try:
            UringBackend(IOConfig())
        except ConfigError as error:
            assert "not permitted" in str(error), error
        else:
            raise SystemExit("no error")
        backend = open_backend("auto", IOConfig())
        assert backend.name == "threads", backend.name
        backend.shut_down(10.0)
        """,
        str(blocked),
    )


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_forked_child_does_not_keep_the_ring() -> None:
    ring = Ring(2, 1, 1.0)
    child = os.fork()
    if child == 0:
        try:
            os.fstat(ring._fd)
        except OSError as error:
            ring.close()
            os._exit(0 if error.errno == errno.EBADF else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    ends = os.pipe()
    os.write(ends[1], b"still ok")
    zero = np.zeros(1, np.int64)
    outcome = ring.transfer(READ, ends[0], np.zeros(8, np.uint8), zero, zero, zero + 8, 1)
    for fd in ends:
        os.close(fd)
    ring.close()
    assert os.waitstatus_to_exitcode(status) == 0
    assert outcome.status == ringloop.WHOLE


def _run(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments], capture_output=True, text=True, timeout=100
    )
    if done.returncode == 77:
        pytest.skip("system calls cannot be filtered here")
    assert done.returncode == 0, done.stderr
