"""The compiled loop that keeps an io_uring's requests in flight, holding no GIL.

No memory barriers are needed: DEFER_TASKRUN makes the kernel post completions inside `io_uring_enter`, in the thread
that made the ring.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from dsa.io.compile import kernel

# A request that brought nothing (an interrupted one, or one that stops short of the next aligned offset, as at the end
# of a file) is repeated so many times.
_TRIES = 64
_MAX_REQUEST_BYTES = 1 << 30
_BLOCKED_WAIT_NS = 1_000_000
_EINTR, _EAGAIN, _EBUSY, _ETIME, _ETIMEDOUT = 4, 11, 16, 62, 110  # Linux's; other systems lack some
_NOP, _POLL_ADD, _POLLIN = 0, 6, 1
# Marks in the user_data of requests that the test hook replaced: it is a poll; the answer is injected; it is an error.
_POLLED, _INJECTED, _REFUSED = 1 << 62, 1 << 61, 1 << 60
_INJECTED_AT, _INJECTED_MASK = 32, (1 << 28) - 1

# The same numbers on x86-64 and on every architecture that is younger than io_uring.
_ENTER_CALL, _REGISTER_CALL = 426, 427
REGISTER_BUFFERS, UNREGISTER_BUFFERS = 0, 1
_TO_FIXED = 4 - 22  # READ and WRITE become READ_FIXED and WRITE_FIXED

# How a transfer ended.
WHOLE, FAILED, STALLED, BROKEN = range(4)
# The columns of a ring's `where`, of a report, and of a fault.
_SQ_HEAD, _SQ_TAIL, _CQ_HEAD, _CQ_TAIL, _SQ_MASK, _CQ_MASK = range(6)
_STATUS, _REQUEST, _ERRNO, _FLYING, _SUBMITTED, _MOVED, _REGISTERED = range(7)
_KIND, _AT, _VALUE, _LEFT = range(4)

# The test hook between ring and loop: rows of (kind, at, value, how many times), read and counted down by the loop.
# The first three are meant for the request that covers file byte `at`, or for any one where `at` is negative.
FAULT_SHORT = 1  # it ends short after `value` bytes (whole units of alignment are moved)
FAULT_ERROR = 2  # what lies before `at` moves, in whole units; a request of which nothing does ends with errno `value`
FAULT_STALL = 3  # it is withheld until descriptor `value` is readable
FAULT_ENTER = 4  # after `at` calls, io_uring_enter does nothing and fails with errno `value`
FAULT_TAKE = 5  # a submit takes at most `value` entries
FAULT_UNCANCELLABLE = 6  # what was withheld cannot be cancelled
NO_FAULTS: NDArray[np.int64] = np.zeros((0, 4), np.int64)

_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_errno_location = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))


@kernel
def all_inside(at: NDArray[np.int64], lengths: NDArray[np.int64], nbytes: int) -> bool:
    """Whether every extent lies in a buffer of so many bytes."""
    outside = 0
    for i in range(len(at)):
        outside += at[i] < 0 or lengths[i] < 0 or at[i] > nbytes - lengths[i]
    return bool(outside == 0)


@kernel
def _monotonic_ns(clock: NDArray[np.int64]) -> int:
    _clock_gettime(1, clock.ctypes.data)
    return clock[0] * 1_000_000_000 + clock[1]  # type: ignore[no-any-return]


@kernel
def _enter(ring_fd: int, submit: int, wait_for: int, argument: NDArray[np.int64], faults: NDArray[np.int64]) -> int:
    """io_uring_enter with a timeout: the entries taken, or minus the error number."""
    for i in range(len(faults)):
        if faults[i, _LEFT] > 0 and faults[i, _KIND] == FAULT_ENTER:
            if faults[i, _AT] > 0:
                faults[i, _AT] -= 1
            else:
                faults[i, _LEFT] -= 1
                return -faults[i, _VALUE]  # type: ignore[no-any-return]
        elif faults[i, _LEFT] > 0 and faults[i, _KIND] == FAULT_TAKE and submit > faults[i, _VALUE]:
            faults[i, _LEFT] -= 1
            submit, wait_for = faults[i, _VALUE], 0  # the kernel does not wait either after a partial submit
    taken = _syscall(_ENTER_CALL, ring_fd, submit, wait_for, 1 | 8, argument.ctypes.data, 24)  # GETEVENTS | EXT_ARG
    if taken < 0:
        return -np.int64(carray(_errno_location(), 1)[0])  # type: ignore[no-any-return]
    return taken  # type: ignore[no-any-return]


@kernel
def _replace(entry: NDArray[np.int64], offset: int, length: int, alignment: int, faults: NDArray[np.int64]) -> None:
    """Apply to a submission entry the first fault that is meant for it."""
    for i in range(len(faults)):
        kind, place, value = faults[i, _KIND], faults[i, _AT], faults[i, _VALUE]
        if faults[i, _LEFT] <= 0 or (place >= 0 and (place < offset or place >= offset + length)):
            continue
        before = (place - offset) // alignment * alignment
        if kind == FAULT_SHORT:
            value = min(value, length)
            entry[3] = value - value % alignment
            entry[4] |= _INJECTED | (value << _INJECTED_AT)
        elif kind == FAULT_ERROR and before > 0:
            entry[3] = before
            return
        elif kind == FAULT_ERROR:
            entry[:4] = 0
            entry[0] = _NOP
            entry[4] |= _INJECTED | _REFUSED | (value << _INJECTED_AT)
        elif kind == FAULT_STALL:
            entry[:4] = 0
            entry[0] = _POLL_ADD | (value << 32)
            entry[3] = _POLLIN << 32
            entry[4] |= _POLLED
        else:
            continue
        faults[i, _LEFT] -= 1
        return


@kernel
def move(
    ring_fd: int,
    words: NDArray[np.uint32],
    sqes: NDArray[np.int64],
    cqes: NDArray[np.int64],
    where: NDArray[np.int64],
    timespec: NDArray[np.int64],
    argument: NDArray[np.int64],
    op: int,
    file_fd: int,
    base: int,
    at: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    alignment: int,
    depth: int,
    wake: int,
    timeout_ns: int,
    register_bytes: int,
    faults: NDArray[np.int64],
    report: NDArray[np.int64],
) -> None:
    """Move every extent between memory (base + at) and the file, `depth` requests in flight, and say how it ended.

    Two counts carry the loop: `queued` entries are in the submission queue and not yet taken by the kernel, `flying`
    ones are taken and not yet reaped. Their sum is at most `depth`, at most the queue's size, and the loop ends only
    when it is 0, or when the device stalls.

    With `register_bytes`, that much memory from `base` on is registered for the time of the transfer: pinning it once
    is cheaper than once a request. It stays registered where requests stay in flight.
    """
    n = len(offsets)
    moved = np.zeros(n, np.int64)
    tries = np.zeros(n, np.int32)
    again = np.empty(depth, np.int64)
    clock = np.empty(2, np.int64)
    tail, head = np.int64(words[where[_SQ_TAIL]]), np.int64(words[where[_CQ_HEAD]])
    sent, repeats, queued, flying = 0, 0, 0, 0
    status, failed, failed_errno, submitted = WHOLE, -1, 0, 0
    blocked = False
    if register_bytes > 0:
        vector = np.array([base, register_bytes], np.int64)
        if _syscall(_REGISTER_CALL, ring_fd, REGISTER_BUFFERS, vector.ctypes.data, 1, 0, 0) == 0:
            op += _TO_FIXED
            report[_REGISTERED] = 1
    last = _monotonic_ns(clock)
    left = timeout_ns
    while True:
        if failed >= 0:  # start nothing new; only drain
            tail = (tail - queued) & 0xFFFFFFFF
            queued = 0
        while failed < 0 and queued + flying < depth and (repeats > 0 or sent < n):
            if repeats > 0:
                repeats -= 1
                which = again[repeats]
            else:
                which = sent
                sent += 1
                if lengths[which] == 0:
                    continue
            offset = offsets[which] + moved[which]
            length = min(lengths[which] - moved[which], _MAX_REQUEST_BYTES)
            entry = sqes[tail & where[_SQ_MASK]]
            entry[0] = op | (np.int64(file_fd) << 32)
            entry[1] = offset
            entry[2] = base + at[which] + moved[which]
            entry[3] = length
            entry[4] = which
            entry[5:] = 0
            if len(faults) > 0:
                _replace(entry, offset, length, alignment, faults)
            tail = (tail + 1) & 0xFFFFFFFF
            queued += 1
            submitted += 1
        words[where[_SQ_TAIL]] = np.uint32(tail)
        if queued + flying == 0:
            break

        if blocked:  # the kernel wants completions reaped, or memory, before it takes more
            submit, wait_for, wait_ns = 0, 1, min(left, _BLOCKED_WAIT_NS)
        else:
            submit, wait_for, wait_ns = queued, min(queued + flying, wake), left
        timespec[0], timespec[1] = wait_ns // 1_000_000_000, wait_ns % 1_000_000_000
        result = _enter(ring_fd, submit, wait_for, argument, faults)
        rest = (tail - np.int64(words[where[_SQ_HEAD]])) & 0xFFFFFFFF  # what the kernel did not take
        flying += queued - rest
        queued = rest
        blocked = result == -_EAGAIN or result == -_EBUSY or (result == 0 and submit > 0)

        end = np.int64(words[where[_CQ_TAIL]])
        reaped = head != end
        while head != end:
            tag = cqes[head & where[_CQ_MASK], 0]
            answer = np.int64(np.int32(cqes[head & where[_CQ_MASK], 1]))
            head = (head + 1) & 0xFFFFFFFF
            flying -= 1
            which = tag & 0xFFFFFFFF
            if tag & _POLLED:
                again[repeats] = which
                repeats += 1
                continue
            if tag & _INJECTED:
                answer = (tag >> _INJECTED_AT) & _INJECTED_MASK
                answer = -answer if tag & _REFUSED else answer
            if answer == -_EINTR or answer == -_EAGAIN:
                tries[which] += 1
                wrong = -answer if tries[which] >= _TRIES else -1
            elif answer <= 0:
                wrong = -answer
            else:
                reached = moved[which] + answer
                if reached < lengths[which]:
                    reached -= reached % alignment
                tries[which] = tries[which] + 1 if reached <= moved[which] else 0
                wrong = 0 if tries[which] >= _TRIES else -1
                moved[which] = max(reached, moved[which])
            if wrong >= 0:
                if failed < 0:
                    status, failed, failed_errno = FAILED, which, wrong
            elif moved[which] < lengths[which]:
                again[repeats] = which
                repeats += 1
        words[where[_CQ_HEAD]] = np.uint32(head)

        now = _monotonic_ns(clock)
        if reaped:
            last = now
        elif result == -_ETIME and now - last >= timeout_ns:
            status = STALLED if flying > 0 else FAILED
            failed_errno = failed_errno if failed >= 0 else (_ETIMEDOUT if flying > 0 else _EAGAIN)
            break
        left = max(timeout_ns - (now - last), _BLOCKED_WAIT_NS)
        if result < 0 and not blocked and result != -_EINTR and result != -_ETIME:
            status, failed_errno = BROKEN, -result
            break

    words[where[_SQ_TAIL]] = np.uint32((tail - queued) & 0xFFFFFFFF)
    if report[_REGISTERED] and flying == 0:
        _syscall(_REGISTER_CALL, ring_fd, UNREGISTER_BUFFERS, 0, 0, 0, 0)
    if status != WHOLE and failed < 0:
        failed = 0
        while failed < sent - 1 and moved[failed] >= lengths[failed]:
            failed += 1
    report[_STATUS], report[_REQUEST], report[_ERRNO] = status, failed, failed_errno
    report[_FLYING], report[_SUBMITTED] = flying, submitted
    report[_MOVED] = moved[failed] if status != WHOLE else 0


@kernel
def drain(
    ring_fd: int,
    words: NDArray[np.uint32],
    where: NDArray[np.int64],
    timespec: NDArray[np.int64],
    argument: NDArray[np.int64],
    flying: int,
    timeout_ns: int,
) -> int:
    """Reap until nothing is in flight or nothing came for the timeout; the number still in flight."""
    none = np.zeros((0, 4), np.int64)
    timespec[0], timespec[1] = timeout_ns // 1_000_000_000, timeout_ns % 1_000_000_000
    while flying > 0:
        result = _enter(ring_fd, 0, 1, argument, none)
        end = words[where[_CQ_TAIL]]
        came = (np.int64(end) - np.int64(words[where[_CQ_HEAD]])) & 0xFFFFFFFF
        words[where[_CQ_HEAD]] = end
        flying -= came
        if result < 0 and result != -_EINTR and came == 0:
            break
    return flying
