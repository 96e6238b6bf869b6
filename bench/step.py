"""What a training step costs with the moments on disk: `python -m bench.step`.

In one run and on the same batches: DiskSparseAdam beside torch.optim.SparseAdam in RAM, and beside sparse Adam on two
memmaps (gather, update, scatter; with and without MADV_RANDOM) in the same memory limit. Tables of 100 k to 4 M rows of
128 and of 1 M and 100 M rows of 16; uniform, Zipf 0.9 and 1.1; caches of 1 to 100 %; the optimizer alone, and with a
TransE step (forward and backward) to hide behind. fio gives what the device needs for the reads alone.

Every row has been written before anything is measured, and caches are warm; the log is being cleaned where so much was
written before (not with the large table all in use, nor everywhere with --quick). Ways take turns (5 rounds of each
configuration, 11 of those with a TransE step; --quick: 3 and 7). Before others have theirs, DSA's device is left to
come to rest, what is dirty staying so, and afterwards steps that do not count make it write behind again. All in cache,
the time of step() alone counts; else that of the whole loop.

Takes up to 30 GB below --dir (--quick: 8 GB) and 16 GB of memory (--quick: 9 GB); what does not fit into memory, or
needs fio or a memory cgroup where they are missing, is left out with a line that says so. The optimizers in limited
memory have their weights in shared memory, which their limit does not count.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console

from bench import readme, step_report
from bench.device_files import ReadCheck, find_counter, read_sectors
from bench.device_fio import NoFio
from bench.step_samples import as_json
from bench.step_scale import FULL, QUICK, Scale
from bench.step_stages import STAGES, Stages
from dsa.errors import DsaError

README_BLOCK = "bench.step"


def measure(scale: Scale, directory: Path, console: Console, **options: Any) -> tuple[Stages, dict[str, Any]]:
    """Run all stages in a new directory below `directory`, removed at the end; they, and the run as a JSON object.

    Args:
        options: of `Stages`.

    Raises:
        DsaError: DSA failed.
        OSError: the disk failed, or is too full.
    """
    free = shutil.disk_usage(directory).free
    if free < scale.disk_bytes:
        raise OSError(0, f"{directory} has {free >> 20:,} MiB free, this takes {scale.disk_bytes >> 20:,}")
    device = find_counter(directory)
    check = ReadCheck(functools.partial(read_sectors, device) if device is not None else None)
    began = time.perf_counter()

    def tell(message: str) -> None:
        spent_s = time.perf_counter() - began
        console.print(f"{spent_s:4.0f} s  {message}", style="dim", highlight=False, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="dsa-step-", dir=directory) as place:
        stages = Stages(scale, Path(place), check, tell, **options)
        stages.run()
    settings = {
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "fio": f"{stages.fio.version} {stages.fio.engine}" if stages.fio else None,
        "scale": "quick" if scale is QUICK else "full",
        "rounds": scale.rounds,
        "hidden_rounds": scale.hidden_rounds,
        "seconds": round(time.perf_counter() - began),
        "file_system": stages.file_system,
    }
    return stages, as_json(stages.cases, stages.fixed, stages.notes, settings)


def _terminate(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller tables, under 4 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as one object")
    parser.add_argument("--picture", type=Path, metavar="PREFIX", help="draw PREFIX-cache.png, -rows.png, -parts.png")
    parser.add_argument("--dir", type=Path, default=Path(), help="where the files go: on the disk to be measured")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this stage (may be given again)")
    chosen = parser.parse_args(arguments)
    if chosen.readme and chosen.stage:
        parser.error("--readme needs all stages")
    for option in (chosen.json, chosen.picture):
        if option is not None and not option.parent.is_dir():
            parser.error(f"there is no directory {option.parent}")
    if not chosen.dir.is_dir():
        parser.error(f"there is no directory {chosen.dir}")
    console = Console(width=None if sys.stdout.isatty() else 200)
    before = signal.signal(signal.SIGTERM, _terminate)  # so that the files are removed then, too
    try:
        stages, found = measure(
            QUICK if chosen.quick else FULL, chosen.dir.resolve(), console, only=chosen.stage or STAGES
        )
    except KeyboardInterrupt:
        console.print("interrupted; the files are removed")
        return 130
    except (NoFio, DsaError, OSError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    step_report.show(console, stages.cases, found)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    if chosen.picture is not None:
        try:
            for path in step_report.pictures(stages.cases, chosen.picture):
                console.print(f"drawn: {path}", highlight=False)
        except ImportError as error:
            print(f"no picture: {error}; pip install matplotlib", file=sys.stderr)
    if chosen.readme:
        try:
            readme.write_block(readme.README, README_BLOCK, step_report.markdown(stages.cases, found))
        except (OSError, ValueError) as error:
            print(f"the README was not changed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
