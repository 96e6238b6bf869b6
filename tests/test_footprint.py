"""How much memory and disk it takes: bounded by the rows and the cache, not by how long training runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parity_rig import sparse
from torch import nn

from dsa import DiskSparseAdam

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_peak_memory_is_bounded_by_rows_and_cache(tmp_path: Path) -> None:
    # Of 64 MiB + 16 bytes a row. `python -m bench.ram` without options is the same for ten million rows.
    sizes = ["--rows", "1000000", "--touched", "250000", "--cache", "8MiB", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "bench.ram", *sizes]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "250,000 distinct ones updated" in found.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("n_rows", "steps", "keep"), [(200_000, 500, None), (40_000, 150, 1), (40_000, 150, 2)])
def test_the_log_stays_within_twice_its_live_records(tmp_path: Path, n_rows: int, steps: int, keep: int | None) -> None:
    """Each generation that is kept may hold as much again (None: none is made before the end)."""
    width, batch = 16, 4096
    record_bytes = 2 * width * 4
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.zeros(n_rows, width))
    opt = DiskSparseAdam(
        [("w", param)], state_dir=tmp_path, cache=20 * batch * record_bytes // 10, keep_generations=keep
    )
    values = torch.ones(batch, width)
    for i in range(steps):
        param.grad = sparse(torch.randint(0, n_rows, (batch,), generator=generator), values, param.shape)
        opt.step()
        if keep is not None and i % 15 == 14:
            opt.checkpoint()
    opt.checkpoint()
    found = opt.statistics()
    file_bytes = sum(path.stat().st_size for path in (tmp_path / "tables").iterdir())
    assert found.live_records > 0.99 * n_rows
    assert found.state_bytes_on_disk == file_bytes
    segment_bytes = re.search(rb'"segment_bytes": ?(\d+)', (tmp_path / "manifest.json").read_bytes())
    assert segment_bytes is not None
    states = 1 + (keep or 0)
    assert file_bytes <= states * (2 * found.live_records * record_bytes + 16 * int(segment_bytes.group(1)))
    opt.close()
