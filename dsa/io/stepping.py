"""Steps, and reads of rows, with the training thread's part in them: wait, update, commit.

One thread at a time; the engine's face sees to that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsa.errors import UsageError
from dsa.io.cache import FRAME_OVERHEAD_BYTES, Frames, Rows
from dsa.io.devices import open_device
from dsa.io.jobs import Step
from dsa.io.pipeline import Pipeline
from dsa.io.staging import Staging
from dsa.io.staging import Update as OnDevice
from dsa.io.state import State
from dsa.io.window import Piece

Update = Callable[[int, NDArray[np.int64], Frames], None]
Updated = Sequence[tuple[Piece, NDArray[np.int64]]]


class Stepping:
    """What runs steps on one state directory.

    Args:
        pipeline: stopped by the caller.
        state: the tables' state; steps that change it are counted there.
    """

    def __init__(self, pipeline: Pipeline, state: State) -> None:
        self.update_s = 0.0
        self.commit_s = 0.0
        self.stage: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
        self._pipeline = pipeline
        self._state = state
        self._stagings: dict[torch.device, Staging] = {}
        self._staging_of: dict[int, Staging] = {}  # by table, those that are staged
        self._device_of: dict[int, torch.device] = {}

    # Where updates are carried out.

    def device_of(self, table: int) -> torch.device | None:
        """The device that the table's updates are staged on; None: they are carried out in frames."""
        return self._device_of.get(table)

    def place(self, table: int, device: torch.device | None) -> None:
        """Say where the table's updates are carried out from now on."""
        staging = self._staging_of.get(table)
        with self._state.without_staging():
            if staging is not None:
                staging.remove_table(table)
                del self._staging_of[table], self._device_of[table]
            if device is not None:
                found = self._stagings.get(device)
                if found is None:
                    found = self._stagings[device] = self._pipeline.add_staging(open_device(device))
                found.add_table(table)
                self._staging_of[table], self._device_of[table] = found, device

    @property
    def stages(self) -> bool:
        """Whether any table is staged on a device."""
        return bool(self._staging_of)

    # Stepping and reading.

    def run(
        self, rows_by_table: Mapping[int, Rows], update: Update, counts: Sequence[int], on_device: OnDevice | None
    ) -> int:
        """As `Engine.step`."""
        self._state.refuse_unclaimed()
        pipeline = self._pipeline
        pipeline.await_interrupted()
        counted, whole = False, False

        def count() -> None:
            nonlocal counted
            if not counted:
                counted = True
                self._count(counts)

        updated: list[tuple[Piece, NDArray[np.int64]]] = []  # to be committed before a wait; the end does so itself
        try:
            with pipeline.access as books:
                pipeline.settle_ended_locked(books)
                step = books.begin(rows_by_table, lasting=True)
                # What is in frames is leased at once: so a step with everything in cache takes the lock twice.
                there = books.lease_ready() if on_device is None else {}
            if on_device is not None:
                self._step_ahead(step, on_device, count)
            for piece in step.batch.pieces:
                staging = self._staging_of.get(piece.table) if on_device is not None else None
                left = piece.remaining
                while left:
                    leased = there.pop(piece.table, None)
                    if leased is None:
                        if updated:
                            self._commit(updated)
                            updated.clear()
                        with self.stage("dsa::wait"):
                            leased = pipeline.await_rows(step, piece)
                    positions, frames = leased
                    count()
                    began = time.perf_counter()
                    with self.stage("dsa::update"):
                        if staging is not None and on_device is not None:
                            staging.step_part(piece, positions, on_device)
                            left = piece.remaining
                        else:
                            update(piece.table, positions, frames)
                            updated.append((piece, positions))
                            left -= len(positions)
                    self.update_s += time.perf_counter() - began
            count()
            books.reach.stepped(
                time.perf_counter(), waited_s=pipeline.wait_s, idle_s=pipeline.idle_s, announced=step.announced
            )
            whole = True
        finally:
            self._end(whole)
        return self._needed_cache_bytes(rows_by_table) if step.in_parts else 0

    def _commit(self, updated: Updated) -> None:
        """What a step has updated is done: others may have its frames."""
        began = time.perf_counter()
        with self.stage("dsa::commit"), self._pipeline.access as books:
            for piece, positions in updated:
                books.commit(piece, positions)
        self.commit_s += time.perf_counter() - began

    def _step_ahead(self, step: Step, on_device: OnDevice, count: Callable[[], None]) -> None:
        """Update what is staged for the step, and have the rest ready for going in parts."""
        for staging in self._pipeline.stagings:
            pieces = [piece for piece in step.batch.pieces if piece.table in staging.tables]
            began, waited_before = time.perf_counter(), staging.waited_s
            with self.stage("dsa::update"):
                staging.step_ahead(step, on_device, count)
            staging.await_back([piece for piece in pieces if piece.remaining])
            waited_s = staging.waited_s - waited_before
            self._pipeline.wait_s += waited_s
            self.update_s += time.perf_counter() - began - waited_s

    def _count(self, counts: Sequence[int]) -> None:
        # A step that no parameter had a gradient for leaves the state as it was.
        for table in counts:
            self._pipeline.books.tables[table].step += 1
        if counts:
            self._state.uncommitted(self._state.steps_since_commit + 1)

    def _end(self, whole: bool) -> None:
        """End what runs; an interrupt may have come as early as its beginning, or before."""
        pipeline = self._pipeline
        step = pipeline.books.step
        if step is None:
            return
        began = time.perf_counter()
        if not whole and step.leased and step.lasting:
            pipeline.latch.note(
                UsageError(
                    f"a step of {self._state.path} was interrupted after it had begun to update: weights and moments "
                    "are mixed; load_state_dict() a checkpoint together with the model, or close() and resume"
                )
            )
        with self.stage("dsa::commit"), pipeline.access as books:
            books.end_step()
            pipeline.moved_on_locked(books)
        self.commit_s += time.perf_counter() - began

    def _needed_cache_bytes(self, rows_by_table: Mapping[int, Rows]) -> int:
        needed: dict[int, int] = {}
        for number, rows in rows_by_table.items():
            arena = self._pipeline.books.tables[number].arena
            needed[id(arena)] = needed.get(id(arena), 0) + len(rows)
        shares = [needed[id(arena)] / arena.n_frames for arena in self._pipeline.books.arenas if id(arena) in needed]
        arenas = self._pipeline.books.arenas  # of a tiny cache they hold more: one frame each at least
        held = sum(arena.n_frames * (arena.memory.shape[1] + FRAME_OVERHEAD_BYTES) for arena in arenas)
        return int(max(self._state.cache_bytes, held) * max(shares)) + FRAME_OVERHEAD_BYTES

    def read(self, table: int, rows: Rows, out: NDArray[np.uint8]) -> None:
        """As `Engine.read`."""
        pipeline = self._pipeline
        for staging in pipeline.stagings:
            staging.drain()
        try:
            with pipeline.access as books:
                step = books.begin({table: rows}, lasting=False)
            for piece in step.batch.pieces:
                while piece.remaining:
                    positions, frames = pipeline.await_rows(step, piece)
                    out[positions] = pipeline.books.tables[table].arena.memory[frames]
                    with pipeline.access as books:
                        books.commit(piece, positions)
        finally:
            self._end(True)
