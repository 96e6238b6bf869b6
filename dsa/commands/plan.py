"""`dsa plan`: what a table will need, before it is made."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.table import Table

from dsa.commands.output import clear_errors, console, print_json, size
from dsa.config import MIB
from dsa.errors import ConfigError
from dsa.io.cache import FRAME_OVERHEAD_BYTES
from dsa.io.cache_budget import cache_bytes as parse_cache
from dsa.io.double_buffer import MOST_BYTES
from dsa.io.layout import RecordLayout, choose_segment_bytes, segment_layout
from dsa.io.staging_buffer import block_bytes

_MOMENTS = {"float32": "float32", "float64": "float64", "bfloat16": "float32", "float16": "float32"}
_ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_COUNT = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kmgb]?)\s*", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_DAY_S = 86_400

ROW_BYTES = 8
"""RAM a row beside its entry of the location index: 4 of the row's frame, and what is known of coming batches."""
FIXED_BYTES = 64 * MIB
"""RAM for I/O buffers, segments being written, code."""
LOG_FACTOR = 2
"""A log is cleaned when it is twice its live records."""
WRITE_AMPLIFICATION = 1.45
"""Bytes written for each byte of changed records, cleaning included: measured 1.26 (Zipf) to 1.45 (uniform) in logs of
twice the live records, the greater taken."""


@dataclass(frozen=True)
class Plan:
    """What a table needs, in bytes, and what `torch.optim.SparseAdam` would need in its place.

    Args:
        cache_bytes, index_bytes, ram_bytes: of RAM, beside the weights; the last is the sum, with buffers.
        vram_bytes: beside weights on an accelerator: two staging buffers, each for a batch and a quarter more;
            the update takes some temporaries besides.
        live_bytes: all rows' records; disk_bytes: the most that the state directory can become; a generation of
            `close()` is as much as a checkpoint more, until the next one.
        written_per_day_bytes: by write-behind and cleaning, at most: a row that is touched again before it was written
            costs nothing more; checkpoint_bytes: what each checkpoint writes beside the dirty rows.
        weights_bytes: of the parameter, in RAM or VRAM with either optimizer.
        sparse_adam_bytes: moments in RAM (or VRAM) with SparseAdam.
    """

    rows: int
    dim: int
    dtype: str
    batch_rows: int
    steps_per_second: float
    keep_generations: int
    record_bytes: int
    segment_bytes: int
    weights_bytes: int
    cache_bytes: int
    index_bytes: int
    ram_bytes: int
    vram_bytes: int
    live_bytes: int
    disk_bytes: int
    write_amplification: float
    written_per_day_bytes: int
    checkpoint_bytes: int
    sparse_adam_bytes: int


def parse_count(name: str, text: str) -> int:
    """A whole number above 0 from a text such as "10M", "1_000_000" or "2.5k" (thousands, not 1024).

    Raises:
        ConfigError: it is none; the message calls it `name`.
    """
    found = _COUNT.fullmatch(text)
    count = float(re.sub("[_,]", "", found.group(1))) * _FACTORS[found.group(2).lower()] if found else 0.0
    if count < 1 or count != int(count) or count >= 2**48:
        raise ConfigError(f'{name} must be a whole number such as 237, "500k" or "10M", got {text!r}')
    return int(count)


