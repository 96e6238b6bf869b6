"""Hypothesis drives the optimizer through whatever a training script may do, against torch.optim.SparseAdam."""

from __future__ import annotations

import gc
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from parity_rig import check_moments, clones, parameters, random_gradient, restore, same_bits, snapshot
from torch import nn

from dsa import DiskSparseAdam
from dsa.errors import MismatchError, StateExistsError, UsageError

N_ROWS, WIDTH = 40, 3
NAMES = ("emb.weight", "other")
KEEP = 2
rows_of_a_batch = st.lists(st.integers(0, N_ROWS - 1), max_size=14)
batches = st.fixed_dictionaries({"emb.weight": rows_of_a_batch}, optional={"other": rows_of_a_batch})


class Training(RuleBasedStateMachine):
    """The oracle, what each generation must hold, and which generations have to be there."""

    state_dicts: Bundle[Any] = Bundle("state_dicts")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="dsa-machine-"))
        self.disk = parameters({"emb.weight": (N_ROWS, WIDTH), "other": (N_ROWS, 2, 2)})
        self.ram = clones(self.disk)
        self.oracle = torch.optim.SparseAdam(list(self.ram.values()), lr=0.1)
        self.random = torch.Generator().manual_seed(0)
        self.saved: dict[int, Any] = {}  # generation -> the oracle as it was
        self.handed_out: list[int] = []  # by checkpoint() or state_dict(), oldest first, on the present line of descent
        self.ever: set[int] = set()  # handed out at any time, and not released
        self.at: int | None = None  # the generation that nothing has changed since
        self.unsettled: set[int] = set()  # handed out again without a step, which is on disk from the next commit on
        self.opt: DiskSparseAdam

    @initialize(
        cache=st.sampled_from([300, 900, 2500, 100_000]),
        backend=st.sampled_from(["threads", "aiofiles"]),
        kernel=st.sampled_from(["reference", "exact"]),
    )
    def begin(self, cache: int, backend: str, kernel: str) -> None:
        self.options = {"cache": cache, "backend": backend, "kernel": kernel, "keep_generations": KEEP, "lr": 0.1}
        self.open()
        self.saved[self.generation()] = self.snapshot()
        self.at = self.generation()

    def open(self, **options: Any) -> None:
        self.opt = DiskSparseAdam(list(self.disk.items()), state_dir=self.folder, **{**self.options, **options})

    def generation(self) -> int:
        found = {self.opt.state[param]["generation"] for param in self.disk.values()}
        assert len(found) == 1
        return int(found.pop())

    def snapshot(self) -> Any:
        return snapshot(self.oracle, self.ram)

    def note(self, generation: int, counted: bool) -> None:
        """A generation was committed, or handed out again."""
        if self.at is not None:
            assert generation == self.at
            if counted and generation not in self.handed_out:
                self.unsettled.add(generation)
        else:
            assert generation not in self.saved, "numbers are never reused"
            self.saved[generation] = self.snapshot()
            self.at = generation
            self.unsettled.clear()
        if counted and generation not in self.handed_out:
            self.handed_out.append(generation)
            self.ever.add(generation)
        self.handed_out = self.handed_out[-KEEP:]  # the others may be gone

    # Training.

    @rule(rows=batches)
    def step(self, rows: dict[str, list[int]]) -> None:
        gradients = {
            name: random_gradient(self.disk[name], torch.tensor(some, dtype=torch.int64), self.random)
            for name, some in rows.items()
        }
        for side in (self.disk, self.ram):
            for name, param in side.items():
                param.grad = gradients[name].clone() if name in gradients else None
        self.opt.step()
        self.oracle.step()
        self.at = None

    @rule(rows=batches, of=batches)
    def announced_step(self, rows: dict[str, list[int]], of: dict[str, list[int]]) -> None:
        self.opt.announce({**of, **rows})
        self.step(rows)

    @rule(wrong=batches, times=st.integers(1, 3))
    def announce(self, wrong: dict[str, list[int]], times: int) -> None:
        for _ in range(times):
            self.opt.announce(wrong)

    @rule(
        ahead=st.lists(batches, max_size=6),
        depth=st.integers(0, 5),
        take=st.integers(0, 6),
        stepped=st.lists(st.booleans(), min_size=6, max_size=6),
    )
    def lookahead(self, ahead: list[Any], depth: int, take: int, stepped: list[bool]) -> None:
        for i, batch in enumerate(self.opt.lookahead(ahead, rows=lambda batch: batch, depth=depth)):
            if i == take:
                break
            if stepped[i]:
                self.step(batch)

    @rule(ids=st.lists(st.integers(0, N_ROWS - 1), min_size=1, max_size=10), train=st.booleans(), then=st.booleans())
    def watch(self, ids: list[int], train: bool, then: bool) -> None:
        model = nn.Embedding(N_ROWS, WIDTH, sparse=True)
        model.weight = self.disk["emb.weight"]
        model.train(train)
        with self.opt.watch(model):
            model(torch.tensor(ids))
            model(torch.tensor(ids[:3]))
            if then:
                self.step({"emb.weight": ids})

    # Generations.

    @rule()
    def checkpoint(self) -> None:
        self.note(self.opt.checkpoint(), counted=True)

    @rule(target=state_dicts)
    def state_dict(self) -> Any:
        state_dict = self.opt.state_dict()
        self.note(state_dict["state"][0]["generation"], counted=True)
        return state_dict

    @rule(state_dict=state_dicts)
    def load_state_dict(self, state_dict: Any) -> None:
        number = state_dict["state"][0]["generation"]
        if number not in self.opt.generations():
            assert number not in self.handed_out[-KEEP:]
            with pytest.raises(MismatchError, match="keep_generations"):
                self.opt.load_state_dict(state_dict)
            return
        self.opt.load_state_dict(state_dict)
        self.went_back(number)

    @rule(which=st.integers(0, 9))
    def go_back_to_any(self, which: int) -> None:
        present = self.opt.generations()
        number = present[which % len(present)]
        state_dict = self.opt.state_dict() if self.at is not None else None
        if state_dict is None:
            return
        self.note(state_dict["state"][0]["generation"], counted=True)
        for entry in state_dict["state"].values():
            entry["generation"] = number
        self.opt.load_state_dict(state_dict)
        self.went_back(number)

    def went_back(self, number: int) -> None:
        restore(self.saved[number], self.oracle, self.disk, self.ram)
        # One that was abandoned and is gone back to counts again.
        present = self.opt.generations()
        self.handed_out = sorted(handed for handed in self.ever if handed <= number and handed in present)
        self.at = number

    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        present = self.opt.generations()
        number = present[which % len(present)]
        if number == self.generation() or len(present) == 1:
            with pytest.raises(UsageError, match=str(number)):
                self.opt.release(number)
            return
        self.opt.release(number)
        assert number not in self.opt.generations()
        self.unsettled.clear()
        self.handed_out = [handed for handed in self.handed_out if handed != number]
        self.ever.discard(number)

    # Ends.

    @rule(end=st.sampled_from(["close", "with"]), cache=st.sampled_from([300, 900, 100_000]))
    def close_and_resume(self, end: str, cache: int) -> None:
        if end == "close":
            self.opt.close()
        else:
            with self.opt:
                pass
        self.options["cache"] = cache
        self.unsettled.clear()
        closed = self.opt.state_dict()["state"][0]["generation"]
        abandoned_later = max(self.saved, default=-1) > closed
        self.open(existing="load")
        if abandoned_later and max(self.opt.generations()) > closed:
            # It went back, and closed without a step: the later ones are still there, and the newest of all is theirs.
            self.opt.load_state_dict({**self.opt.state_dict(), "state": self.named(closed)})
        else:
            self.opt.close()
            self.open(existing="resume")
        self.note(self.generation(), counted=False)
        assert self.generation() == closed

    def named(self, generation: int) -> dict[int, Any]:
        return {
            number: {**self.opt.state[param], "generation": generation}
            for number, param in enumerate(self.disk.values())
        }

    @rule(how=st.sampled_from(["exception", "collected"]))
    def end_without_commit(self, how: str) -> None:
        self.opt.__exit__(KeyError, KeyError("the script's own"), None) if how == "exception" else None
        if how == "collected":
            del self.opt
            gc.collect()
            self.handed_out = [handed for handed in self.handed_out if handed not in self.unsettled]
            self.ever -= set(self.unsettled)
        self.unsettled.clear()
        self.open(existing="resume")
        newest = self.generation()
        assert newest == max(self.opt.generations())
        restore(self.saved[newest], self.oracle, self.disk, self.ram)
        # Later ones are loaded where it had gone back and not committed: they descend from what they descended from.
        present = self.opt.generations()
        self.handed_out = sorted(handed for handed in self.ever if handed <= newest and handed in present)
        self.at = newest

    @rule()
    def close_and_load(self) -> None:
        state_dict = self.state_dict_now()
        self.opt.close()
        self.unsettled.clear()
        self.open(existing="load")
        present = self.opt.generations()
        with pytest.raises(StateExistsError, match="resume"):
            self.opt.checkpoint()
        assert self.opt.state_dict()["state"][0]["generation"] is None
        assert self.opt.generations() == present
        self.opt.load_state_dict(state_dict)
        assert self.generation() == self.at

    def state_dict_now(self) -> Any:
        state_dict = self.opt.state_dict()
        self.note(state_dict["state"][0]["generation"], counted=True)
        return state_dict

    # What is true at every moment.

    @invariant()
    def weights_are_the_oracles(self) -> None:
        if hasattr(self, "opt"):
            for name in NAMES:
                assert same_bits(self.disk[name], self.ram[name]), name

    @invariant()
    def moments_are_the_oracles(self) -> None:
        if hasattr(self, "opt"):
            for name in NAMES:
                check_moments(self.opt, name, self.disk[name], self.oracle.state.get(self.ram[name]))

    @invariant()
    def what_was_handed_out_is_there(self) -> None:
        if hasattr(self, "opt"):
            present = self.opt.generations()
            assert set(self.handed_out[-KEEP:]) <= set(present), (self.handed_out, present)
            assert set(present) <= set(self.saved)
            assert list(present) == sorted(present)

    def teardown(self) -> None:
        if hasattr(self, "opt"):
            self.opt.close()
        shutil.rmtree(self.folder)


@pytest.mark.timeout(600)  # for what hypothesis needs to shrink a failure
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:a step touches more rows than the cache has frames")
@pytest.mark.filterwarnings("ignore:only .* of the rows that steps touched had been announced")
def test_whatever_a_script_does_the_numbers_are_sparse_adams() -> None:
    bounds = settings(max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Training, settings=bounds)  # type: ignore[no-untyped-call]
