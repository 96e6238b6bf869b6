"""What an optimizer keeps besides torch's own state: the engine, its tables, and what it has warned of."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsa.io.engine import Engine
from dsa.io.statistics import Statistics
from dsa.io.window import Kind
from dsa.optim.fingerprint import fingerprint
from dsa.optim.kernels import choose_kernel
from dsa.optim.parameters import spec
from dsa.optim.placement import check_updates, device_of_update
from dsa.optim.row_sets import Key, Rows, Table, TableDirectory, resolve_sorted
from dsa.optim.sorting import Sorted
from dsa.optim.warm_up import warm_up

MOST_LOOK_UPS = 3 << 18
"""In all batches that wait for their turn: the order of so many is kept, 24 bytes each; others are sorted later."""
_USELESS_STEPS = 4
_TRIED_AGAIN = 256  # one announcement in so many
_JUDGED_STEPS = 10
_LEAST_SHARE = 0.9


class Books:
    """All of the optimizer's own state that changes (tools copy an optimizer's `__dict__`, and this stays one).

    Args:
        compile_s: what compiling took.
        unchecked_weights: a generation was loaded and no step has come since.
    """

    def __init__(
        self,
        engine: Engine,
        kernel: str,
        staging: str,
        tables: TableDirectory,
        *,
        compile_s: float,
        unchecked_weights: bool,
    ) -> None:
        self.engine = engine
        self.kernel = kernel
        self.staging = staging
        self.tables = tables
        self.announcer = Announcer(engine, tables)
        self.gradient_s = 0.0
        self.compile_s = compile_s
        self.unchecked_weights = unchecked_weights
        self.warned_share = False
        self.warned_parts = False
        self.warned_pageable = False
        self.warned_refused = False

    def add_tables(self, pairs: list[tuple[str, Tensor]]) -> None:
        """Take the tables of those that have none yet, all or none; the cache is divided anew.

        Args:
            pairs: all of the optimizer's, names and parameters; the first have tables.

        Raises:
            ConfigError: a parameter that cannot be updated where it is.
        """
        added = pairs[len(self.tables.tables) :]
        check_updates(added, self.staging, self.kernel)
        warm_up(added, self.kernel)
        self.engine.add_tables([spec(name, param) for name, param in added])
        self.tables = self.announcer.tables = TableDirectory(pairs)

    def place_tables(self) -> None:
        """Have each update where its parameter is now; `model.to()` keeps parameters and moves them."""
        for table in self.tables.tables:
            self.engine.place(table.number, device_of_update(table.parameter, self.staging, self.kernel))

    def statistics(self) -> Statistics:
        """What was done so far, in figures."""
        kernels = "+".join(sorted({self._kernel_of(table) for table in self.tables.tables}))
        return self.engine.statistics(gradient_s=self.gradient_s, compile_s=self.compile_s, kernel=kernels)

    def _kernel_of(self, table: Table) -> str:
        # Staged rows are updated by the reference kernel's arithmetic.
        asked_for = "reference" if self.engine.stages_table(table.number) else self.kernel
        return choose_kernel(asked_for, table.parameter).name

    def warn_pageable(self) -> None:
        """Warn, once, where memory for staging could not be pinned."""
        if not self.warned_pageable and not self.engine.pinned:
            self.warned_pageable = True
            warnings.warn(
                "the system gave no pinned memory for the staging buffers: copies to the device and back make the host "
                "wait; `ulimit -l`, or smaller batches, may mend it",
                stacklevel=4,
            )

    def warn_refused(self) -> None:
        """Warn, once, where the device had no memory for the records of a batch."""
        if not self.warned_refused and self.engine.device_refused:
            self.warned_refused = True
            warnings.warn(
                "the device had no memory to stage the moments of a batch ahead of its step: such steps go in parts, "
                "which the host waits for; smaller batches, or a model that takes less at its peak, would avoid it",
                stacklevel=4,
            )

    def fingerprints(self) -> list[int]:
        return [fingerprint(table.parameter) for table in self.tables.tables]

    def warn_parts(self, cache_bytes: int) -> None:
        """Warn, once, that a step was done in parts (0: it was not); a cache of so many bytes would have avoided it."""
        if cache_bytes and not self.warned_parts:
            self.warned_parts = True
            warnings.warn(
                f"a step touches more rows than the cache has frames and is done in parts, each waiting for the disk; "
                f"cache={cache_bytes} bytes or more would avoid it",
                stacklevel=5,
            )

    def compare_weights(self) -> None:
        """Warn where the weights are not those that the loaded generation was saved with; once after each loading."""
        self.unchecked_weights = False
        for table in self.tables.tables:
            stored = self.engine.fingerprint_of(table.number)
            if stored is not None and stored != fingerprint(table.parameter):
                warnings.warn(
                    f"the weights of {table.name!r} are not those that the moments of generation "
                    f"{self.engine.generation} in {self.engine.path} were saved with: model and optimizer come from "
                    "different checkpoints; load both from the same one",
                    stacklevel=5,
                )

    def judge_announcements(self) -> None:
        """Warn, once, where announcements miss much of what steps touch."""
        if self.warned_share:
            return
        steps, share = self.engine.announced_lately()
        if steps >= _JUDGED_STEPS and share < _LEAST_SHARE:
            self.warned_share = True
            warnings.warn(
                f"only {share:.0%} of the rows that steps touched had been announced: the rows function misses rows "
                "(are negatives drawn in the model? then draw them in the loader's collate function, or use watch(); "
                "are all tables announced, each by its own key?)",
                stacklevel=5,
            )


class Announcer:
    """What lookahead and hooks announce to; it does not refer to what refers to it, so that all of it ends at once."""

    def __init__(self, engine: Engine, tables: TableDirectory) -> None:
        self.tables = tables
        self.handed_out: dict[int, Sorted] = {}  # the look-ups of the batch handed out last, by table
        self._sorted: dict[int, tuple[int, dict[int, Sorted]]] = {}  # by ticket, with their number
        self._useless: dict[int, int] = {}  # by table: gradients in a row that had another order
        self._announced = 0
        self._engine = engine

    def announce_ahead(self, rows: Mapping[Key, Rows], hand_out: int | None = None) -> int:
        self._engine.check_open()
        self._announced += 1
        kept = sum(look_ups for look_ups, _ in list(self._sorted.values()))
        found = resolve_sorted(rows, self.tables, self._unordered(), MOST_LOOK_UPS - kept)
        ticket = self._engine.announce(Kind.AHEAD, {number: batch.rows for number, batch in found.items()}, hand_out)
        if hand_out is not None:
            self._take_up(hand_out)
        look_ups = sum(len(batch.order) for batch in found.values())
        if ticket:
            self._sorted[ticket] = look_ups, found
        return ticket

    def hand_out(self, ticket: int) -> None:
        self._take_up(ticket)
        self._engine.hand_out(ticket)

    def _take_up(self, ticket: int) -> None:
        _, self.handed_out = self._sorted.pop(ticket, (0, {}))

    def order_was_of_use(self, table: int, of_use: bool) -> None:
        """Whether a gradient had the look-ups of the batch handed out, in their order.

        Where a table is looked up several times in a step it never has: torch merges such gradients. To find the order
        takes most of the time of an announcement, so after some such steps it is tried now and then only.
        """
        self._useless[table] = 0 if of_use else self._useless.get(table, 0) + 1

    def _unordered(self) -> set[int]:
        if self._announced % _TRIED_AGAIN == 0:
            return set()
        return {table for table, steps in self._useless.items() if steps >= _USELESS_STEPS}

    def end(self, ticket: int) -> None:
        self._sorted.pop(ticket, None)  # one instruction: this may come out of a garbage collection
        self._engine.end(ticket)

    def announce_hook(self, table: int, rows: NDArray[np.int64]) -> None:
        if not self._engine.closed:
            self._engine.check_open()
            self._engine.announce(Kind.HOOK, {table: rows})
