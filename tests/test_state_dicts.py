"""Checkpoints, state dicts and what becomes of state that a directory already holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import Twins, check_moments, contents, disk_optimizer, parameters, random_gradient, same_bits, unchanged
from torch import nn

from dsa import DiskSparseAdam, IOConfig
from dsa.errors import ConfigError, MismatchError, StateExistsError, UsageError

SHAPES = {"node": (50, 3), "relation": (50, 2, 2)}
pytestmark = pytest.mark.usefixtures("one_thread")


class Run:
    """A short training on both sides."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.twins = Twins(parameters(SHAPES), path, {"lr": 0.1}, **options)
        self._generator = torch.Generator().manual_seed(2)

    @property
    def opt(self) -> DiskSparseAdam:
        return self.twins.opt

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            rows = torch.randint(0, 50, (9,), generator=self._generator)
            self.twins.step(
                {name: random_gradient(param, rows, self._generator) for name, param in self.twins.disk.items()}
            )

    def reopen(self, **options: Any) -> DiskSparseAdam:
        self.twins.opt = disk_optimizer(list(self.twins.disk.items()), self.path, lr=0.1, **options)
        return self.opt

    def generation(self) -> Any:
        return self.opt.state[self.twins.disk["node"]]["generation"]


@pytest.fixture
def run(tmp_path: Path) -> Any:
    found = Run(tmp_path / "s")
    yield found
    found.opt.close()


def test_a_state_dict_has_everything_in_state_and_groups_and_is_small(run: Run) -> None:
    run.train()
    state_dict = run.opt.state_dict()
    assert set(state_dict) == {"state", "param_groups"}
    for number, name in enumerate(SHAPES):
        entry = state_dict["state"][number]
        assert {"step": 2, "generation": 1, "table": name}.items() <= entry.items()
        assert all(isinstance(value, (int, str)) for value in entry.values())
        assert str(run.path) not in map(str, entry.values())


def test_a_checkpoint_without_a_step_is_the_last_one_and_does_no_io(run: Run) -> None:
    with unchanged(run.path):
        assert run.opt.state_dict()["state"][0]["generation"] == 0
    assert run.opt.checkpoint() == 0  # from now on it counts, which is written down
    with unchanged(run.path):
        assert run.opt.checkpoint() == 0
        assert run.opt.state_dict()["state"][0]["generation"] == 0
    run.train()
    generation = run.opt.checkpoint()
    assert generation == 1
    before = run.opt.statistics()
    with unchanged(run.path):
        assert run.opt.checkpoint() == generation
        state_dict = run.opt.state_dict()
        assert state_dict["state"][0]["generation"] == generation
        run.opt.load_state_dict(state_dict)  # the one it is at
        run.twins.step({})  # no gradient anywhere: nothing has changed
        assert run.opt.checkpoint() == generation
    after = run.opt.statistics()
    assert (after.read_requests, after.write_requests) == (before.read_requests, before.write_requests)
    run.twins.check()


def test_going_back_brings_moments_steps_and_hyperparameters_and_keeps_numbers(run: Run) -> None:
    run.train()
    first, weights = run.opt.state_dict(), {n: p.detach().clone() for n, p in run.twins.disk.items()}
    moments = run.opt.moments("node", range(50))
    run.opt.param_groups[0]["lr"] = 0.025
    run.train(3)
    second = run.opt.checkpoint()
    run.train(1)
    run.opt.load_state_dict(first)
    assert run.opt.param_groups[0]["lr"] == 0.1
    assert run.opt.state[run.twins.disk["node"]]["step"] == 2
    assert all(same_bits(run.opt.moments("node", range(50))[key], moments[key]) for key in moments)
    assert run.opt.generations() == (1, 2)  # the abandoned one stays until the next checkpoint
    for name, param in run.twins.disk.items():
        param.data.copy_(weights[name])
    generator = torch.Generator().manual_seed(4)
    run.twins.disk["node"].grad = random_gradient(run.twins.disk["node"], torch.tensor([3]), generator)
    run.opt.step()
    third = run.opt.checkpoint()
    assert third > second
    assert run.opt.generations() == (1, third)
    with pytest.raises(MismatchError, match=rf"generation {second} is not there, present are 1, {third}"):
        run.opt.load_state_dict({**first, "state": {k: {**e, "generation": second} for k, e in first["state"].items()}})


