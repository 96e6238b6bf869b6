"""What the optimizer says of itself: announced share and its warning, hits, requests, sizes."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import disk_optimizer, sparse
from torch import nn

from dsa import DiskSparseAdam, IOConfig

N_ROWS, WIDTH = 400, 4
pytestmark = pytest.mark.usefixtures("one_thread")


def make(path: Path, n_rows: int = N_ROWS, width: int = WIDTH, **options: Any) -> tuple[nn.Parameter, DiskSparseAdam]:
    param = nn.Parameter(torch.zeros(n_rows, width))
    return param, DiskSparseAdam([("w", param)], state_dir=path, **options)


def step(param: nn.Parameter, opt: DiskSparseAdam, rows: Any) -> None:
    rows = torch.as_tensor(rows)
    param.grad = sparse(rows, torch.ones(len(rows), *param.shape[1:]), param.shape)
    opt.step()


def test_announced_share_and_one_warning_when_rows_are_missed(tmp_path: Path) -> None:
    param, opt = make(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            opt.announce({"w": range(80)})
            step(param, opt, range(100))
    assert opt.statistics().announced_share == 0.8
    assert len(caught) == 1
    assert "only 80%" in str(caught[0].message)
    assert "negatives drawn in the model?" in str(caught[0].message)
    assert caught[0].filename == __file__
    opt.close()


def test_no_warning_where_nearly_all_is_announced_or_nothing_at_all(tmp_path: Path) -> None:
    for announced, name in ((range(95), "most"), (None, "none")):
        param, opt = make(tmp_path / name)
        for _ in range(40):
            if announced is not None:
                opt.announce({"w": announced})
            step(param, opt, range(100))
        assert opt.statistics().announced_share == (0.95 if announced is not None else 0.0)
        opt.close()


def test_an_announcement_is_used_up_by_one_step_first_in_first_out(tmp_path: Path) -> None:
    param, opt = make(tmp_path)
    for rows in ([1], [2], [3]):
        opt.announce({"w": rows})
    assert opt.statistics().window_batches == 3
    for i, rows in enumerate(([1], [2], [3], [4])):
        step(param, opt, rows)
        assert opt.statistics().announced_share == (1.0 if i < 3 else 0.75)
    assert opt.statistics().window_batches == 0
    opt.close()


def test_a_full_window_forgets_its_youngest_and_announcing_never_blocks(tmp_path: Path) -> None:
    param, opt = make(tmp_path, io=IOConfig(known_batches=4))
    for row in range(10):
        opt.announce({"w": [row]})
    assert opt.statistics().forgotten_batches == 6
    for row in range(10):
        step(param, opt, [row])
    assert opt.statistics().announced_share == 0.4
    assert opt.statistics().window_batches == 0
    opt.close()


def test_hits_misses_and_new_rows_add_up(tmp_path: Path) -> None:
    param, opt = make(tmp_path)
    step(param, opt, range(100))
    first = opt.statistics()
    assert (first.cache_hits, first.cache_misses, first.rows_new, first.rows_read) == (0, 100, 100, 0)
    assert (first.read_requests, first.steps, first.rows_touched) == (0, 1, 100)
    step(param, opt, range(50, 150))
    second = opt.statistics()
    assert (second.cache_hits, second.cache_misses, second.rows_new) == (50, 150, 150)
    assert second.hit_rate == 0.25
    opt.checkpoint()
    opt.close()
    last = opt.statistics()  # also after close()
    assert (last.rows_written, last.live_records, last.dirty_frames, last.pinned_frames) == (150, 150, 0, 0)
    assert last.write_bytes >= 150 * 2 * WIDTH * 4
    opt = DiskSparseAdam([("w", param)], state_dir=tmp_path, existing="resume")
    opt.announce({"w": range(200)})
    step(param, opt, range(200))
    again = opt.statistics()
    assert (again.rows_read, again.rows_new, again.cache_misses, again.cache_hits) == (150, 50, 200, 0)
    assert again.read_requests >= 1
    assert again.read_bytes >= 150 * 2 * WIDTH * 4
    opt.close()


def test_times_and_sizes_are_there(tmp_path: Path) -> None:
    param, opt = make(tmp_path, cache=9000)
    step(param, opt, range(50))
    opt.checkpoint()
    found = opt.statistics()
    assert 50 <= found.frames < N_ROWS
    assert 0 < found.cache_bytes <= 9000
    on_disk = sum(path.stat().st_size for path in (tmp_path / "tables").iterdir())
    assert found.state_bytes_on_disk == on_disk > 0
    assert min(found.gradient_s, found.update_s, found.commit_s) > 0
    assert found.wait_s >= 0
    opt.close()


def test_one_warning_names_the_cache_that_a_batch_needs(tmp_path: Path) -> None:
    param, opt = make(tmp_path / "small", cache=3000)
    with pytest.warns(UserWarning, match=r"more rows than the cache has frames.*cache=\d+ bytes") as caught:
        step(param, opt, range(0, 300, 2))
    step(param, opt, range(0, 300, 2))
    enough = int(str(caught[0].message).split("cache=")[1].split()[0])
    opt.close()
    param, opt = make(tmp_path / "enough", cache=enough)
    step(param, opt, range(0, 300, 2))
    opt.close()


# No request of its own for any row.


def system_reads() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("syscr:"):
            return int(line.split()[1])
    raise AssertionError("no syscr")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("backend", ["threads", "aiofiles", "uring"])
def test_rows_side_by_side_take_few_requests_and_new_ones_none(tmp_path: Path, backend: str) -> None:
    n_rows, count, width = 40_000, 8192, 16
    record_bytes = 2 * width * 4
    param = nn.Parameter(torch.zeros(n_rows, width))
    opt = disk_optimizer([("w", param)], tmp_path, backend=backend)
    step(param, opt, range(2 * count))
    opt.close()
    opt = disk_optimizer([("w", param)], tmp_path, backend=backend, existing="resume")
    before, calls = opt.statistics(), system_reads()
    opt.moments("w", range(100, 100 + count))
    after, more_calls = opt.statistics(), system_reads()
    requests = after.read_requests - before.read_requests
    assert after.rows_read - before.rows_read == count
    segment_bytes = json.loads((tmp_path / "manifest.json").read_text())["body"]["tables"][0]["segment_bytes"]
    assert 1 <= requests <= count * record_bytes / segment_bytes + 2
    assert more_calls - calls <= requests + 50
    opt.moments("w", range(20_000, 20_000 + count))
    last = opt.statistics()
    assert last.read_requests == after.read_requests
    assert last.rows_new - after.rows_new == count
    opt.close()
