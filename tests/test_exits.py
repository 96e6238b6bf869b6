"""Every way out: the process ends within 10 s, says what was not committed, and leaves nothing behind.

A server process imports torch once; each script runs in a fork of it that has no thread yet, and ends as any program's
main script does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsa import DiskSparseAdam

if not hasattr(os, "fork"):
    pytest.skip("the scripts are forked", allow_module_level=True)

LIMIT_S = 10.0

SERVER = """
import json, os, signal, sys, time
import asyncio, gc, threading
import torch
from torch import nn
from dsa import DiskSparseAdam
from dsa.config import IOConfig
from dsa.errors import *
from dsa.io import warm_up
from dsa.optim import gradients, kernels
import fault_backend

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()
warm_up.warm_up()
kernels.warm_up(kernels.choose_kernel("auto", nn.Parameter(torch.zeros(2, 2))), torch.float32)
gradients.warm_up(torch.float32)

def serve():
    status = {}
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "wait" in request:
            deadline = time.monotonic() + request["limit_s"]
            found = 0
            while not found and time.monotonic() < deadline:
                found, code = os.waitpid(request["wait"], os.WNOHANG)
                if not found:
                    time.sleep(0.005)
            if not found:
                os.kill(request["wait"], signal.SIGKILL)
                os.waitpid(request["wait"], 0)
            print(json.dumps(os.waitstatus_to_exitcode(code) if found else None), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            return request
        print(json.dumps(pid), flush=True)
    os._exit(0)

request = serve()
for target, path in ((0, "/dev/null"), (1, request["out"]), (2, request["err"])):
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.dup2(fd, target)
    os.close(fd)
state_dir, uvloop, fifo = request["state_dir"], request["uvloop"], request["fifo"]
param = nn.Parameter(torch.zeros(400, 8))
sys.path.insert(0, request["tests"])

if request["backend"] == "stuck":
    made = []
    def open_stuck(name, config):
        from dsa.io.backends import ThreadsBackend
        made.append(fault_backend.FaultBackend(ThreadsBackend(config)))
        return made[-1]
    import dsa.io.engine
    dsa.io.engine.open_backend = open_stuck

def make(**options):
    config = IOConfig(uvloop=uvloop, segment_bytes=8192, dirty_share=0.05)
    backend = "auto" if request["backend"] == "stuck" else request["backend"]
    return DiskSparseAdam([("w", param)], state_dir=state_dir, cache=20000, io=config, backend=backend, **options)

def step(opt, i=0):
    rows = (torch.arange(40) * 7 + i * 40) % 400
    param.grad = torch.sparse_coo_tensor(rows[None], torch.ones(40, 8), (400, 8))
    opt.announce({"w": rows})
    opt.step()

def train(opt, steps=12):
    for i in range(steps):
        step(opt, i)

def stick(kind="write"):
    made[-1].stall(kind, ".log")

def ready():
    with open(fifo, "w") as file:
        file.write("ready")

def dsa_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("dsa")]

def open_files():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink("/proc/self/fd/" + fd))
        except OSError:
            pass
    return sorted(found)

def private_bytes():
    # Of memory that forks do not inherit: the frames, buffers and indexes.
    total = size = 0
    for line in open("/proc/self/smaps"):
        words = line.split()
        if words[0] == "Size:":
            size = int(words[1]) * 1024
        elif words[0] == "VmFlags:" and "dc" in words:
            total += size
    return total

