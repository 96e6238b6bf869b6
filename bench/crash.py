"""Kill -9, many times: `python -m bench.crash --runs 300`.

Each run trains in a child process, kills it at a random moment, and has another child open what was left, load every
generation, and train on to the end. Each generation's moments and each saved file's weights must be, to the last bit,
what torch.optim.SparseAdam has at that step, and so must the end. The exit status is 0 only if no run failed; the last
line gives runs, survived, lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.crash_child import Plan, make_parameters, open_and_go_on, oracle_digests, run_in_fork, train_until_killed
from dsa.io import warm_up
from dsa.optim import gradients, kernels

# A moment -> the mark with which it begins, the one with which it ends, how long that may take at first (s).
MOMENTS = {
    "step": ("step", "stepped", 0.005),
    "cleaning": ("clean", "cleaned", 0.005),
    "checkpoint": ("checkpoint", "handed", 0.02),
    "save": ("handed", "saved", 0.005),
    "creation": ("construct", "constructed", 0.1),
    "discard": ("construct", "constructed", 0.1),
}
WEIGHTS = {"step": 3, "cleaning": 3, "checkpoint": 4, "save": 2, "creation": 2, "discard": 2}
DATA_SEEDS = 4
STEPS = 36
LIMIT_S = 60.0
"""A child that says nothing for so long hangs, and the run is lost."""


class Lost(Exception):
    """A run in which something was lost; the text says what."""


@dataclass
class Oracles:
    """What SparseAdam has after each step, by data seed."""

    digests: dict[int, list[tuple[str, str]]]

    def check(self, plan: Plan, where: str, step: int, weights: str | None, moments: str) -> None:
        right = self.digests[plan.data_seed][step]
        if moments != right[1]:
            raise Lost(f"{where}: the moments are not those of step {step}")
        if weights is not None and weights != right[0]:
            raise Lost(f"{where}: the weights are not those of step {step}")


def make_plan(seed: int, number: int) -> Plan:
    """The run of that number; the same for the same seed."""
    dice = random.Random(f"{seed}/{number}")
    moment = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    every = dice.randint(2, 7)
    most = {"step": STEPS, "cleaning": 12, "checkpoint": STEPS // every, "save": STEPS // every}.get(moment, 1)
    return Plan(
        number=number,
        data_seed=seed * DATA_SEEDS + dice.randrange(DATA_SEEDS),
        moment=moment,
        occurrence=dice.randint(1, most),
        share=dice.random(),
        steps=STEPS,
        every=every,
        keep=dice.randint(1, 4),
        backend=dice.choice(["auto", "auto", "threads", "aiofiles"]),
        uvloop=dice.random() < 0.7,
        cache_bytes=dice.choice([8_000, 20_000, 200_000]),
        segment_bytes=dice.choice([8192, 8192, 16384, 32768]),
        go_on_from=dice.choice([0, 0, 0, 1, 2]),
    )


class Child:
    """A child process and what it has marked so far."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self.marks: list[list[Any]] = []
        self._fd = fd
        self._rest = b""
        self._ended = False

    def next_marks(self) -> list[list[Any]]:
        """Wait for some; none when the child has died."""
        if not select.select([self._fd], [], [], LIMIT_S)[0]:
            self.kill()
            raise Lost(f"hangs: nothing for {LIMIT_S:g} s after {self.marks[-1:]}")
        data = os.read(self._fd, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        new = [json.loads(line) for line in lines]
        self.marks += new
        self._ended = not data
        return new

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def drain(self) -> int:
        """Read what is left until it has died; its exit status (minus the signal)."""
        while not self._ended:
            self.next_marks()
        return self.reap()

    def reap(self) -> int:
        if self._fd < 0:
            return 0
        os.close(self._fd)
        self._fd = -1
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def all(self, what: str) -> list[list[Any]]:
        """The values of all marks of a kind."""
        return [mark[2:] for mark in self.marks if mark[0] == what]

    def inside(self) -> str:
        """The moment in which it died, if it was in one."""
        last = self.marks[-1][0] if self.marks else ""
        begins = {begin: moment for moment, (begin, _, _) in MOMENTS.items() if moment != "discard"}
        cleaning = len(self.all("clean")) > len(self.all("cleaned"))
        return "cleaning" if cleaning else begins.get(last, "between")


class Durations:
    """How long each moment takes, as far as was seen."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {moment: [usual] for moment, (_, _, usual) in MOMENTS.items()}

    def learn(self, child: Child) -> None:
        for moment, (begin, end, _) in MOMENTS.items():
            began = None
            for what, at, *_ in child.marks:
                if what == begin:
                    began = at
                elif what == end and began is not None:
                    self._seen[moment] = [*self._seen[moment][-30:], at - began]
                    began = None

    def usual_s(self, moment: str) -> float:
        return statistics.median(self._seen[moment])


def _kill_at(child: Child, plan: Plan, durations: Durations) -> None:
    """Kill the child in its moment, or in its idleness where it never comes."""
    begin = MOMENTS[plan.moment][0]
    seen = 0
    while True:
        new = child.next_marks()
        if not new:
            status = child.reap()
            raise Lost(f"the training ended by itself (status {status}): {child.all('failed')}")
        names = [mark[0] for mark in new]
        seen += names.count(begin)
        if seen >= plan.occurrence or "idle" in names:
            break
    time.sleep(plan.share * 1.2 * durations.usual_s(plan.moment))
    child.kill()
    status = child.drain()
    if status != -signal.SIGKILL:
        raise Lost(f"the training ended by itself (status {status}): {child.all('failed')}")


def run(plan: Plan, oracles: Oracles, durations: Durations, directory: Path) -> str:
    """Carry out one run; in what the process was killed.

    Raises:
        Lost: with what was.
    """
    earlier: Child | None = None
    if plan.moment == "discard":
        # What is there to be discarded: a training that was itself killed, after its first checkpoint.
        earlier = Child(*run_in_fork(lambda mark: train_until_killed(plan, directory, "load", mark)))
        while not earlier.all("saved"):
            if not earlier.next_marks():
                raise Lost(f"the first training ended by itself: {earlier.all('failed')}")
        earlier.kill()
        earlier.drain()
    existing = "discard" if earlier else "load"
    child = Child(*run_in_fork(lambda mark: train_until_killed(plan, directory, existing, mark)))
    try:
        _kill_at(child, plan, durations)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.reap()
    durations.learn(child)
    after = Child(*run_in_fork(lambda mark: open_and_go_on(plan, directory, mark)))
    status = after.drain()
    if status != 0:
        raise Lost(f"opening it again failed with status {status}: {after.all('failed')} after {after.marks[-2:-1]}")
    _judge(plan, oracles, earlier, child, after)
    inside = child.inside()
    return "discard" if earlier and inside == "creation" else inside


def _judge(plan: Plan, oracles: Oracles, earlier: Child | None, child: Child, after: Child) -> None:
    (uuid, present) = after.all("opened")[0]
    constructed = child.all("constructed")
    writer: Child | None = None  # whose state it is
    if constructed:
        if uuid != constructed[0][0]:
            raise Lost(f"another directory was found, {uuid}, than was made, {constructed[0][0]}")
        writer = child
    elif earlier is not None and uuid == earlier.all("constructed")[0][0]:
        writer = earlier
    if writer is None:
        if present != [0]:
            raise Lost(f"a creation that was cut short left the generations {present}")
    else:
        _check_present(plan, writer, present)
    loaded = after.all("loaded")
    if [generation for generation, _, _ in loaded] != present:
        raise Lost(f"of {present} only these were loaded: {loaded}")
    for generation, steps, moments in loaded:
        if len(steps) != 1:
            raise Lost(f"generation {generation} mixes the steps {steps}")
        known = dict(writer.all("handed")) if writer else {}
        if generation in known and known[generation] != steps[0]:
            raise Lost(f"generation {generation} has step {steps[0]}, it was made at {known[generation]}")
        oracles.check(plan, f"generation {generation}", steps[0], None, moments)
    files = {generation: step for generation, step, *_ in after.all("file")}
    for generation, step in writer.all("saved") if writer else []:
        if generation in present and files.get(generation) != step:
            raise Lost(f"the file of generation {generation}, step {step}, did not load: {files}")
    for generation, step, weights, moments in after.all("file"):
        oracles.check(plan, f"the file of generation {generation}", step, weights, moments)
    ((begin, weights, moments),) = after.all("end")
    oracles.check(plan, f"the end, gone on to from step {begin}", plan.steps, weights, moments)
    ((step, moments),) = after.all("reopened")
    if step != plan.steps:
        raise Lost(f"close() left step {step}, the last was {plan.steps}")
    oracles.check(plan, "what close() left", step, None, moments)


def _check_present(plan: Plan, writer: Child, present: list[int]) -> None:
    handed = [generation for generation, _ in writer.all("handed")]
    # A commit under way may have given up the oldest already, in favour of the one that it makes.
    cut = len(writer.all("checkpoint")) > len(handed)
    promised = handed[-(plan.keep - cut) :] if plan.keep > cut else []
    missing = sorted(set(promised) - set(present))
    if missing:
        raise Lost(f"the generations {missing} were handed out and are gone; present are {present}")
    strange = [generation for generation in present if generation not in handed]
    newest_unknown = (handed[-1] if handed else 0) + 1
    if any(generation not in (0, newest_unknown) for generation in strange):
        raise Lost(f"generations {strange} that nobody made are there")


def _warm_up() -> None:
    """Everything that costs time once, before the first fork; no thread may be running then."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call, unused-ignore]
    warm_up.warm_up()
    param = make_parameters(0)["emb.weight"]
    kernels.warm_up(kernels.choose_kernel("auto", param), param.dtype)
    gradients.warm_up(param.dtype)


def _worker(numbers: range, seed: int, oracles: Oracles, root: Path, report: Any) -> None:
    durations = Durations()
    for number in numbers:
        plan = make_plan(seed, number)
        directory = root / f"run{number}"
        directory.mkdir()
        try:
            inside = run(plan, oracles, durations, directory)
        except Lost as error:
            report("lost", number, f"run {number} ({plan}), kept in {directory}: {error}")
        except Exception:
            report("lost", number, f"run {number} ({plan}), kept in {directory}: {traceback.format_exc()}")
        else:
            shutil.rmtree(directory)
            report("survived", number, inside)


def crash(runs: int, *, seed: int, jobs: int, root: Path, verbose: bool = True) -> tuple[int, list[str], Counter[str]]:
    """Carry out the runs: how many survived, what was lost in the others, and in what the processes were killed."""
    _warm_up()
    oracles = Oracles({s: oracle_digests(s, STEPS) for s in range(seed * DATA_SEEDS, seed * DATA_SEEDS + DATA_SEEDS)})
    workers: list[Child] = []
    for i in range(jobs):
        numbers = range(i, runs, jobs)
        open_fds = tuple(worker._fd for worker in workers)
        workers.append(Child(*run_in_fork(lambda mark, n=numbers: _worker(n, seed, oracles, root, mark), open_fds)))  # type: ignore[misc]
    lost: list[str] = []
    inside: Counter[str] = Counter()
    done = 0
    running = {worker._fd: worker for worker in workers}
    while running:
        for fd in select.select(list(running), [], [])[0]:
            worker = running[fd]
            new = worker.next_marks()
            if not new and worker._ended:
                status = worker.reap()
                del running[fd]
                if status:
                    lost.append(f"a worker ended with status {status}: {worker.all('failed')}")
            for what, _, *values in new:
                done += 1
                if what == "lost":
                    lost.append(values[1])
                    print(values[1], file=sys.stderr, flush=True)
                elif what == "survived":
                    inside[values[1]] += 1
                if verbose and done % max(1, runs // 20) == 0:
                    print(f"{done} of {runs} runs, {len(lost)} lost", flush=True)
    return sum(inside.values()), lost, inside


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of batches, moments and configurations")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--directory", type=Path, help="where the runs write; what was lost is kept there")
    options = parser.parse_args(arguments)
    if options.runs < 1 or options.jobs < 1:
        parser.error("--runs and --jobs must be at least 1")
    root = Path(tempfile.mkdtemp(prefix="dsa-crash-", dir=options.directory))
    survived, lost, inside = crash(options.runs, seed=options.seed, jobs=options.jobs, root=root)
    if not lost:
        shutil.rmtree(root)
    print("killed in: " + ", ".join(f"{moment} {count}" for moment, count in sorted(inside.items())))
    print(f"runs {options.runs}, survived {survived}, lost {options.runs - survived}")
    return 0 if survived == options.runs and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
