"""Which byte ranges of a file to read for some records, and where each record then lies in the buffer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsa.io.compile import kernel


@dataclass(frozen=True)
class Extents:
    """Byte ranges of one file, in ascending order, and where each goes in a buffer.

    Args:
        offsets, lengths: int64 [n], bytes in the file.
        at: int64 [n], the byte of the buffer where the range begins.
    """

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    at: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True)
class Plan:
    """What to read for some records.

    Args:
        extents: the requests.
        positions: int64 [n], the byte of the buffer where each record begins once the extents have been read.
        buffer_bytes: the size that the buffer must have.
    """

    extents: Extents
    positions: NDArray[np.int64]
    buffer_bytes: int


@kernel
def _plan(
    offsets: NDArray[np.int64],
    record_bytes: int,
    gap: int,
    longest: int,
    alignment: int,
    fill: bool,
    positions: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    """Cut the file into requests; their number, or -1 where the offsets do not ascend from 0.

    The requests lie in the buffer one behind the other, so that a record that two of them share is whole there.
    """
    count = 0
    buffer_at = 0  # where the open request begins in the buffer
    start = 0  # the open request is the file's [start, end)
    end = 0
    for i in range(len(offsets)):
        offset = offsets[i]
        if offset < 0 or (i > 0 and offset < offsets[i - 1]):
            return -1
        low = offset // alignment * alignment
        high = (offset + record_bytes + alignment - 1) // alignment * alignment
        # A cut that falls into the gap between two records may as well leave the gap unread.
        if i == 0 or low - end > gap or (low > end and low - start >= longest):
            if i > 0:
                if fill:
                    out[0, count], out[1, count], out[2, count] = start, end - start, buffer_at
                count += 1
            buffer_at += end - start
            start, end = low, high
        elif high > end:
            end = high
        if fill:
            # A record may begin before the open request: then in the one cut off it, which lies right before it.
            positions[i] = buffer_at + offset - start
        while end - start > longest:
            if fill:
                out[0, count], out[1, count], out[2, count] = start, longest, buffer_at
            count += 1
            buffer_at += longest
            start += longest
    if len(offsets) > 0:
        if fill:
            out[0, count], out[1, count], out[2, count] = start, end - start, buffer_at
        count += 1
    return count


def plan(
    offsets: NDArray[np.int64],
    record_bytes: int,
    *,
    merge_gap_bytes: int,
    max_request_bytes: int,
    alignment: int,
) -> Plan:
    """The requests that read the given records, no byte twice.

    Records are rounded outward to the alignment, joined where at most `merge_gap_bytes` then lie between them, and
    cut at `max_request_bytes`. The last request may so reach beyond the last record, up to the next multiple of
    `alignment`: the file must be that long.

    Args:
        offsets: int64 [n], ascending (equal ones allowed), the byte of the file where each record begins.
        record_bytes: the size of every record, at least 1.
        merge_gap_bytes: the longest stretch between two records that is read rather than skipped.
        max_request_bytes: the longest request (rounded down to the alignment, but never below it).
        alignment: offsets and lengths of the requests, and their places in the buffer, are multiples of it.

    Raises:
        ValueError: the offsets do not ascend or one is negative, or a size is out of range.
    """
    if record_bytes < 1 or alignment < 1 or max_request_bytes < 1 or merge_gap_bytes < 0:
        raise ValueError(
            f"record_bytes {record_bytes}, alignment {alignment} and max_request_bytes {max_request_bytes} must be at "
            f"least 1, merge_gap_bytes {merge_gap_bytes} at least 0"
        )
    starts = np.ascontiguousarray(offsets, np.int64)
    longest = max(max_request_bytes // alignment, 1) * alignment
    positions = np.empty(len(starts), np.int64)
    out = np.empty((3, 0), np.int64)
    count = _plan(starts, record_bytes, merge_gap_bytes, longest, alignment, False, positions, out)
    if count < 0:
        raise ValueError("offsets of records must ascend and not be negative")
    out = np.empty((3, count), np.int64)
    _plan(starts, record_bytes, merge_gap_bytes, longest, alignment, True, positions, out)
    buffer_bytes = int(out[1].sum())
    return Plan(Extents(out[0], out[1], out[2]), positions, buffer_bytes)


@kernel
def _in_place(offsets: NDArray[np.int64], lengths: NDArray[np.int64], at: NDArray[np.int64], buffer_bytes: int) -> bool:
    """Whether no extent is empty, all lie in file and buffer, and they follow each other in the buffer."""
    end = np.int64(0)
    for i in range(len(at)):
        if offsets[i] < 0 or lengths[i] <= 0 or at[i] < end or at[i] > buffer_bytes - lengths[i]:
            return False
        end = at[i] + lengths[i]
    return True


def check_placement(extents: Extents, buffer_bytes: int) -> Extents:
    """The extents without empty ones, as contiguous int64 arrays, when all lie in the file and apart in the buffer.

    Raises:
        ValueError: the arrays differ in length, a place is negative or outside of the buffer, or two extents overlap
            in the buffer; the message names the first such extent.
    """
    offsets, lengths, at = (np.ascontiguousarray(a, np.int64) for a in (extents.offsets, extents.lengths, extents.at))
    if not len(offsets) == len(lengths) == len(at):
        raise ValueError(f"{len(offsets)} offsets, {len(lengths)} lengths and {len(at)} places of extents")
    if _in_place(offsets, lengths, at, buffer_bytes):
        return Extents(offsets, lengths, at)
    bad = (offsets < 0) | (lengths < 0) | (at < 0) | (at > buffer_bytes - lengths)
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(
            f"extent {i} (offset {offsets[i]}, length {lengths[i]}, at {at[i]}) does not fit a buffer of "
            f"{buffer_bytes} bytes"
        )
    if len(lengths) and not lengths.all():
        some = lengths > 0
        offsets, lengths, at = offsets[some], lengths[some], at[some]
    order = np.argsort(at, kind="stable")
    begins, ends = at[order], at[order] + lengths[order]
    over = ends[:-1] > begins[1:]
    if over.any():
        i = int(np.argmax(over))
        raise ValueError(
            f"two extents overlap in the buffer: one ends at byte {ends[i]}, the next begins at {begins[i + 1]}"
        )
    return Extents(offsets, lengths, at)


@kernel
def _all_aligned(
    offsets: NDArray[np.int64], lengths: NDArray[np.int64], at: NDArray[np.int64], address: int, alignment: int
) -> bool:
    for i in range(len(at)):
        if offsets[i] % alignment or lengths[i] % alignment or (at[i] + address) % alignment:
            return False
    return True


def aligned(extents: Extents, address: int, alignment: int) -> bool:
    """Whether all extents are whole multiples of the alignment, in the file and in a buffer at that address."""
    return bool(_all_aligned(extents.offsets, extents.lengths, extents.at, address, alignment))
