"""The command `dsa`: each command is a module of `dsa.commands`; an error of DSA is one line on stderr.

The exit code is 1 where a state is damaged, else 2, and with `--json` there is an object with the error on stdout;
`probe`, which reads no state, ends with 1 and has none.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from dsa.commands.copy import copy
from dsa.commands.export import export
from dsa.commands.inspect import inspect
from dsa.commands.plan import plan
from dsa.commands.probe import probe
from dsa.commands.verify import verify
from dsa.errors import DsaError


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DsaError as error:
            typer.echo(f"dsa: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _dsa() -> None:
    """Disk Sparse Adam: look at devices and at state directories."""


app.command()(probe)
app.command()(plan)
app.command()(inspect)
app.command()(verify)
app.command()(export)
app.command()(copy)

if __name__ == "__main__":
    app()
