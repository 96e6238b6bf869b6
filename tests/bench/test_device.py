from __future__ import annotations

import gc
import importlib.util
import io
import json
import os
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bench import device, device_files, device_fio, device_memmap, device_report, device_stages, readme
from bench.device_backends import Rig
from bench.device_files import (
    SECTOR_BYTES,
    TRIES,
    ReadCheck,
    ReadsDiffer,
    draw,
    find_counter,
    read_sectors,
    write_file,
)
from bench.device_optimizer import RECORD_BYTES, Appends, Batches, SteadyUpdates
from bench.device_samples import (
    APPEND,
    MEMMAP,
    READ,
    STEADY,
    TARGETS,
    WAYS,
    WRITE,
    Case,
    Sample,
    as_json,
    ratios,
)
from bench.device_scale import FULL, QUICK, Scale
from bench.device_stages import Stages
from bench.memory_limit import CannotLimit, Hierarchy, MemoryLimit, find_hierarchy
from dsa.config import IOConfig
from dsa.errors import ConfigError

RATIO_NAMES = [
    "uring_read_vs_fio",
    "threads_read_vs_fio",
    "uring_cpu_vs_fio",
    "append_vs_fio_sequential",
    "append_vs_random_write",
    "steady_update_vs_fio_reads",
    "vs_aiofiles",
    "vs_rocksdb",
    "vs_memmap_limited",
    "vs_memmap_random_limited",
]
TINY = Scale(
    8 << 20,
    record_sizes=(1024, 4096),
    rounds=2,
    batch_rows=64,
    batches=2,
    append_rows=600,
    steady_rows=2000,
    steady_batch_rows=100,
    steady_steps=3,
    rocksdb_rows=500,
    memmap_rows=4000,
    memmap_plain_rows=10,
    memmap_random_rows=20,
    memmap_batches=2,
)


def case(what: str, record_bytes: int = 1024, **ways: list[tuple[float, float]]) -> Case:
    """A case of 1,000 rows a sample, with (seconds, processor seconds) by way; "__" in a way's name is a space."""
    found = Case(what, record_bytes)
    for way, samples in ways.items():
        for seconds, cpu_s in samples:
            found.add(way.replace("__", " "), Sample(1000, 1000 * record_bytes, seconds, cpu_s))
    return found


# Samples and ratios.


def test_a_ratio_is_the_median_over_rounds_not_the_ratio_of_medians() -> None:
    some = case(READ, uring=[(1, 0), (2, 0), (9, 0)], fio=[(2, 0), (1, 0), (3, 0)])
    # Rates ours over theirs, round by round: 2, 1/2, 1/3; of the medians it would be 1.
    assert some.ratio("uring", "fio", lambda sample: sample.rows_per_s) == 0.5


def test_a_ratio_needs_both_ways_and_the_same_rounds() -> None:
    some = case(READ, uring=[(1, 0), (2, 0)], fio=[(2, 0)])
    assert some.ratio("uring", "threads", lambda sample: sample.rows_per_s) is None
    with pytest.raises(ValueError, match="uring has 2 rounds, fio has 1"):
        some.ratio("uring", "fio", lambda sample: sample.rows_per_s)


def test_the_worst_configuration_counts_rates_down_and_costs_up() -> None:
    cases = [
        case(READ, 512, uring=[(1.0, 0.5)], threads=[(2.0, 9)], fio=[(0.9, 1.0)]),
        case(READ, 1024, uring=[(1.0, 0.8)], threads=[(1.0, 9)], fio=[(1.0, 1.0)]),
        case(WRITE, 1024, uring=[(9.0, 9.0)], fio=[(1.0, 1.0)]),
    ]
    found = ratios(cases)
    assert found["uring_read_vs_fio"] == pytest.approx(0.9)
    assert found["threads_read_vs_fio"] == pytest.approx(0.45)
    assert found["uring_cpu_vs_fio"] == pytest.approx(0.8)
    assert found["append_vs_random_write"] is None


