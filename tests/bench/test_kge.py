from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bench import kge
from bench.kge_evaluation import evaluate, filtered_ranks
from bench.kge_training import (
    MODELS,
    Collate,
    Graph,
    batch_loss,
    batch_rows,
    load_graph,
    make_loader,
    make_model,
    run_epoch,
)

N_ENTITIES, N_RELATIONS = 30, 4


def arrays(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    draw = np.random.default_rng(seed)
    sizes = {"train": 120, "valid": 20, "test": 25}
    columns = (N_ENTITIES, N_RELATIONS, N_ENTITIES)
    triples = {
        name: np.stack([draw.integers(0, n, size) for n in columns], axis=1).astype(np.int32)
        for name, size in sizes.items()
    }
    triples["test"][0] = (N_ENTITIES - 1, N_RELATIONS - 1, 0)
    return triples


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "graph.npz"
    np.savez(path, **arrays())  # type: ignore[arg-type]
    return path


@pytest.fixture
def graph(data: Path) -> Graph:
    return load_graph(str(data))


@pytest.fixture
def job(data: Path, tmp_path: Path) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """Runs the command line on the small graph; returns its exit code, output and JSON object ({} without one)."""

    def run(*options: str) -> tuple[int, str, dict[str, Any]]:
        out = tmp_path / "out.json"
        out.unlink(missing_ok=True)
        defaults = ["--data", str(data), "--dim", "8", "--batch", "16", "--epochs", "2", "--eval-triples", "10"]
        result = CliRunner().invoke(kge.app, [*defaults, "--json", str(out), *options])
        return result.exit_code, result.output, json.loads(out.read_text()) if out.exists() else {}

    return run


Job = Callable[..., tuple[int, str, dict[str, Any]]]


def test_the_json_object_of_a_run_in_ram(job: Job) -> None:
    code, output, found = job("--optimizer", "ram")
    assert code == 0, output
    assert list(found) == ["epochs", "mrr", "hits_at_10", "peak_rss_bytes", "state_bytes_on_disk", "statistics"]
    assert len(found["epochs"]) == 2
    for epoch in found["epochs"]:
        assert list(epoch) == ["loss", "samples_per_s"]
        assert epoch["loss"] > 0
        assert epoch["samples_per_s"] > 0
    assert 0 < found["mrr"] <= 1
    assert 0 <= found["hits_at_10"] <= 1
    assert found["peak_rss_bytes"] > 50 << 20
    assert found["state_bytes_on_disk"] == 0
    assert found["statistics"] == {}


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("negatives", ["batch", "model"])
def test_disk_gives_the_numbers_of_ram_to_the_last_digit(job: Job, model: str, negatives: str) -> None:
    def numbers(found: dict[str, Any]) -> tuple[Any, ...]:
        return [epoch["loss"] for epoch in found["epochs"]], found["mrr"], found["hits_at_10"]

    common = ("--model", model, "--negatives", negatives)
    code, output, in_ram = job("--optimizer", "ram", *common)
    assert code == 0, output
    for lookahead in ("0", "4"):
        options = ("--kernel", "reference", "--lookahead", lookahead, "--cache", "64KiB")
        code, output, on_disk = job(*options, *common)
        assert code == 0, output
        assert numbers(on_disk) == numbers(in_ram)
        assert on_disk["statistics"]["steps"] > 0
        assert on_disk["statistics"]["announced_share"] > 0.99
        assert on_disk["state_bytes_on_disk"] == on_disk["statistics"]["state_bytes_on_disk"] > 0
        for words in ("what SparseAdam needs", "rows read / requests", "cache hit rate", "waited for the disk"):
            assert words in output


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_state_directory_that_holds_state_is_refused(job: Job, tmp_path: Path) -> None:
    options = ("--state-dir", str(tmp_path / "state"))
    code, output, _ = job(*options)
    assert code == 0, output
    before = contents(tmp_path / "state")
    assert before
    code, output, found = job(*options)
    assert code == 2
    assert "StateExistsError" in output
    assert found == {}
    assert contents(tmp_path / "state") == before
    code, output, _ = job(*options, "--optimizer", "ram")
    assert code == 0, output


def test_ctrl_c_ends_cleanly(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    seen: list[list[Path]] = []

    def interrupted(*_: Any) -> None:
        seen.append(list((tmp_path / "tmp").iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(kge, "run_epoch", interrupted)
    code, output, found = job()
    assert code == 130, output
    assert "interrupted" in output
    assert [len(directories) for directories in seen] == [1]
    assert list((tmp_path / "tmp").iterdir()) == []
    assert found == {}


def test_divergence_is_an_error(job: Job) -> None:
    code, output, found = job("--optimizer", "ram", "--model", "distmult", "--lr", "1e30")
    assert code == 2
    assert "try a lower --lr" in output
    assert found == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"train": None}, "no array train"),
        ({"valid": np.zeros((3, 3), np.float32)}, "valid must be integers"),
        ({"test": np.zeros((3, 2), np.int64)}, "test must be integers"),
        ({"test": np.full((1, 3), -1)}, "negative id, -1"),
    ],
)
def test_bad_data_is_refused(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **{name: array for name, array in {**arrays(), **content}.items() if array is not None})
    with pytest.raises(ValueError, match=words):
        load_graph(str(path))


