"""The commands on state directories: what they print, what they write, and how they refuse."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from dsa import DiskSparseAdam, IOConfig
from dsa.cli import app
from dsa.commands.plan import WRITE_AMPLIFICATION
from dsa.io import reading
from dsa.io.inspection import inspect

SHAPES = {"nodes.weight": (150, 5), "pair": (7, 2, 3)}
Moments = dict[str, dict[str, torch.Tensor]]


def parameters() -> dict[str, nn.Parameter]:
    dtypes = {"nodes.weight": torch.float32, "pair": torch.float64}
    return {name: nn.Parameter(torch.zeros(*shape, dtype=dtypes[name])) for name, shape in SHAPES.items()}


def optimizer(directory: Path, params: dict[str, nn.Parameter], **options: Any) -> DiskSparseAdam:
    config = IOConfig(segment_bytes=8192)
    return DiskSparseAdam(list(params.items()), lr=0.1, state_dir=directory, io=config, kernel="reference", **options)


def gradients(params: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params.values():
        rows = torch.randperm(len(param) - 2, generator=generator)[: max(len(param) // 5, 2)]
        values = torch.randn(len(rows), *param.shape[1:], generator=generator, dtype=param.dtype)
        param.grad = torch.sparse_coo_tensor(rows[None], values, param.shape, check_invariants=False)


def moments(opt: DiskSparseAdam, params: dict[str, nn.Parameter]) -> Moments:
    return {name: opt.moments(name, list(range(len(param)))) for name, param in params.items()}


@dataclass
class Made:
    """A state directory; by generation the state dict, moments and weights."""

    path: Path
    state_dicts: dict[int, dict[str, Any]]
    moments: dict[int, Moments]
    weights: dict[int, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Made:
    made = Made(tmp_path_factory.mktemp("cli") / "adam", {}, {}, {})
    params = parameters()
    with optimizer(made.path, params) as opt:
        for number in (1, 2):
            for step in range(3):
                gradients(params, 10 * number + step)
                opt.step()
            made.state_dicts[number] = opt.state_dict()
            made.moments[number] = moments(opt, params)
            made.weights[number] = {name: param.detach().clone() for name, param in params.items()}
    return made


@pytest.fixture
def made(original: Made, tmp_path: Path) -> Made:
    """A copy of it."""
    shutil.copytree(original.path, tmp_path / "adam")
    return Made(tmp_path / "adam", original.state_dicts, original.moments, original.weights)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def run_json(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: object, code: int = 2) -> str:
    """The one line that the command ends with, the same with --json, where stdout has it as an object."""
    plain = run(*arguments)
    assert plain.exit_code == code, plain.output
    assert "Traceback" not in plain.output
    structured = run(*arguments, "--json")
    assert structured.exit_code == code
    assert json.loads(structured.stdout)["error"] in plain.stderr
    return plain.stderr


def flip_first_record(made: Made) -> None:
    log = next((made.path / "tables").glob("000-*.log"))
    data = bytearray(log.read_bytes())
    for begin in range(0, len(data), 8192):
        if data[begin : begin + 6] == b"DSASEG":
            data[begin + 4096] ^= 1
    log.write_bytes(data)


# inspect


def test_inspect_shows_tables_generations_space_and_health(original: Made) -> None:
    found = run_json("inspect", original.path)
    tables = {table["name"]: table for table in found["tables"]}
    assert {name: tuple(table["shape"]) for name, table in tables.items()} == SHAPES
    assert [generation["number"] for generation in found["generations"]] == [1, 2]
    assert found["generations"][1]["steps"] == {"nodes.weight": 6, "pair": 6}
    assert found["healthy"] is True
    assert found["uuid"] == original.state_dicts[1]["state"][0]["state_dir_uuid"]
    for name, table in tables.items():
        touched = original.moments[2][name]["exp_avg_sq"].reshape(len(parameters()[name]), -1).any(1)
        assert table["live_records"] == int(touched.sum())
        assert table["live_bytes"] == table["live_records"] * table["record_bytes"]
        parts = ("live_bytes", "dead_bytes", "retained_bytes", "free_bytes")
        assert sum(table[part] for part in parts) == table["log_bytes"] == (original.path / table["log"]).stat().st_size
    assert found["files"]["manifest.json"] == (original.path / "manifest.json").stat().st_size
    text = run("inspect", original.path).stdout
    for word in ("nodes.weight", "pair", "150 x 5", "not in use", found["uuid"], "nothing wrong"):
        assert word in text


def test_inspect_changes_nothing(made: Made) -> None:
    made.path.joinpath("LOCK").unlink()
    before = {path: path.read_bytes() for path in made.path.rglob("*") if path.is_file()}
    run_json("inspect", made.path)
    assert {path: path.read_bytes() for path in made.path.rglob("*") if path.is_file()} == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists its locks")
def test_inspect_names_the_owner_of_a_directory_in_use_and_does_not_keep_it_out(made: Made) -> None:
    assert inspect(made.path).holder.holds is False
    params = parameters()
    with optimizer(made.path, params) as opt:
        found = inspect(made.path)
        assert (found.holder.holds, found.holder.pid) == (True, os.getpid())
        assert f"in use by process {os.getpid()}" in run("inspect", made.path).stdout
        assert opt.generations() == (1, 2)
    assert inspect(made.path).holder.holds is False


def test_inspect_tells_problems_that_a_look_shows(made: Made) -> None:
    index = sorted((made.path / "index").iterdir())[-1]
    index.write_bytes(index.read_bytes()[:100])
    log = next((made.path / "tables").glob("000-*.log"))
    log.write_bytes(b"")
    found = run_json("inspect", made.path)
    assert found["healthy"] is False
    assert any(str(index) in problem for problem in found["problems"])
    assert any(str(log) in problem and "cut short" in problem for problem in found["problems"])
    assert "PROBLEM" in run("inspect", made.path).stdout


# verify


def test_verify_of_a_sound_directory(original: Made) -> None:
    found = run_json("verify", original.path)
    assert found["clean"] is True
    assert found["generations"] == [1, 2]
    assert found["damage"] == []
    assert "nothing is damaged" in run("verify", original.path).stdout


def test_verify_lists_damage_and_exits_with_1(made: Made) -> None:
    flip_first_record(made)
    plain, structured = run("verify", made.path), run("verify", made.path, "--json")
    assert plain.exit_code == structured.exit_code == 1
    damage = json.loads(structured.stdout)["damage"]
    assert damage
    assert {each["kind"] for each in damage} == {"record"}
    for each in damage:
        assert f"row {each['row']} of table 'nodes.weight' at byte {each['offset_bytes']} does not" in plain.stdout
        assert each["path"] in plain.stdout
    assert f"DAMAGED: {len(damage)} findings" in plain.stdout


def test_the_command_runs_as_a_program(made: Made) -> None:
    command = [sys.executable, "-m", "dsa.cli", "verify", str(made.path)]
    sound = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (sound.returncode, sound.stderr) == (0, "")
    assert "nothing is damaged" in sound.stdout
    flip_first_record(made)
    damaged = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert damaged.returncode == 1
    assert "does not match its check" in damaged.stdout
    assert damaged.stderr == ""


# export


@pytest.mark.parametrize("number", [1, 2])
def test_export_to_safetensors(original: Made, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE_RECORDS", 7)  # so that there are many pieces
    file = tmp_path / "moments.safetensors"
    found = run_json("export", original.path, file, "--generation", number)
    assert (found["generation"], found["bytes"]) == (number, file.stat().st_size)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert json.loads(header.pop("__metadata__")["step"]) == {"nodes.weight": 3 * number, "pair": 3 * number}
    assert sorted(header) == sorted(f"{name}.{key}" for name in SHAPES for key in ("exp_avg", "exp_avg_sq"))
    for name, expected in original.moments[number].items():
        for key, values in expected.items():
            place = header[f"{name}.{key}"]
            begin, end = (8 + length + offset for offset in place["data_offsets"])
            kind = {"F32": np.float32, "F64": np.float64}[place["dtype"]]
            array = np.frombuffer(data[begin:end], kind).reshape(place["shape"])
            assert np.array_equal(array, values.numpy())
    assert max(entry["data_offsets"][1] for entry in header.values()) + 8 + length == len(data)
    assert list(tmp_path.iterdir()) == [file]


def test_safetensors_itself_reads_the_export(original: Made, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="the package safetensors is not installed")
    run_json("export", original.path, tmp_path / "x.safetensors")
    tensors = safetensors.load_file(tmp_path / "x.safetensors")
    for name, expected in original.moments[2].items():
        for key, values in expected.items():
            assert torch.equal(tensors[f"{name}.{key}"], values)


def test_export_to_a_state_dict_that_sparse_adam_goes_on_from(original: Made, tmp_path: Path) -> None:
    file = tmp_path / "adam.pt"
    assert "hyperparameters" in run("export", original.path, file, "--generation", 1).stdout
    state_dict = torch.load(file, weights_only=True)
    assert state_dict["param_groups"][0]["param_names"] == list(SHAPES)
    params = {name: nn.Parameter(values.clone()) for name, values in original.weights[1].items()}
    adam = torch.optim.SparseAdam(list(params.values()), lr=0.1)
    adam.load_state_dict(state_dict)
    adam.param_groups[0]["lr"] = 0.1
    for step in range(3):
        gradients(params, 20 + step)
        adam.step()
    for name, param in params.items():
        assert torch.equal(param, original.weights[2][name])
        for key, values in original.moments[2][name].items():
            assert torch.equal(adam.state[param][key], values)


def test_export_of_a_directory_in_use(made: Made, tmp_path: Path) -> None:
    with optimizer(made.path, parameters()):
        assert run_json("export", made.path, tmp_path / "x.safetensors", "--generation", 1)["generation"] == 1


def test_export_of_damaged_records_makes_no_file(made: Made, tmp_path: Path) -> None:
    flip_first_record(made)
    for suffix in ("pt", "safetensors"):
        text = refused("export", made.path, tmp_path / f"x.{suffix}", code=1)
        assert "does not match its check" in text
        assert str(made.path) in text
    assert list(tmp_path.iterdir()) == [made.path]


def test_export_refuses(original: Made, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    assert "present are 1, 2" in refused("export", original.path, file, "--generation", 9)
    assert ".safetensors, .pt or .pth" in refused("export", original.path, tmp_path / "x.npz")
    assert "is not a directory" in refused("export", original.path, tmp_path / "no" / "x.pt")
    assert list(tmp_path.iterdir()) == []
    file.write_bytes(b"mine")
    assert "exists" in refused("export", original.path, file)
    assert file.read_bytes() == b"mine"
    assert run("export", original.path, file, "--overwrite").exit_code == 0
    assert file.read_bytes() != b"mine"


# copy


@pytest.mark.parametrize("number", [1, 2])
def test_a_copy_loads_with_the_same_state_dict(original: Made, tmp_path: Path, number: int) -> None:
    copy = tmp_path / "deep" / "copy"
    found = run_json("copy", original.path, copy, "--generation", number)
    assert found["generation"] == number
    params = {name: nn.Parameter(values.clone()) for name, values in original.weights[number].items()}
    with optimizer(copy, params) as opt:
        opt.load_state_dict(original.state_dicts[number])
        for name, expected in original.moments[number].items():
            for key, values in moments(opt, params)[name].items():
                assert torch.equal(values, expected[key])
        for step in range(3):
            gradients(params, 20 + step)
            opt.step()
        assert opt.checkpoint() == found["next_generation"]
        assert opt.generations() == (number, found["next_generation"])
        if number == 1:  # those are the steps that the original took to its generation 2
            for name, expected in original.moments[2].items():
                for key, values in moments(opt, params)[name].items():
                    assert torch.equal(values, expected[key])
    assert run("verify", copy).exit_code == 0


def test_a_copy_holds_live_records_only(original: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE_RECORDS", 7)
    found = run_json("copy", original.path, tmp_path / "copy", "--generation", 2)
    state = run_json("inspect", tmp_path / "copy")
    assert [generation["number"] for generation in state["generations"]] == [2]
    for table in state["tables"]:
        slots = (8192 - 4096) // table["record_bytes"]
        segments = -(-table["live_records"] // slots)
        assert table["log_bytes"] == segments * 8192
        assert (table["retained_bytes"], table["free_bytes"]) == (0, 0)
    assert found["records"] == sum(table["live_records"] for table in state["tables"])
    assert found["record_bytes"] == sum(table["live_bytes"] for table in state["tables"])
    assert run_json("verify", tmp_path / "copy")["record_checks"] == found["records"]


def test_a_later_generation_of_the_original_is_never_taken_for_one_of_the_copy(made: Made, tmp_path: Path) -> None:
    run_json("copy", made.path, tmp_path / "copy")
    later = []
    for directory in (made.path, tmp_path / "copy"):
        params = {name: nn.Parameter(values.clone()) for name, values in made.weights[2].items()}
        with optimizer(directory, params, existing="resume") as opt:
            gradients(params, 30)
            opt.step()
            later.append(opt.checkpoint())
    assert later[0] != later[1]


def test_copy_refuses_a_place_that_is_not_empty(original: Made, made: Made, tmp_path: Path) -> None:
    before = (made.path / "manifest.json").read_bytes()
    assert "not empty" in refused("copy", original.path, made.path)
    assert (made.path / "manifest.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    assert "not empty" in refused("copy", original.path, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused("copy", original.path, tmp_path / "file")
    assert "present are 1, 2" in refused("copy", original.path, tmp_path / "copy", "--generation", 5)
    assert not (tmp_path / "copy").exists()


def test_a_copy_of_damaged_records_comes_to_nothing_and_can_be_repeated(
    original: Made, made: Made, tmp_path: Path
) -> None:
    flip_first_record(made)
    assert "does not match its check" in refused("copy", made.path, tmp_path / "copy", code=1)
    assert not (tmp_path / "copy" / "manifest.json").exists()
    assert list((tmp_path / "copy" / "tables").iterdir()) == []
    run_json("copy", original.path, tmp_path / "copy")
    assert run("verify", tmp_path / "copy").exit_code == 0


# plan


def test_plan_says_what_a_table_needs() -> None:
    found = run_json("plan", "--rows", "10M", "--dim", "128", "--steps-per-second", "20", "--cache", "2GiB")
    record, rows = 1024, 10_000_000
    assert found["record_bytes"] == record
    assert found["ram_bytes"] == 2 * 2**30 + 16 * rows + 64 * 2**20
    assert found["disk_bytes"] == 2 * 3 * rows * record + 3 * 8 * rows
    assert found["sparse_adam_bytes"] == 2 * rows * 128 * 4
    assert found["written_per_day_bytes"] == int(8192 * record * 20 * 86400 * WRITE_AMPLIFICATION)
    assert found["vram_bytes"] == 2 * 8192 * record * 5 // 4
    text = run("plan", "--rows", "10M", "--dim", "128").stdout
    for words in (
        "10,000,000 rows of 128 x float32",
        "21.02 TB",
        f"x {WRITE_AMPLIFICATION} for cleaning",
        "SparseAdam",
    ):
        assert words in text


def test_plan_knows_what_a_row_costs_in_a_large_table_and_what_the_gpu_stages_at_most() -> None:
    found = run_json("plan", "--rows", "200M", "--dim", "16", "--cache", "2GiB", "--batch", "3M")
    assert found["index_bytes"] == 12 * 200_000_000
    assert found["ram_bytes"] == 2 * 2**30 + 20 * 200_000_000 + 64 * 2**20
    assert found["vram_bytes"] == 2 * 256 * 2**20 * 5 // 4


def test_plan_knows_that_halves_have_moments_in_fp32_and_small_tables_fit_the_cache() -> None:
    found = run_json("plan", "--rows", "1k", "--dim", "16", "--dtype", "bfloat16", "--batch", "8192")
    assert found["record_bytes"] == 2 * 16 * 4
    assert found["sparse_adam_bytes"] == 2 * 1000 * 16 * 2
    assert found["batch_rows"] == 1000
    assert found["cache_bytes"] < 2**20


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--rows", "many", "--dim", "8"), "--rows"),
        (("--rows", "1.5", "--dim", "8"), "--rows"),
        (("--rows", "10", "--dim", "0"), "--dim"),
        (("--rows", "10", "--dim", "8", "--dtype", "int8"), "--dtype"),
        (("--rows", "10", "--dim", "8", "--cache", "much"), "cache"),
        (("--rows", "10", "--dim", "8", "--keep-generations", "0"), "--keep-generations"),
        (("--rows", "10", "--dim", "8", "--steps-per-second", "-1"), "--steps-per-second"),
    ],
)
def test_plan_refuses_what_cannot_be_meant(arguments: tuple[str, ...], word: str) -> None:
    assert word in refused("plan", *arguments)


# What all can do.


@pytest.mark.parametrize("command", ["inspect", "verify", "export", "copy"])
def test_a_directory_in_use(made: Made, tmp_path: Path, command: str) -> None:
    """Beside steps that nobody has committed."""
    more = {"export": [tmp_path / "x.pt"], "copy": [tmp_path / "new"]}.get(command, [])
    params = {name: nn.Parameter(values.clone()) for name, values in made.weights[2].items()}
    with optimizer(made.path, params, existing="resume") as opt:
        gradients(params, 30)
        opt.step()
        assert opt.checkpoint() == 3
        gradients(params, 31)
        opt.step()
        found = run_json(command, made.path, *more)
        newest = {
            "inspect": lambda: found["generations"][-1]["number"],
            "verify": lambda: found["generations"][-1],
        }.get(command, lambda: found["generation"])()
        assert newest == 3
        if command == "inspect":
            assert found["holder"]["pid"] == os.getpid()
            assert found["healthy"]
        if command == "verify":
            assert found["clean"]
        gradients(params, 32)
        opt.step()
        assert opt.checkpoint() == 4
    assert run_json("verify", made.path)["clean"]


@pytest.mark.parametrize("command", ["verify", "export", "copy"])
def test_progress_is_drawn_on_a_terminal_and_nowhere_else(made: Made, tmp_path: Path, command: str) -> None:
    pty = pytest.importorskip("pty")
    more = {"export": [str(tmp_path / "x.pt")], "copy": [str(tmp_path / "new")]}.get(command, [])
    screen, end = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "dsa.cli", command, str(made.path), *more, "--json"],
        stdout=subprocess.PIPE,
        stderr=end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "300"},
        timeout=100,
        check=True,
    )
    os.close(end)
    drawn = ""
    with contextlib.suppress(OSError):  # so a terminal ends that nobody writes to any more
        while part := os.read(screen, 1 << 16):
            drawn += part.decode(errors="replace")
    os.close(screen)
    assert {"verify": "verifying", "export": "exporting", "copy": "copying"}[command] in drawn
    assert "100%" in drawn
    json.loads(done.stdout)


# What all refuse.


@pytest.mark.parametrize("command", ["inspect", "verify", "export", "copy"])
def test_no_state_directory(command: str, tmp_path: Path) -> None:
    more = {"export": [tmp_path / "x.pt"], "copy": [tmp_path / "new"]}.get(command, [])
    assert "there is no directory" in refused(command, tmp_path / "missing", *more)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("x")
    assert "not a state directory" in refused(command, tmp_path / "mine", *more)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "letter.txt"]
    assert "is a file" in refused(command, tmp_path / "mine" / "letter.txt", *more)


@pytest.mark.parametrize("command", ["inspect", "verify", "export", "copy", "plan"])
def test_wrong_arguments_are_a_usage_error(command: str) -> None:
    result = run(command, "--no-such-option")
    assert result.exit_code == 2
    assert "no-such-option" in result.output.lower()
