"""A table's location index in a file, written from the index's own memory and read straight into it.

All numbers little-endian; every section is whole blocks of 4096 bytes, filled up with zeros:

    header          4096 bytes, see below
    chunk checks    uint32 [n_chunks]: CRC-32 of each chunk of the sections that follow, in their order
    segments        n_segments bits, lowest first: 1 where the generation refers to the segment
    slots           int32 or int64 [n_rows]: row -> slot, -1: never written
    record checks   uint32 [n_rows]

A chunk is 1 MiB of one section, the last one of a section what is left, the filling zeros included. The header:

    byte  bytes  what
       0      8  b"DSAINDEX"
       8      4  format version, 1
      12      4  bytes of a slot, 4 or 8
      16     16  UUID of the directory
      32      8  generation that wrote the file
      40      8  n_rows
      48      8  n_segments
      56      8  bytes of a chunk, 1048576
      64      8  n_chunks
      72     16  BLAKE2b of the table's name (UTF-8)
      88      4  CRC-32 of the section of chunk checks
      92   4000  zeros
    4092      4  CRC-32 of the 4092 bytes before

The last number is the file's check in the manifest: through the chunk checks it covers every byte of the file.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa.errors import CorruptError, DeviceError, FormatError, MismatchError
from dsa.io import memory
from dsa.io.backends.base import Backend, Bytes, Extents, File
from dsa.io.manifest import BLOCK_BYTES, TableState

MAGIC = b"DSAINDEX"
FORMAT_VERSION = 1
CHUNK_BYTES = 1 << 20
_HEADER = struct.Struct("<8sII16sQQQQQ16sI")
_CHECK = struct.Struct("<I")
_CHUNKS_BETWEEN_YIELDS = 8


@dataclass(frozen=True)
class Header:
    """Whose index it is, and how large."""

    uuid: str
    table: str
    generation: int
    n_rows: int
    slot_bytes: int
    n_segments: int

    def sections(self) -> tuple[Section, Section, Section, Section]:
        """Chunk checks, segments, slots, record checks: where each lies."""
        sizes = (-(-self.n_segments // 8), self.n_rows * self.slot_bytes, self.n_rows * 4)
        n_chunks = sum(Section(0, size, 0).n_chunks for size in sizes)
        sections = [Section(BLOCK_BYTES, n_chunks * 4, 0)]
        first_chunk = 0
        for size in sizes:
            sections.append(Section(sections[-1].end, size, first_chunk))
            first_chunk += sections[-1].n_chunks
        return sections[0], sections[1], sections[2], sections[3]


@dataclass(frozen=True)
class Section:
    """A part of the file: its offset, its bytes without and (`padded`) with the zeros that fill the last block."""

    offset: int
    nbytes: int
    first_chunk: int

    @property
    def padded(self) -> int:
        return -(-self.nbytes // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def end(self) -> int:
        return self.offset + self.padded

    @property
    def n_chunks(self) -> int:
        return -(-self.padded // CHUNK_BYTES)

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """The number, begin in the section and bytes of each chunk."""
        for i in range(self.n_chunks):
            begin = i * CHUNK_BYTES
            yield self.first_chunk + i, begin, min(CHUNK_BYTES, self.padded - begin)


def _encode(header: Header, n_chunks: int, chunk_check: int) -> bytes:
    head = _HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        header.slot_bytes,
        uuid.UUID(header.uuid).bytes,
        header.generation,
        header.n_rows,
        header.n_segments,
        CHUNK_BYTES,
        n_chunks,
        _name_hash(header.table),
        chunk_check,
    ).ljust(BLOCK_BYTES - _CHECK.size, b"\0")
    return head + _CHECK.pack(zlib.crc32(head))


def _name_hash(table: str) -> bytes:
    return blake2b(table.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _bytes_of(array: NDArray[Any]) -> Bytes:
    return array.reshape(-1).view(np.uint8)


async def write(
    backend: Backend,
    path: Path,
    header: Header,
    segments: NDArray[np.bool_],
    slots: NDArray[Any],
    checks: NDArray[np.uint32],
) -> int:
    """Write and sync an index file (not its directory); the arrays must not change meanwhile. Returns its check.

    Args:
        segments: bool [n_segments], those that the generation refers to.
        slots: int32 or int64 [n_rows], contiguous.
        checks: uint32 [n_rows], contiguous.

    Raises:
        DeviceError: the file could not be written.
    """
    table, *sections = header.sections()
    chunk_checks = np.zeros(table.nbytes // 4, np.uint32)
    parts: list[Bytes] = []
    packed_segments: Bytes = np.packbits(segments, bitorder="little")
    payloads = [packed_segments, _bytes_of(slots), _bytes_of(checks)]
    for section, payload in zip(sections, payloads, strict=True):
        if payload.nbytes != section.nbytes:
            raise ValueError(f"a section of {section.nbytes} bytes was given {payload.nbytes}")
        padding = np.zeros(section.padded - section.nbytes, np.uint8)
        for number, begin, length in section.chunks():
            check = zlib.crc32(payload[begin : begin + length].data)
            if begin + length == section.padded:
                check = zlib.crc32(padding.data, check)
            chunk_checks[number] = check
            if number % _CHUNKS_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
        parts += [payload, padding]
    packed = np.zeros(table.padded, np.uint8)
    packed[: table.nbytes] = _bytes_of(chunk_checks)
    head = _encode(header, len(chunk_checks), zlib.crc32(packed.data))
    parts = [part for part in (np.frombuffer(head, np.uint8), packed, *parts) if part.nbytes]
    await backend.write_whole(path, parts)
    return int(_CHECK.unpack_from(head, BLOCK_BYTES - _CHECK.size)[0])


@dataclass(frozen=True)
class DamagedChunk:
    """Elements `first` to `first + count` of a section (bytes of bits, for the segments) are not what was written."""

    error: CorruptError
    first: int
    count: int


class Reader:
    """An open index file whose header and chunk checks have been verified; close it after use.

    Every method raises CorruptError (path and offset) where bytes do not match their check, and DeviceError where the
    device fails. Given a list `damaged`, what does not match is put there instead, and its elements mean nothing.
    """

    def __init__(self, backend: Backend, file: File, header: Header, chunk_checks: NDArray[np.uint32]) -> None:
        self.header = header
        self._backend = backend
        self._file = file
        self._chunk_checks = chunk_checks
        self._sections = header.sections()
        largest = max(section.padded for section in self._sections)
        self._scratch = memory.allocate(min(largest, CHUNK_BYTES), np.uint8)

    @classmethod
    async def of_table(cls, backend: Backend, path: Path, directory: str, state: TableState) -> Reader:
        """Open the index file of a table in a generation, which is as long as the manifest says.

        Raises:
            StateFileError, DeviceError: as `open`; CorruptError also where the length differs.
        """
        reader = await cls.open(backend, path, directory, state.table, state.index_check)
        if reader.header.n_segments != state.n_segments:
            reader.close()
            raise CorruptError(
                f"{path}: {reader.header.n_segments} segments, the manifest says {state.n_segments}; at byte 48"
            )
        return reader

    @classmethod
    async def open(cls, backend: Backend, path: Path, directory: str, table: str, check: int) -> Reader:
        """Open the index file that the manifest means.

        Args:
            directory: UUID of the state directory.
            table: the table's name.
            check: the file's check in the manifest.

        Raises:
            FormatError: not an index file, or of another format version.
            CorruptError: missing, cut short or damaged.
            MismatchError: it belongs to another directory or table.
            DeviceError: the device failed.
        """
        try:
            file = backend.open(path, writable=False)
        except DeviceError as error:
            if error.errno == errno.ENOENT:
                raise CorruptError(f"{path}: the index file is missing, though the manifest refers to it") from error
            raise
        try:
            header, chunk_checks = await _read_head(backend, file, directory, table, check)
            return cls(backend, file, header, chunk_checks)
        except BaseException:
            backend.close(file)
            raise

    def close(self) -> None:
        self._backend.close(self._file)

    async def segments(self, damaged: list[DamagedChunk] | None = None) -> NDArray[np.bool_]:
        """bool [n_segments]: those that the generation refers to."""
        packed = np.zeros(self._sections[1].nbytes, np.uint8)
        await self._read(self._sections[1], packed, np.dtype(np.uint8), damaged)
        return np.unpackbits(packed, count=self.header.n_segments, bitorder="little").astype(np.bool_)

    async def index(
        self, slots: NDArray[Any], checks: NDArray[np.uint32], damaged: list[DamagedChunk] | None = None
    ) -> None:
        """Fill the arrays (contiguous, at least `n_rows` long); rows beyond the file's are set to never written."""
        n_rows = self.header.n_rows
        if len(slots) < n_rows or len(checks) < n_rows:
            raise MismatchError(f"{self._file.path}: {n_rows} rows, the table has {min(len(slots), len(checks))}")
        await self._read(self._sections[2], slots[:n_rows], np.dtype(f"<i{self.header.slot_bytes}"), damaged)
        await self._read(self._sections[3], checks[:n_rows], np.dtype("<u4"), damaged)
        slots[n_rows:] = -1
        checks[n_rows:] = 0

    async def _read(
        self, section: Section, out: NDArray[Any], kind: np.dtype[Any], damaged: list[DamagedChunk] | None
    ) -> None:
        """Read a section of elements of `kind`, chunk by chunk, without a detour where memory and types allow it."""
        raw = _bytes_of(out) if out.dtype == kind else None
        for number, begin, length in section.chunks():
            straight = raw is not None and begin + length <= section.nbytes
            place = raw[begin : begin + length] if raw is not None and straight else self._scratch[:length]
            if place.ctypes.data % self._file.alignment:
                straight, place = False, self._scratch[:length]
            found = await _read_range(self._backend, self._file, section.offset + begin, place)
            stored = int(self._chunk_checks[number])
            if found != stored:
                error = CorruptError(
                    f"{self._file.path}: the index does not match its check (stored {stored:#010x}, "
                    f"computed {found:#010x}) at byte {section.offset + begin}, {length} bytes"
                )
                if damaged is None:
                    raise error
                damaged.append(DamagedChunk(error, begin // kind.itemsize, length // kind.itemsize))
            if straight:
                continue
            values = place[: min(length, section.nbytes - begin)].view(kind)
            first = begin // kind.itemsize
            if out.dtype.itemsize < kind.itemsize and len(values) and values.max() > np.iinfo(out.dtype).max:
                raise MismatchError(f"{self._file.path}: slots up to {values.max()} do not fit {out.dtype}")
            out[first : first + len(values)] = values


async def _read_range(backend: Backend, file: File, offset: int, place: Bytes) -> int:
    """Fill `place` from the file; the CRC-32 of it, computed where the backend has time for it."""
    found: list[int] = []
    extent = Extents(*(np.array([value], np.int64) for value in (offset, place.nbytes, 0)))
    await backend.read(file, extent, place, lambda: found.append(zlib.crc32(place.data)))
    return found[0]


async def _read_head(
    backend: Backend, file: File, directory: str, table: str, check: int
) -> tuple[Header, NDArray[np.uint32]]:
    path = file.path
    size = os.fstat(file.fd).st_size
    if size < BLOCK_BYTES:
        raise CorruptError(f"{path}: {size} bytes are less than a header of {BLOCK_BYTES}, damaged at byte {size}")
    block = memory.allocate(BLOCK_BYTES, np.uint8)
    await _read_range(backend, file, 0, block)
    raw = block.tobytes()
    if raw[: len(MAGIC)] != MAGIC:
        raise FormatError(f"{path}: not an index file of this program: byte 0 should begin {MAGIC!r}, is {raw[:8]!r}")
    stored, found = _CHECK.unpack(raw[-_CHECK.size :])[0], zlib.crc32(raw[: -_CHECK.size])
    if stored != found:
        raise CorruptError(
            f"{path}: the header does not match its check (stored {stored:#010x}, computed {found:#010x}) at byte 0"
        )
    fields = _HEADER.unpack_from(raw)
    _, version, slot_bytes, owner, generation, n_rows, n_segments, chunk_bytes, n_chunks, name, table_check = fields
    if version != FORMAT_VERSION:
        raise FormatError(f"{path}: format version {version}, this program reads version {FORMAT_VERSION}")
    if owner != uuid.UUID(directory).bytes:
        raise MismatchError(f"{path}: belongs to directory {uuid.UUID(bytes=owner)}, not to {directory}")
    if name != _name_hash(table):
        raise MismatchError(f"{path}: is the index of another table than {table!r} (hash of its name {name.hex()})")
    if stored != check:
        raise CorruptError(
            f"{path}: not the file that the manifest means: check {stored:#010x}, not {check:#010x}, at byte 4092"
        )
    header = Header(directory, table, generation, n_rows, slot_bytes, n_segments)
    if slot_bytes not in (4, 8) or chunk_bytes != CHUNK_BYTES or header.sections()[0].nbytes != n_chunks * 4:
        raise FormatError(f"{path}: slots of {slot_bytes} bytes, {n_chunks} chunks of {chunk_bytes} are not known")
    section, *_, last = header.sections()
    if size != last.end:
        raise CorruptError(f"{path}: {size} bytes long, should be {last.end}, damaged at byte {min(size, last.end)}")
    packed = memory.allocate(section.padded, np.uint8)
    found = await _read_range(backend, file, section.offset, packed) if packed.nbytes else zlib.crc32(b"")
    if found != table_check:
        raise CorruptError(
            f"{path}: the chunk checks do not match theirs (stored {table_check:#010x}, computed {found:#010x}) "
            f"at byte {section.offset}, {section.padded} bytes"
        )
    return header, packed[: section.nbytes].view("<u4")
