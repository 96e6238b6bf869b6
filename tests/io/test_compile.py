"""Compiled code and its cache: where there is no place for one, and what makes cached code out of date."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dsa
from dsa.io.compile import content_of
from dsa.optim import fused, sorting

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


# What is compiled into `main`, and is in other files: each line of CHANGES makes it another program.
INNER = """
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dsa.io.compile import kernel

def _define(typing_context, number):
    def make(context, builder, signature, arguments):
        return builder.add(arguments[0], ir.IntType(64)(100))
    return types.int64(types.int64), make

hundred_more = intrinsic(_define)
FACTOR = 3

@kernel
def triple(number):
    return number * 3

@kernel
def through(number):
    return triple(number)
"""

MAIN = """
import ctypes, sys

import inner
from inner import FACTOR, hundred_more, through
from numba import types
from dsa.io.compile import callback, kernel

@kernel
def calls(number):
    return helper(number)

@kernel
def helper(number):  # named above before it is there
    return through(number)

@kernel
def adds(number):
    return hundred_more(number)

@kernel
def scales(number):
    return number * FACTOR

@kernel
def by_module(number):
    return inner.triple(number) + inner.FACTOR

def back(number):
    return hundred_more(number)

region = callback(back, types.int64(types.int64))
found = [calls(7), adds(7), scales(7), by_module(7)]
found.append(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(region.address)(7))
hits = [sum(each.stats.cache_hits.values()) for each in (calls, adds, scales, by_module)]
print(found, [*hits, region.cache_hits])
"""

CHANGES = [
    ("", "", [21, 107, 21, 24, 107]),
    ("number * 3", "number * 4", [28, 107, 21, 31, 107]),
    ("(64)(100)", "(64)(200)", [28, 207, 21, 31, 207]),
    ("FACTOR = 3", "FACTOR = 5", [28, 207, 35, 33, 207]),
]


def test_cached_code_is_compiled_anew_where_what_it_has_from_other_files_has_changed(tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text(INNER)
    (tmp_path / "main.py").write_text(MAIN)
    root = str(Path(dsa.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run() -> str:
        command = [sys.executable, str(tmp_path / "main.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    for old, new, expected in CHANGES:
        inner.write_text(inner.read_text().replace(old, new))
        assert run().startswith(str(expected))
    assert run() == f"{expected} [1, 1, 1, 1, 1]"


def test_every_region_depends_on_the_functions_that_it_has_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = [
        (fused, fused.step_region(np.float32, np.float32, np.float32)),
        (fused, fused.sums_region(np.float32)),
        (sorting, sorting._runs_region()),
    ]
    for module, region in regions:
        function = region._compiled.__wrapped__
        before = content_of(function)
        assert content_of(function) == before
        with monkeypatch.context() as patch:
            patch.setattr(module, "at_address", module.carray)
            assert content_of(function) != before
