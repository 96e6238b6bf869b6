"""A training stopped and resumed is, to the last bit, one that never stopped; and what does not fit is refused."""

from __future__ import annotations

import io
import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import Twins, check_moments, clones, contents, parameters, random_gradient, same_bits
from torch import nn

import dsa.io.disk_space
from dsa import DiskSparseAdam
from dsa.config import IOConfig
from dsa.errors import MismatchError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:a step touches more rows than the cache has frames"),
]
SHAPES = {"node.weight": (300, 8), "rel.weight": (20, 3)}
SMALL = IOConfig(segment_bytes=8192, dirty_share=0.1)


def gradients(params: dict[str, nn.Parameter], step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: random_gradient(param, torch.randint(0, len(param), (30,), generator=generator), generator)
        for name, param in params.items()
    }


def train(twins: Twins, steps: range) -> None:
    for step in steps:
        twins.step(gradients(twins.disk, step))


def reopen(twins: Twins, path: Path, **options: Any) -> DiskSparseAdam:
    opt = DiskSparseAdam(list(twins.disk.items()), state_dir=path, **{"lr": 0.1, "cache": 9000, "io": SMALL, **options})
    twins.opt = opt
    return opt


@pytest.fixture
def twins(tmp_path: Path) -> Twins:
    return Twins(parameters(SHAPES), tmp_path / "s", {"lr": 0.1}, cache=9000, io=SMALL)


@pytest.mark.parametrize("how", ["close", "state_dict", "resume after a checkpoint"])
def test_a_run_in_pieces_is_one_that_never_stopped(tmp_path: Path, twins: Twins, how: str) -> None:
    path = tmp_path / "s"
    for begin in range(0, 40, 8):
        train(twins, range(begin, begin + 8))
        if how == "close":
            twins.opt.close()
            reopen(twins, path, existing="resume", cache=3000 + 2000 * begin)
        elif how == "state_dict":
            file = io.BytesIO()
            torch.save({"model": twins.disk, "optimizer": twins.opt.state_dict()}, file)
            assert len(file.getvalue()) < 40_000
            twins.step(gradients(twins.disk, 999))  # is undone
            twins.opt.close()
            for (name, param), right in zip(twins.disk.items(), twins.ram.values(), strict=True):
                del name
                param.data.zero_()
                del right
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            for name, param in twins.disk.items():
                param.data.copy_(saved["model"][name])
            reopen(twins, path).load_state_dict(saved["optimizer"])
            break
        else:
            twins.opt.checkpoint()
            twins.opt._books.engine.close()  # commits nothing
            reopen(twins, path, existing="resume")
    if how == "state_dict":
        # The oracle of the step that was undone is an oracle anew.
        twins.oracle.load_state_dict(twins.opt.export_state_dict())
        for name, param in twins.ram.items():
            param.data.copy_(twins.disk[name])
        reference = Twins(parameters(SHAPES), tmp_path / "never stopped", {"lr": 0.1})
        train(reference, range(8))
        for name in SHAPES:
            check_moments(twins.opt, name, twins.disk[name], reference.oracle.state[reference.ram[name]])
            assert same_bits(twins.disk[name], reference.ram[name])
        reference.opt.close()
    train(twins, range(40, 44))
    twins.check()
    twins.opt.close()


def test_a_state_dict_is_kilobytes_and_primitives(twins: Twins) -> None:
    train(twins, range(3))
    file = io.BytesIO()
    torch.save(twins.opt.state_dict(), file)
    assert len(file.getvalue()) < 8192
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert loaded == twins.opt.state_dict()
    assert set(loaded) == {"state", "param_groups"}
    twins.opt.close()


def test_state_dict_without_a_step_does_no_io(tmp_path: Path, twins: Twins) -> None:
    train(twins, range(3))
    first = twins.opt.state_dict()
    before, written = contents(tmp_path / "s"), twins.opt.statistics().write_bytes
    assert twins.opt.state_dict() == first
    twins.opt.load_state_dict(first)
    assert contents(tmp_path / "s") == before
    assert twins.opt.statistics().write_bytes == written
    twins.opt.close()


# SparseAdam's state dicts.


