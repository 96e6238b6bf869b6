"""The engine really is a pipeline: seen with a backend whose requests a test lets through one by one."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gated_backend import LIMIT_S, GatedBackend

import dsa.io.engine
from dsa.config import IOConfig
from dsa.errors import ClosedError, CorruptError, DeviceError, UsageError
from dsa.io.backends import ThreadsBackend
from dsa.io.cache import FRAME_OVERHEAD_BYTES
from dsa.io.engine import Engine
from dsa.io.tables import TableSpec
from dsa.io.window import Kind

N_ROWS, WIDTH, N_FRAMES = 64, 16, 8
SPEC = TableSpec("t", (N_ROWS, WIDTH), "float32", WIDTH, "float32")


def array(rows: list[int]) -> np.ndarray[Any, Any]:
    return np.array(sorted(set(rows)), np.int64)


class Training:
    """An engine with one table, on a gated backend; a step adds 1 to its rows, `truth` says what they should hold."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, *, n_frames: int = N_FRAMES, **config: Any) -> None:
        knobs = IOConfig(**{"segment_bytes": 8192, "dirty_share": 0.0, **config})
        self.backend = GatedBackend(ThreadsBackend(knobs))
        monkeypatch.setattr(dsa.io.engine, "open_backend", lambda name, config: self.backend)
        self.engine = Engine(
            path,
            [SPEC],
            cache_bytes=n_frames * (SPEC.record.record_bytes + FRAME_OVERHEAD_BYTES) + 100,
            existing="load",
            backend="threads",
            keep_generations=2,
            config=knobs,
        )
        self.pipeline = self.engine._pipeline
        self.truth = np.zeros(N_ROWS, np.float32)
        self.threads: list[threading.Thread] = []

    @property
    def table(self) -> Any:
        return self.pipeline.books.tables[0]

    def step(self, rows: list[int], during: Callable[[], object] | None = None) -> int:
        wanted = array(rows)

        def update(table: int, positions: Any, frames: Any) -> None:
            if during is not None:
                during()
            moments = self.engine.moments_array(table)
            moments[frames] += 1

        would_do = self.engine.step({0: wanted}, update, [0])
        self.truth[wanted] += 1
        return would_do

    def announce(self, rows: list[int], kind: Kind = Kind.ANNOUNCED) -> int:
        return self.engine.announce(kind, {0: array(rows)})

    def await_held(self, ticket: int) -> None:
        """Wait until all rows of an announced batch are in frames."""
        books, condition = self.pipeline.books, self.pipeline.access.condition

        def held() -> bool:
            batch = books.window.get(ticket)
            return batch is not None and batch.complete and books.quiet()

        with condition:
            assert condition.wait_for(held, LIMIT_S)

    def fill_the_disk(self) -> None:
        """Update every row once and commit; the last rows stay in frames, the others are on disk only."""
        for first in range(0, N_ROWS, N_FRAMES):
            self.step(list(range(first, first + N_FRAMES)))
        self.engine.checkpoint([None])

    def in_thread(self, function: Callable[[], object]) -> threading.Event:
        """Run it beside the test; the event is set when it has returned normally."""
        ended = threading.Event()

        def run() -> None:
            function()
            ended.set()

        thread = threading.Thread(target=run, daemon=True)
        self.threads.append(thread)
        thread.start()
        return ended

    def watch_waits(self) -> threading.Event:
        """An event that is set when a public call begins to wait for the background."""
        waits = threading.Event()
        wait = self.pipeline.access.wait

        def noted() -> None:
            waits.set()
            wait()

        self.pipeline.access.wait = noted  # type: ignore[method-assign]
        return waits

    def count_wakes(self) -> list[object]:
        """What is put on the loop from now on."""
        woken: list[object] = []
        call_soon = self.pipeline.loop.call_soon

        def noted(function: Callable[[], object]) -> None:
            woken.append(function)
            call_soon(function)

        self.pipeline.loop.call_soon = noted  # type: ignore[method-assign]
        return woken

    def read(self) -> np.ndarray[Any, Any]:
        out = np.empty((N_ROWS, SPEC.record.record_bytes), np.uint8)
        self.engine.read(0, np.arange(N_ROWS, dtype=np.int64), out)
        return out.view(np.float32)

    def check_numbers(self) -> None:
        """Every row holds what the steps made of it, in all its columns."""
        assert np.array_equal(self.read(), np.repeat(self.truth[:, None], 2 * WIDTH, axis=1))

    def figures(self) -> Any:
        return self.engine.statistics(gradient_s=0.0, compile_s=0.0, kernel="")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def maker(**config: Any) -> Training:
        made.append(Training(tmp_path / f"state{len(made)}", monkeypatch, **config))
        return made[-1]

    yield maker
    for training in made:
        for kind in ("read", "write", "sync"):
            training.backend.open_gate(kind)
        for thread in training.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        training.engine.close()