def make_plan(
    *, rows: int, dim: int, dtype: str, batch: int, steps_per_second: float, keep_generations: int, cache: str
) -> Plan:
    """The needs of one table.

    Raises:
        ConfigError: a value that cannot be meant.
    """
    if dtype not in _MOMENTS:
        raise ConfigError(f"--dtype must be one of {', '.join(_MOMENTS)}, got {dtype!r}")
    if not 0 <= steps_per_second < 1e9:
        raise ConfigError(f"--steps-per-second must be 0 or more, got {steps_per_second}")
    if keep_generations < 1:
        raise ConfigError(f"--keep-generations must be at least 1, got {keep_generations}")
    record_bytes = RecordLayout(dim, _MOMENTS[dtype]).record_bytes
    batch_rows = min(batch, rows)
    cache_bytes = min(parse_cache(cache, whole := rows * (record_bytes + FRAME_OVERHEAD_BYTES)), whole)
    layout = segment_layout(record_bytes, rows, choose_segment_bytes(record_bytes, rows, cache_bytes))
    live_bytes = rows * record_bytes
    index_bytes = rows * (8 if rows * 16 < 2**31 else 12)
    # While a checkpoint is written its index is there beside the retained ones; the logs hold what all refer to.
    disk_bytes = LOG_FACTOR * (1 + keep_generations) * live_bytes + (1 + keep_generations) * index_bytes
    weights_bytes = rows * dim * _ITEM_BYTES[dtype]
    return Plan(
        rows=rows,
        dim=dim,
        dtype=dtype,
        batch_rows=batch_rows,
        steps_per_second=steps_per_second,
        keep_generations=keep_generations,
        record_bytes=record_bytes,
        segment_bytes=layout.segment_bytes,
        weights_bytes=weights_bytes,
        cache_bytes=cache_bytes,
        index_bytes=index_bytes,
        ram_bytes=cache_bytes + index_bytes + rows * ROW_BYTES + FIXED_BYTES,
        vram_bytes=2 * block_bytes(min(batch_rows * record_bytes, MOST_BYTES)),
        live_bytes=live_bytes,
        disk_bytes=disk_bytes,
        write_amplification=WRITE_AMPLIFICATION,
        written_per_day_bytes=int(batch_rows * record_bytes * steps_per_second * _DAY_S * WRITE_AMPLIFICATION),
        checkpoint_bytes=index_bytes,
        sparse_adam_bytes=2 * weights_bytes,
    )


def plan(
    rows: Annotated[str, typer.Option(help="Rows of the table, such as 10M.")],
    dim: Annotated[str, typer.Option(help="Elements of a row.")],
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, float64, bfloat16 or float16.")] = "float32",
    batch: Annotated[str, typer.Option(help="Different rows that a step touches.")] = "8192",
    steps_per_second: Annotated[float, typer.Option(help="Steps a second.")] = 20.0,
    keep_generations: Annotated[int, typer.Option(help="Checkpoints that stay loadable.")] = 2,
    cache: Annotated[str, typer.Option(help='RAM for frames: bytes, "2GiB", or "auto" as it would be here.')] = "2GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a table needs of RAM, VRAM and disk, and what it writes a day, beside what SparseAdam needs."""
    with clear_errors(as_json=as_json):
        found = make_plan(
            rows=parse_count("--rows", rows),
            dim=parse_count("--dim", dim),
            dtype=dtype,
            batch=parse_count("--batch", batch),
            steps_per_second=steps_per_second,
            keep_generations=keep_generations,
            cache=cache,
        )
        if as_json:
            print_json(asdict(found))
            return
        screen = console()
        screen.print(_needs(found))
        screen.print(
            f"Disk: {LOG_FACTOR} x (1 + {found.keep_generations} generations) x {size(found.live_bytes)} of live "
            f"records at its peak, and {1 + found.keep_generations} indexes of {size(found.index_bytes)}.\n"
            f"Written: {found.batch_rows:,} rows x {size(found.record_bytes)} x {found.steps_per_second:g} steps/s, "
            f"x {found.write_amplification} for cleaning (write amplification of logs twice the live records); rows "
            "touched again while they are in the cache cost less.\n"
            f"(Assumed or given: --batch, --steps-per-second.)\n"
            f"Each checkpoint writes {size(found.checkpoint_bytes)} beside the dirty rows.",
            soft_wrap=True,
        )
        if found.sparse_adam_bytes <= found.ram_bytes:
            screen.print("SparseAdam needs less RAM for this table: DSA gains nothing here.")


def _needs(found: Plan) -> Table:
    table = Table(title=f"{found.rows:,} rows of {found.dim} x {found.dtype}", title_justify="left")
    for name in ("", "DiskSparseAdam", "SparseAdam"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("weights (RAM or VRAM)", size(found.weights_bytes), size(found.weights_bytes))
    moments = size(found.sparse_adam_bytes)
    table.add_row("RAM beside the weights", size(found.ram_bytes), f"{moments} (weights in RAM)")
    table.add_row("  of that, cache", size(found.cache_bytes), "")
    table.add_row("VRAM beside the weights, on a GPU", size(found.vram_bytes), f"{moments} (weights in VRAM)")
    table.add_row("disk at its peak", size(found.disk_bytes), "0 B")
    table.add_row("written a day, at most", f"{found.written_per_day_bytes / 1e12:,.2f} TB", "0 TB")
    return table
