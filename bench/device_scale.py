"""How much bench.device measures."""

from __future__ import annotations

from dataclasses import dataclass

from bench.device_files import MIB
from bench.device_optimizer import RECORD_BYTES
from bench.device_samples import KIB


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        file_bytes: of the file that is read and written at random.
        record_sizes: bytes.
        rounds: of each way, in turns.
        batch_rows, batch_bytes: rows in one go, and their bytes at most.
        batches: so many in a round.
        append_rows: made dirty and written in a round.
        steady_rows, steady_batch_rows, steady_steps: of the table, a step, a round.
        rocksdb_rows: in the database.
        memmap_rows, memmap_share: of the moments' files; memory, as a share of the files.
        memmap_plain_rows, memmap_random_rows, memmap_batches: updated in one batch, without and with MADV_RANDOM.
    """

    file_bytes: int
    record_sizes: tuple[int, ...] = (512, KIB, 4 * KIB, 16 * KIB, 64 * KIB)
    rounds: int = 7
    batch_rows: int = 8192
    batches: int = 4
    batch_bytes: int = 128 * MIB
    append_rows: int = 262_144
    steady_rows: int = 4_000_000
    steady_batch_rows: int = 8192
    steady_steps: int = 24
    rocksdb_rows: int = 2_000_000
    memmap_rows: int = 4_000_000
    memmap_share: float = 0.375
    memmap_plain_rows: int = 2048
    memmap_random_rows: int = 8192
    memmap_batches: int = 5

    @property
    def disk_bytes(self) -> int:
        """What the stages take at most, at once, on the disk."""
        log = 2 * self.steady_rows * RECORD_BYTES
        rivals = max(2 * self.rocksdb_rows * RECORD_BYTES, self.memmap_rows * RECORD_BYTES)
        return self.file_bytes + max(log, rivals, 7 * self.append_rows * RECORD_BYTES)


FULL = Scale(3 << 30)
QUICK = Scale(
    2 << 30,
    record_sizes=(512, KIB, 8 * KIB, 64 * KIB),
    batches=2,
    append_rows=131_072,
    steady_rows=1_000_000,
    steady_steps=8,
    rocksdb_rows=500_000,
    memmap_rows=1_000_000,
    memmap_plain_rows=256,
    memmap_random_rows=4096,
    memmap_batches=3,
)
