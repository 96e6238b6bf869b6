"""One owner: forked children are refused at once, hold no lock, and cost training nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import Twins, parameters, random_gradient
from torch import nn
from torch.utils.data import DataLoader

import dsa.io.memory
from dsa import DiskSparseAdam
from dsa.config import IOConfig
from dsa.errors import ForkedError, StateLockedError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
if not hasattr(os, "fork"):
    pytest.skip("there are no forks", allow_module_level=True)

LIMIT_S = 20
N_ROWS, WIDTH = 200, 4


def in_fork(work: Callable[[], Any]) -> Any:
    """What `work` gives in a forked child; a child that hangs is ended by an alarm, and the test fails."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT_S)
            try:
                answer = {"value": work()}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            os.write(writing, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}: it hangs"
    answer = json.loads(data)
    assert "error" not in answer, answer["error"]
    return answer["value"]


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Twins]:
    made = Twins(parameters({"w": (N_ROWS, WIDTH)}), tmp_path / "s", {"lr": 0.1}, cache=8000)
    step(made, 0)
    yield made
    made.opt.close()


def step(twins: Twins, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, N_ROWS, (30,), generator=generator)
    twins.step({"w": random_gradient(twins.disk["w"], rows, generator)})


def enter(opt: DiskSparseAdam) -> None:
    with opt:
        pass


CALLS: dict[str, Callable[[DiskSparseAdam], Any]] = {
    "step": lambda opt: opt.step(),
    "announce": lambda opt: opt.announce({"w": [1]}),
    "lookahead": lambda opt: opt.lookahead([], rows=lambda batch: {}),
    "watch": lambda opt: opt.watch(nn.Embedding(3, 3, sparse=True)),
    "checkpoint": lambda opt: opt.checkpoint(),
    "generations": lambda opt: opt.generations(),
    "release": lambda opt: opt.release(0),
    "state_dict": lambda opt: opt.state_dict(),
    "load_state_dict": lambda opt: opt.load_state_dict({"state": {}, "param_groups": opt.param_groups}),
    "export_state_dict": lambda opt: opt.export_state_dict(),
    "moments": lambda opt: opt.moments("w", [1]),
    "add_param_group": lambda opt: opt.add_param_group({"params": [("x", nn.Parameter(torch.zeros(3, 3)))]}),
    "close": lambda opt: opt.close(),
    "with": enter,
}


@pytest.mark.parametrize("held", [False, True], ids=["idle", "its locks held"])
def test_every_method_raises_at_once_in_a_forked_child(twins: Twins, held: bool) -> None:
    """Also where the fork came while another thread of the parent was in the middle of everything."""
    engine = twins.opt._books.engine

    def work() -> dict[str, str]:
        found = {}
        for name, call in CALLS.items():
            signal.alarm(LIMIT_S)
            try:
                call(twins.opt)
            except ForkedError as error:
                both = str(os.getppid()) in str(error) and str(os.getpid()) in str(error)
                found[name] = "refused" if both else str(error)
            except BaseException as error:
                found[name] = repr(error)
            else:
                found[name] = "returned"
        return found

    if held:
        engine._public.acquire()
        engine._pipeline.access.condition.acquire()
    try:
        found = in_fork(work)
    finally:
        if held:
            engine._pipeline.access.condition.release()
            engine._public.release()
    assert found == dict.fromkeys(CALLS, "refused")
    step(twins, 1)
    twins.check()


def test_a_child_that_ends_normally_leaves_the_parent_alone(twins: Twins) -> None:
    """With Python's own exit handlers and finalizers, and a collection of the optimizer."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT_S)
        import atexit
        import gc

        try:
            opt, twins.opt = twins.opt, None  # type: ignore[assignment]
            del opt
            gc.collect()
            atexit._run_exitfuncs()
        finally:
            os._exit(7)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    step(twins, 1)
    twins.check()
    twins.opt.checkpoint()


def test_the_directory_stays_locked_after_a_child_has_ended(tmp_path: Path, twins: Twins) -> None:
    in_fork(lambda: None)
    code = (
        "import sys, torch; from torch import nn; from dsa import DiskSparseAdam; from dsa.errors import *\n"
        "try: DiskSparseAdam([('w', nn.Parameter(torch.zeros(200, 4)))], state_dir=sys.argv[1])\n"
        "except StateLockedError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, timeout=100, check=True
    )
    assert f"in use by process {os.getpid()}" in done.stdout


OWNER = """
import os, sys, time, torch
from torch import nn
from dsa import DiskSparseAdam
torch.set_num_threads(1)
param = nn.Parameter(torch.zeros(200, 4))
opt = DiskSparseAdam([("w", param)], state_dir=sys.argv[1])
for i in range(3):
    param.grad = torch.sparse_coo_tensor([[i, 7]], torch.ones(2, 4), (200, 4))
    opt.step()