def test_every_ratio_from_its_case() -> None:
    append = Case(APPEND, 1024)
    append.add("dsa", Sample(1000, 1_024_000, 1.0))
    append.add("fio sequential", Sample(2, 4_096_000, 2.0))
    append.add("fio random writes", Sample(500, 512_000, 10.0))
    cases = [
        append,
        case(WAYS, uring=[(1, 0)], **{"aiofiles,__row__by__row": [(12, 0)], "RocksDB,__multi_get": [(5, 0)]}),
        case(STEADY, dsa=[(3, 0), (2, 0), (4, 0)], fio__reads=[(2, 0), (2, 0), (2, 0)]),
        case(MEMMAP, memmap=[(90, 0), (60, 0)], **{"memmap,__MADV_RANDOM": [(12, 0), (12, 0)]}),
    ]
    found = ratios(cases)
    assert found["append_vs_fio_sequential"] == pytest.approx(0.5)
    assert found["append_vs_random_write"] == pytest.approx(20)
    assert found["vs_aiofiles"] == pytest.approx(12)
    assert found["vs_rocksdb"] == pytest.approx(5)
    assert found["steady_update_vs_fio_reads"] == pytest.approx(1.5)
    rate = (1000 / 90 + 1000 / 60) / 2
    assert found["vs_memmap_limited"] == pytest.approx(1000 / 3 / rate)
    assert found["vs_memmap_random_limited"] == pytest.approx(4)


def test_the_names_and_bounds_of_the_ratios() -> None:
    assert [target.name for target in TARGETS] == RATIO_NAMES
    assert list(ratios([])) == RATIO_NAMES
    costs = {target.name for target in TARGETS if target.at_most}
    assert costs == {"uring_cpu_vs_fio", "steady_update_vs_fio_reads"}
    bounds = {target.name: target for target in TARGETS}
    assert bounds["uring_read_vs_fio"].met(0.88)
    assert not bounds["uring_read_vs_fio"].met(0.87)
    assert bounds["steady_update_vs_fio_reads"].met(1.3)
    assert not bounds["steady_update_vs_fio_reads"].met(1.31)


def test_the_json_object() -> None:
    cases = [case(READ, uring=[(1, 0.5), (3, 0.7)], fio=[(1, 1), (4, 1)])]
    found = json.loads(json.dumps(as_json(cases, ["no root"], {"queue_depth": 64}, {"checked": 0})))
    assert list(found) == ["ratios", "targets", "ratios_to_tuned_fio", "settings", "device_counter", "notes", "cases"]
    assert list(found["ratios"]) == RATIO_NAMES
    assert found["ratios"]["uring_read_vs_fio"] == pytest.approx(7 / 6, rel=1e-3)
    assert found["ratios"]["vs_rocksdb"] is None
    assert found["targets"]["uring_read_vs_fio"] == {"bound": 0.88, "at_most": False, "met": True}
    assert found["targets"]["vs_rocksdb"]["met"] is None
    assert found["notes"] == ["no root"]
    assert [one["way"] for one in found["cases"]] == ["uring", "fio"]
    assert found["cases"][0]["rounds"] == 2
    assert found["cases"][0]["us_per_row"] == pytest.approx(2000)
    assert found["cases"][0]["cpu_us_per_row"] == pytest.approx(600)


def test_an_unknown_processor_time_is_null_and_no_ratio() -> None:
    some = Case(READ, 1024)
    some.add("uring", Sample(10, 10, 1.0, None))
    some.add("fio", Sample(10, 10, 1.0, 0.5))
    assert ratios([some])["uring_cpu_vs_fio"] is None
    assert as_json([some], [], {}, {})["cases"][0]["cpu_us_per_row"] is None


# Files and the device's counter.


def test_draws_are_different_sorted_and_in_range() -> None:
    rows = draw(np.random.default_rng(0), 1000, 400)
    assert len(rows) == 400
    assert (np.diff(rows) > 0).all()
    assert rows[0] >= 0
    assert rows[-1] < 1000
    assert rows[-1] > 900  # not the smallest ones only


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, (20 << 20) + 4096)
    assert path.stat().st_size == (20 << 20) + 4096
    assert path.stat().st_blocks * 512 >= path.stat().st_size, "there is a hole"
    blocks = np.fromfile(path, np.uint8)[: 20 << 20].reshape(-1, 4 << 20)
    assert blocks.any(axis=1).all()
    assert not (blocks[0] == blocks[2]).all()


DISKSTATS = "   7       0 loop0 1 0 8 0 0 0 0 0 0 0 0\n {major} {minor} disk9 5 6 {sectors} 8 9 10 11 12 0 14 15\n"


