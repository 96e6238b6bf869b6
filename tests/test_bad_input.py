"""What cannot be meant is refused by name, with the remedy, and leaves the disk as it was."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import random_gradient, sparse, unchanged
from torch import Tensor, nn

from dsa import DiskSparseAdam, IOConfig
from dsa.errors import (
    ClosedError,
    ConfigError,
    DsaError,
    FormatError,
    MismatchError,
    StateExistsError,
    StateLockedError,
    UsageError,
)

ROWS, WIDTH = 20, 4


def table(seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)))


def gradient(rows: list[int]) -> Tensor:
    return random_gradient(torch.zeros(ROWS, WIDTH), torch.tensor(rows), torch.Generator().manual_seed(1))


@pytest.fixture
def param() -> nn.Parameter:
    return table()


def make(param: Any, state_dir: Path, **options: Any) -> DiskSparseAdam:
    return DiskSparseAdam([("emb.weight", param)], state_dir=state_dir, **options)


NAN = float("nan")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "negative lr": ({"lr": -0.1}, r"lr must be above 0, got -0\.1"),
    "zero lr": ({"lr": 0.0}, r"lr must be above 0"),
    "lr NaN": ({"lr": NAN}, r"lr must be above 0, got nan"),
    "lr of text": ({"lr": "fast"}, r"lr.*numbers.*'fast'"),
    "lr tensor of two": ({"lr": torch.tensor([0.1, 0.2])}, r"lr.*1 element.*\(2,\)"),
    "lr tensor NaN": ({"lr": torch.tensor(NAN)}, r"lr must be above 0"),
    "eps 0": ({"eps": 0.0}, r"eps must be above 0"),
    "eps NaN": ({"eps": NAN}, r"eps must be above 0"),
    "beta of 1": ({"betas": (0.9, 1.0)}, r"betas.*\[0, 1\).*1\.0"),
    "beta negative": ({"betas": (-0.1, 0.9)}, r"betas.*-0\.1"),
    "beta NaN": ({"betas": (0.9, NAN)}, r"betas.*nan"),
    "one beta": ({"betas": (0.9,)}, r"betas"),
    "betas no pair": ({"betas": 0.9}, r"betas"),
    "weight decay": ({"weight_decay": 0.01}, r"weight_decay=0\.01.*penalty"),
    "cache 0": ({"cache": 0}, r"cache must be more than 0"),
    "cache negative": ({"cache": -5}, r"cache must be more than 0 bytes, got -5"),
    "cache of lots": ({"cache": "lots"}, r"cache.*2GiB.*'lots'"),
    "cache of a float": ({"cache": 1.5}, r"cache.*1\.5"),
    "cache None": ({"cache": None}, r"cache.*None"),
    "cache true": ({"cache": True}, r"cache.*True"),
    "backend": ({"backend": "carrier pigeon"}, r"'carrier pigeon'.*threads"),
    "kernel": ({"kernel": "quick"}, r"kernel.*'exact'.*'quick'"),
    "existing": ({"existing": "overwrite"}, r'existing.*"resume".*\'overwrite\''),
    "staging": ({"staging": "maybe"}, r"staging.*'maybe'"),
    "keep 0": ({"keep_generations": 0}, r"keep_generations.*at least 1.*0"),
    "keep of a float": ({"keep_generations": 1.5}, r"keep_generations.*1\.5"),
    "io": ({"io": {"queue_depth": 8}}, r"io must be an IOConfig, got dict"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("there", [False, True], ids=["new", "state"])
def test_arguments_that_cannot_be_meant(tmp_path: Path, param: nn.Parameter, what: str, there: bool) -> None:
    options, message = REFUSED[what]
    if there:
        make(param, tmp_path / "s").close()
        options = {"existing": "discard", **options}  # which must not discard anything then
    with unchanged(tmp_path), pytest.raises(ConfigError, match=message) as caught:
        make(param, tmp_path / "s", **options)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, DsaError)
    make(param, tmp_path / "s", existing="resume").close()  # and the directory is free


def test_values_of_ioconfig_that_cannot_be_meant() -> None:
    for name, value in {"queue_depth": 0, "segment_bytes": 12345, "dirty_share": 1.5, "known_batches": "many"}.items():
        with pytest.raises(ConfigError, match=rf"IOConfig\.{name}.*{re.escape(repr(value))}"):
            IOConfig(**{name: value})  # type: ignore[arg-type]


UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.zeros(3, 3).to_sparse(), r"'emb\.weight' is sparse.*dense"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), r"'emb\.weight' is sparse"),
    "complex": (lambda: nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64)), r"'emb\.weight' is complex.*split"),
    "integer": (lambda: torch.zeros(3, 3, dtype=torch.int64), r"'emb\.weight' is of dtype torch\.int64"),
    "scalar": (lambda: nn.Parameter(torch.tensor(1.0)), r"'emb\.weight' has no dimensions"),
    "meta": (lambda: nn.Parameter(torch.zeros(3, 3, device="meta")), r"'emb\.weight' is on the meta device"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("what", UNFIT)
def test_parameters_that_have_no_rows_or_no_adam(tmp_path: Path, what: str) -> None:
    build, message = UNFIT[what]
    with unchanged(tmp_path), pytest.raises(ConfigError, match=message):
        make(build(), tmp_path / "s")


def test_other_things_that_torch_refuses(tmp_path: Path, param: nn.Parameter) -> None:
    with unchanged(tmp_path):
        with pytest.raises(ValueError, match="empty parameter list"):
            DiskSparseAdam([], state_dir=tmp_path / "s")
        with pytest.raises(TypeError, match="amsgrad"):
            make(param, tmp_path / "s", amsgrad=True)
        with pytest.raises(TypeError, match="state_dir"):
            DiskSparseAdam([param])  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="non-leaf"):
            make(param * 2, tmp_path / "s")


@pytest.mark.parametrize("given", ["", None, 7, b"bytes", "nul\0byte"])
def test_a_state_dir_that_is_no_path(param: nn.Parameter, given: Any) -> None:
    with pytest.raises(ConfigError, match="state_dir"):
        make(param, given)


def test_files_in_the_way(tmp_path: Path, param: nn.Parameter) -> None:
    (tmp_path / "file").write_text("a user's own")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("a user's own")
    with unchanged(tmp_path):
        for path in ("file", "file/below"):
            with pytest.raises(ConfigError, match=r"file.*name a directory"):
                make(param, tmp_path / path)
        for existing in ("load", "resume", "discard"):
            with pytest.raises(FormatError, match=r"thesis\.txt.*empty or a new directory"):
                make(param, tmp_path / "data", existing=existing)
        assert not (tmp_path / "data" / "LOCK").exists()


# Gradients.

BAD_GRADIENTS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "dense": (lambda: torch.ones(ROWS, WIDTH), r"emb\.weight is dense.*sparse=True"),
    "two sparse dimensions": (
        lambda: torch.sparse_coo_tensor([[1], [2]], torch.ones(1), (ROWS, WIDTH)),
        r"emb\.weight has 2 sparse dimensions",
    ),
    "row too large": (lambda: sparse([3, ROWS], torch.ones(2, WIDTH), (ROWS, WIDTH)), r"emb\.weight has rows 3 to 20"),
    "row negative": (lambda: sparse([-1, 3], torch.ones(2, WIDTH), (ROWS, WIDTH)), r"emb\.weight has rows -1 to 3"),
}


@pytest.mark.parametrize("what", BAD_GRADIENTS)
def test_gradients_that_sparse_adam_refuses(tmp_path: Path, param: nn.Parameter, what: str) -> None:
    build, message = BAD_GRADIENTS[what]
    fine = table(5)
    opt = DiskSparseAdam([("fine", fine), ("emb.weight", param)], state_dir=tmp_path / "s")
    param.grad, fine.grad = gradient([1, 2]), gradient([3])
    opt.step()
    generation = opt.checkpoint()
    weights = [fine.detach().clone(), param.detach().clone()]
    param.grad = build()
    with unchanged(tmp_path), pytest.raises(UsageError, match=message):
        opt.step()
    assert torch.equal(fine, weights[0])
    assert torch.equal(param, weights[1])
    assert opt.state[fine]["step"] == opt.state[param]["step"] == 1
    assert opt.checkpoint() == generation  # nothing has changed
    param.grad = gradient([1])
    opt.step()
    opt.close()


# Announcements.

BAD_ROWS: dict[str, tuple[Any, str]] = {
    "too large": ({"emb.weight": [1, ROWS]}, r"row 20 of 'emb\.weight' is out of range.*20 rows"),
    "negative": ({"emb.weight": [-1]}, r"row -1 of 'emb\.weight' is out of range"),
    "fractions": ({"emb.weight": [0.5]}, r"rows of 'emb\.weight' must be integers"),
    "mask": ({"emb.weight": torch.ones(ROWS, dtype=torch.bool)}, r"rows of 'emb\.weight' must be integers"),
    "unknown name": ({"embedding": [1]}, r"'embedding'.*emb\.weight"),
    "no mapping": ([1, 2], r"dict"),
    "odd key": ({3: [1]}, r"key.*int"),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_announcements_that_cannot_be_meant(tmp_path: Path, param: nn.Parameter, what: str) -> None:
    rows, message = BAD_ROWS[what]
    with make(param, tmp_path / "s") as opt:
        with unchanged(tmp_path), pytest.raises(ConfigError, match=message):
            opt.announce(rows)
        with pytest.raises(ConfigError, match=message):
            list(opt.lookahead([0], rows=lambda _: rows, depth=2))
        if isinstance(rows, dict) and what not in ("odd key", "unknown name"):
            with pytest.raises(ConfigError, match=message):
                opt.moments("emb.weight", rows["emb.weight"])
        assert opt.statistics().window_batches == 0
        param.grad = gradient([1])
        opt.step()


def test_announcements_of_what_is_not_managed(tmp_path: Path, param: nn.Parameter) -> None:
    with make(param, tmp_path / "s") as opt:
        for key in (table(3), nn.Embedding(3, 3), nn.Linear(2, 2)):
            with pytest.raises(UsageError, match=r"emb\.weight"):
                opt.announce({key: [1]})
        with pytest.raises(UsageError, match=r"watch: Linear.*announce"):
            opt.watch(nn.Linear(2, 2))
        for rows, depth in ((None, 1), ("emb", 1), (lambda _: {}, -1), (lambda _: {}, 1.5)):
            with pytest.raises(ConfigError, match="lookahead"):
                opt.lookahead([1], rows=rows, depth=depth)  # type: ignore[arg-type]


# Owners.


def test_a_second_optimizer_in_this_process(tmp_path: Path, param: nn.Parameter) -> None:
    with make(param, tmp_path / "s") as opt:
        for existing in ("load", "resume", "discard"):
            with unchanged(tmp_path), pytest.raises(StateLockedError, match=r"close\(\) the earlier one") as caught:
                make(table(1), tmp_path / "s", existing=existing)
            assert str(tmp_path / "s") in str(caught.value)
        link = tmp_path / "link"
        link.symlink_to(tmp_path / "s", target_is_directory=True)
        with pytest.raises(StateLockedError, match=r"close\(\) the earlier one"):
            make(table(1), link)
        param.grad = gradient([1])
        opt.step()
    make(param, tmp_path / "s", existing="resume").close()


OWNER = """
import sys, torch
from dsa import DiskSparseAdam
opt = DiskSparseAdam([("emb.weight", torch.nn.Parameter(torch.zeros(20, 4)))], state_dir=sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_second_optimizer_while_another_process_has_the_directory(tmp_path: Path, param: nn.Parameter) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "s")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        assert owner.stdout.readline() == "ready\n"
        with unchanged(tmp_path), pytest.raises(StateLockedError, match=rf"process {owner.pid}\b.*close\(\) it there"):
            make(param, tmp_path / "s", existing="resume")
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.wait() == 0
    make(param, tmp_path / "s", existing="resume").close()


