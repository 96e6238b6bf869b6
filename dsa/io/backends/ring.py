"""One io_uring, driven by compiled code that holds no GIL: set up by system call, mapped, filled and reaped in a loop.

No memory barriers are needed: DEFER_TASKRUN makes the kernel post completions inside `io_uring_enter`, in the thread
that made the ring, and SINGLE_ISSUER refuses every other thread. So a ring is made, used and closed by one thread.

What the loop guarantees: when `Ring.transfer` returns or raises, nothing is in flight any more, with one exception. A
device that answers nothing for the stall timeout leaves requests that the kernel may still carry out, into memory that
looks free to us. Then what can be cancelled is cancelled and reaped; if something remains, the ring is closed, the
buffer is kept alive until the process ends (so that a late answer hits nobody else's memory), and every further
transfer on the ring raises. The owner of the buffer must not use it again either.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.io.backends.ringloop import FAULT_UNCANCELLABLE, NO_FAULTS, UNREGISTER_BUFFERS, all_inside, drain, move

READ, WRITE = 22, 23
# The numbers of the system calls are the same on every architecture that is younger than io_uring, and on x86-64.
_SETUP, _REGISTER = 425, 427
_SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 12, 1 << 13
_FEATURES = {"SINGLE_MMAP": 1 << 0, "NODROP": 1 << 1, "EXT_ARG": 1 << 8}
_SQES_OFFSET = 0x10000000
_SYNC_CANCEL, _CANCEL_ANY = 24, 1 << 2
_PARAMS_BYTES, _CANCEL_BYTES = 120, 64
_PROT_READ_WRITE, _MAP_SHARED, _MADV_DONTFORK = 3, 1, 10
_PAGE_BYTES, _FEW_REQUESTS = 4096, 64
# Before, giving a registered buffer back waited for a grace period of the kernel, many milliseconds.
_QUICK_TO_UNREGISTER = (6, 4)
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Outcome:
    """How a transfer ended.

    Args:
        status: WHOLE, FAILED, STALLED (the device answered nothing for the timeout) or BROKEN (the ring failed).
        request, errno, moved_bytes: which request failed first, why (0: it moved nothing), and how far it had come.
        submitted: the requests that were made.
    """

    status: int
    request: int
    errno: int
    moved_bytes: int
    submitted: int


_ring_fds: set[int] = set()
_kept_for_the_kernel: list[Any] = []


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _setup(entries: int, params: bytearray) -> int:
    """io_uring_setup: the ring's descriptor (close-on-exec), or minus the error number."""
    block = (ctypes.c_char * _PARAMS_BYTES).from_buffer(params)
    fd = int(_libc().syscall(ctypes.c_long(_SETUP), ctypes.c_long(entries), block))
    return fd if fd >= 0 else -ctypes.get_errno()


def _kernel_version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _why(number: int) -> str:
    return {
        errno.ENOSYS: "this kernel has no io_uring",
        errno.EPERM: "io_uring is forbidden here (kernel.io_uring_disabled, or a seccomp filter)",
        errno.EACCES: "io_uring is forbidden here (a security module)",
        errno.EINVAL: "this kernel's io_uring has no SINGLE_ISSUER and DEFER_TASKRUN (Linux before 6.1)",
        errno.ENOMEM: "no memory, or no locked memory (ulimit -l), for an io_uring",
    }.get(number, "io_uring cannot be set up")


def _map(libc: ctypes.CDLL, fd: int, nbytes: int, offset: int) -> int:
    address = libc.mmap(None, nbytes, _PROT_READ_WRITE, _MAP_SHARED, fd, offset)
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"an io_uring cannot be mapped: {os.strerror(ctypes.get_errno())}")
    libc.madvise(address, nbytes, _MADV_DONTFORK)  # the child must not see, nor unmap, the parent's ring
    return int(address)


def _release(fd: int, mappings: list[tuple[int, int]], owner: int) -> None:
    if os.getpid() != owner:
        return
    libc = _libc()
    for address, nbytes in mappings:
        libc.munmap(address, nbytes)
    _ring_fds.discard(fd)
    os.close(fd)


def _close_in_forked_child() -> None:
    for fd in _ring_fds:
        os.close(fd)
    _ring_fds.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_forked_child)


