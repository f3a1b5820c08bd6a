"""Verify: does each tier hold what was promised? Findings with stable codes; nothing is deleted, moved or mended (PROTOCOLS.md §7);
where it is wanted, damage is noted in the log.

Levels: ``quick`` reads logs, their copies, manifests and indexes, and compares sizes (and, where it was recorded, what the server says
of each object: its checksum or ETag, by HEAD, without a download). ``sample`` also reads one of n groups of blocks, and the small
files. ``full`` reads every block. Who reads payload holds a lease, so that no collector takes it away meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tierstore.clock import Clock, SystemClock
from tierstore.errors import DeadlineError, IntegrityError, NotFoundError, StorageError, TemporaryError, TierStoreError
from tierstore.names import Attempt
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.catalog import Catalog, CheckpointInfo, scan
from tierstore.tiers.findings import Finding
from tierstore.tiers.leases import hold_lease
from tierstore.tiers.log import read_log
from tierstore.tiers.log_facts import fold
from tierstore.tiers.progress import NO_PROGRESS, Progress
from tierstore.tiers.quarantine import counts, quarantine
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.together import together
from tierstore.tiers.verify_files import Level, Looking, Verifying, verify_copy
from tierstore.tiers.verify_logs import look_at_authority, look_at_exactness, look_at_log_copies, look_at_tier, numbers_of

__all__ = ["LEASE_TTL_S", "Level", "VerifyReport", "log_findings", "verify"]

log = logging.getLogger(__name__)

LEASE_TTL_S = 600.0
"""How long a collector waits for the next beat of a lease, where no policy says it. Seconds."""

_COPIES_AT_ONCE = 4
_DAMAGED_FILE = ("V101", "V102", "V103", "V104")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was looked at, and what was found."""

    run: str
    level: Level
    findings: tuple[Finding, ...]
    checkpoints: int
    """Copies of checkpoints: one checkpoint on three tiers counts three times."""
    files: int
    nbytes_read: int
    """Payload bytes that were read and hashed."""

    @property
    def damage(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "damage")

    @property
    def exit_code(self) -> int:
        """6 where promised bytes are missing or wrong, else 0."""
        return IntegrityError.exit_code if self.damage else 0


async def verify(
    tiers: Tiers,
    run: str,
    *,
    level: Level = "quick",
    only: Sequence[str] | None = None,
    steps: Collection[int] | None = None,
    subset: tuple[int, int] = (1, 16),
    progress: Progress = NO_PROGRESS,
    budget_nbytes: int = 64 << 20,
    files_in_flight: int = 4,
    clock: Clock | None = None,
    lease_ttl_s: float = LEASE_TTL_S,
    leases: bool = True,
    note_damage: bool = False,
) -> VerifyReport:
    """Checks the committed checkpoints of a run on every tier.

    Args:
        tiers: The store's tiers.
        run: The run.
        level: How deep.
        only: Names of the tiers to check; None: all.
        steps: The steps to check; None: all.
        subset: (k, n): with ``sample``, the k-th of n groups of blocks (1 ≤ k ≤ n). Which block is in which group is fixed by a
            hash, so n runs with k = 1 … n read everything once.
        progress: Told as payload bytes are read.
        budget_nbytes: Memory for reading.
        files_in_flight: Files that are read at once.
        clock: Of the leases; the system's if None.
        lease_ttl_s: How long a lease outlives its last beat, in seconds.
        leases: Hold them; False: not a byte is written anywhere, and a checkpoint may go while it is read.
        note_damage: Note in the log what is damaged on the authority and the tiers after it, so that no eviction relies on such a copy.
            Where that can't be written, one warning says so.

    Raises:
        UsageError: No such tier.
        StorageError: No tier can be reached.
    """
    chosen = [tiers.get(name) for name in only] if only is not None else list(tiers)
    if not 1 <= subset[0] <= subset[1]:
        raise ValueError(f"subset {subset[0]}/{subset[1]} is not a k-th of n groups")
    work = Verifying.make(
        tiers, level=level, subset=subset, budget=ByteBudget(budget_nbytes), files_in_flight=files_in_flight, progress=progress
    )
    catalog = await scan(tiers, run)
    leasing = _Leasing(tiers=tiers, clock=clock or SystemClock(), ttl_s=lease_ttl_s, warned=set(), wanted=leases and level != "quick")
    logs = Looking(work=work, tier=tiers.authority.name)
    noting = _Noting(tiers=tiers, clock=leasing.clock, wanted=note_damage)

    def wanted(attempt: Attempt) -> bool:
        return steps is None or attempt.step in steps

    await look_at_authority(logs, tiers, catalog, wanted)
    found = list(logs.findings)
    for tier in chosen:
        infos = [c for c in reversed(catalog.checkpoints) if wanted(c.attempt)]
        found += await _verify_tier(work, leasing, noting, catalog, tier, infos, steps)
    return VerifyReport(
        run=run,
        level=level,
        findings=_once(found),
        checkpoints=work.checkpoints,
        files=work.files,
        nbytes_read=work.nbytes_read,
    )


