"""Rows whose moments do not fit into memory, trained all the same: `python -m bench.headline`.

First 10 M rows of 128 (5.1 GB of weights, 10.2 GB of moments) in a process that a memory cgroup limits to 8 GiB:
torch.optim.SparseAdam, which is killed, and DiskSparseAdam, which writes every row once and then takes 2,000 steps of
8,192 look-ups, half of them uniform, half of them by Zipf 0.9. Then 1 M rows, which fit: beside SparseAdam in RAM, with
everything in cache (warm) and from a state directory just opened (cold). Prints the README's table.

Takes up to 24 GB below --dir and 9 GB of memory (--quick: 2.5 M rows in 2.5 GiB, 6 GB of disk).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import readme
from bench.memory_limit import CannotLimit, MemoryLimit, ProgramFailed
from bench.ram import peak_bytes
from bench.step_training import Alone, InRam, OnDisk, frame_bytes
from bench.step_workload import Draws
from dsa.optim.lookahead import MOST_AHEAD

README_BLOCK = "bench.headline"
GIB = 1 << 30
MIB = 1 << 20
DISTRIBUTIONS = ("uniform", "zipf 0.9")
_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 3600.0
# What a process takes besides weights and cache: code, compiled kernels, buffers; index, and the Zipf draws' tables.
_BASE_BYTES = 900 * MIB
_BYTES_A_ROW = 40
_UNCOUNTED = 2  # steps of SparseAdam before its turn


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Args:
        rows, width, limit_bytes: of what does not fit.
        steps: of DSA there, in all; batch_rows: look-ups of a step.
        beside_rows: of what fits; cold_steps, warm_steps: that are timed there, warm ones in `rounds` turns.
    """

    rows: int = 10_000_000
    width: int = 128
    limit_bytes: int = 8 * GIB
    steps: int = 2000
    batch_rows: int = 8192
    beside_rows: int = 1_000_000
    cold_steps: int = 50
    warm_steps: int = 30
    rounds: int = 5

    @property
    def weight_bytes(self) -> int:
        """Of all weights; the moments take twice as much."""
        return self.rows * self.width * 4

    @property
    def cache_share(self) -> float:
        """Of the rows, that have frames under the limit."""
        left = self.limit_bytes - self.weight_bytes - _BASE_BYTES - _BYTES_A_ROW * self.rows
        return min(max(left, 32 * MIB) / (self.rows * frame_bytes(self.width)), 1.0)