@pytest.mark.parametrize(("keep", "present"), [(1, (5,)), (2, (4, 5)), (3, (3, 4, 5)), (None, (1, 2, 3, 4, 5))])
def test_how_many_generations_stay(tmp_path: Path, keep: int | None, present: tuple[int, ...]) -> None:
    run = Run(tmp_path, keep_generations=keep)
    state_dicts = []
    for _ in range(5):
        run.train(1)
        state_dicts.append(run.opt.state_dict())
    assert run.opt.generations() == present
    if 1 not in present:
        with pytest.raises(MismatchError, match="keep_generations"):
            run.opt.load_state_dict(state_dicts[0])
    run.train(1)
    run.opt.close()  # commits one that does not count
    run.reopen(existing="resume", keep_generations=keep)
    assert run.opt.generations() == (*present, 6)
    run.twins.check()
    run.opt.close()


def test_release_gives_up_a_generation_but_not_the_present_one(run: Run) -> None:
    run.train(1)
    run.opt.checkpoint()
    run.train(1)
    run.opt.checkpoint()
    with pytest.raises(UsageError, match="generation 2 cannot be released"):
        run.opt.release(2)
    with pytest.raises(MismatchError, match="generation 9 is not there"):
        run.opt.release(9)
    run.opt.release(1)
    assert run.opt.generations() == (2,)
    run.train(1)
    run.twins.check()


def _train_and_fail(run: Run) -> None:
    run.train()
    raise KeyError


def test_closing_commits_and_an_exception_does_not(run: Run) -> None:
    run.train()
    with run.opt:
        pass
    assert run.opt.state_dict()["state"][0]["generation"] == 1
    run.reopen(existing="resume")
    run.twins.check()
    before = contents(run.path / "index"), (run.path / "manifest.json").read_bytes()
    with pytest.raises(KeyError), run.opt:
        _train_and_fail(run)
    assert before == (contents(run.path / "index"), (run.path / "manifest.json").read_bytes())
    assert run.reopen(existing="resume").state[run.twins.disk["node"]]["step"] == 2


# existing=...

UNDECIDED: dict[str, Callable[[Run], Any]] = {
    "step": lambda run: run.opt.step(),
    "checkpoint": lambda run: run.opt.checkpoint(),
    "moments": lambda run: run.opt.moments("node", [1]),
    "export_state_dict": lambda run: run.opt.export_state_dict(),
}


def test_nothing_is_done_before_it_is_said_what_becomes_of_the_state(run: Run) -> None:
    run.train()
    state_dict = run.opt.state_dict()
    run.opt.close()
    with unchanged(run.path):
        opt = run.reopen()
        for call in UNDECIDED.values():
            with pytest.raises(StateExistsError, match=r'load_state_dict.*existing="resume".*existing="discard"'):
                call(run)
        undecided = opt.state_dict()
        assert {entry["generation"] for entry in undecided["state"].values()} == {None}
        opt.load_state_dict(undecided)  # as Accelerate does; changes nothing
        assert run.generation() is None
        opt.announce({"node": [1, 2]})
        for _ in opt.lookahead([[1], [2]], rows=lambda rows: {"node": rows}, depth=1):
            pass
        assert opt.statistics().window_batches == 0
        assert opt.generations() == (1,)
        opt.close()
    run.reopen().load_state_dict(state_dict)
    assert run.generation() == 1
    run.twins.check()
    run.train()
    run.twins.check()


def test_resume_takes_moments_from_disk_and_hyperparameters_from_the_constructor(run: Run) -> None:
    run.train()
    run.opt.close()
    run.twins.opt = disk_optimizer(list(run.twins.disk.items()), run.path, lr=0.5, existing="resume")
    for group in run.twins.oracle.param_groups:
        group["lr"] = 0.5
    run.train()
    run.twins.check()


def test_discard_starts_anew_and_leaves_other_files_alone(run: Run) -> None:
    run.train()
    run.opt.close()
    (run.path / "notes.txt").write_text("a user's own")
    run.reopen(existing="discard")
    assert run.opt.generations() == (0,)
    assert not run.opt.moments("node", range(50))["exp_avg"].any()
    assert (run.path / "notes.txt").read_text() == "a user's own"


def test_an_empty_directory_needs_no_word(tmp_path: Path) -> None:
    for existing in ("load", "resume", "discard"):
        (tmp_path / existing).mkdir()
        run = Run(tmp_path / existing, existing=existing)
        assert run.opt.generations() == (0,)
        run.train()
        run.twins.check()
        run.opt.close()


