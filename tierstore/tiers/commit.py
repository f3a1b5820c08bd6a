"""The commit: all parts are there, so index and manifest are written, then one record makes the checkpoint exist (PROTOCOLS.md §4).

Everything that a committer writes is a function of the parts alone, so any process may take over at any instant, and any number may
race: they write the same bytes, and one of them wins record ``000000``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tierstore.clock import Clock, parse_utc
from tierstore.crashpoints import reach
from tierstore.errors import (
    CondemnedError,
    ConflictError,
    FormatError,
    IncompleteError,
    IntegrityError,
    UsageError,
    VersionError,
)
from tierstore.format.digest import block_digests, digest_of, file_digest
from tierstore.format.index import Index, check_coverage, decode_index, encode_index, head_nbytes, merge_indexes
from tierstore.format.manifest import LOSSY_GENERATION, FileRecord, Manifest, decode_manifest, encode_manifest
from tierstore.format.objects import load_objects, merge_objects
from tierstore.format.record import Record
from tierstore.names import INDEX, MANIFEST, OBJECTS, Attempt, save_id_time
from tierstore.storage.contract import FileInfo, Storage
from tierstore.tiers.gathering import Gathered, Gathering, PackedObjects
from tierstore.tiers.index_pages import opening_nbytes
from tierstore.tiers.log import decide_fate, files_told, read_fate, taken_told
from tierstore.tiers.log_facts import COMMITTED_AGAIN
from tierstore.tiers.tier import Tiers

__all__ = ["commit", "condemned_error"]

log = logging.getLogger(__name__)

_POLL_FIRST_S = 0.05
_POLL_LAST_S = 2.0


async def commit(
    tiers: Tiers,
    attempt: Attempt,
    *,
    deadline_s: float | None,
    clock: Clock,
    world_size: int | None = None,
    condemn: bool = True,
) -> Record:
    """Commits an attempt on the authority once all its parts are there; any process may call it, any number of times.

    Args:
        tiers: The store's tiers; everything happens on the authority.
        attempt: The attempt.
        deadline_s: Seconds to wait for missing parts; 0 looks once, None waits for ever.
        clock: The deadline's and the record's clock.
        world_size: How many ranks save together, where the caller knows; else the first part says it.
        condemn: Past the deadline, condemn the attempt; False leaves its fate open.

    Returns:
        The commit record: ours, or that of whoever was first.

    Raises:
        CondemnedError: Somebody condemned the attempt, or the deadline passed (``context["missing"]``: ranks), or the ranks' parts
            contradict each other, which no waiting can mend.
        IncompleteError: Parts are missing and `condemn` is off.
        OutcomeUnknownError: The commit was sent, its answer lost, and the record can't be read back.
    """
    storage = tiers.authority.storage
    end = None if deadline_s is None else clock.monotonic() + deadline_s
    gathering = Gathering(storage=storage, attempt=attempt, world_size=world_size)
    pause = _POLL_FIRST_S
    while True:
        fate = await read_fate(storage, attempt)
        if fate is not None:
            return _accept(fate, attempt)
        await gathering.look()
        if gathering.complete:
            parts = gathering.take()
            again = gathering.documented
            return await _commit(tiers, attempt, parts, clock, condemn=condemn, seen=gathering.seen, again=again)
        if end is not None and clock.monotonic() >= end:
            missing, reasons = gathering.missing(), gathering.explain()
            if not condemn:
                raise IncompleteError(
                    f"step {attempt.step} of run {attempt.run!r} can't commit yet: {reasons}",
                    hint="the attempt stays as it is; `tierstore recover` finishes it when all parts are there",
                    run=attempt.run,
                    step=attempt.step,
                    missing=missing,
                )
            facts = {"reason": reasons, "missing": missing, "world_size": gathering.world_size}
            return _accept(await decide_fate(storage, attempt, "condemned", facts, clock), attempt)
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _POLL_LAST_S)


def condemned_error(record: Record, attempt: Attempt) -> CondemnedError:
    """The error for an attempt whose fate is ``condemned``; names the reason and the missing ranks."""
    reason = str(record.data.get("reason") or "no reason was given")
    missing = [r for r in record.data.get("missing") or () if isinstance(r, int)]
    return CondemnedError(
        f"step {attempt.step} of run {attempt.run!r} (attempt {attempt.save_id}) was condemned by {record.actor}: {reason}",
        hint="this attempt can't be loaded any more; save the step again" + (" once all ranks are up" if missing else ""),
        run=attempt.run,
        step=attempt.step,
        missing=missing,
    )


def _accept(fate: Record, attempt: Attempt) -> Record:
    if fate.kind == "condemned":
        raise condemned_error(fate, attempt)
    return fate


async def _commit(
    tiers: Tiers, attempt: Attempt, parts: list[Gathered], clock: Clock, *, condemn: bool, seen: Mapping[str, FileInfo], again: bool
) -> Record:
    storage = tiers.authority.storage
    world_size = len(parts)
    records, first = [part.record for part in parts], _facts_of(parts)
    try:
        index, objects = await asyncio.to_thread(_merge, parts)
    except (IncompleteError, FormatError, UsageError) as error:
        # The parts are final and contradict each other: no waiting mends that.
        if not condemn:
            raise
        facts = {"reason": f"the ranks' parts do not make a whole: {error.message}", "missing": [], "world_size": world_size}
        try:
            return _accept(await decide_fate(storage, attempt, "condemned", facts, clock), attempt)
        except CondemnedError as condemned:
            raise condemned from error

    parts.clear()  # all that they say is merged: a large checkpoint's need not be in memory twice
    reach("commit.before-objects")
    objects = await _publish(storage, attempt, OBJECTS, objects, lambda found: _remerged(found) == objects)

    encoded = await asyncio.to_thread(encode_index, index, _index_metadata(attempt))
    reach("commit.before-index")
    encoded = await _publish(storage, attempt, INDEX, encoded, lambda found: encode_index(*decode_index(found)) == encoded)

    manifest = build_manifest(tiers.store_id, attempt, first, records, index, objects=objects, encoded_index=encoded)
    document = encode_manifest(manifest)
    reach("commit.before-manifest")
    document = await _publish(storage, attempt, MANIFEST, document, lambda found: _same_files(found, manifest))

    reach("commit.before-record")
    besides = manifest.nbytes - sum(info.nbytes for info in seen.values())
    facts = {**commit_facts(manifest, document), **_server_facts(seen), **taken_told(seen, besides=besides)}
    if again:
        facts[COMMITTED_AGAIN] = True
    fate = _accept(await decide_fate(storage, attempt, "committed", facts, clock), attempt)
    reach("commit.after-record")
    if fate.data.get("manifest") != facts["manifest"]:
        raise IntegrityError(
            f"step {attempt.step} of run {attempt.run!r} was committed by {fate.actor} with another manifest than its parts give",
            hint="run `tierstore verify` on this step, and save it again",
            run=attempt.run,
            step=attempt.step,
        )
    log.info("run=%s step=%d save_id=%s nbytes=%d committed", attempt.run, attempt.step, attempt.save_id, manifest.nbytes)
    return fate


def _merge(parts: list[Gathered]) -> tuple[Index, bytes]:
    merged = merge_indexes([part.index for part in parts], labels=[f"rank {part.rank}" for part in parts])
    check_coverage(merged)
    return merged, merge_objects(PackedObjects(parts))


def _facts_of(parts: Sequence[Gathered]) -> dict[str, Any]:
    """What the first rank tells; but the ranks may have resumed from different copies, and one that is lossy counts for all of them."""
    told = [part.facts.get(LOSSY_GENERATION) for part in parts]
    generation = max((n for n in told if type(n) is int), default=0)
    return {**parts[0].facts, **({LOSSY_GENERATION: generation} if generation > 0 else {})}


def _index_metadata(attempt: Attempt) -> dict[str, Any]:
    return {"run": attempt.run, "step": attempt.step, "save_id": attempt.save_id}


def build_manifest(
    store_id: str,
    attempt: Attempt,
    facts: Mapping[str, Any],
    parts: Sequence[FileRecord],
    index: Index,
    *,
    objects: bytes,
    encoded_index: bytes,
) -> Manifest:
    """The manifest as a function of the parts: the same for every committer, whoever and whenever it is.

    Args:
        store_id: The store.
        attempt: The attempt.
        facts: What the first rank's part says of the checkpoint.
        parts: The part records' files, one a rank.
        index: The merged index.
        objects: The merged objects.
        encoded_index: The index as it is written.
    """
    block_nbytes = index.block_nbytes

    def file(name: str, data: bytes, kind: str) -> FileRecord:
        return FileRecord(name=name, nbytes=len(data), digest=file_digest(block_digests(data, block_nbytes)), kind=kind)

    files = [FileRecord(name=f.name, nbytes=f.nbytes, digest=f.digest, kind="shard") for f in index.files()]
    files += parts
    head = head_nbytes(encoded_index) or 0
    index_file = file(INDEX, encoded_index, "index")
    if head:
        index_file = replace(index_file, head_nbytes=head, head_digest=digest_of(memoryview(encoded_index)[:head]))
    files += [file(OBJECTS, objects, "objects"), index_file]
    return Manifest(
        store_id=store_id,
        run=attempt.run,
        step=attempt.step,
        save_id=attempt.save_id,
        world_size=len(parts),
        block_nbytes=block_nbytes,
        created_at=parse_utc(facts["created_at"]) if "created_at" in facts else save_id_time(attempt.save_id),
        files=tuple(sorted(files, key=lambda f: f.name)),
        tensors=len(index),
        extents=index.extent_count,
        nbytes=sum(f.nbytes for f in files),
        metrics=dict(facts.get("metrics") or {}),
        tags=tuple(facts.get("tags") or ()),
        final=bool(facts.get("final", False)),
        facts={name: value for name, value in facts.items() if name not in ("created_at", "metrics", "tags", "final")},
    )


def commit_facts(manifest: Manifest, document: bytes) -> dict[str, Any]:
    """What the commit record says: the manifest's digest, and all that a catalog needs without opening the manifest."""
    return {
        "manifest": digest_of(document),
        "manifest_nbytes": len(document),
        "opening": opening_nbytes(manifest),
        "nbytes": manifest.nbytes,
        "world_size": manifest.world_size,
        "metrics": dict(manifest.metrics),
        "tags": list(manifest.tags),
        "final": manifest.final,
    }


