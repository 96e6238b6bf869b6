"""What a run of bench.step found: cases, the ratios between ways, what they should be. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.device_samples import Case, Sample, Target

CACHED, ALONE, HIDDEN, LIMITED, LARGE = (
    "all in cache",
    "optimizer alone",
    "with a TransE step",
    "in limited memory",
    "large table",
)
DSA, FAST, RAM, FIO, BOUND = "dsa", "dsa, fast kernel", "SparseAdam in RAM", "fio", "bound"
MEMMAP, MEMMAP_RANDOM = "memmap", "memmap, MADV_RANDOM"
SMALL = "dsa, small table"
PARTS = ("loader and announcing", "model", "gradient", "wait", "update", "commit", "rest of step()")

TARGETS = (
    Target("cached_vs_ram_256", 1.0, False, "all in cache, 256 rows, rate of step() over SparseAdam's in RAM"),
    Target("cached_vs_ram_8192", 3.0, False, "all in cache, 8,192 rows, rate of step() over SparseAdam's in RAM"),
    Target("cached_vs_ram_65536", 3.0, False, "all in cache, 65,536 rows, rate of step() over SparseAdam's in RAM"),
    Target("fast_vs_ram_8192", 4.0, False, "all in cache, 8,192 rows, fast kernel, rate of step() over SparseAdam's"),
    Target("uniform_vs_fio_reads", 1.3, True, "uniform, cache 10 %, alone, time over fio's for the missing rows"),
    Target("hidden_step_vs_bound", 1.15, True, "TransE step, time over the larger of RAM's and fio's"),
    Target("vs_memmap_limited", 50.0, False, "in limited memory, rate over a memmap's"),
    Target("vs_memmap_random_limited", 3.0, False, "in limited memory, rate over a memmap's with MADV_RANDOM"),
    Target("rows_100m_vs_1m", 1.25, True, "rows of 16, time a row in a table of 100 M over 1 M"),
)
FIXED_TARGETS_MS = {"alone": 0.5, "busy": 45.0}
UNIFORM_CACHE = 0.10


@dataclass
class StepCase(Case):
    """Ways that took the same steps in turns; a sample is a turn.

    Args:
        table_rows, width: of the table; `in_use`: rows that are ever looked up.
        batch_rows: draws of a batch.
        cache: share of the rows in use that have frames.
        parts_s: where our time went, in seconds, by PARTS.
        misses: rows a step that we had to read; reference_misses: that the best policy would have.
    """

    table_rows: int = 0
    width: int = 0
    in_use: int = 0
    batch_rows: int = 0
    distribution: str = ""
    cache: float = 1.0
    parts_s: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    misses: float | None = None
    reference_misses: float | None = None

    def add_parts(self, parts_s: dict[str, float]) -> None:
        """Add to where the time went."""
        for name, seconds in parts_s.items():
            self.parts_s[name] = self.parts_s.get(name, 0.0) + seconds

    def add_bound(self) -> None:
        """After a round: what it could not take less than, the larger of RAM's time and fio's."""
        ram = self.samples[RAM][-1]
        fio_s = self.samples[FIO][-1].seconds if FIO in self.samples else 0.0  # nothing was missing
        self.add(BOUND, Sample(ram.rows, ram.nbytes, max(ram.seconds, fio_s)))


def rows_per_s(sample: Sample) -> float:
    return sample.rows_per_s


def seconds(sample: Sample) -> float:
    return sample.seconds


def us_per_row(sample: Sample) -> float:
    return sample.us_per_row


def ratios(cases: Sequence[StepCase]) -> dict[str, float | None]:
    """The value of every target, the worst configuration's; None where something that it needs was not measured."""

    def worst(
        pick: Callable[[Iterable[float]], float],
        some: Iterable[StepCase],
        ours: str,
        theirs: str,
        value: Callable[[Sample], float | None],
    ) -> float | None:
        found = [case.ratio(ours, theirs, value) for case in some]
        known = [one for one in found if one is not None]
        return pick(known) if known else None

    def cached(batch_rows: int) -> list[StepCase]:
        return [case for case in cases if case.what == CACHED and case.batch_rows == batch_rows]

    def of(what: str) -> list[StepCase]:
        return [case for case in cases if case.what == what]

    uniform = [case for case in of(ALONE) if case.distribution == "uniform" and case.cache == UNIFORM_CACHE]
    largest = max((case.table_rows for case in uniform), default=0)
    return {
        "cached_vs_ram_256": worst(min, cached(256), DSA, RAM, rows_per_s),
        "cached_vs_ram_8192": worst(min, cached(8192), DSA, RAM, rows_per_s),
        "cached_vs_ram_65536": worst(min, cached(65_536), DSA, RAM, rows_per_s),
        "fast_vs_ram_8192": worst(min, cached(8192), FAST, RAM, rows_per_s),
        "uniform_vs_fio_reads": worst(max, [case for case in uniform if case.table_rows == largest], DSA, FIO, seconds),
        "hidden_step_vs_bound": worst(max, of(HIDDEN), DSA, BOUND, seconds),
        "vs_memmap_limited": _over_memmap(of(LIMITED), MEMMAP),
        "vs_memmap_random_limited": _over_memmap(of(LIMITED), MEMMAP_RANDOM),
        "rows_100m_vs_1m": worst(max, of(LARGE), DSA, SMALL, us_per_row),
    }


