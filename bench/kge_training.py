"""Knowledge-graph training of the main job: the graph, batches with their negatives, the loss, one epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torch_geometric.nn import ComplEx, DistMult, RotatE, TransE
from torch_geometric.nn.kge import KGEModel

DATA_DIR = Path(__file__).parent / "data"
MODELS: dict[str, type[KGEModel]] = {"transe": TransE, "distmult": DistMult, "complex": ComplEx, "rotate": RotatE}
_SPLITS = ("train", "valid", "test")


class Diverged(ArithmeticError):
    """Training has left the finite numbers."""


@dataclass(frozen=True)
class Graph:
    """Triples of head, relation, tail, int64 [n, 3] a split; entities and relations are numbered from 0."""

    train: torch.Tensor
    valid: torch.Tensor
    test: torch.Tensor
    n_entities: int
    n_relations: int


def load_graph(data: str) -> Graph:
    """Read a graph.

    Args:
        data: the path of an .npz file with integer arrays train, valid and test of [n, 3], or a name in bench/data.

    Raises:
        ValueError: there is no such file, or it does not hold such arrays.
    """
    carried = DATA_DIR / f"{data}.npz"
    path = carried if carried.is_file() else Path(data)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in DATA_DIR.glob("*.npz")))
        raise ValueError(f"no file {data}; give the path of an .npz file or one of {names}")
    splits = _read_splits(path)
    highest = np.max([split.max(axis=0) for split in splits], axis=0)
    train, valid, test = (torch.from_numpy(split) for split in splits)
    return Graph(train, valid, test, int(max(highest[0], highest[2])) + 1, int(highest[1]) + 1)


def _read_splits(path: Path) -> list[NDArray[np.int64]]:
    with np.load(path) as file:
        missing = [name for name in _SPLITS if name not in file]
        if missing:
            raise ValueError(f"{path} has no array {', '.join(missing)}; it needs train, valid and test")
        arrays = [file[name] for name in _SPLITS]
    for name, array in zip(_SPLITS, arrays, strict=True):
        if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu" or not len(array):
            raise ValueError(f"{path}: {name} must be integers of [n, 3], got {array.dtype} of {list(array.shape)}")
        if int(array.min()) < 0:
            raise ValueError(f"{path}: {name} has a negative id, {int(array.min())}")
    return [np.ascontiguousarray(array, dtype=np.int64) for array in arrays]


class Batch(NamedTuple):
    """Triples int64 [n] each, and as many corrupted ones (None: the model draws them)."""

    head: torch.Tensor
    relation: torch.Tensor
    tail: torch.Tensor
    negative_head: torch.Tensor | None
    negative_tail: torch.Tensor | None


class Collate:
    """Triple numbers become a batch; negatives come from a generator that nothing else draws from.

    As in PyTorch Geometric, the first half of a batch gets another head and the rest another tail.
    """

    def __init__(self, triples: torch.Tensor, n_entities: int, seed: int | None) -> None:
        self._triples = triples
        self._n_entities = n_entities
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __call__(self, numbers: list[int]) -> Batch:
        head, relation, tail = self._triples[torch.tensor(numbers)].unbind(1)
        if self._generator is None:
            return Batch(head, relation, tail, None, None)
        other = torch.randint(self._n_entities, (len(numbers),), generator=self._generator)
        half = len(numbers) // 2
        return Batch(
            head, relation, tail, torch.cat([other[:half], head[half:]]), torch.cat([tail[:half], other[half:]])
        )


def make_loader(graph: Graph, batch: int, seed: int, carry_negatives: bool) -> DataLoader[Any]:
    """The shuffled training triples in batches; order and negatives depend on the seed and nothing else."""
    order_seed, negatives_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
    return DataLoader(
        range(len(graph.train)),  # type: ignore[arg-type]
        batch_size=batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(order_seed),
        collate_fn=Collate(graph.train, graph.n_entities, negatives_seed if carry_negatives else None),
    )


def make_model(name: str, graph: Graph, dim: int, seed: int) -> KGEModel:
    """PyTorch Geometric's own model, with sparse gradients."""
    torch.manual_seed(seed)
    return MODELS[name](graph.n_entities, graph.n_relations, dim, sparse=True)


def batch_rows(model: KGEModel) -> Callable[[Batch], Mapping[Any, torch.Tensor]]:
    """The function for lookahead: which rows of which embedding a batch's step will update."""
    entities = [module for name, module in model.named_children() if name.startswith("node_emb")]
    relations = [module for name, module in model.named_children() if name.startswith("rel_emb")]

    def rows(batch: Batch) -> dict[Any, torch.Tensor]:
        columns = (batch.head, batch.tail, batch.negative_head, batch.negative_tail)
        ids = torch.cat([column for column in columns if column is not None])
        return {**dict.fromkeys(entities, ids), **dict.fromkeys(relations, batch.relation)}

    return rows


def batch_loss(model: KGEModel, batch: Batch) -> torch.Tensor:
    """The model's own loss, on the negatives that the batch carries where it carries any."""
    if batch.negative_head is not None:
        # loss() asks random_sample() for its negatives; so each model keeps its own kind of loss and its margin.
        model.random_sample = lambda *_: (batch.negative_head, batch.relation, batch.negative_tail)
    return model.loss(batch.head, batch.relation, batch.tail)  # type: ignore[no-any-return]


class Epoch(NamedTuple):
    """Mean loss of an epoch's triples, and triples (without negatives) per second of wall time."""

    loss: float
    samples_per_s: float


def run_epoch(
    model: KGEModel,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    on_batch: Callable[[int, Epoch], None] = lambda n, so_far: None,
) -> Epoch:
    """One pass over the batches; `on_batch(triples, epoch so far)` after each step.

    Raises:
        Diverged: the loss is not finite.
    """
    model.train()
    start = time.perf_counter()
    total, n_triples = 0.0, 0
    for batch in batches:
        optimizer.zero_grad()
        loss = batch_loss(model, batch)
        loss.backward()
        optimizer.step()
        size = len(batch.head)
        total += loss.item() * size
        n_triples += size
        if not math.isfinite(total):
            raise Diverged(f"the loss is {loss.item()} after {n_triples} triples of this epoch; try a lower --lr")
        on_batch(size, Epoch(total / n_triples, n_triples / (time.perf_counter() - start)))
    return Epoch(total / n_triples, n_triples / (time.perf_counter() - start))
