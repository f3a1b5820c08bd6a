"""After a log was lost: what refers to what is read from the files themselves, before anything of it counts again.

The copies of a log beside the replicas may lack the latest records, and so the latest references. A collector that did not know of those
would take bytes away that a rebuilt checkpoint needs. So they are recorded before its log is there (until then nothing is collected); what
can't be recorded, for the log of whom it refers to is lost for good, is written anew, so that it needs nobody; where that fails, too, the
log stays lost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tierstore.clock import Clock
from tierstore.errors import IntegrityError, NotFoundError, TierStoreError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.checkpoint import CheckpointInfo, parse_file_name
from tierstore.tiers.copies import copy_payload
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.log_facts import fold
from tierstore.tiers.references import record_reference
from tierstore.tiers.referrers import attempt_of
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.unsaid_references import unsaid_referrers
from tierstore.tiers.verify_references import refers_to
from tierstore.tiers.view import AttemptView, further

__all__ = ["record_again", "say_again"]

log = logging.getLogger(__name__)


async def record_again(context: CopyContext, info: CheckpointInfo, view: AttemptView) -> str:
    """Records what a checkpoint's files refer to, on the authority and the tiers after it.

    Returns:
        What could be neither recorded nor written anew: its log must not come back, or a collector would not know what it needs. Empty:
        all is well.

    Raises:
        StorageError: A tier failed; the next try continues.
        IntegrityError: A log can't be read.
    """
    tiers = context.tiers
    for tier in (tiers.authority, *further(tiers)):
        listed = (await tier.storage.children(info.attempt.folder)).files
        shards = [name for f in listed if _is_shard(name := f.path.rpartition("/")[2])]
        unsaid: dict[str, str] = {}
        for name, paths in (await refers_to(tier, info.attempt, shards)).items():
            if why := await _say(context, tier, info.attempt, paths):
                unsaid[name] = why
        if not unsaid:
            continue
        why = "; ".join(sorted(set(unsaid.values())))
        log.warning("tier=%s checkpoint=%s is written anew: %s", tier.name, info.attempt.folder, why)
        try:
            await copy_payload(context, view, tier, anew=unsaid)
        except (IntegrityError, NotFoundError) as error:
            return f"on tier {tier.name!r} {why}, and it could not be written anew: {error.message}"
    return ""


async def _say(context: CopyContext, tier: Tier, attempt: Attempt, paths: Sequence[str]) -> str:
    """Records the references to all owners of `paths`; why one of them can't be, or nothing."""
    for owner in {attempt_of(path.rpartition("/")[0]): path for path in paths}.items():
        if owner[0] is None:
            return f"it takes bytes from {owner[1]}, which is no checkpoint's"
        _, why = await record_reference(context.tiers, owner[0], tier, attempt, clock=context.clock)
        if why:
            return f"it takes bytes from {owner[1]}: {why}"
    return ""


async def say_again(tiers: Tiers, attempt: Attempt, fate: Record, *, clock: Clock) -> None:
    """Records who refers to a checkpoint that was committed by `fate`, if that was done anew, for its log was lost with all its copies.

    This is for people, and may fail: collectors look for themselves, as the record says that there was a manifest before it.
    """
    if not fold((fate,)).may_have_been_lost:
        return
    try:
        for name, referrers in (await unsaid_referrers(tiers, attempt)).items():
            for referrer in reversed(referrers):
                await record_reference(tiers, attempt, tiers.get(name), referrer, clock=clock)
    except TierStoreError as error:
        log.info("checkpoint=%s who takes bytes from it is not recorded: %s", attempt.folder, error.message)


def _is_shard(name: str) -> bool:
    parsed = parse_file_name(name)
    return parsed is not None and parsed[0] == "shard"
