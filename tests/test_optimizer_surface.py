"""Everything that torch.optim.SparseAdam takes, taken by DiskSparseAdam, with the same bits as the outcome."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_rig import (
    HALVES,
    Parameters,
    Twins,
    check_moments,
    clones,
    disk_optimizer,
    oracle,
    parameters,
    random_gradient,
    same_bits,
    sparse,
)
from torch import Tensor, nn

from dsa import DiskSparseAdam

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def test_a_coalesced_gradients_rows_may_change_after_the_step(tmp_path: Path) -> None:
    # Who builds gradients by hand over a buffer fills it again; nothing may look at it after the step.
    buffer = torch.arange(4)
    param = nn.Parameter(torch.zeros(400, 8))
    theirs = nn.Parameter(torch.zeros(400, 8))
    ram = torch.optim.SparseAdam([theirs])
    with DiskSparseAdam([param], state_dir=tmp_path / "s", cache=100 * 128) as disk:
        for first in range(0, 400, 4):
            buffer.copy_(torch.arange(first, first + 4))
            for owner in (param, theirs):
                values = torch.full((4, 8), float(first))
                owner.grad = torch.sparse_coo_tensor(buffer[None], values, param.shape, is_coalesced=True)
            assert param.grad._indices().data_ptr() == buffer.data_ptr()
            disk.step()
            ram.step()
            buffer.fill_(1 << 40)
            news = disk._books.engine._pipeline.books._news
            assert all(int(rows.max()) < 400 for _, _, _, rows, _ in news._untold)
        assert len(disk._books.engine._pipeline.books.arenas[0].policy._codes[0]) == 400
    assert same_bits(param, theirs)


def some_rows(n_rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Rows in any order, duplicates among them."""
    return torch.randint(0, n_rows, (count,), generator=generator)


def train(twins: Twins, steps: int, generator: torch.Generator, count: int = 24) -> None:
    for _ in range(steps):
        twins.step(
            {
                name: random_gradient(param, some_rows(len(param), count, generator), generator)
                for name, param in twins.disk.items()
            }
        )


