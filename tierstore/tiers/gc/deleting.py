"""The only code that deletes: what the grammar or the record names, written down first, out of sight first, bounded in rate.

The order within a tier is that of PROTOCOLS.md §6: the copy of the commit record (without it nothing there is a checkpoint, also for a
reader that has lost the authority), manifest and receipts, the payload, the parts, the other copies of the log. Each step is durable
before the next one begins, so that no interrupted deletion ever looks like a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tierstore.crashpoints import reach
from tierstore.errors import TierStoreError
from tierstore.names import EVICTED, INDEX, MANIFEST, OBJECTS, QUANTISED, Attempt
from tierstore.storage.contract import FileInfo
from tierstore.tiers.checkpoint import parse_file_name
from tierstore.tiers.gc.audit import AuditLine, audit_home, write_audit
from tierstore.tiers.gc.housekeeping import Housekeeping, quiet
from tierstore.tiers.gc.reports import FreedKind
from tierstore.tiers.log import record_seq
from tierstore.tiers.tier import Tier, ensure_tier
from tierstore.tiers.together import together

__all__ = ["STEPS", "Emptying", "Found", "Remover", "find", "find_trim", "grammatical"]

log = logging.getLogger(__name__)

Step = Literal["record", "manifest", "payload", "parts", "log"]
STEPS: tuple[Step, ...] = ("record", "manifest", "payload", "parts", "log")
"""What goes one after the other."""

_RECEIPT = re.compile(r"receipt-\d{5,8}\.json")
_LOCAL_BATCH = 16
_FAR_BATCH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Emptying:
    """One attempt that is to go from one tier.

    Attributes:
        attempt: Whose files.
        tier: From where.
        kind: What it is part of.
        why: What allows it, for the audit log: a record.
        named: Files outside our grammar that the record gives by name, relative to the attempt's folder.
        referrers: Who may refer to its shards there, by the log upon which it goes; whether they live is asked before anything goes.
        keep_shards: Its shards stay, for somebody does.
        keep_log: The copies of its log stay, to say so where the authority is lost.
    """

    attempt: Attempt
    tier: Tier
    kind: FreedKind
    why: str
    named: frozenset[str] = frozenset()
    referrers: tuple[Attempt, ...] = ()
    keep_shards: bool = False
    keep_log: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What there is to delete, step by step; `foreign` are paths that are neither of our grammar nor named, and stay."""

    job: Emptying
    steps: dict[Step, tuple[FileInfo, ...]]
    foreign: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[FileInfo, ...]:
        return tuple(info for step in STEPS for info in self.steps.get(step, ()))


def grammatical(name: str) -> bool:
    """Whether a file of this name in a checkpoint's folder is one of ours, whatever a manifest says."""
    return name in (MANIFEST, INDEX, OBJECTS) or parse_file_name(name) is not None


async def find(h: Housekeeping, job: Emptying) -> Found:
    """Lists what a tier has of an attempt: its folder, and, not on the authority, the copies of its log.

    Raises:
        StorageError: The tier can't be listed.
    """
    await ensure_tier(h.tiers, job.tier)
    steps: dict[Step, list[FileInfo]] = {step: [] for step in STEPS}
    foreign: list[str] = []
    for info in await job.tier.storage.list(job.attempt.folder):
        name = info.path.removeprefix(f"{job.attempt.folder}/")
        if job.keep_shards and (parsed := parse_file_name(name)) is not None and parsed[0] == "shard":
            continue
        step = _payload_step(name, job.named)
        steps[step].append(info) if step else foreign.append(info.path)
    if not h.tiers.is_authority(job.tier):
        for info in await job.tier.storage.list(job.attempt.log_folder):
            leaf = info.path.removeprefix(f"{job.attempt.log_folder}/")
            log_step = _log_step(leaf)
            if leaf == EVICTED and job.kind == "evict":
                continue  # it says that the copy was dropped, for as long as the checkpoint is there
            if job.keep_log and record_seq(leaf) is not None:
                continue
            steps[log_step].append(info) if log_step else foreign.append(info.path)
    return Found(job=job, steps={step: tuple(files) for step, files in steps.items()}, foreign=tuple(foreign))


async def find_trim(h: Housekeeping, attempt: Attempt, swept_seq: int) -> Found:
    """The records of a swept checkpoint's log on the authority that say nothing any more: all but the first and ``swept``."""
    listed = await h.tiers.authority.storage.list(attempt.log_folder)
    records = {seq: info for info in listed if (seq := record_seq(info.path.removeprefix(f"{attempt.log_folder}/"))) is not None}
    old = tuple(info for seq, info in sorted(records.items()) if seq not in (0, swept_seq))
    job = Emptying(attempt=attempt, tier=h.tiers.authority, kind="sweep", why=f"swept by record {swept_seq:06d}; its log is trimmed")
    return Found(job=job, steps={"log": old if swept_seq in records else ()})


