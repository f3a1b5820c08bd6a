"""Orphans: attempts that nobody finished. A collector must first win ``000000 = condemned``; losing means that it is a checkpoint.

Scanning for "no commit" and then deleting loses acknowledged checkpoints (`models/model_gc.py`), so the fate is decided by the same
create-if-absent that a committer uses. An attempt whose parts are all there is left alone: `tierstore recover` can still finish it. So is
one that this node has staged and not carried to the authority: carrying it there makes it young again, and the other nodes have a grace
to bring theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from tierstore.clock import when_text
from tierstore.crashpoints import reach
from tierstore.errors import ConflictError
from tierstore.names import Attempt, save_id_time
from tierstore.tiers.checkpoint import IncompleteAttempt
from tierstore.tiers.gc.deleting import Emptying
from tierstore.tiers.gc.housekeeping import Housekeeping, Situation
from tierstore.tiers.log import decide_fate, read_fate
from tierstore.tiers.referrers import kept_for
from tierstore.tiers.tier import Tier
from tierstore.tiers.together import together
from tierstore.tiers.unsaid_references import unsaid_referrers
from tierstore.units import format_duration

__all__ = ["condemn", "confirm_condemned", "orphan_job", "why_it_stays"]


async def why_it_stays(h: Housekeeping, situation: Situation, found: IncompleteAttempt) -> str:
    """Why an attempt without a fate is no orphan (yet); empty if it is one.

    Raises:
        StorageError: A tier that may have some of it can't be listed.
    """
    if (reason := situation.protected.get(found.attempt)) is not None:
        return reason.text
    if found.missing == ():
        return "all its parts are there: `tierstore recover` finishes it"
    if situation.catalog.unreachable:
        return f"what tier {', '.join(situation.catalog.unreachable)} has of it can't be seen"
    staged = {rank for ranks in found.receipts.values() for rank in ranks}
    if staged - set(found.parts.get(h.tiers.authority.name, ())):  # the authority was down, perhaps for days: others bring theirs too
        return "this node's parts are not on the authority yet: `tierstore sync` brings them there"
    touched_at, grace_s = await _touched_at(h, found.attempt), h.gc.orphan_grace_s + h.gc.max_clock_skew_s
    if (situation.at - touched_at).total_seconds() >= grace_s:
        return await _needed(h, situation, found)
    return f"unfinished, last written at {when_text(touched_at, situation.at)}; an orphan {format_duration(grace_s)} later"


async def _needed(h: Housekeeping, situation: Situation, found: IncompleteAttempt) -> str:
    """Who takes bytes from its shards, though nothing else is left of it: it was deleted but for them, and its log was lost since."""
    if found.parts.get(h.tiers.authority.name):
        return ""  # of a save that did not end
    living = {info.attempt for info in situation.catalog.checkpoints} | {item.attempt for item in situation.catalog.incomplete}
    for tier, referrers in (await unsaid_referrers(h.tiers, found.attempt)).items():
        if needing := [referrer for referrer in referrers if referrer in living]:
            return f"its log was lost; its bytes on {tier} are {kept_for(needing)}"
    return ""


async def condemn(h: Housekeeping, found: IncompleteAttempt) -> bool:
    """Tries to win the attempt's fate; False if it has committed meanwhile.

    Raises:
        OutcomeUnknownError, StorageError: Nobody knows: nothing may be deleted.
        IntegrityError: There is a record that can't be parsed.
    """
    reach("orphan.before-condemned")
    missing = list(found.missing or ())
    facts = {"reason": "an orphan: nobody finished it within the grace", "missing": missing, "world_size": found.world_size}
    fate = await decide_fate(h.tiers.authority.storage, found.attempt, "condemned", facts, h.clock)
    reach("orphan.after-condemned")
    return fate.kind == "condemned"


async def confirm_condemned(h: Housekeeping, attempt: Attempt) -> None:
    """Makes sure that the log says today that the attempt was condemned, before something of it is deleted.

    Raises:
        ConflictError: It does not.
        IntegrityError, StorageError: It can't be read.
    """
    fate = await read_fate(h.tiers.authority.storage, attempt)
    if fate is None or fate.kind != "condemned":
        raise ConflictError(
            f"the log of step {attempt.step} of run {attempt.run!r} says no longer that it was condemned",
            hint="run `tierstore verify`",
            run=attempt.run,
            step=attempt.step,
        )


def orphan_job(attempt: Attempt, tier: Tier) -> Emptying:
    """What ``condemned`` lets go from one tier: what the grammar knows, for there is no manifest that could name more."""
    return Emptying(attempt=attempt, tier=tier, kind="orphan", why="condemned by record 000000")


async def _touched_at(h: Housekeeping, attempt: Attempt) -> datetime:
    """When something of the attempt was last written, as far as names and storages tell."""

    async def of_tier(tier: Tier) -> Iterable[datetime]:
        files = [*await tier.storage.list(attempt.folder), *await tier.storage.list(attempt.log_folder)]
        return [info.modified_at for info in files if info.modified_at is not None]

    times = await together(of_tier, h.tiers)
    return max([save_id_time(attempt.save_id), *(at for found in times for at in found)])
