"""`dsa inspect DIR`: what a state directory holds, also one in use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dsa.commands.output import clear_errors, console, moment, print_json, size
from dsa.io.inspection import Holder, Inspection
from dsa.io.inspection import inspect as look


def inspect(
    directory: Annotated[Path, typer.Argument(help="The state directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show tables, generations, space, files and owner of a state directory; takes no lock and changes nothing.

    Records are not looked at: that is what `dsa verify` does.
    """
    with clear_errors(as_json=as_json):
        found = look(directory)
        if as_json:
            print_json({**dataclasses.asdict(found), "healthy": found.healthy})
            return
        screen = console()
        screen.print(f"{found.path}", soft_wrap=True)
        screen.print(f"UUID {found.uuid or 'unknown'}; {_owner(found.holder)}", soft_wrap=True)
        screen.print(_tables(found))
        screen.print(_space(found))
        screen.print(_generations(found))
        screen.print(_files(found))
        for note in found.notes:
            screen.print(f"note: {note}", soft_wrap=True, markup=False)
        for problem in found.problems:
            screen.print(f"PROBLEM: {problem}", soft_wrap=True, markup=False)
        if found.healthy:
            screen.print("health: nothing wrong at a look; `dsa verify` checks every record", soft_wrap=True)


def _owner(holder: Holder) -> str:
    who = f"process {holder.pid} on {holder.host}" if holder.pid is not None else "a process that left no name"
    if holder.holds:
        return f"in use by {who}"
    if holder.holds is None:
        return f"whether it is in use cannot be seen here; last owned by {who}"
    return f"not in use (last owned by {who})" if holder.pid is not None else "not in use"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    return table


def _tables(found: Inspection) -> Table:
    table = _table("Tables", "table", "shape", "dtype", "moments", "rows", "live records", "record", "segment")
    for each in found.tables:
        shape = " x ".join(map(str, each.shape))
        counts = (f"{each.rows:,}", f"{each.live_records:,}", size(each.record_bytes), size(each.segment_bytes))
        table.add_row(each.name, shape, each.dtype, each.moment_dtype, *counts)
    return table


def _space(found: Inspection) -> Table:
    table = _table("Space of the logs", "table", "live", "dead", "retained", "free", "length", "on disk")
    columns = ("live_bytes", "dead_bytes", "retained_bytes", "free_bytes", "log_bytes", "allocated_bytes")
    for each in found.tables:
        table.add_row(each.name, *(size(getattr(each, column)) for column in columns))
    table.add_row("all", *(size(sum(getattr(each, column) for each in found.tables)) for column in columns))
    table.caption = f"free on the file system: {size(found.disk_free_bytes)}"
    return table


def _generations(found: Inspection) -> Table:
    table = _table("Generations", "number", "counted", "created", "step of each table", "live records")
    for each in found.generations:
        steps = ", ".join(f"{name}: {step:,}" for name, step in each.steps.items())
        live = f"{sum(each.live_records.values()):,}"
        table.add_row(str(each.number), "yes" if each.counted else "no", moment(each.created), steps, live)
    return table


def _files(found: Inspection) -> Table:
    table = _table("Files", "file", "size")
    for name, nbytes in found.files.items():
        table.add_row(name, size(nbytes))
    return table