def test_the_counter_of_the_paths_device(tmp_path: Path) -> None:
    device_number = os.stat(tmp_path).st_dev
    stats = tmp_path / "diskstats"
    major, minor = os.major(device_number), os.minor(device_number)
    stats.write_text(DISKSTATS.format(major=major, minor=minor, sectors=77))
    assert find_counter(tmp_path, stats) == "disk9"
    assert read_sectors("disk9", stats) == 77
    stats.write_text(DISKSTATS.format(major=major, minor=minor + 1, sectors=77))
    assert find_counter(tmp_path, stats) is None
    assert find_counter(tmp_path, tmp_path / "nowhere") is None
    with pytest.raises(KeyError, match="no device 'gone'"):
        read_sectors("gone", stats)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_files, "PAUSE_S", 0.0)


class Disk:
    """Counts sectors; each read adds those that it is told to beside its own."""

    def __init__(self, *beside: int) -> None:
        self.sectors, self.asked, self.beside, self.reads = 0, 0, list(beside), 0

    def read(self) -> Sample:
        self.reads += 1
        self.asked += 100 * SECTOR_BYTES
        self.sectors += 100 + (self.beside.pop(0) if self.beside else 0)
        return Sample(1, 100 * SECTOR_BYTES, 1.0)


@pytest.mark.parametrize("beside", [0, 2, -2])
def test_reads_that_the_device_confirms(beside: int) -> None:
    disk = Disk(beside)
    check = ReadCheck(lambda: disk.sectors)
    check.measure("reads", disk.read)
    assert (disk.reads, check.checked, check.repeated) == (1, 1, 0)
    assert check.worst == abs(beside) / 100


@pytest.mark.parametrize("beside", [3, -3, -100])
def test_a_read_that_the_device_does_not_confirm_is_made_again(beside: int) -> None:
    disk = Disk(beside, beside, 0)
    check = ReadCheck(lambda: disk.sectors)
    check.measure("reads", disk.read, lambda: disk.asked)
    assert (disk.reads, check.checked, check.repeated, check.worst) == (3, 1, 2, 0)


@pytest.mark.parametrize("beside", [50, -50])
def test_reads_that_are_never_confirmed_fail_the_run(beside: int) -> None:
    disk = Disk(*[beside] * TRIES)
    with pytest.raises(ReadsDiffer, match=r"reads: 51,200 bytes were asked for, the device read (25|76),[68]00"):
        ReadCheck(lambda: disk.sectors).measure("reads", disk.read)
    assert disk.reads == TRIES


def test_without_a_counter_nothing_is_checked() -> None:
    disk = Disk(1000)
    check = ReadCheck(None)
    check.measure("reads", disk.read)
    assert (disk.reads, check.checked) == (1, 0)


# fio.


def fio_output(**changes: Any) -> str:
    job = {
        "error": 0,
        "read": {"total_ios": 8192, "runtime": 100},
        "write": {"total_ios": 0, "runtime": 0},
        "usr_cpu": 5.0,
        "sys_cpu": 15.0,
        "job_runtime": 100,
    }
    return "note: something\n" + json.dumps({"jobs": [{**job, **changes}]})


def test_fios_answer() -> None:
    sample = device_fio.parse(fio_output(), 1024)
    assert (sample.rows, sample.nbytes, sample.seconds) == (8192, 8 << 20, 0.1)
    assert sample.cpu_s == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", "not understood"),
        ("{}", "not understood"),
        (fio_output(error=5), "error 5"),
        (fio_output(read={"total_ios": 0, "runtime": 0}), "0 requests"),
    ],
)
def test_an_answer_of_fio_that_is_no_measurement(output: str, words: str) -> None:
    with pytest.raises(device_fio.NoFio, match=words):
        device_fio.parse(output, 1024)


