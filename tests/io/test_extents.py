"""plan: every record is where it says, every byte is read once, and neighbours share requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsa.io.extents import Extents, Plan, check_placement, plan

FILE_BYTES = 1 << 17
FILE = np.random.default_rng(0).integers(0, 256, FILE_BYTES, dtype=np.uint8)


def read(planned: Plan) -> np.ndarray:
    buffer = np.zeros(planned.buffer_bytes, np.uint8)
    e = planned.extents
    for offset, length, at in zip(e.offsets.tolist(), e.lengths.tolist(), e.at.tolist(), strict=True):
        assert offset + length <= FILE_BYTES
        buffer[at : at + length] = FILE[offset : offset + length]
    return buffer


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    record = draw(st.sampled_from([1, 4, 7, 96, 512, 1000, 1024, 4096, 5000]))
    step = draw(st.sampled_from([1, record, record + 1, 512]))
    most = (FILE_BYTES - 4096 - record) // step
    few = draw(st.sampled_from([most, min(most, 50)]))
    places = draw(st.lists(st.integers(0, few), min_size=0, max_size=60, unique=draw(st.booleans())))
    return {
        "offsets": np.sort(np.array(places, np.int64)) * step,
        "record_bytes": record,
        "merge_gap_bytes": draw(st.sampled_from([0, 1, 100, 4096, 20000])),
        "max_request_bytes": draw(st.sampled_from([1, 512, 1500, 4096, 12288, 1 << 20])),
        "alignment": draw(st.sampled_from([1, 8, 512, 4096])),
    }


@settings(deadline=None, max_examples=400)
@given(requests())
@example(  # a record cut in three, shared by overlapping records
    {
        "offsets": np.array([100, 100, 700], np.int64),
        "record_bytes": 1000,
        "merge_gap_bytes": 0,
        "max_request_bytes": 512,
        "alignment": 512,
    }
)
def test_records_are_where_the_plan_says_and_no_byte_is_read_twice(case: dict[str, object]) -> None:
    planned = plan(**case)  # type: ignore[arg-type]
    e, buffer = planned.extents, read(planned)
    offsets, record, alignment = case["offsets"], case["record_bytes"], case["alignment"]
    for offset, position in zip(offsets.tolist(), planned.positions.tolist(), strict=True):
        assert np.array_equal(buffer[position : position + record], FILE[offset : offset + record])
    for values in (e.offsets, e.lengths, e.at):
        assert not (values % alignment).any()
    assert (e.lengths > 0).all()
    assert (e.lengths <= max(case["max_request_bytes"], alignment)).all()
    assert (e.offsets[1:] >= e.offsets[:-1] + e.lengths[:-1]).all()
    assert np.array_equal(e.at, np.cumsum(e.lengths) - e.lengths)
    assert planned.buffer_bytes == e.lengths.sum()
    check_placement(e, planned.buffer_bytes)


@settings(deadline=None, max_examples=200)
@given(requests())
def test_a_gap_is_read_only_where_it_is_short_and_nothing_beside_records_and_gaps(case: dict[str, object]) -> None:
    e = plan(**case).extents  # type: ignore[arg-type]
    gap, alignment, record = case["merge_gap_bytes"], case["alignment"], case["record_bytes"]
    wanted = np.zeros(FILE_BYTES + 2, bool)
    for offset in case["offsets"].tolist():
        wanted[offset // alignment * alignment : -(-(offset + record) // alignment) * alignment] = True
    got = np.zeros(FILE_BYTES + 2, bool)
    for offset, length in zip(e.offsets.tolist(), e.lengths.tolist(), strict=True):
        got[offset : offset + length] = True
    assert not (wanted & ~got).any()
    edges = np.flatnonzero(np.diff((got & ~wanted).astype(np.int8)))
    assert (edges[1::2] - edges[::2] <= gap).all()
    # Two requests that could have been one: apart by no more than the gap, and together within the maximum.
    longest = max(case["max_request_bytes"] // alignment, 1) * alignment
    apart = e.offsets[1:] - e.offsets[:-1] - e.lengths[:-1]
    both = e.offsets[1:] + e.lengths[1:] - e.offsets[:-1]
    assert not ((apart <= gap) & (both <= longest)).any()


@pytest.mark.parametrize("record_bytes", [8, 100, 1024, 1032, 700_000])
@pytest.mark.parametrize("alignment", [1, 512, 4096])
def test_adjacent_records_take_as_few_requests_as_their_bytes_need(record_bytes: int, alignment: int) -> None:
    count, longest = 8192, 1 << 20
    planned = plan(
        np.arange(count, dtype=np.int64) * record_bytes + 4096,
        record_bytes,
        merge_gap_bytes=0,
        max_request_bytes=longest,
        alignment=alignment,
    )
    assert len(planned.extents) <= -(-count * record_bytes // longest) + 1


def test_gaps_decide_between_one_request_and_two() -> None:
    offsets = np.array([0, 1500], np.int64)
    sizes = {"record_bytes": 500, "max_request_bytes": 1 << 20, "alignment": 1}
    assert len(plan(offsets, merge_gap_bytes=1000, **sizes).extents) == 1
    assert len(plan(offsets, merge_gap_bytes=999, **sizes).extents) == 2


def test_a_cut_that_falls_into_a_gap_leaves_the_gap_unread() -> None:
    planned = plan(np.array([0, 5000], np.int64), 1000, merge_gap_bytes=1 << 20, max_request_bytes=4096, alignment=1)
    assert planned.buffer_bytes == 2000


def test_nothing_wanted_is_nothing_read() -> None:
    planned = plan(np.empty(0, np.int64), 8, merge_gap_bytes=0, max_request_bytes=4096, alignment=512)
    assert len(planned.extents) == 0
    assert planned.buffer_bytes == 0


@pytest.mark.parametrize("offsets", [[8, 0], [-8, 0]])
def test_offsets_that_do_not_ascend_from_zero_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        plan(np.array(offsets), 8, merge_gap_bytes=0, max_request_bytes=4096, alignment=1)


@pytest.mark.parametrize("wrong", ["record_bytes", "alignment", "max_request_bytes", "merge_gap_bytes"])
def test_sizes_out_of_range_are_refused(wrong: str) -> None:
    sizes = {"record_bytes": 8, "alignment": 1, "max_request_bytes": 4096, "merge_gap_bytes": 0, wrong: -1}
    with pytest.raises(ValueError, match=f"{wrong} -1"):
        plan(np.zeros(1, np.int64), **sizes)


def extents(*rows: tuple[int, int, int]) -> Extents:
    return Extents(*np.array(rows, np.int64).reshape(-1, 3).T)


def test_placement_drops_empty_extents_and_accepts_any_order_in_the_buffer() -> None:
    kept = check_placement(extents((0, 10, 20), (10, 0, 20), (20, 20, 0)), 30)
    assert kept.offsets.tolist() == [0, 20]
    assert kept.at.tolist() == [20, 0]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(0, 10, 0), (10, 10, 9)], "overlap"),
        ([(0, 10, 9), (10, 10, 0)], "overlap"),
        ([(0, 10, 91)], "extent 0 .* does not fit"),
        ([(0, 10, 0), (0, 10, -1)], "extent 1 .* does not fit"),
        ([(-1, 10, 0)], "does not fit"),
        ([(0, -1, 0)], "does not fit"),
    ],
)
def test_extents_out_of_place_are_refused(rows: list[tuple[int, int, int]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_placement(extents(*rows), 100)


def test_extents_of_unequal_arrays_are_refused() -> None:
    one, two = np.zeros(1, np.int64), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="1 offsets, 2 lengths"):
        check_placement(Extents(one, two, one), 100)
