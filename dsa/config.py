"""IOConfig: the knobs of the I/O engine and the one home of their defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dsa.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, kw_only=True)
class IOConfig:
    """How DSA talks to the disk; every default is right for a local NVMe or SATA disk.

    Args:
        queue_depth: requests in flight at once, reads and writes each (for the `threads` backend: I/O threads).
        segment_bytes: size of a segment of the log; None: chosen by the table's size, at most 4 MiB.
        merge_gap_bytes: two records are read in one request when at most this much lies between them.
        max_request_bytes: a longer extent is split.
        read_chunk_bytes: records travel from disk to frames in pieces of about this size.
        known_batches, known_rows: batches, and rows in all of them together, that the window remembers; more
            announcements are forgotten, youngest first. A row known costs 16 bytes.
        held_batches: batches, beyond the one being stepped, whose rows are brought into frames ahead of time; None:
            as many as fit the cache.
        dirty_share: write-behind starts when dirty frames are more than this share of the cache.
        uvloop: run the event loop on uvloop where it is installed.
        stall_timeout_s: a device that answers nothing for so long is an error.

    Raises:
        ConfigError: a value is out of range.
    """

    queue_depth: int = 64
    segment_bytes: int | None = None
    merge_gap_bytes: int = 4 * KIB
    max_request_bytes: int = 1 * MIB
    read_chunk_bytes: int = 4 * MIB
    known_batches: int = 256
    known_rows: int = 1 << 20
    held_batches: int | None = None
    dirty_share: float = 0.25
    uvloop: bool = True
    stall_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float]] = {
            "queue_depth": (1, 4096),
            "segment_bytes": (8 * KIB, 64 * MIB),
            "merge_gap_bytes": (0, 16 * MIB),
            "max_request_bytes": (4 * KIB, 64 * MIB),
            "read_chunk_bytes": (64 * KIB, 256 * MIB),
            "known_batches": (1, 60_000),
            "known_rows": (1, 1 << 32),
            "held_batches": (0, 1 << 20),
            "dirty_share": (0.0, 1.0),
            "stall_timeout_s": (0.001, 1e9),
        }
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if field.name not in limits or (value is None and "None" in str(field.type)):
                continue
            low, high = limits[field.name]
            whole = "float" not in str(field.type)
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                kind = "a whole number" if whole else "a number"
                raise ConfigError(f"IOConfig.{field.name} must be {kind} from {low:g} to {high:g}, got {value!r}")
        if self.segment_bytes is not None and self.segment_bytes % 4096:
            raise ConfigError(f"IOConfig.segment_bytes must be a multiple of 4096, got {self.segment_bytes}")
        if self.max_request_bytes % 4096:
            raise ConfigError(f"IOConfig.max_request_bytes must be a multiple of 4096, got {self.max_request_bytes}")