def test_fios_command(tmp_path: Path) -> None:
    file = tmp_path / "a:b"
    file.write_bytes(bytes(10_000))
    plain = device_fio.Fio("fio", "io_uring", "fio-3")
    fio = replace(plain, tuned=True)
    command = fio.command(file, "randread", record_bytes=1024, count=100, depth=64, direct=True, drain_every=50)
    assert f"--filename={tmp_path}/a\\:b" in command
    for option in ("--size=9216", "--io_size=102400", "--iodepth=64", "--direct=1", "--readonly"):
        assert option in command
    assert {"--thinktime=1", "--thinktime_blocks=50", "--thinktime_blocks_type=issue"} <= set(command)
    tuning = {"--iodepth_batch_submit=32", "--fixedbufs=1", "--registerfiles=1", "--gtod_reduce=1"}
    assert tuning <= set(command)
    untuned = plain.command(file, "randread", record_bytes=1024, count=100, depth=64, direct=True, drain_every=50)
    assert not tuning & set(untuned)
    assert [option for option in command if option in untuned] == untuned
    writing = fio.command(file, "write", record_bytes=4096, count=2, depth=2, direct=False)
    assert "--readonly" not in writing
    assert not any(option.startswith(("--thinktime", "--iodepth_batch")) for option in writing)
    assert "--direct=0" in writing


def test_no_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(device_fio.NoFio, match="not installed"):
        device_fio.Fio.find(tmp_path / "file", True)


def script(directory: Path, text: str) -> None:
    path = directory / "fio"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_an_engine_that_works_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    (tmp_path / "answer").write_text(fio_output())
    answers = f"*--version*) echo fio-9;; *libaio*) /bin/cat {tmp_path}/answer;; *) echo refused >&2; exit 1;;"
    script(tmp_path, f'case "$*" in {answers} esac')
    monkeypatch.setenv("PATH", str(tmp_path))
    found = device_fio.Fio.find(tmp_path / "file", True)
    assert (found.engine, found.version) == ("libaio", "fio-9")
    script(tmp_path, "echo refused >&2; exit 1")
    with pytest.raises(device_fio.NoFio, match=r"io_uring: .*exit 1: refused.*psync"):
        device_fio.Fio.find(tmp_path / "file", True)


# The parts that measure, on a few rows.


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "records"
    write_file(path, 4 << 20)
    return path


@pytest.mark.parametrize("name", ["uring", "threads", "aiofiles"])
def test_a_rig_reads_and_writes_what_it_says(name: str, records: Path) -> None:
    try:
        rig = Rig(name, records, IOConfig(queue_depth=8))
    except ConfigError as error:  # a backend that cannot work here is another test's matter
        pytest.skip(f"{name}: {error}")
    with rig:
        before = records.read_bytes()
        read = rig.read(1024, 50, 2)
        assert (read.rows, read.nbytes) == (100, 100 * rig.request_bytes(1024))
        assert read.seconds > 0
        assert read.cpu_s is not None
        assert rig._backend.counters.read_bytes == read.nbytes
        assert records.read_bytes() == before
        written = rig.write(4096, 30, 1)
        assert (written.rows, written.nbytes) == (30, 30 * 4096)
    after = np.frombuffer(records.read_bytes(), np.uint8).reshape(-1, 4096)
    changed = (after != np.frombuffer(before, np.uint8).reshape(-1, 4096)).any(axis=1)
    assert changed.sum() == 30
    assert (after[changed] == after[changed][0]).all()


