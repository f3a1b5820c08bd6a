"""The options that every verb takes, before or after its name, and the one boundary where errors become exit codes."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from tierstore.cli.terminal import Terminal
from tierstore.clock import Clock, SystemClock
from tierstore.config import StoreConfig, find_config, load_config
from tierstore.errors import TierStoreError, UsageError
from tierstore.tiers.session import Session
from tierstore.units import parse_rate

__all__ = ["Cli", "Options", "Verbs", "remember", "storage_options", "verb"]

_EVERYWHERE = "Everywhere"

EXIT_INTERRUPTED = 130


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cli:
    """What a verb works with."""

    options: Options
    terminal: Terminal
    clock: Clock

    @property
    def only(self) -> tuple[str, ...]:
        """Names of tiers given with ``--tier``: the verb is about these alone."""
        return tuple(t for t in self.options.tier or () if "/" not in t)

    @property
    def bwlimit(self) -> int | None:
        """Bytes per second, or None."""
        return parse_rate(self.options.bwlimit) if self.options.bwlimit else None

    def load(self) -> StoreConfig:
        """The configuration: tiers given as URIs, else ``-c``, ``TIERSTORE_CONFIG`` or ``tierstore.yaml``.

        Raises:
            ConfigError: There is none, or it is wrong.
            UsageError: Both a file and URIs were given.
        """
        places = [t for t in self.options.tier or () if "/" in t]
        if places and self.options.config:
            raise UsageError("both -c FILE and --tier URI were given", hint="give one of them; --tier NAME selects a tier of the file")
        source: Any = places or find_config(self.options.config)
        return load_config(source, run=self.options.run)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """The store's tiers, opened for looking: nothing is created."""
        with Session.open(self.load(), clock=self.clock, create=False) as session:
            yield session

    def refuse_names(self, why: str) -> None:
        """For verbs that are about all tiers."""
        if self.only:
            raise UsageError(f"--tier {self.only[0]}: {why}", hint="--tier takes a URI or path here, one with a '/'")


class Verbs(typer.core.TyperGroup):
    """All verbs together: a mistake in the options is told as every other error is, not in a box."""

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

    return _declare(run, [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own])


def verb(function: Callable[..., int]) -> Callable[..., None]:
    """Makes a verb of ``function(cli, …) -> exit code``: adds the common options and turns errors into exit codes."""
    own = list(inspect.signature(function).parameters.values())[1:]
    hints = get_type_hints(function, include_extras=True)

    @functools.wraps(function)
    def run(context: typer.Context, **given: Any) -> None:
        common = Options(**{f.name: given.pop(f.name) for f in fields(Options)})
        options = common.over(context.obj) if isinstance(context.obj, Options) else common
        terminal = Terminal(as_json=options.json, quiet=options.quiet, verbose=options.verbose, progress=not options.no_progress)
        cli = Cli(options=options, terminal=terminal, clock=SystemClock())
        raise typer.Exit(_guarded(terminal, lambda: function(cli, **given)))

    return _declare(run, [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own])


def _declare(run: Callable[..., None], own: list[inspect.Parameter]) -> Callable[..., None]:
    """Gives `run` the signature that typer reads: the context, `own`, then the common options."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(Options, include_extras=True)
    common = [inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name]) for f in fields(Options)]
    parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context), *own, *common]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _guarded(terminal: Terminal, work: Callable[[], int]) -> int:
    """The command line's one boundary: every error becomes a message and an exit code."""
    try:
        with terminal.logging():
            return work()
    except KeyboardInterrupt:
        terminal.say("interrupted", "yellow")
        return EXIT_INTERRUPTED
    except TierStoreError as error:
        terminal.complain(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:  # noqa: BLE001 - boundary: a fault of ours is reported as one
        terminal.complain(error)
        return 1


def storage_options(cli: Cli, uri: str, given: list[str], *, configured: bool = True) -> dict[str, Any]:
    """The options of a storage at `uri`: those of a tier in the same place (bucket, host), and above them what ``--option`` gives.

    Args:
        cli: The command line.
        uri: Where it is; a local path has none.
        given: ``K=V`` texts.
        configured: There must be a configuration. False: it is looked at where one is named.

    Raises:
        UsageError: An option has no value.
    """
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(f"--option {name!r} has no value", hint="write --option endpoint_url=http://127.0.0.1:9000")
        options[name] = value
    if "://" not in uri:
        return {}
    if not (configured or cli.options.config or cli.options.tier):
        return options
    place = uri.split("/")[:3]
    return {**next((tier.options for tier in cli.load().tiers if tier.uri.split("/")[:3] == place), {}), **options}
