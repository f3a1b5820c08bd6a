"""Brakes: what must be in order before anything is decided or freed. Each refuses loudly, and nothing has been changed then."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from tierstore.errors import RefusedError, StorageError
from tierstore.names import Attempt
from tierstore.tiers.catalog import Catalog
from tierstore.tiers.checkpoint import CheckpointInfo, Reduced
from tierstore.tiers.gc.audit import known_before
from tierstore.tiers.gc.familiar import at_last, is_familiar, make_familiar
from tierstore.tiers.gc.housekeeping import Housekeeping, Situation
from tierstore.tiers.retention import Plan
from tierstore.units import format_some

__all__ = ["NEVER_REFUSED", "check_ground", "check_policy", "check_share", "get_used_to", "newest_of"]

log = logging.getLogger(__name__)

NEVER_REFUSED = 2
"""So many deletions are never too many at once: of two checkpoints one is half."""


async def check_ground(h: Housekeeping, situation: Situation) -> None:
    """Refuses to work on a run that is not known for certain: nothing is decided, and nothing freed, on half a picture.

    Raises:
        RefusedError: The authority does not answer, has lost logs, knows of fewer attempts than once, or a log can't be read.
        StorageError: The authority's audit files can't be listed.
    """
    h.tiers.check_writable()
    catalog = situation.catalog
    authority = h.tiers.authority
    if authority.name in catalog.unreachable:
        raise _refused(
            h,
            f"tier {authority.name!r}, whose logs decide, can't be reached: {catalog.unreachable[authority.name].message}",
            "bring it back; what is due is collected then",
        )
    known: list[CheckpointInfo | Reduced] = [*catalog.checkpoints, *catalog.reduced.values()]
    if lost := [item.attempt for item in known if item.authority_lost]:
        raise _refused(
            h,
            f"tier {authority.name!r} has lost the logs of {_steps(lost)}, which replicas still have",
            "is the right place mounted? else `tierstore recover` rebuilds lost logs",
        )
    if damaged := [*(i.attempt for i in known if i.damaged), *(a.attempt for a in catalog.incomplete if a.unreadable)]:
        raise _refused(
            h,
            f"the logs of {_steps(damaged)} can't be read",
            "`tierstore verify` names the records; `tierstore repair` puts them back from a replica's copies",
        )
    before, audit = await known_before(h.tiers, h.run)
    if catalog.known < before:
        raise _refused(
            h,
            f"tier {authority.name!r} lists {catalog.known} logs, and once listed {before} ({audit})",
            f"is the right place mounted, and its listing whole? if logs were removed for good, move {audit} away",
        )


def check_policy(h: Housekeeping) -> None:
    """Refuses to decide by no policy, or by one that keeps nothing.

    Raises:
        RefusedError: There is none, or it has no rule.
    """
    if not h.required.keep:
        raise _refused(h, "its retention policy has no rule, and would delete everything", "say what is kept, e.g. `keep: [{last: 5}]`")


async def check_share(h: Housekeeping, catalog: Catalog, plan: Plan, doomed: Iterable[Attempt], most: float | None) -> None:
    """Refuses to decide that more than a share of the live checkpoints goes at once, by a policy that this run is not used to.

    Args:
        h: Whose policy says the share, where `most` is None.
        catalog: What there is.
        plan: For the message.
        doomed: What would be decided to go.
        most: The share, above 0 and up to 1, by a person's word: it holds for a policy that the run is used to, too.

    Raises:
        RefusedError: It is more, and more than `NEVER_REFUSED`.
        StorageError: The authority can't be listed.
    """
    live = _live(catalog)
    going = live & set(doomed)
    share = h.gc.max_delete_fraction if most is None else most
    if _is_within(len(going), len(live), share) or (most is None and await is_familiar(h)):
        return
    raise _refused(
        h,
        f"plan {plan.id} deletes {len(going)} of {len(live)} checkpoints, and at most {share:.0%} may go at once "
        "by rules that have decided nothing here yet",
        f"read `tierstore plan`; if it is meant, `tierstore prune --max-delete-fraction {-(-100 * len(going) // len(live))}%`",
    )


async def get_used_to(h: Housekeeping, catalog: Catalog, plan: Plan, *, meant: bool) -> None:
    """Remembers the policy's rules where their plan is no surprise: not even in the end would more than the share go, or it was `meant`.

    What can't be written down now is at the next plan.
    """
    live = _live(catalog)
    in_the_end = live & {entry.attempt for entry in at_last(plan)}
    if meant or _is_within(len(in_the_end), len(live), h.gc.max_delete_fraction):
        try:
            await make_familiar(h)
        except StorageError as error:
            log.debug("run=%s the policy's rules can't be remembered: %s", h.run, error.message)


def _is_within(going: int, live: int, share: float) -> bool:
    """Whether so many deletions at once are none too many."""
    return going <= NEVER_REFUSED or going <= share * live


def _live(catalog: Catalog) -> set[Attempt]:
    return {i.attempt for i in catalog.checkpoints if not (i.hidden or i.superseded or i.damaged)}


def newest_of(catalog: Catalog) -> frozenset[Attempt]:
    """The committed checkpoints of the highest step and of the latest save: whatever a plan says, these are not swept."""
    found = [info.attempt for info in catalog.checkpoints]
    return frozenset({max(found), max(found, key=lambda a: a.save_id)} if found else ())


def _refused(h: Housekeeping, what: str, hint: str) -> RefusedError:
    return RefusedError(f"run {h.run!r}: {what}; nothing is deleted", hint=hint, run=h.run)


def _steps(attempts: Sequence[Attempt]) -> str:
    steps = sorted({a.step for a in attempts})
    return f"step{'s' if len(steps) > 1 else ''} {format_some(steps, 8)}"
