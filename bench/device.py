"""What DSA gets out of a disk, beside `fio` and beside other ways to do the same: `python -m bench.device`.

Random reads and writes of 512 B to 64 KiB records by every backend, appends of dirty records, and whole optimizer
steps in a steady state; beside fio (same file, same depth, draining as often, in turns), aiofiles row by row, preadv
in a thread pool, RocksDB, and memmaps in limited memory. Files are fully written first, and every direct read is
checked against the device's own counter (within 2 %), else the run fails.

Takes up to 12 GB below --dir (--quick: 5 GB), which are removed at the end. What needs fio, rocksdict or root is left
out, with a line that says so, where they are missing.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from bench import device_report, readme
from bench.device_files import ReadCheck, ReadsDiffer, find_counter, read_sectors
from bench.device_fio import NoFio
from bench.device_samples import as_json
from bench.device_scale import FULL, QUICK, Scale
from bench.device_stages import Stages
from dsa.config import IOConfig
from dsa.errors import DsaError

README_BLOCK = "bench.device"


def measure(
    scale: Scale, directory: Path, console: Console, *, check_reads: bool = True, **options: Any
) -> tuple[Stages, dict[str, Any]]:
    """Run all stages in a new directory below `directory`, removed at the end; they, and the run as a JSON object.

    Args:
        check_reads: compare direct reads with the device's counter.
        options: of `Stages`.

    Raises:
        ReadsDiffer: the device read something else than was asked for.
        OSError: the disk failed, or is too full.
    """
    free = shutil.disk_usage(directory).free
    if free < scale.disk_bytes:
        raise OSError(0, f"{directory} has {free >> 20:,} MiB free, this takes {scale.disk_bytes >> 20:,}")
    device = find_counter(directory)
    sectors = functools.partial(read_sectors, device) if device is not None and check_reads else None
    check = ReadCheck(sectors)
    began = time.perf_counter()
    config = IOConfig()
    with tempfile.TemporaryDirectory(prefix="dsa-device-", dir=directory) as place:
        stages = Stages(
            scale,
            Path(place),
            check,
            config,
            tell=lambda message: console.print(
                f"{time.perf_counter() - began:4.0f} s  {message}", style="dim", highlight=False, soft_wrap=True
            ),
            **options,
        )
        if sectors is None:
            why = "not asked for" if device is not None else f"/proc/diskstats does not count the device of {directory}"
            stages.notes.append(f"the comparison with the device's counter: {why}")
        stages.run()
    settings = {
        "kernel": platform.release(),
        "queue_depth": config.queue_depth,
        "direct": stages.direct,
        "dsa": stages.best,
        "fio": f"{stages.fio.version} {stages.fio.engine}" if stages.fio else None,
        "rounds": scale.rounds,
        "table_rows": scale.steady_rows,
    }
    counters = {
        "device": device,
        "checked": check.checked,
        "repeated": check.repeated,
        "worst_difference": round(check.worst, 5),
    }
    found = as_json(stages.cases, stages.notes, settings, counters)
    found["steady"] = {name: round(value, 4) for name, value in stages.steady_figures.items()}
    return stages, found


def _terminate(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller tables, under 4 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as one object")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw reads and writes by record size")
    parser.add_argument("--dir", type=Path, default=Path(), help="where the files go: on the disk to be measured")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    parser.add_argument(
        "--unchecked", action="store_true", help="do not compare with the device's counter (others use the disk)"
    )
    chosen = parser.parse_args(arguments)
    for option in (chosen.json, chosen.picture):
        if option is not None and not option.parent.is_dir():
            parser.error(f"there is no directory {option.parent}")
    if not chosen.dir.is_dir():
        parser.error(f"there is no directory {chosen.dir}")
    console = Console(width=None if sys.stdout.isatty() else 130)
    before = signal.signal(signal.SIGTERM, _terminate)  # so that the files are removed then, too
    try:
        scale = QUICK if chosen.quick else FULL
        stages, found = measure(scale, chosen.dir.resolve(), console, check_reads=not chosen.unchecked)
    except KeyboardInterrupt:
        console.print("interrupted; the files are removed")
        return 130
    except (ReadsDiffer, NoFio, DsaError, OSError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    device_report.show(console, stages.cases, stages.notes, found["device_counter"])
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    if chosen.picture is not None:
        try:
            device_report.picture(stages.cases, chosen.picture)
        except ImportError as error:
            print(f"no picture: {error}; pip install matplotlib", file=sys.stderr)
    if chosen.readme:
        block = device_report.markdown(stages.cases, stages.notes, found["settings"])
        try:
            readme.write_block(readme.README, README_BLOCK, block)
        except (OSError, ValueError) as error:
            print(f"the README was not changed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
