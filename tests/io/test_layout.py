"""Records, segments and their checks: geometry, and that no changed byte goes unseen."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.errors import CorruptError, FormatError
from dsa.io.layout import (
    BLOCK_BYTES,
    HEAD_BYTES,
    MAX_SEGMENT_BYTES,
    MIN_SEGMENT_BYTES,
    VOID_ROW,
    RecordLayout,
    SegmentLayout,
    checked_gather,
    checked_scatter,
    choose_segment_bytes,
    read_header,
    record_check,
    row_bytes_for,
    segment_layout,
    table_identity,
    write_header,
    zero_frames,
)

PATH = Path("some.log")


@pytest.mark.parametrize(
    ("width", "dtype", "record_bytes"),
    [
        (1, "float32", 8),
        (3, "float32", 24),
        (7, "float32", 56),
        (100, "float32", 800),
        (129, "float32", 1032),
        (1, "float64", 16),
        (3, "float64", 48),
        (7, "float64", 112),
        (100, "float64", 1600),
        (129, "float64", 2064),
    ],
)
def test_record_sizes(width: int, dtype: str, record_bytes: int) -> None:
    record = RecordLayout(width, dtype)
    assert record.record_bytes == record_bytes
    assert record.record_bytes % 8 == 0
    assert len(record.fields) * record.field_bytes <= record.record_bytes < len(record.fields) * record.field_bytes + 8


def test_a_record_of_three_odd_fields_is_padded() -> None:
    record = RecordLayout(3, "float32", ("weight", "exp_avg", "exp_avg_sq"))
    assert record.field_bytes == 12
    assert record.record_bytes == 40


@given(
    record_bytes=st.integers(1, 3000).map(lambda n: 8 * n),
    n_rows=st.sampled_from([1, 237, 10_000_000, 2**31 - 1, 2**31, 2**33]),
    wanted=st.integers(1, 1 << 23),
)
def test_a_segment_holds_its_header_and_slots_and_no_slot_more(record_bytes: int, n_rows: int, wanted: int) -> None:
    layout = segment_layout(record_bytes, n_rows, wanted)
    assert layout.segment_bytes % BLOCK_BYTES == 0
    assert layout.header_bytes % BLOCK_BYTES == 0
    assert layout.header_bytes >= HEAD_BYTES + layout.slots * layout.row_bytes
    assert layout.slots >= 1
    assert layout.segment_bytes >= wanted
    assert layout.used_bytes(layout.slots) <= layout.segment_bytes
    more = layout.slots + 1
    more_header = -(-(HEAD_BYTES + more * layout.row_bytes) // BLOCK_BYTES) * BLOCK_BYTES
    assert more_header + more * record_bytes > layout.segment_bytes
    offsets = layout.offsets(np.arange(2 * layout.slots, dtype=np.int64))
    inside = offsets % layout.segment_bytes
    assert (inside >= layout.header_bytes).all()
    assert (inside + record_bytes <= layout.segment_bytes).all()
    assert (np.diff(offsets) >= record_bytes).all()


def test_rows_are_named_by_as_many_bytes_as_the_table_needs() -> None:
    assert [row_bytes_for(n) for n in (1, 2**31 - 1, 2**31)] == [4, 4, 8]


@given(
    record_bytes=st.integers(1, 2000).map(lambda n: 8 * n),
    n_rows=st.integers(1, 10**9),
    cache_bytes=st.integers(1, 1 << 40),
)
def test_chosen_segments_follow_the_tables_size(record_bytes: int, n_rows: int, cache_bytes: int) -> None:
    size = choose_segment_bytes(record_bytes, n_rows, cache_bytes)
    assert MIN_SEGMENT_BYTES <= size <= MAX_SEGMENT_BYTES
    assert size % BLOCK_BYTES == 0
    assert size == MIN_SEGMENT_BYTES or size <= max(n_rows * record_bytes // 12, 1)
    assert choose_segment_bytes(1024, 237, 1 << 30) == MIN_SEGMENT_BYTES
    assert choose_segment_bytes(1024, 10_000_000, 1 << 30) == MAX_SEGMENT_BYTES


@pytest.mark.parametrize("row_bytes", [4, 8])
def test_a_header_gives_its_rows_back(row_bytes: int) -> None:
    layout = SegmentLayout(256, 100, row_bytes, 32768)
    rows = np.array([5, VOID_ROW, 0, 2**31 - 1 if row_bytes == 4 else 2**40], np.int64)
    buffer = np.full(layout.segment_bytes, 0xAB, np.uint8)
    write_header(buffer, layout, 17, 99, rows)
    assert read_header(buffer, layout, 17, 99, PATH).tolist() == rows.tolist()
    assert (buffer[layout.header_bytes :] == 0xAB).all()
    write_header(buffer, layout, 17, 99, rows[:0])
    assert read_header(buffer, layout, 17, 99, PATH).tolist() == []


def test_every_changed_byte_of_a_header_is_found() -> None:
    layout = SegmentLayout(256, 60, 4, 20480)
    buffer = np.zeros(layout.segment_bytes, np.uint8)
    write_header(buffer, layout, 3, 1 << 60, np.arange(50, dtype=np.int64))
    for at in range(layout.header_bytes):
        for flip in (0x01, 0x80, 0xFF):
            buffer[at] ^= flip
            with pytest.raises((CorruptError, FormatError), match=re.escape(f"{PATH}, segment 3 at byte {3 * 20480}")):
                read_header(buffer, layout, 3, 1 << 60, PATH)
            buffer[at] ^= flip
    assert len(read_header(buffer, layout, 3, 1 << 60, PATH)) == 50


def test_a_whole_header_of_another_place_is_refused() -> None:
    layout = SegmentLayout(256, 60, 4, 20480)
    buffer = np.zeros(layout.segment_bytes, np.uint8)
    write_header(buffer, layout, 3, 7, np.arange(4, dtype=np.int64))
    for other, segment, identity in (
        (layout, 4, 7),
        (layout, 3, 8),
        (SegmentLayout(264, 60, 4, 20480), 3, 7),
        (SegmentLayout(256, 61, 4, 20480), 3, 7),
    ):
        with pytest.raises(CorruptError, match="belongs elsewhere"):
            read_header(buffer, other, segment, identity, PATH)


def test_tables_and_directories_have_identities_of_their_own() -> None:
    names = [table_identity(uuid, name) for uuid in ("a" * 32, "b" * 32) for name in ("x", "y", "xy")]
    assert len(set(names)) == len(names)
    assert all(0 <= name < 2**64 for name in names)


@pytest.mark.parametrize("n_words", [1, 3, 4, 7, 16, 129])
def test_every_flipped_bit_of_a_record_is_found(n_words: int) -> None:
    words = np.random.default_rng(n_words).integers(0, 2**64, n_words, dtype=np.uint64)
    check = record_check(words, 12)
    assert record_check(words.copy(), 12) == check
    for at in range(n_words):
        for bit in range(64):
            words[at] ^= np.uint64(1) << np.uint64(bit)
            assert record_check(words, 12) != check
            words[at] ^= np.uint64(1) << np.uint64(bit)


def test_a_record_of_another_row_is_found() -> None:
    zero = np.zeros(4, np.uint64)
    checks = {int(record_check(zero, row)) for row in range(20_000)}
    assert len(checks) > 20_000 - 5  # 32 bits: two of so many may agree by chance


@settings(max_examples=60)
@given(
    words=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=12),
    i=st.integers(0, 11),
    j=st.integers(0, 11),
    row=st.integers(0, 2**40),
)
def test_swapped_words_are_found(words: list[int], i: int, j: int, row: int) -> None:
    i, j = i % len(words), j % len(words)
    swapped = list(words)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    if swapped != words:
        assert record_check(np.array(words, np.uint64), row) != record_check(np.array(swapped, np.uint64), row)


def test_records_go_out_and_come_back_and_the_first_wrong_one_is_named() -> None:
    rnd = np.random.default_rng(1)
    frames = rnd.integers(0, 2**64, (8, 3), dtype=np.uint64)
    numbers, rows = np.array([5, 0, 7], np.int32), np.array([10, 11, 12], np.int64)
    records, checks = np.zeros((3, 3), np.uint64), np.zeros(3, np.uint32)
    checked_gather(frames, numbers, rows, records, checks)
    assert (records == frames[numbers]).all()
    positions = np.array([0, 3, 6], np.int64)
    back = np.zeros_like(frames)
    assert checked_scatter(records.reshape(-1), positions, 3, rows, checks, back, numbers) == -1
    assert (back[numbers] == frames[numbers]).all()
    assert not back[[1, 2, 3, 4, 6]].any()
    swapped = np.array([11, 10, 12], np.int64)
    assert checked_scatter(records.reshape(-1), positions, 3, swapped, checks, back, numbers) == 0
    records[2, 1] ^= np.uint64(4)
    untouched = np.zeros_like(frames)
    assert checked_scatter(records.reshape(-1), positions, 3, rows, checks, untouched, numbers) == 2
    assert not untouched[7].any()


def test_frames_of_new_rows_become_zero() -> None:
    frames = np.full((4, 3), 7, np.uint64)
    zero_frames(frames, np.array([1, 3], np.int32))
    assert frames.sum(1).tolist() == [21, 0, 21, 0]


# What DESIGN.md says of the bytes, in plain Python: another program can read a log by it.


def check_by_the_page(words: list[int], row: int) -> int:
    low = (1 << 64) - 1
    k1, k2, k3, k4 = 0x243F6A8885A308D3, 0x13198A2E03707345, 0xA4093822299F31D1, 0x082EFA98EC4E6C89

    def turned(value: int, bits: int) -> int:
        return (value << bits | value >> 64 - bits) & low

    seed = (row * k3 + k4) & low
    lanes, factors = [(seed + k1) & low, seed ^ k2, (seed + k3) & low, seed ^ k4], [k1, k2, k3, k4]
    whole = len(words) // 4 * 4
    for i, word in enumerate(words):
        lane = i % 4 if i < whole else 0
        lanes[lane] = turned((lanes[lane] ^ word) * factors[lane] & low, 31)
    a, b, c, d = lanes
    h = (a ^ turned(b, 29)) * k2 & low
    h = (h ^ h >> 32 ^ c) * k3 & low
    h = (h ^ h >> 29 ^ d) * k1 & low
    h ^= h >> 32
    h = h * k2 & low
    h ^= h >> 29
    return h >> 32


@given(st.lists(st.integers(0, 2**64 - 1), max_size=11), st.integers(0, 2**40))
def test_the_check_of_a_record_is_what_the_page_says(words: list[int], row: int) -> None:
    assert int(record_check(np.array(words, np.uint64), row)) == check_by_the_page(words, row)


def test_header_and_identity_are_what_the_page_says() -> None:
    layout = segment_layout(64, 1000, 1 << 16)
    uuid, name = "0b6a3a0c-0000-4000-8000-123456789abc", "node_emb.weight"
    identity = table_identity(uuid, name)
    assert identity == zlib.crc32((name + uuid).encode()) << 32 | zlib.crc32((uuid + name).encode())
    buffer = np.zeros(layout.segment_bytes, np.uint8)
    write_header(buffer, layout, 7, identity, np.arange(5, dtype=np.int64))
    raw = buffer.tobytes()
    assert zlib.crc32(raw[:44] + bytes(4) + raw[64 : layout.header_bytes]) == int.from_bytes(raw[44:48], "little")
    assert raw[48:64] == bytes(16)
    assert int.from_bytes(raw[32:40], "little") == identity
