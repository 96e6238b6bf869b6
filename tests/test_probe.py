"""The probe of a directory's device: what it measures, what it leaves behind, what follows from it."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import errno
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from dsa import DiskSparseAdam
from dsa.config import DeviceChoice, IOConfig
from dsa.errors import ConfigError, DeviceError, UsageError
from dsa.io import backends, probe_trial
from dsa.io import probe as probing
from dsa.io.backends import AiofilesBackend, ThreadsBackend
from dsa.io.device_choice import MOST_GAP_BYTES, DeviceFigures, choose
from dsa.io.probe import DeviceProbe, load_probe, probe, report

MIB = 1 << 20
TINY = {"seconds": 0.05, "file_bytes": MIB}
FIGURES = DeviceFigures(10e-6, 17e-6, 90e-6, 40e-6, 2e9, 2.4e9, 32)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> DeviceProbe:
    return probe(tmp_path_factory.mktemp("device"), **TINY)


# Measuring.


def test_it_measures_every_size_depth_and_backend_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"kept")
    found = probe(tmp_path, **TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert found.path == str(tmp_path.resolve())
    working = [backend.name for backend in found.backends if backend.works]
    assert [backend.name for backend in found.backends] == [name for name, _ in backends.CANDIDATES]
    assert "threads" in working
    first = working[0]
    reads = {(r.backend, r.size_bytes, r.queue_depth) for r in found.rates if r.what == "read"}
    assert {(first, size, probe_trial.FULL_DEPTH) for size in probe_trial.SIZES_BYTES} <= reads
    assert {(first, 4096, depth) for depth in probe_trial.DEPTHS} <= reads
    assert {name for name, _, _ in reads} == set(working)
    writes = {(r.size_bytes, r.queue_depth) for r in found.rates if r.what == "write"}
    assert {size for size, _ in writes} == set(probe_trial.SIZES_BYTES)
    assert (4096, 1) in writes
    assert all(rate.per_s > 0 for rate in found.rates)
    assert found.sequential_read_bytes_per_s > 0
    assert found.sequential_write_bytes_per_s > 0
    assert found.file_bytes == MIB
    assert found.choice.backend in working
    assert found.choice.direct == found.direct == (found.alignment > 1)
    assert found.figures.queue_depth in probe_trial.DEPTHS


def test_it_works_inside_an_event_loop(tmp_path: Path) -> None:
    async def inside() -> DeviceProbe:
        return probe(tmp_path, **TINY)

    assert asyncio.run(inside()).choice.queue_depth >= 1


def test_backends_that_cannot_work_are_reported_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: IOConfig) -> ThreadsBackend:
        raise ConfigError("it needs another kernel")

    candidates = (("uring", broken), ("threads", ThreadsBackend), ("aiofiles", AiofilesBackend))
    monkeypatch.setattr(backends, "CANDIDATES", candidates)
    monkeypatch.setattr(probing, "CANDIDATES", candidates)
    found = probe(tmp_path, **TINY)
    assert [(b.name, b.works, b.reason) for b in found.backends] == [
        ("uring", False, "it needs another kernel"),
        ("threads", True, ""),
        ("aiofiles", True, ""),
    ]
    assert {rate.backend for rate in found.rates} == {"threads", "aiofiles"}
    assert {rate.queue_depth for rate in found.rates if rate.what == "write"} == {1}
    assert "it needs another kernel" in report(found)["backend"][1]
    monkeypatch.setattr(probing, "CANDIDATES", (("uring", broken),))
    with pytest.raises(UsageError, match="no backend works here: uring: it needs another kernel"):
        probe(tmp_path, **TINY)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_device_is_an_error_and_the_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def fail(self: object, file: object) -> None:
        seen.extend(os.listdir(tmp_path))
        raise DeviceError(errno.EIO, "sync", "the file")

    for name in ("threads", "uring", "aiofiles"):
        factory = dict(backends.CANDIDATES).get(name)
        if isinstance(factory, type):
            monkeypatch.setattr(factory, "sync", fail)
    with pytest.raises(DeviceError, match="sync failed"):
        probe(tmp_path, **TINY)
    assert [name.startswith(".dsa-probe-") for name in seen] == [True]
    assert list(tmp_path.iterdir()) == []


def test_too_little_free_space_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "free_bytes", lambda directory: 2 * MIB - 1)
    monkeypatch.setattr(probing, "Trial", None)  # so much as making one would fail
    with pytest.raises(UsageError, match=f"{2 * MIB - 1} bytes free.*{MIB}"):
        probe(tmp_path, **TINY)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for wrong in (file, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=f"{wrong.name} is not a directory"):
            probe(wrong, **TINY)
    with pytest.raises(ConfigError, match="seconds must be above 0"):
        probe(tmp_path, seconds=0)
    with pytest.raises(ConfigError, match="file_bytes at least"):
        probe(tmp_path, file_bytes=1000)


# What follows.


def test_gaps_are_read_where_that_is_cheaper_than_a_request() -> None:
    choice = choose(FIGURES, backend="uring", direct=True)
    assert choice == DeviceChoice("uring", True, 32, 19968, 256 * 1024, None)  # 10 us at 2 GB/s are 20,000 bytes
    slow = choose(dataclasses.replace(FIGURES, read_request_s=5e-3), backend="threads", direct=False)
    assert slow.merge_gap_bytes == MOST_GAP_BYTES
    assert slow.max_request_bytes == 4 * MIB
    fast = choose(dataclasses.replace(FIGURES, read_request_s=1e-6, read_bytes_per_s=1e8), backend="a", direct=False)
    assert fast.merge_gap_bytes == 0
    for figures in (slow, fast, choice):
        IOConfig(
            queue_depth=figures.queue_depth,
            merge_gap_bytes=figures.merge_gap_bytes,
            max_request_bytes=figures.max_request_bytes,
        )


def test_a_probe_survives_its_text_whole(found: DeviceProbe, tmp_path: Path) -> None:
    text = found.to_json()
    assert DeviceProbe.from_json(text) == found
    path = tmp_path / "probe.json"
    path.write_text(text)
    assert load_probe(path) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a saved probe"),
        ("[]", "not a saved probe"),
        ('{"format": "other"}', "not a saved probe"),
        ('{"format": "dsa-probe", "version": 9}', "version 9"),
        ('{"format": "dsa-probe", "version": 1}', "parts missing"),
    ],
)
def test_texts_that_are_no_probe_are_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        DeviceProbe.from_json(text)
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"wrong\.json: .*{says}"):
        load_probe(path)
    with pytest.raises(ConfigError, match="nowhere cannot be read"):
        load_probe(tmp_path / "nowhere")


# IOConfig.


class Chosen:
    choice = DeviceChoice("uring", True, 17, 8192, 512 * 1024, MIB)


def saved(path: Path, **choice: object) -> Path:
    knobs = dataclasses.asdict(Chosen.choice) | choice
    path.write_text(json.dumps({"format": "dsa-probe", "version": 1, "choice": knobs}))
    return path


def knobs(config: IOConfig) -> tuple[object, ...]:
    return (config.queue_depth, config.merge_gap_bytes, config.max_request_bytes, config.segment_bytes)


def test_knobs_that_are_not_given_come_from_the_probe(tmp_path: Path, found: DeviceProbe) -> None:
    path = saved(tmp_path / "probe.json")
    for source in (path, str(path), Chosen()):
        assert knobs(IOConfig(probe=source)) == (17, 8192, 512 * 1024, MIB)
        # A given one counts, its default too.
        assert knobs(IOConfig(probe=source, queue_depth=64, segment_bytes=None)) == (64, 8192, 512 * 1024, None)
    assert knobs(IOConfig()) == (64, 4096, MIB, None)
    choice = found.choice
    expected = (choice.queue_depth, choice.merge_gap_bytes, choice.max_request_bytes, choice.segment_bytes)
    assert knobs(IOConfig(probe=found)) == expected
    path.write_text(found.to_json())
    assert knobs(IOConfig(probe=path)) == expected


def test_the_backend_of_a_probe_is_known_to_the_config_and_taken_by_an_optimizer(
    tmp_path: Path, found: DeviceProbe
) -> None:
    assert IOConfig().probed_backend is None
    path = saved(tmp_path / "probe.json", backend="aiofiles")
    config = IOConfig(probe=path)
    assert config.probed_backend == "aiofiles"
    assert IOConfig(probe=found).probed_backend == found.choice.backend
    for backend, opened in (("auto", "aiofiles"), ("threads", "threads")):
        param = nn.Parameter(torch.zeros(20, 4))
        with DiskSparseAdam([("w", param)], state_dir=tmp_path / backend, io=config, backend=backend) as opt:
            assert opt.statistics().backend == opened


def test_a_config_with_a_probe_is_copied_and_replaced_as_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path / "probe.json")
    config = IOConfig(probe=path)
    path.unlink()
    for same in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config
        assert knobs(same) == (17, 8192, 512 * 1024, MIB)
        assert same.probed_backend == "uring"
    saved(path, queue_depth=99)
    changed = dataclasses.replace(config, merge_gap_bytes=0)
    assert knobs(changed) == (17, 0, 512 * 1024, MIB)


def test_wrong_values_of_a_probe_name_its_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    for wrong, says in (
        ({"queue_depth": 0}, "queue_depth must be a whole number"),
        ({"queue_depth": "many"}, "queue_depth must be a whole number"),
        ({"max_request_bytes": 5000}, "max_request_bytes must be a multiple of 4096"),
        ({"segment_bytes": 9000}, "segment_bytes must be a multiple of 4096"),
        ({"backend": 7}, "choice.backend must be a backend's name, got 7"),
    ):
        with pytest.raises(ConfigError, match=rf"{says}.*from .*bad\.json"):
            IOConfig(probe=saved(path, **wrong))
    IOConfig(probe=saved(path, queue_depth=0), queue_depth=1)  # not taken, so not wrong
    path.write_text(json.dumps({"format": "dsa-probe", "version": 1, "choice": {"queue_depth": 3}}))
    with pytest.raises(ConfigError, match=r"bad\.json lacks choice\.merge_gap_bytes"):
        IOConfig(probe=path)
    for text, says in (("{", "is not JSON"), ("{}", "is not a saved probe"), ('{"format":"dsa-probe"}', "has version")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"bad\.json {says}"):
            IOConfig(probe=path)
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        IOConfig(probe=tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="or a DeviceProbe, got 7"):
        IOConfig(probe=7)  # type: ignore[arg-type]
