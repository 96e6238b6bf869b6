"""What a run of the main job says at its end: the JSON object and the table."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.kge_training import Epoch


@dataclass(frozen=True)
class Result:
    """One run; `statistics` is empty for an optimizer in RAM."""

    epochs: list[Epoch]
    mrr: float
    hits_at_10: float
    peak_rss_bytes: int
    state_bytes_on_disk: int
    statistics: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` writes."""
        return {**asdict(self), "epochs": [epoch._asdict() for epoch in self.epochs]}


def peak_rss_bytes() -> int:
    """The most RAM that this process has had resident."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def result_table(result: Result, ram_state_bytes: int, training_s: float) -> Table:
    """The table printed at the end.

    Args:
        ram_state_bytes: what `torch.optim.SparseAdam` holds in RAM for this model.
        training_s: how long the epochs took.
    """
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("filtered MRR / Hits@10", f"{result.mrr:.4f} / {result.hits_at_10:.4f}")
    found = result.statistics
    if found:
        table.add_row("RAM for the state: the cache", _size(found["cache_bytes"]))
    table.add_row("RAM for the state: what SparseAdam needs", _size(ram_state_bytes))
    table.add_row("RAM of the process at its peak (Python, torch and data)", _size(result.peak_rss_bytes))
    if found:
        table.add_row("disk used", _size(result.state_bytes_on_disk))
        table.add_row("rows updated", f"{found['rows_touched']:,}")
        table.add_row("rows read / requests", f"{found['rows_read']:,} / {found['read_requests']:,}")
        table.add_row("rows written / requests", f"{found['rows_written']:,} / {found['write_requests']:,}")
        table.add_row("cache hit rate", f"{found['hit_rate']:.1%}")
        table.add_row("announced share", f"{found['announced_share']:.1%}")
        table.add_row("steps waited for the disk", f"{found['wait_s']:.2f} s of {training_s:.0f} s")
    return table


def _size(n_bytes: int) -> str:
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
