from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from bench import device_fio, headline, memory_limit, readme, step, step_limited, step_memory, step_report, step_stages
from bench.device_files import ReadCheck
from bench.device_fio import NoFio
from bench.device_samples import Sample
from bench.memory_limit import CannotLimit, ProgramFailed
from bench.step_samples import (
    ALONE,
    BOUND,
    CACHED,
    DSA,
    FAST,
    FIO,
    HIDDEN,
    LARGE,
    LIMITED,
    MEMMAP,
    MEMMAP_RANDOM,
    PARTS,
    RAM,
    SMALL,
    TARGETS,
    StepCase,
    as_json,
    fixed_cost,
    ratios,
)
from bench.step_scale import FULL, QUICK, WIDTH, Scale
from bench.step_stages import Stages, some_rows
from bench.step_training import MOST_LEAD, Alone, InRam, OnDisk, TransE
from bench.step_workload import EXPONENTS, Batch, Draws, distinct_rows, reference_misses

RATIO_NAMES = [
    "cached_vs_ram_256",
    "cached_vs_ram_8192",
    "cached_vs_ram_65536",
    "fast_vs_ram_8192",
    "uniform_vs_fio_reads",
    "hidden_step_vs_bound",
    "vs_memmap_limited",
    "vs_memmap_random_limited",
    "rows_100m_vs_1m",
]
TINY = Scale(
    rounds=2,
    batch_rows=64,
    block_steps=2,
    fio_file_bytes=1 << 20,
    cached=((2000, ("zipf 1.1",)),),
    cached_blocks=((256, 2), (8192, 1), (65_536, 1)),
    fixed_steps=3,
    busy_steps=2,
    alone=((2000, (0.10,), ("uniform", "zipf 0.9")), (2000, (1.0,), ("uniform",))),
    turnovers=0.5,
    warm_draws=0.5,
    hidden_rows=2000,
    hidden_triples=16,
    hidden_caches=(0.10,),
    hidden_warm_draws=0.5,
    hidden_rounds=3,
    limited_rows=4000,
    limited_turnovers=0.1,
    limited_batches=2,
    limited_plain_rows=16,
    limited_random_rows=32,
    small_rows=2000,
    large=((8000, 1000), (4000, 4000)),
    large_turnovers=0.5,
)


def case(what: str, **fields: Any) -> StepCase:
    """Ways are given as pairs of rows and seconds, a pair for each round."""
    own = {key: fields.pop(key) for key in ("table_rows", "batch_rows", "distribution", "cache") if key in fields}
    made = StepCase(what, 1024, {}, width=128, **own)
    names = {"dsa": DSA, "fast": FAST, "ram": RAM, "fio": FIO, "memmap": MEMMAP, "rnd": MEMMAP_RANDOM, "small": SMALL}
    for key, rounds in fields.items():
        for rows, spent_s in rounds:
            made.add(names[key], Sample(rows, rows * 1024, spent_s))
    return made


# Ratios and JSON.


def test_the_names_and_bounds_of_the_ratios() -> None:
    assert [target.name for target in TARGETS] == RATIO_NAMES == list(ratios([]))
    assert set(ratios([]).values()) == {None}
    assert [target.bound for target in TARGETS] == [1, 3, 3, 4, 1.3, 1.15, 50, 3, 1.25]
    assert [target.name for target in TARGETS if target.at_most] == [
        "uniform_vs_fio_reads",
        "hidden_step_vs_bound",
        "rows_100m_vs_1m",
    ]


def test_of_cached_cases_the_worst_of_each_size_counts() -> None:
    found = ratios(
        [
            case(CACHED, batch_rows=8192, dsa=[(10, 1.0)], ram=[(10, 5.0)], fast=[(10, 1.0)]),
            case(CACHED, batch_rows=8192, dsa=[(10, 2.0)], ram=[(10, 8.0)], fast=[(10, 0.5)]),
            case(CACHED, batch_rows=256, dsa=[(10, 2.0)], ram=[(10, 3.0)], fast=[(10, 2.0)]),
        ]
    )
    assert found["cached_vs_ram_8192"] == pytest.approx(4.0)
    assert found["fast_vs_ram_8192"] == pytest.approx(5.0)
    assert found["cached_vs_ram_256"] == pytest.approx(1.5)
    assert found["cached_vs_ram_65536"] is None


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    rounds = case(CACHED, batch_rows=256, dsa=[(1, 1.0), (1, 10.0), (1, 2.0)], ram=[(1, 3.0), (1, 20.0), (1, 1.0)])
    assert ratios([rounds])["cached_vs_ram_256"] == pytest.approx(2.0)