@pytest.mark.parametrize("mmap", [False, True])
def test_from_sparse_adam_and_back(tmp_path: Path, mmap: bool) -> None:
    originals = parameters(SHAPES)
    ram = clones(originals)
    right = torch.optim.SparseAdam(list(ram.values()), lr=0.1)
    for step in range(10):
        for name, grad in gradients(ram, step).items():
            ram[name].grad = grad
        right.step()
    torch.save(right.state_dict(), tmp_path / "ram.pt")
    twins = Twins(ram, tmp_path / "s", {"lr": 0.1}, cache=9000, io=SMALL)
    loaded = torch.load(tmp_path / "ram.pt", weights_only=True, mmap=mmap)
    twins.opt.load_state_dict(loaded)
    twins.oracle.load_state_dict(right.state_dict())
    twins.check()
    train(twins, range(10, 15))
    twins.check()
    twins.opt.export_state_dict(tmp_path / "disk.pt")
    exported = torch.load(tmp_path / "disk.pt", weights_only=True, mmap=mmap)
    in_ram = twins.opt.export_state_dict()
    assert in_ram is not None
    expected = twins.oracle.state_dict()
    for found in (exported, in_ram):
        assert set(found["state"]) == set(expected["state"])
        for number, entry in expected["state"].items():
            assert found["state"][number]["step"] == entry["step"]
            for key in ("exp_avg", "exp_avg_sq"):
                assert same_bits(found["state"][number][key], entry[key])
    again = torch.optim.SparseAdam(list(clones(ram).values()), lr=0.1)
    again.load_state_dict(exported)
    twins.opt.close()


