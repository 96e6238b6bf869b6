"""What a run of bench.device found: samples, the cases they belong to, and the ratios between ways. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

KIB = 1024
MAIN_RECORD_BYTES = KIB

READ, WRITE, WAYS, APPEND, STEADY, MEMMAP = (
    "random read",
    "random write",
    "ways to read",
    "append",
    "steady update",
    "memmap update",
)


@dataclass(frozen=True)
class Sample:
    """One measurement of one way.

    Args:
        rows, nbytes: what was moved.
        seconds: wall time.
        cpu_s: processor time, user and system; None: unknown.
    """

    rows: int
    nbytes: int
    seconds: float
    cpu_s: float | None = None

    @property
    def rows_per_s(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds

    @property
    def us_per_row(self) -> float:
        """Wall microseconds a row."""
        return self.seconds / self.rows * 1e6

    @property
    def cpu_us_per_row(self) -> float | None:
        """Processor microseconds a row."""
        return None if self.cpu_s is None else self.cpu_s / self.rows * 1e6


@dataclass
class Case:
    """Ways that did the same thing in turns: the i-th sample of each was taken in the same round.

    Args:
        what: READ, WRITE, ...
        record_bytes: size of a row.
        samples: by way.
    """

    what: str
    record_bytes: int
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, way: str, sample: Sample) -> None:
        """Note the way's sample of this round."""
        self.samples.setdefault(way, []).append(sample)

    def median(self, way: str, value: Callable[[Sample], float | None]) -> float | None:
        """The median of a value over the way's samples; None where it, or the way, is missing."""
        values = [value(sample) for sample in self.samples.get(way, [])]
        known = [one for one in values if one is not None]
        return statistics.median(known) if known and len(known) == len(values) else None

    def ratio(self, ours: str, theirs: str, value: Callable[[Sample], float | None]) -> float | None:
        """The median, over the rounds, of our value over theirs; None where a way or the value is missing.

        Raises:
            ValueError: the two have different numbers of rounds.
        """
        mine, other = self.samples.get(ours, []), self.samples.get(theirs, [])
        if not mine or not other:
            return None
        if len(mine) != len(other):
            raise ValueError(
                f"{self.what}, {self.record_bytes} B: {ours} has {len(mine)} rounds, {theirs} has {len(other)}"
            )
        quotients = []
        for a, b in zip(mine, other, strict=True):
            x, y = value(a), value(b)
            if x is None or not y:
                return None
            quotients.append(x / y)
        return statistics.median(quotients)


@dataclass(frozen=True)
class Target:
    """What a ratio should reach: at least `bound`, or where `at_most` no more than it."""

    name: str
    bound: float
    at_most: bool
    meaning: str

    def met(self, value: float) -> bool:
        """Whether the value is good enough."""
        return value <= self.bound if self.at_most else value >= self.bound


TARGETS = (
    Target("uring_read_vs_fio", 0.88, False, "random reads, uring, rate over fio's"),
    Target("threads_read_vs_fio", 0.8, False, "random reads, threads, rate over fio's"),
    Target("uring_cpu_vs_fio", 1.0, True, "random reads, uring, processor time a row over fio's"),
    Target("append_vs_fio_sequential", 0.85, False, "dirty records appended, bytes a second over fio's sequential"),
    Target("append_vs_random_write", 15.0, False, "dirty records appended, rows a second over fio's random writes"),
    Target("steady_update_vs_fio_reads", 1.3, True, "steady uniform updates, time a row over fio's for the reads"),
    Target("vs_aiofiles", 8.0, False, "random reads, uring over aiofiles row by row"),
    Target("vs_rocksdb", 4.0, False, "random reads, uring over RocksDB's multi_get"),
    Target("vs_memmap_limited", 20.0, False, "steady updates over those of a memmap in limited memory"),
    Target("vs_memmap_random_limited", 3.0, False, "steady updates over those of a memmap with MADV_RANDOM"),
)