def test_fio_is_compared_at_a_tenth_of_the_largest_table_and_uniform() -> None:
    common: dict[str, Any] = {"distribution": "uniform", "cache": 0.10, "fio": [(90, 1.0)]}
    found = ratios(
        [
            case(ALONE, table_rows=100, dsa=[(100, 9.0)], **common),
            case(ALONE, table_rows=1000, dsa=[(100, 1.5)], **common),
            case(ALONE, table_rows=1000, dsa=[(100, 7.0)], **{**common, "cache": 0.01}),
            case(ALONE, table_rows=1000, dsa=[(100, 8.0)], **{**common, "distribution": "zipf 0.9"}),
        ]
    )
    assert found["uniform_vs_fio_reads"] == pytest.approx(1.5)


def test_the_bound_is_the_larger_of_the_two_in_each_round() -> None:
    hidden = StepCase(HIDDEN, 1024)
    for dsa_s, ram_s, fio_s in ((4.0, 2.0, 1.0), (3.0, 1.0, 3.0), (9.0, 3.0, 2.0)):
        for way, rows, spent_s in ((DSA, 10, dsa_s), (RAM, 10, ram_s), (FIO, 4, fio_s)):
            hidden.add(way, Sample(rows, rows, spent_s))
        hidden.add_bound()
    assert [sample.seconds for sample in hidden.samples[BOUND]] == [2.0, 3.0, 3.0]
    assert ratios([hidden])["hidden_step_vs_bound"] == pytest.approx(2.0)


def test_without_a_miss_the_bound_is_the_step_in_ram() -> None:
    hidden = StepCase(HIDDEN, 1024)
    hidden.add(DSA, Sample(10, 10, 1.0))
    hidden.add(RAM, Sample(10, 10, 2.0))
    hidden.add_bound()
    assert ratios([hidden])["hidden_step_vs_bound"] == pytest.approx(0.5)


def test_memmaps_are_compared_by_median_rates_a_row() -> None:
    limited = case(
        LIMITED,
        dsa=[(1000, 1.0), (1000, 1.0)],
        memmap=[(10, 1.0), (10, 0.5), (10, 2.0)],
        rnd=[(100, 1.0)],
    )
    found = ratios([limited])
    assert found["vs_memmap_limited"] == pytest.approx(100.0)
    assert found["vs_memmap_random_limited"] == pytest.approx(10.0)


def test_a_large_table_is_compared_a_row_and_the_worst_counts() -> None:
    found = ratios(
        [
            case(LARGE, dsa=[(10, 1.0)], small=[(20, 2.0)]),
            case(LARGE, dsa=[(10, 3.0)], small=[(20, 4.0)]),
        ]
    )
    assert found["rows_100m_vs_1m"] == pytest.approx(1.5)


def test_the_json_object_holds_plain_values_only() -> None:
    some = case(CACHED, table_rows=5, batch_rows=256, distribution="uniform", dsa=[(3, 1.0)], ram=[(3, 1 / 3)])
    some.add_parts({"wait": 1.0})
    some.add_parts({"wait": 0.5, "update": 2.0})
    some.steps = 2
    found = as_json([some], fixed_cost({"alone": [1e-3, 2e-3, 9e-3]}), ["a note"], {"rounds": 1})
    assert json.loads(json.dumps(found)) == found
    assert list(found) == ["ratios", "targets", "fixed_cost_256_rows", "settings", "notes", "cases"]
    assert list(found["ratios"]) == list(found["targets"]) == RATIO_NAMES
    assert found["ratios"]["cached_vs_ram_256"] == 0.3333
    assert found["targets"]["cached_vs_ram_256"] == {"bound": 1.0, "at_most": False, "met": False}
    assert found["targets"]["rows_100m_vs_1m"]["met"] is None
    assert found["fixed_cost_256_rows"]["alone"] == {"ms": 2.0, "mean_ms": 4.0, "at_most_ms": 0.5, "steps": 3}
    assert found["fixed_cost_256_rows"]["busy"] == {"ms": None, "mean_ms": None, "at_most_ms": 45.0, "steps": 0}
    (one,) = found["cases"]
    assert one["where_the_time_goes_s"] == {"wait": 1.5, "update": 2.0}
    assert one["ways"][DSA] == {"rounds": 1, "us_per_row": 333_300.0, "rows_per_s": 3.0, "seconds": [1.0]}
    assert one["misses_per_step"] is None