def test_tables_are_found_by_name_in_any_order(run: Run) -> None:
    run.train()
    run.opt.close()
    run.twins.opt = disk_optimizer(list(run.twins.disk.items())[::-1], run.path, existing="resume")
    run.twins.check()


# State dicts that do not belong.


def test_state_dicts_of_other_directories_and_groups(run: Run, tmp_path: Path) -> None:
    run.train()
    mine = run.opt.state_dict()
    other = Run(tmp_path / "other")
    foreign = other.opt.state_dict()
    other.opt.close()
    renamed = {**mine, "state": {k: {**e, "table": "x"} for k, e in mine["state"].items()}}
    mixed = {**mine, "state": {0: mine["state"][0], 1: {**mine["state"][1], "generation": 0}}}
    less = {**mine, "state": {0: mine["state"][0]}}
    refused: list[tuple[Any, type[Exception], str]] = [
        (foreign, MismatchError, "moments live in state_dir; copy it or export"),
        (renamed, MismatchError, "'x'.*'node'"),
        (mixed, MismatchError, "several generations"),
        (less, MismatchError, r"\['relation'\]"),
        ({}, ConfigError, "'state' and 'param_groups'"),
        ({**mine, "param_groups": mine["param_groups"] * 2}, ValueError, r"\[2, 2\].*\[2\]"),
    ]
    for state_dict, error, message in refused:
        with unchanged(run.path), pytest.raises(error, match=message):
            run.opt.load_state_dict(state_dict)
        run.twins.check()
    run.train()
    run.twins.check()


# torch.optim.SparseAdam's state dicts.


def test_taking_over_from_sparse_adam_and_going_back_to_it(run: Run, tmp_path: Path) -> None:
    run.train(4)
    adam_dict = run.twins.oracle.state_dict()
    fresh = disk_optimizer(list(run.twins.disk.items()), tmp_path / "fresh", lr=0.7, cache=1500)
    fresh.load_state_dict(adam_dict)
    assert fresh.param_groups[0]["lr"] == 0.1
    for name, param in run.twins.disk.items():
        check_moments(fresh, name, param, run.twins.oracle.state[run.twins.ram[name]])
    generation = fresh.checkpoint()
    assert generation == 1
    exported = fresh.export_state_dict()
    fresh.export_state_dict(tmp_path / "exported.pt")
    fresh.close()
    for found in (exported, torch.load(tmp_path / "exported.pt", weights_only=True)):
        assert found is not None
        adam = torch.optim.SparseAdam(list(run.twins.ram.values()))
        adam.load_state_dict(found)
        for param in run.twins.ram.values():
            right, got = run.twins.oracle.state[param], adam.state[param]
            assert got["step"] == right["step"]
            assert same_bits(got["exp_avg"], right["exp_avg"])
            assert same_bits(got["exp_avg_sq"], right["exp_avg_sq"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_export_before_any_step_has_no_state_as_sparse_adams(run: Run) -> None:
    exported = run.opt.export_state_dict()
    assert exported is not None
    assert exported["state"] == run.twins.oracle.state_dict()["state"] == {}
    run.opt.load_state_dict(exported)
    run.train()
    run.twins.check()


def test_sparse_adam_state_that_does_not_fit(run: Run) -> None:
    run.train()
    state_dict = run.twins.oracle.state_dict()
    for change, message in (
        ({"exp_avg": torch.zeros(3, 3)}, r"exp_avg of 'node' has shape \(3, 3\).*\(50, 3\)"),
        ({"momentum": 1}, None),
    ):
        entry = {**state_dict["state"][0], **change}
        if message is None:
            del entry["exp_avg_sq"]
            message = r"'node' lacks \['exp_avg_sq'\]"
        with pytest.raises(MismatchError, match=message):
            run.opt.load_state_dict({**state_dict, "state": {0: entry}})
        run.twins.check()


def _with_rows(state_dict: dict[str, Any], rows: dict[str, int]) -> dict[str, Any]:
    """The state dict of the first parameter alone, whose moments have other numbers of rows (all of them zero)."""
    entry = state_dict["state"][0]
    moments = {name: torch.zeros(count, *entry[name].shape[1:]) for name, count in rows.items()}
    return {**state_dict, "state": {0: {**entry, **moments}}}


def test_sparse_adam_state_of_a_table_that_has_grown_is_taken_on_request(run: Run, tmp_path: Path) -> None:
    run.train(4)
    adam_dict = run.twins.oracle.state_dict()
    larger = {name: (73, *shape[1:]) for name, shape in SHAPES.items()}
    grown = parameters(larger)
    grow = IOConfig(grow_tables=True)
    refusing = disk_optimizer(list(grown.items()), tmp_path / "refusing")
    with pytest.raises(MismatchError, match=r"exp_avg of 'node' has shape \(50, 3\).*\(73, 3\).*grow_tables=True"):
        refusing.load_state_dict(adam_dict)
    refusing.close()
    twins = Twins(grown, tmp_path / "grown", {"lr": 0.1}, cache=3000, io=grow)
    twins.opt.load_state_dict(adam_dict)
    padded = {
        number: {
            "step": entry["step"],
            **{k: torch.cat([entry[k], torch.zeros(23, *entry[k].shape[1:])]) for k in ("exp_avg", "exp_avg_sq")},
        }
        for number, entry in adam_dict["state"].items()
    }
    twins.oracle.load_state_dict({**adam_dict, "state": padded})
    twins.check()
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):  # old rows and new ones
        rows = torch.randint(30, 73, (20,), generator=generator)
        twins.step({name: random_gradient(param, rows, generator) for name, param in twins.disk.items()})
    twins.check()
    twins.opt.close()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"exp_avg": 51, "exp_avg_sq": 51}, r"exp_avg of 'node' has shape \(51, 3\), the parameter \(50, 3\)$"),
        ({"exp_avg": 50, "exp_avg_sq": 51}, r"exp_avg_sq of 'node' has shape \(51, 3\), the parameter \(50, 3\)$"),
        ({"exp_avg": 50, "exp_avg_sq": 40}, r"moments of 'node' have different shapes.*\(50, 3\).*\(40, 3\)"),
    ],
)
def test_sparse_adam_state_that_does_not_fit_a_table_that_may_grow(
    run: Run, rows: dict[str, int], message: str
) -> None:
    run.train()
    adam_dict = run.twins.oracle.state_dict()
    run.opt.close()
    run.reopen(existing="resume", io=IOConfig(grow_tables=True))
    with pytest.raises(MismatchError, match=message):
        run.opt.load_state_dict(_with_rows(adam_dict, rows))
    run.twins.check()
    run.opt.load_state_dict(_with_rows(adam_dict, {"exp_avg": 0, "exp_avg_sq": 0}))  # a table that was empty
    assert not run.opt.moments("node", range(50))["exp_avg"].any()


