"""What a device does to training: rows a second and waiting time by cache and lookahead: `python -m bench.study`.

A table of records of 1 KiB, whose log has been written over and cleaned many times; each step touches rows drawn
uniformly or by a Zipf law; the engine's own decisions run on an emulated device in virtual time (study_simulation.py).
Lookahead 0 means that nothing is announced: a step is the first to ask for its rows. Reading and writing cost what the
device takes, no processor time; a row costs `--model-us` outside of the optimizer and 0.7 us in it. The same arguments
give the same figures, to the digit.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.study_simulation import Outcome, Setting, run
from bench.study_workload import Scale
from dsa.errors import ConfigError
from dsa.io.backends.device_models import MODELS, DeviceModel
from dsa.io.probe import load_probe

WORKLOADS = ("uniform", "zipf")
CACHES = (0.01, 0.10, 0.50)
LOOKAHEADS = (0, 4, 64)

Results = list[tuple[Setting, Outcome]]


def devices(names: str) -> dict[str, DeviceModel]:
    """The devices of a list such as "nvme,hdd" or "probe.json" (a saved probe).

    Raises:
        ConfigError: there is no such device.
    """
    found: dict[str, DeviceModel] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name in MODELS:
            found[name] = MODELS[name]
        elif Path(name).is_file():
            found[Path(name).stem] = DeviceModel.from_probe(load_probe(name))
        else:
            raise ConfigError(
                f"no device {name!r}: choose among {', '.join(MODELS)}, or name the file of a saved probe"
            )
    if not found:
        raise ConfigError("name at least one device to emulate")
    return found


def settings(names: Sequence[str]) -> Iterator[Setting]:
    """Every combination, in the order of the table."""
    for device, workload, cache, lookahead in itertools.product(names, WORKLOADS, CACHES, LOOKAHEADS):
        yield Setting(device, workload, cache, lookahead)


def lines(results: Results) -> list[str]:
    """One JSON object a setting."""
    return [json.dumps(asdict(setting) | asdict(outcome)) for setting, outcome in results]


def table(results: Results) -> Table:
    """The figures for a person."""
    shown = Table(title="Rows a second, and what a step waits, in virtual time")
    for name in ("device", "workload", "cache", "lookahead"):
        shown.add_column(name)
    for name in ("rows/s", "wait a step, ms", "waiting", "in RAM", "device reads", "device writes"):
        shown.add_column(name, justify="right")
    before = None
    for setting, outcome in results:
        group = (setting.device, setting.workload)
        if before not in (None, group):
            shown.add_section()
        before = group
        shown.add_row(
            *group,
            f"{setting.cache:.0%}",
            str(setting.lookahead),
            f"{outcome.rows_per_s:,.0f}",
            f"{outcome.wait_ms:,.2f}",
            f"{outcome.wait_share:.0%}",
            f"{outcome.hit_rate:.1%}",
            f"{outcome.read_s / outcome.seconds:.1%}",
            f"{outcome.write_s / outcome.seconds:.1%}",
        )
    return shown


def picture(results: Results, path: Path) -> None:
    """One panel a workload: rows a second over the lookahead, a line for each device and cache.

    Raises:
        ImportError: matplotlib is not installed.
    """
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    names = list(dict.fromkeys(setting.device for setting, _ in results))
    caches = sorted({setting.cache for setting, _ in results})
    ticks = sorted({setting.lookahead for setting, _ in results})
    figure, panels = pyplot.subplots(1, len(WORKLOADS), figsize=(11, 4.5), sharey=True, layout="constrained")
    for panel, workload in zip(panels, WORKLOADS, strict=True):
        for number, device in enumerate(names):
            for style, cache in zip(itertools.cycle((":", "--", "-")), caches, strict=False):
                chosen = [
                    (ticks.index(setting.lookahead), outcome.rows_per_s)
                    for setting, outcome in results
                    if (setting.device, setting.workload, setting.cache) == (device, workload, cache)
                ]
                label = f"{device}, cache {cache:.0%}"
                panel.plot(*zip(*chosen, strict=True), style, marker="o", color=f"C{number}", label=label)
        panel.set(title=workload, xlabel="lookahead (batches)", yscale="log")
        panel.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("rows a second")
    panels[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.study", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--emulate", default="nvme,sata,hdd", help=f"of {', '.join(MODELS)}, or files of saved probes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object a line")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the figures (needs matplotlib)")
    parser.add_argument("--model-us", type=float, default=Scale.model_us, help="what a row costs beside the optimizer")
    parser.add_argument("--steps", type=int, default=Scale.steps, help="steps measured")
    parser.add_argument("--rows", type=int, default=Scale.n_rows, help="rows of the table")
    parser.add_argument("--batch", type=int, default=Scale.batch_rows, help="rows a step")
    parser.add_argument("--seed", type=int, default=Scale.seed)
    chosen = parser.parse_args(arguments)
    scale = replace(
        Scale(),
        model_us=chosen.model_us,
        steps=chosen.steps,
        n_rows=chosen.rows,
        batch_rows=chosen.batch,
        seed=chosen.seed,
    )
    try:
        models = devices(chosen.emulate)
        scale.check()
    except ConfigError as error:
        parser.error(str(error))
    results = [(setting, run(setting, scale, models)) for setting in settings(list(models))]
    Console(width=130 if not sys.stdout.isatty() else None).print(table(results))
    if chosen.json:
        chosen.json.write_text("".join(line + "\n" for line in lines(results)))
    if chosen.picture:
        try:
            picture(results, chosen.picture)
        except ImportError as error:
            print(f"no picture: {error}; pip install matplotlib", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
