"""Filtered link prediction: the rank of the true entity among all, in both directions, a block of queries at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.nn.kge import ComplEx, DistMult, KGEModel, RotatE, TransE

from bench.kge_training import Diverged, Graph

_QUERIES_PER_BLOCK = 64


class Ranking(NamedTuple):
    """Mean reciprocal rank, and the share of ranks of at most 10."""

    mrr: float
    hits_at_10: float


class _Answers:
    """All known entities for a given (anchor, relation), as runs of one sorted array."""

    def __init__(self, triples: NDArray[np.int64], anchor: int, answer: int, n_relations: int) -> None:
        self._n_relations = n_relations
        keys = triples[:, anchor] * n_relations + triples[:, 1]
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._entities = triples[order, answer]

    def of(self, anchors: NDArray[np.int64], relations: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """For queries [n]: the query number and the entity of each known answer."""
        keys = anchors * self._n_relations + relations
        first = np.searchsorted(self._keys, keys, side="left")
        counts = np.searchsorted(self._keys, keys, side="right") - first
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.repeat(first, counts) + within
        return torch.from_numpy(np.repeat(np.arange(len(keys)), counts)), torch.from_numpy(self._entities[places])


@torch.no_grad()
def filtered_ranks(
    model: KGEModel, graph: Graph, triples: Tensor, on_queries: Callable[[int], None] = lambda n: None
) -> Tensor:
    """Ranks (float64, [2 n]: tails, then heads) of the true entities of `triples`, which are among the graph's.

    Other known answers to the same query do not count. Entities that score as the true one does count half: the rank
    is the mean over the orders that ties allow.

    Args:
        triples: int64 [n, 3].
        on_queries: called with the number of queries done after each block.

    Raises:
        Diverged: a score is not a number.
    """
    known = torch.cat([graph.train, graph.valid, graph.test]).numpy()
    ranks = []
    for anchor, answer in ((0, 2), (2, 0)):
        answers = _Answers(known, anchor, answer, graph.n_relations)
        score_all = _scorer(model, tails=answer == 2)
        for block in torch.split(triples, _QUERIES_PER_BLOCK):
            scores = score_all(block[:, anchor], block[:, 1])
            if scores.isnan().any():
                raise Diverged("the model's scores are not numbers: training has diverged; try a lower --lr")
            target = scores.gather(1, block[:, answer, None])
            # The true entity is a known answer itself, so it counts neither as better nor as equal.
            scores[answers.of(block[:, anchor].numpy(), block[:, 1].numpy())] = -torch.inf
            better, equal = (scores > target).sum(1), (scores == target).sum(1)
            ranks.append(1.0 + better.double() + equal.double() / 2)
            on_queries(len(block))
    return torch.cat(ranks)


def evaluate(
    model: KGEModel, graph: Graph, n_triples: int, seed: int, on_queries: Callable[[int], None] = lambda n: None
) -> Ranking:
    """Filtered MRR and Hits@10 over `n_triples` test triples (all, where there are no more), drawn by the seed."""
    chosen = torch.randperm(len(graph.test), generator=torch.Generator().manual_seed(seed))[:n_triples]
    model.eval()
    ranks = filtered_ranks(model, graph, graph.test[chosen], on_queries)
    return Ranking(float((1 / ranks).mean()), float((ranks <= 10).double().mean()))


_Scorer = Callable[[Tensor, Tensor], Tensor]


def _scorer(model: KGEModel, tails: bool) -> _Scorer:
    """A function (anchors [b], relations [b]) -> the model's scores [b, entities] of every entity on the other side.

    forward() would look up, for each query, every entity anew; these bring the known side of a query together first,
    and compare it with all entities in one product or distance.
    """
    for kind, make in _SCORERS.items():
        if isinstance(model, kind):
            return make(model, tails)
    raise TypeError(f"no way to score all entities is known for {type(model).__name__}")


def _transe(model: TransE, tails: bool) -> _Scorer:
    entities = F.normalize(model.node_emb.weight, p=model.p_norm, dim=-1)
    sign = 1 if tails else -1

    def score(anchors: Tensor, relations: Tensor) -> Tensor:
        return -torch.cdist(entities[anchors] + sign * model.rel_emb.weight[relations], entities, p=model.p_norm)

    return score


def _distmult(model: DistMult, tails: bool) -> _Scorer:
    entities: Tensor = model.node_emb.weight
    return lambda anchors, relations: (entities[anchors] * model.rel_emb.weight[relations]) @ entities.T


def _complex(model: ComplEx, tails: bool) -> _Scorer:
    re, im = model.node_emb.weight, model.node_emb_im.weight
    entities = torch.complex(re, im)
    turns = torch.complex(model.rel_emb.weight, model.rel_emb_im.weight)

    def score(anchors: Tensor, relations: Tensor) -> Tensor:
        # Re<h, r, conj t>: for a given t it is Re<h, conj(conj(r) t)>.
        query = entities[anchors] * (turns if tails else turns.conj())[relations]
        return torch.mm(query.real, re.T) + torch.mm(query.imag, im.T)

    return score


def _rotate(model: RotatE, tails: bool) -> _Scorer:
    entities = torch.cat([model.node_emb.weight, model.node_emb_im.weight], dim=1)
    sign = 1 if tails else -1

    def score(anchors: Tensor, relations: Tensor) -> Tensor:
        # A rotation keeps distances: |h r - t| = |h - t conj(r)|.
        angle = sign * model.rel_emb.weight[relations]
        re, im = model.node_emb.weight[anchors], model.node_emb_im.weight[anchors]
        cos, sin = torch.cos(angle), torch.sin(angle)
        query = torch.cat([cos * re - sin * im, cos * im + sin * re], dim=1)
        distance = torch.cdist(query, entities, compute_mode="donot_use_mm_for_euclid_dist")
        return torch.rsub(distance, model.margin)

    return score


_SCORERS: dict[type[KGEModel], Callable[[KGEModel, bool], _Scorer]] = {
    TransE: _transe,
    DistMult: _distmult,
    ComplEx: _complex,
    RotatE: _rotate,
}