class Ring:
    """An io_uring of the thread that makes it.

    Args:
        depth: requests in flight at most.
        wake: completions that one wait collects at most before more is submitted.
        timeout_s: a device that answers nothing for so long is stalled (found after at most twice that time).
        faults: int64 [n, 4], the test hook (FAULT_...); changed by the loop.

    Raises:
        OSError: io_uring cannot be used here; the message says why.
    """

    def __init__(self, depth: int, wake: int, timeout_s: float, faults: NDArray[np.int64] = NO_FAULTS) -> None:
        if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
            raise OSError(errno.ENOSYS, f"io_uring is not driven on {sys.platform}, {platform.machine()}")
        params = bytearray(_PARAMS_BYTES)
        struct.pack_into("I", params, 8, _SINGLE_ISSUER | _DEFER_TASKRUN)
        fd = _setup(depth, params)
        if fd < 0:
            raise OSError(-fd, f"{_why(-fd)}: {os.strerror(-fd)}")
        _ring_fds.add(fd)
        mappings: list[tuple[int, int]] = []
        self._release = weakref.finalize(self, _release, fd, mappings, os.getpid())
        self._release.atexit = False
        try:
            lacking = [name for name, bit in _FEATURES.items() if not struct.unpack_from("I", params, 20)[0] & bit]
            if lacking:
                raise OSError(errno.EINVAL, f"this kernel's io_uring lacks {', '.join(lacking)}")
            self._view(fd, params, mappings)
        except BaseException:
            self.close()
            raise
        self._registers = _kernel_version() >= _QUICK_TO_UNREGISTER
        self._fd, self.depth, self.wake, self._timeout_ns = fd, depth, wake, int(timeout_s * 1e9)
        self._timespec = np.zeros(2, np.int64)
        self._argument = np.array([0, 0, self._timespec.ctypes.data], np.int64)
        self.faults = faults

    def _view(self, fd: int, params: bytearray, mappings: list[tuple[int, int]]) -> None:
        n_sqes, n_cqes = struct.unpack_from("2I", params, 0)
        sq, cq = struct.unpack_from("7I", params, 40), struct.unpack_from("6I", params, 80)
        libc = _libc()
        for nbytes, offset in ((max(sq[6] + n_sqes * 4, cq[5] + n_cqes * 16), 0), (n_sqes * 64, _SQES_OFFSET)):
            mappings.append((_map(libc, fd, nbytes, offset), nbytes))
        rings, entries = [np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(a)) for a, size in mappings]
        self._words = rings[: len(rings) // 4 * 4].view(np.uint32)
        self._sqes = entries.view(np.int64).reshape(n_sqes, 8)
        self._cqes = rings[cq[5] : cq[5] + n_cqes * 16].view(np.int64).reshape(n_cqes, 2)
        self._where = np.array([sq[0] // 4, sq[1] // 4, cq[0] // 4, cq[1] // 4, n_sqes - 1, n_cqes - 1], np.int64)
        self._words[sq[6] // 4 : sq[6] // 4 + n_sqes] = np.arange(n_sqes, dtype=np.uint32)

    def transfer(
        self,
        op: int,
        file_fd: int,
        buffer: NDArray[np.uint8],
        at: NDArray[np.int64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        alignment: int,
    ) -> Outcome:
        """READ or WRITE `lengths[i]` bytes at file byte `offsets[i]` and `buffer[at[i]]`, for all i, in one nogil call.

        Args:
            buffer: uint8, contiguous; addresses and file offsets are multiples of `alignment`, where that is not 1.
            at, offsets, lengths: int64 [n].

        Raises:
            ValueError: an extent lies outside of the buffer.
            OSError: the ring was closed.
        """
        if not self._release.alive:
            raise OSError(errno.EBADF, "the io_uring is closed")
        if not all_inside(at, lengths, buffer.nbytes):
            raise ValueError(f"an extent lies outside of its buffer of {buffer.nbytes} bytes")
        report = np.zeros(7, np.int64)
        # Registering pins all of the buffer: worth it where most of it is moved, by many requests.
        pages = -(-buffer.nbytes // _PAGE_BYTES)
        register = self._registers and alignment > 1 and len(at) >= _FEW_REQUESTS and pages <= 4 * len(at)
        depth = min(self.depth, len(self._sqes))
        ring = (self._fd, self._words, self._sqes, self._cqes, self._where, self._timespec, self._argument)
        job = (op, file_fd, buffer.ctypes.data, at, offsets, lengths, alignment)
        move(*ring, *job, depth, self.wake, self._timeout_ns, buffer.nbytes if register else 0, self.faults, report)
        status, request, number, flying, submitted, moved, registered = (int(x) for x in report)
        self._registers = self._registers and (not register or bool(registered))  # there may be a limit (ulimit -l)
        if flying:
            if self._cancel(flying):
                _kept_for_the_kernel.append(buffer)
                self.close()
            elif registered:
                _libc().syscall(*map(ctypes.c_long, (_REGISTER, self._fd, UNREGISTER_BUFFERS, 0, 0)))
        return Outcome(status, request, number, moved, submitted)

    def _cancel(self, flying: int) -> int:
        """Cancel what the kernel can cancel and reap it; the number that stays in flight."""
        grace_ns = min(self._timeout_ns, 1_000_000_000)
        request = bytearray(_CANCEL_BYTES)
        struct.pack_into("QiIqq", request, 0, 0, -1, _CANCEL_ANY, 0, grace_ns)
        block = (ctypes.c_char * _CANCEL_BYTES).from_buffer(request)
        if not (self.faults[:, 0] == FAULT_UNCANCELLABLE).any():
            _libc().syscall(*map(ctypes.c_long, (_REGISTER, self._fd, _SYNC_CANCEL)), block, ctypes.c_long(1))
        ring = (self._fd, self._words, self._where, self._timespec, self._argument)
        return int(drain(*ring, flying, grace_ns))

    @property
    def closed(self) -> bool:
        """The ring is gone: closed by its user, or given up with requests that a stalled device still holds."""
        return not self._release.alive

    def close(self) -> None:
        """Unmap the ring and close its descriptor; twice does no harm."""
        self._release()
