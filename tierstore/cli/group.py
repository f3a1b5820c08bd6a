"""The command line as a whole: its verbs, each loaded when it is asked for, and the options that may stand before one.

Nothing here loads a store's modules: ``--help``, ``--version`` and mistakes in what was typed are answered at once, and a verb loads only
what it needs itself.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import typer
import typer.core
import typer.main

from tierstore.cli.terminal import Terminal
from tierstore.cli.verbs import VERBS
from tierstore.errors import UsageError

__all__ = ["EXIT_INTERRUPTED", "Options", "Verbs", "declare", "load_verb", "remember"]

_EVERYWHERE = "Everywhere"

EXIT_INTERRUPTED = 130

_HELPING = "tierstore.help"
"""In a context's `meta` while the help lists the verbs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options that every verb takes; None or empty: not given."""

    config: Annotated[
        str | None, typer.Option("-c", "--config", metavar="FILE", help="The store's YAML file.", rich_help_panel=_EVERYWHERE)
    ] = None
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            metavar="URI|NAME",
            help="A tier's URI or path, nearest first, instead of a file; or (without '/') the name of the one tier that is meant.",
            rich_help_panel=_EVERYWHERE,
        ),
    ] = None
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="The run.", rich_help_panel=_EVERYWHERE)] = None
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.", rich_help_panel=_EVERYWHERE)] = False
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Only say what would be done.", rich_help_panel=_EVERYWHERE)] = False
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.", rich_help_panel=_EVERYWHERE)] = False
    jobs: Annotated[
        int | None, typer.Option("-j", "--jobs", min=1, max=256, metavar="N", help="Files in flight at once.", rich_help_panel=_EVERYWHERE)
    ] = None
    bwlimit: Annotated[
        str | None, typer.Option("--bwlimit", metavar="RATE", help="At most e.g. 200MiB/s to each tier.", rich_help_panel=_EVERYWHERE)
    ] = None
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only results and errors.", rich_help_panel=_EVERYWHERE)] = False
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            show_default=False,
            metavar="",
            help="Say more, with tracebacks; -vv everything.",
            rich_help_panel=_EVERYWHERE,
        ),
    ] = 0
    no_progress: Annotated[bool, typer.Option("--no-progress", help="No progress bars.", rich_help_panel=_EVERYWHERE)] = False

    def over(self, earlier: Options) -> Options:
        """These options where they were given, else `earlier`'s (those before the verb)."""
        return Options(**{f.name: getattr(self, f.name) or getattr(earlier, f.name) for f in fields(self)})


def load_verb(name: str) -> Callable[..., int]:
    """The function behind a verb; loads its module."""
    function: Callable[..., int] = getattr(import_module(f"tierstore.cli.{VERBS[name][0]}"), name)
    return function


def _make_command(name: str) -> Any:
    """A verb as typer's command."""
    make = import_module("tierstore.cli.options").verb  # stands above this module, and loads what a store needs
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(make(load_verb(name)))
    return typer.main.get_command(alone)  # of a single command, without a callback: that command


class _Commands(MutableMapping[str, Any]):
    """Verb → command, each made when it is asked for. typer and click look only names up that were typed, but for the help."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            if name not in VERBS:
                raise KeyError(name)
            self._made[name] = _make_command(name)
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in VERBS or name in self._made

    def __iter__(self) -> Iterator[str]:
        yield from VERBS
        yield from (name for name in self._made if name not in VERBS)

    def __len__(self) -> int:
        return len({*VERBS, *self._made})


class Verbs(typer.core.TyperGroup):
    """All verbs together: a mistake in the options is told as every other error is, not in a box."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs' names, in the order of the help."""
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A verb's command; where the help only lists it, one that does nothing but say what it is for."""
        if cmd_name in VERBS and ctx.meta.get(_HELPING):
            return typer.core.TyperCommand(cmd_name, help=VERBS[cmd_name][1])
        try:
            return super().get_command(ctx, cmd_name)
        except KeyboardInterrupt:  # while its modules were being loaded
            Terminal().say("interrupted", "yellow")
            raise SystemExit(EXIT_INTERRUPTED) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta[_HELPING] = True
        try:
            super().format_help(ctx, formatter)
        finally:
            del ctx.meta[_HELPING]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs the command line; ends the process with its exit code, unless `standalone_mode` is off."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            code = EXIT_INTERRUPTED
        except Exception as error:
            # typer carries click inside since 0.20-odd, and stands beside it before: its errors are known by what they can do.
            if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
                raise
            code = _tell_misuse(error, getattr(error, "ctx", None))
        sys.exit(code if isinstance(code, int) else 0)


def _tell_misuse(error: Any, context: Any) -> int:
    """A mistake in what was typed, as an error of ours; without a verb, the help."""
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        if error.format_message():  # where rich formats the help, making the error has printed it already
            typer.echo(error.format_message())
        return 2
    command = context.command_path if context is not None else "tierstore"
    message = str(error.format_message()).strip().rstrip(".") or "nothing was given to do"
    Terminal().complain(UsageError(message[0].lower() + message[1:], hint=f"`{command} --help` says what can be given"))
    return int(error.exit_code)


def remember(function: Callable[..., None]) -> Callable[..., None]:
    """Makes the callback of ``tierstore`` itself: keeps the options that stand before the verb."""

    own = list(inspect.signature(function).parameters.values())[1:]
    hints = get_type_hints(function, include_extras=True)

    @functools.wraps(function)
    def run(context: typer.Context, **given: Any) -> None:
        context.obj = Options(**{f.name: given.pop(f.name) for f in fields(Options)})
        function(context, **given)

    return declare(run, [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own])


def declare(run: Callable[..., None], own: list[inspect.Parameter]) -> Callable[..., None]:
    """Gives `run` the signature that typer reads: the context, `own`, then the common options."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(Options, include_extras=True)
    common = [inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name]) for f in fields(Options)]
    parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context), *own, *common]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
