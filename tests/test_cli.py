"""The command line: what it prints where, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from dsa.cli import app
from dsa.config import IOConfig
from dsa.io.probe import DeviceProbe

runner = CliRunner()
TINY = ["--seconds", "0.05", "--file-mib", "1"]


def test_probe_prints_a_table_and_what_would_be_chosen(tmp_path: Path) -> None:
    result = runner.invoke(app, ["probe", str(tmp_path), *TINY])
    assert result.exit_code == 0, result.output
    for word in (
        "Random requests a second",
        "threads",
        "65,536",
        "sequential:",
        "What DSA would choose",
        "queue_depth",
    ):
        assert word in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_probe_prints_json_and_nothing_else_that_io_config_takes(tmp_path: Path) -> None:
    result = runner.invoke(app, ["probe", str(tmp_path), "--json", *TINY])
    assert result.exit_code == 0, result.output
    found = DeviceProbe.from_json(result.stdout)
    assert json.loads(result.stdout)["choice"]["queue_depth"] == found.choice.queue_depth
    path = tmp_path / "probe.json"
    path.write_text(result.stdout)
    assert IOConfig(probe=path).queue_depth == found.choice.queue_depth


def test_an_error_is_one_line_on_stderr_and_exit_code_1(tmp_path: Path) -> None:
    result = runner.invoke(app, ["probe", str(tmp_path / "nowhere"), *TINY])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("dsa: ")
    assert "nowhere is not a directory" in result.stderr
    assert result.stderr.count("\n") == 1


def test_wrong_usage_is_exit_code_2() -> None:
    assert runner.invoke(app, ["probe"]).exit_code == 2
    assert runner.invoke(app, ["nothing"]).exit_code == 2


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "dsa.cli", "--help"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert "probe" in done.stdout
