"""State directories that each version wrote are opened, and read as what they held; unknown versions are refused."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from format.make_state import parameters

from dsa import DiskSparseAdam
from dsa.errors import FormatError
from dsa.io.verification import verify

HERE = Path(__file__).parent
VERSIONS = ("v1",)


@pytest.fixture(params=VERSIONS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A copy of a stored directory, and what its generations hold."""
    version = request.param
    shutil.copytree(HERE / version, tmp_path / version)
    return tmp_path / version, json.loads((HERE / f"{version}-expected.json").read_text())


def assert_holds(opt: DiskSparseAdam, params: dict[str, torch.nn.Parameter], expected: dict[str, Any]) -> None:
    for name, param in params.items():
        state = expected["tables"][name]
        moments = opt.moments(name, list(range(len(param))))
        for key in ("exp_avg", "exp_avg_sq"):
            hexes = [value.hex() for value in moments[key].reshape(-1).tolist()]
            assert hexes == state[key], f"{key} of {name} in generation {expected['generation']}"
        assert opt.state[param]["step"] == state["step"]


def test_every_generation_is_read_as_it_was_written(stored: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, expected = stored
    params = parameters()
    with DiskSparseAdam(list(params.items()), state_dir=directory) as opt:
        for generation in reversed(expected):
            state_dict = opt.state_dict()
            for entry in state_dict["state"].values():
                entry["generation"] = generation["generation"]
            opt.load_state_dict(state_dict)
            assert_holds(opt, params, generation)


def test_it_verifies(stored: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, expected = stored
    found = verify(directory)
    assert found.clean
    assert found.generations == tuple(generation["generation"] for generation in expected)
    assert found.record_checks > 0


def test_an_unknown_manifest_version_is_refused_with_both_numbers(stored: tuple[Path, list[dict[str, Any]]]) -> None:
    path = stored[0] / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format_version":1,', b'"format_version":7,', 1))
    with pytest.raises(FormatError, match="version 7, this program reads version 1"):
        DiskSparseAdam(list(parameters().items()), state_dir=stored[0], existing="resume")


def test_an_unknown_index_version_is_refused_with_both_numbers(stored: tuple[Path, list[dict[str, Any]]]) -> None:
    for path in (stored[0] / "index").iterdir():
        data = bytearray(path.read_bytes())
        data[8:12] = struct.pack("<I", 7)
        data[4092:4096] = struct.pack("<I", zlib.crc32(data[:4092]))
        path.write_bytes(data)
    with pytest.raises(FormatError, match="version 7, this program reads version 1"):
        DiskSparseAdam(list(parameters().items()), state_dir=stored[0], existing="resume")


def test_an_unknown_segment_version_is_found_with_both_numbers(stored: tuple[Path, list[dict[str, Any]]]) -> None:
    path = next((stored[0] / "tables").glob("000-*.log"))
    data = bytearray(path.read_bytes())
    changed = 0
    for begin in range(0, len(data), 8192):
        if data[begin : begin + 8] == b"DSASEG\r\n":
            data[begin + 8 : begin + 12] = struct.pack("<I", 7)
            data[begin + 44 : begin + 48] = bytes(4)
            check = zlib.crc32(data[begin + 64 : begin + 4096], zlib.crc32(data[begin : begin + 48]))
            data[begin + 44 : begin + 48] = struct.pack("<I", check)
            changed += 1
    assert changed
    path.write_bytes(data)
    found = verify(stored[0])
    assert not found.clean
    assert {damage.kind for damage in found.damage} == {"segment"}
    assert all("segment version 7, this program reads version 1" in damage.text for damage in found.damage)
