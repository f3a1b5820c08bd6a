"""The verb ``ls``. It needs neither torch nor numpy, nor anything of storages that the store does not have: it starts at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from tierstore.cli.find import scan_run
from tierstore.cli.options import Cli
from tierstore.cli.render import age_text, catalog_legend, catalog_summary, catalog_table, checkpoint_value, incomplete_value, plain_table
from tierstore.tiers.catalog import Catalog, runs, scan
from tierstore.tiers.pending import pending
from tierstore.tiers.session import Session
from tierstore.units import format_size

__all__ = ["ls"]


def ls(
    cli: Cli,
    name: Annotated[str | None, typer.Argument(metavar="[RUN]", help="The run; without one and with several, lists the runs.")] = None,
) -> int:
    """List checkpoints × tiers, with attempts that did not commit."""
    cli.refuse_names("ls shows all tiers")
    with cli.session() as session:
        named = name or session.config.run
        found = [] if named else session.run(runs(session.tiers))
        if not named and len(found) != 1:
            return _list_runs(cli, session, found)
        chosen = named or found[0]
        catalog = (
            scan_run(session, chosen)
            if name or cli.options.run or not named
            else session.run(scan(session.tiers, chosen, session.new_cache()))
        )
        copies = pending(catalog, session.tiers)
    for info in reversed(catalog.checkpoints):
        cli.terminal.emit(checkpoint_value(info, copies))
    for attempt in (*catalog.incomplete, *catalog.condemned):
        cli.terminal.emit(incomplete_value(attempt))
    cli.terminal.show(catalog_summary(catalog))
    if catalog.checkpoints or catalog.incomplete or catalog.condemned:
        cli.terminal.show(catalog_table(catalog, copies, cli.clock.now()))
    elif catalog.other_runs:
        cli.terminal.say(f"the store has other runs: {', '.join(catalog.other_runs)}")
    legend = catalog_legend(catalog, copies)
    if legend is not None:
        cli.terminal.show(legend)
    _tell_out_of_reach(cli, catalog)
    return 0


def _tell_out_of_reach(cli: Cli, catalog: Catalog) -> None:
    """No row is marked as the latest where nothing is: then it is said why."""
    for attempt in catalog.out_of_reach():
        error = catalog.unreadable_error(attempt)
        cli.terminal.say(f"warning: nothing is {catalog.run}@latest: {error.message}; {error.hint}", "yellow")


def _list_runs(cli: Cli, session: Session, found: Sequence[str]) -> int:
    table = plain_table("RUN", ("CHECKPOINTS", "right"), ("LATEST", "right"), ("AGE", "right"), ("SIZE", "right"), fold=("RUN",))
    now = cli.clock.now()
    for name in found:
        catalog = session.run(scan(session.tiers, name, session.new_cache()))
        kept = [c for c in catalog.checkpoints if not (c.superseded or c.hidden)]
        newest = catalog.offered()
        nbytes = sum(c.nbytes for c in kept)
        table.add_row(
            name,
            str(len(kept)),
            str(newest.step) if newest else "-",
            age_text(newest.committed_at, now) if newest else "-",
            format_size(nbytes),
        )
        cli.terminal.emit(
            {
                "type": "run",
                "run": name,
                "checkpoints": len(kept),
                "latest": newest.step if newest else None,
                "out_of_reach": [attempt.attempt.step for attempt in catalog.out_of_reach()],
                "committed_at": newest.committed_at if newest else None,
                "nbytes": nbytes,
            }
        )
    cli.terminal.show(table if found else Text("the store has no run yet"))
    return 0
