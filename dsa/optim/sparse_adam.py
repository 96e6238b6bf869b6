"""DiskSparseAdam: torch.optim.SparseAdam with its moments on disk."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch._dynamo  # else the first optimizer's constructor imports it, and a traceback there keeps it alive
from torch import Tensor, nn
from torch.optim import Optimizer

from dsa.config import IOConfig
from dsa.errors import UsageError
from dsa.io.cache import FRAME_OVERHEAD_BYTES
from dsa.io.cache_budget import cache_bytes as parse_cache
from dsa.io.engine import Engine
from dsa.io.statistics import Statistics
from dsa.io.window import Kind
from dsa.optim import parameters, state_dicts
from dsa.optim.books import Books
from dsa.optim.hooks import WatchHandle
from dsa.optim.hooks import watch as watch_modules
from dsa.optim.lookahead import Lookahead
from dsa.optim.placement import check_updates
from dsa.optim.row_sets import Key, Rows, TableDirectory, resolve
from dsa.optim.staged_update import updater
from dsa.optim.tracing import stage
from dsa.optim.warm_up import warm_up
from dsa.optim.work import collect, in_frames

_log = logging.getLogger("dsa")


class DiskSparseAdam(Optimizer):
    """The numbers of `torch.optim.SparseAdam`, with both moments in files instead of RAM.

    A step updates exactly the rows that the sparse gradient holds, in SparseAdam's order of operations (Kingma and
    Ba, "Adam: A Method for Stochastic Optimization", as torch.optim.SparseAdam applies it to sparse gradients), so
    that weights and moments are the same to the last bit, whatever the cache, the announcements or the backend (with
    `kernel="fast"` weights may differ a step by 1 ulp of weight or change). Parameters in bf16 and fp16 have moments in
    fp32: their numbers are those of SparseAdam on fp32 copies of weights and gradients, the weights rounded after each
    step.

    Args:
        params: parameters, (name, parameter) pairs as `model.named_parameters()` gives them, or groups of either;
            each a dense fp32, fp64, bf16 or fp16 tensor whose gradients are sparse. Rows are its first dimension.
        lr, betas, eps, maximize: as SparseAdam's; lr may be a tensor of one element.
        state_dir: directory of the moments; made where missing, resolved now. One optimizer at a time owns it.
        cache: RAM for records, all tables together: bytes, a text such as "2GiB", or "auto": the least of the whole
            state, a quarter of the memory available (control groups included) and 2 GiB.
        existing: what becomes of state that `state_dir` already holds: "load" waits for `load_state_dict`, "resume"
            goes on from its newest generation, "discard" starts anew.
        backend: "auto" (the one that io's probe chose, if it works here, else the best that does), or the name of one:
            "uring", "threads" or "aiofiles".
        kernel: "auto", "exact", "fast" or "reference": how the update is carried out.
        staging: the double buffer in pinned memory, through which moments go to parameters on CUDA and back: "auto"
            uses it for those; "on" also for parameters on the CPU, whose copies and updates then finish late and out of
            order as an accelerator's may (to test with); "off" copies what a step needs in the step. Where a parameter
            is, is looked at in each step. On other accelerators the update is done on the CPU.
        keep_generations: how many checkpoints handed out stay loadable, the newest; None: all, until `release`.
        io: knobs of the I/O engine; with `IOConfig(grow_tables=True)` tables that have grown (more rows, of the same
            width) are taken over, from a generation or a SparseAdam state dict, their new rows with zero moments.

    Raises:
        ConfigError: a value that cannot be meant (nothing was touched).
        StateLockedError: another optimizer owns `state_dir`.
        FormatError, CorruptError: `state_dir` holds files of others, or damaged ones.
        MismatchError: with existing="resume", the state belongs to other parameters.
        DeviceError: the disk failed.
        UsageError: torch.distributed runs several processes.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        state_dir: str | os.PathLike[str],
        cache: int | str = "auto",
        existing: str = "load",
        backend: str = "auto",
        kernel: str = "auto",
        staging: str = "auto",
        keep_generations: int | None = 2,
        io: IOConfig | None = None,
        **unsupported: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize}
        parameters.check_hyperparameters({**defaults, **unsupported})
        if unsupported:
            raise TypeError(f"DiskSparseAdam() got an unexpected keyword argument {next(iter(unsupported))!r}")
        parameters.check_choices(staging, keep_generations, io)
        parameters.refuse_several_processes()
        super().__init__(params, defaults)
        pairs = parameters.named(self.param_groups)
        check_updates(pairs, staging, kernel)
        specs = [parameters.spec(name, param) for name, param in pairs]
        if not any("param_names" in group for group in self.param_groups):
            parameters.warn_of_lookalikes(pairs)
        state_bytes = sum(spec.n_rows * (spec.record.record_bytes + FRAME_OVERHEAD_BYTES) for spec in specs)
        compile_s = warm_up(pairs, kernel)
        _log.info("compiled or loaded all kernels in %.2f s", compile_s)
        engine = Engine(
            state_dir,
            specs,
            cache_bytes=parse_cache(cache, state_bytes),
            existing=existing,
            backend=backend,
            keep_generations=keep_generations,
            config=io or IOConfig(),
        )
        tables, resumed = TableDirectory(pairs), existing == "resume"
        self._books = Books(engine, kernel, staging, tables, compile_s=compile_s, unchecked_weights=resumed)
        self._books.place_tables()
        engine.trace_with(stage)
        self._refresh_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do; the cache is divided anew.

        Raises:
            ConfigError: a parameter or value that the constructor would refuse.
        """
        if isinstance(param_group, dict) and "params" in param_group:
            parameters.check_group(param_group, self.defaults, len(self.param_groups))
        before = len(self.param_groups)
        books: Books | None = self.__dict__.get("_books")
        if books is not None:
            books.engine.check_open()
        super().add_param_group(param_group)
        if books is None:
            return  # inside the constructor: it makes the tables when it knows them all
        try:
            books.add_tables(parameters.named(self.param_groups))
        except BaseException:
            del self.param_groups[before:]
            raise
        self._refresh_state()

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Carry out one step; returns what `closure` returns.

        Waits only for rows that are not in frames yet. A failed step may leave weights and moments mixed: its error
        says so.

        With parameters on an accelerator the host waits for it where the gradient's rows come to the host, for there a
        wrong announcement is found: once for those of all parameters, after `coalesce()`, which waits for the number of
        distinct rows as it does in SparseAdam's own step. (A learning rate that is a tensor on the device is waited for
        too.) Where the rows were announced it waits for nothing else: copies and the update are ordered by events.
        Rows that were not announced go in parts, which wait for earlier steps' records of the same rows to be back.

        Raises:
            UsageError: a dense gradient, or one of another shape (nothing was changed).
            StateExistsError: `state_dir` holds state and nobody said what is to become of it.
            MismatchError: that state belongs to other parameters.
            CorruptError, DeviceError: the disk; also of earlier work in the background.
            torch.OutOfMemoryError: an accelerator has no memory for the update itself; the next call says what to do.
        """
        books = self._books
        books.engine.check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        books.engine.check_decided()
        began = time.perf_counter()
        with stage("dsa::gradient"):
            work, rows = collect(self.param_groups, books)
        books.gradient_s += time.perf_counter() - began
        if books.unchecked_weights:
            books.compare_weights()
        books.place_tables()
        on_device = updater(work) if books.engine.stages else None
        try:
            books.warn_parts(books.engine.step(rows, in_frames(work, books), list(work), on_device))
        finally:
            for number in work:
                self.state[books.tables.tables[number].parameter]["step"] = books.engine.steps_of(number)
        books.judge_announcements()
        books.warn_pageable()
        books.warn_refused()
        return loss

    # Announcing.

    def announce(self, rows: Mapping[Any, Rows]) -> None:
        """Say which rows one coming step will touch; a hint, used up first in first out by one step. Never blocks.

        Args:
            rows: module (with exactly one managed parameter), parameter or name -> integer tensor, array or list.

        Raises:
            ConfigError: an unknown key, rows that are no integers or out of range.
            UsageError: a module or parameter that does not mean exactly one of the optimizer's.
        """
        books = self._books
        books.engine.check_open()
        books.engine.announce(Kind.ANNOUNCED, resolve(rows, books.tables))

    def lookahead(
        self, loader: Iterable[Any], rows: Callable[[Any], Mapping[Any, Rows]] | None = None, depth: int | None = 4
    ) -> Lookahead[Any]:
        """The batches of `loader`, each announced `depth` batches before its turn; the same numbers at every depth.

        Args:
            loader: any iterable of batches; may be iterated again.
            rows: `rows(batch)` gives what `announce` takes; None for a loader with `collate_with_rows`.
            depth: batches fetched ahead, 0 or more; None: up to 64, and as many of them held as hide the reads.

        Raises:
            ConfigError: `rows` or `depth` cannot be meant.
        """
        self._books.engine.check_open()
        return Lookahead(loader, rows, self._books.announcer, depth)

    def watch(self, model: nn.Module) -> WatchHandle:
        """Let the embeddings in `model` announce what each forward pass looks up; acts at once.

        Those are nn.Embedding and nn.EmbeddingBag, in training mode, with gradients enabled; what torch.compile has
        compiled announces nothing. Look-ups on an accelerator are copied to the host, which waits for them.

        Returns:
            A handle with `remove()`; also a context manager.

        Raises:
            UsageError: no embedding in `model` has a weight that this optimizer manages.
        """
        self._books.engine.check_open()
        return watch_modules(model, self._books.announcer, self._books.tables)

    # Checkpoints.

    def checkpoint(self) -> int:
        """Make the present state a generation, durable when this returns; its number (the same where no step came).

        Raises:
            StateExistsError: nothing says what is to become of the state in `state_dir`.
            DeviceError: the disk failed; the generations before are still there.
        """
        books = self._books
        books.engine.check_open()
        books.engine.check_decided()
        number = books.engine.checkpoint(books.fingerprints(), settle=True)
        self._refresh_state()
        return number

    def generations(self) -> tuple[int, ...]:
        """The generations that there are, oldest first; loading one tells where its index cannot be read."""
        return self._books.engine.generations()

    def release(self, generation: int) -> None:
        """Give up a generation, and the disk space that only it needs.

        Raises:
            MismatchError: it is not there.
            UsageError: the state descends from it.
        """
        self._books.engine.release(generation)

    def state_dict(self) -> dict[str, Any]:
        """Kilobytes that name a generation; makes a checkpoint, where a step came since the last one."""
        books = self._books
        if not books.engine.closed:
            books.engine.check_open()
            if books.engine.decided:
                books.engine.checkpoint(books.fingerprints())
                self._refresh_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to the generation that a `state_dict()` names, or take over a torch.optim.SparseAdam state dict.

        Raises:
            MismatchError: another directory, other tables, or a generation that is gone.
            ConfigError: not a state dict, or other parameter groups.
            StateExistsError: a SparseAdam state dict, or an empty one, while `state_dir` holds state and nobody said
                what is to become of it: such a dict names no generation.
            CorruptError, DeviceError: the generation cannot be read.
        """
        books = self._books
        books.engine.check_open_or_failed()
        state_dicts.check_groups(self.param_groups, state_dict)
        state = state_dicts.by_number(state_dict)
        state_dicts.load(books.engine, books.tables, state)
        books.unchecked_weights = state_dicts.names_generation(state)
        super().load_state_dict({**state_dict, "state": {}})
        self._refresh_state()

    def export_state_dict(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any] | None:
        """The state as torch.optim.SparseAdam's state dict.

        Args:
            path: None: returned, with dense moments in RAM. Else written there as torch.save does, without holding the
                moments in RAM, and None is returned.
        """
        books = self._books
        books.engine.check_open()
        books.engine.check_decided()
        groups = super().state_dict()["param_groups"]
        if path is None:
            return state_dicts.export(books.engine, books.tables, groups)
        state_dicts.export_to(books.engine, books.tables, groups, Path(path))
        return None

    def moments(self, param: Key, rows: Rows) -> dict[str, Tensor]:
        """Both moments of some rows, copied.

        Args:
            param: module, parameter or name.
            rows: integer tensor, array or list, of n rows in any order.

        Returns:
            {"exp_avg": ..., "exp_avg_sq": ...}, each [n, *the parameter's other dimensions], fp32 (fp64 for fp64).
        """
        books = self._books
        books.engine.check_open()
        books.engine.check_decided()
        return state_dicts.moments(books.engine, books.tables, param, rows)

    def statistics(self) -> Statistics:
        """What was done so far, in figures."""
        return self._books.statistics()

    def _refresh_state(self) -> None:
        self.state.update(state_dicts.own_state(self._books.engine, self._books.tables))

    # The end.

    def close(self) -> None:
        """Commit what steps did since the last checkpoint, and end everything; again and again, if need be.

        An interrupt that comes before it was all committed ends nothing: call it again.

        Raises:
            DsaError: what had failed in the background; everything is ended all the same, and nothing was committed.
        """
        self._close(commit=True)

    def _close(self, *, commit: bool) -> None:
        books = self._books
        if commit and not books.engine.closed:
            try:
                books.engine.check_open()
                if books.engine.decided:
                    books.engine.checkpoint(books.fingerprints(), counted=False)
                    self._refresh_state()
            except Exception:
                books.engine.close()
                raise
        books.engine.close()

    def __enter__(self) -> DiskSparseAdam:
        self._books.engine.check_open_or_failed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(commit=kind is None)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a DiskSparseAdam cannot be copied or pickled: its moments are files with one owner; use state_dict(), and "
            "load_state_dict() on an optimizer with the same state_dir"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(4)