opt.checkpoint()
orphan = os.fork()
if orphan == 0:
    os.close(1)
    time.sleep(600)
print(orphan, flush=True)
time.sleep(600)
"""


def test_the_lock_dies_with_the_process_while_orphans_live_on(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "s")], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    orphan = int(owner.stdout.readline())
    try:
        param = nn.Parameter(torch.zeros(200, 4))
        with pytest.raises(StateLockedError, match=f"in use by process {owner.pid}"):
            DiskSparseAdam([("w", param)], state_dir=tmp_path / "s")
        owner.kill()
        owner.wait()
        owner.stdout.close()
        os.kill(orphan, 0)  # it is alive
        opt = DiskSparseAdam([("w", param)], state_dir=tmp_path / "s", existing="resume")
        assert opt.state[param]["step"] == 3
        opt.close()
        os.kill(orphan, 0)
        if Path("/proc").exists():
            held = {os.readlink(fd) for fd in Path(f"/proc/{orphan}/fd").iterdir()}
            assert not any(str(tmp_path) in name for name in held), held
    finally:
        os.kill(orphan, signal.SIGKILL)
        if owner.poll() is None:
            owner.kill()
            owner.wait()


# DataLoader workers.


def batch_of(i: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(i)
    return torch.randint(0, N_ROWS, (30,), generator=generator)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        return batch_of(i)


def rows_of(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"w": batch}


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_beside_it(twins: Twins, context: str) -> None:
    loader = DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context=context)
    generator = torch.Generator().manual_seed(3)
    for _ in range(1 if context != "fork" else 3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork
            for i, rows in enumerate(twins.opt.lookahead(loader, rows=rows_of, depth=3)):
                assert torch.equal(rows, batch_of(i))
                twins.step({"w": random_gradient(twins.disk["w"], rows, generator)})
    twins.check()
    twins.opt.checkpoint()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's advice")
def test_frames_and_indexes_are_not_inherited(twins: Twins) -> None:
    """So that a write to a frame beside a living worker copies nothing: the kernel's flag, and the child's map."""
    arena = twins.opt._books.engine._pipeline.books.arenas[0].memory
    slots = twins.opt._books.engine._pipeline.books.tables[0].segments.slots
    for array in (arena, slots):
        address = array.ctypes.data
        assert "dc" in flags_at("/proc/self/smaps", address)
        assert in_fork(lambda at=address: flags_at("/proc/self/smaps", at)) is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's advice")
@pytest.mark.parametrize("inherited", [False, True], ids=["as it is", "if forks inherited it"])
def test_training_beside_a_living_worker_copies_no_page_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inherited: bool
) -> None:
    """Counted in page faults of the same step without a forked child and beside one that lives."""
    import resource

    if inherited:
        monkeypatch.setattr(dsa.io.memory, "_MADV_DONTFORK", 0)  # the advice that changes nothing
    n_rows, width = 40_000, 64
    param = nn.Parameter(torch.zeros(n_rows, width))
    pieces = torch.arange(n_rows).view(40, -1)
    values = torch.ones(len(pieces[0]), width)
    grads = [torch.sparse_coo_tensor(rows[None], values, param.shape) for rows in pieces]
    opt = DiskSparseAdam([("w", param)], state_dir=tmp_path / "s", cache="32MiB", io=IOConfig(dirty_share=1.0))

    def faults(some: list[torch.Tensor]) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for grad in some:
            param.grad = grad
            opt.step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for _ in range(2):
        faults(grads[:20])
        alone = faults(grads[20:])
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    # What every optimizer shares with a fork is copied here: the weights, and the heap that steps use.
    param.data.mul_(1)
    faults(grads[:20])
    beside = faults(grads[20:])
    os.close(reading)
    os.close(writing)
    os.waitpid(pid, 0)
    cache_pages = n_rows // 2 * 2 * width * 4 // 4096
    assert (beside - alone > cache_pages // 2) == inherited, (alone, beside, cache_pages)
    opt.close()


def flags_at(smaps: str, address: int) -> list[str] | None:
    """The flags of the mapping that holds the address."""
    inside = False
    for line in Path(smaps).read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return None