def test_an_interrupted_rig_leaves_no_transfer_behind(
    records: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []
    rig = Rig("aiofiles", records, IOConfig())
    write = rig._backend.write

    async def interrupted(file: Any, offset: int, buffer: Any) -> None:
        await write(file, offset, buffer)
        done.append(offset)
        raise KeyboardInterrupt

    monkeypatch.setattr(rig._backend, "write", interrupted)
    with pytest.raises(KeyboardInterrupt), rig:
        rig.write(4096, 30, 1)
    gc.collect()  # a task that nobody ended says so when it is collected
    assert len(done) == 1
    assert rig._loop.is_closed()
    assert [record.message for record in caplog.records] == []


def test_appends_are_all_dirty_records_once(tmp_path: Path) -> None:
    appends = Appends(tmp_path / "state", 500, "threads", IOConfig(segment_bytes=64 << 10, dirty_share=1.0))
    try:
        for _ in range(2):
            sample = appends.append()
            assert sample.rows == 500
            assert 500 * RECORD_BYTES <= sample.nbytes < 500 * RECORD_BYTES * 1.2
            assert appends._engine.statistics(gradient_s=0, compile_s=0, kernel="").rows_read == 0
    finally:
        appends.close()


def test_batches_are_sorted_and_unique() -> None:
    batches = iter(Batches(1000, 100, 3))
    for _ in range(3):
        rows = next(batches).numpy()
        assert len(rows) == 100
        assert (np.diff(rows) > 0).all()
        assert rows[0] >= 0
        assert rows[-1] < 1000


def test_steady_updates_step_read_write_and_clean(tmp_path: Path) -> None:
    with SteadyUpdates(tmp_path / "state", 3000, "threads", IOConfig(), batch_rows=150) as updates:
        updates.prepare()
        assert (updates._optimizer.statistics().live_records) > 2500
        before = updates.read_bytes()
        sample = updates.measure(5)
        updates.settle()
        assert (sample.rows, sample.nbytes) == (750, 750 * RECORD_BYTES)
        assert updates.read_bytes() > before
        figures = updates.figures()
        assert 0 <= figures["hit_rate"] < 0.5
        assert figures["log_over_live"] > 1
        assert updates._optimizer.statistics().announced_share > 0.5
        assert updates._optimizer.statistics().rows_cleaned > 0


def test_a_memmap_update_changes_its_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name in "mv":
        write_file(tmp_path / name, 100 * 16)
        np.ones((100, 4), np.float32).tofile(tmp_path / name)
    arguments = ["x", str(tmp_path / "m"), str(tmp_path / "v"), "--width", "4", "--rows", "10", "--batches", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--advice", "random", "--warm-bytes", "500"])
    device_memmap.main()
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 10
    assert len(found["seconds"]) == 1
    for name in "mv":
        moments = np.fromfile(tmp_path / name, np.float32).reshape(100, 4)
        assert ((moments != 1).any(axis=1)).sum() == 10


# Memory cgroups.


def fake_proc(tmp_path: Path, mounts: list[str], groups: list[str]) -> Path:
    proc = tmp_path / "proc"
    proc.mkdir(exist_ok=True)
    (proc / "mountinfo").write_text("".join(line + "\n" for line in mounts))
    (proc / "cgroup").write_text("".join(line + "\n" for line in groups))
    return proc


def mount(kind: str, at: Path, inside: str = "/", options: str = "rw") -> str:
    return f"30 25 0:27 {inside} {str(at).replace(' ', chr(92) + '040')} rw shared:9 - {kind} {kind} {options}"


def test_version_1_is_found_where_memory_is_mounted(tmp_path: Path) -> None:
    root, other = tmp_path / "mem ory", tmp_path / "unified"
    (root / "a" / "b").mkdir(parents=True)
    other.mkdir()
    mounts = [
        mount("cgroup2", other),
        mount("cgroup", tmp_path / "cpu", options="rw,cpu"),
        mount("cgroup", root, options="rw,memory"),
    ]
    proc = fake_proc(tmp_path, mounts, ["4:memory:/a/b", "2:cpu,cpuacct:/z", "0::/"])
    found = find_hierarchy(proc)
    assert found == Hierarchy(1, root, root / "a" / "b")
    assert list(found.ancestors()) == [root / "a" / "b", root / "a", root]


def test_version_2_needs_the_memory_controller(tmp_path: Path) -> None:
    root = tmp_path / "unified"
    (root / "user").mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu io\n")
    proc = fake_proc(tmp_path, [mount("cgroup2", root)], ["0::/user"])
    with pytest.raises(CannotLimit, match="no memory controller"):
        find_hierarchy(proc)
    (root / "cgroup.controllers").write_text("cpu memory io\n")
    assert find_hierarchy(proc) == Hierarchy(2, root, root / "user")


def test_paths_outside_of_what_is_mounted(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    (root / "x").mkdir(parents=True)
    for inside, path, own in (
        ("/docker/1", "/docker/1/x", root / "x"),
        ("/docker/1", "/elsewhere", root),
        ("/", "/gone", root),
        ("/", "/../x", root),
    ):
        proc = fake_proc(tmp_path, [mount("cgroup", root, inside, "rw,memory")], [f"4:memory:{path}"])
        assert find_hierarchy(proc) == Hierarchy(1, root, own)


def test_no_cgroups(tmp_path: Path) -> None:
    with pytest.raises(CannotLimit, match="mountinfo"):
        find_hierarchy(tmp_path)
    with pytest.raises(CannotLimit, match="neither version"):
        find_hierarchy(fake_proc(tmp_path, [], ["0::/"]))


@pytest.fixture
def groups_made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, dict[str, str]]]:
    """Make rmdir remove a made-up group with its files, and note what was written into it."""
    found: list[tuple[Path, dict[str, str]]] = []

    def remove(path: Path) -> None:
        found.append((path, {file.name: file.read_text() for file in path.iterdir()}))
        shutil.rmtree(path)

    monkeypatch.setattr(Path, "rmdir", remove)
    return found


def test_a_group_of_version_1(tmp_path: Path, groups_made: list[tuple[Path, dict[str, str]]]) -> None:
    root = tmp_path / "memory"
    root.mkdir()
    proc = fake_proc(tmp_path, [mount("cgroup", root, options="rw,memory")], ["4:memory:/"])
    with MemoryLimit.open(123456, proc) as limit:
        assert (limit.version, limit.group.parent) == (1, root)
        assert limit.run(["/bin/sh", "-c", "echo hello $0", "you"], 60.0) == "hello you\n"
        with pytest.raises(RuntimeError, match="exit 3, it said: oh"):
            limit.run(["/bin/sh", "-c", "echo oh >&2; exit 3"], 60.0)
    assert not limit.group.exists()
    [(path, files)] = groups_made
    assert path == limit.group
    assert files["memory.limit_in_bytes"] == "123456\n"
    assert files["memory.force_empty"] == "0\n"
    assert int(files["cgroup.procs"]) > 0


def test_a_group_of_version_2_lies_where_memory_may_be_limited(
    tmp_path: Path, groups_made: list[tuple[Path, dict[str, str]]]
) -> None:
    root = tmp_path / "unified"
    own = root / "user" / "session"
    own.mkdir(parents=True)
    (root / "cgroup.controllers").write_text("memory\n")
    (root / "cgroup.subtree_control").write_text("cpu\n")
    (root / "user" / "cgroup.subtree_control").write_text("cpu memory\n")
    # The session's own group has no such file: as where it cannot be read.
    proc = fake_proc(tmp_path, [mount("cgroup2", root)], ["0::/user/session"])
    with MemoryLimit.open(1 << 20, proc) as limit:
        assert limit.group.parent == root / "user"
        assert (limit.group / "memory.max").read_text() == "1048576\n"
    assert "memory.force_empty" not in groups_made[0][1]
    assert (root / "user" / "cgroup.subtree_control").read_text() == "cpu memory\n"
    (root / "user" / "cgroup.subtree_control").unlink()
    with MemoryLimit.open(1 << 20, proc) as limit:
        assert limit.group.parent == root
    assert (root / "cgroup.subtree_control").read_text() == "+memory\n"


def test_where_no_group_can_be_made(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    root.mkdir()
    (root / f"dsa-bench-{os.getpid()}").write_text("in the way")
    proc = fake_proc(tmp_path, [mount("cgroup", root, options="rw,memory")], ["4:memory:/"])
    with pytest.raises(CannotLimit, match=r"takes root.*File exists"), MemoryLimit.open(1, proc):
        pass


def test_a_program_that_fails_in_limited_memory_costs_only_its_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killing(FakeLimit):
        def run(self, command: list[str], timeout_s: float, cwd: Path) -> str:
            if "random" in command:
                raise RuntimeError("exit -9")
            return super().run(command, timeout_s, cwd)

    monkeypatch.setattr(device_stages.MemoryLimit, "open", Killing)
    stages = Stages(TINY, tmp_path, ReadCheck(None), IOConfig())
    stages.memmaps()
    assert stages.notes == ["memmap in limited memory: exit -9"]
    assert [list(case.samples) for case in stages.cases] == [["memmap"]]
    assert list(tmp_path.iterdir()) == []


# The README.

TEXT = "# A\n\nbefore\n<!-- x: begin -->\nold\n<!-- x: end -->\nafter\n"


def test_a_block_is_replaced_and_nothing_else() -> None:
    new = readme.replace_block(TEXT, "x", "\n| new |\n")
    assert new == "# A\n\nbefore\n<!-- x: begin -->\n| new |\n<!-- x: end -->\nafter\n"
    assert readme.replace_block(new, "x", "| new |") == new


@pytest.mark.parametrize(
    ("text", "block", "words"),
    [
        ("no markers", "b", "found 0 and 0"),
        (TEXT + TEXT, "b", "found 2 and 2"),
        ("<!-- x: end -->\n<!-- x: begin -->\n", "b", "comes before"),
        (TEXT, "a <!-- x: end --> b", "holds the markers"),
    ],
)
def test_a_block_that_cannot_be_replaced(text: str, block: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        readme.replace_block(text, "x", block)


def test_the_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(TEXT)
    assert readme.write_block(path, "x", "new")
    assert not readme.write_block(path, "x", "new")
    assert path.read_text() == TEXT.replace("old", "new")
    with pytest.raises(ValueError, match=r"README\.md: expected"):
        readme.write_block(path, "y", "new")
    assert list(tmp_path.iterdir()) == [path]


# The whole, small, with everything optional missing.


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without fio, rocksdict, and the right to make cgroups."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise CannotLimit("it takes root")

    monkeypatch.setattr(device_fio.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    monkeypatch.setattr(MemoryLimit, "open", refuse)


def silent() -> Console:
    return Console(file=io.StringIO(), width=130)


@pytest.fixture
def no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_counter", lambda directory: None)


@pytest.mark.usefixtures("bare", "no_counter")
def test_what_is_missing_is_named_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "QUICK", TINY)
    out, page = tmp_path / "out.json", tmp_path / "README.md"
    page.write_text("<!-- bench.device: begin -->\n<!-- bench.device: end -->\n")
    monkeypatch.setattr(readme, "README", page)
    place = tmp_path / "place"
    place.mkdir()
    arguments = ["--quick", "--dir", str(place), "--json", str(out), "--picture", str(tmp_path / "p.png"), "--readme"]
    assert device.main(arguments) == 0
    assert list(place.iterdir()) == [], "files were left behind"
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert list(found["ratios"]) == RATIO_NAMES
    assert found["ratios"]["vs_aiofiles"] is not None or any("uring" in note for note in found["notes"])
    measured = {name for name, value in found["ratios"].items() if value is not None}
    assert measured <= {"vs_aiofiles"}
    assert {one["what"] for one in found["cases"]} == {READ, WRITE, WAYS, APPEND, STEADY}
    assert {one["record_bytes"] for one in found["cases"] if one["what"] == READ} == {1024, 4096}
    assert all(one["rounds"] == TINY.rounds for one in found["cases"])
    for words in ("fio is not installed", "rocksdict", "it takes root", "does not count the device"):
        assert any(words in note for note in found["notes"]), words
        assert words in " ".join(printed.split())
        assert words in page.read_text()
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "p.png").stat().st_size > 1000
    for name in RATIO_NAMES:
        assert name in printed
        assert f"`{name}`" in page.read_text()


@pytest.mark.usefixtures("bare")
def test_reads_that_the_device_does_not_confirm_fail_the_run_and_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Rig("threads", _some_file(tmp_path), IOConfig()) as rig:
        if not rig.direct:
            pytest.skip("files here go through the page cache: nothing is compared")
    monkeypatch.setattr(device, "QUICK", TINY)
    monkeypatch.setattr(device, "find_counter", lambda directory: "disk9")
    monkeypatch.setattr(device, "read_sectors", lambda name: 0)  # a device that reads nothing: a cache answers
    place = tmp_path / "place"
    place.mkdir()
    assert device.main(["--quick", "--dir", str(place), "--json", str(tmp_path / "out.json")]) == 1
    assert "ReadsDiffer" in capsys.readouterr().err
    assert list(place.iterdir()) == []
    assert not (tmp_path / "out.json").exists()


def _some_file(directory: Path) -> Path:
    path = directory / "some"
    write_file(path, 64 << 10)
    return path


@pytest.mark.usefixtures("no_counter")
def test_a_disk_that_is_too_full_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = types.SimpleNamespace(free=FULL.disk_bytes - 1)
    monkeypatch.setattr(device.shutil, "disk_usage", lambda path: usage)
    assert device.main(["--dir", str(tmp_path)]) == 1
    assert "MiB free, this takes" in capsys.readouterr().err
    assert FULL.disk_bytes <= 12 << 30
    assert QUICK.disk_bytes < FULL.disk_bytes
    assert min(QUICK.rounds, FULL.rounds) >= 7
    assert QUICK.memmap_plain_rows == 256


@pytest.mark.parametrize("option", ["--json", "--picture", "--dir"])
def test_a_place_that_is_not_there_is_refused_first(option: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        device.main([option, str(tmp_path / "no" / "such")])


# With fio, rocksdict and a memory limit, where each way only has to be called as it should be.


@pytest.mark.usefixtures("no_counter")
def test_all_ratios_are_found_where_everything_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[str, int, int, int]] = []

    @dataclass(frozen=True)
    class FakeFio:
        version: str = "fio-9"
        engine: str = "io_uring"
        tuned: bool = False

        def run(
            self, file: Path, what: str, *, record_bytes: int, count: int, drain_every: int = 0, **_: Any
        ) -> Sample:
            jobs.append((what, record_bytes, count, drain_every))
            return Sample(count, count * record_bytes, 1.0, 0.5)

    class FakeRocksDB:
        def __init__(self, directory: Path, n_rows: int, record_bytes: int) -> None:
            self.closed = False

        def read(self, count: int, seed: int) -> Sample:
            return Sample(count, count * 1024, 1.0, 1.0)

        def close(self) -> None:
            closed.append(True)

    closed: list[bool] = []
    group: Callable[..., Any] = FakeLimit
    monkeypatch.setattr(device_stages.Fio, "find", lambda file, direct: FakeFio())
    monkeypatch.setattr(device_stages.device_rivals, "RocksDB", FakeRocksDB)
    monkeypatch.setattr(device_stages.MemoryLimit, "open", group)
    stages, found = device.measure(TINY, tmp_path, silent())
    if "uring" not in {one["way"] for one in found["cases"]}:
        pytest.skip("no io_uring here")
    assert {name for name, value in found["ratios"].items() if value is None} == set()
    assert [note for note in found["notes"] if "counter" not in note] == []
    assert closed == [True]
    # fio does as much as the backends do, and drains as often.
    assert ("randread", 1024, 128, 64) in jobs
    assert ("randread", 1024, TINY.steady_batch_rows * TINY.steady_steps, TINY.steady_batch_rows) in jobs
    assert ("write", 4 << 20, 1, 0) in jobs
    assert sum(what == "randwrite" and size == 1024 for what, size, _, _ in jobs) == 2 * TINY.rounds
    appended = [one["way"] for one in found["cases"] if one["what"] == APPEND]
    assert appended == ["dsa", "dsa, threads", "dsa, aiofiles", "fio sequential", "fio random writes"]
    memmaps = {one["way"]: one for one in found["cases"] if one["what"] == MEMMAP}
    assert memmaps["memmap"]["us_per_row"] == pytest.approx(50_000)
    assert memmaps["memmap, MADV_RANDOM"]["us_per_row"] == pytest.approx(25_000)
    block = device_report.markdown(stages.cases, stages.notes, found["settings"])
    assert "not measured" not in block
    assert "registered memory" in block
    assert set(found["ratios_to_tuned_fio"]) == {"uring_read", "uring_cpu", "threads_read"}
    assert None not in found["ratios_to_tuned_fio"].values()
    assert list(tmp_path.iterdir()) == []


class FakeLimit:
    """Stands for a group with a memory limit; each batch of a memmap takes half a second in it."""

    version = 2

    def __init__(self, limit_bytes: int) -> None:
        assert limit_bytes == int(TINY.memmap_rows * RECORD_BYTES * TINY.memmap_share)

    def __enter__(self) -> FakeLimit:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def run(self, command: list[str], timeout_s: float, cwd: Path) -> str:
        assert "bench.device_memmap" in command
        for file in command[3:5]:
            assert Path(file).stat().st_size == TINY.memmap_rows * RECORD_BYTES // 2
        rows = int(command[command.index("--rows") + 1])
        return json.dumps({"rows": rows, "seconds": [0.5, 0.5]})


def test_stages_take_turns(tmp_path: Path) -> None:
    stages = Stages(TINY, tmp_path, ReadCheck(None), IOConfig())
    order: list[str] = []

    def way(name: str) -> Callable[[], Sample]:
        def take() -> Sample:
            order.append(name)
            return Sample(1, 1, 1.0)

        return take

    stages._in_turns(Case(READ, 512), {name: way(name) for name in "abc"}, rounds=4)
    assert "".join(order) == "abcbcacababc"
    assert list(stages.cases[0].samples) == ["a", "b", "c"]
