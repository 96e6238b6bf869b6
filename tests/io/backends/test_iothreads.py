"""IOThreads: daemon threads that outlive no reference, block signals, and never keep the interpreter from its end."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from dsa.errors import ClosedError
from dsa.io.backends.iothreads import IOThreads, done, ended

PATIENCE_S = 30.0


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


def test_work_is_done_in_order_and_failures_are_the_futures() -> None:
    threads = IOThreads("t", 1)
    done: list[int] = []
    futures = [threads.submit(done.append, i) for i in range(50)]
    failed = threads.submit(int, "x")
    assert threads.shut_down(PATIENCE_S) == []
    assert done == list(range(50))
    assert all(future.result() is None for future in futures)
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result(0)
    with pytest.raises(ClosedError):
        threads.submit(int)


def test_the_executor_face_refuses_to_drop_work_and_waits_for_it() -> None:
    with IOThreads("t", 2) as threads:
        future = threads.submit(int, "7")
        with pytest.raises(NotImplementedError):
            threads.shutdown(cancel_futures=True)
    assert future.done()
    threads.shutdown(wait=False)


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no signal masks here")
def test_signals_are_blocked_in_the_threads_and_only_there() -> None:
    threads = IOThreads("t", 1)
    mask = threads.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result(PATIENCE_S)
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM} <= mask
    assert signal.SIGSEGV not in mask
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    threads.shut_down(PATIENCE_S)


def test_an_idle_thread_keeps_no_work_alive() -> None:
    class Work:
        def do(self) -> None:
            pass

    threads = IOThreads("t", 1)
    work, gone = Work(), threading.Event()
    weakref.finalize(work, gone.set)
    threads.submit(work.do).result(PATIENCE_S)
    del work
    assert gone.wait(PATIENCE_S)
    threads.shut_down(PATIENCE_S)


def test_threads_end_with_the_last_reference() -> None:
    threads = IOThreads("t", 2)
    threads.submit(int).result(PATIENCE_S)
    workers = threads._threads
    del threads
    gc.collect()
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive()


def test_shut_down_from_one_of_the_threads_does_not_wait_for_itself() -> None:
    threads = IOThreads("t", 1)
    assert threads.submit(threads.shut_down, PATIENCE_S).result(PATIENCE_S) == []


async def test_a_cancelled_wait_ends_with_the_work_and_names_its_failure() -> None:
    threads = IOThreads("t", 1)
    gate = threading.Event()

    def fail() -> None:
        gate.wait(PATIENCE_S)
        raise OSError(5, "broken")

    waiting = asyncio.ensure_future(ended(threads.submit(fail)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await waiting
    causes = [caught.value, caught.value.__context__, caught.value.__cause__]
    assert any(isinstance(error and error.__cause__, OSError) or isinstance(error, OSError) for error in causes)
    threads.shut_down(PATIENCE_S)


async def test_started_work_settles_a_future_of_the_loop() -> None:
    threads = IOThreads("t", 1)
    assert await threads.start(int, "7") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await threads.start(int, "x")
    waiting = asyncio.ensure_future(ended(threads.start(int, "8")))
    assert await waiting == 8
    threads.shut_down(PATIENCE_S)
    with pytest.raises(ClosedError):
        threads.start(int)


async def test_started_work_that_nobody_waits_for_any_more_is_done_all_the_same() -> None:
    threads = IOThreads("t", 1)
    gate, reached = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(PATIENCE_S)
        reached.set()

    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    future = threads.start(work)
    future.cancel()
    gate.set()
    assert threads.shut_down(PATIENCE_S) == []
    assert reached.is_set()
    for _ in range(3):  # the answer comes to the loop, which nobody asks for it any more
        await asyncio.sleep(0)
    assert future.cancelled()
    assert complaints == []


def test_started_work_outlives_its_loop() -> None:
    threads = IOThreads("t", 1)
    gate, reached = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(PATIENCE_S)
        reached.set()

    async def begin() -> None:
        threads.start(work)

    asyncio.run(begin())
    gate.set()
    assert threads.shut_down(PATIENCE_S) == []
    assert reached.is_set()


async def test_a_wait_ends_with_the_work_or_the_time_and_leaves_the_work_alone() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    await done(work, 0.001)
    assert not work.done()
    waiting = asyncio.ensure_future(done(work))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not work.done()
    waiting = asyncio.ensure_future(done(work, PATIENCE_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    work.set_exception(OSError(5, "broken"))
    await waiting
    assert isinstance(work.exception(), OSError)


def test_a_stuck_thread_does_not_keep_the_interpreter_from_its_end() -> None:
    script = """
import threading
from dsa.io.backends.iothreads import IOThreads
threads, stuck = IOThreads("t", 1), threading.Event()
def wait():
    stuck.set()
    threading.Event().wait()
threads.submit(wait)
stuck.wait()
print("end")
"""
    assert run(script) == "end\n"


def test_work_is_taken_while_the_interpreter_ends() -> None:
    script = """
import atexit, threading
from dsa.io.backends.iothreads import IOThreads
threads = IOThreads("t", 1)
threading._register_atexit(lambda: print(threads.submit(int, "1").result(20)))
atexit.register(lambda: print(threads.submit(int, "2").result(20)))
"""
    assert run(script) == "1\n2\n"


@pytest.mark.skipif(not Path("/proc").exists() or not hasattr(__import__("os"), "fork"), reason="no fork here")
def test_a_forked_child_is_told_that_it_has_no_threads() -> None:
    script = """
import os, warnings
warnings.simplefilter("ignore")
from dsa.errors import ForkedError
from dsa.io.backends.iothreads import IOThreads
threads = IOThreads("t", 1)
child = os.fork()
if not child:
    try:
        threads.submit(int)
    except ForkedError:
        os._exit(0 if threads.shut_down(20) == [] else 2)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), threads.submit(int, "3").result(20))
"""
    assert run(script) == "0 3\n"
