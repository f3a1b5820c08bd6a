"""``tierstore``: the command line. Each group of verbs has a module of its own, loaded for its verbs alone (`verbs`, `group`)."""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from tierstore import __version__
from tierstore.cli.group import Verbs, remember

__all__ = ["app", "main"]

_HELP = """Tiered, verified checkpoints for large training runs.

Checkpoints are named RUN@12000, RUN@latest, RUN@best:METRIC or RUN@tag:TAG; where the configuration names the run, @latest is enough.
The configuration is -c FILE, else TIERSTORE_CONFIG, else ./tierstore.yaml; or --tier URI (repeatable) and --run.

Exit codes: 0 ok, 1 error, 2 usage or configuration, 3 partial, 4 not found, 5 temporary, 6 damage found, 7 refused, 8 locked,
130 interrupted.
"""

app = typer.Typer(name="tierstore", cls=Verbs, help=_HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierstore {__version__}")
        raise typer.Exit


@remember
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """What stands before the verb; `remember` keeps it. The verb's modules are loaded: Python's collector starts, and leaves them alone."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


app.callback(help=_HELP)(_root)


def main() -> None:
    """The entry point of the script."""
    app()
