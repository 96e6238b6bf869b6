"""How much bench.step measures."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
WIDTH = 128
LARGE_WIDTH = 16
MIN_RAM_SHARE = 1.15
"""A stage is left out where the memory available is less than so many times what it takes."""


@dataclass(frozen=True)
class Scale:
    """How much is measured. Shares are of a table's rows.

    Args:
        rounds: of each configuration; in each round every way has its turn.
        batch_rows: draws of a batch, where nothing else is said.
        block_steps: steps of a turn, where nothing else is said.
        fio_file_bytes: of the file that fio reads.
        cached: (rows, distributions) of the tables that are wholly in cache.
        cached_blocks: (draws of a batch, steps of a turn) there.
        fixed_steps, busy_steps: steps of 256 rows that give their fixed cost, alone and beside a busy Python thread.
        alone: (rows, cache shares, distributions) of the optimizer alone.
        turnovers: updates before uniform batches are measured, as a share of the rows, so that the log is cleaned.
        warm_draws: draws a row before Zipf batches are measured.
        hidden_rows, hidden_triples, hidden_caches, hidden_warm_draws: of the TransE step; each triple looks up four
            entities.
        hidden_rounds: as rounds, there: what shares the cores with the model varies most from turn to turn.
        limited_rows, limited_turnovers, limited_batches: of the optimizers in limited memory.
        limited_plain_rows, limited_random_rows: that a batch of the memmaps updates, without and with MADV_RANDOM.
        limit_bytes: the memory limit; None: the state's bytes / 2.7.
        large: (rows, rows in use) of the large tables of 16; the small one's rows are `small_rows`, all in use.
        large_turnovers: as turnovers; of the rows in use, and at most `large_most_updates` rows.
    """

    rounds: int = 5
    batch_rows: int = 8192
    block_steps: int = 10
    fio_file_bytes: int = 2048 * MIB
    cached: tuple[tuple[int, tuple[str, ...]], ...] = (
        (100_000, ("uniform", "zipf 0.9", "zipf 1.1")),
        (1_000_000, ("uniform", "zipf 0.9", "zipf 1.1")),
        (4_000_000, ("uniform", "zipf 0.9", "zipf 1.1")),
    )
    cached_blocks: tuple[tuple[int, int], ...] = ((256, 100), (8192, 10), (65_536, 4))
    fixed_steps: int = 400
    busy_steps: int = 60
    alone: tuple[tuple[int, tuple[float, ...], tuple[str, ...]], ...] = (
        (100_000, (0.10, 1.0), ("uniform", "zipf 0.9", "zipf 1.1")),
        (1_000_000, (0.01, 0.05, 0.10, 0.25, 0.5, 1.0), ("uniform", "zipf 0.9", "zipf 1.1")),
        (4_000_000, (0.01, 0.10, 1.0), ("uniform", "zipf 0.9", "zipf 1.1")),
    )
    turnovers: float = 2.0
    warm_draws: float = 2.0
    hidden_rows: int = 1_000_000
    hidden_triples: int = 2048
    hidden_caches: tuple[float, ...] = (0.05, 0.10, 0.25)
    hidden_warm_draws: float = 20.0
    hidden_rounds: int = 11
    limited_rows: int = 4_000_000
    limited_turnovers: float = 1.0
    limited_batches: int = 5
    limited_plain_rows: int = 256
    limited_random_rows: int = 8192
    limit_bytes: int | None = None
    small_rows: int = 1_000_000
    large: tuple[tuple[int, int], ...] = ((100_000_000, 1_000_000), (100_000_000, 100_000_000))
    large_turnovers: float = 2.0
    large_most_updates: int = 4_000_000

    @property
    def disk_bytes(self) -> int:
        """What the stages take at most, at once, on the disk: logs are up to twice their live records, cleaned."""
        record, large_record = 8 * WIDTH, 8 * LARGE_WIDTH
        logs = [2 * record * rows for rows, _ in self.cached] * 2
        logs += [2 * record * rows for rows, _, _ in self.alone]
        logs += [2 * record * self.hidden_rows, 3 * record * self.limited_rows]
        logs += [2 * large_record * (in_use + self.small_rows) for _, in_use in self.large]
        indexes = [16 * rows for rows, _ in self.large]
        return self.fio_file_bytes + max(logs) + max(indexes, default=0)


FULL = Scale()
QUICK = Scale(
    rounds=3,
    fio_file_bytes=1024 * MIB,
    cached=((100_000, ("uniform",)), (1_000_000, ("uniform", "zipf 1.1"))),
    cached_blocks=((256, 100), (8192, 8), (65_536, 3)),
    fixed_steps=200,
    busy_steps=40,
    alone=((1_000_000, (0.10,), ("uniform",)),),
    turnovers=1.5,
    warm_draws=1.0,
    hidden_rows=300_000,
    hidden_triples=1024,
    hidden_warm_draws=2.0,
    hidden_rounds=7,
    limited_rows=2_000_000,
    limited_turnovers=0.5,
    limited_batches=3,
    limited_random_rows=4096,
    large=((100_000_000, 1_000_000),),
    large_turnovers=0.3,
)
