"""`dsa verify DIR`: every check and every reference of every generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dsa.commands.output import DAMAGED, clear_errors, print_json, progress_bar, size
from dsa.io.findings import Verification
from dsa.io.verification import verify as check


def verify(
    directory: Annotated[Path, typer.Argument(help="The state directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check manifest, indexes, segments and every record of every generation, and list all that is damaged.

    Exit code 0: nothing is damaged; 1: something is; 2: the directory could not be checked.
    """
    with clear_errors(as_json=as_json):
        with progress_bar(f"verifying {directory}") as progress:
            found = check(directory, progress)
        if as_json:
            print_json(_plain(found))
        else:
            for line in _report(found):
                typer.echo(line)
        if not found.clean:
            raise typer.Exit(DAMAGED)


def _plain(found: Verification) -> dict[str, Any]:
    plain = {name: value for name, value in vars(found).items() if name != "damage"}
    damage = [each for damage in found.damage for each in damage.each()]
    return {**plain, "clean": found.clean, "damage": damage}


def _report(found: Verification) -> Iterator[str]:
    lines = 0
    for damage in found.damage:
        for each in damage.each():
            of = ", ".join(map(str, each["generations"]))
            yield f"{each['text']} (generations: {of})" if of else each["text"]
            lines += 1
    for note in found.notes:
        yield f"note: {note}"
    numbers = ", ".join(map(str, found.generations)) or "none"
    rate = f" ({found.bytes_read / found.seconds / 1e6:,.0f} MB/s)" if found.seconds and found.bytes_read else ""
    yield (
        f"{found.path}: generations {numbers}: {found.record_checks:,} record checks, {size(found.bytes_read)} of logs "
        f"read in {found.seconds:.2f} s{rate}"
    )
    yield "nothing is damaged" if found.clean else f"DAMAGED: {lines} findings, all listed above"