def test_the_next_batch_is_read_while_a_step_updates(make: Callable[..., Training]) -> None:
    training = make()
    training.fill_the_disk()
    backend = training.backend
    training.announce([0, 1])
    backend.await_completed("read", 1)
    backend.hold("read")
    training.announce([2, 3])
    backend.await_waiting("read", 1)
    backend.let_through("read")
    backend.await_completed("read", 2)

    def during() -> None:  # step k is between its lease and its commit
        training.announce([4, 5])
        backend.await_waiting("read", 1)

    training.step([0, 1], during)
    backend.open_gate("read")
    training.step([2, 3])
    training.step([4, 5])
    training.check_numbers()


def test_a_step_whose_announced_reads_are_done_submits_none(make: Callable[..., Training]) -> None:
    training = make()
    training.fill_the_disk()
    backend = training.backend
    for rows in ([0, 9, 18], [27, 36], [0, 27]):
        ticket = training.announce(rows)
        training.await_held(ticket)
        announced = backend.submitted["read"]
        backend.hold("read")
        training.step(rows)  # with a read of its own it would wait for ever
        assert backend.submitted["read"] == announced
        backend.open_gate("read")
    assert training.figures().announced_share == 7 / (N_ROWS + 7)
    training.check_numbers()


def test_a_step_with_nothing_announced_ends(make: Callable[..., Training]) -> None:
    training = make()
    training.fill_the_disk()
    training.step([3, 40, 41])
    training.step([0])
    training.check_numbers()


def test_steps_return_while_writes_are_held_back_until_the_cache_is_dirty(make: Callable[..., Training]) -> None:
    training = make()
    backend = training.backend
    backend.hold("write")
    for first in (0, 2, 4, 6):
        training.step([first, first + 1])
        backend.await_waiting("write", 1)
    assert training.figures().dirty_frames == N_FRAMES
    waits = training.watch_waits()
    ended = training.in_thread(lambda: training.step([8, 9]))
    assert waits.wait(LIMIT_S)
    assert not ended.is_set()
    assert backend.completed["write"] == 0
    backend.let_through("write")
    assert ended.wait(LIMIT_S)
    assert backend.waiting("write") > 0
    backend.open_gate("write")
    training.check_numbers()


def test_at_most_three_segments_are_written_at_once(make: Callable[..., Training]) -> None:
    training = make()
    backend = training.backend
    backend.hold("write")
    training.step([0])
    backend.await_waiting("write", 1)
    for count in (2, 3):
        training.step([count - 1])
        backend.await_waiting("write", count)
    for row in range(3, N_FRAMES):
        training.step([row])
    assert backend.submitted["write"] == 3
    assert sum(map(sum, (arena.writing for arena in training.pipeline.books.arenas))) < N_FRAMES
    backend.open_gate("write")
    training.step([20])
    training.check_numbers()


def test_a_step_larger_than_the_cache_goes_in_parts_and_says_what_would_do(make: Callable[..., Training]) -> None:
    training = make()
    training.fill_the_disk()
    assert training.step([0]) == 0
    would_do = training.step(list(range(3 * N_FRAMES)))
    training.check_numbers()
    assert would_do // (SPEC.record.record_bytes + FRAME_OVERHEAD_BYTES) >= 3 * N_FRAMES