def _server_facts(seen: Mapping[str, FileInfo]) -> dict[str, Any]:
    """What the authority's server says of each shard; nothing where it says nothing. The small files are read and proved by every look."""
    return files_told({name: info for name, info in seen.items() if info.etag or info.checksum})


def _remerged(objects: bytes) -> bytes:
    return merge_objects({rank: data for ranks, data in load_objects(objects) for rank in ranks})


def _same_files(document: bytes, manifest: Manifest) -> bool:
    other = decode_manifest(document)
    return (other.run, other.step, other.save_id, other.files) == (manifest.run, manifest.step, manifest.save_id, manifest.files)


async def _publish(storage: Storage, attempt: Attempt, name: str, data: bytes, same: Callable[[bytes], bool]) -> bytes:
    """Writes one of the committer's files once; returns the bytes that are there.

    A racer, or a committer that died, may have written it before: the bytes are the same then. A committer of another version may
    have encoded the same content differently, and may be about to commit it, so its bytes stay and are taken over (`same` compares
    the content). Anything else under that name is no committer's work and is replaced.
    """
    path = attempt.path(name)
    try:
        await storage.create(path, data)
    except ConflictError as error:
        existing = error.context.get("existing")
        found = bytes(existing) if existing is not None else await storage.read(path)
        try:
            taken_over = found == data or await asyncio.to_thread(same, found)
        except VersionError:
            raise
        except IntegrityError:
            taken_over = False
        if taken_over:
            return found
        fate = await read_fate(storage, attempt)
        if fate is not None:
            return found  # it is decided already: the caller compares the digests
        log.warning("checkpoint=%s file=%s is not what its parts give and is replaced", attempt.folder, name)
        await storage.put(path, data)
    return data
