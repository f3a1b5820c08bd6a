"""From what a person typed to a run and a checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tierstore.config import StoreConfig
from tierstore.errors import NotFoundError, UsageError
from tierstore.names import Attempt, Reference, check_run, parse_reference
from tierstore.tiers.catalog import Catalog, CheckpointInfo, runs, scan
from tierstore.tiers.session import Session
from tierstore.units import format_some

__all__ = ["Found", "chosen_runs", "find_attempts", "find_checkpoint", "find_checkpoints", "metric_modes", "scan_run", "the_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a reference means: a checkpoint, or, where `info` is None, one that is gone. `catalog` is its run's."""

    catalog: Catalog
    attempt: Attempt
    info: CheckpointInfo | None


def the_run(session: Session, named: str = "") -> str:
    """The run that is meant: `named`, else the configuration's, else the store's only one.

    Raises:
        UsageError: The store has several runs.
        NotFoundError: It has none.
    """
    if named or session.config.run:
        return check_run(named or session.config.run or "")
    found = session.run(runs(session.tiers))
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFoundError("the store has no run yet", hint="check the tiers with `tierstore doctor`")
    raise UsageError(f"the store has {len(found)} runs: {format_some(found, 8)}", hint="say which: --run RUN, or RUN@… as the reference")


def scan_run(session: Session, run: str) -> Catalog:
    """The run's catalog.

    Raises:
        NotFoundError: The store has nothing of that run; the nearest names are suggested.
    """
    catalog = session.run(scan(session.tiers, run, session.new_cache()))
    if not (catalog.checkpoints or catalog.incomplete or catalog.condemned or catalog.swept) and catalog.other_runs:
        near = difflib.get_close_matches(run, catalog.other_runs, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the runs are {format_some(catalog.other_runs, 8)}"
        raise NotFoundError(f"the store has no run {run!r}", hint=hint, run=run)
    return catalog


def find_checkpoint(session: Session, reference: str) -> tuple[Catalog, CheckpointInfo]:
    """The checkpoint that `reference` (``RUN@SELECTOR``, or a selector alone) names.

    Raises:
        UsageError: The reference can't be read.
        NotFoundError: There is no such run, step, metric or tag; the nearest are suggested.
    """
    found = _find_all(session, [reference], gone=False)[0]
    assert found.info is not None  # only what is gone has none
    return found.catalog, found.info


def chosen_runs(session: Session, *, all_runs: bool) -> list[str]:
    """The runs that a verb works on: all of the store, else the one that is meant.

    Raises:
        UsageError, NotFoundError: As `the_run`.
    """
    return session.run(runs(session.tiers)) if all_runs else [the_run(session)]


def find_checkpoints(session: Session, references: Sequence[str]) -> list[CheckpointInfo]:
    """The checkpoints that several references name, each once, in their order; each run is looked at once.

    Raises:
        UsageError, NotFoundError: One can't be read, or names nothing; nothing was done about the others then.
    """
    found: dict[Attempt, CheckpointInfo] = {}
    for one in _find_all(session, references, gone=False):
        if one.info is not None:
            found.setdefault(one.attempt, one.info)
    return list(found.values())


def find_attempts(session: Session, references: Sequence[str]) -> list[Found]:
    """As `find_checkpoints`, but a step of which nothing is left is found too, where its log says that it was there."""
    return list({one.attempt: one for one in _find_all(session, references, gone=True)}.values())


def _find_all(session: Session, references: Sequence[str], *, gone: bool) -> list[Found]:
    catalogs: dict[str, Catalog] = {}
    found = []
    for text in references:
        parsed = parse_reference(text)
        run = the_run(session, parsed.run)
        catalog = catalogs[run] if run in catalogs else catalogs.setdefault(run, scan_run(session, run))
        if gone and parsed.selector == "step" and parsed.step is not None and catalog.find(parsed.step) is None:
            left = [a for a in catalog.swept if a.step == parsed.step]
            if left:
                found.append(Found(catalog=catalog, attempt=left[-1], info=None))
                continue
        wanted = Reference(run=run, selector=parsed.selector, step=parsed.step, argument=parsed.argument)
        info = catalog.resolve(wanted, modes=metric_modes(session.config, run))
        found.append(Found(catalog=catalog, attempt=info.attempt, info=info))
    return found


def metric_modes(config: StoreConfig, run: str) -> dict[str, Literal["min", "max"]]:
    """Which metrics are better when larger, as the retention rules say."""
    policy = config.retention_for(run)
    rules = [
        *(policy.keep if policy else ()),
        *(rule for tier in (policy.tiers or {} if policy else {}).values() for rule in tier.keep or ()),
    ]
    return {rule.best.metric: rule.best.mode for rule in rules if rule.best is not None}
