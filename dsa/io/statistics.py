"""What the engine has done so far, in figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Statistics:
    """Counters and times since the optimizer was made; rows are counted over all tables.

    Args:
        steps: steps that ended.
        rows_touched: rows that steps updated.
        announced_share: the share of them that had been announced (1.0 while nothing was touched).
        cache_hits, cache_misses: rows touched that had a frame already, and those that had to be brought into one.
        hit_rate: hits / (hits + misses); 0.0 while there are neither.
        rows_new: frames filled with zeros because the row was never written (no I/O).
        rows_read, read_requests, read_bytes: records brought from disk, and the requests and bytes of all reads
            (cleaning and the opening of generations included).
        rows_written, write_requests, write_bytes: records written behind, and the requests and bytes of all writes
            (cleaning and checkpoints included).
        rows_cleaned, segments_cleaned: records moved by cleaning, and segments it made free.
        forgotten_batches: announcements that a full window did not remember.
        window_batches, pinned_frames, dirty_frames: as of now.
        frames, cache_bytes: frames in all, and their bytes (bookkeeping included).
        state_bytes_on_disk: length of the logs, all tables.
        live_records: rows that have a record on disk.
        device_bytes: memory of accelerators that the staging buffers have.
        gradient_s, wait_s, update_s, commit_s: time that steps spent on coalescing gradients, waiting for rows,
            updating, and bookkeeping.
        compile_s: time that compiling, or loading compiled code, took in the constructor.
        backend, kernel: which were chosen.
    """

    steps: int
    rows_touched: int
    announced_share: float
    cache_hits: int
    cache_misses: int
    hit_rate: float
    rows_new: int
    rows_read: int
    read_requests: int
    read_bytes: int
    rows_written: int
    write_requests: int
    write_bytes: int
    rows_cleaned: int
    segments_cleaned: int
    forgotten_batches: int
    window_batches: int
    pinned_frames: int
    dirty_frames: int
    frames: int
    cache_bytes: int
    state_bytes_on_disk: int
    live_records: int
    device_bytes: int
    gradient_s: float
    wait_s: float
    update_s: float
    commit_s: float
    compile_s: float
    backend: str
    kernel: str

    def __str__(self) -> str:
        """The figures that matter first, in a few lines."""
        step_ms = 1000.0 / max(self.steps, 1)
        return "\n".join(
            (
                f"{self.steps:,} steps updated {self.rows_touched:,} rows; {self.announced_share:.1%} were announced",
                f"cache: {self.frames:,} frames ({self.cache_bytes / 2**20:,.1f} MiB), hit rate {self.hit_rate:.1%}",
                f"read: {self.rows_read:,} rows in {self.read_requests:,} requests, {self.read_bytes / 2**20:,.1f} MiB",
                f"written: {self.rows_written:,} rows in {self.write_requests:,} requests, "
                f"{self.write_bytes / 2**20:,.1f} MiB; {self.rows_cleaned:,} rows moved by cleaning",
                f"a step: {self.gradient_s * step_ms:.2f} ms gradient, {self.wait_s * step_ms:.2f} ms waiting, "
                f"{self.update_s * step_ms:.2f} ms update, {self.commit_s * step_ms:.2f} ms bookkeeping",
                f"on disk: {self.live_records:,} records in {self.state_bytes_on_disk / 2**20:,.1f} MiB "
                f"(backend {self.backend}, kernel {self.kernel})",
            )
        )