def _over_memmap(cases: Sequence[StepCase], way: str) -> float | None:
    """Our median rate over a memmap's: each ran in a process of its own, one after the other, not in turns."""
    found = []
    for case in cases:
        ours, theirs = case.median(DSA, rows_per_s), case.median(way, rows_per_s)
        if ours is not None and theirs is not None:
            found.append(ours / theirs)
    return min(found, default=None)


def fixed_cost(step_s: dict[str, Sequence[float]]) -> dict[str, Any]:
    """Milliseconds of a cached step of 256 rows, by circumstance, beside what the median should be at most."""
    found: dict[str, Any] = {}
    for name, bound in FIXED_TARGETS_MS.items():
        some = [spent_s * 1e3 for spent_s in step_s.get(name, ())]
        found[name] = {
            "ms": rounded(statistics.median(some)) if some else None,
            "mean_ms": rounded(statistics.fmean(some)) if some else None,
            "at_most_ms": bound,
            "steps": len(some),
        }
    return found


def as_json(
    cases: Sequence[StepCase], fixed: dict[str, Any], notes: Sequence[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """The whole run as one object of plain values.

    Args:
        fixed: from `fixed_cost`.
        notes: what was left out, or was another than it should be, and why.
        settings: how the run was made.
    """
    found = ratios(cases)
    return {
        "ratios": {name: rounded(value) for name, value in found.items()},
        "targets": {
            target.name: {
                "bound": target.bound,
                "at_most": target.at_most,
                "met": None if (value := found[target.name]) is None else target.met(value),
            }
            for target in TARGETS
        },
        "fixed_cost_256_rows": fixed,
        "settings": settings,
        "notes": list(notes),
        "cases": [
            {
                "what": case.what,
                "table_rows": case.table_rows,
                "rows_in_use": case.in_use,
                "width": case.width,
                "batch_rows": case.batch_rows,
                "distribution": case.distribution,
                "cache": case.cache,
                "misses_per_step": rounded(case.misses),
                "reference_misses_per_step": rounded(case.reference_misses),
                "steps": case.steps,
                "where_the_time_goes_s": {name: rounded(value) for name, value in case.parts_s.items()},
                "ways": {
                    way: {
                        "rounds": len(samples),
                        "us_per_row": rounded(case.median(way, us_per_row)),
                        "rows_per_s": rounded(case.median(way, rows_per_s)),
                        "seconds": [rounded(sample.seconds) for sample in samples],
                    }
                    for way, samples in case.samples.items()
                },
            }
            for case in cases
        ],
    }


def rounded(value: float | None) -> float | None:
    """Four significant digits."""
    return None if value is None else float(f"{value:.4g}")


def sample(rows: int, width: int, spent_s: float) -> Sample:
    """A turn as a sample; bytes are those of the moments."""
    return Sample(rows, rows * 8 * width, spent_s)