def test_rows_changed_while_their_write_is_held_are_not_lost(make: Callable[..., Training]) -> None:
    training = make()
    training.backend.hold("write")
    training.step([0, 1])
    training.backend.await_waiting("write", 1)
    training.step([1, 2])
    training.backend.open_gate("write")
    for first in range(8, N_ROWS, N_FRAMES):
        training.step(list(range(first, first + N_FRAMES)))
    training.check_numbers()


def test_wrong_announcements_and_none_give_the_same_numbers(make: Callable[..., Training]) -> None:
    training = make(held_batches=1)
    rnd = np.random.default_rng(3)
    for k in range(60):
        rows = sorted(set(rnd.integers(0, N_ROWS, 6).tolist()))
        said = rows if k % 3 == 0 else sorted(set(rnd.integers(0, N_ROWS, 6).tolist()))
        if k % 3 < 2:
            training.announce(said)
        training.step(rows)
    training.check_numbers()
    assert training.figures().pinned_frames == 0


# Failure.


def test_a_read_that_fails_is_raised_by_the_step_and_ever_after(make: Callable[..., Training]) -> None:
    training = make()
    training.fill_the_disk()
    training.backend.fail_next("read", errno.EIO)
    with pytest.raises(DeviceError) as caught:
        training.step([0, 1])
    assert caught.value.filename == str(training.table.file.path)
    assert caught.value.errno == errno.EIO
    assert caught.value.offset_bytes is not None
    for call in (
        lambda: training.step([50]),
        lambda: training.engine.check_open(),
        lambda: training.engine.checkpoint([None]),
        lambda: training.engine.load(0),
        lambda: training.read(),
    ):
        with pytest.raises(DeviceError) as again:
            call()
        assert (str(again.value), again.value.args) == (str(caught.value), caught.value.args)
    loop = training.pipeline.loop
    training.engine.close()
    assert not loop.alive
    with pytest.raises(ClosedError):
        training.step([50])


def test_a_write_that_fails_behind_a_step_is_raised_by_the_next_call(make: Callable[..., Training]) -> None:
    training = make()
    backend = training.backend
    backend.hold("write")
    backend.fail_next("write", errno.ENOSPC)
    training.step([0, 1])
    backend.await_waiting("write", 1)
    for first in (2, 4, 6):
        training.step([first, first + 1])
    waits = training.watch_waits()
    caught: list[BaseException] = []

    def blocked_step() -> None:
        try:
            training.step([8, 9])
        except DeviceError as error:
            caught.append(error)

    ended = training.in_thread(blocked_step)
    assert waits.wait(LIMIT_S)
    backend.let_through("write")
    assert ended.wait(LIMIT_S)
    assert isinstance(caught[0], DeviceError)
    assert (caught[0].errno, caught[0].filename) == (errno.ENOSPC, str(training.table.file.path))
    assert caught[0].offset_bytes == 0
    with pytest.raises(DeviceError):
        training.engine.checkpoint([None])
    assert training.engine.generation == 0


def test_a_sync_that_fails_is_never_tried_again(make: Callable[..., Training]) -> None:
    training = make()
    training.step([0, 1])
    training.backend.fail_next("sync", errno.EIO)
    with pytest.raises(DeviceError) as caught:
        training.engine.checkpoint([None])
    assert caught.value.filename == str(training.table.file.path)
    syncs = training.backend.submitted["sync"]
    with pytest.raises(DeviceError):
        training.engine.checkpoint([None])
    with pytest.raises(DeviceError):
        training.step([0])
    assert training.backend.submitted["sync"] == syncs