def test_import_and_export_hold_no_second_copy(tmp_path: Path) -> None:
    """Counted in what torch allocates, and in the largest array that the import makes."""
    resource = pytest.importorskip("resource")
    n_rows, width = 120_000, 32
    dense = n_rows * width * 4
    param = nn.Parameter(torch.zeros(n_rows, width))
    source = {"step": 3, "exp_avg": torch.ones(n_rows, width), "exp_avg_sq": torch.ones(n_rows, width)}
    groups = torch.optim.SparseAdam([param]).state_dict()["param_groups"]
    torch.save({"state": {0: source}, "param_groups": groups}, tmp_path / "big.pt")
    del source
    opt = DiskSparseAdam([("w", param)], state_dir=tmp_path / "s", cache=2_000_000)
    loaded = torch.load(tmp_path / "big.pt", weights_only=True, mmap=True)

    def private_kib() -> int:
        text = Path("/proc/self/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1])

    if not Path("/proc/self/status").exists():
        pytest.skip("it looks into /proc")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = []
    put = opt._books.engine.overwrite

    def watched(*arguments: Any) -> None:
        put(*arguments)
        peaks.append(private_kib())

    opt._books.engine.overwrite = watched  # type: ignore[method-assign]
    before = private_kib()
    opt.load_state_dict(loaded)
    assert len(peaks) > 5
    assert (max(peaks) - before) * 1024 < dense, "half of the moments: one of the two tensors"
    opt.close()


# What does not fit.


@pytest.mark.parametrize(
    ("shapes", "dtype", "both"),
    [
        ({"node.weight": (300, 9), "rel.weight": (20, 3)}, torch.float32, ["(300, 8)", "(300, 9)"]),
        ({"node.weight": (299, 8), "rel.weight": (20, 3)}, torch.float32, ["(300, 8)", "(299, 8)"]),
        ({"node.weight": (300, 8), "other.weight": (20, 3)}, torch.float32, ["'other.weight'", "rel.weight"]),
        ({"node.weight": (300, 8), "rel.weight": (20, 3)}, torch.bfloat16, ["float32", "bfloat16"]),
        ({"node.weight": (300, 8), "rel.weight": (20, 3)}, torch.float64, ["float32", "float64"]),
        ({"node.weight": (310, 8), "rel.weight": (20, 3)}, torch.float32, ["(300, 8)", "(310, 8)", "grow_tables"]),
    ],
)
@pytest.mark.parametrize("way", ["resume", "load"])
def test_mismatches_are_refused_with_both_values(
    tmp_path: Path, twins: Twins, shapes: Any, dtype: torch.dtype, both: list[str], way: str
) -> None:
    train(twins, range(3))
    saved = twins.opt.state_dict()
    twins.opt.close()
    before = contents(tmp_path / "s")
    params = list(parameters(shapes, dtype).items())

    def open_them() -> None:
        with DiskSparseAdam(params, state_dir=tmp_path / "s", existing=way) as opt:
            opt.load_state_dict(saved)

    with pytest.raises(MismatchError) as caught:
        open_them()
    for value in both:
        assert value in str(caught.value)
    assert contents(tmp_path / "s") == before
    train_again = reopen(twins, tmp_path / "s", existing="resume")
    twins.check()
    train_again.close()


def test_a_gone_generation_lists_those_present(tmp_path: Path) -> None:
    twins = Twins(parameters(SHAPES), tmp_path / "s", {"lr": 0.1}, keep_generations=2)
    saved = []
    for step in range(4):
        train(twins, range(step, step + 1))
        saved.append(twins.opt.state_dict())
    with pytest.raises(MismatchError, match=r"generation 1 is not there, present are 3, 4.*keep_generations"):
        twins.opt.load_state_dict(saved[0])
    twins.opt.close()


def test_another_directory_is_refused_by_its_uuid(tmp_path: Path, twins: Twins) -> None:
    train(twins, range(2))
    saved = twins.opt.state_dict()
    twins.opt.close()
    with pytest.raises(MismatchError, match="moments live in state_dir; copy it or export"):
        reopen(twins, tmp_path / "other").load_state_dict(saved)
    twins.opt.close()


# Tables that have grown.


@pytest.mark.parametrize("way", ["resume", "load"])
def test_tables_that_have_grown_are_taken_on_request(tmp_path: Path, twins: Twins, way: str) -> None:
    train(twins, range(10))
    saved = twins.opt.state_dict()
    before = twins.oracle.state_dict()
    twins.opt.close()
    larger = {"node.weight": 340, "rel.weight": 20}
    grown = {
        name: nn.Parameter(torch.cat([param.detach(), torch.ones(larger[name] - len(param), *param.shape[1:])]))
        for name, param in twins.ram.items()
    }
    grow = IOConfig(segment_bytes=8192, dirty_share=0.1, grow_tables=True)
    new = Twins.__new__(Twins)
    new.disk, new.ram = clones(grown), clones(grown)
    new.oracle = torch.optim.SparseAdam(list(new.ram.values()), lr=0.1)
    for number, entry in before["state"].items():
        name = list(SHAPES)[number]
        for key in ("exp_avg", "exp_avg_sq"):
            more = torch.zeros(larger[name] - len(entry[key]), *entry[key].shape[1:])
            entry[key] = torch.cat([entry[key], more])
    new.oracle.load_state_dict(before)
    # No warning of other weights either: a fingerprint of rows spread over the table says nothing of a grown one.
    reopen(new, tmp_path / "s", existing=way, io=grow)
    if way == "load":
        new.opt.load_state_dict(saved)
    new.check()
    train(new, range(10, 20))
    new.check()
    new.opt.close()
    reopen(new, tmp_path / "s", existing="resume")  # the larger size is the table's own now
    new.check()
    new.opt.close()


def test_shrunk_tables_are_refused_all_the_same(tmp_path: Path, twins: Twins) -> None:
    twins.opt.close()
    fewer = parameters({"node.weight": (299, 8), "rel.weight": (20, 3)})
    with pytest.raises(MismatchError, match=r"\(300, 8\).*\(299, 8\)"):
        DiskSparseAdam(list(fewer.items()), state_dir=tmp_path / "s", existing="resume", io=IOConfig(grow_tables=True))


# Lightning.


def lightning_fit(lightning: Any, folder: Path, metric: list[float], **options: Any) -> list[Path]:
    """Train an epoch per metric value with save_top_k=3; the files that are there at the end."""

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(100, 4, sparse=True)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.emb(batch).square().sum()

        def on_train_epoch_end(self) -> None:
            self.log("metric", metric[self.current_epoch])

        def configure_optimizers(self) -> DiskSparseAdam:
            return DiskSparseAdam(self.emb.named_parameters(), state_dir=folder / "state", **options)

    callback = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder / "files", monitor="metric", mode="min", save_top_k=3, filename="{epoch}"
    )
    trainer = lightning.Trainer(
        max_epochs=len(metric),
        accelerator="cpu",
        logger=False,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(torch.randint(0, 100, (24,)), batch_size=8)
    module = Module()
    trainer.fit(module, loader)
    module.optimizers().optimizer.close()
    return sorted((folder / "files").glob("*.ckpt"))


def load_all(files: list[Path], folder: Path, **options: Any) -> list[int]:
    """Load each file's optimizer state; the generations."""
    found = []
    for file in files:
        saved = torch.load(file, weights_only=False)
        param = nn.Parameter(saved["state_dict"]["emb.weight"])
        with DiskSparseAdam([("weight", param)], state_dir=folder / "state", **options) as opt:
            opt.load_state_dict(saved["optimizer_states"][0])
            opt.moments("weight", range(100))
            assert opt.state[param]["step"] == saved["global_step"]
            found.append(opt.state[param]["generation"])
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("metric", "keep"),
    [([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0], 4), ([5.0, 4.0, 6.0, 1.0, 9.0, 8.0, 2.0, 9.0], None)],
    ids=["it improves", "any"],
)
def test_lightning_with_save_top_k(tmp_path: Path, metric: list[float], keep: int | None) -> None:
    lightning = pytest.importorskip("lightning")
    files = lightning_fit(lightning, tmp_path, metric, keep_generations=keep)
    assert len(files) == 3
    assert len(set(load_all(files, tmp_path, keep_generations=keep))) == 3