@pytest.mark.parametrize("kernel", ["reference", "exact"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_many_widths_at_once(
    tmp_path: Path, dtype: torch.dtype, kernel: str, generator: torch.Generator
) -> None:
    shapes = {f"width{width}": (60 + width, width) for width in (1, 3, 7, 100, 129)}
    shapes |= {"flat": (90,), "deep": (50, 3, 5), "deeper": (41, 2, 1, 7)}
    twins = Twins(parameters(shapes, dtype), tmp_path, {"lr": 0.05}, kernel=kernel, cache=500_000)
    train(twins, 25, generator)
    twins.check()
    moments = twins.opt.moments("width3", [5, 2, 5])
    assert moments["exp_avg"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert same_bits(moments["exp_avg"][0], moments["exp_avg"][2])
    twins.opt.close()


def test_reopened_tables_of_many_widths(tmp_path: Path, generator: torch.Generator) -> None:
    shapes = {"a": (70, 129), "b": (90,), "c": (50, 3, 5)}
    twins = Twins(parameters(shapes), tmp_path, kernel="reference")
    train(twins, 5, generator)
    twins.opt.close()
    twins.opt = disk_optimizer(list(twins.disk.items()), tmp_path, kernel="reference", existing="resume", cache=3000)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a step touches more rows than the cache has frames")
        train(twins, 5, generator)
    twins.check()
    twins.opt.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_every_form(tmp_path: Path, dtype: torch.dtype, generator: torch.Generator) -> None:
    twins = Twins(parameters({"w": (40, 3)}, dtype), tmp_path, {"lr": 0.1})
    param = twins.disk["w"]
    uncoalesced = random_gradient(param, torch.tensor([7, 3, 7, 7, 0, 39, 3]), generator)
    ordered = random_gradient(param, torch.tensor([1, 2, 30]), generator)
    empty = sparse([], torch.zeros(0, 3, dtype=dtype), (40, 3))
    zeros = sparse([7, 8], torch.zeros(2, 3, dtype=dtype), (40, 3))
    claimed = torch.sparse_coo_tensor([[9, 4]], torch.ones(2, 3, dtype=dtype), (40, 3), is_coalesced=True)
    assert not uncoalesced.is_coalesced()
    for gradient in (uncoalesced, uncoalesced.coalesce(), ordered, empty, zeros, claimed, None, uncoalesced, zeros):
        twins.step({"w": gradient})
        twins.check()
    assert twins.opt.state[param]["step"] == 8  # empty gradients count, missing ones do not
    assert param.grad is not None
    assert same_bits(param.grad.coalesce().values(), zeros.coalesce().values())
    twins.opt.close()


def test_empty_gradients_before_any_row_advance_the_bias_correction(tmp_path: Path, generator: torch.Generator) -> None:
    twins = Twins(parameters({"w": (10, 2)}), tmp_path)
    for _ in range(4):
        twins.step({"w": sparse([], torch.zeros(0, 2), (10, 2))})
    train(twins, 3, generator, count=4)
    twins.check()
    twins.opt.close()


def test_tables_that_a_batch_does_not_touch_keep_their_own_step_count(
    tmp_path: Path, generator: torch.Generator
) -> None:
    twins = Twins(parameters({"a": (30, 4), "b": (30, 4), "never": (20, 6)}), tmp_path)
    for i in range(20):
        rows = some_rows(30, 9, generator)
        twins.step(
            {"a": random_gradient(twins.disk["a"], rows, generator)}
            if i % 3
            else {"b": random_gradient(twins.disk["b"], rows, generator)}
        )
    twins.check()
    steps = {name: twins.opt.state[param]["step"] for name, param in twins.disk.items()}
    assert steps == {"a": 13, "b": 7, "never": 0}
    twins.opt.close()


def test_tables_without_rows(tmp_path: Path, generator: torch.Generator) -> None:
    twins = Twins(parameters({"none": (0, 4), "some": (20, 4), "flat": (0,)}), tmp_path)
    for _ in range(3):
        twins.step(
            {
                "none": sparse([], torch.zeros(0, 4), (0, 4)),
                "some": random_gradient(twins.disk["some"], some_rows(20, 5, generator), generator),
            }
        )
    twins.opt.announce({"none": []})
    twins.check()
    twins.opt.close()
    reopened = disk_optimizer(list(twins.disk.items()), tmp_path, existing="resume")
    check_moments(reopened, "some", twins.disk["some"], twins.oracle.state[twins.ram["some"]])
    assert reopened.state[twins.disk["none"]]["step"] == 3
    reopened.close()


def test_only_tables_without_rows(tmp_path: Path) -> None:
    twins = Twins(parameters({"none": (0, 4)}), tmp_path)
    twins.step({"none": sparse([], torch.zeros(0, 4), (0, 4))})
    twins.check()
    twins.opt.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["reference", "exact"])
def test_groups_with_their_own_hyperparameters(
    tmp_path: Path, dtype: torch.dtype, kernel: str, generator: torch.Generator
) -> None:
    originals = parameters({"a": (30, 4), "b": (25, 9), "c": (20,)}, dtype)
    disk, ram = clones(originals), clones(originals)

    def groups(side: Parameters) -> list[dict[str, Any]]:
        return [
            {"params": [side["a"]], "lr": 0.3, "betas": (0.5, 0.6)},
            {"params": [side["b"]], "eps": 1e-2, "maximize": True},
            {"params": [side["c"]], "lr": 1e-4, "betas": (0.0, 0.0)},
        ]

    opt = disk_optimizer(groups(disk), tmp_path, lr=0.02, kernel=kernel)
    right = oracle(groups(ram), dtype, lr=0.02)
    for _ in range(15):
        for name, param in disk.items():
            param.grad = random_gradient(param, some_rows(len(param), 12, generator), generator)
            ram[name].grad = param.grad.clone()
        opt.step()
        right.step()
    for i, (name, param) in enumerate(disk.items()):
        assert same_bits(param, ram[name]), name
        check_moments(opt, f"p{i}", param, right.state[ram[name]])
    opt.close()


def test_maximize_and_a_learning_rate_in_a_tensor(tmp_path: Path, generator: torch.Generator) -> None:
    rates = torch.tensor(0.07), torch.tensor([0.07])
    for i, rate in enumerate(rates):
        twins = Twins(parameters({"w": (30, 5)}), tmp_path / str(i), {"lr": rate.clone(), "maximize": True})
        train(twins, 10, generator)
        for group in (*twins.opt.param_groups, *twins.oracle.param_groups):
            group["lr"] = rate * 0.5
        train(twins, 10, generator)
        twins.check()
        twins.opt.close()


SCHEDULERS = {
    "lambda": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step / 5 if step < 5 else 1 / step),
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8),
    "cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=30, cycle_momentum=True),
    "plateau": lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=2),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers(tmp_path: Path, scheduler: str, generator: torch.Generator) -> None:
    twins = Twins(parameters({"w": (30, 5)}), tmp_path, {"lr": 0.1})
    both = [SCHEDULERS[scheduler](each) for each in (twins.opt, twins.oracle)]
    for _ in range(25):
        train(twins, 1, generator)
        for each in both:
            each.step(*([1.0] if scheduler == "plateau" else []))
    assert twins.opt.param_groups[0]["lr"] == twins.oracle.param_groups[0]["lr"] != 0.1
    twins.check()
    twins.opt.close()


