"""The cleanings of write-behind: one after the other, as long as they are due, and no more for a checkpoint."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dsa.io.writebehind import WriteBehind

TABLE: Any = SimpleNamespace(segments=SimpleNamespace(far_over_limit=lambda: False))


class Log:
    """A log and its bookkeeping: so many cleanings are due, and none ends before the gate is open."""

    def __init__(self, due: int) -> None:
        self.due, self.cleaned = due, 0
        self.draining = False
        self.gate = asyncio.Event()
        self.failure: Exception | None = None

    def next_clean(self, table: Any) -> Any:
        self.due -= 1
        return SimpleNamespace(table=table) if self.due >= 0 else None

    async def clean(self, job: Any) -> None:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.cleaned += 1


class Access:
    def __init__(self, log: Log) -> None:
        self._log = log

    def __enter__(self) -> Any:
        return self._log

    def __exit__(self, *error: object) -> None:
        pass


def begun(log: Log, latched: list[BaseException]) -> tuple[WriteBehind, asyncio.Task[None]]:
    access: Any = Access(log)
    moves: Any = log
    behind = WriteBehind(access, moves, None, latched.append)
    behind._clean(TABLE)
    task = behind._cleaning
    assert task is not None
    behind._clean(TABLE)  # one at a time
    assert behind._cleaning is task
    return behind, task


async def test_one_cleaning_follows_the_other_without_a_write_between() -> None:
    log = Log(due=4)
    _, task = begun(log, [])
    log.gate.set()
    await task
    assert log.cleaned == 4


async def test_a_checkpoint_waits_for_the_cleaning_that_runs_and_for_no_other() -> None:
    log = Log(due=4)
    behind, task = begun(log, [])
    await asyncio.sleep(0)
    log.draining = True
    log.gate.set()
    await behind._land(0)
    assert task.done()
    assert log.cleaned == 1


async def test_a_cleaning_that_fails_is_the_last_and_ends_who_waits_for_it() -> None:
    log = Log(due=4)
    log.failure = OSError(5, "broken")
    latched: list[BaseException] = []
    behind, _ = begun(log, latched)
    waiting = asyncio.ensure_future(behind._cleaned.wait())
    log.gate.set()
    await waiting
    assert (log.cleaned, log.due, latched) == (0, 3, [log.failure])
    with pytest.raises(OSError, match="broken"):
        await behind._land(0)
