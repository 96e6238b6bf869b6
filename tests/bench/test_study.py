"""The study of devices: the same figures each time, and figures that make sense."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import study
from bench.study_simulation import Run, Setting, run
from bench.study_workload import Scale, batches
from dsa.errors import ConfigError
from dsa.io.backends.clocks import VirtualTimeLoop
from dsa.io.backends.device_models import HDD, NVME

TINY = Scale(n_rows=4096, batch_rows=64, warm_steps=3, steps=4)
DISK = Scale(n_rows=1 << 17, batch_rows=1 << 10, warm_steps=8, steps=8)


@pytest.mark.parametrize("device", ["nvme", "sata", "hdd", "network"])
@pytest.mark.parametrize(("workload", "cache", "lookahead"), [("uniform", 0.1, 0), ("zipf", 0.05, 4)])
def test_a_setting_has_the_same_figures_each_time(device: str, workload: str, cache: float, lookahead: int) -> None:
    setting = Setting(device, workload, cache, lookahead)
    first = run(setting, TINY)
    assert run(setting, TINY) == first
    assert run(setting, dataclasses.replace(TINY, seed=1)) != first
    assert first.read_s > 0
    assert 0 < first.rows_per_s <= 1e6 / (TINY.model_us + TINY.update_us) + 1e-6
    assert first.rows_per_s * first.seconds == pytest.approx(TINY.steps * TINY.batch_rows)
    waited = first.wait_ms * TINY.steps / 1e3
    computed = TINY.steps * TINY.batch_rows * (TINY.model_us + TINY.update_us) * 1e-6
    assert waited + computed == pytest.approx(first.seconds)


def test_rows_of_a_step_are_distinct_sorted_and_the_same_whatever_the_lookahead() -> None:
    for workload in study.WORKLOADS:
        few, many = batches(workload, TINY, 0, 3), batches(workload, TINY, 0, 9)
        for short, long in zip(few, many, strict=False):
            assert np.array_equal(short, long)
        for rows in many:
            assert len(rows) == TINY.batch_rows
            assert (np.diff(rows) > 0).all()
            assert rows[0] >= 0
            assert rows[-1] < TINY.n_rows
    assert not np.array_equal(*(batches(workload, TINY, 0, 1)[0] for workload in study.WORKLOADS))


def test_looking_ahead_hides_reads_and_caching_saves_them() -> None:
    waits = [run(Setting("nvme", "uniform", 0.1, lookahead), DISK).wait_ms for lookahead in (0, 4)]
    assert waits[1] < waits[0] / 10
    hits = [run(Setting("nvme", "zipf", cache, 0), DISK).hit_rate for cache in (0.05, 0.5)]
    assert 0 < hits[0] < hits[1] - 0.2
    assert run(Setting("nvme", "zipf", 0.5, 0), DISK).hit_rate > run(Setting("nvme", "uniform", 0.5, 0), DISK).hit_rate


@pytest.mark.parametrize("workload", study.WORKLOADS)
def test_on_a_disk_a_batch_is_one_sweep_and_writes_take_under_two_percent_of_the_time(workload: str) -> None:
    """By the emulator's own counters, through the engine's own decisions, cleaning included."""
    loop = VirtualTimeLoop()
    running = Run(Setting("hdd", workload, 0.1, 0), DISK, HDD)
    outcome = loop.run_until_complete(running.measure())
    loop.close()
    time = running.backend.time
    assert running.books.tally.rows_cleaned > 0
    assert 0 < time.write_s < 0.02 * (time.read_s + time.write_s)
    assert outcome.read_s + outcome.write_s == pytest.approx(outcome.seconds, rel=0.02)  # one head, which never rests
    # The head returns once for the sweep of a batch, and at most once for each segment that was written between.
    steps = running.warm_steps + DISK.steps
    assert time.returns <= steps + running.backend.counters.write_requests


def test_a_failure_of_the_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Run(Setting("nvme", "uniform", 0.1, 0), TINY, NVME)

    async def fail(*arguments: object, **named: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(running.backend, "read", fail)
    loop = VirtualTimeLoop()
    with pytest.raises(RuntimeError, match="the device is gone"):
        loop.run_until_complete(running.measure())
    loop.run_until_complete(loop.shutdown_asyncgens())
    for task in asyncio.all_tasks(loop):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)
    loop.close()


SMALL = ["--emulate", "nvme", "--rows", "4096", "--batch", "32", "--steps", "2"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "LOOKAHEADS", (0, 2))
    monkeypatch.setattr(study, "CACHES", (0.05, 0.5))


@pytest.mark.usefixtures("small")
def test_the_program_writes_the_same_lines_each_time_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    texts = []
    for name in ("a", "b"):
        target = tmp_path / f"{name}.jsonl"
        arguments = [*SMALL, "--json", str(target), "--picture", str(tmp_path / f"{name}.png")]
        assert study.main(arguments) == 0
        texts.append((target.read_text(), capsys.readouterr().out))
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert texts[0] == texts[1]
    found = [json.loads(line) for line in texts[0][0].splitlines()]
    assert [(line["workload"], line["cache"], line["lookahead"]) for line in found] == [
        (workload, cache, lookahead) for workload in study.WORKLOADS for cache in (0.05, 0.5) for lookahead in (0, 2)
    ]
    assert "rows/s" in texts[0][1]
    assert f"{found[0]['rows_per_s']:,.0f}" in texts[0][1]


@pytest.mark.usefixtures("small")
def test_without_matplotlib_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert study.main([*SMALL, "--picture", str(tmp_path / "a.png")]) == 0
    said = capsys.readouterr()
    assert "no picture" in said.err
    assert "matplotlib" in said.err
    assert "rows/s" in said.out
    assert list(tmp_path.iterdir()) == []


def test_devices_are_named_or_probed(tmp_path: Path) -> None:
    assert list(study.devices("hdd, nvme")) == ["hdd", "nvme"]
    for wrong in ("floppy", "", "nvme,floppy"):
        with pytest.raises(ConfigError, match="device"):
            study.devices(wrong)
    with pytest.raises(ConfigError, match="not a saved probe"):
        study.devices(str(_written(tmp_path / "wrong.json", "{}")))


@pytest.mark.parametrize("wrong", [["--batch", "5000"], ["--steps", "0"], ["--model-us", "-1"], ["--emulate", "tape"]])
def test_wrong_arguments_end_with_code_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        study.main([*SMALL, *wrong])
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
