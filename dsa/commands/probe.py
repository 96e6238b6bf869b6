"""`dsa probe PATH`: measure the device under a directory, and say what DSA would choose there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dsa.io.probe import DeviceProbe, report
from dsa.io.probe import probe as measure


def probe(
    path: Annotated[Path, typer.Argument(help="The directory that holds, or is to hold, the state.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; save it for IOConfig(probe=FILE).")] = False,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 6.0,
    file_mib: Annotated[int, typer.Option(help="Length of the trial file at most, in MiB.")] = 256,
) -> None:
    """Measure a directory's device for some seconds, on a temporary file, and print what DSA would choose there."""
    found = measure(path, seconds=seconds, file_bytes=file_mib << 20)
    if as_json:
        typer.echo(found.to_json())
        return
    console = Console()
    console.print(_rates(found))
    console.print(
        f"sequential: {found.sequential_read_bytes_per_s / 1e6:,.0f} MB/s read, "
        f"{found.sequential_write_bytes_per_s / 1e6:,.0f} MB/s written (trial file: {found.file_bytes >> 20} MiB)"
    )
    if found.cached and not found.direct:
        console.print("the page cache could not be kept out: reads may be of RAM, and faster than the device")
    console.print(_choice(found))


def _rates(found: DeviceProbe) -> Table:
    table = Table(title=f"Random requests a second in {found.path}")
    for name in ("", "backend", "size, bytes", "queue depth", "a second", "us each", "MB/s"):
        table.add_column(name, justify="left" if name in ("", "backend") else "right")
    for rate in found.rates:
        table.add_row(
            rate.what,
            rate.backend,
            f"{rate.size_bytes:,}",
            str(rate.queue_depth),
            f"{rate.per_s:,.0f}",
            f"{1e6 / rate.per_s:,.1f}",
            f"{rate.per_s * rate.size_bytes / 1e6:,.0f}",
        )
    return table


def _choice(found: DeviceProbe) -> Table:
    table = Table(title="What DSA would choose")
    for name in ("knob", "value", "because"):
        table.add_column(name, overflow="fold")
    for name, (value, why) in report(found).items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value), why)
    return table
