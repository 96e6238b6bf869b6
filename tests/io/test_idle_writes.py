"""Where training stands still, whole segments are written early; where it goes on, they wait for their share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gated_backend import LIMIT_S, GatedBackend

import dsa.io.engine
import dsa.io.writebehind
from dsa import DiskSparseAdam, IOConfig
from dsa.io.backends import ThreadsBackend

ROWS, WIDTH = 16, 512  # records of 4096 bytes
KNOBS = IOConfig(segment_bytes=16384, dirty_share=1.0)  # three records a segment


def make(path: Path, monkeypatch: pytest.MonkeyPatch, idle_s: float) -> tuple[DiskSparseAdam, GatedBackend]:
    backend = GatedBackend(ThreadsBackend(KNOBS))
    monkeypatch.setattr(dsa.io.engine, "open_backend", lambda name, config: backend)
    monkeypatch.setattr(dsa.io.writebehind, "IDLE_S", idle_s)
    table = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    opt = DiskSparseAdam(table.named_parameters(), state_dir=path, io=KNOBS, cache="1MiB")
    table(torch.arange(7)).sum().backward()
    opt.step()
    return opt, backend


def test_whole_segments_are_written_where_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opt, backend = make(tmp_path / "state", monkeypatch, 0.01)
    backend.await_completed("write", 2)
    pipeline = opt._books.engine._pipeline
    with opt, pipeline.access.condition:
        assert pipeline.access.condition.wait_for(lambda: pipeline.books.dirty_frames() == 1, LIMIT_S)
        assert opt.statistics().rows_written == 6  # two whole segments; the seventh row waits for company


def test_nothing_is_written_early_where_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opt, backend = make(tmp_path / "state", monkeypatch, 3600.0)
    for _ in range(20):
        opt.step()
    assert backend.submitted["write"] == 0
    assert opt.statistics().dirty_frames == 7
    opt.close()
    assert opt.statistics().rows_written == 7
