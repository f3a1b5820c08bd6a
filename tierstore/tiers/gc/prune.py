"""Prune decides: it carries a plan's verdicts into the logs, one numbered record each. It frees nothing (PROTOCOLS.md §6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from tierstore.clock import utc_text
from tierstore.crashpoints import reach
from tierstore.errors import ConflictError, NotFoundError, RefusedError, UsageError
from tierstore.names import Attempt
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.gc.brakes import check_ground, check_policy, check_share, get_used_to
from tierstore.tiers.gc.housekeeping import Housekeeping, Situation, look, plan_of
from tierstore.tiers.gc.reports import PruneReport
from tierstore.tiers.log import append
from tierstore.tiers.retention import Plan, PlanEntry
from tierstore.tiers.together import together

__all__ = ["PruneReport", "carry_out", "prune"]

log = logging.getLogger(__name__)

_AT_ONCE = 8


async def prune(
    h: Housekeeping, plan: Plan | None = None, *, max_delete_fraction: float | None = None, dry_run: bool = False
) -> PruneReport:
    """Appends what the policy decides: ``expired`` for what is to go, ``revived`` for what is to stay after all.

    Args:
        h: Who decides.
        plan: A plan that somebody has read and agreed to: of it only what is still so is done. None: all that the policy says now.
        max_delete_fraction: In place of the policy's.
        dry_run: Only say what would be decided.

    Raises:
        RefusedError: There is no policy, the run is not in order (`brakes.check_ground`), or too much would go. Nothing was decided.
        UsageError: The plan is another run's.
        StorageError: The authority failed; what was decided before that stays decided, and the next call continues.
        IntegrityError: A log could not be read.
    """
    check_policy(h)
    situation = await look(h)
    await check_ground(h, situation)
    return await carry_out(h, situation, plan, max_delete_fraction=max_delete_fraction, dry_run=dry_run)


async def carry_out(
    h: Housekeeping, situation: Situation, agreed: Plan | None = None, *, max_delete_fraction: float | None = None, dry_run: bool = False
) -> PruneReport:
    """`prune` upon what was seen, where the run is in order. Raises as it does."""
    if agreed is not None and agreed.run != h.run:
        raise UsageError(f"this plan is of run {agreed.run!r}, not {h.run!r}", hint="prune the run that the plan was made for")
    fresh = await asyncio.to_thread(plan_of, h, situation)
    chosen, passed_over = _agreed(fresh, agreed)
    expiring = [entry for entry in chosen if entry.action == "expire"]
    await check_share(h, situation.catalog, fresh, (entry.attempt for entry in expiring), max_delete_fraction)
    plan_id = fresh.id if agreed is None else agreed.id
    infos = {info.attempt: info for info in situation.catalog.checkpoints}
    if dry_run:
        whys = [""] * len(chosen)
    else:
        await get_used_to(h, situation.catalog, fresh, meant=max_delete_fraction is not None)
        whys = await together(lambda entry: _decide(h, infos[entry.attempt], entry, plan_id), chosen, at_once=_AT_ONCE)
    done = [entry for entry, why in zip(chosen, whys, strict=True) if not why]
    passed_over += [(entry.attempt, why) for entry, why in zip(chosen, whys, strict=True) if why]
    for entry in done:
        log.info("run=%s step=%d %s plan=%s dry_run=%s", h.run, entry.attempt.step, entry.action, plan_id, dry_run)
    return PruneReport(
        plan=fresh,
        expired=tuple(entry.attempt for entry in done if entry.action == "expire"),
        revived=tuple(entry.attempt for entry in done if entry.action == "revive"),
        passed_over=tuple(passed_over),
    )


def _agreed(fresh: Plan, agreed: Plan | None) -> tuple[list[PlanEntry], list[tuple[Attempt, str]]]:
    """What is to be decided now; and what the agreed plan decided otherwise than the policy does today, with the reasons of today."""
    wanted = [entry for entry in fresh.entries if entry.action in ("expire", "revive")]
    if agreed is None:
        return wanted, []
    verdicts = {entry.attempt: entry.action for entry in agreed.entries if entry.action in ("expire", "revive")}
    today: Mapping[Attempt, PlanEntry] = {entry.attempt: entry for entry in fresh.entries}
    both = [entry for entry in wanted if verdicts.get(entry.attempt) == entry.action]
    done = {entry.attempt for entry in both}
    return both, [(attempt, _changed(today.get(attempt))) for attempt in verdicts if attempt not in done]


def _changed(entry: PlanEntry | None) -> str:
    if entry is None:
        return "it is gone"
    return f"{entry.action} by now: {_text(entry)}"


async def _decide(h: Housekeeping, info: CheckpointInfo, entry: PlanEntry, plan_id: str) -> str:
    """Appends one verdict upon the last record that the plan saw; why not, where something was decided in between."""
    data = {"plan": plan_id, "reason": _text(entry)}
    if entry.action == "expire":
        assert entry.not_before is not None
        data["not_before"] = utc_text(entry.not_before)
    kind = "expired" if entry.action == "expire" else "revived"
    reach("expire.before-record")
    try:
        await append(h.tiers.authority.storage, info.attempt, kind, data, clock=h.clock, after=info.records[-1].seq)
    except (ConflictError, RefusedError) as error:
        return f"something else was decided meanwhile: {error.message}"
    except NotFoundError as error:
        return f"its log is gone: {error.message}"
    reach("expire.after-record")
    return ""


def _text(entry: PlanEntry) -> str:
    return "; ".join(reason.text for reason in entry.reasons)