@pytest.mark.parametrize("announced", [True, False])
def test_a_record_changed_on_disk_is_named(make: Callable[..., Training], announced: bool) -> None:
    training = make()
    training.fill_the_disk()
    table = training.table
    offset = int(table.layout.offsets(table.segments.slots[3:4].astype(np.int64))[0])
    with open(table.file.path, "r+b") as file:
        file.seek(offset + 5)
        byte = file.read(1)
        file.seek(offset + 5)
        file.write(bytes([byte[0] ^ 0x10]))
    if announced:
        training.announce([1, 3, 5])
    with pytest.raises(CorruptError) as caught:
        training.step([1, 3, 5])
    for part in ("row 3 ", str(table.file.path), f"byte {offset} "):
        assert part in str(caught.value)
    with pytest.raises(CorruptError):
        training.step([1])
    training.engine.close()


def test_a_read_beyond_a_log_that_was_cut_is_an_error(make: Callable[..., Training]) -> None:
    training = make()
    training.fill_the_disk()
    with open(training.table.file.path, "r+b") as file:
        file.truncate(4096)
    with pytest.raises(DeviceError):
        training.step([0])


# Interrupts.


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in the main thread, where the test runs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals cannot be sent to a thread here")
def test_an_interrupt_of_a_wait_harms_nothing(make: Callable[..., Training]) -> None:
    training = make()
    training.fill_the_disk()
    training.backend.hold("read")
    waits, interrupted = training.watch_waits(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        waits.wait(LIMIT_S)
        training.announce([40])  # takes the lock: the step has begun to wait, and others keep the books meanwhile
        signal.pthread_kill(main, signal.SIGINT)
        while not interrupted.wait(1.0):  # the system may deliver it just before the wait begins: say it again
            signal.pthread_kill(main, signal.SIGINT)

    ended = training.in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        training.step([0, 1])
    interrupted.set()
    assert ended.wait(LIMIT_S)
    training.backend.open_gate("read")
    training.step([0, 1])
    training.step([2])
    training.check_numbers()
    assert training.figures().pinned_frames == 0


def test_an_interrupt_of_an_update_asks_for_a_checkpoint_to_be_loaded(make: Callable[..., Training]) -> None:
    training = make()
    training.fill_the_disk()
    kept = training.truth.copy()
    generation = training.engine.generation
    assert generation is not None

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.step([0, 1, 2], interrupt)
    for call in (lambda: training.step([5]), lambda: training.engine.checkpoint([None])):
        with pytest.raises(UsageError, match="load_state_dict"):
            call()
    training.engine.load(generation)
    training.truth = kept
    training.check_numbers()
    training.step([0, 1, 2])
    training.check_numbers()


def test_an_interrupt_while_new_rows_become_zero_loses_no_frame(make: Callable[..., Training]) -> None:
    training = make()
    fill_new = training.pipeline.log.fill_new
    left = [KeyboardInterrupt()]

    def interrupted(job: Any) -> None:
        if left:
            raise left.pop()
        fill_new(job)

    training.pipeline.log.fill_new = interrupted  # type: ignore[method-assign]
    training.pipeline.loop.submit(_hold_still(training)).result(LIMIT_S)
    with pytest.raises(KeyboardInterrupt):
        training.step([0, 1, 2])
    ended = training.in_thread(lambda: training.step([1, 2, 3]))
    assert ended.wait(LIMIT_S)
    training.check_numbers()


def test_an_interrupt_while_filled_frames_are_noted_is_latched(make: Callable[..., Training]) -> None:
    """Between the flag of a frame and the end of its job: done again, the job would zero what a step has updated."""
    training = make()
    books = training.pipeline.books
    ended = books._reads.ended
    left = [KeyboardInterrupt()]

    def interrupted(*args: Any) -> None:
        if left:
            raise left.pop()
        ended(*args)

    books._reads.ended = interrupted  # type: ignore[method-assign]
    training.pipeline.loop.submit(_hold_still(training)).result(LIMIT_S)
    with pytest.raises(KeyboardInterrupt):
        training.step([0, 1, 2])
    with pytest.raises(UsageError, match="while the engine kept its books"):
        training.step([1, 2, 3])


async def _hold_still(training: Training) -> None:
    """Keep prefetch from taking the job of new rows first."""
    training.pipeline._prefetch._next = lambda: (None, False)  # type: ignore[method-assign]


# Announcing.


def test_many_threads_may_announce_at_once(make: Callable[..., Training]) -> None:
    training = make(known_batches=32)
    training.fill_the_disk()
    go = threading.Barrier(6)
    per_thread = 40

    def announce(seed: int) -> None:
        rnd = np.random.default_rng(seed)
        go.wait(LIMIT_S)
        for _ in range(per_thread):
            training.announce(rnd.integers(0, N_ROWS, 5).tolist())

    ended = [training.in_thread(lambda seed=seed: announce(seed)) for seed in range(5)]  # type: ignore[misc]
    go.wait(LIMIT_S)
    rnd = np.random.default_rng(99)
    for _ in range(30):
        training.step(rnd.integers(0, N_ROWS, 5).tolist())
    assert all(each.wait(LIMIT_S) for each in ended)
    for _ in range(5 * per_thread):
        training.step(rnd.integers(0, N_ROWS, 5).tolist())
    training.check_numbers()
    figures = training.figures()
    assert (figures.window_batches, figures.pinned_frames) == (0, 0)


def test_a_full_window_forgets_and_steps_are_right_all_the_same(make: Callable[..., Training]) -> None:
    training = make(known_batches=2)
    training.fill_the_disk()
    batches = [[k, k + 1, 63 - k] for k in range(10)]
    for rows in batches:
        training.announce(rows)
    assert training.figures().forgotten_batches == 8
    for rows in batches:
        training.step(rows)
    training.check_numbers()
    figures = training.figures()
    assert (figures.window_batches, figures.pinned_frames) == (0, 0)


def test_batches_of_a_lookahead_that_never_step_leave_nothing(make: Callable[..., Training]) -> None:
    training = make()
    training.fill_the_disk()
    for k in range(100):
        ticket = training.announce([k % 50, k % 50 + 1], Kind.AHEAD)
        if k % 2:
            training.engine.hand_out(ticket)
        training.engine.end(ticket)
    training.step([3])
    training.check_numbers()
    figures = training.figures()
    assert (figures.window_batches, figures.pinned_frames) == (0, 0)


def test_forward_passes_that_never_step_stay_bounded(make: Callable[..., Training]) -> None:
    training = make()
    training.fill_the_disk()
    for k in range(400):
        training.announce([k % 50, k % 50 + 1], Kind.HOOK)
    assert training.figures().window_batches <= 256
    training.step([3])
    training.check_numbers()
    figures = training.figures()
    assert (figures.window_batches, figures.pinned_frames) == (0, 0)


def test_announcements_that_no_step_follows_stay_bounded(make: Callable[..., Training]) -> None:
    training = make(known_batches=16)
    for k in range(1000):
        training.announce([k % 50])
    assert training.figures().window_batches <= 2 * 16
    training.step([3])
    training.check_numbers()


@pytest.mark.parametrize("n_frames", [N_FRAMES, N_ROWS])
def test_a_step_with_everything_in_frames_wakes_no_task(make: Callable[..., Training], n_frames: int) -> None:
    # A task that wakes for nothing takes the GIL from the training thread, which costs a small step its own length.
    training = make(n_frames=n_frames, dirty_share=1.0)
    training.step([0, 1, 2, 3])
    woken = training.count_wakes()
    for _ in range(5):
        training.step([0, 1, 2])
    if n_frames == N_ROWS:  # no frame is ever given up: batches are not held either
        for _ in range(5):
            training.announce([1, 2, 3])
        for _ in range(5):
            training.step([1, 2, 3])
    assert not woken
    training.announce([1, 5])
    assert woken
    training.step([1, 5])
    training.check_numbers()


def test_a_step_wakes_write_behind_when_rows_are_to_be_written_and_an_announcement_never(
    make: Callable[..., Training],
) -> None:
    training = make(dirty_share=0.0)
    training.pipeline.run(training.pipeline.flush())  # from here on write-behind rests
    woken = training.count_wakes()
    write = training.pipeline._writebehind.wanted.set
    training.announce([1, 2])
    assert write not in woken
    training.step([1, 2])
    assert write in woken
    training.check_numbers()