FULL = Scale()
QUICK = Scale(rows=2_500_000, limit_bytes=5 * GIB // 2, steps=300, cold_steps=20, warm_steps=15, rounds=3)


# The three programs.


def in_ram(scale: Scale, progress: Path) -> dict[str, Any]:
    """SparseAdam on what does not fit; the number of steps it has taken is in `progress`."""
    work = Alone(scale.rows, scale.width, scale.batch_rows)
    trainer, draws = InRam(work), Draws(scale.rows, "uniform", seed=1)
    for number in range(1, scale.steps + 1):
        trainer.take([draws.batch(scale.batch_rows)])
        progress.write_text(str(number))
    return {"peak_bytes": peak_bytes()}


def on_disk(scale: Scale, directory: Path) -> dict[str, Any]:
    """DSA on the same."""
    work = Alone(scale.rows, scale.width, scale.batch_rows)
    half = scale.steps // 2
    found: dict[str, Any] = {"rows_per_s": {}, "hit_rate": {}, "cache": scale.cache_share, "steps": 2 * half}
    with OnDisk(work, directory, scale.cache_share) as disk:
        disk.fill()
        for distribution in DISTRIBUTIONS:
            draws = Draws(scale.rows, distribution, seed=1)
            disk.train_on([draws.batch(scale.batch_rows) for _ in range(half)])
            turn = disk.take(half)
            found["rows_per_s"][distribution] = turn.rows / turn.loop_s
            found["hit_rate"][distribution] = 1 - turn.misses / turn.rows
        found["state_bytes_on_disk"] = disk.optimizer.statistics().state_bytes_on_disk
    return {**found, "peak_bytes": peak_bytes()}


def beside(scale: Scale, directory: Path) -> dict[str, Any]:
    """Rows a second of both on what fits into memory, in turns, whole training loop, optimizer alone."""
    rows, found = scale.beside_rows, {}
    ram = InRam(Alone(rows, scale.width, scale.batch_rows))
    ram.fill()
    work = Alone(rows, scale.width, scale.batch_rows)
    with OnDisk(work, directory, 1.0) as disk:
        disk.fill()
        disk.optimizer.close()
    for distribution in DISTRIBUTIONS:
        draws = Draws(rows, distribution, seed=1)
        with OnDisk(work, directory, 1.0, existing="resume") as disk:
            disk.train_on([draws.batch(scale.batch_rows) for _ in range(scale.cold_steps + MOST_AHEAD + 1)])
            cold = disk.take(scale.cold_steps)
            disk.train_on(())
            disk.fill()
            ours, theirs = [], []
            for _ in range(scale.rounds):
                batches = [draws.batch(scale.batch_rows) for _ in range(scale.warm_steps)]
                lead = [draws.batch(scale.batch_rows) for _ in range(disk.lead_steps(scale.batch_rows))]
                # Each step that counts announces a batch, as in the middle of a training.
                beyond = [draws.batch(scale.batch_rows) for _ in range(MOST_AHEAD + 1)]
                disk.train_on([*lead, *batches, *beyond])
                disk.take(len(lead))
                turn = disk.take(len(batches))
                disk.settle()
                ours.append(turn.rows / turn.loop_s)
                ram.take(lead[-_UNCOUNTED:])
                turn = ram.take(batches)
                theirs.append(turn.rows / turn.loop_s)
            disk.go_on()
            disk.optimizer.close()
        found[distribution] = {
            "cold_rows_per_s": cold.rows / cold.loop_s,
            "cold_misses": cold.misses / cold.rows,
            "warm_rows_per_s": statistics.median(ours),
            "ram_rows_per_s": statistics.median(theirs),
            "warm_vs_ram": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        }
    return found


# What starts them.


def run(scale: Scale, directory: Path) -> dict[str, Any]:
    """All of it, in new directories below `directory`, removed at the end.

    Raises:
        RuntimeError: DSA failed.
    """
    found: dict[str, Any] = {"scale": asdict(scale), "notes": []}
    with tempfile.TemporaryDirectory(prefix="dsa-headline-", dir=directory) as name:
        place = Path(name)
        try:
            with MemoryLimit.open(scale.limit_bytes) as limit:
                found["ram"] = _killed(limit, scale, place / "progress")
                print(f"SparseAdam in {_gib(scale.limit_bytes)}: {_ram_words(found['ram'])}", flush=True)
                found["dsa"] = json.loads(limit.run(_command("dsa", scale, place / "state"), _TIMEOUT_S, cwd=_ROOT))
                print(f"DSA in {_gib(scale.limit_bytes)}: {found['dsa']['steps']:,} steps", flush=True)
        except CannotLimit as error:
            found["notes"].append(f"what does not fit into memory: {error}")
    with tempfile.TemporaryDirectory(prefix="dsa-headline-", dir=directory) as name:
        ended = subprocess.run(
            _command("beside", scale, Path(name)), stdout=subprocess.PIPE, text=True, cwd=_ROOT, check=False
        )
        if ended.returncode:
            raise RuntimeError(f"the comparison in memory failed: exit {ended.returncode}")
        found["beside"] = json.loads(ended.stdout)
    return found


def _killed(limit: MemoryLimit, scale: Scale, progress: Path) -> dict[str, Any]:
    """How SparseAdam fared: its steps, and the signal that ended it (0: none did)."""
    progress.write_text("0")
    try:
        limit.run(_command("ram", scale, progress), _TIMEOUT_S, cwd=_ROOT)
    except ProgramFailed as error:
        if error.exit_status >= 0:
            raise
        return {"steps": int(progress.read_text()), "signal": -error.exit_status}
    return {"steps": scale.steps, "signal": 0}


def _command(role: str, scale: Scale, path: Path) -> list[str]:
    return [sys.executable, "-m", "bench.headline", "--role", role, "--of", json.dumps(asdict(scale)), str(path)]


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:g} GiB"


