"""The question before something goes: asked on a terminal, refused elsewhere unless ``-y`` was given."""

from __future__ import annotations

import sys

from tierstore.cli.options import Cli
from tierstore.errors import RefusedError

__all__ = ["confirm"]


def confirm(cli: Cli, what: str) -> None:
    """Returns where the person said yes, or ``-y`` stands in the command.

    Args:
        cli: The command line.
        what: What would be done, with numbers and bytes: ``free 3 checkpoints, 2.4TiB``.

    Raises:
        RefusedError: The person said no; or nobody can be asked, for stdin or stderr is no terminal. Nothing was changed.
    """
    if cli.options.yes:
        return
    if not (sys.stdin is not None and sys.stdin.isatty() and cli.terminal.err.is_terminal):
        raise RefusedError(
            f"nobody can be asked whether to {what}: this is no terminal",
            hint="look at it with -n (--dry-run), then give -y (--yes); nothing was changed",
        )
    cli.terminal.out.file.flush()
    cli.terminal.err.print(f"{what[0].upper()}{what[1:]}? [y/N] ", style="bold", end="", soft_wrap=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RefusedError(f"you did not say yes: {what}", hint="nothing was changed; give -y (--yes) to not be asked")
