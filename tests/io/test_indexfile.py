"""The index file: what is written is read again, whatever the widths, and each flipped byte is found."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from medium import PlainBackend

from dsa.errors import CorruptError, FormatError, MismatchError, StateFileError
from dsa.io import indexfile, memory
from dsa.io.backends.base import Backend
from dsa.io.indexfile import CHUNK_BYTES, Header, Reader

UUID = "12345678-1234-5678-1234-567812345678"
OTHER = "00000000-1234-5678-1234-567812345678"


class AlignedBackend(PlainBackend):
    """Refuses what a file that is read past the page cache would refuse; counts what is read into small buffers."""

    def open(self, path, *, create=False, writable=True, direct=False):
        file = super().open(path, create=create, writable=writable)
        file.alignment = 4096
        return file

    async def read(self, file, extents, buffer, then=None):
        places = (*extents.offsets, *extents.lengths, *(buffer.ctypes.data + extents.at))
        if any(int(place) % 4096 for place in places):
            raise OSError(22, "not aligned")
        await super().read(file, extents, buffer, then)


@pytest.fixture(params=["plain", "aligned"])
def backend(request) -> Backend:
    return PlainBackend() if request.param == "plain" else AlignedBackend()


def index(n_rows: int, slot_type=np.int32, seed: int = 0):
    random = np.random.default_rng(seed)
    slots = memory.allocate(n_rows, slot_type)
    slots[:] = random.integers(-1, np.iinfo(slot_type).max, n_rows)
    checks = memory.allocate(n_rows, np.uint32)
    checks[:] = random.integers(0, 1 << 32, n_rows, np.uint32)
    return slots, checks


def header(n_rows: int, slot_bytes: int = 4, n_segments: int = 11) -> Header:
    return Header(UUID, "node_emb.weight", 3, n_rows, slot_bytes, n_segments)


async def put(backend, path, slots, checks, n_segments: int = 11):
    segments = np.arange(n_segments) % 3 == 0
    head = header(len(slots), slots.dtype.itemsize, n_segments)
    return await indexfile.write(backend, path, head, segments, slots, checks), segments


async def get(backend, path, check, slots_out, checks_out, directory=UUID, table="node_emb.weight"):
    reader = await Reader.open(backend, path, directory, table, check)
    try:
        segments = await reader.segments()
        await reader.index(slots_out, checks_out)
    finally:
        reader.close()
    return reader.header, segments


def put_byte(path, place: int, value: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(bytes([value]))


chunk_rows = CHUNK_BYTES // 4
sizes = st.sampled_from([0, 1, 2, 1023, 1024, 1025, chunk_rows - 1, chunk_rows, chunk_rows + 1, 2 * chunk_rows + 77])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes, st.sampled_from([np.int32, np.int64]), st.sampled_from([np.int32, np.int64]), st.integers(0, 5))
async def test_what_is_written_is_read_again(tmp_path, backend, n_rows, stored, wanted, more_rows):
    slots, checks = index(n_rows, np.int32)
    slots = slots.astype(stored)
    check, segments = await put(backend, tmp_path / "x.idx", slots, checks)
    slots_out = np.full(n_rows + more_rows, 5, wanted)
    checks_out = np.full(n_rows + more_rows, 5, np.uint32)
    found, found_segments = await get(backend, tmp_path / "x.idx", check, slots_out, checks_out)
    assert found == header(n_rows, slots.dtype.itemsize)
    np.testing.assert_array_equal(slots_out, np.r_[slots, np.full(more_rows, -1)])
    np.testing.assert_array_equal(checks_out, np.r_[checks, np.zeros(more_rows)])
    np.testing.assert_array_equal(found_segments, segments)


@pytest.mark.parametrize("n_rows", [3, chunk_rows + 900])
async def test_every_flipped_byte_is_found_at_its_place(tmp_path, n_rows):
    """Of a small file every byte but filling, and every seventh of that; of a large one the ends of its chunks."""
    backend, path = PlainBackend(), tmp_path / "x.idx"
    slots, checks = index(n_rows)
    check, _ = await put(backend, path, slots, checks)
    good = path.read_bytes()
    edges = [s.offset + at for s in header(n_rows).sections() for c in s.chunks() for at in (c[1], c[1] + c[2] - 1)]
    places = [0, 4095, *edges]
    if n_rows == 3:
        places += [at for at, byte in enumerate(good) if byte or at % 4096 < 128 or at % 7 == 0]
    for place in places:
        put_byte(path, place, good[place] ^ 0x10)
        with pytest.raises(StateFileError, match="byte") as caught:
            await get(backend, path, check, slots, checks)
        assert str(path) in str(caught.value)
        put_byte(path, place, good[place])
    await get(backend, path, check, slots, checks)


async def test_a_damaged_chunk_is_named_by_its_offset(tmp_path, backend):
    slots, checks = index(3 * chunk_rows)
    check, _ = await put(backend, tmp_path / "x.idx", slots, checks)
    where = header(3 * chunk_rows).sections()[2].offset + CHUNK_BYTES
    put_byte(tmp_path / "x.idx", where + 12345, (tmp_path / "x.idx").read_bytes()[where + 12345] ^ 1)
    with pytest.raises(CorruptError, match=f"at byte {where}, {CHUNK_BYTES} bytes"):
        await get(backend, tmp_path / "x.idx", check, slots, checks)


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 8192, -4096, -1])
async def test_another_length_is_damage(tmp_path, length):
    backend, path = PlainBackend(), tmp_path / "x.idx"
    slots, checks = index(2000)
    check, _ = await put(backend, path, slots, checks)
    good = path.read_bytes()
    for damaged in (good[:length], good + bytes(max(length, 1))):
        path.write_bytes(damaged)
        with pytest.raises(CorruptError, match=r"damaged at byte \d+"):
            await get(backend, path, check, slots, checks)


async def test_another_file_in_its_place_is_refused_with_both_values(tmp_path):
    backend, path = PlainBackend(), tmp_path / "x.idx"
    slots, checks = index(10)
    check, _ = await put(backend, path, slots, checks)
    with pytest.raises(MismatchError, match=f"{UUID}, not to {OTHER}"):
        await get(backend, path, check, slots, checks, directory=OTHER)
    with pytest.raises(MismatchError, match="'rel'"):
        await get(backend, path, check, slots, checks, table="rel")
    with pytest.raises(CorruptError, match=f"{check:#010x}, not 0x00000001"):
        await get(backend, path, 1, slots, checks)
    path.write_bytes(b"a poem" * 1000)
    with pytest.raises(FormatError, match="not an index file"):
        await get(backend, path, check, slots, checks)
    path.unlink()
    with pytest.raises(CorruptError, match="missing"):
        await get(backend, path, check, slots, checks)


async def test_an_unknown_version_is_refused_with_both_numbers(tmp_path, monkeypatch):
    backend, path = PlainBackend(), tmp_path / "x.idx"
    slots, checks = index(10)
    with monkeypatch.context() as patched:
        patched.setattr(indexfile, "FORMAT_VERSION", 9)
        check, _ = await put(backend, path, slots, checks)
    with pytest.raises(FormatError, match="version 9, this program reads version 1"):
        await get(backend, path, check, slots, checks)


async def test_slots_that_do_not_fit_and_tables_that_are_too_small_are_refused(tmp_path):
    backend, path = PlainBackend(), tmp_path / "x.idx"
    slots, checks = index(10, np.int64)
    slots[:] = np.arange(10)
    slots[3] = 1 << 31
    check, _ = await put(backend, path, slots, checks)
    with pytest.raises(MismatchError, match="slots up to 2147483648 do not fit int32"):
        await get(backend, path, check, np.zeros(10, np.int32), checks)
    with pytest.raises(MismatchError, match="10 rows, the table has 9"):
        await get(backend, path, check, np.zeros(9, np.int64), checks)


async def test_an_index_costs_eight_bytes_a_row_and_no_second_copy(tmp_path, backend):
    """What is written comes from the arrays' own memory, what is read goes there."""
    n_rows = 4 * chunk_rows
    slots, checks = index(n_rows)
    parts: list[np.ndarray] = []
    targets: list[int] = []

    class Watching(type(backend)):
        async def write_whole(self, path, given):
            parts.extend(given)
            await super().write_whole(path, given)

        async def read(self, file, extents, buffer, then=None):
            targets.append(buffer.ctypes.data)
            await super().read(file, extents, buffer, then)

    check, _ = await put(Watching(), tmp_path / "x.idx", slots, checks)
    assert (tmp_path / "x.idx").stat().st_size <= 8.1 * n_rows
    assert sum(np.shares_memory(part, array) for part in parts for array in (slots, checks)) == 2
    assert sum(part.nbytes for part in parts if not np.shares_memory(part, slots)) < 4.1 * n_rows
    await get(Watching(), tmp_path / "x.idx", check, slots, checks)
    starts = [array.ctypes.data + i * CHUNK_BYTES for array in (slots, checks) for i in range(4)]
    assert set(starts) <= set(targets)


def test_sections_hold_tables_of_the_largest_size():
    sections = header(1 << 33, 8, 1 << 20).sections()
    for before, after in itertools.pairwise(sections):
        assert after.offset == before.offset + before.padded
    assert sections[-1].end < 12.001 * (1 << 33)
    assert sections[0].nbytes == 4 * (sections[3].first_chunk + sections[3].n_chunks)
