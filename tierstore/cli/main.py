"""``tierstore``: the command line. Each group of verbs has a module of its own; the common options in `options`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore import __version__
from tierstore.cli import (
    adopt,
    capacity,
    check,
    compare,
    completion,
    doctor,
    explain,
    export,
    freeing,
    labels,
    look,
    move,
    recover,
    repair,
    retain,
    status,
    usage,
    work,
)
from tierstore.cli.options import Cli, Verbs, remember, verb

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
    """What stands before the verb; `remember` keeps it."""


@verb
def demo(
    cli: Cli,
    steps: Annotated[int, typer.Option("--steps", min=6, max=100_000, help="Training steps.")] = 96,
    directory: Annotated[
        Path, typer.Option("--directory", "-d", metavar="DIR", help="Where the demo's tiers lie; an earlier demo's are replaced.")
    ] = Path("tierstore-demo"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the S3 server running afterwards, until Ctrl-C.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Only start an earlier demo's S3 server again, until Ctrl-C.")] = False,
) -> int:
    """Train a small model through three tiers, kill it in mid-save, resume it; needs no configuration."""
    from tierstore.cli.demo import run_demo  # its S3 servers are an optional dependency, and slow to import

    return run_demo(cli, steps=steps, directory=directory, keep=keep, serve=serve)


app.callback(help=_HELP)(_root)
app.command("demo")(demo)
for _function in (
    look.ls,
    look.show,
    look.tensors,
    look.cat,
    compare.diff,
    usage.du,
    capacity.df,
    check.verify,
    repair.repair,
    move.push,
    move.pull,
    work.sync,
    status.status,
    recover.recover,
    retain.plan,
    retain.prune,
    retain.undelete,
    freeing.gc,
    freeing.evict,
    explain.explain,
    labels.pin,
    labels.unpin,
    labels.tag,
    labels.untag,
    labels.hold,
    labels.release,
    labels.metrics,
    doctor.doctor,
    export.export,
    adopt.adopt,
    completion.completion,
):
    app.command(_function.__name__)(verb(_function))


def main() -> None:
    """The entry point of the script."""
    app()
