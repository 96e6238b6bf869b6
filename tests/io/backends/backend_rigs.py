"""How each backend is made for the contract suite, with faults between it and the operating system.

A new backend joins by an entry in RIGS. Its `make` gets a `Faults` and calls `faults.transfer` in place of every
request for data ("read" or "write", offset, number of bytes): what that returns is the number of bytes to move at
most, what it raises is the request's failure.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import io
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from dsa.config import IOConfig
from dsa.io.backends.aio import AiofilesBackend
from dsa.io.backends.base import Backend, Bytes, Extents, File
from dsa.io.backends.device_models import NVME
from dsa.io.backends.emulated import EmulatedBackend
from dsa.io.backends.ring import Outcome, Ring
from dsa.io.backends.ringloop import FAULT_ERROR, FAULT_SHORT, FAULT_STALL
from dsa.io.backends.threads import SystemCalls, ThreadsBackend
from dsa.io.backends.uring import UringBackend

PATIENCE_S = 30.0
SIZE = 1 << 20
DATA = np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8)
DATA.setflags(write=False)


def extents(*rows: tuple[int, int, int]) -> Extents:
    return Extents(*np.array(rows, np.int64).reshape(-1, 3).T)


def _open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@dataclass
class Faults:
    """What goes wrong with requests; nothing by default.

    Args:
        most_bytes: longer transfers are cut short.
        interrupts: so many requests more are interrupted.
        errors: a request that touches the byte of the file fails with the errno.
        gates: a closed gate holds requests of that kind back.
        entered: set when a request of that kind has come to its gate.
        arrived: released once by each request.
        log: every request, in order.
    """

    most_bytes: int = 1 << 40
    interrupts: int = 0
    errors: dict[int, int] = field(default_factory=dict)
    gates: dict[str, threading.Event] = field(default_factory=lambda: {"read": _open_gate(), "write": _open_gate()})
    entered: dict[str, threading.Event] = field(
        default_factory=lambda: {"read": threading.Event(), "write": threading.Event()}
    )
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    log: list[tuple[str, int, int]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def transfer(self, what: str, offset: int, nbytes: int) -> int:
        with self._lock:
            self.log.append((what, offset, nbytes))
            interrupted = self.interrupts > 0
            self.interrupts -= interrupted
        self.entered[what].set()
        self.arrived.release()
        if not self.gates[what].wait(PATIENCE_S):
            raise AssertionError(f"nobody opened the gate for {what}")
        if interrupted:
            raise InterruptedError(4, "interrupted")
        for place, number in self.errors.items():
            if offset <= place < offset + nbytes:
                if place > offset:
                    return min(place - offset, self.most_bytes)  # what comes before it still moves
                raise OSError(number, os.strerror(number))
        return min(nbytes, self.most_bytes)

    def open_gates(self) -> None:
        for gate in self.gates.values():
            gate.set()


@dataclass(frozen=True)
class Rig:
    name: str
    make: Callable[[IOConfig, Faults], Backend]
    opened_as: str = ""  # where another backend moves its bytes: the name of that one

    def __str__(self) -> str:
        return self.name


def _threads(config: IOConfig, faults: Faults) -> Backend:
    import fcntl  # not there on Windows, nor is this backend

    libc = ctypes.CDLL(None, use_errno=True)
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
    )

    def faulty(what: str, call: Any) -> Any:
        call.argtypes, call.restype = prototype._argtypes_, ctypes.c_ssize_t  # type: ignore[attr-defined]

        def through(fd: int, memory: int, nbytes: int, offset: int) -> int:
            try:
                nbytes = faults.transfer(what, offset, nbytes)
            except OSError as error:
                ctypes.set_errno(error.errno or 0)
                return -1
            # A direct file moves whole blocks only; it may report a short one all the same.
            rest = nbytes % 512 if fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0) else 0
            moved: int = call(fd, memory, nbytes - rest, offset)
            return moved + rest if moved >= 0 else moved

        return prototype(through)

    callbacks = [faulty("read", libc.pread), faulty("write", libc.pwrite)]
    pread, pwrite = (ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in callbacks)
    calls = SystemCalls(pread, pwrite, SystemCalls.of_libc().errno_location)
    backend = ThreadsBackend(config, calls=calls)
    backend.callbacks = callbacks  # type: ignore[attr-defined]  # they must outlive the backend
    return backend


def _aiofiles(config: IOConfig, faults: Faults) -> Backend:
    class FaultyFile(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            return super().readinto(buffer[: faults.transfer("read", self.tell(), len(buffer))])

        def write(self, buffer: Any) -> int | None:
            return super().write(buffer[: faults.transfer("write", self.tell(), len(buffer))])

    return AiofilesBackend(config, raw=FaultyFile)


def _uring(config: IOConfig, faults: Faults) -> Backend:
    backend = UringBackend(config)
    for what, ring in zip(("read", "write"), backend.rings, strict=True):
        ring.transfer = partial(_through_the_hook, faults, what, ring, ring.transfer)  # type: ignore[method-assign]
    return backend


def _through_the_hook(faults: Faults, what: str, ring: Ring, transfer: Callable[..., Outcome], *job: Any) -> Outcome:
    """Put the faults of the moment into the ring's test hook for one transfer, and count what came of them."""
    always = 1 << 40
    held = os.eventfd(0)
    rows = [
        (FAULT_STALL, -1, held, 0 if faults.gates[what].is_set() else always),
        (FAULT_ERROR, -1, errno.EINTR, faults.interrupts),
        *((FAULT_ERROR, place, number, always) for place, number in faults.errors.items()),
        (FAULT_SHORT, -1, min(faults.most_bytes, 1 << 27), always if faults.most_bytes < 1 << 27 else 0),
    ]
    ring.faults = np.array(rows, np.int64)

    def watch() -> None:
        seen, open_ = 0, False
        while not open_:
            open_ = faults.gates[what].wait(0.001)
            arrived = always - int(ring.faults[0, 3])
            faults.arrived.release(arrived - seen) if arrived > seen else None
            seen = arrived
            if seen:
                faults.entered[what].set()
        ring.faults[0, 3] = 0
        os.eventfd_write(held, 1)

    watcher = threading.Thread(target=watch)
    if rows[0][3]:
        watcher.start()
    try:
        outcome = transfer(*job)
    finally:
        if rows[0][3]:
            watcher.join()
        os.close(held)
    faults.interrupts = int(ring.faults[1, 3])
    faults.log.extend([(what, -1, -1)] * outcome.submitted)
    return outcome