async def log_findings(tiers: Tiers, run: str, *, steps: Collection[int] | None = None) -> tuple[Finding, ...]:
    """What is wrong with the authority's logs and with the copies of their records: the part of `verify` that reads nothing else.

    Raises:
        StorageError: No tier can be reached.
    """
    catalog = await scan(tiers, run)
    work = Verifying.make(tiers, level="quick", subset=(1, 1), budget=ByteBudget(1), files_in_flight=1)
    logs = Looking(work=work, tier=tiers.authority.name)
    infos = [c for c in catalog.checkpoints if steps is None or c.attempt.step in steps]
    await look_at_authority(logs, tiers, catalog, lambda attempt: steps is None or attempt.step in steps)
    found = list(logs.findings)
    for tier in tiers:
        if tier.name not in catalog.unreachable:
            found += await _copies_on(work, tier, run, infos)
    return _once(found)


async def _copies_on(work: Verifying, tier: Tier, run: str, infos: Sequence[CheckpointInfo]) -> list[Finding]:
    async def one(info: CheckpointInfo) -> list[Finding]:
        looking = Looking(work=work, tier=tier.name, info=info)
        await look_at_log_copies(looking, work.tiers, info, tier, numbers)
        return looking.findings

    try:
        numbers = await numbers_of(tier, run)
        return [finding for findings in await together(one, infos) for finding in findings]
    except (StorageError, NotFoundError) as error:
        log.warning("tier=%s its copies of the log can't be read: %s", tier.name, error.message)
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leasing:
    """Whether and how leases are held."""

    tiers: Tiers
    clock: Clock
    ttl_s: float
    warned: set[str]
    wanted: bool

    @asynccontextmanager
    async def of(self, info: CheckpointInfo) -> AsyncIterator[None]:
        """Holds the checkpoint.

        Raises:
            NotFoundError: It was deleted.
        """
        if not self.wanted:
            yield
            return
        known = None if info.damaged or info.authority_lost else info.records[-1].seq
        async with hold_lease(self.tiers, info.attempt, ttl_s=self.ttl_s, clock=self.clock, kind="verify", known=known, warned=self.warned):
            yield


@dataclass(slots=True, kw_only=True)
class _Noting:
    """Whether damage is noted in the log; not any more where that failed once."""

    tiers: Tiers
    clock: Clock
    wanted: bool

    async def note(self, info: CheckpointInfo, tier: Tier, findings: Sequence[Finding]) -> None:
        if not (self.wanted and counts(self.tiers, tier)) or info.damaged or info.authority_lost:
            return
        damage = {f.file: f.detail for f in findings if f.code in _DAMAGED_FILE}
        known = info.records[-1].seq
        try:
            await quarantine(self.tiers, info.attempt, tier, damage, world_size=info.world_size, clock=self.clock, known=known)
        except TierStoreError as error:
            if self.wanted:
                log.warning("run=%s what is damaged can't be noted in the log, and may be relied on: %s", info.run, error.message)
            self.wanted = False


async def _verify_tier(
    work: Verifying,
    leasing: _Leasing,
    noting: _Noting,
    catalog: Catalog,
    tier: Tier,
    infos: Sequence[CheckpointInfo],
    steps: Collection[int] | None,
) -> list[Finding]:
    """Everything on one tier: what belongs to no checkpoint, then the checkpoints, newest first."""
    about = Looking(work=work, tier=tier.name)
    if tier.name in catalog.unreachable:
        about.note("V111", "", catalog.unreachable[tier.name].message)
        return about.findings
    try:
        await look_at_tier(about, tier, catalog, lambda attempt: steps is None or attempt.step in steps)
        look_at_exactness(about, catalog, lambda attempt: steps is None or attempt.step in steps)
        numbers = await numbers_of(tier, catalog.run)
    except (StorageError, NotFoundError) as error:
        about.note("V111", "", error.message)
        return about.findings
    down: list[StorageError] = []
    skipped = 0

    async def one(info: CheckpointInfo) -> list[Finding]:
        nonlocal skipped
        if down:  # the tier as a whole does not answer: asking once for each checkpoint says no more
            skipped += 1
            return []
        looking = Looking(work=work, tier=tier.name, info=info)
        try:
            async with leasing.of(info):
                await look_at_log_copies(looking, work.tiers, info, tier, numbers)
                await verify_copy(looking, info, tier)
        except StorageError as error:
            looking.note("V111", "", error.message)
            if isinstance(error, (TemporaryError, DeadlineError)):
                down.append(error)
        except NotFoundError as error:  # the checkpoint was deleted since the catalog was read
            log.info("checkpoint=%s %s", info.attempt.folder, error.message)
            return []
        left = await _still_promised(work.tiers, info, tier, looking.findings)
        await noting.note(info, tier, left)
        return left

    found = await together(one, infos, at_once=_COPIES_AT_ONCE)
    if skipped:
        about.note("V111", "", f"{skipped} more checkpoints were not looked at: {down[0].message}")
    return [*about.findings, *(f for findings in found for f in findings)]


async def _still_promised(tiers: Tiers, info: CheckpointInfo, tier: Tier, findings: list[Finding]) -> list[Finding]:
    """The findings, or none where the copy was dropped, or the checkpoint deleted, while it was looked at."""
    if not any(f.severity == "damage" for f in findings) or info.damaged or info.authority_lost:
        return findings
    try:
        facts = fold(await read_log(tiers.authority.storage, info.attempt))
    except TierStoreError as error:
        log.debug("checkpoint=%s its log can't be read again: %s", info.attempt.folder, error.message)
        return findings
    return [] if facts.swept or tier.name in facts.dropped else findings


def _once(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The same record of the authority's log may be found wrong from several tiers: it is one finding."""
    seen: dict[tuple[str, str, str], Finding] = {}
    return tuple(f for f in findings if f.code != "V105" or seen.setdefault((f.code, f.checkpoint, f.file), f) is f)
