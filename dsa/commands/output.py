"""What the commands share: errors as one line, JSON, sizes, times, a progress bar."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dsa.errors import CorruptError, DsaError

DAMAGED = 1
REFUSED = 2


@contextmanager
def clear_errors(*, as_json: bool) -> Iterator[None]:
    """An error in the body ends the command: one line on stderr (and an object on stdout with `as_json`).

    The exit code is 1 where the state is damaged, else 2.
    """
    try:
        yield
    except (DsaError, OSError, MemoryError) as error:
        text = str(error) or type(error).__name__
        typer.echo(f"dsa: {text}", err=True)
        if as_json:
            print_json({"error": text, "type": type(error).__name__})
        raise typer.Exit(DAMAGED if isinstance(error, CorruptError) else REFUSED) from error


def print_json(value: Any) -> None:
    """One JSON object on stdout; dataclasses become objects."""
    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    typer.echo(json.dumps(plain, indent=2))


def console() -> Console:
    """Where results go: stdout; wide enough for paths where it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=200)


def size(nbytes: float) -> str:
    """A number of bytes to read: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"


def moment(seconds: float) -> str:
    """A time since 1970 to read, in the local zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s since 1970"


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal; what it gives is called with how much is done, of how much."""
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


def absolute(path: os.PathLike[str]) -> str:
    """The path as JSON has it."""
    return os.path.abspath(path)
