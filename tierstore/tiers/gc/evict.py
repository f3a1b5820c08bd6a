"""Evict: one tier's copy goes, while enough recorded copies that stand elsewhere keep the checkpoint (PROTOCOLS.md §5).

Two that look each at the other's copy and then both drop theirs lose the last one (`models/model_gc.py`: two evictors). So the copies
are looked at after the log was read, and ``evicting`` is won by number: whoever decided something meanwhile, wins.

A tier before the authority is another disk on each node, and the log says nothing of it: there a marker beside the copies of the log
says that this node's copy was dropped. That races with nobody, as such a copy never counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from tierstore.clock import utc_text
from tierstore.crashpoints import reach
from tierstore.errors import ConflictError, LockedError, NotFoundError, RefusedError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.storage.contract import WritesPacked
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.gc.brakes import check_ground
from tierstore.tiers.gc.deleting import Emptying, Remover, find
from tierstore.tiers.gc.housekeeping import Housekeeping, Situation, look
from tierstore.tiers.gc.referring import living_on
from tierstore.tiers.gc.reports import Freed
from tierstore.tiers.gc.standing import Standing, copies_standing
from tierstore.tiers.log import actor_name, append, read_fate, read_log
from tierstore.tiers.log_facts import Hold, LogFacts, fold
from tierstore.tiers.referrers import fold_references
from tierstore.tiers.tier import Tier, ensure_tier
from tierstore.tiers.unsaid_references import unsaid_on
from tierstore.tiers.view import staging

__all__ = ["Freed", "continue_eviction", "decide_eviction", "evict", "finish_eviction", "preview_eviction", "spared"]

_TRIES = 4


async def evict(h: Housekeeping, info: CheckpointInfo, tier: Tier | str, *, reason: str = "", dry_run: bool = False) -> Freed:
    """Drops one tier's copy of a checkpoint, now; continues where an earlier eviction was interrupted.

    Args:
        h: Who collects.
        info: The checkpoint, as the catalog shows it.
        tier: The tier, or its name.
        reason: For people: who wanted it, and why.
        dry_run: Only say what would go.

    Raises:
        RefusedError: Too few copies stand elsewhere, it is held or was swept, or the run is not in order (`brakes.check_ground`).
        LockedError: It is being read, or used by this process.
        NotFoundError: The tier has nothing of it.
        StorageError: A tier failed; calling again continues.
    """
    target = h.tiers.get(tier) if isinstance(tier, str) else tier
    situation = await look(h)
    await check_ground(h, situation)
    if target.name in situation.catalog.unreachable:
        raise situation.catalog.unreachable[target.name]
    in_use = situation.in_use.get(info.attempt)
    if in_use is not None and in_use.kind in ("leased", "in-flight"):
        raise LockedError(
            f"step {info.step} of run {info.run!r} is in use: {in_use.text}",
            hint="try again when it is not; `tierstore gc` drops what the policy lets go",
            run=info.run,
            step=info.step,
        )
    if info.replicas.get(target.name) is None:
        raise NotFoundError(
            f"tier {target.name!r} has nothing of step {info.step} of run {info.run!r}",
            hint=f"it is on {', '.join(info.replicas) or 'no tier that was reached'}",
            run=info.run,
            step=info.step,
            tier=target.name,
        )
    job = await (preview_eviction if dry_run else decide_eviction)(h, info.attempt, target, reason or "by hand")
    job = await spared(h, situation, job, decide=not dry_run)
    found = await find(h, job)
    if not dry_run:
        failure = (await Remover(h, situation.catalog.known).remove([found]))[0]
        if failure is not None:
            raise failure
        await finish_eviction(h, job)
    return Freed(
        attempt=info.attempt,
        tier=target.name,
        kind="evict",
        files=len(found.files),
        nbytes=sum(f.taken_nbytes for f in found.files),
        kept_for=job.referrers if job.keep_shards else (),
    )


async def spared(h: Housekeeping, situation: Situation, job: Emptying, *, decide: bool = True) -> Emptying:
    """The same, but for the shards where somebody refers to them: nobody new can, since the log lets the copy go.

    `decide`: as for `living_referrers`.

    Raises:
        StorageError: A tier can't be listed: nothing may go.
        IntegrityError: A referrer's fate can't be read.
    """
    referrers = job.referrers
    if isinstance(job.tier.storage, WritesPacked):
        fate = await read_fate(h.tiers.authority.storage, job.attempt)
        if fate is not None and fold((fate,)).may_have_been_lost:
            referrers = tuple(dict.fromkeys((*referrers, *await unsaid_on(job.tier, job.attempt))))
    if not referrers:
        return job
    living = await living_on(h, situation, job.tier.name, referrers, decide=decide)
    return replace(job, referrers=living, keep_shards=bool(living))


async def decide_eviction(h: Housekeeping, attempt: Attempt, tier: Tier, reason: str) -> Emptying:
    """Makes it the log's decision (or the marker's) that the tier's copy goes; returns what may be deleted then.

    Raises:
        RefusedError: The checks of `evict`, by the log as it is.
        ConflictError: The log grew again and again while the copies were looked at.
        NotFoundError: The authority's log knows nothing of it.
        IntegrityError: The log can't be read.
        StorageError: A tier failed.
    """
    tries = 0
    while True:
        records = await _records(h, attempt)
        if (ongoing := await continue_eviction(h, attempt, tier, records)) is not None:
            return ongoing
        copies = await _check(h, attempt, tier, fold(records))
        reach("evict.before-evicting")
        if _is_staging(h, tier):
            return await _mark(h, attempt, tier, reason, copies)
        try:
            return await _win(h, attempt, tier, reason, copies, records)
        except ConflictError:
            tries += 1
            if tries == _TRIES:
                raise


async def preview_eviction(h: Housekeeping, attempt: Attempt, tier: Tier, reason: str) -> Emptying:
    """What `decide_eviction` would let go, and its checks; nothing is written. Raises as it does."""
    records = await _records(h, attempt)
    ongoing = await continue_eviction(h, attempt, tier, records)
    if ongoing is None:
        copies = await _check(h, attempt, tier, fold(records))
        referrers = fold_references(records).get(tier.name, ())
        ongoing = Emptying(attempt=attempt, tier=tier, kind="evict", why=reason, named=frozenset(copies.named), referrers=referrers)
    return ongoing


async def continue_eviction(h: Housekeeping, attempt: Attempt, tier: Tier, records: Sequence[Record]) -> Emptying | None:
    """What an earlier decision lets go from a counted tier, also again (a late writer's files); None where there is none.

    Raises:
        RefusedError: No copy stands elsewhere any more, so that what is left here may be the last of it.
        StorageError: The copies can't be looked at.
    """
    facts = fold(records)
    if _is_staging(h, tier) or tier.name not in facts.dropped:
        return None
    copies = await copies_standing(h.tiers, attempt, facts, without=tier.name)
    if not copies.standing:
        others = "; ".join(copies.missing) or "there is no other tier"
        hint = "`tierstore repair` mends a copy elsewhere, also from what is left of this one; then it goes"
        raise _refused(attempt, tier, f"it was to go, but no copy stands elsewhere any more ({others})", hint)
    own = [r for r in records if r.kind == "evicting" and r.data.get("tier") == tier.name]
    named = {name for r in own for name in _texts(r.data.get("files"))}
    number = f" by record {own[-1].seq:06d}" if own else ""
    return Emptying(
        attempt=attempt,
        tier=tier,
        kind="evict",
        why=f"evicting from {tier.name}{number}",
        named=frozenset(named),
        referrers=fold_references(records).get(tier.name, ()),
    )


async def finish_eviction(h: Housekeeping, job: Emptying) -> None:
    """Records that the copy is gone; nothing for a node's tier, whose marker stays.

    Raises:
        StorageError, IntegrityError: The log can't be written or read: the next run records it.
    """
    if _is_staging(h, job.tier):
        return
    reach("evict.before-evicted")
    try:
        await append(
            h.tiers.authority.storage,
            job.attempt,
            "evicted",
            {"tier": job.tier.name},
            clock=h.clock,
            allow=lambda records: job.tier.name in fold(records).evicting,
        )
    except RefusedError:
        return  # another collector recorded it, or the checkpoint was swept meanwhile
    reach("evict.after-evicted")


async def _records(h: Housekeeping, attempt: Attempt) -> tuple[Record, ...]:
    records = await read_log(h.tiers.authority.storage, attempt)
    if not records:
        raise NotFoundError(
            f"step {attempt.step} of run {attempt.run!r} has no commit record on tier {h.tiers.authority.name!r}",
            hint="only a committed checkpoint has copies to drop; `tierstore recover` rebuilds a lost log",
            run=attempt.run,
            step=attempt.step,
        )
    return records


async def _check(h: Housekeeping, attempt: Attempt, tier: Tier, facts: LogFacts) -> Standing:
    """Refuses what must not be dropped; else says which copies stand elsewhere."""
    if not facts.committed or facts.swept:
        raise _refused(attempt, tier, "it is no checkpoint any more", "`tierstore gc` removes what is left of it")
    if (used := h.protected().get(attempt)) is not None and used.kind == "in-flight":
        raise _refused(attempt, tier, f"it is in use: {used.text}", "try again when it is not")
    if holds := [hold.name for hold in facts.holds if lasts(h, hold)]:
        raise _refused(attempt, tier, f"it is held: {', '.join(holds)}", "`tierstore release` ends a hold")
    copies = await copies_standing(h.tiers, attempt, facts, without=tier.name)
    least = h.policy.protect.min_copies if h.policy is not None else 1
    if len(copies.standing) < least:
        there, others = ", ".join(copies.standing) or "none", "; ".join(copies.missing) or "there is no other tier"
        raise _refused(
            attempt,
            tier,
            f"at least {least} {'copy' if least == 1 else 'copies'} must stand elsewhere, and these do: {there} ({others})",
            "copy it first: `tierstore push REF --to TIER`; `tierstore verify` says what is wrong with a copy",
        )
    return copies


def lasts(h: Housekeeping, hold: Hold) -> bool:
    """Whether a hold has not run out, by any clock that is off by no more than the policy's skew."""
    return hold.until is None or (h.clock.now() - hold.until).total_seconds() <= h.gc.max_clock_skew_s


async def _win(h: Housekeeping, attempt: Attempt, tier: Tier, reason: str, copies: Standing, records: Sequence[Record]) -> Emptying:
    """Appends ``evicting`` as the next number after what was looked at."""
    data = {"tier": tier.name, "reason": reason, "copies": list(copies.standing), "files": list(copies.named)}
    record = await append(h.tiers.authority.storage, attempt, "evicting", data, clock=h.clock, after=records[-1].seq)
    reach("evict.after-evicting")
    why = f"evicting from {tier.name} by record {record.seq:06d}"
    referrers = fold_references(records).get(tier.name, ())
    return Emptying(attempt=attempt, tier=tier, kind="evict", why=why, named=frozenset(copies.named), referrers=referrers)


async def _mark(h: Housekeeping, attempt: Attempt, tier: Tier, reason: str, copies: Standing) -> Emptying:
    """Leaves the marker, then looks at the log again: a hold that came first keeps the copy."""
    await ensure_tier(h.tiers, tier)
    marked = any(info.path == attempt.evicted_path for info in await tier.storage.list(attempt.log_folder))
    if not marked:
        marker = {"at": utc_text(h.clock.now()), "actor": actor_name(), "reason": reason}
        await tier.storage.put(attempt.evicted_path, (json.dumps(marker) + "\n").encode())
    reach("evict.after-evicting")
    facts = fold(await _records(h, attempt))
    if any(lasts(h, hold) for hold in facts.holds):
        if not marked:  # else some of the copy may be gone already
            await tier.storage.delete([attempt.evicted_path])
        raise _refused(attempt, tier, "it was held just now", "`tierstore release` ends a hold")
    why = f"dropped from {tier.name} on this node: {reason}"
    return Emptying(attempt=attempt, tier=tier, kind="evict", why=why, named=frozenset(copies.named))


def _is_staging(h: Housekeeping, tier: Tier) -> bool:
    return tier.name in {t.name for t in staging(h.tiers)}


def _texts(value: object) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, (list, tuple)) else []


def _refused(attempt: Attempt, tier: Tier, why: str, hint: str) -> RefusedError:
    return RefusedError(
        f"the copy of step {attempt.step} of run {attempt.run!r} on tier {tier.name!r} stays: {why}",
        hint=hint,
        run=attempt.run,
        step=attempt.step,
        tier=tier.name,
    )