# Batches.


@pytest.mark.parametrize("distribution", EXPONENTS)
def test_draws_come_as_often_as_frequencies_say(distribution: str) -> None:
    draws = Draws(50, distribution, seed=1)
    share = np.bincount(draws.rows(40_000).numpy(), minlength=50) / 40_000
    assert draws.frequencies().sum() == pytest.approx(1.0)
    np.testing.assert_allclose(share, draws.frequencies(), atol=0.02)


def test_draws_keep_to_the_rows_in_use() -> None:
    used = some_rows(1000, 40)
    assert len(np.unique(used)) == 40
    assert used.min() >= 0
    assert used.max() < 1000
    draws = Draws(1000, "zipf 0.9", seed=1, in_use=used)
    assert set(draws.rows(500).tolist()) <= set(used.tolist())
    assert set(np.flatnonzero(draws.frequencies()).tolist()) == set(used.tolist())


def test_the_same_seed_draws_the_same_rows() -> None:
    first, second, other = (Draws(1000, "zipf 0.9", seed).rows(100) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_distinct_rows_are_counted_batch_by_batch_and_table_by_table() -> None:
    batch = Batch(torch.tensor([1, 1, 2]), torch.tensor([5, 5]))
    assert distinct_rows([batch, batch]) == 6


def test_the_reference_reads_what_is_not_in_its_cache() -> None:
    none = torch.empty(0, dtype=torch.int64)
    batches = [Batch(torch.tensor(rows), none) for rows in ([0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3])]
    even = np.full(4, 0.25)
    assert reference_misses(batches, 2, 4, even) == 0.0
    assert reference_misses(batches, 2, 2, even) == 2.0
    assert reference_misses(batches, 2, 3, even) == 1.0


# Those who take the steps.


@pytest.mark.parametrize("kind", ["alone", "transe"])
def test_both_optimizers_leave_the_same_weights(kind: str, tmp_path: Path) -> None:
    def make() -> Alone | TransE:
        return Alone(400, 16, 64) if kind == "alone" else TransE(400, 16)

    draws = Draws(400, "zipf 0.9", seed=1)
    batches = [draws.batch(64) if kind == "alone" else draws.triples(16, 237) for _ in range(12)]
    ram, mine = InRam(make()), make()
    with OnDisk(mine, tmp_path / "state", 0.5) as disk:
        disk.train_on(batches)
        ours, theirs = disk.take(len(batches)), ram.take(batches)
        statistics = disk.optimizer.statistics()
    for (_, one), (_, other) in zip(mine.tables, ram.work.tables, strict=True):
        assert torch.equal(one, other)
    assert ours.rows == theirs.rows == distinct_rows(batches)
    assert ours.misses > 0
    # A half of the rows has frames.
    assert statistics.frames == sum(len(param) for _, param in mine.tables) // 2
    assert set(ours.parts_s()) == set(PARTS)
    assert sum(ours.parts_s().values()) == pytest.approx(ours.loop_s, rel=0.2)


def test_fill_writes_every_row_in_use(tmp_path: Path) -> None:
    used = some_rows(1000, 100)
    with OnDisk(Alone(1000, 16, 64), tmp_path / "state", 0.5, in_use=used) as disk:
        assert disk.frames == 50
        disk.fill()
        statistics = disk.optimizer.statistics()
        assert statistics.live_records == statistics.rows_touched == 100
        assert statistics.dirty_frames == 0
        # Half the frames may have been filled meanwhile.
        assert disk.lead_steps(10) == 2 + 4


def test_all_in_cache_misses_nothing(tmp_path: Path) -> None:
    draws = Draws(500, "uniform", seed=1)
    with OnDisk(Alone(500, 16, 64), tmp_path / "state", 1.0) as disk:
        disk.fill()
        disk.train_on([draws.batch(64) for _ in range(5)])
        assert disk.take(5).misses == 0
        assert disk.lead_steps(1) == MOST_LEAD


def test_the_memmaps_steps_are_those_of_sparse_adam() -> None:
    def steps(work: Alone, step: Any) -> None:
        draws = Draws(50, "zipf 0.9", seed=1)
        for _ in range(5):
            work.backward(draws.batch(40))
            step()

    ram, mapped = Alone(50, 8, 40), Alone(50, 8, 40)
    steps(ram, InRam(ram).optimizer.step)
    m, v = np.zeros((50, 8), np.float32), np.zeros((50, 8), np.float32)
    steps(mapped, step_limited.MemmapAdam(mapped.weight, m, v).step)
    torch.testing.assert_close(mapped.weight, ram.weight)
    assert (m != 0).any()
    assert (v != 0).any()


@pytest.mark.parametrize(("optimizer", "turns"), [("dsa", 2), ("memmap", 4), ("memmap-random", 4)])
def test_the_program_in_limited_memory(
    optimizer: str, turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("weights", *step_limited.MOMENT_FILES):
        step_memory.write_numbers(tmp_path / name, 500 * 16)
        assert (tmp_path / name).stat().st_size == 500 * 16 * 4
    before = np.fromfile(tmp_path / "weights", np.float32)
    arguments = [optimizer, "--weights", str(tmp_path / "weights"), "--directory", str(tmp_path), "--rows", "500"]
    arguments += ["--width", "16", "--batch-rows", "40", "--update-rows", "20", "--batches", "4"]
    arguments += ["--turn", str(4 // turns), "--cache", "100", "--turnovers", "0.2", "--warm-bytes", "10000"]
    monkeypatch.setattr(sys, "argv", ["step_limited", *arguments])
    step_limited.main()
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == len(found["seconds"]) == turns
    assert sum(found["rows"]) <= 80
    assert found["peak_bytes"] > 1 << 20
    # The weights that were trained are the file's.
    assert (np.fromfile(tmp_path / "weights", np.float32) != before).any()


# Whole runs, small.


@dataclass(frozen=True)
class FakeFio:
    version: str = "fio-9"
    engine: str = "io_uring"
    jobs: tuple[list[tuple[str, int, int]], ...] = ([],)

    def run(self, file: Path, what: str, *, record_bytes: int, count: int, drain_every: int, **_: Any) -> Sample:
        assert file.stat().st_size == TINY.fio_file_bytes
        self.jobs[0].append((what, count, drain_every))
        return Sample(count, count * record_bytes, 1.0)


class FakeLimit:
    """Stands for a group with a memory limit, in which every turn takes half a second."""

    def __init__(self) -> None:
        self.limits: list[int] = []
        self.commands: list[list[str]] = []

    @contextmanager
    def open(self, limit_bytes: int) -> Iterator[FakeLimit]:
        self.limits.append(limit_bytes)
        yield self

    def run(self, command: list[str], timeout_s: float, cwd: Path) -> str:
        options = {key: command[command.index(key) + 1] for key in ("--update-rows", "--batches", "--turn")}
        weights = Path(command[command.index("--weights") + 1])
        assert weights.stat().st_size == TINY.limited_rows * WIDTH * 4
        self.commands.append(command)
        turns = int(options["--batches"]) // int(options["--turn"])
        rows = int(options["--update-rows"]) * int(options["--turn"])
        return json.dumps({"rows": [rows] * turns, "seconds": [0.5] * turns})


def silent() -> Console:
    return Console(quiet=True)


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeFio, FakeLimit]:
    """fio and a memory cgroup that are always there."""
    fio, limit = FakeFio(jobs=([],)), FakeLimit()
    monkeypatch.setattr(device_fio.Fio, "find", lambda file, direct: fio)
    monkeypatch.setattr(memory_limit.MemoryLimit, "open", limit.open)
    monkeypatch.setattr(step, "find_counter", lambda path: None)
    return fio, limit


def test_a_small_run_finds_every_ratio(
    everything: tuple[FakeFio, FakeLimit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fio, limit = everything
    shared, place = tmp_path / "shared", tmp_path / "place"
    shared.mkdir()
    place.mkdir()
    stages, found = step.measure(TINY, place, silent(), shared_memory=shared)
    assert json.loads(json.dumps(found)) == found
    assert found["notes"] == []
    assert {name for name, value in found["ratios"].items() if value is None} == set()
    assert found["fixed_cost_256_rows"]["alone"]["steps"] == TINY.fixed_steps
    assert found["fixed_cost_256_rows"]["busy"]["steps"] == TINY.busy_steps
    assert list(place.iterdir()) == list(shared.iterdir()) == []

    whats = [one["what"] for one in found["cases"]]
    assert [whats.count(what) for what in (CACHED, ALONE, HIDDEN, LIMITED, LARGE)] == [3, 3, 2, 1, 2]
    for one in found["cases"]:
        ways = {way: figures["rounds"] for way, figures in one["ways"].items()}
        if one["what"] == CACHED:
            assert ways == {RAM: 2, DSA: 2, FAST: 2}
            assert one["cache"] == 1.0
        elif one["what"] == ALONE:
            assert ways == ({DSA: 2, RAM: 2, FIO: 2} if one["cache"] < 1 else {DSA: 2, RAM: 2})
            assert (one["misses_per_step"] > 0) == (one["cache"] < 1)
        elif one["what"] == HIDDEN:
            assert ways == {DSA: 3, RAM: 3, FIO: 3, BOUND: 3}
            assert 0 < one["reference_misses_per_step"] < 64
        elif one["what"] == LARGE:
            assert ways == {DSA: 2, SMALL: 2}
        if one["what"] != LIMITED:
            assert set(one["where_the_time_goes_s"]) == set(PARTS)
    # fio reads what two steps lack, and drains after each.
    assert all(what == "randread" and count == 2 * drain for what, count, drain in fio.jobs[0])
    assert limit.limits == [int(4000 * 1024 / 2.7)]
    assert [command[3] for command in limit.commands] == ["memmap", "memmap-random", "dsa"]
    assert found["ratios"]["vs_memmap_limited"] == pytest.approx(64 * 4 / 16)
    assert found["ratios"]["vs_memmap_random_limited"] == pytest.approx(64 * 4 / 32)

    step_report.show(silent(), stages.cases, found)
    block = step_report.markdown(stages.cases, found)
    assert "not measured" not in block
    assert all(name in block for name in RATIO_NAMES)
    drawn = step_report.pictures(stages.cases, tmp_path / "steps")
    assert [path.name for path in drawn] == ["steps-cache.png", "steps-rows.png", "steps-parts.png"]
    assert all(path.stat().st_size > 1000 for path in drawn)


SMALLEST = replace(TINY, cached=(), alone=((2000, (0.10,), ("uniform",)),), hidden_caches=(), large=(), rounds=1)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fio(file: Path, direct: bool) -> Any:
        raise NoFio("fio is not installed")

    def no_group(limit_bytes: int) -> Any:
        raise CannotLimit("no memory cgroup can be made")

    monkeypatch.setattr(device_fio.Fio, "find", no_fio)
    monkeypatch.setattr(memory_limit.MemoryLimit, "open", no_group)
    stages, found = step.measure(SMALLEST, tmp_path, silent(), shared_memory=tmp_path)
    assert [note.split(":")[0] for note in found["notes"]] == [
        "fio, and all ratios to it",
        "optimizers in limited memory",
    ]
    assert found["ratios"]["uniform_vs_fio_reads"] is None
    assert found["ratios"]["vs_memmap_limited"] is None
    assert "not measured" in step_report.markdown(stages.cases, found)
    step_report.show(silent(), stages.cases, found)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_fails_in_limited_memory_leaves_a_note(
    everything: tuple[FakeFio, FakeLimit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FakeLimit, command: list[str], timeout_s: float, cwd: Path) -> str:
        raise ProgramFailed("python failed under the memory limit: exit -9", -9)

    monkeypatch.setattr(FakeLimit, "run", fail)
    stages = Stages(TINY, tmp_path, ReadCheck(None), shared_memory=tmp_path)
    stages.limited()
    assert stages.cases == []
    assert stages.notes == ["optimizers in limited memory: python failed under the memory limit: exit -9"]
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_into_memory_is_left_out_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_stages, "available_bytes", lambda: 1 << 20)
    stages = Stages(TINY, tmp_path, ReadCheck(None))
    stages.cached(2000, ("uniform",))
    stages.alone(2000, (0.1,), ("uniform",))
    stages.hidden("zipf 0.9")
    stages.large(80_000, 1000)
    assert stages.cases == []
    assert len(stages.notes) == 4
    assert all("MiB are available" in note for note in stages.notes)


def test_a_full_disk_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="MiB free, this takes"):
        step.measure(replace(TINY, fio_file_bytes=1 << 60), tmp_path, silent())


def test_both_scales_cover_the_targets() -> None:
    for scale in (FULL, QUICK):
        assert {size for size, _ in scale.cached_blocks} == {256, 8192, 65_536}
        assert any(0.10 in caches and "uniform" in drawn for _, caches, drawn in scale.alone)
        assert scale.hidden_caches == (0.05, 0.10, 0.25)
        assert scale.limit_bytes is None
        assert scale.limited_plain_rows == 256
        assert all(rows == 100_000_000 for rows, _ in scale.large)
    assert max(rows for rows, _, _ in FULL.alone) == 4_000_000
    assert QUICK.disk_bytes < FULL.disk_bytes < 60e9


def test_the_command_line_writes_what_it_is_asked_for(
    everything: tuple[FakeFio, FakeLimit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "README.md"
    page.write_text("\n".join(["# x", *readme.markers(step.README_BLOCK), "y"]))
    monkeypatch.setattr(readme, "README", page)
    monkeypatch.setattr(step, "QUICK", replace(SMALLEST, limited_rows=TINY.limited_rows))
    monkeypatch.setattr(Stages, "limited", lambda self: None)
    arguments = ["--quick", "--dir", str(tmp_path), "--json", str(tmp_path / "found.json"), "--readme"]
    assert step.main([*arguments, "--picture", str(tmp_path / "steps")]) == 0
    assert list(json.loads((tmp_path / "found.json").read_text())["ratios"]) == RATIO_NAMES
    assert "uniform_vs_fio_reads" in page.read_text()
    assert page.read_text().endswith("y")
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"steps-{name}.png" for name in ("cache", "rows", "parts")
    }


def test_one_stage_alone_finds_its_ratios_and_changes_no_page(
    everything: tuple[FakeFio, FakeLimit], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "QUICK", SMALLEST)
    arguments = ["--quick", "--dir", str(tmp_path), "--json", str(tmp_path / "found.json"), "--stage", "alone"]
    assert step.main(arguments) == 0
    ratios = json.loads((tmp_path / "found.json").read_text())["ratios"]
    assert [name for name, value in ratios.items() if value is not None] == ["uniform_vs_fio_reads"]
    with pytest.raises(SystemExit, match="2"):
        step.main([*arguments, "--readme"])


@pytest.mark.parametrize("option", ["--json", "--picture", "--dir"])
def test_a_place_that_is_missing_is_refused_first(option: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        step.main([option, str(tmp_path / "no" / "such")])


def test_a_failed_run_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "QUICK", replace(TINY, fio_file_bytes=1 << 60))
    assert step.main(["--quick", "--dir", str(tmp_path)]) == 1
    assert "this takes" in capsys.readouterr().err


# The headline.

HEAD = headline.Scale(
    rows=1000,
    width=16,
    limit_bytes=1 << 30,
    steps=4,
    batch_rows=50,
    beside_rows=800,
    cold_steps=2,
    warm_steps=2,
    rounds=2,
)


def test_the_cache_is_what_the_limit_leaves() -> None:
    for scale in (headline.FULL, headline.QUICK):
        cache_bytes = scale.cache_share * scale.rows * 1100
        assert 0.02 < scale.cache_share < 0.5
        assert scale.weight_bytes + cache_bytes < scale.limit_bytes
        # Weights and moments are more than there is.
        assert 3 * scale.weight_bytes > 1.3 * scale.limit_bytes


def test_the_programs_of_the_headline(tmp_path: Path) -> None:
    assert headline.in_ram(HEAD, tmp_path / "progress")["peak_bytes"] > 1 << 20
    assert (tmp_path / "progress").read_text() == "4"
    ours = headline.on_disk(HEAD, tmp_path / "state")
    assert ours["steps"] == 4
    assert set(ours["rows_per_s"]) == set(ours["hit_rate"]) == set(headline.DISTRIBUTIONS)
    both = headline.beside(HEAD, tmp_path / "beside")
    for one in both.values():
        assert one["cold_misses"] > 0.8  # of two steps from an empty cache, hardly a row is looked up twice
        assert min(one.values()) > 0


class EndingLimit:
    """A group in which the first program ends as it is told to, and the others print what they are told to."""

    def __init__(self, first: int, output: dict[str, Any]) -> None:
        self.first, self.output = first, output

    @contextmanager
    def open(self, limit_bytes: int) -> Iterator[EndingLimit]:
        yield self

    def run(self, command: list[str], timeout_s: float, cwd: Path) -> str:
        if command[command.index("--role") + 1] == "dsa":
            return json.dumps(self.output)
        Path(command[-1]).write_text("37")
        if self.first:
            raise ProgramFailed("it failed", self.first)
        return "{}"


DSA_OUTPUT = {
    "rows_per_s": {"uniform": 1e5, "zipf 0.9": 2e5},
    "hit_rate": {"uniform": 0.1, "zipf 0.9": 0.6},
    "cache": 0.2,
    "steps": 4,
    "state_bytes_on_disk": 15e9,
    "peak_bytes": 7 << 30,
}
BESIDE_OUTPUT = {
    "cold_rows_per_s": 500.0,
    "cold_misses": 0.9,
    "warm_rows_per_s": 3000.0,
    "ram_rows_per_s": 1000.0,
    "warm_vs_ram": 3.0,
}


@pytest.mark.parametrize(("exit_status", "shown"), [(-9, True), (-11, False), (0, False)])
def test_the_headline_holds_only_where_sparse_adam_was_killed_for_memory(
    exit_status: int, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit.MemoryLimit, "open", EndingLimit(exit_status, DSA_OUTPUT).open)
    ended = subprocess.CompletedProcess([], 0, json.dumps(dict.fromkeys(headline.DISTRIBUTIONS, BESIDE_OUTPUT)))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    found = headline.run(HEAD, tmp_path)
    assert found["ram"] == {"steps": 37 if exit_status else 4, "signal": -exit_status}
    assert headline.held(found) == shown
    table = headline.markdown(found)
    assert ("killed (signal 9) in step 38" in table) == shown
    assert "| zipf 0.9 | 200,000 rows/s, 60% of them in cache |" in table
    assert "| uniform | 1,000 | **3,000** (3.0 times) | 500 (90% read from disk) |" in table
    assert list(tmp_path.iterdir()) == []


def test_a_failure_of_sparse_adam_that_is_no_signal_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit.MemoryLimit, "open", EndingLimit(1, DSA_OUTPUT).open)
    with pytest.raises(ProgramFailed, match="it failed"):
        headline.run(HEAD, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_a_memory_limit_the_headline_says_so_and_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_group(limit_bytes: int) -> Any:
        raise CannotLimit("no memory cgroup can be made")

    monkeypatch.setattr(memory_limit.MemoryLimit, "open", no_group)
    monkeypatch.setattr(headline, "QUICK", HEAD)
    page = tmp_path / "README.md"
    page.write_text("\n".join([*readme.markers(headline.README_BLOCK), "y"]))
    monkeypatch.setattr(readme, "README", page)
    saved = tmp_path / "found.json"
    assert headline.main(["--quick", "--dir", str(tmp_path), "--json", str(saved), "--readme"]) == 1
    assert "Left out: what does not fit into memory: no memory cgroup can be made." in page.read_text()
    found = json.loads(saved.read_text())
    assert all(math.isfinite(value) for one in found["beside"].values() for value in one.values())