exec(compile(request["script"], "script", "exec"))
"""


@dataclass
class Ended:
    status: int | None
    out: str
    err: str
    state_dir: Path

    def check(
        self, status: int | tuple[int, ...], *, uncommitted: bool, traceback: bool = False, generation: int = 1
    ) -> None:
        """It ended in time, with the status, and stderr holds what it should and nothing else."""
        assert self.status is not None, f"it did not end within {LIMIT_S} s: {self.err}"
        assert self.status in (status if isinstance(status, tuple) else (status,)), (self.status, self.err)
        assert "cannot schedule new futures" not in self.err
        assert "Fatal Python error" not in self.err
        assert ("Traceback" in self.err) == traceback, self.err
        if uncommitted:
            assert f"steps of {self.state_dir}" in self.err
            assert "were not committed" in self.err
            assert f"the last generation there is {generation}\n" in self.err, self.err
        elif not traceback:
            assert self.err == ""


class Script:
    """A script that runs."""

    def __init__(self, server: subprocess.Popen[str], folder: Path, source: str, uvloop: bool, backend: str) -> None:
        self.folder, self.server = folder, server
        self.state_dir = (folder / "state").resolve()
        fifo = folder / "fifo"
        if not fifo.exists():
            os.mkfifo(fifo)
        self._fifo = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        for name in ("out", "err"):
            (folder / name).unlink(missing_ok=True)
        self.pid: int = self._ask(
            script=textwrap.dedent(source),
            out=str(folder / "out"),
            err=str(folder / "err"),
            fifo=str(fifo),
            state_dir=str(self.state_dir),
            uvloop=uvloop,
            backend=backend,
            tests=str(Path(__file__).parent),
        )

    def _ask(self, **request: Any) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def await_ready(self) -> Script:
        if not select.select([self._fifo], [], [], 60.0)[0]:
            raise AssertionError(f"the script is not ready: {self.end().err}")
        assert os.read(self._fifo, 100) == b"ready", self.end().err
        return self

    def send(self, number: int) -> Script:
        os.kill(self.pid, number)
        return self

    def end(self, limit_s: float = LIMIT_S) -> Ended:
        """Wait for its end, which must come within the limit: from `await_ready` on, where the script says so."""
        status = self._ask(wait=self.pid, limit_s=limit_s)
        os.close(self._fifo)
        return Ended(status, (self.folder / "out").read_text(), (self.folder / "err").read_text(), self.state_dir)


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(LIMIT_S)


class Start:
    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self.server, self.folder = server, folder

    def __call__(self, source: str, *, uvloop: bool = True, backend: str = "threads") -> Script:
        return Script(self.server, self.folder, source, uvloop, backend)


@pytest.fixture
def start(server: subprocess.Popen[str], tmp_path: Path) -> Start:
    return Start(server, tmp_path)


def check_state(folder: Path, step: int = 1) -> None:
    """The last generation is there and loads; nobody holds the directory any more."""
    param = nn.Parameter(torch.zeros(400, 8))
    opt = DiskSparseAdam([("w", param)], state_dir=folder / "state", existing="resume")
    assert opt.state[param]["step"] == step
    opt.moments("w", range(400))
    opt.close()


BEGIN = """
opt = make()
step(opt)
opt.checkpoint()
ready()
"""
UNCOMMITTED = BEGIN + "train(opt)\n"
both_loops = pytest.mark.parametrize("uvloop", [True, False])
backends = pytest.mark.parametrize("backend", ["threads", "aiofiles", "auto"])


@both_loops
@backends
def test_an_end_without_close(start: Start, uvloop: bool, backend: str) -> None:
    start(UNCOMMITTED, uvloop=uvloop, backend=backend).await_ready().end().check(0, uncommitted=True)
    check_state(start.folder)


@both_loops
def test_an_end_with_close_says_nothing(start: Start, uvloop: bool) -> None:
    start(UNCOMMITTED + "opt.close()", uvloop=uvloop).await_ready().end().check(0, uncommitted=False)
    check_state(start.folder, 13)


def test_an_end_where_all_is_committed_says_nothing(start: Start) -> None:
    start(BEGIN).await_ready().end().check(0, uncommitted=False)
    check_state(start.folder)


@both_loops
def test_sys_exit(start: Start, uvloop: bool) -> None:
    start(UNCOMMITTED + "sys.exit(3)", uvloop=uvloop).await_ready().end().check(3, uncommitted=True)
    check_state(start.folder)


def test_sys_exit_inside_the_context_commits_nothing(start: Start) -> None:
    start(BEGIN + "with opt:\n    train(opt)\n    sys.exit(3)").await_ready().end().check(3, uncommitted=False)
    check_state(start.folder)


@both_loops
def test_an_exception_in_the_loop(start: Start, uvloop: bool) -> None:
    ended = start(UNCOMMITTED + "raise KeyError('mine')", uvloop=uvloop).await_ready().end()
    ended.check(1, uncommitted=True, traceback=True)
    assert "KeyError: 'mine'" in ended.err
    check_state(start.folder)


TRAIN_ON = UNCOMMITTED.replace("ready()", "") + "ready()\nwhile True:\n    train(opt)\n"


@both_loops
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(start: Start, uvloop: bool, times: int) -> None:
    script = start(TRAIN_ON, uvloop=uvloop).await_ready()
    for _ in range(times):
        script.send(signal.SIGINT)
    ended = script.end()
    ended.check((1, -signal.SIGINT), uncommitted=times == 1, traceback=True)
    assert "KeyboardInterrupt" in ended.err
    check_state(start.folder)


def test_ctrl_c_that_is_caught_and_then_close(start: Start) -> None:
    source = (
        UNCOMMITTED.replace("ready()", "")
        + """
