"""Which copies of a checkpoint stand right now: recorded, durable, and looked at, not believed (PROTOCOLS.md §5)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tierstore.errors import IntegrityError, NotFoundError, StorageError, TierStoreError, reason_of
from tierstore.format.digest import digest_of
from tierstore.format.manifest import Manifest, decode_manifest
from tierstore.format.record import Record
from tierstore.names import MANIFEST, Attempt
from tierstore.storage.contract import FileInfo
from tierstore.tiers.gc.deleting import grammatical
from tierstore.tiers.log_facts import LogFacts
from tierstore.tiers.tier import Tier, Tiers, recheck
from tierstore.tiers.together import together
from tierstore.tiers.view import staging

__all__ = ["Standing", "copies_standing", "names_outside_grammar", "read_proved_manifest"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The counted copies: `standing` are the names of tiers, nearest first; `missing` says of others why theirs does not count.

    `named`: the checkpoint's files outside our grammar, as the manifest of a copy that stands names them.
    """

    standing: tuple[str, ...]
    missing: tuple[str, ...]
    named: tuple[str, ...] = ()


async def copies_standing(tiers: Tiers, attempt: Attempt, facts: LogFacts, *, without: str) -> Standing:
    """Looks at every copy that the log counts, on all tiers but `without`: the manifest proved, every file there with its size.

    A tier before the authority never counts: a node's disk is not a place that lasts, and its name stands for many disks.
    """
    nodes = {tier.name for tier in staging(tiers)}
    manifests: list[Manifest] = []

    async def why_not(tier: Tier) -> str:
        if tier.name in nodes:
            return "is a node's own"
        if not tier.durable:
            return "is not durable"
        if tier.name in facts.dropped:
            return "has dropped its copy"
        if not (tiers.is_authority(tier) or tier.name in facts.replicated):
            return "has no recorded copy"
        if tier.name in facts.quantised:
            return "has a quantised copy only"
        if facts.quarantined_on(tier.name):
            return "has a copy that was found damaged"
        try:
            await recheck(tiers, tier)
            manifests.append(await _look_at(tier, attempt, facts, authority=tiers.is_authority(tier)))
        except (StorageError, NotFoundError, IntegrityError) as error:
            log.debug("tier=%s checkpoint=%s its copy does not count: %s", tier.name, attempt.folder, error.message)
            return f"can't be counted: {error.message}"
        return ""

    others = [tier for tier in tiers if tier.name != without]
    reasons = await together(why_not, others)
    return Standing(
        standing=tuple(tier.name for tier, reason in zip(others, reasons, strict=True) if not reason),
        missing=tuple(f"{tier.name} {reason}" for tier, reason in zip(others, reasons, strict=True) if reason),
        named=tuple(names_outside_grammar(manifests[0])) if manifests else (),
    )


async def _look_at(tier: Tier, attempt: Attempt, facts: LogFacts, *, authority: bool) -> Manifest:
    """The copy's manifest; raises IntegrityError, NotFoundError or StorageError where the copy is not all there."""
    manifest = await _proved(tier, attempt, _promised(facts.fate))
    there = {info.path: info for info in await tier.storage.list(attempt.folder)}
    record = facts.replicated.get(tier.name) or (facts.fate if authority else None)
    recorded = record.data.get("files") if record is not None else None
    for file in manifest.files:
        info = there.get(attempt.path(file.name))
        if info is None or info.nbytes != file.nbytes:
            what = "is missing" if info is None else f"has {info.nbytes} bytes instead of {file.nbytes}"
            raise IntegrityError(f"{file.name} {what}", hint="run `tierstore verify`", tier=tier.name, file=file.name)
        before = recorded.get(file.name) if isinstance(recorded, Mapping) else None
        if isinstance(before, Mapping):
            await _compare(tier, info, before, file.name)
    return manifest


async def _compare(tier: Tier, info: FileInfo, before: Mapping[str, Any], name: str) -> None:
    """Compares what the server says with what it said on the day of the copy.

    An ETag may change when a bucket is copied as a whole; the checksum, which costs a request, decides then.
    """
    etag, checksum = before.get("etag"), before.get("checksum")
    if not etag or not info.etag or etag == info.etag:
        return
    if checksum and (await tier.storage.stat(info.path)).checksum == checksum:
        return
    raise IntegrityError(
        f"{name} is not what was copied there, by the server's word", hint="run `tierstore verify`", tier=tier.name, file=name
    )


async def read_proved_manifest(tiers: Iterable[Tier], attempt: Attempt, fate: Record) -> Manifest | None:
    """The manifest that the commit record names, from the first tier that has it; None where none that answered has a good one.

    Raises:
        StorageError: None was found, and a tier that may have it could not be read.
    """
    trouble: StorageError | None = None
    for tier in tiers:
        try:
            return await _proved(tier, attempt, _promised(fate))
        except StorageError as error:
            trouble = error
        except (NotFoundError, IntegrityError) as error:
            log.debug("tier=%s checkpoint=%s no manifest from here: %s", tier.name, attempt.folder, reason_of(error))
    if trouble is not None:
        raise trouble
    return None


def names_outside_grammar(manifest: Manifest | None) -> list[str]:
    """The files that only the manifest knows to be ours; they are written into the record that lets it go."""
    return sorted(file.name for file in manifest.files if not grammatical(file.name)) if manifest is not None else []


def _promised(fate: Record | None) -> str:
    return str(fate.data.get("manifest", "")) if fate is not None else ""


async def _proved(tier: Tier, attempt: Attempt, digest: str) -> Manifest:
    """The tier's manifest; read a second time where it came garbled, for a bad read is no bad copy."""
    failure: TierStoreError | None = None
    for _ in range(2):
        try:
            data = await tier.storage.read(attempt.path(MANIFEST))
            if digest_of(data) == digest:
                return decode_manifest(data)
            failure = IntegrityError("its manifest is not the one that was committed", hint="run `tierstore verify`", tier=tier.name)
        except IntegrityError as error:
            failure = error
    assert failure is not None
    raise failure
