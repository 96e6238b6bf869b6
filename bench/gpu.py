"""Parameters on a GPU and moments on disk: the same numbers, what of the copies and reads is hidden, time, memory.

    python -m bench.gpu [--rows 1000000] [--dim 128] [--batch 8192] [--steps 100] [--cache 1.0] [--json F] [--folder D]

For a machine with a CUDA device, from a checkout, with that machine's own Python and torch; it takes a few minutes.
Without one it says so and ends with status 0. `--on-cpu` goes the same way on the CPU, through the late device that
tests use: to see that the script works, not for its times.

The ways compared take the same batches through the same model (an embedding and matrices that take a few ms):
`model` no optimizer at all; `vram` torch.optim.SparseAdam, its moments on the GPU; `pinned` the same arithmetic with
moments in pinned host memory, copied in the step; `announced` DiskSparseAdam with lookahead; `unannounced` the same
without; `off` announced, with staging="off".

Hidden: of what a step without announcements costs more than one with moments in VRAM (gathering, copies each way), the
share that a step with announcements does not cost. With a smaller `--cache`, a share of the rows, reads are in both:
nothing can hide what the disk takes longer for than the model. Parity: every bit of weights and moments against
torch.optim.SparseAdam on the same device, duplicates in gradients included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP_STEPS = 10
PARITY_ROWS, PARITY_DIM, PARITY_BATCH, PARITY_STEPS = 20_000, 32, 2_000, 100
Batches = Iterable[Tensor]


class HostMoments:
    """SparseAdam with its moments in (pinned) host memory: gathered, copied, updated, copied back, in the step."""

    def __init__(self, param: nn.Parameter, lr: float = 1e-3) -> None:
        from dsa.optim.kernels import Hyperparameters, add_to_rows, reference_step

        self._hyper, self._add, self._step = Hyperparameters, add_to_rows, reference_step
        self._param, self._lr, self._steps = param, lr, 0
        shape = (len(param), 2 * param.shape[1])
        self._moments = torch.zeros(shape, pin_memory=param.is_cuda)
        self._block = torch.empty(0)

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        self._steps += 1
        if self._param.grad is None:
            return
        grad = self._param.grad.coalesce()
        rows = grad.indices()[0]
        at = rows.cpu()
        if len(at) > len(self._block):
            self._block = torch.empty(len(at), self._moments.shape[1], pin_memory=self._param.is_cuda)
        block = self._block[: len(at)]
        torch.index_select(self._moments, 0, at, out=block)
        old = block.to(self._param.device)
        size = self._hyper(self._lr, 0.9, 0.999, 1e-8, self._steps).step_size
        new, change = self._step(old, grad.values(), 0.9, 0.999, 1e-8, size)
        self._add(self._param, rows, change)
        block.copy_(new)
        self._moments.index_copy_(0, at, block)


class Place:
    """The device that is measured: where tensors are, how to wait for it, what memory it says is taken."""

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.device = torch.device("cpu" if on_cpu else "cuda")
        self.name = "the CPU's late device" if on_cpu else torch.cuda.get_device_name()

    def synchronize(self) -> None:
        if not self.on_cpu:
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        if not self.on_cpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return 0 if self.on_cpu else torch.cuda.max_memory_allocated()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two fp32 tensors are equal to the last bit."""
    return torch.equal(one.detach().cpu().view(torch.int32), other.detach().cpu().view(torch.int32))


def disk_optimizer(param: nn.Parameter, folder: str, place: Place, cache: int | str, staging: str = "auto") -> Any:
    from dsa import DiskSparseAdam

    staging = "on" if place.on_cpu and staging == "auto" else staging
    return DiskSparseAdam([("table", param)], state_dir=folder, cache=cache, staging=staging)