def ratios(cases: Sequence[Case]) -> dict[str, float | None]:
    """The value of every target, the worst configuration's; None where something that it needs was not measured."""

    def over(
        pick: Callable[[Iterable[float]], float],
        what: str,
        ours: str,
        theirs: str,
        value: Callable[[Sample], float | None],
    ) -> float | None:
        found = [case.ratio(ours, theirs, value) for case in cases if case.what == what]
        known = [one for one in found if one is not None]
        return pick(known) if known else None

    def rows(sample: Sample) -> float:
        return sample.rows_per_s

    def cpu(sample: Sample) -> float | None:
        return sample.cpu_us_per_row

    return {
        "uring_read_vs_fio": over(min, READ, "uring", "fio", rows),
        "threads_read_vs_fio": over(min, READ, "threads", "fio", rows),
        "uring_cpu_vs_fio": over(max, READ, "uring", "fio", cpu),
        "append_vs_fio_sequential": over(min, APPEND, "dsa", "fio sequential", lambda sample: sample.bytes_per_s),
        "append_vs_random_write": over(min, APPEND, "dsa", "fio random writes", rows),
        "steady_update_vs_fio_reads": over(max, STEADY, "dsa", "fio reads", lambda sample: sample.us_per_row),
        "vs_aiofiles": over(min, WAYS, "uring", "aiofiles, row by row", rows),
        "vs_rocksdb": over(min, WAYS, "uring", "RocksDB, multi_get", rows),
        "vs_memmap_limited": _steady_over_memmap(cases, "memmap"),
        "vs_memmap_random_limited": _steady_over_memmap(cases, "memmap, MADV_RANDOM"),
    }


def ratios_to_tuned_fio(cases: Sequence[Case]) -> dict[str, float | None]:
    """Our random reads of main records over those of fio with every option that saves it processor time."""
    main = next((case for case in cases if case.what == READ and case.record_bytes == MAIN_RECORD_BYTES), Case(READ, 0))
    return {
        "uring_read": main.ratio("uring", "fio, tuned", lambda sample: sample.rows_per_s),
        "uring_cpu": main.ratio("uring", "fio, tuned", lambda sample: sample.cpu_us_per_row),
        "threads_read": main.ratio("threads", "fio, tuned", lambda sample: sample.rows_per_s),
    }


def _steady_over_memmap(cases: Sequence[Case], way: str) -> float | None:
    """Our steady rows a second over those of a way of the memmap case (medians: it runs by itself)."""

    def median(what: str, way: str) -> float | None:
        found = [case.median(way, lambda sample: sample.rows_per_s) for case in cases if case.what == what]
        return next((one for one in found if one is not None), None)

    ours, theirs = median(STEADY, "dsa"), median(MEMMAP, way)
    return None if ours is None or theirs is None else ours / theirs


def as_json(
    cases: Sequence[Case], notes: Sequence[str], settings: dict[str, Any], counters: dict[str, Any]
) -> dict[str, Any]:
    """The whole run as one object of plain values.

    Args:
        notes: what was left out, and why.
        settings: how the run was made.
        counters: how the reads compare to the device's own counter.
    """
    found = ratios(cases)
    return {
        "ratios": {name: _rounded(value) for name, value in found.items()},
        "targets": {
            target.name: {
                "bound": target.bound,
                "at_most": target.at_most,
                "met": None if (value := found[target.name]) is None else target.met(value),
            }
            for target in TARGETS
        },
        "ratios_to_tuned_fio": {name: _rounded(value) for name, value in ratios_to_tuned_fio(cases).items()},
        "settings": settings,
        "device_counter": counters,
        "notes": list(notes),
        "cases": [
            {
                "what": case.what,
                "record_bytes": case.record_bytes,
                "way": way,
                "rounds": len(samples),
                "rows_per_s": _rounded(case.median(way, lambda sample: sample.rows_per_s)),
                "bytes_per_s": _rounded(case.median(way, lambda sample: sample.bytes_per_s)),
                "us_per_row": _rounded(case.median(way, lambda sample: sample.us_per_row)),
                "cpu_us_per_row": _rounded(case.median(way, lambda sample: sample.cpu_us_per_row)),
            }
            for case in cases
            for way, samples in case.samples.items()
        ],
    }


def _rounded(value: float | None) -> float | None:
    """Four significant digits."""
    if value is None or value == 0 or not math.isfinite(value):
        return None if value is not None and not math.isfinite(value) else value
    return round(value, 3 - math.floor(math.log10(abs(value))))