def _payload_step(name: str, named: frozenset[str]) -> Step | None:
    parsed = parse_file_name(name)
    if name == MANIFEST:
        return "manifest"
    if parsed is not None and parsed[0] == "part":
        return "parts"
    return "payload" if grammatical(name) or name in named else None


def _log_step(leaf: str) -> Step | None:
    if (seq := record_seq(leaf)) is not None:
        return "log" if seq else "record"
    if _RECEIPT.fullmatch(leaf):
        return "manifest"
    return "log" if leaf in (EVICTED, QUANTISED) else None


class Remover:
    """Deletes what was found, for one collection: it keeps the rate over all tiers and attempts.

    Args:
        h: Who collects.
        known: How many attempts the authority knows of, for the audit log.
    """

    def __init__(self, h: Housekeeping, known: int) -> None:
        self._h = h
        self._known = known
        self._rate = h.gc.max_deletes_per_s
        self._turn = asyncio.Lock()
        self._free_at = h.clock.monotonic()

    async def remove(self, found: Sequence[Found]) -> list[TierStoreError | None]:
        """Writes down all files, then deletes them, each tier's step by step; returns what kept each from being done, in order.

        What fails on one tier, or for one attempt, keeps no other from going.
        """
        ends: list[TierStoreError | None] = [None] * len(found)
        tiers: dict[str, list[int]] = {}
        for number, one in enumerate(found):
            tiers.setdefault(one.job.tier.name, []).append(number)

        async def of_tier(numbers: list[int]) -> None:
            chosen = [found[number] for number in numbers]
            try:
                await self._write_down(chosen)
            except TierStoreError as error:
                failures: list[TierStoreError | None] = [error] * len(chosen)
            else:
                failures = await self._remove_from_tier(chosen)
            for number, failure in zip(numbers, failures, strict=True):
                ends[number] = failure

        await together(of_tier, tiers.values())
        return ends

    async def _write_down(self, found: Sequence[Found]) -> None:
        lines = [
            AuditLine(tier=one.job.tier.name, path=info.path, nbytes=info.taken_nbytes, why=one.job.why)
            for one in found
            for info in one.files
        ]
        if not lines:
            return
        home = audit_home(self._h.tiers, found[0].job.tier)
        reach("delete.before-audit")
        await write_audit(home, self._h.run, lines, known=self._known, clock=self._h.clock)
        reach("delete.after-audit")

    async def _remove_from_tier(self, found: Sequence[Found]) -> list[TierStoreError | None]:
        """One tier's share, all attempts at once; after a refusal each by itself, so that one locked file keeps only its own."""
        try:
            await self._step_by_step(found)
        except TierStoreError as error:
            if len(found) == 1 or error.retryable:
                return [error] * len(found)
            log.warning(
                "tier=%s %d attempts can't be deleted at once, each is by itself: %s", found[0].job.tier.name, len(found), error.message
            )
            return [(await self._remove_from_tier([one]))[0] for one in found]
        return [None] * len(found)

    async def _step_by_step(self, found: Sequence[Found]) -> None:
        tier = found[0].job.tier
        for step in STEPS:
            await self._delete(tier, [info.path for one in found for info in one.steps.get(step, ())])
            reach(f"delete.after-{step}")
        # An empty folder of a deletion that was interrupted goes with the name that may have been its last.
        hollow = [
            one.job.attempt.path(MANIFEST)
            for one in found
            if "payload" in one.steps and not (one.files or one.foreign or one.job.keep_shards)
        ]
        await self._delete(tier, hollow)

    async def _delete(self, tier: Tier, paths: Sequence[str]) -> None:
        most = max(1, min(_LOCAL_BATCH if tier.storage.capabilities.local else _FAR_BATCH, self._rate))
        for begin in range(0, len(paths), most):
            batch = paths[begin : begin + most]
            await self._take_turn(len(batch))
            await tier.storage.delete(batch)

    async def _take_turn(self, count: int) -> None:
        """Waits until no save is being written and the rate allows the next deletions."""
        async with self._turn:
            await quiet(self._h)
            wait_s = self._free_at - self._h.clock.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._free_at = self._h.clock.monotonic() + count / self._rate