# A directory with state in it.


def test_a_directory_with_state_and_no_word_of_what_becomes_of_it(tmp_path: Path, param: nn.Parameter) -> None:
    with make(param, tmp_path / "s") as first:
        param.grad = gradient([1, 2])
        first.step()
    with unchanged(tmp_path):
        opt = make(param, tmp_path / "s")
        with pytest.raises(StateExistsError, match=r'generation 1.*existing="resume".*existing="discard"'):
            opt.step()
        opt.close()
    make(param, tmp_path / "s", existing="resume").close()


def test_state_of_other_parameters(tmp_path: Path, param: nn.Parameter) -> None:
    other = nn.Parameter(torch.zeros(7, 2))
    with DiskSparseAdam([("emb.weight", param), ("other", other)], state_dir=tmp_path / "s") as first:
        state_dict = first.state_dict()
    unlike: list[tuple[Any, str]] = [
        ([("emb.weight", table()), ("x", other)], r"no table 'x'.*emb\.weight, other"),
        ([("emb.weight", nn.Parameter(torch.zeros(21, WIDTH))), ("other", other)], r"\(20, 4\).*\(21, 4\)"),
        ([("emb.weight", nn.Parameter(param.detach().double())), ("other", other)], r"float32.*float64"),
    ]
    for params, message in unlike:
        with unchanged(tmp_path):
            with pytest.raises(MismatchError, match=message):
                DiskSparseAdam(params, state_dir=tmp_path / "s", existing="resume")
            with DiskSparseAdam(params, state_dir=tmp_path / "s") as opt, pytest.raises(MismatchError, match=r"\S"):
                opt.load_state_dict(state_dict)
    # A parameter too few shows at the first step: groups may come one after the other.
    with unchanged(tmp_path), make(param, tmp_path / "s", existing="resume") as opt:
        param.grad = gradient([1])
        with pytest.raises(MismatchError, match=r"\['other'\].*\['emb\.weight'\]"):
            opt.step()


