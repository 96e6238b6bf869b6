"""Memory for frames: aligned, zero, and not given to forked children."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from dsa.io.memory import PAGE_BYTES, allocate, touch


@pytest.mark.parametrize("shape", [1, 7, PAGE_BYTES, (3, 40), (0, 8), (1000, 1032)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_arrays_are_aligned_zero_and_writable(shape: int | tuple[int, ...], dtype: type) -> None:
    array = allocate(shape, dtype)
    assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert array.dtype == dtype
    assert array.ctypes.data % PAGE_BYTES == 0 or array.size == 0
    assert not array.any()
    array[...] = 1
    assert array.all()


def test_a_view_keeps_the_memory() -> None:
    view = allocate(10_000, np.uint64)[5000:5010]
    gc.collect()
    view[:] = 3
    others = [allocate(10_000, np.uint64) for _ in range(8)]
    assert view.tolist() == [3] * 10
    assert not any(other.any() for other in others)


def _flags_of(address: int) -> set[str]:
    """The system's flags of the mapping that the address is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"no mapping holds {address:x}")


@pytest.mark.skipif(sys.platform != "linux", reason="flags of mappings are read from /proc")
def test_forked_children_do_not_inherit_it() -> None:
    array = allocate(1 << 20, np.uint8)
    assert "dc" in _flags_of(array.ctypes.data)  # "do not copy on fork"
    assert "dc" in _flags_of(array.ctypes.data + len(array) - 1)
    ordinary = np.ones(1 << 20, np.uint8)
    assert "dc" not in _flags_of(ordinary.ctypes.data)


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")
def test_memory_that_nobody_holds_is_given_back() -> None:
    def mapped() -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmSize:")).split()[1])

    array = allocate(1 << 28, np.uint8)
    before = mapped()
    del array
    gc.collect()
    assert before - mapped() > 200 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="resident pages are read from /proc")
def test_touching_makes_every_page_resident() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    array = allocate((4096, PAGE_BYTES), np.uint8)
    before = resident()
    touch(array)
    assert resident() - before > 4000
    assert not array.any()


def test_more_memory_than_there_is_is_an_error() -> None:
    with pytest.raises(MemoryError):
        allocate(1 << 60, np.uint8)
