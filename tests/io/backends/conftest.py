"""What every test of a backend begins with: a rig, its faults, and a file of known bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_rigs import DATA, RIGS, Faults, Rig

from dsa.io.backends import Backend, File


@pytest.fixture(params=RIGS, ids=str)
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.param


@pytest.fixture
def faults() -> Iterator[Faults]:
    made = Faults()
    yield made
    made.open_gates()


@pytest.fixture
def file(backend: Backend, tmp_path: Path) -> Iterator[File]:
    path = tmp_path / "data"
    path.write_bytes(DATA.tobytes())
    opened = backend.open(path)
    yield opened
    backend.close(opened)