def test_a_closure_is_run_once_with_gradients_and_its_loss_comes_back(tmp_path: Path) -> None:
    twins = Twins(parameters({"w": (30, 5)}), tmp_path)
    calls = []

    def closure(side: Parameters, opt: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        opt.zero_grad()
        looked_up = nn.functional.embedding(torch.tensor([1, 4, 4]), side["w"], sparse=True)
        loss = looked_up.square().sum()
        loss.backward()
        return loss

    for _ in range(4):
        loss = twins.opt.step(lambda: closure(twins.disk, twins.opt))
        right = twins.oracle.step(lambda: closure(twins.ram, twins.oracle))
        assert same_bits(loss, right)
    assert calls == [True] * 8
    twins.check()
    twins.opt.close()


def make(params: Any, path: Path, **options: Any) -> Any:
    return disk_optimizer(params, path, **options)


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.node = nn.Embedding(30, 4, sparse=True)
        self.relation = nn.EmbeddingBag(7, 3, sparse=True, mode="sum")


def test_named_parameters_name_the_tables(tmp_path: Path) -> None:
    model = TwoTables()
    with make(model.named_parameters(), tmp_path) as opt:
        assert [opt.state[p]["table"] for p in model.parameters()] == ["node.weight", "relation.weight"]
        opt.announce({"node.weight": [1], model.relation: torch.tensor([2]), model.node.weight: range(3)})
        assert set(opt.moments("relation.weight", [0])) == {"exp_avg", "exp_avg_sq"}


def test_generators_lists_and_groups_of_either(tmp_path: Path) -> None:
    model = TwoTables()
    forms: list[Any] = [
        model.parameters(),
        list(model.parameters()),
        [{"params": model.parameters()}],
        [{"params": model.node.parameters()}, {"params": [model.relation.weight], "lr": 0.1}],
    ]
    for i, form in enumerate(forms):
        with make(form, tmp_path / str(i)) as opt:
            assert [opt.state[p]["table"] for p in model.parameters()] == ["p0", "p1"]
    forms = [
        model.named_parameters(),
        list(model.named_parameters()),
        [{"params": model.named_parameters()}],
        [{"params": [("node.weight", model.node.weight)]}, {"params": [("relation.weight", model.relation.weight)]}],
    ]
    for i, form in enumerate(forms):
        with make(form, tmp_path / f"named{i}") as opt:
            assert [opt.state[p]["table"] for p in model.parameters()] == ["node.weight", "relation.weight"]


def test_a_single_tensor_is_refused_as_torch_does(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="iterable"):
        torch.optim.SparseAdam(nn.Parameter(torch.zeros(3, 3)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="iterable"):
        make(nn.Parameter(torch.zeros(3, 3)), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_lookalikes_without_names_warn_and_point_to_named_parameters(tmp_path: Path) -> None:
    def two() -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(5, 3)) for _ in range(2)]

    with pytest.warns(UserWarning, match=r"p0 and p1 .*\(5, 3\).*named_parameters\(\)"):
        make(two(), tmp_path / "a").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make([*two()[:1], nn.Parameter(torch.zeros(5, 4))], tmp_path / "b").close()
        make(list(zip("xy", two(), strict=True)), tmp_path / "c").close()


def test_two_parameters_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"):
        make(
            [
                {"params": [("x", nn.Parameter(torch.zeros(2, 2)))]},
                {"params": [("x", nn.Parameter(torch.zeros(3, 2)))]},
            ],
            tmp_path / "s",
        )
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_group_added_before_or_after_steps(tmp_path: Path, when: str, generator: torch.Generator) -> None:
    originals = parameters({"a": (60, 4), "late": (50, 9)})
    disk, ram = clones(originals), clones(originals)
    opt = disk_optimizer([("a", disk["a"])], tmp_path, lr=0.1, cache=4000)
    right = torch.optim.SparseAdam([ram["a"]], lr=0.1)

    def steps(count: int) -> None:
        for _ in range(count):
            for name, param in disk.items():
                param.grad = random_gradient(param, some_rows(len(param), 12, generator), generator)
                ram[name].grad = param.grad.clone()
            opt.step()
            right.step()

    frames = opt.statistics().frames
    if when == "after":
        steps(7)
    opt.add_param_group({"params": [("late", disk["late"])], "lr": 0.5})
    right.add_param_group({"params": [ram["late"]], "lr": 0.5})
    assert 0 < opt.statistics().cache_bytes <= 4000 + 500
    assert opt.statistics().frames != frames
    steps(7)
    generation = opt.checkpoint()
    for name in disk:
        assert same_bits(disk[name], ram[name])
        check_moments(opt, name, disk[name], right.state[ram[name]])
    opt.close()
    reopened = disk_optimizer(list(disk.items()), tmp_path, existing="resume")
    assert reopened.state[disk["late"]]["generation"] == generation
    for name in disk:
        check_moments(reopened, name, disk[name], right.state[ram[name]])
    reopened.close()


def test_a_late_group_on_a_resumed_directory_finds_its_table(tmp_path: Path, generator: torch.Generator) -> None:
    twins = Twins(parameters({"a": (30, 4), "b": (30, 4)}), tmp_path)
    train(twins, 5, generator)
    twins.opt.close()
    opt = disk_optimizer([("a", twins.disk["a"])], tmp_path, existing="resume")
    opt.add_param_group({"params": [("b", twins.disk["b"])]})
    twins.opt = opt
    twins.check()
    train(twins, 5, generator)
    twins.check()
    opt.close()


def test_a_refused_group_leaves_the_optimizer_as_it_was(tmp_path: Path, generator: torch.Generator) -> None:
    twins = Twins(parameters({"a": (30, 4)}), tmp_path)
    train(twins, 3, generator)
    other = nn.Parameter(torch.zeros(6, 3))
    refused: list[dict[str, Any]] = [
        {"params": [("bad", torch.zeros(3, 3).to_sparse())]},
        {"params": [("bad", nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64)))]},
        {"params": [("b", other)], "lr": -1.0},
        {"params": [("b", other)], "betas": (0.9, 1.0)},
        {"params": [("a", other)]},
        {"params": [("b", other)], "weight_decay": 0.1},
    ]
    for group in refused:
        with pytest.raises(ValueError, match=r"\S"):
            twins.opt.add_param_group(group)
        assert len(twins.opt.param_groups) == 1
        assert list(twins.opt.state) == [twins.disk["a"]]
    train(twins, 3, generator)
    twins.check()
    twins.opt.close()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bags(tmp_path: Path, mode: str, generator: torch.Generator) -> None:
    weights = parameters({"weight": (30, 4)})
    twins = Twins(weights, tmp_path)
    bags = []
    for side in (twins.disk, twins.ram):
        bag = nn.EmbeddingBag(30, 4, sparse=True, mode=mode)
        bag.weight = side["weight"]
        bags.append(bag)
    with twins.opt.watch(bags[0]):
        for _ in range(12):
            ids = some_rows(30, 10, generator)
            for bag, opt in zip(bags, (twins.opt, twins.oracle), strict=True):
                opt.zero_grad()
                bag(ids, torch.tensor([0, 3, 3, 7])).square().sum().backward()
                opt.step()
    assert twins.opt.statistics().announced_share == 1.0
    twins.check()
    twins.opt.close()


