"""The verb ``demo``; what it does is in `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.cli.options import Cli

__all__ = ["demo"]


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