try:
    ready()
    while True:
        train(opt)
except KeyboardInterrupt:
    try:
        opt.close()
    except UsageError as error:  # it came in the middle of an update
        assert "mixed" in str(error) or "books" in str(error), error
"""
    )
    start(source).await_ready().send(signal.SIGINT).end().check(0, uncommitted=False)


def test_sigterm(start: Start) -> None:
    """The system ends the process at once; nobody can say anything."""
    ended = start(TRAIN_ON).await_ready().send(signal.SIGTERM).end()
    ended.check(-signal.SIGTERM, uncommitted=False)
    check_state(start.folder)


def test_sigterm_with_a_handler_that_exits(start: Start) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
    start(handler + TRAIN_ON).await_ready().send(signal.SIGTERM).end().check(143, uncommitted=True)
    check_state(start.folder)


LEAKS = """
top = state_dir
def life(number):
    global state_dir
    state_dir = top + str(number)
    memory = private_bytes()
{life}

def collect():
    gc.collect()  # the optimizer, which ends what runs behind it
    gc.collect()  # and then that

life(1)  # what a process opens once (a pipe of uvloop's, libraries) is open from here on
collect()
files, memory = open_files(), private_bytes()
assert memory == 0, memory
life(2)
collect()
assert dsa_threads() == [], dsa_threads()
assert open_files() == files, set(open_files()) - set(files)
assert private_bytes() == 0, private_bytes()
"""
LIVES = {
    "closed": (
        "opt = make()\ntrain(opt)\nassert dsa_threads() and private_bytes() > memory\nopt.close()\ndel opt",
        False,
    ),
    "collected": ("opt = make()\ntrain(opt)\nassert dsa_threads()\ndel opt", True),
    "in a cycle": ("opt = make()\ntrain(opt)\nopt.me = [opt]\ndel opt", True),
    "refused": (
        "opt = make()\ntry:\n    make()\nexcept StateLockedError as error:\n"
        "    assert 'close() the earlier one' in str(error)\nopt.close()\ndel opt",
        False,
    ),
    "failed": (
        "opt = make()\ntrain(opt)\nos.remove(state_dir + '/manifest.json')\nos.rmdir(state_dir + '/index')\n"
        "try:\n    opt.close()\nexcept DeviceError:\n    pass\nelse:\n    raise SystemExit('no error')\ndel opt",
        False,
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize(
    ("backend", "uvloop"), [("threads", True), ("threads", False), ("aiofiles", False), ("auto", True)]
)
def test_no_thread_descriptor_or_memory_is_left(start: Start, life: str, uvloop: bool, backend: str) -> None:
    source, uncommitted = LIVES[life]
    start(LEAKS.format(life=textwrap.indent(source, "    ")), uvloop=uvloop, backend=backend).end(60.0).check(
        0, uncommitted=uncommitted, generation=0
    )


@both_loops
@pytest.mark.parametrize("end", ["", "opt.close()"])
def test_inside_asyncio_run(start: Start, uvloop: bool, end: str) -> None:
    source = f"""
