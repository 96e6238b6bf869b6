"""The stages of bench.device: what is measured in turns with what, on which files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import device_rivals
from bench.device_backends import Rig
from bench.device_files import MIB, ReadCheck, drop_cache, write_file
from bench.device_fio import Fio, NoFio
from bench.device_optimizer import RECORD_BYTES, Appends, SteadyUpdates
from bench.device_samples import APPEND, KIB, MAIN_RECORD_BYTES, MEMMAP, READ, STEADY, WAYS, WRITE, Case, Sample
from bench.device_scale import Scale
from bench.memory_limit import CannotLimit, MemoryLimit
from dsa.config import IOConfig
from dsa.errors import ConfigError

BACKENDS = ("uring", "threads", "aiofiles")
_ROOT = Path(__file__).resolve().parent.parent
_SLOW_ROWS = 512
_MEMMAP_TIMEOUT_S = 300.0
_SEGMENT_BYTES = 4 * MIB


@dataclass
class Stages:
    """One run. Each stage adds its cases; what cannot be measured here adds a note that says why.

    Args:
        directory: an empty one, removed by the caller.
        tell: told what is going on.
        optional: ways that need more than DSA's own dependencies: fio, rocksdb, memory limit.
    """

    scale: Scale
    directory: Path
    check: ReadCheck
    config: IOConfig
    tell: Callable[[str], None] = lambda message: None
    optional: frozenset[str] = frozenset(("fio", "rocksdb", "memory limit"))
    cases: list[Case] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steady_figures: dict[str, float] = field(default_factory=dict)
    fio: Fio | None = None
    direct: bool = True
    best: str = ""

    @property
    def file(self) -> Path:
        """The file that is read and written at random."""
        return self.directory / "records"

    def run(self) -> None:
        """All stages.

        Raises:
            ReadsDiffer: the device does not confirm what was read.
            DsaError: DSA failed.
        """
        self.tell(f"writing {self.scale.file_bytes >> 20:,} MiB")
        write_file(self.file, self.scale.file_bytes)
        with ExitStack() as stack:
            rigs = self._open_rigs(stack)
            self._find_fio()
            for record_bytes in self.scale.record_sizes:
                self.random(READ, record_bytes, rigs)
            self.ways_to_read(rigs)
            for record_bytes in self.scale.record_sizes:
                self.random(WRITE, record_bytes, rigs)
            best = next(iter(rigs))
        self.best = best
        self.append([name for name in BACKENDS if name in rigs])
        self.memmaps()
        self.steady(best)

    # What there is.

    def _open_rigs(self, stack: ExitStack) -> dict[str, Rig]:
        rigs: dict[str, Rig] = {}
        for name in BACKENDS:
            try:
                rigs[name] = stack.enter_context(Rig(name, self.file, self.config))
            except ConfigError as error:
                self.notes.append(f"backend {name}: {error}")
        if not rigs:
            raise ConfigError("; ".join(self.notes))
        self.direct = any(rig.direct for rig in rigs.values())
        if not self.direct:
            self.notes.append("the comparison with the device's counter: files here go through the page cache")
            self.check.sectors = None
        return rigs

    def _find_fio(self) -> None:
        if "fio" not in self.optional:
            self.notes.append("fio: not asked for")
            return
        try:
            self.fio = Fio.find(self.file, self.direct)
        except NoFio as error:
            self.notes.append(f"fio, and all ratios to it: {error}")

    # The stages.

    def _in_turns(self, case: Case, ways: Mapping[str, Callable[[], Sample]], rounds: int | None = None) -> None:
        """Every way once a round, in an order that moves on from round to round."""
        self.tell(f"{case.what}, {case.record_bytes} B: {', '.join(ways)}")
        names = list(ways)
        for number in range(rounds or self.scale.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                case.add(name, ways[name]())
        case.samples = {name: case.samples[name] for name in names}
        self.cases.append(case)

    def _checked(self, what: str, take: Callable[[], Sample]) -> Callable[[], Sample]:
        return lambda: self.check.measure(what, take)

    def _batch(self, record_bytes: int) -> tuple[int, int]:
        scale = self.scale
        rows = max(min(scale.batch_rows, scale.batch_bytes // record_bytes), 1)
        return rows, scale.batches

    def _fio_way(
        self, what: str, record_bytes: int, batch_rows: int, batches: int, *, tuned: bool = False
    ) -> Callable[[], Sample]:
        if self.fio is None:
            raise RuntimeError("there is no fio here")
        fio = replace(self.fio, tuned=tuned)

        def job() -> Sample:
            return fio.run(
                self.file,
                what,
                record_bytes=record_bytes,
                count=batch_rows * batches,
                depth=self.config.queue_depth,
                direct=self.direct,
                drain_every=batch_rows,
            )

        if "read" in what and self.direct:
            return self._checked(f"{'tuned ' if tuned else ''}fio, {what}, {record_bytes} B", job)
        return job

    def random(self, what: str, record_bytes: int, rigs: Mapping[str, Rig]) -> None:
        """Records of one size at random places, by every backend and by fio."""
        batch_rows, batches = self._batch(record_bytes)
        ways: dict[str, Callable[[], Sample]] = {}
        for name, rig in rigs.items():
            # Where the backend is slow, or only ever writes one request at a time, fewer tell as much.
            slow = name == "aiofiles" or (what == WRITE and name != "uring")
            ways[name] = self._rig_way(
                what, rig, record_bytes, min(batch_rows, _SLOW_ROWS) if slow else batch_rows, 1 if slow else batches
            )
        if self.fio is not None:
            unit = max(rig.request_bytes(record_bytes) for rig in rigs.values())
            job = "randread" if what == READ else "randwrite"
            ways["fio"] = self._fio_way(job, unit, batch_rows, batches)
            if what == READ and record_bytes == MAIN_RECORD_BYTES:
                ways["fio, tuned"] = self._fio_way(job, unit, batch_rows, batches, tuned=True)
        self._in_turns(Case(what, record_bytes), ways)

    def _rig_way(self, what: str, rig: Rig, record_bytes: int, rows: int, batches: int) -> Callable[[], Sample]:
        if what == WRITE:
            return lambda: rig.write(record_bytes, rows, batches)
        if rig.direct:
            return self._checked(f"{rig.name}, {what}, {record_bytes} B", lambda: rig.read(record_bytes, rows, batches))

        def read_cold() -> Sample:
            drop_cache(self.file)
            return rig.read(record_bytes, rows, batches)

        return read_cold

    def ways_to_read(self, rigs: Mapping[str, Rig]) -> None:
        """Records of 1 KiB by the fastest backend, and by what one would use without DSA."""
        case = Case(WAYS, KIB)
        rows, batches = self._batch(KIB)
        few = min(rows, 4 * _SLOW_ROWS)
        seeds = iter(range(1000, 1 << 30))
        ways: dict[str, Callable[[], Sample]] = {}
        for name in ("uring", "threads"):
            if name in rigs:
                ways[name] = self._rig_way(READ, rigs[name], KIB, rows, batches)
        ways["aiofiles, row by row"] = lambda: device_rivals.aiofiles_row_by_row(self.file, KIB, few, next(seeds))
        if hasattr(os, "preadv"):

            def pool() -> Sample:
                return device_rivals.preadv_in_a_pool(self.file, KIB, rows, next(seeds))

            ways["preadv, thread pool"] = self._checked("preadv in a thread pool", pool) if self.direct else pool
        with self._rocksdb() as database:
            if database is not None:
                ways["RocksDB, multi_get"] = lambda: database.read(rows, next(seeds))
            self._in_turns(case, ways)

    @contextmanager
    def _rocksdb(self) -> Iterator[device_rivals.RocksDB | None]:
        if "rocksdb" not in self.optional:
            self.notes.append("RocksDB: not asked for")
            yield None
            return
        self.tell(f"loading RocksDB with {self.scale.rocksdb_rows:,} rows")
        try:
            database = device_rivals.RocksDB(self.directory / "rocksdb", self.scale.rocksdb_rows, KIB)
        except ImportError as error:
            self.notes.append(f"RocksDB: {error}; pip install 'disk-sparse-adam[rivals]'")
            yield None
            return
        try:
            yield database
        finally:
            database.close()

    def append(self, backends: Sequence[str]) -> None:
        """Dirty records of 1 KiB written to the log, beside fio's sequential and random writes.

        Args:
            backends: the first of them is the one that "dsa" stands for in the ratios.
        """
        config = IOConfig(queue_depth=self.config.queue_depth, segment_bytes=_SEGMENT_BYTES, dirty_share=1.0)
        directory = self.directory / "append"
        directory.mkdir()
        ways: dict[str, Callable[[], Sample]] = {}
        with ExitStack() as stack:
            for backend in backends:
                appends = Appends(directory / backend, self.scale.append_rows, backend, config)
                stack.callback(appends.close)
                ways[f"dsa, {backend}" if ways else "dsa"] = appends.append
            fio = self.fio
            if fio is not None:
                nbytes = min(self.scale.append_rows * RECORD_BYTES, self.scale.file_bytes)
                count = max(nbytes // _SEGMENT_BYTES, 1)
                ways["fio sequential"] = lambda: fio.run(
                    self.file, "write", record_bytes=_SEGMENT_BYTES, count=count, depth=2, direct=self.direct
                )
                batch_rows, batches = self._batch(KIB)
                ways["fio random writes"] = self._fio_way("randwrite", KIB, batch_rows, batches)
            self._in_turns(Case(APPEND, RECORD_BYTES), ways)
        shutil.rmtree(directory)

    def steady(self, backend: str) -> None:
        """Uniform updates in a steady state, beside fio's time for the same number of reads."""
        scale = self.scale
        self.tell(f"bringing a table of {scale.steady_rows:,} rows into its steady state")
        directory = self.directory / "steady"
        with SteadyUpdates(directory, scale.steady_rows, backend, self.config, scale.steady_batch_rows) as updates:
            updates.prepare()

            def update() -> Sample:
                sample = updates.measure(scale.steady_steps)
                updates.settle()
                return sample

            asked = updates.read_bytes
            ways: dict[str, Callable[[], Sample]] = {
                "dsa": lambda: self.check.measure("steady updates", update, asked) if self.direct else update()
            }
            if self.fio is not None:
                ways["fio reads"] = self._fio_way("randread", RECORD_BYTES, scale.steady_batch_rows, scale.steady_steps)
            self._in_turns(Case(STEADY, RECORD_BYTES), ways)
            self.steady_figures = updates.figures()
        shutil.rmtree(directory)

    def memmaps(self) -> None:
        """Updates of the moments in two memmaps, in less memory than they take."""
        scale = self.scale
        if "memory limit" not in self.optional:
            self.notes.append("memmap: no memory limit asked for")
            return
        limit_bytes = int(scale.memmap_share * scale.memmap_rows * RECORD_BYTES)
        case = Case(MEMMAP, RECORD_BYTES)
        files = [self.directory / "exp_avg", self.directory / "exp_avg_sq"]
        try:
            with MemoryLimit.open(limit_bytes) as limit:
                self.tell(f"{MEMMAP}, in {limit_bytes >> 20:,} MiB of a memory cgroup of version {limit.version}")
                for file in files:
                    write_file(file, scale.memmap_rows * RECORD_BYTES // 2)
                for way, advice, rows in (
                    ("memmap", "normal", scale.memmap_plain_rows),
                    ("memmap, MADV_RANDOM", "random", scale.memmap_random_rows),
                ):
                    command = [sys.executable, "-m", "bench.device_memmap", *map(str, files), "--advice", advice]
                    command += ["--width", str(RECORD_BYTES // 8), "--rows", str(rows)]
                    command += ["--batches", str(scale.memmap_batches), "--warm-bytes", str(limit_bytes)]
                    found = json.loads(limit.run(command, _MEMMAP_TIMEOUT_S, cwd=_ROOT))
                    for seconds in found["seconds"]:
                        case.add(way, Sample(rows, rows * RECORD_BYTES, seconds))
                    for file in files:
                        drop_cache(file)
        except (CannotLimit, RuntimeError) as error:
            self.notes.append(f"memmap in limited memory: {error}")
        finally:
            for file in files:
                file.unlink(missing_ok=True)
        if case.samples:
            self.cases.append(case)
