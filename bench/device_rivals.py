"""Other ways to read rows from a disk: aiofiles row by row, preadv in a thread pool, RocksDB."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiofiles
import numpy as np

from bench.device_files import aligned_buffer, draw, drop_cache
from bench.device_samples import Sample
from dsa.io.backends.direct import probe
from dsa.io.layout import round_up

POOL_THREADS = 32
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_LOAD_ROWS = 8192


def aiofiles_row_by_row(path: Path, record_bytes: int, count: int, seed: int) -> Sample:
    """A seek and a read for each row, one after the other, through the page cache, which is cold."""
    rows = draw(np.random.default_rng(seed), path.stat().st_size // record_bytes, count)

    async def read_all() -> None:
        async with aiofiles.open(path, "rb", buffering=0) as file:
            for row in rows.tolist():
                await file.seek(row * record_bytes)
                got = await file.read(record_bytes)
                if got is None or len(got) != record_bytes:
                    raise OSError(0, f"short read of row {row}")

    drop_cache(path)
    began, cpu = time.perf_counter(), time.process_time()
    asyncio.run(read_all())
    return Sample(count, count * record_bytes, time.perf_counter() - began, time.process_time() - cpu)


def preadv_in_a_pool(path: Path, record_bytes: int, count: int, seed: int) -> Sample:
    """An `os.preadv` for each row in a pool of threads, past the page cache where that works."""
    found = probe(path.parent)
    unit = round_up(record_bytes, found.alignment)
    rows = draw(np.random.default_rng(seed), path.stat().st_size // unit, count)
    buffer = aligned_buffer(count * unit).reshape(count, unit)
    fd = os.open(path, os.O_RDONLY | (_O_DIRECT if found.works else 0))

    def read(place: int, row: int) -> None:
        if os.preadv(fd, [buffer[place].data], row * unit) != unit:
            raise OSError(0, f"short read of row {row}")

    try:
        with ThreadPoolExecutor(POOL_THREADS) as pool:
            for _ in pool.map(time.sleep, [0] * POOL_THREADS):
                pass  # the threads are there
            began, cpu = time.perf_counter(), time.process_time()
            for _ in pool.map(read, range(count), rows.tolist()):
                pass
            return Sample(count, count * unit, time.perf_counter() - began, time.process_time() - cpu)
    finally:
        os.close(fd)


class RocksDB:
    """A RocksDB of `n_rows` records, written in order of rows, compacted; reads go past the page cache.

    Raises:
        ImportError: rocksdict is not installed.
    """

    def __init__(self, directory: Path, n_rows: int, record_bytes: int) -> None:
        import rocksdict

        self._directory, self._n_rows, self._record_bytes = directory, n_rows, record_bytes
        table = rocksdict.BlockBasedOptions()
        # Indexes and filters are held besides; of the rows next to nothing is, as in DSA's own reads.
        table.set_block_cache(rocksdict.Cache(max(n_rows * record_bytes // 64, 1 << 20)))
        table.set_bloom_filter(10, False)
        self._options = rocksdict.Options(raw_mode=True)
        self._options.set_block_based_table_factory(table)
        self._options.set_compression_type(rocksdict.DBCompressionType.none())
        self._options.set_use_direct_reads(True)
        self._options.set_use_direct_io_for_flush_and_compaction(True)
        self._options.increase_parallelism(os.cpu_count() or 1)
        self._database: Any = rocksdict.Rdict(str(directory), self._options)
        self._fill(rocksdict.WriteBatch)

    def _fill(self, make_batch: Callable[..., Any]) -> None:
        noise = np.random.default_rng(5)
        for first in range(0, self._n_rows, _LOAD_ROWS):
            rows = range(first, min(first + _LOAD_ROWS, self._n_rows))
            values = noise.bytes(len(rows) * self._record_bytes)
            batch = make_batch(raw_mode=True)
            for i, row in enumerate(rows):
                batch[row.to_bytes(8, "big")] = values[i * self._record_bytes : (i + 1) * self._record_bytes]
            self._database.write(batch)
        self._database.flush()
        self._database.compact_range(None, None)

    def read(self, count: int, seed: int) -> Sample:
        """One multi_get of rows at random."""
        rows = draw(np.random.default_rng(seed), self._n_rows, count)
        keys = [row.to_bytes(8, "big") for row in rows.tolist()]
        began, cpu = time.perf_counter(), time.process_time()
        values = self._database[keys]
        sample = Sample(count, count * self._record_bytes, time.perf_counter() - began, time.process_time() - cpu)
        if len(values) != count or any(value is None or len(value) != self._record_bytes for value in values):
            raise RuntimeError("RocksDB did not find all rows")
        return sample

    def close(self) -> None:
        """Close it and remove its files."""
        import rocksdict

        self._database.close()
        rocksdict.Rdict.destroy(str(self._directory), self._options)