# The end.


def test_a_closed_optimizer(tmp_path: Path, param: nn.Parameter) -> None:
    opt = make(param, tmp_path / "s")
    param.grad = gradient([1, 2])
    opt.step()
    generation = opt.checkpoint()
    ahead = opt.lookahead([[1]], rows=lambda rows: {param: rows})
    opt.close()
    opt.close()
    calls: dict[str, Callable[[], Any]] = {
        "step": opt.step,
        "announce": lambda: opt.announce({param: [1]}),
        "lookahead": lambda: opt.lookahead([], rows=lambda _: {}),
        "iterating": lambda: list(ahead),
        "watch": lambda: opt.watch(nn.Embedding(3, 3)),
        "checkpoint": opt.checkpoint,
        "generations": opt.generations,
        "release": lambda: opt.release(generation),
        "load_state_dict": lambda: opt.load_state_dict(opt.state_dict()),
        "export_state_dict": opt.export_state_dict,
        "moments": lambda: opt.moments(param, [1]),
        "add_param_group": lambda: opt.add_param_group({"params": [("new", nn.Parameter(torch.zeros(2, 2)))]}),
        "with": opt.__enter__,
    }
    with unchanged(tmp_path):
        for call in calls.values():
            with pytest.raises(ClosedError, match=r"closed.*existing='resume'"):
                call()
        assert len(opt.param_groups) == 1
        assert opt.statistics().steps == 1
        assert opt.state_dict()["state"][0]["generation"] == generation
    opt.close()