def _ram_words(ram: dict[str, Any]) -> str:
    if not ram["signal"]:
        return f"not killed in {ram['steps']:,} steps"
    return f"killed (signal {ram['signal']}) in step {ram['steps'] + 1:,}"


def held(found: dict[str, Any]) -> bool:
    """Whether the claim was shown: SparseAdam killed for memory, DSA not."""
    return found.get("ram", {}).get("signal") == 9 and "dsa" in found


def markdown(found: dict[str, Any]) -> str:
    """The README's table."""
    scale = Scale(**found["scale"])
    size = f"{scale.rows / 1e6:g} M x {scale.width}: {scale.weight_bytes / 1e9:.1f} GB of weights"
    size += f", {2 * scale.weight_bytes / 1e9:.1f} GB of moments, {_gib(scale.limit_bytes)} of memory"
    lines = [f"| {size} | |", "|---|---|"]
    if "ram" in found:
        lines.append(f"| torch.optim.SparseAdam | **{_ram_words(found['ram'])}** |")
    if "dsa" in found:
        dsa = found["dsa"]
        lines.append(
            f"| DiskSparseAdam, cache {dsa['cache']:.0%} | **{dsa['steps']:,} steps**, at most "
            f"{dsa['peak_bytes'] / GIB:.1f} GiB in memory, {dsa['state_bytes_on_disk'] / 1e9:.1f} GB on disk |"
        )
        for name, rate in dsa["rows_per_s"].items():
            lines.append(f"| {name} | {rate:,.0f} rows/s, {dsa['hit_rate'][name]:.0%} of them in cache |")
    lines += [
        "",
        f"| {scale.beside_rows / 1e6:g} M x {scale.width}, rows/s | SparseAdam in RAM | DSA, warm | DSA, cold |",
    ]
    lines.append("|---|---|---|---|")
    for name, one in found["beside"].items():
        cold = f"{one['cold_rows_per_s']:,.0f} ({one['cold_misses']:.0%} read from disk)"
        warm = f"**{one['warm_rows_per_s']:,.0f}** ({one['warm_vs_ram']:.1f} times)"
        lines.append(f"| {name} | {one['ram_rows_per_s']:,.0f} | {warm} | {cold} |")
    lines += ["", f"From one run of `python -m bench.headline`; batches of {scale.batch_rows:,} look-ups, no model."]
    lines += [f"Left out: {note}." for note in found["notes"]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is 0 only where the claim was shown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2.5 M rows in 2.5 GiB, 300 steps")
    parser.add_argument("--dir", type=Path, default=Path(), help="where the files go: on a disk, not in memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as one object")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    parser.add_argument("--role", choices=["ram", "dsa", "beside"], help=argparse.SUPPRESS)
    parser.add_argument("--of", help=argparse.SUPPRESS)
    parser.add_argument("path", nargs="?", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.role is not None:
        roles = {"ram": in_ram, "dsa": on_disk, "beside": beside}
        print(json.dumps(roles[chosen.role](Scale(**json.loads(chosen.of)), chosen.path)))
        return 0
    if not chosen.dir.is_dir():
        parser.error(f"there is no directory {chosen.dir}")
    try:
        found = run(QUICK if chosen.quick else FULL, chosen.dir.resolve())
    except (RuntimeError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    block = markdown(found)
    print(block)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    if chosen.readme:
        try:
            readme.write_block(readme.README, README_BLOCK, block)
        except (OSError, ValueError) as error:
            print(f"the README was not changed: {error}", file=sys.stderr)
            return 1
    return 0 if held(found) else 1


if __name__ == "__main__":
    sys.exit(main())
