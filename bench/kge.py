"""The main job, `python -m bench.kge`: a knowledge-graph embedding trained with the Adam state on disk.

With `--optimizer ram` it is `torch.optim.SparseAdam` on the same batches.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch_geometric.nn.kge import KGEModel

from bench import kge_evaluation
from bench.kge_report import Result, peak_rss_bytes, result_table
from bench.kge_training import Batch, Diverged, Epoch, Graph, batch_rows, load_graph, make_loader, make_model, run_epoch
from dsa import DiskSparseAdam
from dsa.errors import DsaError

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


class ModelName(str, Enum):
    transe = "transe"
    distmult = "distmult"
    complex = "complex"
    rotate = "rotate"


class Negatives(str, Enum):
    batch = "batch"
    model = "model"


class OptimizerName(str, Enum):
    disk = "disk"
    ram = "ram"


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    data: str
    model: str
    dim: int
    batch: int
    epochs: int
    lr: float
    seed: int
    negatives: str
    cache: str
    lookahead: int
    backend: str
    kernel: str
    state_dir: Path | None
    optimizer: str
    eval_triples: int


@app.command()
def main(
    data: Annotated[str, typer.Option(help="An .npz file with train, valid and test, or a name in bench/data.")] = (
        "fb15k237"
    ),
    model: Annotated[ModelName, typer.Option(help="PyTorch Geometric's model.")] = ModelName.transe,
    dim: Annotated[int, typer.Option(min=1, help="Width of the embeddings.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Triples a step.")] = 1000,
    epochs: Annotated[int, typer.Option(min=1)] = 12,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.001,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    negatives: Annotated[
        Negatives, typer.Option(help="Drawn in the loader and carried in the batch, or drawn inside the model.")
    ] = Negatives.batch,
    cache: Annotated[str, typer.Option(help="RAM for the state's cache: bytes, 4MiB, 2GiB or auto.")] = "4MiB",
    lookahead: Annotated[int, typer.Option(min=0, help="Batches whose rows are announced ahead of time.")] = 16,
    backend: Annotated[str, typer.Option(help="How to reach the disk: auto, uring, threads, aiofiles.")] = "auto",
    kernel: Annotated[str, typer.Option(help="How to compute the update: auto, exact, fast, reference.")] = "auto",
    state_dir: Annotated[
        Path | None, typer.Option(help="Where the state goes; by default a temporary directory (TMPDIR chooses where).")
    ] = None,
    optimizer: Annotated[
        OptimizerName, typer.Option(help="The state on disk, or torch.optim.SparseAdam on the same batches.")
    ] = OptimizerName.disk,
    eval_triples: Annotated[int, typer.Option(min=1, help="Test triples to rank, in both directions.")] = 2000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Train a knowledge-graph embedding with the Adam state on disk; then rank, and say what it took."""
    options = Options(
        data=data,
        model=model.value,
        dim=dim,
        batch=batch,
        epochs=epochs,
        lr=lr,
        seed=seed,
        negatives=negatives.value,
        cache=cache,
        lookahead=lookahead,
        backend=backend,
        kernel=kernel,
        state_dir=state_dir,
        optimizer=optimizer.value,
        eval_triples=eval_triples,
    )
    console = Console()
    if not lr > 0:
        raise typer.BadParameter(f"must be above 0, got {lr}", param_hint="--lr")
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {json_file.parent}", param_hint="--json")
    try:
        graph = load_graph(data)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--data") from error
    try:
        result = run(options, graph, console)
    except KeyboardInterrupt:
        kept = state_dir is not None and optimizer is OptimizerName.disk
        left = f"; {state_dir} holds the empty state that it began with" if kept else ""
        console.print(f"interrupted, nothing was committed{left}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    except (DsaError, Diverged) as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json(), indent=1) + "\n")


def run(options: Options, graph: Graph, console: Console) -> Result:
    """Train, evaluate and print the table.

    Raises:
        DsaError: an option that the optimizer refuses, a state directory that holds state, a device that fails.
        Diverged: training has left the finite numbers.
        KeyboardInterrupt: after everything was closed and a temporary directory removed.
    """
    model = make_model(options.model, graph, options.dim, options.seed)
    loader = make_loader(graph, options.batch, options.seed, carry_negatives=options.negatives == "batch")
    state_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())
    console.print(
        f"{options.model}, dim {options.dim}: {graph.n_entities:,} entities, {graph.n_relations:,} relations, "
        f"{len(graph.train):,} triples; Adam state {state_bytes / 2**20:.1f} MiB, "
        + ("in RAM" if options.optimizer == "ram" else f"on disk behind a cache of {options.cache}"),
        highlight=False,
        soft_wrap=True,
    )
    with _optimizer(options, model) as optimizer:
        batches: Iterable[Batch] = loader
        if isinstance(optimizer, DiskSparseAdam):
            if options.negatives == "batch":
                batches = optimizer.lookahead(loader, rows=batch_rows(model), depth=options.lookahead)
            else:
                optimizer.watch(model)
        epochs = [
            _epoch(f"epoch {number}/{options.epochs}", model, optimizer, batches, len(graph.train), console)
            for number in range(1, options.epochs + 1)
        ]
        ranking = _evaluation(model, graph, options, console)
        statistics: dict[str, Any] = {}
        if isinstance(optimizer, DiskSparseAdam):
            optimizer.checkpoint()
            statistics = asdict(optimizer.statistics())
    result = Result(
        epochs=epochs,
        mrr=ranking.mrr,
        hits_at_10=ranking.hits_at_10,
        peak_rss_bytes=peak_rss_bytes(),
        state_bytes_on_disk=statistics.get("state_bytes_on_disk", 0),
        statistics=statistics,
    )
    training_s = sum(len(graph.train) / epoch.samples_per_s for epoch in epochs)
    console.print(result_table(result, state_bytes, training_s))
    return result


@contextlib.contextmanager
def _optimizer(options: Options, model: KGEModel) -> Iterator[torch.optim.Optimizer]:
    if options.optimizer == "ram":
        yield torch.optim.SparseAdam(list(model.parameters()), lr=options.lr)
        return
    with contextlib.ExitStack() as stack:
        state_dir = options.state_dir
        if state_dir is None:
            state_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsa-kge-")))
        optimizer = stack.enter_context(
            DiskSparseAdam(
                model.named_parameters(),
                lr=options.lr,
                state_dir=state_dir,
                cache=options.cache,
                backend=options.backend,
                kernel=options.kernel,
            )
        )
        # Where the directory holds state this says so now, not at the first step.
        optimizer.checkpoint()
        yield optimizer


def _epoch(
    title: str,
    model: KGEModel,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    n_triples: int,
    console: Console,
) -> Epoch:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[rate]:,.0f} samples/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=n_triples, loss=float("nan"), rate=0.0)

        def show(size: int, so_far: Epoch) -> None:
            progress.update(task, advance=size, loss=so_far.loss, rate=so_far.samples_per_s)

        epoch = run_epoch(model, optimizer, batches, show)
    console.print(
        f"{title}  loss {epoch.loss:.6f}  {epoch.samples_per_s:,.0f} samples/s", highlight=False, soft_wrap=True
    )
    return epoch


def _evaluation(model: KGEModel, graph: Graph, options: Options, console: Console) -> kge_evaluation.Ranking:
    n_triples = min(options.eval_triples, len(graph.test))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"ranking {n_triples:,} test triples", total=2 * n_triples)
        return kge_evaluation.evaluate(
            model, graph, n_triples, options.seed, lambda n_queries: progress.update(task, advance=n_queries)
        )


if __name__ == "__main__":
    app()
