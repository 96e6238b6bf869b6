"""What the bytes mean: a record's fields, a segment's header and slots, the check of a record. Pure.

The byte tables are in DESIGN.md beside this file.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsa.errors import CorruptError, FormatError
from dsa.io.compile import kernel

BLOCK_BYTES = 4096
SEGMENT_VERSION = 1
MIN_SEGMENT_BYTES = 16 * 1024
MAX_SEGMENT_BYTES = 4 * 1024 * 1024
VOID_ROW = -1

_MAGIC = b"DSASEG\r\n"
# magic, version, record bytes, slots, records present, segment number, table identity, row width, check of the rest
_HEAD = struct.Struct("<8sIIIIQQII")
HEAD_BYTES = 64
_SEGMENTS_OF_A_TABLE = 12
_SEGMENTS_OF_A_CACHE, _FEW_SEGMENTS_OF_A_CACHE, _GOOD_SEGMENT_BYTES = 16, 6, 1 << 20


def round_up(value: int, step: int) -> int:
    """The least multiple of `step` that is not below `value`."""
    return -(-value // step) * step


@dataclass(frozen=True)
class RecordLayout:
    """A row's stored bytes: `fields` of `width` numbers of `dtype` side by side, padded to a multiple of 8 bytes."""

    width: int
    dtype: str
    fields: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    @property
    def field_bytes(self) -> int:
        """Bytes of one field of one record."""
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def record_bytes(self) -> int:
        """Bytes of one record, a multiple of 8."""
        return round_up(len(self.fields) * self.field_bytes, 8)


