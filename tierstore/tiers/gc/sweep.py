"""Sweep: what expired and is due goes for good (PROTOCOLS.md §6). ``swept`` is the point of no return, and comes before any deletion.

The order that keeps readers whole (`models/model_gc.py`): ``swept`` is written, then the leases are listed. A reader makes its lease
and then looks at the log. So either the reader sees ``swept``, or the collector sees the lease and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tierstore.crashpoints import reach
from tierstore.errors import ConflictError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.gc.deleting import Emptying, Found, find_trim
from tierstore.tiers.gc.evict import lasts
from tierstore.tiers.gc.housekeeping import Housekeeping, Situation, plan_of
from tierstore.tiers.gc.standing import copies_standing, names_outside_grammar, read_proved_manifest
from tierstore.tiers.leases import LeaseSeen
from tierstore.tiers.log import append, read_log, swept_in
from tierstore.tiers.log_facts import fold
from tierstore.tiers.retention import PlanEntry, Reason
from tierstore.tiers.tier import Tier
from tierstore.tiers.together import together

__all__ = ["decide_sweep", "held_by_readers", "names_to_record", "none_to_go_back_to", "read_swept", "readers_of", "sweep_job", "to_trim"]

_POLL_S = 1.0


async def decide_sweep(h: Housekeeping, info: CheckpointInfo, reasons: Sequence[Reason]) -> Record:
    """Appends ``swept``, with the names that only the manifest knows, unless anything was decided since the plan was made.

    Raises:
        ConflictError: The log has grown: a pin, a hold, a late metric may keep it. Or this process has begun to use it.
        RefusedError: It was swept meanwhile, or is not expired by its log.
        IntegrityError, NotFoundError: Its log can't be read.
        StorageError: The manifest or the log can't be read or written; the next run decides again.
    """
    seen = info.records[-1].seq
    named = await names_to_record(h, info)

    def allow(records: Sequence[Record]) -> bool:
        facts = fold(records)
        if (used := h.protected().get(info.attempt)) is not None:
            raise ConflictError(f"step {info.step} of run {info.run!r} is in use now: {used.text}", run=info.run, step=info.step)
        return facts.expired is not None and not facts.pins and not any(lasts(h, hold) for hold in facts.holds)

    reach("sweep.before-swept")
    data = {"reason": "; ".join(reason.text for reason in reasons), "files": named}
    record = await append(h.tiers.authority.storage, info.attempt, "swept", data, clock=h.clock, after=seen, allow=allow)
    reach("sweep.after-swept")
    return record


async def none_to_go_back_to(h: Housekeeping, plan: Sequence[PlanEntry], infos: Mapping[Attempt, CheckpointInfo]) -> str:
    """Why nothing may be swept: the newest verified checkpoint, looked at now, stands on no tier. Empty where it does.

    What the log believes of it is not enough, when others go because it is there.
    """
    troubles = []
    for entry in plan:
        if any(reason.kind == "newest-verified" for reason in entry.reasons):
            info = infos[entry.attempt]
            copies = await copies_standing(h.tiers, info.attempt, fold(info.records), without="")
            if copies.standing:
                return ""
            troubles.append(f"the newest verified checkpoint, step {info.step}, has no copy that stands ({'; '.join(copies.missing)})")
    return f"{'; '.join(troubles)}: `tierstore verify` says what is wrong, `tierstore repair` mends it" if troubles else ""


async def names_to_record(h: Housekeeping, info: CheckpointInfo) -> list[str]:
    """The files that only the manifest knows to be ours; none where no copy of it is good any more.

    Raises:
        StorageError: A tier that may have a good one can't be read.
    """
    holding = [tier for tier in h.tiers if tier.name in info.replicas]
    return names_outside_grammar(await read_proved_manifest(holding, info.attempt, info.records[0]))


async def read_swept(h: Housekeeping, attempt: Attempt) -> Record:
    """The record that lets a checkpoint go that an earlier run swept.

    Raises:
        ConflictError: The log does not say so (any more): nothing may be deleted by it.
        IntegrityError, StorageError: The log can't be read.
    """
    swept = swept_in(await read_log(h.tiers.authority.storage, attempt))
    if swept is None:
        raise ConflictError(
            f"the log of step {attempt.step} of run {attempt.run!r} says no longer that it was swept",
            hint="run `tierstore verify`",
            run=attempt.run,
            step=attempt.step,
        )
    return swept


def held_by_readers(h: Housekeeping, situation: Situation) -> frozenset[Attempt]:
    """What has expired and is due, and would be swept if nobody read it."""
    if h.policy is None or not situation.leases:
        return frozenset()
    as_it_is, unread = (
        {entry.attempt for entry in plan_of(h, seen).entries if entry.action == "sweep"}
        for seen in (situation, replace(situation, leases={}))
    )
    return frozenset(unread - as_it_is)


async def readers_of(h: Housekeeping, wanted: Collection[Attempt], wait_s: float) -> Mapping[Attempt, tuple[LeaseSeen, ...]]:
    """Who still reads what is to go, after waiting for them up to `wait_s` seconds. It may go only if ``swept`` was written before this.

    Raises:
        StorageError: The leases can't be listed: nothing may be deleted then.
    """
    end = h.clock.monotonic() + wait_s
    while True:
        living = await h.leases.living(h.tiers, h.run)
        reading = {attempt: living[attempt] for attempt in wanted if living.get(attempt)}
        left_s = end - h.clock.monotonic()
        if not reading or left_s <= 0:
            return reading
        await asyncio.sleep(min(_POLL_S, left_s))


def sweep_job(attempt: Attempt, tier: Tier, swept: Record) -> Emptying:
    """What ``swept`` lets go from one tier."""
    files = swept.data.get("files")
    named = frozenset(name for name in files if isinstance(name, str)) if isinstance(files, (list, tuple)) else frozenset()
    return Emptying(attempt=attempt, tier=tier, kind="sweep", why=f"swept by record {swept.seq:06d}", named=named)


async def to_trim(h: Housekeeping, swept: Mapping[Attempt, Record]) -> list[Found]:
    """The records of swept logs that say nothing any more; what a collector deletes last."""
    reach("sweep.before-trim")
    found = await together(lambda item: find_trim(h, item[0], item[1].seq), swept.items())
    return [one for one in found if one.files]