def test_a_missing_file_names_the_graphs_at_hand(job: Job) -> None:
    code, output, _ = job("--data", "nowhere.npz")
    assert code == 2
    assert "nowhere.npz" in output
    with pytest.raises(ValueError, match="codex-m, fb15k237"):
        load_graph("nowhere.npz")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--lr", "0"), ("--lr", "nan"), ("--json", "no/such/place.json"), ("--model", "gat"), ("--dim", "0")],
)
def test_bad_options_are_refused_before_training(job: Job, option: str, value: str) -> None:
    code, output, found = job("--optimizer", "ram", option, value)
    assert code == 2
    assert option in output
    assert "epoch" not in output
    assert found == {}


def test_the_carried_graphs() -> None:
    fb15k237 = load_graph("fb15k237")
    assert (fb15k237.n_entities, fb15k237.n_relations, len(fb15k237.train)) == (14541, 237, 272115)
    assert load_graph("codex-m").n_entities == 17050


def test_entities_are_counted_over_all_splits(graph: Graph) -> None:
    assert (graph.n_entities, graph.n_relations) == (N_ENTITIES, N_RELATIONS)
    assert graph.train.dtype == torch.int64


def brute_force_ranks(model: Any, graph: Graph, triples: torch.Tensor) -> list[float]:
    known = {tuple(triple) for split in (graph.train, graph.valid, graph.test) for triple in split.tolist()}
    ranks = []
    for side in (2, 0):
        for triple in triples.tolist():
            candidates = [[*triple[:side], entity, *triple[side + 1 :]] for entity in range(graph.n_entities)]
            with torch.no_grad():
                scores = model(*torch.tensor(candidates).unbind(1)).double().tolist()
            mine = scores[triple[side]]
            better = equal = 0
            for candidate, score in zip(candidates, scores, strict=True):
                if tuple(candidate) not in known:
                    better += score > mine + 1e-6
                    equal += abs(score - mine) <= 1e-6
            ranks.append(1 + better + equal / 2)
    return ranks


@pytest.mark.parametrize("name", sorted(MODELS))
def test_ranks_are_those_of_a_slow_count(name: str, graph: Graph) -> None:
    model = make_model(name, graph, 8, seed=1)
    with torch.no_grad():
        for entity_weights in [weights for name, weights in model.named_parameters() if name.startswith("node_emb")]:
            entity_weights[10:16] = entity_weights[10]  # so that there are ties
    ranks = filtered_ranks(model, graph, graph.test)
    expected = brute_force_ranks(model, graph, graph.test)
    assert ranks.tolist() == expected
    assert any(rank != int(rank) for rank in expected), "the graph was to have ties"
    ranking = evaluate(model, graph, 1000, seed=0)
    assert ranking.mrr == pytest.approx(np.mean(1 / np.array(expected)))
    assert ranking.hits_at_10 == pytest.approx(np.mean(np.array(expected) <= 10))


def test_a_model_that_knows_nothing_ranks_in_the_middle(graph: Graph) -> None:
    model = make_model("distmult", graph, 8, seed=1)
    with torch.no_grad():
        model.node_emb.weight.zero_()
    ranks = filtered_ranks(model, graph, graph.test)
    assert (ranks > N_ENTITIES / 4).all()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_loss_on_carried_negatives_is_the_models_own(name: str, graph: Graph) -> None:
    numbers = list(range(17))
    carried = Collate(graph.train, graph.n_entities, seed=5)(numbers)
    uncarried = Collate(graph.train, graph.n_entities, seed=None)(numbers)
    model = make_model(name, graph, 8, seed=1)
    torch.manual_seed(5)
    own = batch_loss(model, uncarried)
    assert torch.equal(batch_loss(model, carried), own)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_announced_rows_are_those_with_a_gradient(name: str, graph: Graph) -> None:
    model = make_model(name, graph, 8, seed=1)
    batch = next(iter(make_loader(graph, 16, seed=2, carry_negatives=True)))
    batch_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    announced = batch_rows(model)(batch)
    assert set(announced) == {module for _, module in model.named_children()}
    for module, rows in announced.items():
        assert set(rows.tolist()) == set(module.weight.grad.coalesce().indices()[0].tolist())


def test_batches_depend_on_the_seed_alone(graph: Graph) -> None:
    def batches(seed: int, disturbance: int) -> list[Any]:
        torch.manual_seed(disturbance)
        loader = make_loader(graph, 16, seed, carry_negatives=True)
        found = []
        for _ in range(2):
            for batch in loader:
                torch.rand(disturbance)
                found.append([column.tolist() for column in batch])
        return found

    assert batches(1, 3) == batches(1, 4)
    assert batches(1, 3) != batches(2, 3)
    first, second = batches(1, 3)[:8], batches(1, 3)[8:]
    assert first != second
    heads_and_tails = [(batch[0][i], batch[2][i]) for batch in first for i in range(len(batch[0]))]
    assert sorted(heads_and_tails) == sorted((h, t) for h, _, t in graph.train.tolist())


def test_training_lowers_the_loss(graph: Graph) -> None:
    model = make_model("transe", graph, 8, seed=1)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.01)
    loader = make_loader(graph, 16, seed=1, carry_negatives=True)
    sizes: list[int] = []
    first = run_epoch(model, optimizer, loader, lambda size, so_far: sizes.append(size))
    assert sizes == [16] * 7 + [8]
    for _ in range(8):
        last = run_epoch(model, optimizer, loader)
    assert last.loss < 0.9 * first.loss
