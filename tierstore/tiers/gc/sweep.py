"""Sweep: what expired and is due goes for good (PROTOCOLS.md §6). ``swept`` is the point of no return, and comes before any deletion.

Where files of other checkpoints on some tiers take bytes from its shards there, ``reduced`` is written instead: it is as gone as a swept
one, but for those shards, and the log that says so. Each later collection looks again whether somebody still refers to them
(`referring`); when nobody does any more, ``swept`` follows, and the rest goes.

The order that keeps readers whole (`models/model_gc.py`): ``swept`` is written, then the leases are listed. A reader makes its lease
and then looks at the log. So either the reader sees ``swept`` (or ``reduced``), or the collector sees the lease and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.crashpoints import reach
from tierstore.errors import ConflictError, NotFoundError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.checkpoint import CheckpointInfo, Reduced
from tierstore.tiers.gc.deleting import Emptying, Found, find_trim
from tierstore.tiers.gc.evict import lasts
from tierstore.tiers.gc.housekeeping import Housekeeping, Situation, plan_of
from tierstore.tiers.gc.referring import living_referrers
from tierstore.tiers.gc.standing import copies_standing, names_outside_grammar, read_proved_manifest
from tierstore.tiers.leases import LeaseSeen
from tierstore.tiers.log import append, gone_in, read_log, record_seq
from tierstore.tiers.log_copies import copy_records
from tierstore.tiers.log_facts import fold
from tierstore.tiers.retention import PlanEntry, Reason
from tierstore.tiers.tier import Tier, ensure_tier
from tierstore.tiers.together import together

__all__ = [
    "Gone",
    "decide_again",
    "decide_sweep",
    "held_by_readers",
    "keep_log",
    "names_to_record",
    "none_to_go_back_to",
    "read_gone",
    "readers_of",
    "sweep_job",
    "to_trim",
]

_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """What lets a checkpoint go: its log, with ``swept`` or ``reduced`` in it; in the latter case the tiers on which shards stay."""

    record: Record
    records: tuple[Record, ...]
    keep: frozenset[str] = frozenset()


async def decide_sweep(h: Housekeeping, situation: Situation, info: CheckpointInfo, reasons: Sequence[Reason]) -> Gone:
    """Appends ``swept``, with the names that only the manifest knows, unless anything was decided since the plan was made.

    ``reduced`` where somebody refers to its shards: whoever begins to, meanwhile, has made the log grow.

    Raises:
        ConflictError: The log has grown: a pin, a hold, a late metric may keep it. Or this process has begun to use it.
        RefusedError: It was swept meanwhile, or is not expired by its log.
        IntegrityError, NotFoundError: Its log can't be read.
        StorageError: The manifest or the log can't be read or written; the next run decides again.
    """
    named = await names_to_record(h, info)

    def allow(records: Sequence[Record]) -> bool:
        facts = fold(records)
        if (used := h.protected().get(info.attempt)) is not None:
            raise ConflictError(f"step {info.step} of run {info.run!r} is in use now: {used.text}", run=info.run, step=info.step)
        return facts.expired is not None and not facts.pins and not any(lasts(h, hold) for hold in facts.holds)

    living = await living_referrers(h, situation, info.attempt, info.records)
    data = {"reason": "; ".join(reason.text for reason in reasons), "files": named}
    return await _end(h, info.attempt, info.records, data, frozenset(living), allow)


async def decide_again(h: Housekeeping, situation: Situation, reduced: Reduced, *, decide: bool = True) -> Gone:
    """Looks again who refers to what stays of a reduced checkpoint, and appends what follows: less stays, or nothing (``swept``).

    Args:
        h: Who collects.
        situation: What was seen.
        reduced: The checkpoint, as the catalog shows it.
        decide: False: only reads what was decided.

    Raises:
        ConflictError: The log has grown meanwhile: the next run looks again.
        RefusedError: It was swept meanwhile.
        IntegrityError: The log can't be read.
        StorageError: A tier failed.
    """
    gone = await read_gone(h, reduced.attempt, known=reduced.records)
    if not (decide and gone.keep):
        return gone
    living = await living_referrers(h, situation, reduced.attempt, gone.records)
    keep = gone.keep & living.keys()
    if keep == gone.keep:
        return gone
    return await _end(h, reduced.attempt, gone.records, {**gone.record.data}, keep)


async def _end(
    h: Housekeeping,
    attempt: Attempt,
    records: Sequence[Record],
    data: Mapping[str, object],
    keep: frozenset[str],
    allow: Callable[[Sequence[Record]], bool] | None = None,
) -> Gone:
    """Appends the end upon the last of `records`."""
    kind, said = ("reduced", {**data, "keep": sorted(keep)}) if keep else ("swept", {k: v for k, v in data.items() if k != "keep"})
    reach(f"sweep.before-{kind}")
    record = await append(h.tiers.authority.storage, attempt, kind, said, clock=h.clock, after=records[-1].seq, allow=allow, known=records)
    reach(f"sweep.after-{kind}")
    return Gone(record=record, records=(*records, record), keep=keep)


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


async def read_gone(h: Housekeeping, attempt: Attempt, *, known: Sequence[Record] = ()) -> Gone:
    """What lets a checkpoint go that an earlier run swept. `known`: as for `read_log`.

    Raises:
        ConflictError: The log does not say so (any more): nothing may be deleted by it.
        IntegrityError, StorageError: The log can't be read.
    """
    records = await read_log(h.tiers.authority.storage, attempt, known=known)
    record = gone_in(records)
    if record is None:
        raise ConflictError(
            f"the log of step {attempt.step} of run {attempt.run!r} says no longer that it was swept",
            hint="run `tierstore verify`",
            run=attempt.run,
            step=attempt.step,
        )
    return Gone(record=record, records=records, keep=fold(records).reduced or frozenset())


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


def sweep_job(attempt: Attempt, tier: Tier, gone: Gone) -> Emptying:
    """What ``swept`` or ``reduced`` lets go from one tier."""
    files = gone.record.data.get("files")
    named = frozenset(name for name in files if isinstance(name, str)) if isinstance(files, (list, tuple)) else frozenset()
    why, stays = f"{gone.record.kind} by record {gone.record.seq:06d}", tier.name in gone.keep
    if stays:
        why += "; its shards stay, for others refer to them"
    return Emptying(attempt=attempt, tier=tier, kind="sweep", why=why, named=named, keep_shards=stays, keep_log=stays)


async def keep_log(h: Housekeeping, attempt: Attempt, tier: Tier, gone: Gone) -> bool:
    """Before a tier loses all but the shards: its copy of the log says so first, or without the authority it would look like a checkpoint.

    Returns:
        Whether it says so; False where the log was trimmed meanwhile.

    Raises:
        StorageError: A tier failed; nothing may go from it now.
        IntegrityError: A record came garbled.
    """
    if h.tiers.is_authority(tier):
        return True
    await ensure_tier(h.tiers, tier)
    listed = await tier.storage.list(attempt.log_folder)
    there = {record_seq(info.path.removeprefix(f"{attempt.log_folder}/")) for info in listed if info.nbytes}
    try:
        await copy_records(h.tiers.authority, tier, attempt, [record for record in gone.records if record.seq not in there])
    except NotFoundError:
        return False
    return True


async def to_trim(h: Housekeeping, swept: Mapping[Attempt, Gone]) -> list[Found]:
    """The records of swept logs that say nothing any more; what a collector deletes last."""
    reach("sweep.before-trim")
    found = await together(lambda item: find_trim(h, item[0], item[1].record.seq), swept.items())
    return [one for one in found if one.files]
