"""Kill -9: 30 of the runs of bench.crash, and the proof that they would notice a loss."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.crash import MOMENTS, make_plan

SEED = 4  # the thirty plans of which try every moment
REPOSITORY = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forked")

SABOTAGE = """
import sys
import bench.crash
from dsa.io.writebehind import WriteBehind

async def no_drain(self):
    pass

WriteBehind.drain = no_drain
sys.exit(bench.crash.main(sys.argv[1:]))
"""


def crash(code: list[str], runs: int, folder: Path, seed: int = SEED) -> tuple[int, list[str]]:
    """Run it in a process of its own, for forks need one without threads; its status and lines."""
    ended = subprocess.run(
        [sys.executable, *code, "--runs", str(runs), "--seed", str(seed), "--directory", str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=110,
    )
    return ended.returncode, [*ended.stdout.splitlines(), ended.stderr]


@pytest.mark.slow
def test_thirty_processes_killed_at_random_lose_nothing(tmp_path: Path) -> None:
    status, lines = crash(["-m", "bench.crash"], 30, tmp_path)
    assert status == 0, lines
    assert {make_plan(SEED, number).moment for number in range(30)} == set(MOMENTS), "each moment is tried"
    assert len(lines[-3].split(",")) >= 4, "and met: " + lines[-3]
    assert lines[-2] == "runs 30, survived 30, lost 0"
    assert lines[-1] == "", "nothing on stderr"
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_leaves_dirty_rows_out_is_noticed(tmp_path: Path) -> None:
    status, lines = crash(["-c", SABOTAGE], 3, tmp_path, seed=7)  # killed late enough
    assert status == 1
    assert lines[-2] == "runs 3, survived 0, lost 3"
    # Records that no generation holds, or whose place was given away too early: which, depends on what was under way.
    assert "the moments are not those of step" in lines[-1] or "does not match its check" in lines[-1]
