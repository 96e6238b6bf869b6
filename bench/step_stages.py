"""The stages of bench.step: who takes the same steps in turns with whom."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import step_cached, step_memory
from bench.device_files import ReadCheck, ReadsDiffer, drop_cache, write_file
from bench.device_fio import Fio, NoFio
from bench.device_samples import Sample
from bench.memory_limit import CannotLimit
from bench.step_samples import (
    ALONE,
    DSA,
    FIO,
    HIDDEN,
    LARGE,
    LIMITED,
    RAM,
    SMALL,
    StepCase,
    fixed_cost,
    sample,
)
from bench.step_scale import LARGE_WIDTH, MIN_RAM_SHARE, WIDTH, Scale
from bench.step_training import MOST_LEAD, N_RELATIONS, Alone, InRam, OnDisk, TransE, Turn, frame_bytes
from bench.step_workload import Batch, Draws, distinct_rows, reference_misses
from dsa.config import IOConfig
from dsa.io.backends.direct import probe
from dsa.io.cache_budget import available_bytes
from dsa.io.layout import round_up
from dsa.optim.lookahead import MOST_AHEAD

STAGES = ("cached", "alone", "hidden", "limited", "large")
_CACHED_DEPTH = _FEW_AHEAD = 4
_BEYOND = MOST_AHEAD + 16  # batches that lookahead may want after the last step


@dataclass
class Stages:
    """One run. Each stage adds its cases; what cannot be measured here adds a note that says why.

    Args:
        directory: an empty one, removed by the caller.
        tell: told what is going on.
        backend: of DSA.
        shared_memory: where weights are put that no memory cgroup is to count.
        only: these stages.
    """

    scale: Scale
    directory: Path
    check: ReadCheck
    tell: Callable[[str], None] = lambda message: None
    backend: str = "auto"
    shared_memory: Path = Path("/dev/shm")
    only: Collection[str] = STAGES
    cases: list[StepCase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fixed_step_s: dict[str, Sequence[float]] = field(default_factory=dict)
    fio: Fio | None = None
    file_system: str = ""

    def run(self) -> None:
        """All stages.

        Raises:
            DsaError: DSA failed.
            NoFio: fio failed that had worked.
        """
        self._find_fio()
        scale = self.scale
        stages: dict[str, list[Callable[[], None]]] = {
            "cached": [partial(self.cached, rows, distributions) for rows, distributions in scale.cached],
            "alone": [partial(self.alone, *chosen) for chosen in scale.alone],
            "hidden": [partial(self.hidden, distribution) for distribution in ("zipf 0.9", "zipf 1.1")],
            "limited": [self.limited],
            "large": [partial(self.large, rows, in_use) for rows, in_use in scale.large],
        }
        for name in STAGES:
            if name in self.only:
                for stage in stages[name]:
                    stage()

    @property
    def fixed(self) -> dict[str, object]:
        """What a cached step of 256 rows takes."""
        return fixed_cost(self.fixed_step_s)

    # What there is.

    def _find_fio(self) -> None:
        found = probe(self.directory)
        self._request_bytes = round_up(8 * WIDTH, found.alignment)
        self._direct = found.works
        if found.works:
            self.file_system = f"direct I/O in multiples of {found.alignment} bytes: the page cache has no part in it"
        else:
            self.file_system = f"no direct I/O ({found.reason}): DSA and fio go through the page cache"
            self.check.sectors = None
        self._file = self.directory / "records"
        write_file(self._file, self.scale.fio_file_bytes)
        try:
            self.fio = Fio.find(self._file, self._direct)
        except NoFio as error:
            self.notes.append(f"fio, and all ratios to it: {error}")

    def _fio_reads(self, reads: float, steps: int) -> Sample:
        """fio's time for so many random reads of a record a step, each step's done before the next one's begin."""
        fio, per_step = self.fio, max(round(reads), 1)
        if fio is None:
            raise RuntimeError("there is no fio here")

        def take() -> Sample:
            if not self._direct:
                drop_cache(self._file)
            return fio.run(
                self._file,
                "randread",
                record_bytes=self._request_bytes,
                count=per_step * steps,
                depth=IOConfig().queue_depth,
                direct=self._direct,
                drain_every=per_step,
            )

        try:
            found = self.check.measure("fio's reads", take)
        except ReadsDiffer as error:
            self.notes.append(f"the comparison of fio's reads with the device's counter, from then on: {error}")
            self.check.sectors = None
            found = take()
        return Sample(found.rows, found.nbytes, found.seconds * reads / per_step)

    def _room(self, what: str, ram_bytes: int) -> bool:
        """Whether so much memory is available; else a note says that `what` is left out."""
        available = available_bytes()
        if available is None or available >= MIN_RAM_SHARE * ram_bytes:
            return True
        self.notes.append(f"{what}: takes {ram_bytes >> 20:,} MiB of memory, {available >> 20:,} MiB are available")
        return False

    @contextmanager
    def _place(self) -> Iterator[Path]:
        place = self.directory / "state"
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    # The stages.

    def cached(self, rows: int, distributions: Sequence[str]) -> None:
        """Everything in cache: the time of step() alone, beside SparseAdam's; and what a small step costs at least."""
        if not self._room(f"all of {rows:,} rows in cache", rows * (3 * 4 * WIDTH + 2 * frame_bytes(WIDTH))):
            return
        self.tell(f"{rows:,} rows, all in cache")
        most = max(draws for draws, _ in self.scale.cached_blocks)
        work = Alone(rows, WIDTH, most)  # all change the same weights, in turns
        options: dict[str, Any] = {"backend": self.backend, "depth": _CACHED_DEPTH}
        ram = InRam(work)
        with (
            self._place() as place,
            OnDisk(work, place / "exact", 1.0, **options) as exact,
            OnDisk(work, place / "fast", 1.0, kernel="fast", **options) as fast,
        ):
            for trainer in (ram, exact, fast):
                trainer.fill()
            for distribution in distributions:
                self.cases += step_cached.rounds(self.scale, distribution, _CACHED_DEPTH, ram, exact, fast)
            if rows == self.scale.cached[-1][0]:
                self.fixed_step_s = step_cached.fixed(exact, self.scale.fixed_steps, self.scale.busy_steps)

    def alone(self, rows: int, caches: Sequence[float], distributions: Sequence[str]) -> None:
        """The optimizer alone, nothing to hide behind: beside SparseAdam, and fio for the reads that were missing."""
        batch_rows, scale = self.scale.batch_rows, self.scale
        ram_bytes = rows * int(3 * 4 * WIDTH + max(caches) * frame_bytes(WIDTH))
        if not self._room(f"the optimizer alone on {rows:,} rows", ram_bytes):
            return
        work = Alone(rows, WIDTH, batch_rows)
        ram = InRam(work)
        ram.fill()
        for cache in caches:
            self.tell(f"{rows:,} rows, cache {cache:.0%}, optimizer alone")
            with self._place() as place, OnDisk(work, place, cache, backend=self.backend) as disk:
                disk.fill()
                for distribution in distributions:
                    share = scale.turnovers if distribution == "uniform" else scale.warm_draws
                    case = StepCase(ALONE, 8 * WIDTH, {}, rows, WIDTH, rows, batch_rows, distribution, cache)
                    draws = Draws(rows, distribution, seed=1)
                    self._rounds(case, disk, ram, partial(draws.batch, batch_rows), draws, share)

    def hidden(self, distribution: str) -> None:
        """A TransE step to hide behind: beside the same with SparseAdam, and fio for the best policy's misses."""
        rows, triples, scale = self.scale.hidden_rows, self.scale.hidden_triples, self.scale
        if not self._room("a TransE step", rows * (4 * 4 * WIDTH + frame_bytes(WIDTH))):
            return
        ram = InRam(TransE(rows, WIDTH))
        ram.fill()
        model = TransE(rows, WIDTH)
        for cache in scale.hidden_caches:
            self.tell(f"{rows:,} rows, cache {cache:.0%}, with a TransE step, {distribution}")
            with self._place() as place, OnDisk(model, place, cache, backend=self.backend) as disk:
                disk.fill()
                case = StepCase(HIDDEN, 8 * WIDTH, {}, rows, WIDTH, rows, 4 * triples, distribution, cache)
                draws = Draws(rows, distribution, seed=1)
                draw = partial(draws.triples, triples, N_RELATIONS)
                self._rounds(case, disk, ram, draw, draws, scale.hidden_warm_draws)

    def _rounds(
        self, case: StepCase, disk: OnDisk, ram: InRam, draw: Callable[[], Batch], draws: Draws, warm_share: float
    ) -> None:
        """Warm up, then measure in turns: DSA, SparseAdam on the same batches, fio for the reads of as many steps."""
        steps = self.scale.block_steps
        rounds = self.scale.hidden_rounds if case.what == HIDDEN else self.scale.rounds
        warm = max(math.ceil(warm_share * case.table_rows / case.batch_rows), _BEYOND)
        first = [draw() for _ in range(4)]
        lead = disk.lead_steps(distinct_rows(first) / len(first))
        batches = [*first, *(draw() for _ in range(warm + rounds * (lead + steps) + _BEYOND))]
        disk.train_on(batches)
        disk.take(warm)
        turns: list[Turn] = []
        reference: float | None = None
        if case.what == HIDDEN:
            frames = int(case.cache * case.table_rows)
            reference = reference_misses(batches[:-_BEYOND], warm, frames, draws.frequencies())
        for number in range(rounds):
            at = warm + number * (lead + steps)
            disk.settle()
            disk.take(lead)
            turns.append(disk.take(steps))
            disk.settle()
            theirs = ram.take(batches[at + lead : at + lead + steps])
            turn = turns[-1]
            case.add(DSA, sample(turn.rows, WIDTH, turn.loop_s))
            case.add(RAM, sample(theirs.rows, WIDTH, theirs.loop_s))
            case.add_parts(turn.parts_s())
            case.steps += steps
            missing = turn.misses / steps if reference is None else reference
            if self.fio is not None and missing:
                case.add(FIO, self._fio_reads(missing, steps))
            if self.fio is not None and reference is not None:
                case.add_bound()
        case.misses = sum(turn.misses for turn in turns) / case.steps
        case.reference_misses = reference
        self.cases.append(case)

    def limited(self) -> None:
        """DSA and memmaps, each in a process of its own, whose memory is the state's divided by 2.7."""
        case = StepCase(LIMITED, 8 * WIDTH)
        try:
            step_memory.measure(case, self.scale, self.directory, self.shared_memory, self.backend, self.tell)
        except (CannotLimit, RuntimeError) as error:
            self.notes.append(f"optimizers in limited memory: {error}")
        if case.samples:
            self.cases.append(case)

    def large(self, rows: int, in_use: int) -> None:
        """The same batches' cost in a small table of narrow rows and in a large one.

        Few batches are announced: 64 of them would know half the rows of the small table beforehand, and next to none
        of a large one, and hits would be compared instead of costs.
        """
        scale, width, share = self.scale, LARGE_WIDTH, 0.10
        ram_bytes = (rows + scale.small_rows) * (4 * width + 16) + int(share * in_use * frame_bytes(width))
        if not self._room(f"{rows:,} rows of {width}", ram_bytes):
            return
        self.tell(f"{rows:,} rows of {width}, {in_use:,} of them in use, beside {scale.small_rows:,}")
        used = None if in_use == rows else some_rows(rows, in_use)
        works = [Alone(count, width, scale.batch_rows) for count in (rows, scale.small_rows)]
        draws = [Draws(rows, "uniform", 1, used), Draws(scale.small_rows, "uniform", 1)]
        case = StepCase(LARGE, 8 * width, {}, rows, width, in_use, scale.batch_rows, "uniform", share)
        misses: list[float] = []
        with self._place() as place:
            disk_of = partial(OnDisk, cache=share, backend=self.backend, depth=_FEW_AHEAD)
            big = disk_of(works[0], place / "large", in_use=used)
            small = disk_of(works[1], place / "small")
            with big, small:
                for disk, drawn, count in zip((big, small), draws, (in_use, scale.small_rows), strict=True):
                    updates = min(scale.large_turnovers * count, scale.large_most_updates)
                    warm = max(math.ceil(updates / scale.batch_rows), _BEYOND)
                    most = warm + scale.rounds * (scale.block_steps + MOST_LEAD) + _BEYOND
                    disk.fill()
                    disk.train_on([drawn.batch(scale.batch_rows) for _ in range(most)])
                    disk.take(warm)
                    disk.settle()
                for number in range(scale.rounds):
                    for disk, way in [(big, DSA), (small, SMALL)][:: 1 if number % 2 else -1]:
                        disk.take(max(big.lead_steps(scale.batch_rows), small.lead_steps(scale.batch_rows)))
                        turn = disk.take(scale.block_steps)
                        case.add(way, sample(turn.rows, width, turn.loop_s))
                        if way == DSA:
                            case.add_parts(turn.parts_s())
                            case.steps += scale.block_steps
                            misses.append(turn.misses / scale.block_steps)
                        disk.settle()
        case.misses = sum(misses) / len(misses)
        self.cases.append(case)


def some_rows(n_rows: int, count: int) -> NDArray[np.int64]:
    """So many different rows spread over the table, sorted."""
    random = np.random.default_rng(4)
    step = n_rows / count
    found: NDArray[np.int64] = (np.arange(count) * step + random.random(count) * (step - 1)).astype(np.int64)
    return found