def test_weights_of_any_strides(tmp_path: Path, generator: torch.Generator) -> None:
    for kernel in ("reference", "exact"):
        base = torch.randn(9, 40, generator=generator)
        disk = nn.Parameter(base.clone().t())
        ram = nn.Parameter(base.clone().t())
        assert not disk.is_contiguous()
        opt = disk_optimizer([("w", disk)], tmp_path / kernel, kernel=kernel)
        right = torch.optim.SparseAdam([ram])
        for _ in range(5):
            disk.grad = random_gradient(disk, some_rows(40, 12, generator), generator)
            ram.grad = disk.grad.clone()
            opt.step()
            right.step()
        assert same_bits(disk, ram)
        check_moments(opt, "w", disk, right.state[ram])
        opt.close()


def test_fast_kernel_has_the_moments_to_the_bit_and_the_weights_to_a_few_ulp(
    tmp_path: Path, generator: torch.Generator
) -> None:
    twins = Twins(parameters({"w": (60, 8)}), tmp_path, {"lr": 0.01}, kernel="fast")
    train(twins, 50, generator)
    check_moments(twins.opt, "w", twins.disk["w"], twins.oracle.state[twins.ram["w"]])
    assert torch.allclose(twins.disk["w"], twins.ram["w"], rtol=1e-5, atol=1e-7)
    twins.opt.close()


@pytest.mark.parametrize("dtype", HALVES)
def test_extreme_values_keep_their_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([[math.inf], [1e-30], [0.0], [-0.0], [6e4], [-1e-7]])
    for kernel in ("reference", "exact"):
        for real in (dtype, torch.float32):
            twins = Twins(parameters({"w": (8, 1)}, real), tmp_path / f"{kernel}{real}", kernel=kernel)
            for _ in range(3):
                twins.step({"w": sparse([5, 0, 1, 2, 3, 4], values.to(real), (8, 1))})
            for name, param in twins.disk.items():
                assert torch.equal(param.isnan(), twins.ram[name].isnan())
                finite = ~param.isnan()
                assert same_bits(param[finite], twins.ram[name][finite])
            twins.opt.close()