def parity(place: Place, folder: str, options: argparse.Namespace, announced: bool) -> bool:
    """Whether weights and moments are those of SparseAdam, with batches that overlap by nine tenths."""
    shrink = 10 if place.on_cpu else 1
    rows, batch_rows = PARITY_ROWS // shrink, PARITY_BATCH // shrink
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(rows, PARITY_DIM, generator=generator)
    ours, theirs = (nn.Parameter(start.to(place.device, copy=True)) for _ in range(2))
    oracle = torch.optim.SparseAdam([theirs])
    batches, batch = [], torch.randperm(rows, generator=generator)[:batch_rows]
    for _ in range(PARITY_STEPS):
        batch = torch.cat([batch[batch_rows // 10 :], torch.randint(rows, (batch_rows // 10,), generator=generator)])
        batches.append(batch)
    with tempfile.TemporaryDirectory(dir=folder) as state:
        opt = disk_optimizer(ours, state, place, cache=rows * 100)
        for rows_of_step in opt.lookahead(batches, rows=lambda ids: {"table": ids}) if announced else batches:
            values = torch.randn(len(rows_of_step), PARITY_DIM, generator=generator).to(place.device)
            for param in (ours, theirs):
                param.grad = torch.sparse_coo_tensor(rows_of_step.to(place.device)[None], values, param.shape)
            opt.step()
            oracle.step()
        moments = opt.moments("table", range(rows))
        opt.close()
    state_of = oracle.state[theirs]
    return same_bits(ours, theirs) and all(same_bits(moments[key], state_of[key]) for key in moments)


class Model:
    """Looks rows up and multiplies them by matrices until a few milliseconds have gone by."""

    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        torch.manual_seed(0)
        self.table = nn.Embedding(options.rows, options.dim, sparse=True, device=place.device)
        self.weight: nn.Parameter = self.table.weight  # type: ignore[assignment]
        self._matrix = torch.randn(options.dim, options.dim, device=place.device) / options.dim**0.5
        self._layers = options.layers

    def backward(self, ids: Tensor) -> None:
        """Forward and backward."""
        self.weight.grad = None
        x = self.table(ids)
        for _ in range(self._layers):
            x = torch.tanh(x @ self._matrix)
        x.square().mean().backward()


def draw(options: argparse.Namespace, steps: int) -> list[Tensor]:
    """Batches drawn uniformly: the same in every way compared."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(options.rows, (options.batch,), generator=generator) for _ in range(steps)]


def measure(
    name: str,
    options: argparse.Namespace,
    place: Place,
    make: Callable[[Model], Any],
    batches_of: Callable[[Any, Sequence[Tensor]], Batches] = lambda optimizer, batches: batches,
) -> dict[str, Any]:
    """Time of a step and peak memory of one way."""
    place.reset_peak()
    model = Model(options, place)
    optimizer = make(model)
    model_bytes = place.peak_bytes()
    batches = draw(options, options.steps + WARM_UP_STEPS)
    before, began = None, 0.0
    for i, ids in enumerate(batches_of(optimizer, batches)):
        if i == WARM_UP_STEPS:
            place.synchronize()
            before = optimizer.statistics() if hasattr(optimizer, "statistics") else None
            began = time.perf_counter()
        model.backward(ids.to(place.device, non_blocking=True))
        if optimizer is not None:
            optimizer.step()
    place.synchronize()
    found: dict[str, Any] = {
        "way": name,
        "step_ms": 1000 * (time.perf_counter() - began) / options.steps,
        "peak_bytes": place.peak_bytes(),
        "with_weights_and_state_bytes": model_bytes,
    }
    if before is not None:
        after = optimizer.statistics()
        found |= {
            "device_bytes": after.device_bytes,
            "wait_ms": 1000 * (after.wait_s - before.wait_s) / options.steps,
            "rows_read": (after.rows_read - before.rows_read) / options.steps,
            "announced_share": after.announced_share,
        }
    return found


def fill(folder: str, options: argparse.Namespace, place: Place) -> None:
    """Write a record of every row, so that later steps read them."""
    param = nn.Parameter(torch.zeros(options.rows, options.dim, device=place.device))
    with disk_optimizer(param, folder, place, cache="256MiB", staging="off") as opt:
        for rows in torch.arange(options.rows, device=place.device).split(65536):
            param.grad = torch.sparse_coo_tensor(
                rows[None], torch.ones(len(rows), options.dim, device=place.device), param.shape
            )
            opt.step()


def bring_in(optimizer: Any, rows: int) -> None:
    """Have the moments of the first rows in the cache, so that their steps read nothing."""
    for first in range(0, rows, 65536):
        optimizer.moments("table", range(first, min(first + 65536, rows)))


def compare(options: argparse.Namespace, place: Place, folder: str) -> Iterator[dict[str, Any]]:
    """All ways, one after the other."""
    from dsa.io.cache import FRAME_OVERHEAD_BYTES

    yield measure("model", options, place, lambda model: None)
    yield measure("vram", options, place, lambda model: torch.optim.SparseAdam([model.weight]))
    yield measure("pinned", options, place, lambda model: HostMoments(model.weight))
    state = str(Path(folder) / "state")
    fill(state, options, place)
    cache = int(options.rows * (options.dim * 8 + FRAME_OVERHEAD_BYTES) * options.cache) + FRAME_OVERHEAD_BYTES
    for name, staging, ahead in (("announced", "auto", True), ("unannounced", "auto", False), ("off", "off", True)):
        opened: list[Any] = []

        def make(model: Model, staging: str = staging, opened: list[Any] = opened) -> Any:
            from dsa import DiskSparseAdam

            how = "on" if place.on_cpu and staging == "auto" else staging
            opened.append(
                DiskSparseAdam([("table", model.weight)], state_dir=state, cache=cache, staging=how, existing="resume")
            )
            opened[0]._books.unchecked_weights = False  # other weights than the moments', knowingly
            bring_in(opened[0], int(options.rows * options.cache))
            return opened[0]

        def batches_of(optimizer: Any, batches: Sequence[Tensor], ahead: bool = ahead) -> Batches:
            return optimizer.lookahead(batches, rows=lambda ids: {"table": ids}) if ahead else batches

        yield measure(name, options, place, make, batches_of)
        opened[0].close()


def table(found: Sequence[dict[str, Any]]) -> str:
    """The ways as a Markdown table."""
    lines = ["| way | ms a step | waiting for rows | rows read | peak memory | staging |", "|---|---|---|---|---|---|"]
    for each in found:
        wait = f"{each['wait_ms']:.2f} ms" if "wait_ms" in each else ""
        read = f"{each['rows_read']:.0f}" if "rows_read" in each else ""
        staging = f"{each['device_bytes'] / 2**20:.1f} MiB" if "device_bytes" in each else ""
        peak = f"{each['peak_bytes'] / 2**20:.0f} MiB"
        lines.append(f"| {each['way']} | {each['step_ms']:.2f} | {wait} | {read} | {peak} | {staging} |")
    return "\n".join(lines)


def hidden_share(found: Sequence[dict[str, Any]]) -> float | None:
    """Of what steps pay for reads and copies when nothing is announced, the share that is gone when it is."""
    step_ms = {each["way"]: each["step_ms"] for each in found}
    paid = step_ms["unannounced"] - step_ms["vram"]
    return 1 - max(0.0, step_ms["announced"] - step_ms["vram"]) / paid if paid > 0 else None


def why_not() -> str | None:
    """Why nothing can be measured here; None where it can."""
    if torch.version.hip is not None:
        return f"this torch ({torch.__version__}) is built for ROCm, on which nobody has tried it"
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device on this machine"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module; the exit status is 1 where numbers differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="DiskSparseAdam with parameters on a GPU")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=60, help="matrices that the model multiplies by")
    parser.add_argument("--cache", type=float, default=1.0, help="frames, as a share of the rows")
    parser.add_argument("--folder", help="where the state goes, on the disk to be measured")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument(
        "--on-cpu", action="store_true", help="go through the script on the CPU; no figures of interest"
    )
    options = parser.parse_args(arguments)
    if not 0 < options.cache <= 1:
        parser.error(f"--cache is a share of the rows, above 0 and at most 1, got {options.cache}")
    reason = None if options.on_cpu else why_not()
    if reason is not None:
        print(f"bench.gpu: nothing was measured: {reason}")
        result: dict[str, Any] = {"measured": False, "reason": reason}
    else:
        result = run(options)
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0 if all(result.get("parity", {}).values()) else 1


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Parity, then the ways compared; printed as they come."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    place = Place(options.on_cpu)
    print(f"device: {place.name}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        same = {name: parity(place, folder, options, name == "announced") for name in ("announced", "unannounced")}
        print(
            "parity, every bit: " + ", ".join(f"{name} {'yes' if ok else 'NO'}" for name, ok in same.items()),
            flush=True,
        )
        found = []
        for each in compare(options, place, folder):
            found.append(each)
            print(f"{each['way']}: {each['step_ms']:.2f} ms a step", flush=True)
    share = hidden_share(found)
    print(table(found))
    print("hidden: " + ("no figure, announcing nothing cost nothing" if share is None else f"{share:.0%}"))
    return {
        "measured": True,
        "device": place.name,
        "torch": torch.__version__,
        "options": {key: value for key, value in vars(options).items() if key not in ("json", "folder")},
        "parity": same,
        "hidden_share": share,
        "ways": found,
    }


if __name__ == "__main__":
    sys.exit(main())
