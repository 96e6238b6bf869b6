"""`dsa copy DIR DEST`: one generation as a state directory of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from dsa.commands.output import absolute, clear_errors, print_json, progress_bar, size
from dsa.io.copying import copy_generation


def copy(
    directory: Annotated[Path, typer.Argument(help="The state directory; it may be in use.")],
    dest: Annotated[Path, typer.Argument(help="The new state directory: missing or empty.")],
    generation: Annotated[int | None, typer.Option("--generation", help="Which one; default: the newest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Copy one generation to a new state directory: live records only, everything durable, under the same UUID.

    State dicts that name the generation load from either directory. What the copy goes on to write is numbered apart,
    so that a state dict of one is never taken for one of the other.
    """
    with clear_errors(as_json=as_json):
        with progress_bar(f"copying to {dest}") as progress:
            done = copy_generation(directory, dest, generation, progress)
        if as_json:
            print_json({"source": absolute(directory), "target": absolute(dest), **dataclasses.asdict(done)})
            return
        typer.echo(
            f"generation {done.generation} of {directory} is in {dest}: {done.records:,} records, "
            f"{size(done.record_bytes)} (logs: {size(done.log_bytes)}); its next generation is {done.next_generation}"
        )