@dataclass(frozen=True)
class SegmentLayout:
    """A segment: a header that names the rows, then `slots` records; all of it a multiple of 4,096 bytes."""

    record_bytes: int
    slots: int
    row_bytes: int
    segment_bytes: int

    @property
    def header_bytes(self) -> int:
        """Bytes before the first record."""
        return _header_bytes(self.slots, self.row_bytes)

    def used_bytes(self, records: int) -> int:
        """Bytes of a segment that holds so many records, in whole blocks."""
        return round_up(self.header_bytes + records * self.record_bytes, BLOCK_BYTES)

    def offsets(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Byte offsets in the file of the records in the given slots of the log, int64 [n]."""
        segment, slot = np.divmod(slots, self.slots)
        return np.asarray(segment * self.segment_bytes + self.header_bytes + slot * self.record_bytes)


def _header_bytes(slots: int, row_bytes: int) -> int:
    return round_up(HEAD_BYTES + slots * row_bytes, BLOCK_BYTES)


def row_bytes_for(n_rows: int) -> int:
    """Bytes of a row number in a segment header: 4 where all rows of the table fit, else 8."""
    return 4 if n_rows < 2**31 else 8


def segment_layout(record_bytes: int, n_rows: int, segment_bytes: int) -> SegmentLayout:
    """The segment of at least `segment_bytes` for records of that size; it grows where not even one record fits."""
    row_bytes = row_bytes_for(n_rows)
    size = max(round_up(segment_bytes, BLOCK_BYTES), _header_bytes(1, row_bytes) + round_up(record_bytes, BLOCK_BYTES))
    slots = (size - HEAD_BYTES) // (record_bytes + row_bytes)
    while _header_bytes(slots, row_bytes) + slots * record_bytes > size:
        slots -= 1
    return SegmentLayout(record_bytes, slots, row_bytes, size)


def choose_segment_bytes(record_bytes: int, n_rows: int, cache_bytes: int) -> int:
    """A segment size that a small table can clean by, and that a small cache can fill with dirty frames.

    A segment costs the same however large it is, until its bytes cost more: up to that size few of them may make up a
    small cache.
    """
    of_cache = max(
        cache_bytes // _SEGMENTS_OF_A_CACHE, min(cache_bytes // _FEW_SEGMENTS_OF_A_CACHE, _GOOD_SEGMENT_BYTES)
    )
    goal = min(n_rows * record_bytes // _SEGMENTS_OF_A_TABLE, of_cache)
    goal = 1 << max(goal, 1).bit_length() - 1
    return max(MIN_SEGMENT_BYTES, min(goal, MAX_SEGMENT_BYTES))


def write_header(
    buffer: NDArray[np.uint8], layout: SegmentLayout, segment: int, table_identity: int, rows: NDArray[np.int64]
) -> None:
    """Put the header of a segment that holds records of `rows` (VOID_ROW: a slot without a record) into its buffer."""
    header = buffer[: layout.header_bytes]
    header[:] = 0
    kind = np.int32 if layout.row_bytes == 4 else np.int64
    header[HEAD_BYTES : HEAD_BYTES + len(rows) * layout.row_bytes] = rows.astype(kind).view(np.uint8)
    fields = (layout.record_bytes, layout.slots, len(rows), segment, table_identity, layout.row_bytes)
    head = _HEAD.pack(_MAGIC, SEGMENT_VERSION, *fields, 0)
    check = zlib.crc32(header[HEAD_BYTES:].data, zlib.crc32(head))
    head = _HEAD.pack(_MAGIC, SEGMENT_VERSION, *fields, check)
    header[: _HEAD.size] = np.frombuffer(head, np.uint8)


def read_header(
    buffer: NDArray[np.uint8], layout: SegmentLayout, segment: int, table_identity: int, path: Path
) -> NDArray[np.int64]:
    """The rows that a segment's header names, int64 [records].

    Raises:
        FormatError: not a segment of ours, or of another version.
        CorruptError: the header's check is wrong, or it is another segment's or table's header.
    """
    place = f"{path}, segment {segment} at byte {segment * layout.segment_bytes}"
    header = buffer[: layout.header_bytes]
    magic, version, record_bytes, slots, count, number, identity, row_bytes, check = _HEAD.unpack_from(header.data)
    if magic != _MAGIC:
        raise CorruptError(f"{place}: no segment header there (found {bytes(magic)!r})")
    if version != SEGMENT_VERSION:
        raise FormatError(f"{place}: segment version {version}, this program reads version {SEGMENT_VERSION}")
    head = _HEAD.pack(magic, version, record_bytes, slots, count, number, identity, row_bytes, 0)
    computed = zlib.crc32(header[HEAD_BYTES:].data, zlib.crc32(head))
    if check != computed or header[_HEAD.size : HEAD_BYTES].any():
        raise CorruptError(f"{place}: the header's check is {check:08x} but its bytes give {computed:08x}")
    found = (record_bytes, slots, row_bytes, number, identity)
    expected = (layout.record_bytes, layout.slots, layout.row_bytes, segment, table_identity)
    if found != expected or count > slots:
        raise CorruptError(
            f"{place}: the header belongs elsewhere: (record bytes, slots, row bytes, segment, table) are {found}, "
            f"expected {expected}; it names {count} records"
        )
    kind = np.int32 if row_bytes == 4 else np.int64
    rows = header[HEAD_BYTES : HEAD_BYTES + count * row_bytes].view(kind)
    return rows.astype(np.int64)


def table_identity(uuid_hex: str, name: str) -> int:
    """A number that ties a table's segments to one directory and one name."""
    low = zlib.crc32(name.encode(), zlib.crc32(uuid_hex.encode()))
    high = zlib.crc32(uuid_hex.encode(), zlib.crc32(name.encode()))
    return high << 32 | low


# The check of a record: four lanes of multiply-rotate rounds over its 8-byte words, seeded with the row number, then
# folded to 32 bits. Each round is a bijection of the word for a given lane, so a change within one word always changes
# its lane. The constants are odd 64-bit numbers without structure (from the binary expansion of pi, last bit set).
_K1 = np.uint64(0x243F6A8885A308D3)
_K2 = np.uint64(0x13198A2E03707345)
_K3 = np.uint64(0xA4093822299F31D1)
_K4 = np.uint64(0x082EFA98EC4E6C89)
_R31, _R33 = np.uint64(31), np.uint64(33)
_R29, _R35 = np.uint64(29), np.uint64(35)
_R32 = np.uint64(32)
_ZERO64 = np.uint64(0)


@kernel
def record_check(words: NDArray[np.uint64], row: int) -> np.uint32:
    """The 32-bit check of one record (its bytes as uint64 words) of the given row."""
    seed = np.uint64(row) * _K3 + _K4
    a = seed + _K1
    b = seed ^ _K2
    c = seed + _K3
    d = seed ^ _K4
    n = len(words)
    i = 0
    while i + 4 <= n:
        a = (a ^ words[i]) * _K1
        a = (a << _R31) | (a >> _R33)
        b = (b ^ words[i + 1]) * _K2
        b = (b << _R31) | (b >> _R33)
        c = (c ^ words[i + 2]) * _K3
        c = (c << _R31) | (c >> _R33)
        d = (d ^ words[i + 3]) * _K4
        d = (d << _R31) | (d >> _R33)
        i += 4
    while i < n:
        a = (a ^ words[i]) * _K1
        a = (a << _R31) | (a >> _R33)
        i += 1
    h = (a ^ (b << _R29 | b >> _R35)) * _K2
    h = (h ^ (h >> _R32) ^ c) * _K3
    h = (h ^ (h >> _R29) ^ d) * _K1
    h ^= h >> _R32
    h *= _K2
    h ^= h >> _R29
    check: np.uint32 = np.uint32(h >> _R32)
    return check


@kernel
def checked_scatter(
    words: NDArray[np.uint64],
    positions: NDArray[np.int64],
    record_words: int,
    rows: NDArray[np.int64],
    checks: NDArray[np.uint32],
    frames: NDArray[np.uint64],
    frame_numbers: NDArray[np.int32],
) -> int:
    """Copy records (8-byte words, at word `positions`) to their frames; -1, or the first whose check is wrong."""
    for i in range(len(rows)):
        record = words[positions[i] : positions[i] + record_words]
        if record_check(record, rows[i]) != checks[i]:
            return i
        frame = frames[frame_numbers[i]]
        for j in range(record_words):
            frame[j] = record[j]
    return -1


@kernel
def checked_gather(
    frames: NDArray[np.uint64],
    frame_numbers: NDArray[np.int32],
    rows: NDArray[np.int64],
    records: NDArray[np.uint64],
    checks: NDArray[np.uint32],
) -> None:
    """Copy frames into consecutive records of a segment buffer (uint64 [n, words]) and compute their checks."""
    words = records.shape[1]
    for i in range(len(rows)):
        frame = frames[frame_numbers[i]]
        record = records[i]
        for j in range(words):
            record[j] = frame[j]
        checks[i] = record_check(record, rows[i])


@kernel
def zero_frames(frames: NDArray[np.uint64], frame_numbers: NDArray[np.int32]) -> None:
    """Make the frames all zero: what a record is that was never written."""
    for i in range(len(frame_numbers)):
        frames[frame_numbers[i]][:] = _ZERO64
