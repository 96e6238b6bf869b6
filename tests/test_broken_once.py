"""What a hunt for defects once found, so that it stays mended."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import sparse
from torch import Tensor, nn

from dsa import DiskSparseAdam
from dsa.errors import ClosedError, ConfigError, MismatchError, UsageError
from dsa.io.access import Access

ROWS, WIDTH = 20, 4


def table(width: int = WIDTH) -> nn.Parameter:
    return nn.Parameter(torch.zeros(ROWS, width))


def step(optimizer: DiskSparseAdam, rows: tuple[int, ...] = (1, 2)) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = sparse(rows, torch.ones(len(rows), *param.shape[1:], dtype=param.dtype), param.shape)
    optimizer.step()


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "more rows": lambda data: torch.zeros(ROWS + 10, WIDTH),
    "fewer rows": lambda data: torch.zeros(ROWS - 10, WIDTH),
    "wider": lambda data: torch.zeros(ROWS, WIDTH + 2),
    "another dtype": lambda data: data.double(),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_parameter_that_changed_is_refused_not_written_past_its_records(tmp_path: Path, change: str) -> None:
    param = table()
    with DiskSparseAdam([("emb", param)], state_dir=tmp_path) as optimizer:
        step(optimizer)
        moments, data = optimizer.moments("emb", [1]), param.data
        param.grad, param.data = None, CHANGED[change](param.data)
        calls: list[Callable[[], Any]] = [
            lambda: step(optimizer),
            lambda: optimizer.moments("emb", [1]),
            lambda: optimizer.export_state_dict(),
        ]
        for call in calls:
            with pytest.raises(UsageError, match=r"'emb'.*its table was made for float32 of shape"):
                call()
        param.grad, param.data = None, data
        assert torch.equal(optimizer.moments("emb", [1])["exp_avg"], moments["exp_avg"])
        step(optimizer)


def test_a_lock_that_an_interrupt_left_behind_is_let_go_and_told_of(tmp_path: Path) -> None:
    optimizer = DiskSparseAdam([("emb", table())], state_dir=tmp_path)
    step(optimizer)
    state_dict = optimizer.state_dict()
    access = optimizer._books.engine._pipeline.access
    access.__enter__()  # and the interrupt comes before the `with` it belongs to has begun, or as it ends
    with pytest.raises(UsageError, match="an interrupt came while the engine kept its books"):
        optimizer.step()
    optimizer.load_state_dict(state_dict)
    step(optimizer)
    access.__enter__()
    with pytest.raises(UsageError, match="an interrupt came"):
        optimizer.close()
    with DiskSparseAdam([("emb", table())], state_dir=tmp_path) as again:
        again.load_state_dict(state_dict)


def test_a_group_whose_second_table_is_refused_leaves_nothing_of_its_first(tmp_path: Path) -> None:
    pairs = [(name, table()) for name in "abc"]
    with DiskSparseAdam(pairs, state_dir=tmp_path) as optimizer:
        step(optimizer)
    with DiskSparseAdam(pairs[:1], state_dir=tmp_path, existing="resume") as optimizer:
        with pytest.raises(MismatchError, match="'c'"):
            optimizer.add_param_group({"params": [pairs[1], ("c", table(WIDTH + 1))]})
        optimizer.add_param_group({"params": [("new", table())]})  # no generation has it
        optimizer.add_param_group({"params": pairs[1:]})
        step(optimizer)
        steps = {entry["table"]: entry["step"] for entry in optimizer.state.values()}
        assert steps == {"a": 2, "b": 2, "c": 2, "new": 1}
        optimizer.checkpoint()
        assert float(optimizer.moments("c", [1])["exp_avg"][0, 0]) == pytest.approx(0.19)


MEND: dict[str, dict[str, Any]] = {
    "step NaN": {"step": float("nan")},
    "step negative": {"step": -3},
    "step a fraction": {"step": 1.5},
    "step None": {"step": None},
    "moment a list": {"exp_avg": [1.0]},
    "moment sparse": {"exp_avg": torch.zeros(ROWS, WIDTH).to_sparse()},
    "moment without data": {"exp_avg": torch.zeros(ROWS, WIDTH, device="meta")},
    "moment complex": {"exp_avg_sq": torch.zeros(ROWS, WIDTH, dtype=torch.complex64)},
}


@pytest.mark.parametrize("what", MEND)
def test_a_damaged_state_dict_of_sparse_adam_is_refused_before_anything_is_replaced(tmp_path: Path, what: str) -> None:
    with DiskSparseAdam([("emb", table())], state_dir=tmp_path) as optimizer:
        step(optimizer)
        before = optimizer.export_state_dict()
        damaged = optimizer.export_state_dict()
        assert before is not None
        assert damaged is not None
        damaged["state"][0].update(MEND[what])
        with pytest.raises(MismatchError, match=f"{next(iter(MEND[what]))} of 'emb' must be"):
            optimizer.load_state_dict(damaged)
        after = optimizer.export_state_dict()
        assert after is not None
        assert after["state"][0]["step"] == 1
        assert torch.equal(after["state"][0]["exp_avg"], before["state"][0]["exp_avg"])


@pytest.mark.parametrize("change", [{"generation": 1.5}, {"generation": "1"}, None])
def test_a_damaged_state_dict_is_refused(tmp_path: Path, change: dict[str, Any] | None) -> None:
    with DiskSparseAdam([("emb", table())], state_dir=tmp_path) as optimizer:
        step(optimizer)
        state_dict = optimizer.state_dict()
        state_dict["state"] = {0: change and {**state_dict["state"][0], **change}}
        with pytest.raises(MismatchError, match="it is damaged"):
            optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("name", ["\ud800", 1])
def test_a_name_that_no_file_can_hold_is_refused_before_the_disk_is_touched(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ConfigError, match="name must be a str"):
        DiskSparseAdam([(name, table())], state_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("rows", [torch.ones(2, dtype=torch.int64).to_sparse(), torch.empty(1, device="meta")])
def test_tensors_that_are_no_list_of_rows_are_refused(tmp_path: Path, rows: Tensor) -> None:
    with (
        DiskSparseAdam([("emb", table())], state_dir=tmp_path) as optimizer,
        pytest.raises(ConfigError, match="rows of 'emb' must be integers"),
    ):
        optimizer.announce({"emb": rows})


def test_a_step_after_an_interrupted_checkpoint_is_not_in_its_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskSparseAdam([("emb", table())], state_dir=tmp_path) as optimizer:
        step(optimizer)
        writebehind = optimizer._books.engine._pipeline._writebehind
        drain = writebehind.drain
        entered, go_on = threading.Event(), threading.Event()

        async def held_back() -> None:
            entered.set()
            await asyncio.to_thread(go_on.wait)
            await drain()

        def interrupted(future: concurrent.futures.Future[Any], timeout: float | None = None) -> Any:
            entered.wait()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(writebehind, "drain", held_back)
            patch.setattr(concurrent.futures.Future, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.checkpoint()
        stepping = threading.Thread(target=step, args=(optimizer,))
        stepping.start()
        stepping.join(0.1)  # however long: the step ends only after the checkpoint
        assert stepping.is_alive()
        go_on.set()
        stepping.join()
        manifest = optimizer._books.engine._state._manifest()
        assert [(g.number, g.tables[0].step) for g in manifest.generations if g.number] == [(1, 1)]
        assert optimizer.checkpoint() == 2


def test_loading_that_is_interrupted_can_be_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    param = table()
    with DiskSparseAdam([("emb", param)], state_dir=tmp_path) as optimizer:
        step(optimizer)
        state_dict, weights = optimizer.state_dict(), param.detach().clone()
        step(optimizer)

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        pipeline = optimizer._books.engine._pipeline
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "await_quiet", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.load_state_dict(state_dict)
        assert not pipeline.books.frozen
        step(optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(pipeline.checkpoints, "load", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.load_state_dict(state_dict)
        with pytest.raises(UsageError, match=r"loading generation 1 .* was interrupted; load it again"):
            optimizer.step()
        param.data.copy_(weights)
        optimizer.load_state_dict(state_dict)
        step(optimizer)
        assert [entry["step"] for entry in optimizer.state.values()] == [2]


def test_an_interrupt_on_the_edge_of_the_lock_leaves_no_rows_that_nobody_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskSparseAdam([("emb", table())], state_dir=tmp_path) as optimizer:
        pipeline = optimizer._books.engine._pipeline
        next_new, leave = pipeline.books.next_new, Access.__exit__
        taken: list[object] = []

        def note() -> Any:
            job = next_new()
            taken.extend([job] if job is not None else [])
            return job

        def interrupted(access: Access, *how: Any) -> None:
            leave(access, *how)
            if taken:
                taken.clear()
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pipeline.books, "next_new", note)
            patch.setattr(Access, "__exit__", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(optimizer)
        step(optimizer)  # the same rows, and it ends


def test_an_interrupt_in_a_wait_that_has_not_the_lock_again_is_told_as_it_is(tmp_path: Path) -> None:
    with DiskSparseAdam([("emb", table())], state_dir=tmp_path) as optimizer:
        access = optimizer._books.engine._pipeline.access

        def interrupted() -> None:
            access.condition.release()
            raise KeyboardInterrupt

        access.condition.wait = interrupted  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt), access:
            access.wait()
        del access.condition.wait
        step(optimizer)


@pytest.mark.parametrize("cache", [1, 200])
def test_the_cache_that_a_warning_advises_is_enough(tmp_path: Path, cache: int) -> None:
    rows = tuple(range(ROWS))
    with (
        DiskSparseAdam([("emb", table())], state_dir=tmp_path / "tiny", cache=cache) as optimizer,
        pytest.warns(UserWarning, match="cache=") as told,
    ):
        step(optimizer, rows)
    advised = int(str(told[0].message).split("cache=")[1].split()[0])
    with DiskSparseAdam([("emb", table())], state_dir=tmp_path / "advised", cache=advised) as optimizer:
        step(optimizer, rows)  # a warning is an error here


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def _foreign(*steps: int) -> dict[str, Any]:
    """A state dict of SparseAdam for two tables, after so many steps of each."""
    params = [table(), table()]
    theirs = torch.optim.SparseAdam(params)
    for param, count in zip(params, steps, strict=True):
        for _ in range(count):
            param.grad = sparse((3, 4), torch.ones(2, WIDTH), param.shape)
            theirs.step()
            param.grad = None
    return theirs.state_dict()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_state_dict_taken_over_in_part_is_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    params = [table(), table()]
    named = list(zip("ab", params, strict=True))
    optimizer = DiskSparseAdam(named, state_dir=tmp_path)
    step(optimizer)
    optimizer.checkpoint()
    before = optimizer.export_state_dict()
    foreign = _foreign(2, 3)

    def break_off() -> None:
        engine = optimizer._books.engine
        write = engine.overwrite

        def broken(number: int, *rest: Any) -> None:
            if number == 1:
                raise error("in the second table")
            write(number, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "overwrite", broken)
            with pytest.raises(error):
                optimizer.load_state_dict(foreign)

    break_off()
    for call in (lambda: step(optimizer), optimizer.checkpoint, optimizer.state_dict, optimizer.close):
        with pytest.raises(
            UsageError, match=rf"{error.__name__} \(in the second table\) came while the moments in .* pa"
        ):
            call()
    with DiskSparseAdam(named, state_dir=tmp_path, existing="resume") as optimizer:
        assert str(optimizer.export_state_dict()) == str(before)
        break_off()
        optimizer.load_state_dict(foreign)  # all of it is replaced: that mends it
        taken = optimizer.export_state_dict()
        assert taken is not None
        assert str(taken["state"]) == str(foreign["state"])
        step(optimizer)


def test_a_failure_is_not_forgotten_where_nothing_was_loaded_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    param = table()
    optimizer = DiskSparseAdam([("emb", param)], state_dir=tmp_path)
    step(optimizer)
    state_dict, weights = optimizer.state_dict(), param.detach().clone()
    step(optimizer)
    pipeline = optimizer._books.engine._pipeline
    pipeline.latch.note(UsageError("weights and moments are mixed"))
    gone = {**state_dict, "state": {0: {**state_dict["state"][0], "generation": 99}}}
    with pytest.raises(MismatchError, match="generation 99 is not there"):
        optimizer.load_state_dict(gone)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "await_quiet", interrupted)
        for wanted in (state_dict, _foreign(1, 0) | {"param_groups": state_dict["param_groups"]}):
            with pytest.raises(KeyboardInterrupt):
                optimizer.load_state_dict(wanted)
    for call in (lambda: step(optimizer), optimizer.checkpoint):
        with pytest.raises(UsageError, match="weights and moments are mixed"):
            call()
    param.data.copy_(weights)
    optimizer.load_state_dict(state_dict)
    step(optimizer)
    optimizer.close()


@pytest.mark.parametrize("where", ["loop", "backend", "_let_go"])
def test_an_end_that_is_interrupted_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    optimizer = DiskSparseAdam([("emb", table())], state_dir=tmp_path)
    step(optimizer)
    pipeline = optimizer._books.engine._pipeline
    owner, name = {
        "loop": (pipeline.loop, "stop"),
        "backend": (pipeline.backend, "shut_down"),
        "_let_go": (pipeline.directory, "unlock"),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.close()
    with pytest.raises(ClosedError):
        step(optimizer)
    optimizer.close()
    optimizer.close()
    with DiskSparseAdam([("emb", table())], state_dir=tmp_path, existing="resume") as again:
        assert again.state[again.param_groups[0]["params"][0]]["step"] == 1


def test_a_close_that_is_interrupted_before_it_has_committed_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = DiskSparseAdam([("emb", table())], state_dir=tmp_path)
    step(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._books.engine, "checkpoint", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.close()
    optimizer.close()
    with DiskSparseAdam([("emb", table())], state_dir=tmp_path, existing="resume") as again:
        assert again.state[again.param_groups[0]["params"][0]]["step"] == 1


def test_a_generation_that_close_made_counts_once_it_has_been_loaded_by_its_number(tmp_path: Path) -> None:
    param = table()
    with DiskSparseAdam([("emb", param)], state_dir=tmp_path) as optimizer:
        step(optimizer)
    saved = optimizer.state_dict()
    with DiskSparseAdam([("emb", param)], state_dir=tmp_path) as optimizer:
        optimizer.load_state_dict(saved)
        step(optimizer)
        optimizer.checkpoint()
        assert optimizer.generations() == (1, 2)
        optimizer.load_state_dict(saved)
        assert optimizer.state[param]["step"] == 1
