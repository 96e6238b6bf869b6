"""Reads of the log that are queued or under way, by ticket. Pure.

A segment that was freed is used again only when every read submitted before has ended (rule 5): so a read is here from
the instant in which its records were looked up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsa.io.cache import Frames, Rows
from dsa.io.jobs import CleanJob, FillJob, Table
from dsa.io.kernels_on_rows import order_by_slot


class Reads:
    """Tickets ascend; the jobs are in the order in which they were queued.

    Args:
        chunk_bytes: records that one job brings in, at most.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._jobs: dict[int, FillJob | CleanJob] = {}
        self._last_ticket = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def next_ticket(self) -> int:
        """Reads submitted from now on have this number or a later one."""
        return self._last_ticket + 1

    def _ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def queue(self, table: Table, rows: Rows, frames: Frames) -> int:
        """Queue what brings these rows into these frames; how many of them were never written, and need no read."""
        slots, checks = table.segments.locate(rows)
        order = order_by_slot(slots)
        slots, checks, rows, frames = slots[order], checks[order], rows[order], frames[order]
        new = int(np.searchsorted(slots, 0))
        per_job = max(1, self._chunk_bytes // table.record.record_bytes)
        starts = [0] * (new > 0) + list(range(new, len(rows), per_job))
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
            part = slice(start, stop)
            job = FillJob(self._ticket(), table, rows[part], frames[part], slots[part], checks[part])
            self._jobs[job.ticket] = job  # queued and guarded (rule 5) in one instant, for an interrupt may follow
        return new

    def queued(self) -> FillJob | None:
        """The oldest fill that nobody has begun."""
        for job in self._jobs.values():
            if isinstance(job, FillJob) and not job.begun:
                return job
        return None

    def clean(self, table: Table, victims: list[int], target: int) -> CleanJob:
        """Begin to read segments that are to be cleaned."""
        used = [int(table.segments.used[victim]) for victim in victims]
        job = CleanJob(self._ticket(), table, victims, target, used)
        self._jobs[job.ticket] = job
        return job

    def ended(self, ticket: int, tables: Sequence[Table]) -> None:
        """The read is over, whole or not."""
        del self._jobs[ticket]
        self.settle(tables)

    def settle(self, tables: Sequence[Table]) -> None:
        """Let segments be used again that only reads which have ended might have met."""
        oldest = min(self._jobs, default=self.next_ticket)
        for table in tables:
            table.segments.reads_ended(oldest)