def _emulated(config: IOConfig, faults: Faults) -> Backend:
    return EmulatedBackend(_threads(config, faults), NVME)


def why_no_uring() -> str:
    """Why io_uring cannot be used here; empty where it can."""
    try:
        Ring(1, 1, 1.0).close()
    except OSError as error:
        return error.strerror
    return "" if hasattr(os, "eventfd") else "the tests need os.eventfd"


RIGS = [
    Rig("threads", _threads),
    Rig("aiofiles", _aiofiles),
    Rig("emulated", _emulated, "threads"),
    pytest.param(
        Rig("uring", _uring), marks=pytest.mark.skipif(bool(why_no_uring()), reason=why_no_uring() or "it works")
    ),
]


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, PATIENCE_S)


async def turns(count: int = 20) -> None:
    """Let the loop run what is ready, several times over."""
    for _ in range(count):
        await asyncio.sleep(0)


async def cancel_transfer(backend: Backend, file: File, faults: Faults, what: str, times: int) -> Bytes:
    """Cancel a read or a write of the file's first 100 bytes while the device holds it: it ends only when its memory is
    at rest, and the bytes have moved. The memory."""
    faults.gates[what].clear()
    buffer = np.zeros(100, np.uint8)
    call = backend.read(file, extents((0, 100, 0)), buffer) if what == "read" else backend.write(file, 0, buffer)
    moving = asyncio.ensure_future(call)
    await until(faults.entered[what])
    for _ in range(times):
        moving.cancel()
        await turns()
        assert not moving.done()
    faults.gates[what].set()
    with pytest.raises(asyncio.CancelledError):
        await moving
    assert np.array_equal(buffer, DATA[:100] if what == "read" else np.zeros(100))
    assert file.path.read_bytes()[:100] == (DATA[:100].tobytes() if what == "read" else bytes(100))
    return buffer