# Weights and moments of different checkpoints.


@pytest.mark.parametrize("way", ["load", "resume", "back"])
def test_weights_of_another_checkpoint_warn_once(run: Run, way: str) -> None:
    run.train()
    state_dict, relations = run.opt.state_dict(), run.twins.disk["relation"].detach().clone()
    if way == "back":
        run.train()
        run.twins.disk["relation"].data.copy_(relations)
        run.opt.load_state_dict(state_dict)  # and the weights stay those of two steps later
    else:
        run.opt.close()
        run.twins.disk["node"].data[0] += 1
        run.reopen(existing=way)
        if way == "load":
            run.opt.load_state_dict(state_dict)
    grad = random_gradient(run.twins.disk["node"], torch.tensor([1]), torch.Generator())
    run.twins.disk["node"].grad = grad
    with pytest.warns(UserWarning, match=r"'node'.*generation 1.*different checkpoints; load both"):
        run.opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.opt.step()


def test_the_right_weights_do_not_warn(run: Run) -> None:
    run.train()
    state_dict, weights = run.opt.state_dict(), {n: p.detach().clone() for n, p in run.twins.disk.items()}
    run.train()
    run.opt.load_state_dict(state_dict)
    for name, param in run.twins.disk.items():
        param.data.copy_(weights[name])
    run.twins.disk["node"].grad = random_gradient(run.twins.disk["node"], torch.tensor([1]), torch.Generator())
    run.opt.step()
    fresh = [(name, nn.Parameter(param.detach().clone())) for name, param in run.twins.disk.items()]
    run.opt.close()
    with DiskSparseAdam(fresh, state_dir=run.path, existing="resume") as opt:
        fresh[0][1].grad = random_gradient(fresh[0][1], torch.tensor([1]), torch.Generator())
        opt.step()
