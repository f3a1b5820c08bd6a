"""What every verb works with, and the one boundary where errors become exit codes."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import typer

from tierstore.cli.group import EXIT_INTERRUPTED, Options, declare
from tierstore.cli.terminal import Terminal
from tierstore.clock import Clock, SystemClock
from tierstore.config import StoreConfig, find_config, load_config, progress_wanted
from tierstore.errors import TierStoreError, UsageError
from tierstore.tiers.session import Session
from tierstore.units import parse_rate

__all__ = ["Cli", "Options", "storage_options", "verb"]


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


def verb(function: Callable[..., int]) -> Callable[..., None]:
    """Makes a verb of ``function(cli, …) -> exit code``: adds the common options and turns errors into exit codes."""
    own = list(inspect.signature(function).parameters.values())[1:]
    hints = get_type_hints(function, include_extras=True)

    @functools.wraps(function)
    def run(context: typer.Context, **given: Any) -> None:
        common = Options(**{f.name: given.pop(f.name) for f in fields(Options)})
        options = common.over(context.obj) if isinstance(context.obj, Options) else common
        progress = not options.no_progress and progress_wanted()
        terminal = Terminal(as_json=options.json, quiet=options.quiet, verbose=options.verbose, progress=progress)
        cli = Cli(options=options, terminal=terminal, clock=SystemClock())
        raise typer.Exit(_guarded(terminal, lambda: function(cli, **given)))

    return declare(run, [p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own])


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
