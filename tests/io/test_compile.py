"""Compiled code without a place to be cached: a read-only install, and no home to write to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsa

CAN_WRITE = 77

# Root's right to write anywhere (CAP_DAC_OVERRIDE) is dropped from what the next program may have.
LAUNCH = """
import ctypes, os, sys

if os.geteuid() == 0:
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""

SCRIPT = """
import importlib, logging, os, pkgutil, sys, warnings

if os.access(sys.argv[1], os.W_OK):
    sys.exit(77)
warnings.simplefilter("error")
import torch

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
import dsa
from dsa import DiskSparseAdam

assert dsa.__file__.startswith(sys.argv[1]), dsa.__file__
for module in pkgutil.walk_packages(dsa.__path__, "dsa."):
    if "cli" not in module.name and "commands" not in module.name:
        importlib.import_module(module.name)
table = torch.nn.Embedding(50, 8, sparse=True)
with DiskSparseAdam(table.parameters(), state_dir=sys.argv[2], backend="threads", cache=3000) as optimizer:
    for _ in range(3):
        table(torch.arange(20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print("steps", optimizer.statistics().steps)
"""


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A copy of the package in which nothing can be written."""
    package = tmp_path / "site" / "dsa"
    shutil.copytree(Path(dsa.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    directories = [package.parent, package, *(path for path in package.rglob("*") if path.is_dir())]
    for path in directories:
        path.chmod(0o555)
    yield package
    for path in directories:
        path.chmod(0o755)


@pytest.mark.skipif(sys.platform != "linux", reason="what root may do is taken away as Linux does it")
def test_a_read_only_install_without_a_home_works_and_says_so_once(read_only: Path, tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(read_only),  # nobody can make a directory there
        "PYTHONPATH": str(read_only.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, SCRIPT, str(read_only), str(tmp_path / "adam")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if done.returncode == CAN_WRITE:
        pytest.skip("this user can write to directories that are read-only")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps 3" in done.stdout
    lines = [line for line in done.stdout.splitlines() if "compiled code is not cached" in line]
    assert len(lines) == 1, done.stdout
    assert lines[0].startswith("dsa WARNING")
    assert not list(read_only.rglob("__pycache__"))
