"""bench.gpu: says why it measures nothing where there is no GPU, and goes its whole way on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["measured"] is False
    assert "CUDA" in found["reason"]
    assert found["reason"] in capsys.readouterr().out


def test_it_goes_all_the_way_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "3000", "--dim", "8", "--batch", "64", "--steps", "4", "--layers", "2"]
    assert gpu.main([*sizes, "--on-cpu", "--folder", str(tmp_path), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["parity"] == {"announced": True, "unannounced": True}
    assert [each["way"] for each in found["ways"]] == ["model", "vram", "pinned", "announced", "unannounced", "off"]
    assert all(each["step_ms"] > 0 for each in found["ways"])
    ways = {each["way"]: each for each in found["ways"]}
    assert ways["announced"]["device_bytes"] > 0
    assert ways["announced"]["announced_share"] == 1.0
    assert ways["unannounced"]["announced_share"] == 0.0
    assert ways["off"]["device_bytes"] == 0
    assert [ways[name]["rows_read"] for name in ("announced", "unannounced", "off")] == [0, 0, 0]
    assert "| announced |" in capsys.readouterr().out


@pytest.mark.parametrize("share", ["0", "-1", "1.5", "nan"])
def test_a_share_that_cannot_be_meant_is_refused(
    share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--cache", share, "--on-cpu", "--folder", str(tmp_path)])
    assert f"--cache is a share of the rows, above 0 and at most 1, got {float(share)}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_pinned_moments_are_sparse_adams() -> None:
    start = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    mine, oracle = gpu.HostMoments(ours), torch.optim.SparseAdam([theirs])
    for i in range(5):
        rows = torch.arange(i, 40, 3)
        for param in (ours, theirs):
            param.grad = torch.sparse_coo_tensor(rows[None], torch.ones(len(rows), 6) * i, param.shape)
        mine.step()
        oracle.step()
    assert gpu.same_bits(ours, theirs)


def test_hidden_share() -> None:
    ways = [
        {"way": "vram", "step_ms": 2.0},
        {"way": "announced", "step_ms": 2.5},
        {"way": "unannounced", "step_ms": 7.0},
    ]
    assert gpu.hidden_share(ways) == 0.9
    ways[2]["step_ms"] = 2.0
    assert gpu.hidden_share(ways) is None
