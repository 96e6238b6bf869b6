"""What the knobs should be on a device, from a few figures of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dsa.config import KIB, MIB, DeviceChoice

MOST_GAP_BYTES = 32 * KIB
"""A read may hold thousands of gaps, all of them in its buffer: so they stay short, however slow a request is."""
_OVERHEAD = 0.1  # the share of a long request's time that its fixed cost may take


@dataclass(frozen=True)
class DeviceFigures:
    """A device as the choice of knobs sees it.

    Args:
        read_request_s, write_request_s: what one more small random request costs when the device is kept busy.
        read_latency_s, write_latency_s: how long a single one takes when nothing else is asked.
        read_bytes_per_s, write_bytes_per_s: sequential rates.
        queue_depth: the least number of reads in flight that keeps the device busy.
    """

    read_request_s: float
    write_request_s: float
    read_latency_s: float
    write_latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    queue_depth: int


def choose(figures: DeviceFigures, *, backend: str, direct: bool) -> DeviceChoice:
    """The knobs: gaps are read where that is cheaper than a request, and long requests hide their fixed cost."""
    gap_bytes = min(int(figures.read_request_s * figures.read_bytes_per_s), MOST_GAP_BYTES)
    request_bytes = figures.read_request_s * figures.read_bytes_per_s * (1 - _OVERHEAD) / _OVERHEAD
    return DeviceChoice(
        backend=backend,
        direct=direct,
        queue_depth=figures.queue_depth,
        merge_gap_bytes=gap_bytes // 512 * 512,
        max_request_bytes=_power_of_two(request_bytes, 256 * KIB, 4 * MIB),
        # The table and the cache decide: longer segments than those would be written half empty, on any device.
        segment_bytes=None,
    )


def _power_of_two(wanted: float, least: int, most: int) -> int:
    """The least power of two that is not below `wanted`, within limits that are powers of two."""
    return min(max(1 << max(int(wanted) - 1, 1).bit_length(), least), most)