@pytest.mark.filterwarnings("ignore")
def test_lightning_file_whose_generation_is_gone(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    files = lightning_fit(lightning, tmp_path, [1.0, 2.0, 3.0, 4.0, 0.5, 0.4], keep_generations=1)
    with pytest.raises(MismatchError, match=r"generation \d+ is not there, present are .*keep_generations"):
        load_all(files, tmp_path, keep_generations=1)


# The place of the directory.


def test_too_little_free_space_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    needed = dsa.io.disk_space.peak_bytes([], 2)
    assert needed == 0
    monkeypatch.setattr(dsa.io.disk_space, "file_system", lambda path: "ext4")
    monkeypatch.setattr(dsa.io.disk_space.shutil, "disk_usage", lambda path: usage(0, 0, 100_000))
    with pytest.warns(UserWarning, match="100000 are free") as caught:
        opt = DiskSparseAdam([("w", nn.Parameter(torch.zeros(1000, 16)))], state_dir=tmp_path / "a")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    opt.close()
    # 200 rows x 128 bytes, twice, and an index, thrice: 158,400 bytes; once: 52,800.
    with pytest.warns(UserWarning, match="can grow to 158400 bytes"):
        DiskSparseAdam([("w", nn.Parameter(torch.zeros(200, 16)))], state_dir=tmp_path / "b").close()
    DiskSparseAdam([("w", nn.Parameter(torch.zeros(100, 16)))], state_dir=tmp_path / "c").close()


def test_a_directory_in_memory_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsa.io.disk_space, "file_system", lambda path: "tmpfs")
    with pytest.warns(UserWarning, match="is on a tmpfs") as caught:
        DiskSparseAdam([("w", nn.Parameter(torch.zeros(10, 16)))], state_dir=tmp_path / "a").close()
    assert len(caught) == 1


def test_the_file_system_is_found_out() -> None:
    if not Path("/proc/self/mountinfo").exists():
        pytest.skip("only Linux says")
    assert dsa.io.disk_space.file_system(Path("/proc")) == "proc"
    assert dsa.io.disk_space.file_system(Path("/no/such/place")) == ""


# What a checkpoint writes.


FULL_SIZE = pytest.mark.skipif("DSA_FULL_SIZE" not in os.environ, reason="DSA_FULL_SIZE is not set: 2 GB of RAM, 40 s")


@pytest.mark.parametrize(
    ("n_rows", "width", "dirty"),
    [(1_000_000, 16, 10_000), pytest.param(10_000_000, 128, 100_000, marks=[FULL_SIZE, pytest.mark.slow])],
)
def test_a_checkpoint_writes_the_dirty_rows_and_an_index(tmp_path: Path, n_rows: int, width: int, dirty: int) -> None:
    param = nn.Parameter(torch.zeros(n_rows, width))
    opt = DiskSparseAdam([("w", param)], state_dir=tmp_path / "s", cache=dirty * 3000, io=IOConfig(dirty_share=1.0))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        rows = torch.randperm(n_rows, generator=generator)[:dirty]
        param.grad = torch.sparse_coo_tensor(rows[None], torch.ones(dirty, width), (n_rows, width))
        opt.step()
        before = opt.statistics().write_bytes
        opt.checkpoint()
        written = opt.statistics().write_bytes - before
        record_bytes = 2 * 4 * width
        assert opt.statistics().rows_written % dirty == 0
        assert dirty * record_bytes + 8 * n_rows <= written <= dirty * record_bytes * 1.1 + 8.1 * n_rows
    opt.close()