async def main():
    global opt
    opt = make()
    step(opt)
    opt.checkpoint()
    ready()
    train(opt)
    await asyncio.sleep(0)
    {end}

asyncio.run(main())
"""
    start(source, uvloop=uvloop).await_ready().end().check(0, uncommitted=not end)
    check_state(start.folder, 13 if end else 1)


NOTEBOOK = """
import traceback

async def notebook(cells):
    for cell in cells:
        try:
            exec(cell, globals())
        except Exception as error:
            print(type(error).__name__, error)

asyncio.run(notebook({cells!r}))
"""
CELL = "opt = make(existing='resume')\ntrain(opt)"


@both_loops
def test_a_notebook_cell_that_is_run_again(start: Start, uvloop: bool) -> None:
    cells = [
        CELL,
        CELL,
        "opt.close()",
        CELL,
        "opt.checkpoint()",
        "del opt\ngc.collect()",
        CELL,
        "print('last')\nready()",
    ]
    ended = start(NOTEBOOK.format(cells=cells), uvloop=uvloop).await_ready().end()
    ended.check(0, uncommitted=True, generation=2)
    lines = ended.out.splitlines()
    assert len(lines) == 2, ended.out
    assert lines[0].startswith("StateLockedError")
    assert "close() the earlier one" in lines[0]
    assert lines[1] == "last"


# A backend that never answers.

STUCK = BEGIN.replace("ready()", "stick('write')")
UNTIL_STUCK = """
def until_stuck():
    for i in range(4):
        step(opt, i)
        if made[-1].stalled.wait(0.2):
            return
until_stuck()
assert made[-1].stalled.is_set()
ready()
"""


IMPATIENT = """
import dsa.io.pipeline
dsa.io.pipeline.STOP_TIMEOUT_S = 0.3
"""  # elsewhere than where the real one is tried, it would only make the tests longer


@pytest.mark.parametrize(
    ("end", "uvloop"), [("", True), ("", False), ("sys.exit(0)", True), ("del opt\ngc.collect()", True)]
)
def test_a_backend_that_never_answers_and_an_end(start: Start, uvloop: bool, end: str) -> None:
    patience = "" if uvloop and not end else IMPATIENT
    ended = start(patience + STUCK + UNTIL_STUCK + end, uvloop=uvloop, backend="stuck").await_ready().end()
    ended.check(0, uncommitted=True)
    check_state(start.folder)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("call", "uvloop"), [("opt.checkpoint()", True), ("opt.close()", False), ("train(opt, 1000)", True)]
)
def test_ctrl_c_while_a_call_waits_for_a_backend_that_never_answers(
    start: Start, uvloop: bool, call: str, times: int
) -> None:
    patience = "" if call == "opt.checkpoint()" and times == 1 else IMPATIENT
    source = (
        patience
        + STUCK
        + f"""
threading.Thread(target=lambda: made[-1].stalled.wait() and ready(), daemon=True).start()
step(opt, 1)
{call}
"""
    )
    script = start(source, uvloop=uvloop, backend="stuck").await_ready()
    script.send(signal.SIGINT)
    if times == 2:
        script.send(signal.SIGINT)
    ended = script.end()
    ended.check((1, -signal.SIGINT), uncommitted=False, traceback=True)
    assert "KeyboardInterrupt" in ended.err
    check_state(start.folder)
